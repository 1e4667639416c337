//! The thread that reads what the server sends, and gives each reply to whoever it is for.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Instant;

use super::connection::{Shared, To};
use super::greeted;
use crate::device::DeviceError;
use crate::rpc::connection::{DueReplies, ReadError, ReplyReader, Requester, Timeouts};
use crate::rpc::transport::{Receiver, TransportError};
use crate::rpc::wire::{RESPONSE_HEADER, ResponseHeader};

pub(super) type Reader = ReplyReader<Shared>;

/// # Errors
/// [`DeviceError::Exhausted`] without a thread.
pub(super) fn start(shared: Arc<Shared>, receiver: Receiver) -> Result<(), DeviceError> {
    let reader = Reader::new(Arc::clone(&shared), receiver);
    let ends = Ends(shared);
    let thread = std::thread::Builder::new().name("rpc-replies".to_owned());
    let started = thread.spawn(move || serve(reader, &ends));
    started.map(drop).map_err(|e| DeviceError::no_thread("that reads replies", &e))
}

/// However the thread ends: nobody waits for replies that nobody reads.
struct Ends(Arc<Shared>);

impl Deref for Ends {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.fail("nobody reads its replies any more");
    }
}

fn serve(mut reader: Reader, shared: &Ends) {
    let next = if shared.session.is_some() { greeted::notice } else { response };
    loop {
        if let Err(e) = next(&mut reader).and_then(|()| reader.check_overdue()) {
            shared.fail(shared.reason(e));
            return;
        }
    }
}

/// Reads one response of 7.0.
fn response(reader: &mut Reader) -> Result<(), ReadError> {
    let mut header = [0; RESPONSE_HEADER];
    reader.read_exact(&mut header)?;
    reader.reply(ResponseHeader::decode(&header).size)
}

impl Requester for Shared {
    type To = To;
    type Failure = DeviceError;

    fn replies(&self) -> &DueReplies<To, DeviceError> {
        &self.replies
    }

    fn timeouts(&self) -> Timeouts {
        let heartbeat = self.session.is_some().then_some(self.patience / 3);
        Timeouts { silence: self.patience, reply: self.longest, heartbeat }
    }

    fn give(&self, to: To, body: Vec<u8>) -> Result<(), String> {
        to.give(Ok(body))
    }

    fn oldest(&self) -> Option<(&'static str, Instant)> {
        self.oldest_due()
    }

    fn last_taken(&self) -> Option<Instant> {
        Some(self.taken())
    }

    fn ping(&self) {
        self.send_ping();
    }

    fn count_received(&self, bytes: usize) {
        self.count(bytes);
    }
}

impl Shared {
    /// Why the connection ends, for whoever uses it.
    fn reason(&self, e: ReadError) -> String {
        match e {
            ReadError::Ended | ReadError::Lost(TransportError::Reset(_) | TransportError::Closed) => {
                match self.oldest_due() {
                    Some((command, _)) => {
                        format!("the server closed the connection while {command} was due; its log says why")
                    }
                    None => "the server closed the connection; its log says why".to_owned(),
                }
            }
            ReadError::Lost(TransportError::Io(e)) => e.to_string(),
            ReadError::Lost(e) => e.to_string(),
            ReadError::Silent { command, after } => {
                format!("the server said nothing for {after:?} while {command} was due")
            }
            ReadError::Overdue { command, after } => format!("the server did not answer {command} within {after:?}"),
            ReadError::Unasked => "the server sent a reply that nothing had asked for".to_owned(),
            ReadError::Length { command, size, len } => {
                let (least, most) = len.into_inner();
                let asked = if least == most { least.to_string() } else { format!("{least} to {most}") };
                format!("the server answered {command} with {size} bytes, {asked} were asked for")
            }
            ReadError::Reply { command, reason } => format!("the server answered {command} with nonsense: {reason}"),
            e @ ReadError::Memory { .. } => e.to_string(),
            ReadError::Notice(reason) => reason,
        }
    }
}

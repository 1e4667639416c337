//! The reader thread of a connection: reads replies and notifications, and delivers each reply to its sink. It also detects the
//! loss of the server: an end of the stream, an overdue reply, an invalid message.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Instant;

use super::connection::{ConnectionShared, ReplySink};
use super::extended;
use crate::device::DeviceError;
use crate::rpc::connection::{DueReplies, ReadError, ReplyReader, Requester, Timeouts};
use crate::rpc::transport::{Receiver, TransportError};
use crate::rpc::wire::{RESPONSE_HEADER, ResponseHeader};

pub(super) type ConnectionReader = ReplyReader<ConnectionShared>;

/// Starts the reader thread.
///
/// # Errors
/// [`DeviceError::Exhausted`] when the system cannot start the thread.
pub(super) fn start(shared: Arc<ConnectionShared>, receiver: Receiver) -> Result<(), DeviceError> {
    let reader = ConnectionReader::new(Arc::clone(&shared), receiver);
    let fail_on_exit = FailOnExit(shared);
    let thread = std::thread::Builder::new().name("rpc-replies".to_owned());
    let started = thread.spawn(move || read_replies(reader, &fail_on_exit));
    started.map(drop).map_err(|e| DeviceError::thread_spawn_failed("that reads replies", &e))
}

/// Fails the connection when the reader thread ends for any reason, including a panic: otherwise, callers would wait for
/// replies forever.
struct FailOnExit(Arc<ConnectionShared>);

impl Deref for FailOnExit {
    type Target = ConnectionShared;

    fn deref(&self) -> &ConnectionShared {
        &self.0
    }
}

impl Drop for FailOnExit {
    fn drop(&mut self) {
        self.0.fail("the thread that reads its replies has ended");
    }
}

fn read_replies(mut reader: ConnectionReader, shared: &FailOnExit) {
    let next = if shared.session.is_some() { extended::read_notification } else { read_response };
    loop {
        if let Err(e) = next(&mut reader).and_then(|()| reader.check_overdue()) {
            shared.fail(shared.loss_reason(e));
            return;
        }
    }
}

/// Reads one response of 7.0.
fn read_response(reader: &mut ConnectionReader) -> Result<(), ReadError> {
    let mut header = [0; RESPONSE_HEADER];
    reader.read_exact(&mut header)?;
    reader.read_reply(ResponseHeader::decode(&header).size)
}

impl Requester for ConnectionShared {
    type Sink = ReplySink;
    type Failure = DeviceError;

    fn replies(&self) -> &DueReplies<ReplySink, DeviceError> {
        &self.replies
    }

    fn timeouts(&self) -> Timeouts {
        let heartbeat = self.session.is_some().then_some(self.silence_timeout / 3);
        Timeouts { silence: self.silence_timeout, reply: self.reply_timeout, heartbeat }
    }

    fn deliver(&self, sink: ReplySink, body: Vec<u8>) -> Result<(), String> {
        sink.deliver(Ok(body))
    }

    fn oldest_request_due(&self) -> Option<(&'static str, Instant)> {
        self.oldest_due()
    }

    fn last_write_time(&self) -> Option<Instant> {
        Some(self.last_write_progress())
    }

    fn send_heartbeat(&self) {
        self.send_ping();
    }

    fn count_received(&self, bytes: usize) {
        self.add_received(bytes);
    }
}

impl ConnectionShared {
    /// Describes a read error as the reason for the loss of the connection.
    fn loss_reason(&self, e: ReadError) -> String {
        match e {
            ReadError::Ended | ReadError::Lost(TransportError::Reset(_) | TransportError::Closed) => {
                match self.oldest_due() {
                    Some((command, _)) => {
                        format!("the server closed the connection while {command} was due; see its log for the reason")
                    }
                    None => "the server closed the connection; see its log for the reason".to_owned(),
                }
            }
            ReadError::Lost(TransportError::Io(e)) => e.to_string(),
            ReadError::Lost(e) => e.to_string(),
            ReadError::Silent { command, after } => {
                format!("the server sent nothing for {after:?} while {command} was due")
            }
            ReadError::Overdue { command, after } => format!("the server did not reply to {command} within {after:?}"),
            ReadError::Unexpected => "the server sent an unsolicited reply".to_owned(),
            ReadError::Length { command, size, len } => {
                let (least, most) = len.into_inner();
                let expected = if least == most { least.to_string() } else { format!("{least} to {most}") };
                format!("the server replied to {command} with {size} bytes, expected {expected}")
            }
            ReadError::InvalidReply { command, reason } => {
                format!("the server sent an invalid reply to {command}: {reason}")
            }
            e @ ReadError::Memory { .. } => e.to_string(),
            ReadError::Notification(reason) => reason,
        }
    }
}

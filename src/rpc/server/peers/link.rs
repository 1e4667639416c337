//! A connection to another server, to which a session's bytes are sent. This server is a client there.
//!
//! A thread of its own dials, and then reads what the other server sends: behind the last PUT of each SEND comes a PING, whose
//! reply tells that all of them were taken. Until then the SEND's queue fails if the connection ends.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::dial::dial;
use super::{Fail, PeerList, Times};
use crate::rpc::connection::{
    DueReplies, DueReply, Handshake, MessageWriter, Poisoned, ReadError, ReplyReader, Requester, Timeouts, WriteSlot,
};
use crate::rpc::transport::{Aborter, Deadline, TransportError};
use crate::rpc::wire::WireError;
use crate::rpc::wire::ext::Ticket;
use crate::rpc::wire::ext::{
    Answer, ExtCommand, ExtRequest, NOTICE_HEADER, Notice, NoticeHeader, NoticeKind, Ping, Put,
};

/// The longest notice that has a place here: a text that says why.
const NOTICE: u64 = 64 << 10;

/// How long a sender that could not write waits for the other server's own word on it.
const LAST_WORDS: Duration = Duration::from_secs(1);

pub(super) struct Link {
    /// As the client gave it.
    address: String,
    times: Times,
    stage: Mutex<Stage>,
    changed: Condvar,
    /// `None` until the connection is up.
    writer: WriteSlot<Option<MessageWriter>>,
    /// Of PINGs: each holds the queue that fails where the bytes before it may be lost. Fails with the reason.
    replies: DueReplies<Fail, String>,
}

enum Stage {
    Dialling,
    Up(Aborter),
    Down,
}

impl Link {
    /// Dials `address`, if `list` has it, on a thread of the link's own.
    pub(super) fn start(address: &str, list: &Arc<PeerList>, times: Times) -> Result<Arc<Link>, String> {
        let link = Arc::new(Link {
            address: address.to_owned(),
            times,
            stage: Mutex::new(Stage::Dialling),
            changed: Condvar::new(),
            writer: WriteSlot::new(None),
            replies: DueReplies::new(),
        });
        let (own, list) = (Arc::clone(&link), Arc::clone(list));
        let started = std::thread::Builder::new().name("peer".to_owned()).spawn(move || own.serve(&list));
        started.map_err(|e| format!("{address}: cannot start a thread for the connection: {e}"))?;
        Ok(link)
    }

    pub(super) fn is_down(&self) -> bool {
        self.replies.failure().is_some()
    }

    /// Waits for the connection.
    ///
    /// # Errors
    /// Why there is none, or none until then.
    pub(super) fn up(&self, until: Instant) -> Result<(), String> {
        let mut stage = self.lock();
        loop {
            match &*stage {
                Stage::Up(_) => return Ok(()),
                Stage::Down => return Err(self.replies.failure().unwrap_or_default()),
                Stage::Dialling => {}
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.say("no connection in time"));
            }
            stage = self.changed.wait_timeout(stage, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sends the bytes of a ticket. With the last of a SEND comes the queue that fails if they are not known to have been taken.
    ///
    /// # Errors
    /// Why the connection ended.
    pub(super) fn put(&self, ticket: Ticket, data: &[u8], last: Option<&Fail>) -> Result<(), String> {
        self.up(Instant::now() + self.times.handshake)?;
        let sent = self.writer.with(|writer| -> Result<_, String> {
            let Some(writer) = writer else { return Ok(Err(TransportError::cut())) };
            ExtRequest::Put(Put { ticket, data }).encode(writer.buffer());
            if let Some(fail) = last {
                ExtRequest::Ping(Ping {}).encode(writer.buffer());
                // Any notice's length: a reply that is none is told by what it is.
                let due = self.replies.expect(ExtCommand::Ping.name(), 0..=NOTICE, Arc::clone(fail));
                due.map_err(|(why, _)| why)?;
            }
            // A message that is cut off can be followed by nothing more. The flush has waited for room: the end does not.
            Ok(writer.flush().inspect_err(|_| _ = writer.finish(&Deadline::after(Duration::ZERO))))
        });
        let Err(e) = sent.unwrap_or_else(|Poisoned| Ok(Err(TransportError::cut())))? else { return Ok(()) };
        // What the other server has sent tells more than this error.
        let why = self.replies.wait_failure(LAST_WORDS);
        Err(why.unwrap_or_else(|| {
            self.down(&match e {
                TransportError::TimedOut { .. } => format!("it took nothing within {:?}", self.times.stall),
                e => e.to_string(),
            })
        }))
    }

    /// Ends it with its session: no queue is left that could fail.
    pub(super) fn close(&self) {
        // Fails where the connection has ended before.
        let _ = self.end(self.say("the session has ended"));
    }

    /// Ends it, if it has not ended; why it did. All queues fail whose bytes may be lost.
    fn down(&self, why: &str) -> String {
        let why = self.say(why);
        match self.end(why.clone()) {
            Ok(sent) => {
                sent.iter().for_each(|ping| (ping.sink)(super::failure(&self.address, why.clone())));
                why
            }
            Err(first) => first,
        }
    }

    /// Ends it; the PINGs that have no reply. `Err`: it has ended before, for this reason.
    fn end(&self, why: String) -> Result<VecDeque<DueReply<Fail>>, String> {
        let sent = self.replies.fail(why)?;
        if let Stage::Up(aborter) = std::mem::replace(&mut *self.lock(), Stage::Down) {
            aborter.abort();
        }
        self.changed.notify_all();
        Ok(sent)
    }

    fn say(&self, why: &str) -> String {
        format!("{}: {why}", self.address)
    }

    fn serve(self: Arc<Link>, list: &PeerList) {
        let deadline = Deadline::after(self.times.handshake);
        let dialled = list.targets(&self.address).and_then(|targets| dial(&targets, &deadline));
        let Handshake { aborter, receiver, sender, .. } = match dialled {
            Ok(handshake) => handshake,
            Err(why) => {
                self.down(&why);
                return;
            }
        };
        // Before anyone sees that it is up: a writer that is not there is a message that is cut off.
        let writer = MessageWriter::new(sender, self.times.stall);
        // No thread has panicked with a writer that none has had.
        let _ = self.writer.with(|slot| *slot = Some(writer));
        let mut stage = self.lock();
        match *stage {
            Stage::Dialling => *stage = Stage::Up(aborter),
            // It was closed meanwhile.
            Stage::Up(_) | Stage::Down => return aborter.abort(),
        }
        drop(stage);
        self.changed.notify_all();
        let mut reader = ReplyReader::new(Arc::clone(&self), receiver);
        while !self.is_down() {
            if let Err(e) = notice(&mut reader).and_then(|()| reader.check_overdue()) {
                self.down(&self.reason(e));
            }
        }
    }

    fn reason(&self, e: ReadError) -> String {
        match e {
            ReadError::Ended => "it closed the connection".to_owned(),
            ReadError::Silent { after, .. } | ReadError::Overdue { after, .. } => {
                format!("it has not said within {after:?} that it took the bytes")
            }
            ReadError::Unexpected => "it answers what nobody asked".to_owned(),
            ReadError::InvalidReply { reason, .. } | ReadError::Notification(reason) => reason,
            e @ (ReadError::Lost(_) | ReadError::Length { .. } | ReadError::Memory { .. }) => e.to_string(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Stage> {
        // Changes are single assignments: a panic elsewhere cannot have left it torn.
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Requester for Link {
    type Sink = Fail;
    type Failure = String;

    fn replies(&self) -> &DueReplies<Fail, String> {
        &self.replies
    }

    /// No heartbeat: all that a link is for has a PING behind it.
    fn timeouts(&self) -> Timeouts {
        Timeouts { silence: self.times.stall, reply: self.times.stall, heartbeat: None }
    }

    /// A peer that sends its longest notice byte by byte must not put off the end of a queue for weeks.
    fn takes_short_messages_only(&self) -> bool {
        true
    }

    /// The bytes before a PING were taken: nobody is told.
    fn deliver(&self, _: Fail, body: Vec<u8>) -> Result<(), String> {
        Answer::decode(ExtCommand::Ping, &body).map(drop).map_err(|e| e.to_string())
    }
}

/// Takes one notice.
fn notice(reader: &mut ReplyReader<Link>) -> Result<(), ReadError> {
    let wrong = |e: WireError| ReadError::Notification(e.to_string());
    let mut header = [0; NOTICE_HEADER];
    reader.read_exact(&mut header)?;
    let NoticeHeader { kind, size } = NoticeHeader::decode(&header).map_err(wrong)?;
    if size > NOTICE {
        return Err(ReadError::Notification(format!("it sent a notice of {size} bytes that nobody asked for")));
    }
    if kind == NoticeKind::Reply {
        return reader.read_reply(size);
    }
    let body = reader.read_bytes(size, "a notice")?;
    match Notice::decode(kind, &body).map_err(wrong)? {
        Notice::Refused(why) => Err(ReadError::Notification(format!("it refuses what it was sent: {why}"))),
        Notice::Reply(_) | Notice::State(_) => Ok(()),
        Notice::Reached { .. } | Notice::Data { .. } | Notice::Failed { .. } => {
            Err(ReadError::Notification("it speaks of a queue that nobody opened".to_owned()))
        }
    }
}

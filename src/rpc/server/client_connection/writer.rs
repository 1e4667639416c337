//! The sending half of a client's connection: whole messages, from each thread of the session that has one.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::rpc::connection::{MessageWriter, WriteSlot};
use crate::rpc::transport::{Aborter, Deadline, Sender, TransportError};
use crate::rpc::wire::ext::Notice;

/// How long a client that is refused may take to read why.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// What a client has to be able to take.
const UNREAD: &str = "the client took none of its reply";

/// Writes messages one at a time.
pub(in crate::rpc::server) struct Writer {
    aborter: Aborter,
    stall: Duration,
    writer: WriteSlot<MessageWriter>,
    /// Why a thread that is not the session's could send nothing more.
    given_up: Mutex<Option<(&'static str, TransportError)>>,
}

impl Writer {
    /// Writes to a client that takes something at least every `stall`.
    pub(in crate::rpc::server) fn new(sender: Sender, aborter: Aborter, stall: Duration) -> Arc<Writer> {
        let writer = WriteSlot::new(MessageWriter::new(sender, stall));
        Arc::new(Writer { aborter, stall, writer, given_up: Mutex::default() })
    }

    /// Sends what `head` puts into the empty buffer, and `parts` behind it, with nothing of another thread between: in one
    /// write, or without copying what is large. Nothing is sent where `head` puts nothing there.
    pub(in crate::rpc::server) fn send(
        &self,
        head: impl FnOnce(&mut Vec<u8>),
        parts: &[impl AsRef<[u8]>],
    ) -> Result<(), TransportError> {
        self.write(|writer| {
            head(writer.buffer());
            if writer.buffer().is_empty() { Ok(()) } else { writer.flush_with(parts) }
        })
    }

    /// Sends bytes as they are.
    pub(in crate::rpc::server) fn send_bytes(&self, bytes: &[u8]) -> Result<(), TransportError> {
        self.write(|writer| writer.send_bytes(bytes))
    }

    fn write(&self, work: impl FnOnce(&mut MessageWriter) -> Result<(), TransportError>) -> Result<(), TransportError> {
        // A thread that panics while it writes leaves a message cut off.
        let sent = self.writer.with(work).unwrap_or_else(|_| Err(TransportError::cut()));
        sent.map_err(|e| e.naming(UNREAD, self.stall))
    }

    /// Sends a notice that has no large data.
    pub(in crate::rpc::server) fn notice(&self, notice: &Notice<'_>) -> Result<(), TransportError> {
        self.send(|out| notice.encode(out), &[] as &[&[u8]])
    }

    /// Ends the connection for a thread that could not send what it had to; the session, which may wait for the client,
    /// finds out by that. A client that left without waiting for it is no reason.
    pub(in crate::rpc::server) fn give_up(&self, what: &'static str, broken: TransportError) {
        if !broken.is_reset() {
            self.reason().get_or_insert((what, broken));
        }
        self.close();
    }

    /// What some thread gave up for, once.
    pub(in crate::rpc::server) fn given_up(&self) -> Option<(&'static str, TransportError)> {
        self.reason().take()
    }

    /// Ends the connection, whichever thread has it open yet.
    pub(in crate::rpc::server) fn close(&self) {
        self.aborter.abort();
    }

    /// Says why the connection ends, and ends it. What the client has sent meanwhile is read for a moment: a system that is
    /// left with unread bytes may throw away what the client has not read either. The session must not read any more.
    pub(in crate::rpc::server) fn refuse(&self, reason: &str) {
        // Whatever goes wrong, the connection ends, and its reason is in the log.
        let _ = self.write(|writer| {
            Notice::Refused(reason).encode(writer.buffer());
            writer.flush()?;
            writer.linger(&Deadline::after(LAST_WORDS))
        });
        self.close();
    }

    fn reason(&self) -> MutexGuard<'_, Option<(&'static str, TransportError)>> {
        // Changes are single assignments.
        self.given_up.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! Sending half of a client's connection: any thread of the session sends whole messages through it. A client that reads too
//! slowly blocks the sending thread (backpressure), and a client that stops reading is disconnected.

use crate::poison::lock;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::rpc::connection::MessageWriter;
use crate::rpc::server::audit::SessionAudit;
use crate::rpc::transport::{Aborter, Deadline, Sender, TransportError};
use crate::rpc::wire::ext::Notification;

/// How long the connection lingers after the reason of its end was sent, so that the client can read the reason.
const REFUSAL_LINGER: Duration = Duration::from_secs(1);

/// Error text of a client that stopped reading.
const CLIENT_STALLED: &str = "the client read no bytes of its reply";

/// Serializes the messages of several threads onto one connection.
pub(in crate::rpc::server) struct ClientWriter {
    aborter: Aborter,
    stall_timeout: Duration,
    /// Locked while a thread writes, which may block on the client for up to the stall timeout.
    writer: Mutex<MessageWriter>,
    /// Counts the sent bytes.
    audit: Arc<SessionAudit>,
    /// First failed write of a thread other than the session's: the name of its message, and the error.
    write_failure: Mutex<Option<(&'static str, TransportError)>>,
}

impl ClientWriter {
    /// A new writer. Its writes fail with a timeout if the client reads no byte for `stall_timeout`.
    pub(in crate::rpc::server) fn new(
        sender: Sender,
        aborter: Aborter,
        stall_timeout: Duration,
        audit: &Arc<SessionAudit>,
    ) -> Arc<ClientWriter> {
        let writer = Mutex::new(MessageWriter::new(sender, stall_timeout));
        let audit = Arc::clone(audit);
        Arc::new(ClientWriter { aborter, stall_timeout, writer, audit, write_failure: Mutex::default() })
    }

    /// Sends one message: the bytes that `head` appends to an empty buffer, followed by `parts`. No other thread can send in
    /// between. Small parts are sent in the same write; large parts are sent without a copy. Sends nothing if `head` appends
    /// nothing.
    pub(in crate::rpc::server) fn send(
        &self,
        head: impl FnOnce(&mut Vec<u8>),
        parts: &[impl AsRef<[u8]>],
    ) -> Result<(), TransportError> {
        self.with_writer(|writer| {
            head(writer.buffer());
            if writer.buffer().is_empty() {
                return Ok(());
            }
            let bytes = writer.buffer().len() + parts.iter().map(|part| part.as_ref().len()).sum::<usize>();
            writer.flush_with(parts)?;
            self.audit.count_sent(bytes);
            Ok(())
        })
    }

    /// Sends bytes without a header, as part of a message that the caller has begun.
    pub(in crate::rpc::server) fn send_bytes(&self, bytes: &[u8]) -> Result<(), TransportError> {
        self.with_writer(|writer| writer.send_bytes(bytes))?;
        self.audit.count_sent(bytes.len());
        Ok(())
    }

    fn with_writer(
        &self,
        work: impl FnOnce(&mut MessageWriter) -> Result<(), TransportError>,
    ) -> Result<(), TransportError> {
        // Poisoned: a thread that panicked while it wrote has left a truncated message, after which nothing can be sent.
        let mut writer = self.writer.lock().map_err(|_| TransportError::cut())?;
        self.audit.set_writing(true);
        let sent = work(&mut writer);
        self.audit.set_writing(false);
        sent.map_err(|e| e.with_timeout_details(CLIENT_STALLED, self.stall_timeout))
    }

    /// Sends a notification, which is copied: without large data.
    pub(in crate::rpc::server) fn send_notification(
        &self,
        notification: &Notification<'_>,
    ) -> Result<(), TransportError> {
        self.send(|out| notification.encode(out), &[] as &[&[u8]])
    }

    /// Records that another thread than the session's could not send `message`, and closes the connection. The session's
    /// thread, which may be blocked in a read, notices the failure by the closed connection. A connection that the client has
    /// closed is not recorded as a failure.
    pub(in crate::rpc::server) fn fail(&self, message: &'static str, error: TransportError) {
        if !error.is_reset() {
            lock(&self.write_failure).get_or_insert((message, error));
        }
        self.close();
    }

    /// Takes the failure that [`ClientWriter::fail`] recorded.
    pub(in crate::rpc::server) fn take_failure(&self) -> Option<(&'static str, TransportError)> {
        lock(&self.write_failure).take()
    }

    /// Closes the connection, also for threads that are blocked on it.
    pub(in crate::rpc::server) fn close(&self) {
        self.aborter.abort();
    }

    /// Sends the reason for which the connection ends, then closes the connection. Before that, bytes that the client has sent
    /// are read and discarded for up to [`REFUSAL_LINGER`]: a close with unread input resets the connection, and the reset can
    /// destroy the reason before the client has read it. The session must not read any more.
    pub(in crate::rpc::server) fn close_with_reason(&self, reason: &str) {
        // Errors are ignored: the connection is closed in any case, and the caller has logged the reason.
        let _ = self.with_writer(|writer| {
            Notification::ProtocolError(reason).encode(writer.buffer());
            writer.flush()?;
            writer.linger(&Deadline::after(REFUSAL_LINGER))
        });
        self.close();
    }
}

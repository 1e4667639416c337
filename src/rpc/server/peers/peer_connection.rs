//! Connection to another server, on which this server is a client that sends PEER_WRITEs.
//!
//! The connection's own thread dials, and then reads replies and notifications. Acknowledgement: a PING is sent after the last
//! PEER_WRITE of each SEND_TO_PEER. Its reply proves that the remote server has received all bytes before it. If the connection
//! ends before that reply, the queue of the SEND_TO_PEER fails.

use crate::sync::{self, Arc, Condvar, Instant, Mutex, Unpoisoned, lock, thread};
use std::collections::VecDeque;
use std::time::Duration;

use super::dial::describe_transport_error;
use super::message::{MAX_MESSAGE_BYTES, PeerMessage, read_message};
use super::{FailQueue, PeerDialer, PeerTimeouts};
use crate::rpc::connection::{DueReplies, DueReply, Handshake, MessageWriter};
use crate::rpc::transport::{Aborter, Deadline, Receiver, TransportError};
use crate::rpc::wire::ext::{ExtCommand, ExtRequest, ExtResponse, PeerWrite, Ping};

/// After a failed write, how long to wait for a PROTOCOL_ERROR with the remote server's reason.
const ERROR_REASON_TIMEOUT: Duration = Duration::from_secs(1);

/// A connection of one session to another server.
pub(super) struct PeerConnection {
    /// As the client sent it.
    address: String,
    timeouts: PeerTimeouts,
    state: Mutex<PeerConnectionState>,
    /// Notified when `state` changes.
    changed: Condvar,
    /// `None` until the connection is established.
    writer: Mutex<Option<MessageWriter>>,
    /// Outstanding PINGs, each with the callback that fails the queue of the acknowledged bytes. Its failure is the reason
    /// why the connection ended.
    replies: DueReplies<FailQueue, String>,
}

enum PeerConnectionState {
    Dialling,
    Connected(Aborter),
    Closed,
}

impl PeerConnection {
    /// Starts the connection's thread, which dials. The thread keeps the dialer, with its reservation, until it ends: an attempt
    /// to connect may outlive the session. Does not wait for the connection.
    ///
    /// # Errors
    /// That the thread cannot be started.
    pub(super) fn start(dialer: PeerDialer) -> Result<Arc<PeerConnection>, String> {
        let address = dialer.address.clone();
        let connection = Arc::new(PeerConnection {
            address: address.clone(),
            timeouts: dialer.timeouts,
            state: Mutex::new(PeerConnectionState::Dialling),
            changed: Condvar::new(),
            writer: Mutex::default(),
            replies: DueReplies::new(),
        });
        let thread_connection = Arc::clone(&connection);
        let run = move || thread_connection.dial_and_read(&dialer);
        let started = thread::Builder::new().name("peer".to_owned()).spawn(run);
        started.map_err(|e| format!("{address}: cannot start a thread for the connection: {e}"))?;
        Ok(connection)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.replies.failure().is_some()
    }

    /// Waits until the connection is established.
    ///
    /// # Errors
    /// Why it could not be established, or that it was not established until `until`.
    pub(super) fn wait_until_connected(&self, until: Instant) -> Result<(), String> {
        let mut state = lock(&self.state);
        loop {
            match &*state {
                PeerConnectionState::Connected(_) => return Ok(()),
                PeerConnectionState::Closed => return Err(self.replies.failure().unwrap_or_default()),
                PeerConnectionState::Dialling => {}
            }
            let remaining = until.saturating_duration_since(sync::now());
            if remaining.is_zero() {
                return Err(self.with_address("no connection in time"));
            }
            state = self.changed.wait_timeout(state, remaining).unpoisoned().0;
        }
    }

    /// Sends a piece of a transfer. For the last piece of a SEND_TO_PEER, `last` is the callback that fails its queue; a PING is sent after the piece, and `last` is called if no reply arrives.
    ///
    /// # Errors
    /// Why the connection ended.
    pub(super) fn send_piece(&self, piece: PeerWrite<'_>, last: Option<&FailQueue>) -> Result<(), String> {
        self.wait_until_connected(sync::now() + self.timeouts.handshake)?;
        let Err(e) = self.write_piece(piece, last)? else { return Ok(()) };
        // A PROTOCOL_ERROR from the remote server explains more than the error of the write.
        let why = self.replies.wait_failure(ERROR_REASON_TIMEOUT);
        Err(why.unwrap_or_else(|| {
            self.fail(&match e {
                TransportError::TimedOut { .. } => format!("it has received no bytes for {:?}", self.timeouts.stall),
                e => describe_transport_error(&e),
            })
        }))
    }

    /// Writes a piece with exclusive use of the writer. The inner error ends the connection.
    fn write_piece(
        &self,
        piece: PeerWrite<'_>,
        last: Option<&FailQueue>,
    ) -> Result<Result<(), TransportError>, String> {
        // Poisoned: a thread that panicked while it wrote has left a truncated message.
        let Ok(mut writer) = self.writer.lock() else { return Ok(Err(TransportError::cut())) };
        let Some(writer) = &mut *writer else { return Ok(Err(TransportError::cut())) };
        ExtRequest::PeerWrite(piece).encode(writer.buffer());
        if let Some(fail) = last {
            ExtRequest::Ping(Ping {}).encode(writer.buffer());
            // Accepts every length up to the limit: decoding reports an invalid reply more precisely than its length does.
            let expected = self.replies.expect(ExtCommand::Ping.name(), 0..=MAX_MESSAGE_BYTES, Arc::clone(fail));
            expected.map_err(|(why, _)| why)?;
        }
        // A truncated message makes the stream unusable, so the connection is closed. `flush` has already waited for the
        // socket's buffer to drain, so `finish` does not wait again.
        Ok(writer.flush().inspect_err(|_| _ = writer.finish(&Deadline::after(Duration::ZERO))))
    }

    /// Closes the connection with its session. No queue is failed, because the session's queues are closed.
    pub(super) fn close(&self) {
        // An error means that the connection has ended before.
        let _ = self.close_with_reason(self.with_address("the session has ended"));
    }

    /// Closes the connection and fails the queues with unacknowledged bytes. Returns the reason why the connection
    /// ended, which is an earlier one if it was closed before.
    fn fail(&self, why: &str) -> String {
        let why = self.with_address(why);
        match self.close_with_reason(why.clone()) {
            Ok(sent) => {
                sent.iter().for_each(|ping| (ping.sink)(super::copy_failure(&self.address, why.clone())));
                why
            }
            Err(first) => first,
        }
    }

    /// Closes the connection. Returns the PINGs without a reply.
    ///
    /// # Errors
    /// The reason of an earlier close.
    fn close_with_reason(&self, why: String) -> Result<VecDeque<DueReply<FailQueue>>, String> {
        let sent = self.replies.fail(why)?;
        if let PeerConnectionState::Connected(aborter) =
            std::mem::replace(&mut *lock(&self.state), PeerConnectionState::Closed)
        {
            aborter.abort();
        }
        self.changed.notify_all();
        Ok(sent)
    }

    fn with_address(&self, why: &str) -> String {
        format!("{}: {why}", self.address)
    }

    /// The connection's thread: dials, then reads notifications until the connection ends.
    fn dial_and_read(self: Arc<PeerConnection>, dialer: &PeerDialer) {
        let Handshake { aborter, mut receiver, sender, .. } = match dialer.dial() {
            Ok(handshake) => handshake,
            Err(why) => {
                self.fail(&why);
                return;
            }
        };
        // Must precede the state change: a sender that finds the connection established without a writer treats it as broken.
        let writer = MessageWriter::new(sender, self.timeouts.stall);
        *self.writer.lock().unpoisoned() = Some(writer);
        let mut state = lock(&self.state);
        match *state {
            PeerConnectionState::Dialling => *state = PeerConnectionState::Connected(aborter),
            // It was closed while dialling.
            PeerConnectionState::Connected(_) | PeerConnectionState::Closed => return aborter.abort(),
        }
        drop(state);
        self.changed.notify_all();
        let mut last_reply = sync::now();
        while !self.is_closed() {
            if let Err(why) = self.read_next(&mut receiver, &mut last_reply) {
                self.fail(&why);
            }
        }
    }

    /// Waits for the next message, up to the time at which the oldest PING is overdue. A server that sends other messages is not
    /// silent, but its replies still have that deadline. No heartbeat: a connection without a PING has nothing to lose.
    ///
    /// # Errors
    /// Why the connection is of no use: a text for the client.
    fn read_next(&self, receiver: &mut Receiver, last_reply: &mut Instant) -> Result<(), String> {
        let stall = self.timeouts.stall;
        let left = || {
            // A PING that is sent meanwhile is due later than this.
            let since = self.replies.front().map_or_else(sync::now, |(.., since)| since.max(*last_reply));
            (since + stall).saturating_duration_since(sync::now())
        };
        match read_message(receiver, &Deadline::after(left()), stall)? {
            Some(PeerMessage::Reply(body)) => {
                // It acknowledges the bytes before its PING. The sink, which fails the queue, is dropped unused.
                let unexpected = || "it sent a reply that no request is waiting for".to_owned();
                self.replies.pop().ok_or_else(unexpected)?;
                *last_reply = sync::now();
                ExtResponse::decode(ExtCommand::Ping, &body)
                    .map(drop)
                    .map_err(|_| "it sent an invalid reply".to_owned())
            }
            _ if left().is_zero() => Err(format!("it has not confirmed the bytes within {stall:?}")),
            _ => Ok(()),
        }
    }
}

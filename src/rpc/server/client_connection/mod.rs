//! Connection to one client: reads framed requests, writes replies and notifications, with a deadline on each message.
//!
//! The session's thread owns the [`ClientConnection`]. Its sending half, the [`ClientWriter`] (`writer.rs`), is shared with the
//! other threads of the session. Not here: the meaning of messages, which the front ends decode.

mod body_buffer;
mod pace;
mod writer;

pub(super) use body_buffer::BodyBuffer;
pub(super) use writer::ClientWriter;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pace::Pace;
use thiserror::Error;

use crate::device::AdaptiveSpin;
use crate::rpc::connection::{ByteSource, MAX_UNREAD, ReadAhead};
use crate::rpc::server::audit::SessionAudit;
use crate::rpc::server::hangup_watch::SessionWatch;
use crate::rpc::server::host_memory::{BASE_BODY_BYTES, HostMemoryError, SessionMemory};
use crate::rpc::transport::{self, Deadline, PeerAddr, Receiver, TransportError};
use crate::rpc::wire::{MAX_UPLOAD_HEAD, REQUEST_HEADER, Response, ResponseHeader};

/// Spin-then-park: longest time that a session polls for the next request before its thread sleeps. The pause between two
/// tokens of a small model is shorter, so that decoding never pays for a wake-up; after a longer pause the latency of a wake-up
/// does not matter.
const MAX_SPIN: Duration = Duration::from_millis(2);

/// Shortest time after which a connection is lost whose client acknowledges nothing. A longer stall timeout extends it: a
/// client that does not read looks the same to the system.
const MIN_LOSS_TIMEOUT: Duration = Duration::from_secs(120);

/// How long a client may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timeouts {
    /// From the accepted connection to a complete HELLO.
    pub(super) handshake: Duration,
    /// For a part of a message that has begun, and for a pause of a reply.
    pub(super) stall: Duration,
    /// For the pause before a request. `None`: any time.
    pub(super) idle: Option<Duration>,
}

/// Why there is no next request.
#[derive(Debug, Error)]
pub(super) enum NextRequestError {
    #[error("the client has sent no request within {0:?} (idle-timeout in --limits)")]
    Idle(Duration),
    #[error(transparent)]
    Transport(#[from] TransportError),
}

/// Why the body of a request could not be read.
#[derive(Debug, Error)]
pub(super) enum ReadBodyError {
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error(transparent)]
    Memory(#[from] HostMemoryError),
}

/// Framed connection to a client.
pub(super) struct ClientConnection {
    idle_timeout: Option<Duration>,
    requests: RequestSource,
    read_ahead: ReadAhead,
    writer: Arc<ClientWriter>,
    watch: Arc<SessionWatch>,
    memory: Arc<SessionMemory>,
    /// Whether a request is being served: `watch` counts its beginning and its end.
    serving: bool,
}

/// The receiving half, with the deadline of each read.
struct RequestSource {
    receiver: Receiver,
    /// Counts the received bytes.
    audit: Arc<SessionAudit>,
    /// Whether the last request was replied to.
    replied: bool,
    /// Adaptive spins for the next request after a request without a reply `[0]` and after a reply `[1]`: the client's pauses
    /// differ.
    spins: [AdaptiveSpin; 2],
    /// Between two messages: how long the client may pause. `None` within a message, whose bytes must keep pace.
    max_pause: Option<Duration>,
    /// How fast the bytes of the current message arrive.
    pace: Pace,
    /// The deadline of the handshake; `None` once it is complete.
    handshake: Option<Deadline>,
}

impl ByteSource for RequestSource {
    type Error = TransportError;

    fn ended() -> TransportError {
        TransportError::Closed
    }

    fn receive(&mut self, dst: &mut [u8]) -> Result<usize, TransportError> {
        let got = match (&self.handshake, self.max_pause) {
            // One deadline for the whole handshake: a client that sends single bytes must not extend it.
            (Some(handshake), _) => {
                let late = || TransportError::TimedOut { what: "no complete HELLO", after: handshake.timeout() };
                handshake.remaining().ok_or_else(late)?;
                self.receiver.read_into(dst, handshake).map_err(|e| if e.is_timeout() { late() } else { e })?
            }
            (None, Some(max)) => self.receiver.read_into(dst, &Deadline::after(max))?,
            (None, None) => {
                let start = Instant::now();
                self.audit.set_reading(true);
                let got = self.receiver.read_into(dst, &Deadline::after(self.pace.remaining()));
                self.audit.set_reading(false);
                self.pace.record(start.elapsed(), got.as_ref().map_or(0, |&bytes| bytes));
                got.map_err(|e| e.with_timeout_details("no more bytes of the message", self.pace.limit()))?
            }
        };
        self.audit.count_received(got);
        Ok(got)
    }

    fn receive_ahead(&mut self, dst: &mut [u8]) -> Result<usize, TransportError> {
        if self.handshake.is_some() {
            return self.receive(dst);
        }
        // After a reply the client computes or samples a token; without a reply it is likely to be sending the next request.
        let spin = usize::from(std::mem::take(&mut self.replied));
        let since = self.spins[spin].spin(|| self.receiver.readable());
        let got = self.receive(dst);
        self.spins[spin].record(since);
        got
    }
}

impl ClientConnection {
    /// A new connection, whose handshake begins now. `audit` counts its bytes.
    pub(super) fn new(
        connection: transport::Connection,
        watch: Arc<SessionWatch>,
        memory: Arc<SessionMemory>,
        timeouts: Timeouts,
        audit: &Arc<SessionAudit>,
    ) -> ClientConnection {
        connection.set_loss_timeout(timeouts.stall.max(MIN_LOSS_TIMEOUT));
        let aborter = connection.aborter();
        let (receiver, sender) = connection.split();
        let requests = RequestSource {
            receiver,
            audit: Arc::clone(audit),
            replied: false,
            max_pause: None,
            spins: [AdaptiveSpin::new(MAX_SPIN), AdaptiveSpin::new(MAX_SPIN)],
            pace: Pace::new(timeouts.stall),
            handshake: Some(Deadline::after(timeouts.handshake)),
        };
        ClientConnection {
            idle_timeout: timeouts.idle,
            requests,
            read_ahead: ReadAhead::new(),
            writer: ClientWriter::new(sender, aborter, timeouts.stall, audit),
            watch,
            memory,
            serving: false,
        }
    }

    /// Ends the time limit of the handshake. From now on the stall timeout and the idle timeout apply.
    pub(super) fn end_handshake(&mut self) {
        self.requests.handshake = None;
    }

    /// Reads the next header. Ends the request that was served before. `None` if the client closed the connection between two
    /// messages.
    ///
    /// After the handshake the client may be idle for the idle timeout. Work of its queues does not extend that: only requests
    /// count, among them the PINGs by which a client of the extension shows that it is there.
    pub(super) fn read_header(&mut self) -> Result<Option<[u8; REQUEST_HEADER]>, NextRequestError> {
        let idle = self.idle_timeout.map(Deadline::after);
        self.requests.pace.restart();
        if std::mem::take(&mut self.serving) {
            self.watch.count_boundary();
            self.requests.audit.set_command(None);
        }
        // Requests of a client that has left, or whose key was removed, are not served although they have arrived.
        if self.watch.has_hung_up() {
            return Ok(None);
        }
        while self.read_ahead.is_empty() {
            let left = idle.map_or(Duration::MAX, |idle| idle.remaining().unwrap_or_default());
            match self.fill_within(left) {
                Ok(true) => {}
                Ok(false) => return Ok(None),
                Err(e) if e.is_timeout() && self.requests.handshake.is_none() => {
                    if let Some(idle) = idle.filter(|idle| idle.remaining().is_none()) {
                        return Err(NextRequestError::Idle(idle.timeout()));
                    }
                }
                Err(e) if e.is_reset() => {
                    self.requests.audit.set_reset();
                    return Ok(None);
                }
                Err(e) => return Err(e.into()),
            }
        }
        let mut header = [0; REQUEST_HEADER];
        self.read_exact(&mut header)?;
        self.serving = true;
        self.watch.count_boundary();
        self.requests.audit.set_command(Some(header[0]));
        Ok(Some(header))
    }

    /// Leaves the protocol: the connection, and the bytes after `header` that were received.
    pub(super) fn into_raw(mut self, header: [u8; REQUEST_HEADER]) -> (transport::Connection, Vec<u8>) {
        let received = [&header[..], &self.read_ahead.take()].concat();
        (self.requests.receiver.into_connection(), received)
    }

    /// The client. It has proved its key once its first bytes have arrived.
    pub(super) fn peer(&self) -> PeerAddr {
        self.requests.receiver.peer()
    }

    /// The session's part of the hang-up watch.
    pub(super) fn watch(&self) -> &Arc<SessionWatch> {
        &self.watch
    }

    /// What the session has used.
    pub(super) fn audit(&self) -> &SessionAudit {
        &self.requests.audit
    }

    /// The session's host memory.
    pub(super) fn memory(&self) -> &Arc<SessionMemory> {
        &self.memory
    }

    /// Receives bytes ahead of their message: for up to `timeout`, or until the end of the handshake. They do not count for the
    /// pace of the message. Returns false at the end of the stream.
    fn fill_within(&mut self, timeout: Duration) -> Result<bool, TransportError> {
        self.requests.max_pause = Some(timeout);
        let filled = self.read_ahead.fill(&mut self.requests);
        self.requests.max_pause = None;
        filled
    }

    /// Waits for received bytes, or the end of the stream, for up to `timeout`. Returns whether there are any.
    pub(super) fn wait_for_input(&mut self, timeout: Duration) -> Result<bool, TransportError> {
        if !self.read_ahead.is_empty() {
            return Ok(true);
        }
        match self.fill_within(timeout) {
            Ok(_) => Ok(true),
            Err(e) if e.is_timeout() => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Whether received bytes are waiting to be read.
    pub(super) fn has_unread_input(&self) -> bool {
        !self.read_ahead.is_empty() || self.requests.receiver.readable()
    }

    /// Whether the client has closed its connection: a wait for something else is then of no use.
    pub(super) fn hung_up(&self) -> bool {
        self.requests.receiver.hung_up()
    }

    /// The address of this server to which the client has connected. `None` for a transport without IP addresses.
    pub(super) fn local_addr(&self) -> Option<SocketAddr> {
        self.requests.receiver.local_addr()
    }

    /// Reads the next `N` bytes of a message.
    pub(super) fn read_array<const N: usize>(&mut self) -> Result<[u8; N], TransportError> {
        let mut bytes = [0; N];
        self.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Fills `dst` with the next bytes of a message. A large `dst` is filled directly from the transport, without a copy.
    pub(super) fn read_exact(&mut self, dst: &mut [u8]) -> Result<(), TransportError> {
        self.read_ahead.read_exact(dst, &mut self.requests)
    }

    /// Returns the bytes that were read last, at most [`MAX_UNREAD`], so that the next read has them again.
    pub(super) fn unread(&mut self, bytes: &[u8]) {
        const { assert!(MAX_UPLOAD_HEAD <= MAX_UNREAD, "the longest start of a message that is read again") }
        self.read_ahead.unread(bytes);
    }

    /// Reads a body of `len` bytes into `into`, a buffer that the caller reuses. The buffer grows as bytes arrive, to at most
    /// twice the received bytes: a client that only announces a large body must not make the server allocate it. While host
    /// memory is short, no more bytes are read, which is backpressure on the client.
    ///
    /// # Errors
    /// The connection is lost, or the host memory is not available in time or is needed for others.
    pub(super) fn read_body<'a>(&mut self, len: usize, into: &'a mut BodyBuffer) -> Result<&'a [u8], ReadBodyError> {
        self.read_body_behind(0, len, into)?;
        Ok(into.message(len))
    }

    /// As [`ClientConnection::read_body`], with `gap` bytes of any content in front, a few.
    pub(super) fn read_body_behind(
        &mut self,
        gap: usize,
        len: usize,
        into: &mut BodyBuffer,
    ) -> Result<(), ReadBodyError> {
        let _unfinished = self.memory.begin_message(len);
        // An eviction closes the connection, so that the read fails.
        let read = self.read_into_body(gap, gap + len, into);
        read.map_err(|e| self.memory.eviction().map_or(e, ReadBodyError::Memory))
    }

    fn read_into_body(&mut self, gap: usize, len: usize, into: &mut BodyBuffer) -> Result<(), ReadBodyError> {
        let mut have = gap;
        while have < len {
            if into.bytes_mut().len() <= have {
                into.grow((2 * have).max(BASE_BODY_BYTES).min(len))?;
            }
            let until = into.bytes_mut().len().min(len);
            self.read_exact(&mut into.bytes_mut()[have..until])?;
            have = until;
        }
        Ok(())
    }

    /// Reads and discards the next `len` bytes of a message.
    pub(super) fn discard(&mut self, len: u64) -> Result<(), TransportError> {
        self.read_ahead.skip(len, &mut self.requests)
    }

    /// The sending half, which the other threads of the session share.
    pub(super) fn writer(&self) -> &Arc<ClientWriter> {
        &self.writer
    }

    /// Sends a reply in one write.
    pub(super) fn send_response(&mut self, response: &Response<'_>) -> Result<(), TransportError> {
        self.requests.replied = true;
        self.writer.send(|out| response.encode(out), &[] as &[&[u8]])
    }

    /// Sends the header of a reply of `size` bytes, and `first`, the first of these bytes. The caller sends the rest with
    /// [`ClientConnection::send_bytes`].
    pub(super) fn begin_response(&mut self, size: u64, first: &[u8]) -> Result<(), TransportError> {
        self.requests.replied = true;
        self.writer.send(|out| out.extend_from_slice(&ResponseHeader { size }.encode()), &[first])
    }

    /// Sends further bytes of a reply that [`ClientConnection::begin_response`] began.
    pub(super) fn send_bytes(&mut self, bytes: &[u8]) -> Result<(), TransportError> {
        self.writer.send_bytes(bytes)
    }
}

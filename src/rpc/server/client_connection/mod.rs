//! One client's connection: frames in, replies out, and a deadline on each. The session's thread has a [`ClientConnection`]; its
//! sending half is a [`Writer`], which the session's other threads share.

mod writer;

pub(super) use writer::Writer;

use std::sync::Arc;
use std::time::Duration;

use crate::rpc::adaptive_spin::AdaptiveSpin;
use crate::rpc::connection::{ByteSource, ReadAhead};
use crate::rpc::transport::{self, Deadline, Receiver, TransportError};
use crate::rpc::wire::{REQUEST_HEADER, Response, ResponseHeader};

/// A session parks where the next message is further away: one that decodes a small model is not, whatever its client does
/// with a token, and one that waits longer does not notice that it is woken late.
const SPIN: Duration = Duration::from_millis(2);

/// The first piece in which room for a body is made.
const FIRST_PIECE: usize = 64 << 10;

/// A framed connection.
pub(super) struct ClientConnection {
    requests: Requests,
    ahead: ReadAhead,
    writer: Arc<Writer>,
}

/// What the client sends, with the deadlines that it has for it.
struct Requests {
    receiver: Receiver,
    /// Whether the last message had an answer, and how long the next one takes after one that had none, or had one.
    answered: bool,
    spins: [AdaptiveSpin; 2],
    stall: Duration,
    /// The end of the handshake, as long as it lasts.
    handshake: Option<Deadline>,
}

impl ByteSource for Requests {
    type Error = TransportError;

    fn receive(&mut self, dst: &mut [u8]) -> Result<usize, TransportError> {
        let Some(handshake) = &self.handshake else {
            let got = self.receiver.read_into(dst, &Deadline::after(self.stall));
            return got.map_err(|e| e.naming("no more bytes of the message", self.stall));
        };
        // The whole handshake has one deadline, however slowly its bytes drip.
        let late = || TransportError::TimedOut { what: "no complete HELLO", after: handshake.given() };
        handshake.left().ok_or_else(late)?;
        self.receiver.read_into(dst, handshake).map_err(|e| if e.is_timeout() { late() } else { e })
    }

    fn receive_ahead(&mut self, dst: &mut [u8]) -> Result<usize, TransportError> {
        if self.handshake.is_some() {
            return self.receive(dst);
        }
        // A client that has its answer thinks; others are in the middle of what they have to say.
        let kind = usize::from(std::mem::take(&mut self.answered));
        let since = self.spins[kind].spin(|| self.receiver.readable());
        let got = self.receive(dst);
        self.spins[kind].record(since);
        got
    }
}

impl ClientConnection {
    /// A connection whose handshake must be done within `handshake` from now.
    pub(super) fn new(connection: transport::Connection, handshake: Duration, stall: Duration) -> ClientConnection {
        let aborter = connection.aborter();
        let (receiver, sender) = connection.split();
        let requests = Requests {
            receiver,
            answered: false,
            spins: [AdaptiveSpin::new(SPIN), AdaptiveSpin::new(SPIN)],
            stall,
            handshake: Some(Deadline::after(handshake)),
        };
        ClientConnection { requests, ahead: ReadAhead::new(), writer: Writer::new(sender, aborter, stall) }
    }

    /// The handshake is over: from now on only a message that has begun must go on.
    pub(super) fn handshaken(&mut self) {
        self.requests.handshake = None;
    }

    /// The next header; `None` when the client has closed the connection between two messages.
    pub(super) fn header(&mut self) -> Result<Option<[u8; REQUEST_HEADER]>, TransportError> {
        while self.ahead.is_empty() {
            match self.ahead.fill(&mut self.requests) {
                Ok(true) => {}
                Ok(false) => return Ok(None),
                // Silence between messages is no fault, once the client has introduced itself.
                Err(e) if e.is_timeout() && self.requests.handshake.is_none() => {}
                Err(e) if e.is_reset() => return Ok(None),
                Err(e) => return Err(e),
            }
        }
        self.array().map(Some)
    }

    /// Whether something has come that was not read yet.
    pub(super) fn is_due(&self) -> bool {
        !self.ahead.is_empty() || self.requests.receiver.readable()
    }

    /// The next `N` bytes of a message.
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], TransportError> {
        let mut bytes = [0; N];
        self.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Fills `dst` with the next bytes of a message; large ones come straight from the transport.
    pub(super) fn read_exact(&mut self, dst: &mut [u8]) -> Result<(), TransportError> {
        if self.ahead.read_exact(dst, &mut self.requests)? { Ok(()) } else { Err(TransportError::Closed) }
    }

    /// Reads a body of `len` bytes into a buffer that is kept for the next one. It grows as bytes arrive: never to more
    /// than twice what is there.
    pub(super) fn body<'a>(&mut self, len: usize, into: &'a mut Vec<u8>) -> Result<&'a [u8], TransportError> {
        let mut have = 0;
        while have < len {
            if into.len() == have {
                let room = (2 * have).max(FIRST_PIECE).min(len);
                into.reserve_exact(room - have);
                into.resize(room, 0);
            }
            let until = into.len().min(len);
            self.read_exact(&mut into[have..until])?;
            have = until;
        }
        Ok(&into[..len])
    }

    /// Reads the next `len` bytes of a message and drops them.
    pub(super) fn discard(&mut self, len: u64) -> Result<(), TransportError> {
        if self.ahead.skip(len, &mut self.requests)? { Ok(()) } else { Err(TransportError::Closed) }
    }

    /// The sending half, for the other threads of the session.
    pub(super) fn writer(&self) -> &Arc<Writer> {
        &self.writer
    }

    /// Sends a whole reply in one write.
    pub(super) fn send(&mut self, response: &Response<'_>) -> Result<(), TransportError> {
        self.requests.answered = true;
        self.writer.send(|out| response.encode(out), &[] as &[&[u8]])
    }

    /// Sends the header of a reply of `size` bytes with the first of them; [`ClientConnection::send_bytes`] sends the rest.
    pub(super) fn send_first(&mut self, size: u64, first: &[u8]) -> Result<(), TransportError> {
        self.requests.answered = true;
        self.writer.send(|out| out.extend_from_slice(&ResponseHeader { size }.encode()), &[first])
    }

    /// Sends bytes as they are.
    pub(super) fn send_bytes(&mut self, bytes: &[u8]) -> Result<(), TransportError> {
        self.writer.send_bytes(bytes)
    }
}

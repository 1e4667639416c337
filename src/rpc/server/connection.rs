//! One client's socket: frames in, replies out, and a deadline on each.

use std::io::{self, ErrorKind, Read};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use thiserror::Error;

use super::outgoing::Outgoing;
use crate::rpc::hunch::Hunch;
use crate::rpc::socket;
use crate::rpc::wire::{REQUEST_HEADER, Response, ResponseHeader};

/// Bytes read ahead: a header with a small body, or many of them, cost one read.
const BUFFER: usize = 16 << 10;

/// A session sleeps where the next message is further away: one that decodes a small model is not, whatever its client does
/// with a token, and one that waits longer does not notice that it is woken late.
const SHORT: Duration = Duration::from_millis(2);

/// The first piece in which room for a body is made.
const FIRST_PIECE: usize = 64 << 10;

/// A connection that cannot go on.
#[derive(Debug, Error)]
pub(super) enum Broken {
    #[error("the client went away in the middle of a message")]
    Ended,
    #[error("stalled: {what} within {after:?}")]
    Stalled { what: &'static str, after: Duration },
    #[error("connection lost: {0}")]
    Io(#[from] io::Error),
}

impl Broken {
    /// A failure of the socket, on which `what` came within `after`.
    pub(super) fn of(e: io::Error, what: &'static str, after: Duration) -> Broken {
        if timed_out(&e) { Broken::Stalled { what, after } } else { Broken::Io(e) }
    }

    /// How a client that is killed, or has not read everything, ends a connection.
    pub(super) fn is_leaving(&self) -> bool {
        use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset};
        matches!(self, Broken::Io(e) if matches!(e.kind(), ConnectionReset | ConnectionAborted | BrokenPipe))
    }
}

/// A framed connection. `Arc`: the server holds the stream too, to close it.
pub(super) struct Connection {
    stream: Arc<TcpStream>,
    out: Arc<Outgoing>,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// Whether the last message had an answer, and how long the next one takes after one that had none, or had one.
    answered: bool,
    hunches: [Hunch; 2],
    stall: Duration,
    /// The end of the handshake, as long as it lasts, and how long it may take.
    handshake: Option<(Instant, Duration)>,
}

impl Connection {
    /// A connection whose handshake must be done within `handshake` from now.
    pub(super) fn new(stream: Arc<TcpStream>, handshake: Duration, stall: Duration) -> io::Result<Connection> {
        Ok(Connection {
            out: Outgoing::new(&stream, stall)?,
            stream,
            buffer: vec![0; BUFFER].into(),
            start: 0,
            end: 0,
            answered: false,
            hunches: [Hunch::new(SHORT), Hunch::new(SHORT)],
            stall,
            handshake: Some((Instant::now() + handshake, handshake)),
        })
    }

    /// The handshake is over: from now on only a message that has begun must go on.
    pub(super) fn handshaken(&mut self) -> Result<(), Broken> {
        self.handshake = None;
        Ok(self.stream.set_read_timeout(Some(positive(self.stall)))?)
    }

    /// The next header; `None` when the client has closed the connection between two messages.
    pub(super) fn header(&mut self) -> Result<Option<[u8; REQUEST_HEADER]>, Broken> {
        while self.start == self.end {
            match self.fill() {
                Ok(0) => return Ok(None),
                Ok(_) => {}
                // Silence between messages is no fault, once the client has introduced itself.
                Err(Broken::Stalled { .. }) if self.handshake.is_none() => {}
                Err(e) if e.is_leaving() => return Ok(None),
                Err(e) => return Err(e),
            }
        }
        self.array().map(Some)
    }

    /// Whether something has come that was not read yet.
    pub(super) fn is_due(&self) -> bool {
        self.start < self.end || socket::comes(&self.stream)
    }

    /// The next `N` bytes of a message.
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], Broken> {
        let mut bytes = [0; N];
        self.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Fills `dst` with the next bytes of a message; large ones come straight from the socket.
    pub(super) fn read_exact(&mut self, mut dst: &mut [u8]) -> Result<(), Broken> {
        loop {
            let n = dst.len().min(self.end - self.start);
            dst[..n].copy_from_slice(&self.buffer[self.start..self.start + n]);
            self.start += n;
            dst = &mut dst[n..];
            let got = match dst.len() {
                0 => return Ok(()),
                1..BUFFER => self.fill()?,
                _ => {
                    let got = self.receive(dst)?;
                    dst = &mut dst[got..];
                    got
                }
            };
            if got == 0 {
                return Err(Broken::Ended);
            }
        }
    }

    /// Reads a body of `len` bytes into a buffer that is kept for the next one. It grows as bytes arrive: never to more
    /// than twice what is there.
    pub(super) fn body<'a>(&mut self, len: usize, into: &'a mut Vec<u8>) -> Result<&'a [u8], Broken> {
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
    pub(super) fn discard(&mut self, mut len: u64) -> Result<(), Broken> {
        while len > 0 {
            if self.start == self.end && self.fill()? == 0 {
                return Err(Broken::Ended);
            }
            let n = len.min((self.end - self.start) as u64);
            self.start += n as usize; // no more than there is
            len -= n;
        }
        Ok(())
    }

    /// The writing half, for whoever else writes.
    pub(super) fn out(&self) -> &Arc<Outgoing> {
        &self.out
    }

    /// Sends a whole reply in one write.
    pub(super) fn send(&mut self, response: &Response<'_>) -> Result<(), Broken> {
        self.answered = true;
        self.out.send(|out| response.encode(out), &[] as &[&[u8]])
    }

    /// Sends the header of a reply of `size` bytes with the first of them; [`Connection::send_bytes`] sends the rest.
    pub(super) fn send_first(&mut self, size: u64, first: &[u8]) -> Result<(), Broken> {
        self.answered = true;
        self.out.send(|out| out.extend_from_slice(&ResponseHeader { size }.encode()), &[first])
    }

    /// Sends bytes as they are.
    pub(super) fn send_bytes(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        self.out.send_bytes(bytes)
    }

    /// Reads ahead into the empty buffer.
    fn fill(&mut self) -> Result<usize, Broken> {
        // A client that has its answer thinks; others are in the middle of what they have to say.
        let hunch = usize::from(std::mem::take(&mut self.answered));
        let since = self.handshake.is_none().then(|| self.hunches[hunch].look(|| socket::comes(&self.stream)));
        let mut buffer = std::mem::take(&mut self.buffer);
        let got = self.receive(&mut buffer);
        self.buffer = buffer;
        if let Some(since) = since {
            self.hunches[hunch].learn(since);
        }
        self.start = 0;
        self.end = *got.as_ref().unwrap_or(&0);
        got
    }

    fn receive(&mut self, dst: &mut [u8]) -> Result<usize, Broken> {
        loop {
            if let Some((at, after)) = self.handshake {
                // The whole handshake has one deadline, however slowly its bytes drip.
                let left = at.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(Broken::Stalled { what: "no complete HELLO", after });
                }
                self.stream.set_read_timeout(Some(positive(left)))?;
            }
            match (&*self.stream).read(dst) {
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if self.handshake.is_some() && timed_out(&e) => {}
                got => return got.map_err(|e| Broken::of(e, "no more bytes of the message", self.stall)),
            }
        }
    }
}

/// The system refuses a timeout of zero.
pub(super) fn positive(timeout: Duration) -> Duration {
    timeout.max(Duration::from_millis(1))
}

fn timed_out(e: &io::Error) -> bool {
    matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

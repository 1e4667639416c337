//! Connections between a client and a server, or between two servers: ordered bytes in both directions.
//!
//! ```text
//! server, client, links between servers
//!         │ Receiver, Sender, Aborter      (deadlines, loops, typed errors: the same for every transport)
//!         ▼
//!     Transport ── tcp                     (one attempt each, never blocking; how to wait)
//!               └─ memory                  (tests: seeded splits, delays and cuts)
//! ```
//!
//! A connection is split into a [`Receiver`] and a [`Sender`], which two threads use at the same time; an [`Aborter`] ends it
//! from any thread. Only this module names sockets. How to add a transport: CONTRIBUTING.md.

mod address;
#[cfg(test)]
mod contract;
mod error;
#[cfg(test)]
pub(crate) mod memory;
mod poll;
mod tcp;

pub(crate) use address::{Address, PeerAddr, ResolveError, resolve};
pub use error::DialError;
pub(crate) use error::{ListenError, TransportError};

use std::fmt;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A deadline, with the time that it gave, which an error names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    at: Instant,
    after: Duration,
}

impl Deadline {
    /// Farther away than any process lives. `Instant` overflows at a time that depends on the system.
    const FOREVER: Duration = Duration::from_secs(1 << 32);

    /// `after` from now.
    pub(crate) fn after(after: Duration) -> Deadline {
        Deadline { at: Instant::now() + after.min(Deadline::FOREVER), after }
    }

    /// What is left of it; `None` when it has passed.
    pub(crate) fn left(&self) -> Option<Duration> {
        Some(self.at.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero())
    }

    /// The time that it gave.
    pub(crate) fn given(&self) -> Duration {
        self.after
    }
}

/// What a thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interest {
    Read,
    Write,
}

/// The contract of a transport: a stream of bytes in each direction, in order and without loss until the connection ends.
///
/// - **Threads**: one thread calls `try_read` and waits for [`Interest::Read`] while another one calls `try_write`, `try_flush`,
///   `try_finish` and waits for [`Interest::Write`]. All else is called by any thread at any time.
/// - **Blocking**: only `wait` blocks, and it holds no lock of the transport meanwhile: a reader that waits never keeps a writer
///   from writing, nor the reverse.
/// - **Readiness** concerns the bytes that `try_read` returns, not those of a socket: a transport that decrypts reports bytes that
///   it holds in plain text as readable though its socket is empty, and does not report half a record.
/// - **Handshakes** of the transport's own, such as TLS's, are lazy: the first attempts to read or write carry one out. They never
///   happen in [`Listen::accept`], where one slow client would keep out all others.
/// - **Messages of the transport's own** (handshake, key update): `try_read` and `wait` may write them, so the transport orders its
///   writes itself where it has any. The thread that causes such a message sends it: `wait` for [`Interest::Read`] sends what is
///   left before it sleeps, and where that finds no room, it also wakes for room. No thread may be writing that would do it.
/// - **Ends**: after `abort` each waiting thread wakes, reads see the end once the bytes that have come are used up, and writes
///   fail with [`TransportError::Reset`]. Dropping the last reference closes the connection.
pub(crate) trait Transport: fmt::Debug + Send + Sync {
    /// Moves bytes that have come straight into `dst`, which has room: `Some(0)` is the end of what the peer sends, `None` means
    /// that nothing has come.
    fn try_read(&self, dst: &mut [u8]) -> Result<Option<usize>, TransportError>;

    /// Takes bytes from the front of `src`, which has some, and says how many; `None` means that there is no room.
    fn try_write(&self, src: &[IoSlice<'_>]) -> Result<Option<usize>, TransportError>;

    /// Sends bytes that `try_write` has taken and kept, as a transport that encrypts whole records does. `false` means that there
    /// is no room for all of them.
    fn try_flush(&self) -> Result<bool, TransportError> {
        Ok(true)
    }

    /// Waits until an attempt would make progress, or fail. `false`: the deadline has passed. May wake early.
    fn wait(&self, interest: Interest, deadline: &Deadline) -> Result<bool, TransportError>;

    /// Whether `try_read` would return bytes, the end or an error. Called in a spin: takes no lock that a sender holds.
    fn readable(&self) -> bool;

    /// Ends the sending direction behind the bytes sent so far. The other direction goes on. `false` means that there is no room
    /// for all that the peer must receive for it, such as TLS's close_notify: the next attempt goes on. Idempotent.
    fn try_finish(&self) -> Result<bool, TransportError>;

    /// Ends both directions at once, from any thread. Idempotent.
    fn abort(&self);

    /// The other end, for the log.
    fn peer(&self) -> PeerAddr;
}

/// A connection before two threads share it.
#[derive(Debug)]
pub(crate) struct Connection(Arc<dyn Transport>);

impl Connection {
    pub(crate) fn new(transport: impl Transport + 'static) -> Connection {
        Connection(Arc::new(transport))
    }

    /// The other end, for the log.
    pub(crate) fn peer(&self) -> PeerAddr {
        self.0.peer()
    }

    /// Ends the connection, whoever uses it.
    pub(crate) fn aborter(&self) -> Aborter {
        Aborter(Arc::clone(&self.0))
    }

    /// The two halves.
    pub(crate) fn split(self) -> (Receiver, Sender) {
        (Receiver(Arc::clone(&self.0)), Sender(self.0))
    }
}

/// Ends a connection from any thread.
#[derive(Clone, Debug)]
pub(crate) struct Aborter(Arc<dyn Transport>);

impl Aborter {
    /// Ends both directions: threads that wait for the connection wake.
    pub(crate) fn abort(&self) {
        self.0.abort();
    }
}

/// The receiving half of a connection.
#[derive(Debug)]
pub(crate) struct Receiver(Arc<dyn Transport>);

impl Receiver {
    /// Whether a read would return at once, be it with the end. Lock-free.
    pub(crate) fn readable(&self) -> bool {
        self.0.readable()
    }

    /// Reads at least one byte straight into the caller's memory. 0: the peer sends no more.
    ///
    /// # Errors
    /// [`TransportError::TimedOut`] when nothing has come by the deadline; the connection can be read on.
    pub(crate) fn read_into(&mut self, dst: &mut [u8], deadline: &Deadline) -> Result<usize, TransportError> {
        loop {
            if let Some(n) = self.0.try_read(dst)? {
                return Ok(n);
            }
            if !self.0.wait(Interest::Read, deadline)? {
                return Err(TransportError::TimedOut { what: "nothing to read", after: deadline.given() });
            }
        }
    }

    /// Fills the caller's memory by the deadline, however slowly its bytes drip.
    ///
    /// # Errors
    /// [`TransportError::Closed`] when the peer sends fewer.
    pub(crate) fn read_exact(&mut self, mut dst: &mut [u8], deadline: &Deadline) -> Result<(), TransportError> {
        while !dst.is_empty() {
            match self.read_into(dst, deadline)? {
                0 => return Err(TransportError::Closed),
                n => dst = dst.get_mut(n..).unwrap_or_default(),
            }
            // A peer that drips bytes never lets the wait time out.
            if !dst.is_empty() && deadline.left().is_none() {
                return Err(TransportError::TimedOut { what: "nothing to read", after: deadline.given() });
            }
        }
        Ok(())
    }
}

/// The sending half of a connection.
#[derive(Debug)]
pub(crate) struct Sender(Arc<dyn Transport>);

impl Sender {
    /// Sends all bytes of `parts`, gathered from where they are.
    ///
    /// # Errors
    /// [`TransportError::TimedOut`] when the peer takes none of them for `stall`; what has left stays unknown.
    pub(crate) fn write_all(&mut self, parts: &[&[u8]], stall: Duration) -> Result<(), TransportError> {
        // Most messages are one part; a vector of slices on the heap is for the others.
        match parts {
            [] => Ok(()),
            [one] => self.write_slices(&mut [IoSlice::new(one)], stall),
            [one, two] => self.write_slices(&mut [IoSlice::new(one), IoSlice::new(two)], stall),
            many => self.write_slices(&mut many.iter().map(|part| IoSlice::new(part)).collect::<Vec<_>>(), stall),
        }
    }

    /// As [`Sender::write_all`], by a deadline for all of it.
    pub(crate) fn write_by(&mut self, bytes: &[u8], deadline: &Deadline) -> Result<(), TransportError> {
        let left = deadline.left().ok_or(TransportError::TimedOut { what: NOTHING_TAKEN, after: deadline.given() })?;
        self.write_all(&[bytes], left)
    }

    fn write_slices(&mut self, mut parts: &mut [IoSlice<'_>], stall: Duration) -> Result<(), TransportError> {
        // Leading empty slices would look like an end of the connection.
        IoSlice::advance_slices(&mut parts, 0);
        while !parts.is_empty() {
            match self.0.try_write(parts)? {
                Some(n) => IoSlice::advance_slices(&mut parts, n),
                None => {
                    let n = self.wait_for(&Deadline::after(stall), |transport| transport.try_write(parts))?;
                    IoSlice::advance_slices(&mut parts, n);
                }
            }
        }
        if !self.0.try_flush()? {
            self.wait_for(&Deadline::after(stall), |transport| Ok(transport.try_flush()?.then_some(())))?;
        }
        Ok(())
    }

    /// Repeats an attempt that found no room until it succeeds.
    fn wait_for<T>(
        &self,
        deadline: &Deadline,
        mut attempt: impl FnMut(&dyn Transport) -> Result<Option<T>, TransportError>,
    ) -> Result<T, TransportError> {
        loop {
            let in_time = self.0.wait(Interest::Write, deadline)?;
            // Also after the deadline: a system reports room only when there is much of it.
            if let Some(done) = attempt(&*self.0)? {
                return Ok(done);
            }
            if !in_time {
                return Err(TransportError::TimedOut { what: NOTHING_TAKEN, after: deadline.given() });
            }
        }
    }

    /// Half close: the peer sees the end behind what was sent so far.
    ///
    /// # Errors
    /// [`TransportError::TimedOut`] when there is no room for it by the deadline. One that has passed allows a single attempt.
    pub(crate) fn finish(&mut self, deadline: &Deadline) -> Result<(), TransportError> {
        if self.0.try_finish()? {
            return Ok(());
        }
        self.wait_for(deadline, |transport| Ok(transport.try_finish()?.then_some(())))
    }

    /// Reads and drops what the peer sends until its end or the deadline. The receiving half must be gone.
    pub(crate) fn drain(&mut self, deadline: &Deadline) -> Result<(), TransportError> {
        let (mut receiver, mut rest) = (Receiver(Arc::clone(&self.0)), [0; 4096]);
        // A peer that sends without a pause never lets the wait time out.
        while deadline.left().is_some() && receiver.read_into(&mut rest, deadline)? > 0 {}
        Ok(())
    }
}

const NOTHING_TAKEN: &str = "nothing taken";

/// A place where connections are accepted.
pub(crate) trait Listen: fmt::Debug + Send {
    /// The next connection; `None` when none has come by the deadline, or one that has come is gone already.
    ///
    /// # Errors
    /// The system has no descriptor or memory for one.
    fn accept(&self, deadline: &Deadline) -> Result<Option<Connection>, TransportError>;

    /// Where clients connect: of an IP address, with the actual port.
    fn local_addr(&self) -> Address;

    /// Ends a wait in `accept`, from any thread.
    fn waker(&self) -> Box<dyn Fn() + Send + Sync>;
}

/// Listens on a host, given as IPv4 or IPv6 address or as a name. Port 0: the system picks one.
///
/// # Errors
/// [`ListenError`].
pub(crate) fn listen(host: &str, port: u16) -> Result<Box<dyn Listen>, ListenError> {
    Ok(Box::new(tcp::listen(host, port)?))
}

/// Connects to the first of some addresses that answers. Each has its share of the time that is left, so that one where nobody
/// answers leaves time for the others.
///
/// # Errors
/// The last address's, with that address.
pub(crate) fn dial(
    targets: &[Address],
    deadline: &Deadline,
) -> Result<(Address, Connection), (Option<Address>, DialError)> {
    let mut last = (None, DialError::NoAddress);
    for (target, others) in targets.iter().zip((1..=targets.len() as u32).rev()) {
        match dial_one(target, deadline, others) {
            Ok(connection) => return Ok((target.clone(), connection)),
            Err(e) => last = (Some(target.clone()), e),
        }
    }
    Err(last)
}

/// Connects to one address within a share of the time that is left.
fn dial_one(target: &Address, deadline: &Deadline, shares: u32) -> Result<Connection, DialError> {
    let timeout = deadline.left().ok_or(DialError::TimedOut)? / shares;
    match target {
        Address::Tcp(addr) => tcp::connect(*addr, timeout),
        #[cfg(test)]
        Address::Memory(number) => memory::connect(*number),
    }
}

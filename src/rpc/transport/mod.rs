//! Transport: connections between a client and a server, or between two servers, as ordered byte streams in both directions.
//! Messages are encoded elsewhere (`rpc::wire`).
//!
//! ```text
//! server, client, peer connections
//!         │ Receiver, Sender, Aborter      (deadlines, retry loops, typed errors: the same for every transport)
//!         ▼
//!     Transport ── tcp                     (one non-blocking attempt per call; how to wait)
//!               ├─ tls                     (over tcp: keys and encryption)
//!               └─ memory                  (tests: seeded splits, delays and faults)
//! ```
//!
//! A connection is split into a [`Receiver`] and a [`Sender`], which two threads use concurrently. An [`Aborter`] ends it from
//! any thread. Sockets appear in this module only. Start with this file, then `tcp.rs`. CONTRIBUTING.md describes how to add a
//! transport.

mod address;
mod bound_socket;
#[cfg(test)]
mod contract;
#[cfg(test)]
pub(crate) mod counting;
mod duplex;
mod error;
mod forward;
#[cfg(test)]
pub(crate) mod memory;
mod poll;
mod tcp;
pub(crate) mod tls;

pub(crate) use address::{Address, KeyName, PeerAddr, ResolveError, missing_port_hint, resolve, with_default_port};
pub use bound_socket::BoundSocket;
#[cfg(test)]
pub(crate) use contract::tls_ends;
pub(crate) use duplex::Duplex;
pub use error::DialError;
pub(crate) use error::{ListenError, TransportError};
pub(crate) use forward::{ForwardError, LendReceived};

use std::fmt;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tls::{ClientTls, ServerTls};

/// A deadline, with the timeout from which it was computed, for error messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    at: Instant,
    after: Duration,
}

impl Deadline {
    /// Upper limit of timeouts: `Instant` overflows at a point that depends on the system.
    const FOREVER: Duration = Duration::from_secs(1 << 32);

    /// The deadline `after` from now.
    pub(crate) fn after(after: Duration) -> Deadline {
        Deadline { at: Instant::now() + after.min(Deadline::FOREVER), after }
    }

    /// Time until the deadline; `None` when it has passed.
    pub(crate) fn remaining(&self) -> Option<Duration> {
        Some(self.at.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero())
    }

    /// The timeout from which the deadline was computed.
    pub(crate) fn timeout(&self) -> Duration {
        self.after
    }
}

/// Kind of readiness for which a thread waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interest {
    Read,
    Write,
    /// For a thread that uses both directions ([`Duplex`]).
    ReadOrWrite,
}

/// Contract of a transport: one byte stream in each direction, in order and without loss until the connection ends.
///
/// - **Threads**: one thread calls `try_read` and waits for [`Interest::Read`] while another thread calls `try_write`,
///   `try_flush`, `try_finish` and waits for [`Interest::Write`]. A single thread may do all of this and wait for
///   [`Interest::ReadOrWrite`]. Any thread may call the other functions at any time.
/// - **Blocking**: only `wait` blocks. It holds no lock of the transport meanwhile, so a waiting reader never blocks a writer,
///   nor a waiting writer a reader.
/// - **Readiness** refers to the bytes that `try_read` returns, not to the bytes in a socket. A transport that decrypts reports
///   buffered plain text as readable even if its socket is empty, and does not report half a record.
/// - **Handshakes** of the transport itself, such as TLS's, are lazy: the first attempts to read or write perform them. They
///   never happen in [`Listen::accept`], where one slow client would block all others.
/// - **Messages of the transport itself** (handshake, key update): `try_read` and `wait` may write them, so such a transport
///   orders its writes itself. The thread that causes such a message sends it: `wait` for [`Interest::Read`] sends pending
///   messages before it sleeps. If there is no room for them, it also wakes when there is, because possibly no other thread is
///   writing.
/// - **Ends**: `abort` wakes each waiting thread. Reads then return the end, if not received bytes before it; writes fail with
///   [`TransportError::Reset`]. Dropping the last reference closes the connection.
pub(crate) trait Transport: fmt::Debug + Send + Sync {
    /// Reads received bytes into `dst`, which must not be empty. `Some(0)`: the peer has closed its sending direction. `None`:
    /// no byte is available.
    fn try_read(&self, dst: &mut [u8]) -> Result<Option<usize>, TransportError>;

    /// Reads without a copy, for a transport that holds received bytes in memory of its own, such as one that decrypts.
    fn lender(&self) -> Option<&dyn LendReceived> {
        None
    }

    /// Goes on with the transport's own handshake, which reads and writes do too. `false`: it is not complete.
    fn try_handshake(&self) -> Result<bool, TransportError> {
        Ok(true)
    }

    /// Whether bytes have arrived, including the transport's own handshake. Unlike [`Transport::readable`], it may be
    /// called beside the reader: it takes no lock and no bytes.
    fn has_received(&self) -> bool {
        self.readable()
    }

    /// Writes bytes from the front of `src`, which must not be empty, and returns how many. `None`: there is no room.
    fn try_write(&self, src: &[IoSlice<'_>]) -> Result<Option<usize>, TransportError>;

    /// Sends bytes that `try_write` has accepted and buffered, as a transport does that encrypts whole records. `false`: there
    /// is no room for all of them.
    fn try_flush(&self) -> Result<bool, TransportError> {
        Ok(true)
    }

    /// Blocks until an attempt would make progress or fail. `false`: the deadline has passed. May wake early.
    fn wait(&self, interest: Interest, deadline: &Deadline) -> Result<bool, TransportError>;

    /// Whether `try_read` would return bytes, the end or an error. Called in a spin loop, so it must not take a lock that a
    /// sender holds.
    fn readable(&self) -> bool;

    /// Whether the peer has closed its sending direction, or the connection has ended. Reads nothing. Unread bytes before the
    /// end may hide it on systems other than Linux.
    fn hung_up(&self) -> bool;

    /// Ends the connection once the peer's machine has acknowledged nothing for `timeout`, or has had no room for waiting bytes
    /// for as long. Does nothing where the system has no such timeout.
    fn set_loss_timeout(&self, timeout: Duration);

    /// Half close: ends the sending direction after the bytes sent so far; the receiving direction stays open. `false`: there
    /// is no room for the closing message, such as TLS's close_notify, and the caller must try again. Idempotent.
    fn try_finish(&self) -> Result<bool, TransportError>;

    /// Ends both directions immediately, from any thread. Idempotent.
    fn abort(&self);

    /// Address of the peer, for the log.
    fn peer(&self) -> PeerAddr;

    /// The address of this end. `None` for a transport without IP addresses, or if the connection has ended.
    fn local_addr(&self) -> Option<SocketAddr>;
}

/// A connection before it is split into its two halves.
#[derive(Debug)]
pub(crate) struct Connection(Arc<dyn Transport>);

impl Connection {
    pub(crate) fn new(transport: impl Transport + 'static) -> Connection {
        Connection(Arc::new(transport))
    }

    /// Address of the peer, for the log.
    pub(crate) fn peer(&self) -> PeerAddr {
        self.0.peer()
    }

    /// Ends the connection once the peer's machine has acknowledged nothing for `timeout` ([`Transport::set_loss_timeout`]).
    pub(crate) fn set_loss_timeout(&self, timeout: Duration) {
        self.0.set_loss_timeout(timeout);
    }

    /// Completes the transport's own handshake. At a client of TLS, the server has proved its key then, but may still refuse the
    /// client's: the next read reports that.
    ///
    /// # Errors
    /// [`TransportError::TimedOut`] when the handshake is not complete by the deadline.
    pub(crate) fn handshake(&self, deadline: &Deadline) -> Result<(), TransportError> {
        while !self.0.try_handshake()? {
            // A peer that sends single bytes slowly never lets the wait time out.
            if !self.0.wait(Interest::Read, deadline)? || deadline.remaining().is_none() {
                return Err(TransportError::TimedOut { what: NO_HANDSHAKE, after: deadline.timeout() });
            }
        }
        Ok(())
    }

    /// Both directions, for one thread.
    pub(crate) fn into_duplex(self) -> Duplex {
        Duplex::new(self.0)
    }

    /// A handle that ends the connection, whatever its halves are doing.
    pub(crate) fn aborter(&self) -> Aborter {
        Aborter(Arc::clone(&self.0))
    }

    /// The two halves.
    pub(crate) fn split(self) -> (Receiver, Sender) {
        (Receiver(Arc::clone(&self.0)), Sender(self.0))
    }
}

/// Handle on a connection for threads other than the threads of its halves: ends it, and tells whether the peer has.
#[derive(Clone, Debug)]
pub(crate) struct Aborter(Arc<dyn Transport>);

impl Aborter {
    /// The peer, for the log: with the name of its key as soon as it has proved it.
    pub(crate) fn peer(&self) -> PeerAddr {
        self.0.peer()
    }

    /// Ends both directions and wakes the threads that wait for the connection.
    pub(crate) fn abort(&self) {
        self.0.abort();
    }

    /// Whether the peer has closed its sending direction, or the connection has ended ([`Transport::hung_up`]).
    pub(crate) fn hung_up(&self) -> bool {
        self.0.hung_up()
    }

    /// Whether the peer has sent bytes that wait to be read, or some of the transport's own handshake, and has not hung up.
    pub(crate) fn has_sent(&self) -> bool {
        self.0.has_received() && !self.0.hung_up()
    }
}

/// The receiving half of a connection.
#[derive(Debug)]
pub(crate) struct Receiver(Arc<dyn Transport>);

impl Receiver {
    /// The whole connection. No thread uses its sending half any more.
    pub(crate) fn into_connection(self) -> Connection {
        Connection(self.0)
    }

    /// The peer, for the log: with the name of its key as soon as it has proved it.
    pub(crate) fn peer(&self) -> PeerAddr {
        self.0.peer()
    }

    /// Whether a read would return at once, also with the end of the stream. Lock-free.
    pub(crate) fn readable(&self) -> bool {
        self.0.readable()
    }

    /// Whether the peer has closed its sending direction, or the connection has ended ([`Transport::hung_up`]).
    pub(crate) fn hung_up(&self) -> bool {
        self.0.hung_up()
    }

    /// The address of this end: the one to which the peer has connected, if this end has accepted the connection.
    pub(crate) fn local_addr(&self) -> Option<SocketAddr> {
        self.0.local_addr()
    }

    /// Reads at least one byte into `dst`. 0: end of the stream.
    ///
    /// # Errors
    /// [`TransportError::TimedOut`] when no byte arrived by the deadline; the connection stays usable.
    pub(crate) fn read_into(&mut self, dst: &mut [u8], deadline: &Deadline) -> Result<usize, TransportError> {
        loop {
            if let Some(n) = self.0.try_read(dst)? {
                return Ok(n);
            }
            if !self.0.wait(Interest::Read, deadline)? {
                return Err(TransportError::TimedOut { what: NOTHING_RECEIVED, after: deadline.timeout() });
            }
        }
    }

    /// Fills `dst` by the deadline. The deadline holds for all bytes together, however slowly they arrive.
    ///
    /// # Errors
    /// [`TransportError::Closed`] when the stream ends before that.
    pub(crate) fn read_exact(&mut self, mut dst: &mut [u8], deadline: &Deadline) -> Result<(), TransportError> {
        while !dst.is_empty() {
            match self.read_into(dst, deadline)? {
                0 => return Err(TransportError::Closed),
                n => dst = dst.get_mut(n..).unwrap_or_default(),
            }
            // A peer that sends single bytes slowly never lets the wait above time out.
            if !dst.is_empty() && deadline.remaining().is_none() {
                return Err(TransportError::TimedOut { what: NOTHING_RECEIVED, after: deadline.timeout() });
            }
        }
        Ok(())
    }
}

/// The sending half of a connection.
#[derive(Debug)]
pub(crate) struct Sender(Arc<dyn Transport>);

impl Sender {
    /// Sends all bytes of `parts` with gathered writes, without copying them.
    ///
    /// # Errors
    /// [`TransportError::TimedOut`] when the peer accepts no byte for `stall`. How many bytes were sent is then unknown.
    pub(crate) fn write_all(&mut self, parts: &[&[u8]], stall: Duration) -> Result<(), TransportError> {
        // Most messages have one part; only longer lists need a vector of slices on the heap.
        match parts {
            [] => Ok(()),
            [one] => self.write_slices(&mut [IoSlice::new(one)], stall),
            [one, two] => self.write_slices(&mut [IoSlice::new(one), IoSlice::new(two)], stall),
            many => self.write_slices(&mut many.iter().map(|part| IoSlice::new(part)).collect::<Vec<_>>(), stall),
        }
    }

    /// As [`Sender::write_all`], with one deadline for all bytes.
    pub(crate) fn write_by(&mut self, bytes: &[u8], deadline: &Deadline) -> Result<(), TransportError> {
        let late = || TransportError::TimedOut { what: NOTHING_ACCEPTED, after: deadline.timeout() };
        let (mut sent, mut is_flushed) = (0, false);
        while !is_flushed {
            let rest = bytes.get(sent..).unwrap_or_default();
            let (accepted, flushed) = self.write_available(&[rest])?;
            sent += accepted;
            is_flushed = flushed;
            if !is_flushed {
                // A peer that accepts single bytes slowly never lets the wait time out.
                deadline.remaining().ok_or_else(late)?;
                self.wait_for_room(deadline)?;
            }
        }
        Ok(())
    }

    /// Sends as many bytes of `parts`, from the front, as there is room for. Returns their number, and whether all bytes that
    /// were accepted have left this process: if not, a later write sends the rest.
    pub(crate) fn write_available(&mut self, parts: &[&[u8]]) -> Result<(usize, bool), TransportError> {
        let mut slices: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let (mut rest, mut sent) = (&mut slices[..], 0);
        IoSlice::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            let Some(n) = self.0.try_write(rest)? else { return Ok((sent, false)) };
            IoSlice::advance_slices(&mut rest, n);
            sent += n;
        }
        Ok((sent, self.0.try_flush()?))
    }

    /// Waits until there is room for a write, or for the deadline.
    pub(crate) fn wait_for_room(&self, deadline: &Deadline) -> Result<(), TransportError> {
        self.0.wait(Interest::Write, deadline).map(drop)
    }

    fn write_slices(&mut self, mut parts: &mut [IoSlice<'_>], stall: Duration) -> Result<(), TransportError> {
        // A write of only empty slices returns 0, which would look like the end of the connection.
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
        self.flush(stall)
    }

    /// Sends what the transport has buffered.
    fn flush(&mut self, stall: Duration) -> Result<(), TransportError> {
        if self.0.try_flush()? {
            return Ok(());
        }
        self.wait_for(&Deadline::after(stall), |transport| Ok(transport.try_flush()?.then_some(())))
    }

    /// Repeats an attempt until there is room for it.
    fn wait_for<T>(
        &self,
        deadline: &Deadline,
        mut attempt: impl FnMut(&dyn Transport) -> Result<Option<T>, TransportError>,
    ) -> Result<T, TransportError> {
        loop {
            let in_time = self.0.wait(Interest::Write, deadline)?;
            // One more attempt after the deadline: a system reports room only when there is much of it.
            if let Some(done) = attempt(&*self.0)? {
                return Ok(done);
            }
            if !in_time {
                return Err(TransportError::TimedOut { what: NOTHING_ACCEPTED, after: deadline.timeout() });
            }
        }
    }

    /// Half close: the peer sees the end of the stream after the bytes sent so far.
    ///
    /// # Errors
    /// [`TransportError::TimedOut`] when there is no room for it by the deadline. A deadline that has already passed allows one
    /// attempt.
    pub(crate) fn finish(&mut self, deadline: &Deadline) -> Result<(), TransportError> {
        if self.0.try_finish()? {
            return Ok(());
        }
        self.wait_for(deadline, |transport| Ok(transport.try_finish()?.then_some(())))
    }

    /// Reads and drops the peer's data until the end of the stream or the deadline. The receiving half must have been dropped.
    pub(crate) fn drain(&mut self, deadline: &Deadline) -> Result<(), TransportError> {
        let (mut receiver, mut rest) = (Receiver(Arc::clone(&self.0)), [0; 4096]);
        // The loop checks the deadline, because a peer that sends continuously never lets the wait time out.
        while deadline.remaining().is_some() && receiver.read_into(&mut rest, deadline)? > 0 {}
        Ok(())
    }
}

/// Description of a receive timeout.
const NOTHING_RECEIVED: &str = "the peer sent no byte";
/// Description of a send timeout.
const NOTHING_ACCEPTED: &str = "the peer accepted no byte";
/// Description of a handshake that timed out.
const NO_HANDSHAKE: &str = "the peer did not complete the TLS handshake";

/// A listener.
pub(crate) trait Listen: fmt::Debug + Send {
    /// Accepts the next connection. `None` when none arrived by the deadline, or when the client has disconnected already.
    ///
    /// # Errors
    /// The system has no file descriptor or memory for the connection.
    fn accept(&self, deadline: &Deadline) -> Result<Option<Connection>, TransportError>;

    /// The address to which clients connect, with the actual port.
    fn local_addr(&self) -> Address;

    /// A function that wakes a thread in `accept`; callable from any thread.
    fn waker(&self) -> Box<dyn Fn() + Send + Sync>;
}

/// A listening socket on a host, given as an IPv4 or IPv6 address or as a name. Port 0: the system chooses a port.
///
/// # Errors
/// [`ListenError`].
pub(crate) fn bind(host: &str, port: u16) -> Result<BoundSocket, ListenError> {
    tcp::bind(host, port)
}

/// Accepts connections on a socket, over TLS if it is configured.
///
/// # Errors
/// The system does not tell the socket's address.
pub(crate) fn listen_on(socket: BoundSocket, tls: Option<ServerTls>) -> std::io::Result<Box<dyn Listen>> {
    Ok(Box::new(tcp::Listener::new(socket, tls)?))
}

/// A listener on a host.
#[cfg(test)]
pub(crate) fn listen(host: &str, port: u16) -> Result<Box<dyn Listen>, ListenError> {
    Ok(Box::new(tcp::Listener::new(tcp::bind(host, port)?, None).map_err(ListenError::Host)?))
}

/// Listens on one address of this machine.
///
/// # Errors
/// [`ListenError::Address`].
pub(crate) fn listen_at(addr: SocketAddr) -> Result<Box<dyn Listen>, ListenError> {
    let listener = tcp::bind_at(addr)?;
    listen_on(listener, None).map_err(|error| ListenError::Address { addr: Address::Tcp(addr), error })
}

/// As [`dial_with`], without TLS.
///
/// # Errors
/// As [`dial_with`].
pub(crate) fn dial(
    targets: &[Address],
    deadline: &Deadline,
) -> Result<(Address, Connection), (Option<Address>, DialError)> {
    dial_with(targets, deadline, None)
}

/// Connects to the first of several addresses that accepts, over TLS if it is configured. Each address gets an equal share of
/// the remaining time, so that an unresponsive one leaves time for the others.
///
/// # Errors
/// The error of the last address, and that address.
pub(crate) fn dial_with(
    targets: &[Address],
    deadline: &Deadline,
    tls: Option<&ClientTls>,
) -> Result<(Address, Connection), (Option<Address>, DialError)> {
    let mut last = (None, DialError::NoAddress);
    for (target, shares) in targets.iter().zip((1..=targets.len() as u32).rev()) {
        match dial_one(target, deadline, shares, tls) {
            Ok(connection) => return Ok((target.clone(), connection)),
            Err(e) => last = (Some(target.clone()), e),
        }
    }
    Err(last)
}

/// Connects to one address within its share of the remaining time.
fn dial_one(
    target: &Address,
    deadline: &Deadline,
    shares: u32,
    tls: Option<&ClientTls>,
) -> Result<Connection, DialError> {
    let timeout = deadline.remaining().ok_or(DialError::TimedOut)? / shares;
    match target {
        Address::Tcp(addr) => tcp::connect(*addr, timeout, tls),
        #[cfg(test)]
        Address::Memory(number) => memory::connect(*number),
    }
}

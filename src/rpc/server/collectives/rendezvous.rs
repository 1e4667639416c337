//! Rendezvous of COMM_INIT: rank 0 listens and rank 1 connects, both only to addresses on the allow-list, within a deadline.
//!
//! The session's thread waits and watches its client meanwhile. Name resolution and `connect` cannot be interrupted, so rank 1
//! dials on a thread of its own, which outlives the wait by one attempt at most.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use log::debug;
use thiserror::Error;

use super::WATCH_INTERVAL;
use super::comm_link::{CommLink, LinkRequest};
use super::exchange::ExchangeError;
use crate::rpc::server::peers::PeerAllowlist;
use crate::rpc::transport::{self, Address, Connection, Deadline};

/// Limit of the threads that dial for COMM_INIT, per server. A thread may outlive its session while it resolves a name.
const MAX_DIALLING: usize = 64;

/// Pause after a refused connection: rank 0 may not listen yet. llama.cpp's rank 1 pauses as long.
const DIAL_PAUSE: Duration = Duration::from_millis(50);

/// Limit of one attempt to connect.
const DIAL_ATTEMPT: Duration = Duration::from_millis(500);

/// Timeouts of a COMM_INIT.
#[derive(Clone, Copy, Debug)]
pub(in crate::rpc::server) struct RendezvousTimeouts {
    /// Limit of the whole COMM_INIT.
    whole: Duration,
    /// How long rank 1 dials: llama.cpp's gives up after 5 s.
    dial: Duration,
    /// Limit of the exchange of capabilities, so that a silent peer does not take the place of the right one.
    capabilities: Duration,
}

impl RendezvousTimeouts {
    /// `whole` is the limit of a COMM_INIT: rank 1 dials for half of it, and a peer has a fifth for its capabilities.
    pub(in crate::rpc::server) fn new(whole: Duration) -> RendezvousTimeouts {
        RendezvousTimeouts { whole, dial: whole / 2, capabilities: whole / 5 }
    }
}

/// Why two servers are not connected. COMM_INIT is then answered 0.
#[derive(Debug, Error)]
pub(in crate::rpc::server) enum RendezvousError {
    #[error("the client has closed its connection")]
    ClientHungUp,
    #[error("cannot listen on {0}")]
    Listen(String),
    #[error("no server has connected to {at} within {after:?}")]
    NotConnected { at: SocketAddr, after: Duration },
    #[error("another client's COMM_INIT has used {at} for {after:?}")]
    AddressInUse { at: SocketAddr, after: Duration },
    #[error("{0}")]
    NotDialled(String),
    #[error("cannot connect within {after:?}: {last}")]
    Unreachable { last: String, after: Duration },
    #[error("the other server has not completed the connection: {0}")]
    NotEstablished(ExchangeError),
}

/// The pending COMM_INITs of a server.
#[derive(Default)]
pub(in crate::rpc::server) struct Rendezvous {
    lines: Mutex<WaitingLines>,
    /// Notified when a COMM_INIT leaves its line.
    left: Condvar,
    /// Number of threads that dial.
    dialling: Arc<AtomicUsize>,
}

/// The COMM_INITs of rank 0 by the address on which they listen, in the order of their arrival: the first of each line listens.
#[derive(Default)]
struct WaitingLines {
    by_address: HashMap<SocketAddr, VecDeque<u64>>,
    next_ticket: u64,
}

impl Rendezvous {
    /// Rank 0: listens on `at`, which is an address of this machine, until a peer on the allow-list has connected.
    ///
    /// # Errors
    /// [`RendezvousError`].
    pub(in crate::rpc::server) fn accept(
        &self,
        request: &LinkRequest,
        at: SocketAddr,
        allowlist: &PeerAllowlist,
        timeouts: RendezvousTimeouts,
        hung_up: &dyn Fn() -> bool,
    ) -> Result<CommLink, RendezvousError> {
        let deadline = Deadline::after(timeouts.whole);
        let _turn = self.wait_for_turn(at, &deadline, hung_up)?;
        let listener = transport::listen_at(at).map_err(|e| RendezvousError::Listen(e.to_string()))?;
        loop {
            if hung_up() {
                return Err(RendezvousError::ClientHungUp);
            }
            let Some(left) = deadline.remaining() else {
                return Err(RendezvousError::NotConnected { at, after: deadline.timeout() });
            };
            let accepted = listener.accept(&Deadline::after(left.min(WATCH_INTERVAL)));
            let Some(connection) = accepted.map_err(|e| RendezvousError::Listen(format!("{at}: {e}")))? else {
                continue;
            };
            let peer = connection.peer();
            if !peer.ip().is_some_and(|ip| allowlist.permits_host(ip)) {
                debug!("{peer}: connected to {at} for collectives, but no --peer names it; closed");
                continue;
            }
            match CommLink::establish(request, connection.into_duplex(), timeouts.capabilities.min(left), hung_up) {
                Ok(link) => return Ok(link),
                Err(ExchangeError::ClientHungUp) => return Err(RendezvousError::ClientHungUp),
                Err(e) => {
                    debug!("{peer}: connected to {at} for collectives, but has sent no capabilities: {e}; closed")
                }
            }
        }
    }

    /// Waits until no earlier COMM_INIT uses the address `at`.
    fn wait_for_turn(
        &self,
        at: SocketAddr,
        deadline: &Deadline,
        hung_up: &dyn Fn() -> bool,
    ) -> Result<Turn<'_>, RendezvousError> {
        let mut lines = self.lock();
        let ticket = lines.next_ticket;
        lines.next_ticket += 1;
        lines.by_address.entry(at).or_default().push_back(ticket);
        drop(lines);
        let turn = Turn { rendezvous: self, at, ticket };
        let mut lines = self.lock();
        while lines.by_address.get(&at).and_then(VecDeque::front) != Some(&ticket) {
            let Some(left) = deadline.remaining() else {
                drop(lines);
                return Err(RendezvousError::AddressInUse { at, after: deadline.timeout() });
            };
            let waited = self.left.wait_timeout(lines, left.min(WATCH_INTERVAL));
            lines = waited.unwrap_or_else(PoisonError::into_inner).0;
            if hung_up() {
                drop(lines);
                return Err(RendezvousError::ClientHungUp);
            }
        }
        drop(lines);
        Ok(turn)
    }

    fn lock(&self) -> MutexGuard<'_, WaitingLines> {
        // Each change leaves the lines consistent.
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Rank 1: connects to rank 0, if the allow-list permits its address.
    ///
    /// # Errors
    /// [`RendezvousError`]. If it is [`RendezvousError::NotDialled`], no connection was attempted.
    pub(in crate::rpc::server) fn dial(
        &self,
        request: &LinkRequest,
        allowlist: &Arc<PeerAllowlist>,
        timeouts: RendezvousTimeouts,
        hung_up: &dyn Fn() -> bool,
    ) -> Result<CommLink, RendezvousError> {
        // An IPv6 address has brackets before a port.
        let host = &request.host;
        let address =
            if host.contains(':') { format!("[{host}]:{}", request.port) } else { format!("{host}:{}", request.port) };
        let deadline = Deadline::after(timeouts.dial);
        let (dialled, connection) = sync_channel(1);
        let mut dialler = Dialler::new(address, allowlist, deadline, &self.dialling)?;
        let cancel = Cancel(Arc::clone(&dialler.cancelled));
        let thread = std::thread::Builder::new().name("comm-dial".to_owned());
        let started = thread.spawn(move || dialler.run(&dialled));
        started.map_err(|e| RendezvousError::NotDialled(format!("cannot start a thread that dials: {e}")))?;
        let connection = loop {
            let left = deadline.remaining().unwrap_or_default();
            match connection.recv_timeout(left.min(WATCH_INTERVAL)) {
                Ok(dialled) => break dialled?,
                Err(_) if hung_up() => return Err(RendezvousError::ClientHungUp),
                Err(RecvTimeoutError::Timeout) if !left.is_zero() => {}
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    let last = "no answer from the other server, or from the name server".to_owned();
                    return Err(RendezvousError::Unreachable { last, after: deadline.timeout() });
                }
            }
        };
        drop(cancel);
        let link = CommLink::establish(request, connection.into_duplex(), timeouts.capabilities, hung_up);
        link.map_err(|e| match e {
            ExchangeError::ClientHungUp => RendezvousError::ClientHungUp,
            e => RendezvousError::NotEstablished(e),
        })
    }
}

/// A place in the line of an address. Dropping it leaves the line.
struct Turn<'a> {
    rendezvous: &'a Rendezvous,
    at: SocketAddr,
    ticket: u64,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut lines = self.rendezvous.lock();
        if let Some(line) = lines.by_address.get_mut(&self.at) {
            line.retain(|&ticket| ticket != self.ticket);
            if line.is_empty() {
                lines.by_address.remove(&self.at);
            }
        }
        drop(lines);
        self.rendezvous.left.notify_all();
    }
}

/// Ends the dialling thread when it is dropped, unless that has finished.
struct Cancel(Arc<AtomicBool>);

impl Drop for Cancel {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// The thread that dials rank 0.
struct Dialler {
    address: String,
    allowlist: Arc<PeerAllowlist>,
    deadline: Deadline,
    cancelled: Arc<AtomicBool>,
    /// The server's number of such threads, which counts this one.
    dialling: Arc<AtomicUsize>,
}

impl Dialler {
    /// # Errors
    /// [`RendezvousError::NotDialled`] if the address is malformed, no list permits any address, or too many threads dial.
    fn new(
        address: String,
        allowlist: &Arc<PeerAllowlist>,
        deadline: Deadline,
        dialling: &Arc<AtomicUsize>,
    ) -> Result<Dialler, RendezvousError> {
        allowlist.check_address(&address).map_err(RendezvousError::NotDialled)?;
        let count = |n: usize| (n < MAX_DIALLING).then_some(n + 1);
        if dialling.fetch_update(Ordering::AcqRel, Ordering::Acquire, count).is_err() {
            return Err(RendezvousError::NotDialled(format!("{MAX_DIALLING} connections are being dialled already")));
        }
        let (allowlist, dialling) = (Arc::clone(allowlist), Arc::clone(dialling));
        Ok(Dialler { address, allowlist, deadline, cancelled: Arc::default(), dialling })
    }

    fn run(&mut self, dialled: &SyncSender<Result<Connection, RendezvousError>>) {
        let result = match self.allowlist.resolve_permitted(&self.address) {
            Ok(targets) => self.connect(&targets),
            Err(why) => Err(RendezvousError::NotDialled(format!("{}: {why}", self.address))),
        };
        // Fails if nothing waits any more: then the connection is closed.
        let _ = dialled.send(result);
    }

    /// Connects to the first of `targets` that accepts, and tries again until the deadline.
    fn connect(&self, targets: &[Address]) -> Result<Connection, RendezvousError> {
        loop {
            let left = self.deadline.remaining().unwrap_or_default();
            let last = match transport::dial(targets, &Deadline::after(left.min(DIAL_ATTEMPT))) {
                Ok((_, connection)) => return Ok(connection),
                Err((target, e)) => {
                    format!("{}: {e}", target.map_or(self.address.clone(), |target| target.to_string()))
                }
            };
            if left <= DIAL_PAUSE || self.cancelled.load(Ordering::Acquire) {
                return Err(RendezvousError::Unreachable { last, after: self.deadline.timeout() });
            }
            std::thread::sleep(DIAL_PAUSE);
        }
    }
}

impl Drop for Dialler {
    fn drop(&mut self) {
        self.dialling.fetch_sub(1, Ordering::AcqRel);
    }
}

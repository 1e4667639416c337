//! Rendezvous of COMM_INIT: rank 0 listens and rank 1 connects, both only to addresses on the allow-list, within a deadline.
//!
//! The session's thread waits and watches its client meanwhile. `connect` cannot be interrupted, so rank 1
//! dials on a thread of its own, one of those for transfers between servers. It outlives the wait by one attempt at most.

use std::net::SocketAddr;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use log::debug;
use thiserror::Error;

use super::address_claim::{AddressClaim, AddressClaims};
use super::comm_link::{Candidate, CommLink, LinkRequest};
use super::exchange::ExchangeError;
use super::{COMM_PORT_OFFSET, WATCH_INTERVAL};
use crate::device::Reservation;
use crate::rpc::server::peers::{PeerAllowlist, UNENCRYPTED};
use crate::rpc::transport::{self, Address, Connection, Deadline, Listen, PeerAddr, TransportError};

/// Limit of the peers on the allow-list that have connected to rank 0 and have yet to send their capabilities.
const MAX_CANDIDATES: usize = 8;

/// How often rank 0 reads from such peers.
const CANDIDATE_INTERVAL: Duration = Duration::from_millis(1);

/// Pause before rank 0 tries again to listen on a port that is in use.
const LISTEN_PAUSE: Duration = Duration::from_millis(50);

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
    /// Limit of the exchange of capabilities, so that silent peers do not keep the right one away.
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
    #[error("no listed server has connected to {at} within {after:?}{closed}")]
    NotConnected {
        at: SocketAddr,
        after: Duration,
        /// Names the last peer that was closed, and why; empty without one.
        closed: String,
    },
    #[error(
        "another client's COMM_INIT uses {at}, or has used it a few seconds ago: the servers of the two clients could be mixed up"
    )]
    AddressClaimed { at: SocketAddr },
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
    claims: Arc<AddressClaims>,
}

impl Rendezvous {
    /// Rank 0: listens on `at`, which is an address of this machine, until a peer on the allow-list has connected and sent its
    /// capabilities. Of several, the first that has sent them is taken, and the others are closed.
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
    ) -> Result<(CommLink, AddressClaim), RendezvousError> {
        if !allowlist.permits_collectives_at(at.ip()) {
            return Err(RendezvousError::Listen(format!("{at}: {UNENCRYPTED}")));
        }
        let deadline = Deadline::after(timeouts.whole);
        let claim = self.claims.claim(at)?;
        let listener = listen(at, &deadline, hung_up)?;
        let mut candidates = Vec::new();
        let mut closed = String::new();
        loop {
            if hung_up() {
                return Err(RendezvousError::ClientHungUp);
            }
            let left = deadline.remaining();
            if let Some(connection) = next_connection(&*listener, &candidates, left.unwrap_or_default())
                .map_err(|e| RendezvousError::Listen(format!("{at}: {e}")))?
            {
                let peer = connection.peer();
                if peer.ip().is_some_and(|ip| allowlist.permits_incoming(ip)) {
                    candidates.push(Candidate::new(connection, timeouts.capabilities));
                } else {
                    debug!("{peer}: connected to {at} for collectives, but no --peer permits it; closed");
                    closed = format!("; {peer} has, and no --peer permits it");
                }
            }
            while let Some((peer, polled)) = take_decided(&mut candidates) {
                match polled.and_then(|ready| ready.complete(request, timeouts.capabilities, hung_up)) {
                    Ok(link) => {
                        claim.expire_after(timeouts.dial);
                        return Ok((link, claim));
                    }
                    Err(ExchangeError::ClientHungUp) => return Err(RendezvousError::ClientHungUp),
                    Err(error) => {
                        debug!("{peer}: connected to {at} for collectives: {error}; closed");
                        closed = format!("; {peer} has: {error}");
                    }
                }
            }
            if left.is_none() {
                return Err(RendezvousError::NotConnected { at, after: deadline.timeout(), closed });
            }
        }
    }
}

/// Rank 1: connects to rank 0, if the allow-list permits its address. The thread that dials keeps `permit` until it ends.
///
/// # Errors
/// [`RendezvousError`]. If it is [`RendezvousError::NotDialled`], no connection was attempted.
pub(in crate::rpc::server) fn dial(
    request: &LinkRequest,
    permit: Reservation,
    allowlist: &PeerAllowlist,
    timeouts: RendezvousTimeouts,
    hung_up: &dyn Fn() -> bool,
) -> Result<CommLink, RendezvousError> {
    // An IPv6 address has brackets before a port.
    let host = &request.host;
    let address =
        if host.contains(':') { format!("[{host}]:{}", request.port) } else { format!("{host}:{}", request.port) };
    let permitted = allowlist.collective_targets(&address);
    let targets = permitted.map_err(|why| RendezvousError::NotDialled(format!("{address}: {why}")))?;
    if request.port <= COMM_PORT_OFFSET {
        let reason = format!("{address}: the port of rank 0 is {COMM_PORT_OFFSET} above that of its endpoint");
        return Err(RendezvousError::NotDialled(reason));
    }
    let deadline = Deadline::after(timeouts.dial);
    let (dialled, connection) = sync_channel(1);
    let waiting = Arc::new(());
    let waiter = Arc::downgrade(&waiting);
    let started = std::thread::Builder::new().name("comm-dial".to_owned()).spawn(move || {
        let _permit = permit;
        // Fails if nothing waits any more: then the connection is closed.
        let _ = dialled.send(connect(&address, &targets, &deadline, &waiter));
    });
    started.map_err(|e| RendezvousError::NotDialled(format!("cannot start a thread that dials: {e}")))?;
    let connection = loop {
        let left = deadline.remaining().unwrap_or_default();
        match connection.recv_timeout(left.min(WATCH_INTERVAL)) {
            Ok(dialled) => break dialled?,
            Err(_) if hung_up() => return Err(RendezvousError::ClientHungUp),
            Err(RecvTimeoutError::Timeout) if !left.is_zero() => {}
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                let last = "no answer from the other server".to_owned();
                return Err(RendezvousError::Unreachable { last, after: deadline.timeout() });
            }
        }
    };
    let link = CommLink::join(request, connection, timeouts.capabilities, hung_up);
    link.map_err(|e| match e {
        ExchangeError::ClientHungUp => RendezvousError::ClientHungUp,
        e => RendezvousError::NotEstablished(e),
    })
}

/// Connects to the first of `targets` that accepts, and tries again until the deadline, or until `waiter` has gone.
fn connect(
    address: &str,
    targets: &[Address],
    deadline: &Deadline,
    waiter: &Weak<()>,
) -> Result<Connection, RendezvousError> {
    loop {
        let left = deadline.remaining().unwrap_or_default();
        let (target, error) = match transport::dial(targets, &Deadline::after(left.min(DIAL_ATTEMPT))) {
            Ok((_, connection)) => return Ok(connection),
            Err(failed) => failed,
        };
        // Rank 0 has closed its listener, because another peer was first: the next listener there is another client's.
        if error.is_reset() || left <= DIAL_PAUSE || waiter.strong_count() == 0 {
            let target = target.map_or(address.to_owned(), |target| target.to_string());
            let (last, after) = (format!("{target}: {error}"), deadline.timeout());
            return Err(RendezvousError::Unreachable { last, after });
        }
        std::thread::sleep(DIAL_PAUSE);
    }
}

/// Listens on `at`, and tries again until the deadline while the port is in use: a port above 1000 may be that of an outgoing
/// connection.
fn listen(at: SocketAddr, deadline: &Deadline, hung_up: &dyn Fn() -> bool) -> Result<Box<dyn Listen>, RendezvousError> {
    loop {
        let error = match transport::listen_at(at) {
            Ok(listener) => return Ok(listener),
            Err(error) => error,
        };
        if hung_up() {
            return Err(RendezvousError::ClientHungUp);
        }
        match deadline.remaining() {
            Some(left) if error.is_in_use() => std::thread::sleep(left.min(LISTEN_PAUSE)),
            _ => return Err(RendezvousError::Listen(error.to_string())),
        }
    }
}

/// Accepts the next connection, unless there are [`MAX_CANDIDATES`]. Waits for up to `left`, for a short time only if peers are
/// yet to send their capabilities.
fn next_connection(
    listener: &dyn Listen,
    candidates: &[Candidate],
    left: Duration,
) -> Result<Option<Connection>, TransportError> {
    match candidates {
        [] => listener.accept(&Deadline::after(left.min(WATCH_INTERVAL))),
        [oldest, ..] if candidates.len() >= MAX_CANDIDATES => {
            oldest.wait(left.min(CANDIDATE_INTERVAL))?;
            Ok(None)
        }
        _ => listener.accept(&Deadline::after(left.min(CANDIDATE_INTERVAL))),
    }
}

/// Removes the first peer whose capabilities are complete, or that is late, lost or no server of collectives. Returns its address
/// with the peer, or with the reason for which it is to be closed.
fn take_decided(candidates: &mut Vec<Candidate>) -> Option<(PeerAddr, Result<Candidate, ExchangeError>)> {
    let mut polled = candidates.iter_mut().map(Candidate::poll_caps).enumerate();
    let (at, polled) = polled.find(|(_, polled)| !matches!(polled, Ok(false)))?;
    let candidate = candidates.remove(at);
    Some((candidate.peer(), polled.map(|_| candidate)))
}

#[cfg(test)]
mod tests;

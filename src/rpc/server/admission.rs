//! Admission control: limits the number of handshakes in flight and of sessions, refuses further clients, and notifies sessions
//! when the server drains.
//!
//! An accepted connection is a pending handshake. At their limit, the oldest one is closed ([`PendingHandshakes`]). Only a
//! complete HELLO takes the place of a session, so connections that send nothing take none; if there is no place, the client is
//! told so in the reply to its HELLO.

use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{self, Arc, Condvar, Instant, Mutex, Unpoisoned, Weak, lock, thread};
use std::collections::HashMap;
use std::time::Duration;

use log::debug;
use thiserror::Error;

use super::audit::SessionAudit;
use super::client_connection::ClientWriter;
use super::hangup_watch::SessionWatch;
use super::host_memory::{HostMemoryError, SessionMemory};
use super::limits::Config;
use super::pending_handshakes::PendingHandshakes;
use super::tenants::{LimitReached, Resource, Tenant, Tenants};
use crate::device::Reservation;
use crate::rpc::transport::{Aborter, PeerAddr};
use crate::rpc::wire::ext::{Notification, ServerState};

/// Limit of the connections that were closed and whose threads have yet to end, because each takes a thread. A thread that reads
/// ends at once; the limit bounds the threads if connections arrive faster than the system can end them.
const MAX_CLOSING: usize = 1024;

/// The connections of a server, pending and admitted, and their limits.
pub(super) struct Admission {
    tenants: Arc<Tenants>,
    /// Limit of all connections: sessions, handshakes, and those that end.
    max_open: usize,
    state: Mutex<AdmissionState>,
    /// A copy of the state's, for readers that must take no lock.
    is_draining: AtomicBool,
    /// Notified when a connection ends.
    session_ended: Condvar,
}

#[derive(Default)]
struct AdmissionState {
    /// The connections, by the key of their [`SessionPermit`].
    sessions: HashMap<u64, AdmittedSession>,
    pending: PendingHandshakes,
    next_key: u64,
    /// The first key of the connections since the server drains. They are told so, and the drain does not wait for them.
    draining: Option<u64>,
    /// Writers of the sessions that receive SERVER_STATE when the server begins to drain. Only clients of the extension do.
    subscribers: Vec<Weak<ClientWriter>>,
}

/// A connection, as far as its admission concerns.
struct AdmittedSession {
    /// Closes the connection.
    aborter: Aborter,
    /// Cancels its work; none before the session's thread runs.
    watch: Weak<SessionWatch>,
    /// Whether [`Admission::abort_if`] or an eviction has closed it.
    is_aborted: bool,
    /// None until the handshake is complete. Part of the entry, so that the place is free as soon as the session is no longer
    /// counted.
    connection: Option<Reservation>,
}

/// A pending handshake that makes room for a new connection. It does not become a session any more, and is closed when this is
/// dropped, so that a line in the log can precede its end.
pub(super) struct ClosedHandshake {
    connection: Aborter,
    /// The limit that the new connection has reached.
    pub(super) reason: LimitReached,
}

impl ClosedHandshake {
    pub(super) fn peer(&self) -> PeerAddr {
        self.connection.peer()
    }
}

impl Drop for ClosedHandshake {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

/// Why a new connection is closed at once: no handshake can be closed for it.
#[derive(Debug, Error)]
pub(super) enum Rejection {
    #[error(transparent)]
    TooManyHandshakes(#[from] LimitReached),
    #[error(
        "{0} connections are open or end, the most that the server allows (max-connections and max-handshakes in --limits)"
    )]
    TooManyOpen(usize),
}

/// Why a connection does not become a session.
pub(super) enum Refusal {
    Draining,
    /// A limit of connections is reached. The client receives the state "full".
    Full(LimitReached),
    /// The base of a session does not fit into the host memory. The client receives the state "full".
    FullMemory(HostMemoryError),
    /// Kernels of the client have made devices unusable: it is refused for so long, and receives the state "full".
    AfterFaults(Duration),
    /// The connection was closed for another one.
    Closed,
}

impl Admission {
    /// Admits connections within the limits of `tenants`.
    pub(super) fn new(tenants: &Arc<Tenants>, config: &Config) -> Arc<Admission> {
        let max_open = config.max_connections.saturating_add(config.max_handshakes).saturating_add(MAX_CLOSING);
        let (tenants, state) = (Arc::clone(tenants), Mutex::default());
        let (is_draining, session_ended) = (AtomicBool::new(false), Condvar::new());
        Arc::new(Admission { tenants, max_open, state, is_draining, session_ended })
    }

    /// Counts a new connection of the client at `peer` as a pending handshake. `aborter` closes it. At the limit of handshakes,
    /// another one makes room for it, and is returned.
    ///
    /// # Errors
    /// Why the new connection is to be closed instead.
    pub(super) fn admit(
        self: &Arc<Admission>,
        peer: PeerAddr,
        aborter: Aborter,
    ) -> Result<(SessionPermit, Option<ClosedHandshake>), Rejection> {
        let mut state = lock(&self.state);
        if state.sessions.len() >= self.max_open {
            return Err(Rejection::TooManyOpen(self.max_open));
        }
        let (handshake, closed) = match self.tenants.reserve(peer, Resource::Handshakes) {
            Ok(handshake) => (handshake, None),
            // One place is enough: at the limit of its tenant, the one that is closed is of the same tenant.
            Err(reason) => {
                let closed = state.close_handshake(peer, reason)?;
                (self.tenants.reserve(peer, Resource::Handshakes)?, Some(closed))
            }
        };
        let key = state.next_key;
        state.next_key += 1;
        state.pending.insert(key, handshake, aborter.clone());
        let session = AdmittedSession { aborter, watch: Weak::new(), is_aborted: false, connection: None };
        state.sessions.insert(key, session);
        Ok((SessionPermit { admission: Arc::clone(self), key }, closed))
    }

    /// The server's state as admitted clients see it: never "full", which concerns new clients only.
    pub(super) fn state(&self) -> ServerState {
        lock(&self.state).state()
    }

    /// Whether new clients are rejected. Takes no lock.
    pub(super) fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Relaxed)
    }

    /// Sends SERVER_STATE to this client when the server begins to drain. Returns the current state.
    pub(super) fn subscribe(&self, writer: &Arc<ClientWriter>) -> ServerState {
        let mut state = lock(&self.state);
        state.subscribers.retain(|writer| writer.strong_count() > 0);
        state.subscribers.push(Arc::downgrade(writer));
        state.state()
    }

    /// Number of sessions: connections whose handshake is complete.
    pub(super) fn session_count(&self) -> usize {
        lock(&self.state).sessions.values().filter(|session| session.connection.is_some()).count()
    }

    /// Number of open connections.
    pub(super) fn connection_count(&self) -> usize {
        lock(&self.state).sessions.len()
    }

    /// Rejects new clients from now on, and sends SERVER_STATE to the subscribed sessions. Does not block on any client.
    pub(super) fn drain(&self) {
        let mut state = lock(&self.state);
        let first_late = state.next_key;
        state.draining.get_or_insert(first_late);
        self.is_draining.store(true, Ordering::Relaxed);
        let subscribers = std::mem::take(&mut state.subscribers);
        drop(state);
        for writer in subscribers.iter().filter_map(Weak::upgrade) {
            // One thread per client: a client that does not read must not delay the notification of the others. If no thread
            // can be started, the client learns the state from its next PING.
            let notify = move || {
                if let Err(error) = writer.send_notification(&Notification::ServerState(ServerState::Draining)) {
                    writer.fail("SERVER_STATE", error);
                }
            };
            if let Err(e) = thread::Builder::new().name("drain-notify".to_owned()).spawn(notify) {
                debug!("cannot start a thread that notifies a client of the drain: {e}");
            }
        }
    }

    /// Blocks until all connections from before the drain have ended, or until `until`. Returns the number of those that are
    /// left.
    pub(super) fn wait_until_drained(&self, until: Instant) -> usize {
        self.wait_until_ended(until, |state| {
            let first_late = state.draining.unwrap_or(state.next_key);
            state.sessions.keys().filter(|&&key| key < first_late).count()
        })
    }

    /// Blocks until all connections have ended, or until `until`. Returns the number of those that are left.
    pub(super) fn wait_until_empty(&self, until: Instant) -> usize {
        self.wait_until_ended(until, |state| state.sessions.len())
    }

    /// Blocks until `count` is 0, or until `until`. Returns the last count.
    fn wait_until_ended(&self, until: Instant, count: impl Fn(&AdmissionState) -> usize) -> usize {
        let mut state = lock(&self.state);
        loop {
            let (count, left) = (count(&state), until.saturating_duration_since(sync::now()));
            if count == 0 || left.is_zero() {
                return count;
            }
            state = self.session_ended.wait_timeout(state, left).unpoisoned().0;
        }
    }

    /// Closes the connections of the peers for which `is_over` holds and cancels their work. Returns these peers.
    pub(super) fn abort_if(&self, is_over: impl Fn(PeerAddr) -> bool) -> Vec<PeerAddr> {
        let mut state = lock(&self.state);
        let (mut ended, mut watches) = (Vec::new(), Vec::new());
        for session in state.sessions.values_mut() {
            let peer = session.aborter.peer();
            if is_over(peer) {
                session.is_aborted = true;
                session.aborter.abort();
                watches.extend(session.watch.upgrade());
                ended.push(peer);
            }
        }
        drop(state);
        watches.iter().for_each(|watch| watch.cancel());
        ended
    }

    /// Closes the connections of all sessions.
    pub(super) fn abort_connections(&self) {
        lock(&self.state).sessions.values().for_each(|session| session.aborter.abort());
    }
}

impl AdmissionState {
    fn state(&self) -> ServerState {
        if self.draining.is_some() { ServerState::Draining } else { ServerState::Ready }
    }

    /// Ends a pending handshake for a new connection of `peer`, which has reached a limit of handshakes.
    ///
    /// # Errors
    /// That limit: there is no pending handshake.
    fn close_handshake(&mut self, peer: PeerAddr, reason: LimitReached) -> Result<ClosedHandshake, LimitReached> {
        let victim = self.pending.victim(Tenant::address(peer), reason.tenant);
        let session = victim.and_then(|key| self.sessions.get_mut(&key).map(|session| (key, session)));
        let Some((key, session)) = session else { return Err(reason) };
        session.is_aborted = true;
        let connection = session.aborter.clone();
        self.pending.remove(key);
        Ok(ClosedHandshake { connection, reason })
    }
}

/// Counts one connection until it is dropped: as a pending handshake, and as a session from [`SessionPermit::begin`] on.
pub(super) struct SessionPermit {
    admission: Arc<Admission>,
    key: u64,
}

impl SessionPermit {
    /// Lets [`Admission::abort_if`] cancel the session's work. `audit` counts the connection's bytes.
    pub(super) fn set_watch(&self, watch: &Arc<SessionWatch>, audit: &Arc<SessionAudit>) {
        let mut state = lock(&self.admission.state);
        state.pending.set_audit(self.key, Arc::downgrade(audit));
        let Some(session) = state.sessions.get_mut(&self.key) else { return };
        session.watch = Arc::downgrade(watch);
        let is_aborted = session.is_aborted;
        drop(state);
        if is_aborted {
            watch.cancel();
        }
    }

    /// Makes the connection a session of the client at `peer`, which has proved its key if it has one: its HELLO is complete.
    /// Reserves the base of its host memory.
    ///
    /// # Errors
    /// Why it does not become one. It is still a pending handshake then, unless it was closed.
    pub(super) fn begin(&self, peer: PeerAddr, memory: &SessionMemory) -> Result<(), Refusal> {
        let state = &mut *lock(&self.admission.state);
        let Some(session) = state.sessions.get_mut(&self.key).filter(|session| !session.is_aborted) else {
            return Err(Refusal::Closed);
        };
        if state.draining.is_some() {
            return Err(Refusal::Draining);
        }
        if let Some(remaining) = self.admission.tenants.refused_for(peer) {
            return Err(Refusal::AfterFaults(remaining));
        }
        let connection = self.admission.tenants.reserve(peer, Resource::Connections).map_err(Refusal::Full)?;
        memory.reserve_base(self.admission.tenants.host_memory_budget(peer)).map_err(Refusal::FullMemory)?;
        session.connection = Some(connection);
        state.pending.remove(self.key);
        Ok(())
    }

    /// Whether [`Admission::abort_if`] has ended the session, or its handshake was closed for another one.
    pub(super) fn is_aborted(&self) -> bool {
        lock(&self.admission.state).sessions.get(&self.key).is_some_and(|session| session.is_aborted)
    }
}

impl Drop for SessionPermit {
    fn drop(&mut self) {
        let mut state = lock(&self.admission.state);
        state.pending.remove(self.key);
        state.sessions.remove(&self.key);
        drop(state);
        self.admission.session_ended.notify_all();
    }
}

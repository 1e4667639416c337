//! Admission control: limits the number of sessions and of handshakes in flight, rejects further clients, and notifies sessions
//! when the server drains.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use log::debug;

use super::client_connection::ClientWriter;
use super::hangup_watch::SessionWatch;
use super::host_memory::{HostMemory, HostMemoryError, SessionMemory};
use super::tenants::{LimitReached, Resource, TenantPermit, Tenants};
use crate::rpc::transport::{Aborter, PeerAddr};
use crate::rpc::wire::ext::{Notification, ServerState};

/// Limit of clients that are being sent the reason of their rejection at the same time, because each takes a thread. Further
/// clients are closed without a reply.
const MAX_REJECTING: usize = 64;

/// The sessions of a server and their limits.
pub(super) struct Admission {
    tenants: Arc<Tenants>,
    host_memory: Arc<HostMemory>,
    state: Mutex<AdmissionState>,
    /// A copy of the state's, for readers that must take no lock.
    is_draining: AtomicBool,
    /// Notified when a session ends.
    session_ended: Condvar,
}

#[derive(Default)]
struct AdmissionState {
    /// The sessions, by the key of their [`SessionPermit`].
    sessions: HashMap<u64, AdmittedSession>,
    next_key: u64,
    /// Number of live [`RejectPermit`]s.
    rejecting: usize,
    draining: bool,
    /// Writers of the sessions that receive SERVER_STATE when the server begins to drain. Only clients of the extension do.
    subscribers: Vec<Weak<ClientWriter>>,
}

/// A session, as far as its admission concerns.
struct AdmittedSession {
    /// Closes the connection.
    aborter: Aborter,
    /// Cancels its work; none before the session's thread runs.
    watch: Weak<SessionWatch>,
    /// Whether [`Admission::abort_if`] has closed it.
    is_aborted: bool,
    /// Part of the entry, so that the connection's place is free as soon as the session is no longer counted.
    connection: TenantPermit,
}

/// Why a client is not admitted.
pub(super) enum Rejection {
    Draining,
    /// A limit of connections is reached. The client receives the state "full".
    Full(LimitReached),
    /// The base of a session does not fit into the host memory. The client receives the state "full".
    FullMemory(HostMemoryError),
    /// A limit of handshakes is reached. The client is closed without a reply, for which the server would have to read the
    /// HELLO of a client that has not sent one.
    TooManyHandshakes(LimitReached),
}

impl Admission {
    /// Admits sessions within the limits of `tenants` and the base of their host memory.
    pub(super) fn new(tenants: &Arc<Tenants>, host_memory: &Arc<HostMemory>) -> Arc<Admission> {
        let (tenants, host_memory) = (Arc::clone(tenants), Arc::clone(host_memory));
        let (state, is_draining, session_ended) = (Mutex::default(), AtomicBool::new(false), Condvar::new());
        Arc::new(Admission { tenants, host_memory, state, is_draining, session_ended })
    }

    /// Admits a session of the client at `peer`. `aborter` closes its connection. The second permit is that of its handshake;
    /// the last value is the session's host memory.
    ///
    /// # Errors
    /// Why the client is not admitted.
    pub(super) fn admit(
        self: &Arc<Admission>,
        peer: PeerAddr,
        aborter: Aborter,
    ) -> Result<(SessionPermit, TenantPermit, Arc<SessionMemory>), Rejection> {
        let mut state = self.lock();
        if state.draining {
            return Err(Rejection::Draining);
        }
        let connection = self.tenants.reserve(peer, Resource::Connections).map_err(Rejection::Full)?;
        let handshake = self.tenants.reserve(peer, Resource::Handshakes).map_err(Rejection::TooManyHandshakes)?;
        let memory = self.host_memory.admit().map_err(Rejection::FullMemory)?;
        let key = state.next_key;
        state.next_key += 1;
        state.sessions.insert(key, AdmittedSession { aborter, watch: Weak::new(), is_aborted: false, connection });
        Ok((SessionPermit { admission: Arc::clone(self), key }, handshake, memory))
    }

    /// Permission to send a rejected client the reason; `None` if [`MAX_REJECTING`] clients are being sent theirs.
    pub(super) fn reserve_rejection(self: &Arc<Admission>) -> Option<RejectPermit> {
        let mut state = self.lock();
        (state.rejecting < MAX_REJECTING).then(|| {
            state.rejecting += 1;
            RejectPermit(Arc::clone(self))
        })
    }

    /// The server's state as admitted clients see it: never "full", which concerns new clients only.
    pub(super) fn state(&self) -> ServerState {
        self.lock().state()
    }

    /// Whether new clients are rejected. Takes no lock.
    pub(super) fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Relaxed)
    }

    /// Sends SERVER_STATE to this client when the server begins to drain. Returns the current state.
    pub(super) fn subscribe(&self, writer: &Arc<ClientWriter>) -> ServerState {
        let mut state = self.lock();
        state.subscribers.retain(|writer| writer.strong_count() > 0);
        state.subscribers.push(Arc::downgrade(writer));
        state.state()
    }

    /// Number of sessions.
    pub(super) fn session_count(&self) -> usize {
        self.lock().sessions.len()
    }

    /// Rejects new clients from now on, and sends SERVER_STATE to the subscribed sessions. Does not block on any client.
    pub(super) fn drain(&self) {
        let mut state = self.lock();
        state.draining = true;
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
            if let Err(e) = std::thread::Builder::new().name("drain-notify".to_owned()).spawn(notify) {
                debug!("cannot start a thread that notifies a client of the drain: {e}");
            }
        }
    }

    /// Blocks until all sessions have ended, or until `until`. Returns the number of sessions that are left.
    pub(super) fn wait_until_empty(&self, until: Instant) -> usize {
        let mut state = self.lock();
        while !state.sessions.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.session_ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.sessions.len()
    }

    /// Closes the connections of the peers for which `is_over` holds and cancels their work. Returns these peers.
    pub(super) fn abort_if(&self, is_over: impl Fn(PeerAddr) -> bool) -> Vec<PeerAddr> {
        let mut state = self.lock();
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
        self.lock().sessions.values().for_each(|session| session.aborter.abort());
    }

    fn lock(&self) -> MutexGuard<'_, AdmissionState> {
        // Ignores poisoning: each change is a single call, so a panic cannot leave the state half updated.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AdmissionState {
    fn state(&self) -> ServerState {
        if self.draining { ServerState::Draining } else { ServerState::Ready }
    }
}

/// Counts one session against the limit until it is dropped.
pub(super) struct SessionPermit {
    admission: Arc<Admission>,
    key: u64,
}

impl SessionPermit {
    /// Lets [`Admission::abort_if`] cancel the session's work.
    pub(super) fn set_watch(&self, watch: &Arc<SessionWatch>) {
        let mut state = self.admission.lock();
        let Some(session) = state.sessions.get_mut(&self.key) else { return };
        session.watch = Arc::downgrade(watch);
        let is_aborted = session.is_aborted;
        drop(state);
        if is_aborted {
            watch.cancel();
        }
    }

    /// Whether [`Admission::abort_if`] has ended the session.
    pub(super) fn is_aborted(&self) -> bool {
        self.admission.lock().sessions.get(&self.key).is_some_and(|session| session.is_aborted)
    }

    /// Counts the session for the tenant of `peer`, which has proved its key, instead of that of its address.
    ///
    /// # Errors
    /// The key has all of its connections. The session still counts for its address.
    pub(super) fn move_to(&self, peer: PeerAddr) -> Result<(), LimitReached> {
        let mut state = self.admission.lock();
        state.sessions.get_mut(&self.key).map_or(Ok(()), |session| session.connection.move_to(peer))
    }
}

impl Drop for SessionPermit {
    fn drop(&mut self) {
        self.admission.lock().sessions.remove(&self.key);
        self.admission.session_ended.notify_all();
    }
}

/// Counts one rejected client against [`MAX_REJECTING`] until it is dropped.
pub(super) struct RejectPermit(Arc<Admission>);

impl Drop for RejectPermit {
    fn drop(&mut self) {
        self.0.lock().rejecting -= 1;
    }
}

//! Admission control: limits the number of sessions, rejects further clients, and notifies sessions when the server drains.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use log::debug;

use super::client_connection::ClientWriter;
use crate::rpc::transport::Aborter;
use crate::rpc::wire::ext::{Notification, ServerState};

/// Limit of clients that are being sent the reason of their rejection at the same time, because each takes a thread. Further
/// clients are closed without a reply.
const MAX_REJECTING: usize = 64;

/// The sessions of a server and their limit.
pub(super) struct Admission {
    max_sessions: usize,
    state: Mutex<AdmissionState>,
    /// Notified when a session ends.
    session_ended: Condvar,
}

#[derive(Default)]
struct AdmissionState {
    /// Aborters of the sessions' connections, by the key of their [`SessionPermit`].
    sessions: HashMap<u64, Aborter>,
    next_key: u64,
    /// Number of live [`RejectPermit`]s.
    rejecting: usize,
    draining: bool,
    /// Writers of the sessions that receive SERVER_STATE when the server begins to drain. Only clients of the extension do.
    subscribers: Vec<Weak<ClientWriter>>,
}

impl Admission {
    /// Admits up to `max` sessions at a time.
    pub(super) fn new(max: usize) -> Arc<Admission> {
        Arc::new(Admission { max_sessions: max, state: Mutex::default(), session_ended: Condvar::new() })
    }

    /// Admits a session. `aborter` closes its connection.
    ///
    /// # Errors
    /// The state of the server that prevents it: full or draining.
    pub(super) fn admit(self: &Arc<Admission>, aborter: Aborter) -> Result<SessionPermit, ServerState> {
        let mut state = self.lock();
        if state.draining {
            return Err(ServerState::Draining);
        }
        if state.sessions.len() >= self.max_sessions {
            return Err(ServerState::Full);
        }
        let key = state.next_key;
        state.next_key += 1;
        state.sessions.insert(key, aborter);
        Ok(SessionPermit { admission: Arc::clone(self), key })
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

    /// Closes the connections of all sessions.
    pub(super) fn abort_connections(&self) {
        self.lock().sessions.values().for_each(Aborter::abort);
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

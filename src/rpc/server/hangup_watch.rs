//! Hang-up watch: a thread of the server that finds the clients which have gone while their session's thread is busy.
//!
//! A session's thread that reads the next request notices the end of its connection by itself. While the thread serves a
//! request, it may be blocked: by a program that runs inline, by a full queue, by a download, or by the lock of memory that
//! another queue computes in. The work of a client that has gone would then run to its end. The watch polls the connection of
//! each session that has been busy for a whole [`INTERVAL`]. If the client has hung up, it calls the session's *cancellers*:
//! callbacks that abort its queues and end its other waits. The session's thread then returns with an error, and its memory is
//! freed. All sessions share the thread, so a canceller that blocks would keep their clients from being found, too.
//!
//! A client that ends only its sending direction counts as gone, too: no client of ggml's protocol does that while it waits for
//! a reply.

use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Condvar, Mutex, Unpoisoned, Weak, lock};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::rpc::transport::Aborter;

/// Time between two polls of a session. A hang-up is found after at most two of them.
const INTERVAL: Duration = Duration::from_millis(250);

/// Within this time after a client has hung up, the work of its session is aborted.
const MAX_DETECTION: Duration = Duration::from_secs(1);

const _: () = assert!(2 * INTERVAL.as_nanos() < MAX_DETECTION.as_nanos());

/// The watched sessions of a server.
#[derive(Default)]
pub(super) struct HangupWatch {
    state: Mutex<WatchState>,
    /// Wakes the thread: there is a session again, or the watch ends.
    changed: Condvar,
}

#[derive(Default)]
struct WatchState {
    sessions: Vec<Weak<SessionWatch>>,
    ended: bool,
}

impl HangupWatch {
    /// Watches the connection of a new session, until the returned handle is dropped.
    pub(super) fn add_session(&self, connection: Aborter) -> Arc<SessionWatch> {
        let session = Arc::new(SessionWatch {
            connection,
            boundaries: AtomicU64::new(0),
            was_busy: AtomicBool::new(false),
            cancellers: Mutex::default(),
        });
        let mut state = lock(&self.state);
        state.sessions.push(Arc::downgrade(&session));
        let first = state.sessions.len() == 1;
        drop(state);
        // The thread polls further sessions after its current interval.
        if first {
            self.changed.notify_one();
        }
        session
    }

    /// The watch's thread: returns after [`HangupWatch::end`].
    pub(super) fn run(&self) {
        let mut state = lock(&self.state);
        while !state.ended {
            if state.sessions.is_empty() {
                state = self.changed.wait(state).unpoisoned();
                continue;
            }
            state = self.changed.wait_timeout(state, INTERVAL).unpoisoned().0;
            state.sessions.retain(|session| session.strong_count() > 0);
            let sessions: Vec<_> = state.sessions.iter().filter_map(Weak::upgrade).collect();
            drop(state);
            // Outside of the lock: a canceller may take a while, and must not delay new sessions.
            sessions.iter().for_each(|session| session.poll());
            drop(sessions);
            state = lock(&self.state);
        }
    }

    /// Ends the thread.
    pub(super) fn end(&self) {
        lock(&self.state).ended = true;
        self.changed.notify_one();
    }
}

/// The connection of one session, and what to cancel when its client has gone.
pub(super) struct SessionWatch {
    connection: Aborter,
    /// See [`SessionWatch::boundaries`].
    boundaries: AtomicU64,
    /// Whether the session served a request at the last poll.
    was_busy: AtomicBool,
    cancellers: Mutex<Cancellers>,
}

/// What a canceller ends. Cancellers are called in this order: a wait may end only when the running work has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum CancelOrder {
    /// The work of a device queue.
    Queue,
    /// A wait of the session's thread for something else.
    Wait,
}

type Canceller = Arc<dyn Fn() + Send + Sync>;

#[derive(Default)]
struct Cancellers {
    by_key: BTreeMap<(CancelOrder, u64), Canceller>,
    next_key: u64,
    /// Whether the cancellers were called: further ones are called at once.
    cancelled: bool,
}

impl SessionWatch {
    /// Records that the session begins or finishes a request.
    pub(super) fn count_boundary(&self) {
        self.boundaries.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of times that the session has begun or finished a request: odd while it serves one.
    pub(super) fn boundaries(&self) -> u64 {
        self.boundaries.load(Ordering::Relaxed)
    }

    /// Whether the watch has found that the client has gone, or [`SessionWatch::cancel`] was called.
    pub(super) fn has_hung_up(&self) -> bool {
        lock(&self.cancellers).cancelled
    }

    /// Calls `cancel` when the client has gone, until the returned guard is dropped; at once if it has gone already. A call
    /// that has begun may outlast the guard. `cancel` must not wait for anything that a client controls.
    pub(super) fn on_hangup(
        self: &Arc<Self>,
        order: CancelOrder,
        cancel: impl Fn() + Send + Sync + 'static,
    ) -> CancellerGuard {
        let cancel: Canceller = Arc::new(cancel);
        let mut cancellers = lock(&self.cancellers);
        let key = (order, cancellers.next_key);
        cancellers.next_key += 1;
        cancellers.by_key.insert(key, Arc::clone(&cancel));
        let cancelled = cancellers.cancelled;
        drop(cancellers);
        if cancelled {
            cancel();
        }
        CancellerGuard { session: Arc::clone(self), key }
    }

    /// Ends the connection, so that the session ends when it reads or writes next.
    pub(super) fn end_connection(&self) {
        self.connection.abort();
    }

    /// Cancels the session's work if it served a request at this poll and at the last one, and its client has hung up. The
    /// requests may differ: a client may have sent any number of short ones before it left.
    fn poll(&self) {
        let is_busy = self.boundaries() % 2 == 1;
        let was_busy = self.was_busy.swap(is_busy, Ordering::Relaxed);
        if is_busy && was_busy && !self.has_hung_up() && self.connection.hung_up() {
            self.cancel();
        }
    }

    /// Ends the connection, calls the cancellers, and lets the session serve no further request, also of those that have
    /// arrived. The caller must hold no lock that a canceller takes.
    pub(super) fn cancel(&self) {
        let mut cancellers = lock(&self.cancellers);
        // Both the watch and a reread of the keys may find that the session is over.
        if std::mem::replace(&mut cancellers.cancelled, true) {
            return;
        }
        let to_call: Vec<_> = cancellers.by_key.values().cloned().collect();
        drop(cancellers);
        // Ends the session's writes to a client that does not read any more.
        self.connection.abort();
        for cancel in to_call {
            // Outside of the lock, which the session's thread takes. A panic is a bug; its message is in the log. It must
            // neither keep the other work of this session alive nor end the watch of the other sessions.
            let _ = catch_unwind(AssertUnwindSafe(|| cancel()));
        }
    }
}

/// Keeps a canceller registered.
pub(super) struct CancellerGuard {
    session: Arc<SessionWatch>,
    key: (CancelOrder, u64),
}

impl Drop for CancellerGuard {
    fn drop(&mut self) {
        let removed = lock(&self.session.cancellers).by_key.remove(&self.key);
        // Outside of the lock: this may drop the last handle of a device's resources.
        drop(removed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::transport::memory::{self, LinkConditions};
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn only_a_session_that_is_busy_at_two_polls_in_a_row_is_cancelled() {
        let (client, server) = memory::pair(LinkConditions { seed: 0, cut_after: None });
        let watch = HangupWatch::default();
        let session = watch.add_session(server.aborter());
        let cancelled = Arc::new(AtomicUsize::new(0));
        let canceller = || {
            let cancelled = Arc::clone(&cancelled);
            move || _ = cancelled.fetch_add(1, Ordering::Relaxed)
        };
        let guard = session.on_hangup(CancelOrder::Wait, canceller());
        let dropped = session.on_hangup(CancelOrder::Wait, canceller());
        drop(dropped);
        let poll = |begins_or_finishes: usize, want: usize| {
            (0..begins_or_finishes).for_each(|_| session.count_boundary());
            session.poll();
            assert_eq!(cancelled.load(Ordering::Relaxed), want);
        };
        poll(1, 0);
        poll(0, 0);
        client.aborter().abort();
        poll(1, 0); // idle: the session's thread notices the end by itself
        poll(0, 0);
        poll(1, 0); // busy, but not at the last poll
        assert!(!session.has_hung_up());
        poll(2, 1); // busy with another request
        assert!(session.has_hung_up());
        poll(0, 1);
        drop(guard);
        drop(session.on_hangup(CancelOrder::Wait, canceller()));
        assert_eq!(cancelled.load(Ordering::Relaxed), 2, "called at once");
    }

    /// Cancellers are called in their order, without the lock that the session's thread needs, and whether or not others panic.
    #[test]
    fn a_canceller_does_not_keep_the_others_from_running() {
        let (client, server) = memory::pair(LinkConditions { seed: 0, cut_after: None });
        let watch = HangupWatch::default();
        let session = watch.add_session(server.aborter());
        let called = Arc::new(Mutex::new(Vec::new()));
        let orders = [CancelOrder::Wait, CancelOrder::Queue, CancelOrder::Wait, CancelOrder::Queue];
        let guards = orders.into_iter().enumerate().map(|(number, order)| {
            let (watched, called) = (Arc::downgrade(&session), Arc::clone(&called));
            let cancel = move || {
                assert!(watched.upgrade().unwrap().cancellers.try_lock().is_ok());
                called.lock().unwrap().push(number);
                // Without the panic hook, whose output would be taken for a failure.
                std::panic::resume_unwind(Box::new(number));
            };
            session.on_hangup(order, cancel)
        });
        let _guards: Vec<_> = guards.collect();
        session.count_boundary();
        session.poll();
        client.aborter().abort();
        session.poll();
        assert_eq!(*called.lock().unwrap(), [1, 3, 0, 2]);
    }

    #[test]
    fn the_thread_ends_with_and_without_sessions() {
        for sessions in [0, 2] {
            let watch = HangupWatch::default();
            let (_client, server) = memory::pair(LinkConditions { seed: 0, cut_after: None });
            let _sessions: Vec<_> = (0..sessions).map(|_| watch.add_session(server.aborter())).collect();
            std::thread::scope(|scope| {
                scope.spawn(|| watch.run());
                watch.end();
            });
        }
    }
}

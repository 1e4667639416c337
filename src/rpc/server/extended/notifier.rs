//! Notifier: the second thread of a session of the extension, beside the one that reads requests. It sends the completions of
//! all queues of the session as they become ready, and the heartbeat.
//!
//! - **Completions.** A queue whose first pending completion waits for a [`TimelinePoint`] registers a callback on it, which
//!   puts the queue on the list of ready queues and wakes the thread. So a session with any number of queues has one thread for
//!   them. Points of devices that do not notify are polled while there are any.
//! - **Heartbeat.** While the session's thread serves one request for long, for example because a queue is full, it reads no
//!   PING. Once a second the notifier then sends SERVER_STATE. If that fails, the session's thread may be blocked on bytes from
//!   another server that will never arrive, so the notifier closes the session's receives.
//! - **Deadlines.** A completion that has been the first one of its queue for longer than the device timeout fails the queue.
//!   Groups that are late fail, too.

use crate::sync::{self, Arc, Condvar, Mutex, Unpoisoned, Weak, lock, thread};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use super::completions::QueueCompletions;
use crate::device::{DeviceError, POLL_INTERVAL, SPIN_BEFORE_SLEEP, TimelinePoint};
use crate::rpc::server::client_connection::ClientWriter;
use crate::rpc::server::groups::SessionGroups;
use crate::rpc::server::hangup_watch::SessionWatch;
use crate::rpc::server::lifecycle::Lifecycle;
use crate::rpc::server::log_limits::{LogKind, LogLimits};
use crate::rpc::server::transfer_tokens::SessionTransfers;
use crate::rpc::wire::ext::Notification;

/// Time between two heartbeats, and between two checks of the deadlines.
const INTERVAL: Duration = Duration::from_secs(1);

/// The notifier of a session. Dropping it ends its thread.
pub(super) struct Notifier(Arc<NotifierShared>);

/// State that the session, the notifier's thread and the callbacks of points share.
pub(super) struct NotifierShared {
    state: Mutex<NotifierState>,
    /// Wakes the thread: a queue is ready, or the session ends.
    changed: Condvar,
}

#[derive(Default)]
struct NotifierState {
    /// Queues whose first pending completion may be ready.
    ready: Vec<Arc<QueueCompletions>>,
    /// All queues of the session, for the deadlines.
    queues: Vec<Weak<QueueCompletions>>,
    ended: bool,
}

/// What the heartbeat needs.
struct Heartbeat {
    watch: Arc<SessionWatch>,
    lifecycle: Arc<Lifecycle>,
    writer: Arc<ClientWriter>,
    transfers: Arc<SessionTransfers>,
    /// The session's groups, whose deadlines the notifier checks. Weak, so that the end of the session drops the groups.
    groups: Weak<SessionGroups>,
    /// [`SessionWatch::boundaries`] at the last heartbeat.
    last: u64,
}

impl Notifier {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system cannot start it.
    pub(super) fn start(
        (lifecycle, logs): (&Arc<Lifecycle>, &Arc<LogLimits>),
        writer: &Arc<ClientWriter>,
        watch: &Arc<SessionWatch>,
        transfers: &Arc<SessionTransfers>,
        groups: &Arc<SessionGroups>,
    ) -> Result<Notifier, DeviceError> {
        let shared = Arc::new(NotifierShared { state: Mutex::default(), changed: Condvar::new() });
        let heartbeat = Heartbeat {
            watch: Arc::clone(watch),
            lifecycle: Arc::clone(lifecycle),
            writer: Arc::clone(writer),
            transfers: Arc::clone(transfers),
            groups: Arc::downgrade(groups),
            last: 0,
        };
        let (thread, writer, logs) = (Arc::clone(&shared), Arc::clone(writer), Arc::clone(logs));
        let started = thread::Builder::new().name("notifier".to_owned()).spawn(move || {
            // Without the thread, the client would wait for its notifications for ever, and nothing would check deadlines.
            if catch_unwind(AssertUnwindSafe(|| thread.run(heartbeat))).is_err() {
                let text = "bug in fanout: the thread that sends a session's notifications panicked; connection closed";
                logs.log_server(LogKind::Panic, format_args!("{text}"));
                writer.close();
            }
        });
        started.map_err(|e| DeviceError::thread_spawn_failed("for a session's notifications", &e))?;
        Ok(Notifier(shared))
    }

    pub(super) fn shared(&self) -> &Arc<NotifierShared> {
        &self.0
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        lock(&self.0.state).ended = true;
        self.0.changed.notify_one();
    }
}

impl NotifierShared {
    /// Adds a queue, whose deadlines are checked from now on.
    pub(super) fn add_queue(&self, queue: &Arc<QueueCompletions>) {
        let mut state = lock(&self.state);
        state.queues.retain(|queue| queue.strong_count() > 0);
        state.queues.push(Arc::downgrade(queue));
    }

    /// Puts a queue on the list of ready queues.
    pub(super) fn mark_ready(&self, queue: Arc<QueueCompletions>) {
        let mut state = lock(&self.state);
        let wake = state.ready.is_empty();
        state.ready.push(queue);
        drop(state);
        if wake {
            self.changed.notify_one();
        }
    }

    fn run(self: &Arc<Self>, mut heartbeat: Heartbeat) {
        // Points of devices that do not notify. Polling such a point calls its callback.
        let (mut polled, mut polling_since): (Vec<TimelinePoint>, _) = (Vec::new(), sync::now());
        let mut next_interval = sync::now() + INTERVAL;
        let mut state = lock(&self.state);
        while !state.ended {
            let ready = std::mem::take(&mut state.ready);
            let now = sync::now();
            if now >= next_interval {
                next_interval = now + INTERVAL;
                let queues: Vec<_> = state.queues.iter().filter_map(Weak::upgrade).collect();
                drop(state);
                // A group that fails is the reason for which its queues are late: their failure is about to name the rank.
                let has_failed = heartbeat.groups.upgrade().is_some_and(|groups| groups.check());
                if !has_failed {
                    queues.iter().for_each(|queue| queue.check_deadline(now));
                }
                heartbeat.beat();
                state = lock(&self.state);
            }
            if ready.is_empty() && polled.is_empty() {
                if state.ready.is_empty() && !state.ended {
                    let timeout = next_interval.saturating_duration_since(now);
                    state = self.changed.wait_timeout(state, timeout).unpoisoned().0;
                }
                continue;
            }
            drop(state);
            let has_ready = !ready.is_empty();
            for queue in ready {
                let Some(point) = queue.send_ready() else { continue };
                let shared = Arc::clone(self);
                // The point is one of the queue, whose end decides it.
                let registration = point.on_reached(move |_| shared.mark_ready(queue));
                let notifies = registration.notifies();
                registration.detach();
                if !notifies {
                    if polled.is_empty() {
                        polling_since = sync::now();
                    }
                    polled.push(point);
                }
            }
            if !has_ready {
                polled.retain(|point| point.poll() == Ok(false));
                match now.saturating_duration_since(polling_since) {
                    _ if polled.is_empty() => {}
                    waited if waited < SPIN_BEFORE_SLEEP => sync::spin_loop(),
                    _ => thread::sleep(POLL_INTERVAL),
                }
            }
            state = lock(&self.state);
        }
    }
}

impl Heartbeat {
    /// Sends SERVER_STATE if the session has served the same request since the last heartbeat.
    fn beat(&mut self) {
        let now = self.watch.boundaries();
        let busy = now == self.last && now % 2 == 1;
        self.last = now;
        if busy && let Err(error) = self.writer.send_notification(&Notification::ServerState(self.lifecycle.state())) {
            // Part of the notification may have been sent, so no other message can follow. Closing the connection also ends the
            // session's thread.
            self.writer.fail("SERVER_STATE", error);
            self.transfers.close();
        }
    }
}

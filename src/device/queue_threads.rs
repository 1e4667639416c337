//! The fixed threads that run the commands of a device's queues, however many queues there are.
//!
//! A queue is data: a [`CommandChannel`](super::CommandChannel) with pending commands. A channel that has a command to run stands
//! in one of two lanes, first come, first served. One thread serves the long lane (programs, large copies), in turns; others
//! serve the short lane and never block, so that a short command of one client does not wait for a program of another. A
//! channel whose next command waits for a timeline point stands in no lane: the point's callback puts it back. Only points of
//! devices that do not notify are polled, by a thread of the short lane.

use super::timeline::POLL_INTERVAL;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// How long a command may occupy the thread that runs it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Lane {
    /// About a millisecond, and the command waits for no lock that a program may hold.
    Short,
    /// Any time; it may block.
    Long,
}

/// A command channel, for its device's threads.
pub(super) trait RunCommands: Send + Sync {
    /// Runs the channel's next commands on a thread of `lane`. Does not panic.
    fn run_commands(self: Arc<Self>, lane: Lane);
}

/// The threads of a device's queues. Dropping the last clone ends them, each after the command that it runs.
#[derive(Clone)]
pub(crate) struct QueueThreads(Arc<StopOnDrop>);

struct StopOnDrop(Arc<Lanes>);

/// What the threads, and the channels that they serve, share.
#[derive(Default)]
pub(super) struct Lanes {
    state: Mutex<LanesState>,
    short: Condvar,
    long: Condvar,
    /// Number of channels in the long lane, readable without the lock.
    long_waiting: AtomicUsize,
}

#[derive(Default)]
struct LanesState {
    short: VecDeque<Arc<dyn RunCommands>>,
    long: VecDeque<Arc<dyn RunCommands>>,
    /// Channels whose next command waits for a point that has to be polled. They return to the short lane at `next_poll`.
    polled: Vec<Arc<dyn RunCommands>>,
    next_poll: Option<Instant>,
    stopped: bool,
}

impl QueueThreads {
    /// Starts one thread for the long lane and `short` threads for the short one. `name` is the threads' name.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub(crate) fn start(name: &str, short: usize) -> std::io::Result<QueueThreads> {
        let threads = QueueThreads(Arc::new(StopOnDrop(Arc::default())));
        for lane in std::iter::once(Lane::Long).chain(std::iter::repeat_n(Lane::Short, short)) {
            let lanes = Arc::clone(threads.lanes());
            std::thread::Builder::new().name(name.to_owned()).spawn(move || lanes.serve(lane))?;
        }
        Ok(threads)
    }

    /// Whether a channel stands in the long lane, so that a long command should end its turn.
    pub(crate) fn long_lane_is_awaited(&self) -> bool {
        self.lanes().long_waiting.load(Ordering::Relaxed) > 0
    }

    pub(super) fn lanes(&self) -> &Arc<Lanes> {
        &self.0.0
    }
}

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        // The threads are not joined: the last reference to a device may be dropped by one of them.
        self.0.lock().stopped = true;
        self.0.short.notify_all();
        self.0.long.notify_all();
    }
}

impl Lanes {
    /// Puts a channel at the end of a lane. The caller makes sure that it stands in none.
    pub(super) fn schedule(&self, channel: Arc<dyn RunCommands>, lane: Lane) {
        let mut state = self.lock();
        state.lane(lane).push_back(channel);
        self.count_long(&state);
        drop(state);
        self.changed(lane).notify_one();
    }

    /// Puts a channel back into the short lane at the next poll. The caller makes sure that it stands in no lane.
    pub(super) fn schedule_poll(&self, channel: Arc<dyn RunCommands>) {
        let mut state = self.lock();
        state.polled.push(channel);
        state.next_poll.get_or_insert_with(|| Instant::now() + POLL_INTERVAL);
        drop(state);
        self.short.notify_one();
    }

    /// Removes a channel from wherever it stands. Otherwise a client that opens and closes queues behind a long program would
    /// make the lane grow.
    pub(super) fn remove(&self, channel: &Arc<dyn RunCommands>) {
        let mut state = self.lock();
        let LanesState { short, long, polled, .. } = &mut *state;
        short.retain(|c| !Arc::ptr_eq(c, channel));
        long.retain(|c| !Arc::ptr_eq(c, channel));
        polled.retain(|c| !Arc::ptr_eq(c, channel));
        self.count_long(&state);
    }

    fn serve(&self, lane: Lane) {
        let mut state = self.lock();
        while !state.stopped {
            if lane == Lane::Short && state.next_poll.is_some_and(|at| at <= Instant::now()) {
                state.next_poll = None;
                let polled = std::mem::take(&mut state.polled);
                state.short.extend(polled);
            }
            if let Some(channel) = state.lane(lane).pop_front() {
                self.count_long(&state);
                drop(state);
                // A panic would leave all queues of the device without the thread. It is a bug, which may end this queue only.
                if catch_unwind(AssertUnwindSafe(|| channel.run_commands(lane))).is_err() {
                    log::error!("bug in fanout: a thread of a device's queues panicked");
                }
                state = self.lock();
                continue;
            }
            let next_poll = state.next_poll.filter(|_| lane == Lane::Short);
            state = match next_poll.map(|at| at.saturating_duration_since(Instant::now())) {
                None => self.changed(lane).wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(left) => self.short.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }

    fn count_long(&self, state: &LanesState) {
        self.long_waiting.store(state.long.len(), Ordering::Relaxed);
    }

    fn changed(&self, lane: Lane) -> &Condvar {
        match lane {
            Lane::Short => &self.short,
            Lane::Long => &self.long,
        }
    }

    fn lock(&self) -> MutexGuard<'_, LanesState> {
        // Poisoning is ignored: no code under this lock panics between two dependent writes, so the state is consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LanesState {
    fn lane(&mut self, lane: Lane) -> &mut VecDeque<Arc<dyn RunCommands>> {
        match lane {
            Lane::Short => &mut self.short,
            Lane::Long => &mut self.long,
        }
    }
}

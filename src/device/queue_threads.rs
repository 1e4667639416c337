//! The fixed threads that run the commands of a device's queues, however many queues there are, and the order in which clients
//! share the device.
//!
//! A queue is data: a [`CommandChannel`](super::CommandChannel) with pending commands. A channel that has a command to run stands
//! in one of two lanes. One thread serves the long lane (programs, large copies); others serve the short lane and never block,
//! so that a short command of one client does not wait for a program of another. A channel whose next command waits for a
//! timeline point stands in no lane: the point's callback puts it back. Only points of devices that do not notify are polled, by
//! a thread of the short lane.
//!
//! A thread uses the device only in a [`Turn`] of a lane: a thread of the lane for the channel that it runs, or a submitting
//! thread that runs a command itself. Tenants and sessions that wait get their turns by deficit round robin ([`FairQueue`]); a
//! submitting thread gets one at once only while no other waits. A turn does not end before others wait, and only the time
//! since then, and a slice, counts against its session: a session that had the device to itself owes nothing for that.
//!
//! The queues of one session take turns between commands, not within them: two programs of a pipeline that share a device by slices
//! would end at the same time, and then wait together for the next device.
//!
//! # Locks
//! In this order: a channel's state, the lanes' state, a waiting thread's turn. So no turn is dropped, and no channel is scheduled
//! or removed, under the lanes' lock. A thread holds at most one turn. It waits for a turn without holding a memory's lock; in a
//! turn of the long lane it may wait for such a lock, in one of the short lane it may not.

use super::fair_queue::{FairQueue, FlowKeys, MIN_TURN, SLICE};
use super::timeline::POLL_INTERVAL;
use super::{DeviceActivity, MemoryBudget};
use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use crate::sync::thread::{self, Thread};
use crate::sync::{self, Arc, Condvar, Instant, Mutex, Unpoisoned, lock};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

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
    /// The budget of the session whose turns the channel's commands take.
    fn session(&self) -> &Arc<MemoryBudget>;

    /// Runs the channel's next commands in a turn of a lane. Does not panic.
    fn run_commands(self: Arc<Self>, turn: Turn);
}

/// The threads of a device's queues. Dropping the last clone ends them, each after the command that it runs.
#[derive(Clone)]
pub(crate) struct QueueThreads(Arc<StopOnDrop>);

struct StopOnDrop(Arc<Lanes>);

/// The state that the threads and the channels share.
pub(super) struct Lanes {
    state: Mutex<LanesState>,
    /// By [`Lane`].
    signals: [LaneSignals; 2],
    /// Time of all turns that have ended, in nanoseconds.
    busy_nanos: AtomicU64,
}

/// No id of a session.
const NO_SESSION: u64 = u64::MAX;

/// The part of a lane that needs no lock.
struct LaneSignals {
    /// Wakes the lane's threads.
    changed: Condvar,
    /// Number of waiters in the lane; in the short lane also of channels that have to be polled, for which a thread must become
    /// free.
    waiting: AtomicUsize,
    /// The session that all waiters belong to; [`NO_SESSION`] if there are none, or of several sessions.
    only_session: AtomicU64,
    /// Whether a waiter interrupts the turns under way, as [`FairQueue::push`] says.
    interrupted: AtomicBool,
}

impl LaneSignals {
    /// The signals of a lane without waiters.
    fn new() -> LaneSignals {
        LaneSignals {
            changed: Condvar::new(),
            waiting: AtomicUsize::new(0),
            only_session: AtomicU64::new(NO_SESSION),
            interrupted: AtomicBool::new(false),
        }
    }
}

struct LanesState {
    /// By [`Lane`].
    lanes: [LaneState; 2],
    /// Channels whose next command waits for a point that has to be polled. They return to the short lane at `next_poll`.
    polled: Vec<Arc<dyn RunCommands>>,
    next_poll: Option<Instant>,
    stopped: bool,
}

struct LaneState {
    waiting: FairQueue<Waiter>,
    /// The time since which there have always been waiters.
    contended_since: Option<Instant>,
    /// Channels that have a turn, and its slice, until a thread of the lane runs them.
    ready: VecDeque<(Arc<dyn RunCommands>, Duration)>,
    /// Turns under way.
    turns: usize,
    /// Limit on the turns at a time: the number of the lane's threads.
    max_turns: usize,
}

/// A channel or a thread that waits for a turn.
enum Waiter {
    Channel(Arc<dyn RunCommands>),
    /// A submitting thread.
    Thread(Arc<WaitingThread>),
}

/// A submitting thread, and the turn that it gets.
struct WaitingThread {
    session: Arc<MemoryBudget>,
    thread: Thread,
    turn: Mutex<Option<Turn>>,
}

/// Permission to use a lane of a device. Dropping it ends the turn, and charges its time to the session.
pub(crate) struct Turn {
    lanes: Arc<Lanes>,
    lane: Lane,
    session: Arc<MemoryBudget>,
    began: Instant,
    /// Time until the turn ends if others wait.
    slice: Duration,
}

impl Turn {
    pub(crate) fn lane(&self) -> Lane {
        self.lane
    }

    /// Whether the turn should end: its slice is over or it was interrupted, and others wait.
    pub(crate) fn is_over(&self) -> bool {
        let signals = self.lanes.signals(self.lane);
        if signals.waiting.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let slice = if signals.interrupted.load(Ordering::Relaxed) { self.slice.min(MIN_TURN) } else { self.slice };
        sync::now() - self.began >= slice
    }

    /// Whether the turn should end within a command: it is over, and others than its own session wait.
    pub(crate) fn interrupts_command(&self) -> bool {
        let [_, session] = self.session.flow_keys();
        self.lanes.signals(self.lane).only_session.load(Ordering::Relaxed) != session && self.is_over()
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.lanes.end_turn(self.lane, &self.session, sync::now() - self.began);
    }
}

impl QueueThreads {
    /// Starts one thread for the long lane and `short` threads for the short one. `name` is the threads' name.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub(crate) fn start(name: &str, short: usize) -> std::io::Result<QueueThreads> {
        let lane = |max_turns| LaneState {
            waiting: FairQueue::default(),
            contended_since: None,
            ready: VecDeque::new(),
            turns: 0,
            max_turns,
        };
        let state = LanesState { lanes: [lane(short), lane(1)], polled: Vec::new(), next_poll: None, stopped: false };
        let lanes = Lanes {
            state: Mutex::new(state),
            signals: [LaneSignals::new(), LaneSignals::new()],
            busy_nanos: AtomicU64::new(0),
        };
        let threads = QueueThreads(Arc::new(StopOnDrop(Arc::new(lanes))));
        for lane in std::iter::once(Lane::Long).chain(std::iter::repeat_n(Lane::Short, short)) {
            let lanes = Arc::clone(threads.lanes());
            thread::Builder::new().name(name.to_owned()).spawn(move || lanes.serve(lane))?;
        }
        Ok(threads)
    }

    /// Time of all turns that have ended, and the number of those that wait for one.
    pub(crate) fn activity(&self) -> DeviceActivity {
        let lanes = self.lanes();
        let waiting = |signals: &LaneSignals| signals.waiting.load(Ordering::Relaxed);
        DeviceActivity {
            busy: Duration::from_nanos(lanes.busy_nanos.load(Ordering::Relaxed)),
            waiting: lanes.signals.iter().map(waiting).sum(),
        }
    }

    /// A turn for the calling thread. `None`: others wait, or as many as may have one have a turn.
    pub(crate) fn try_begin(&self, lane: Lane, session: &Arc<MemoryBudget>) -> Option<Turn> {
        let mut state = lock(&self.lanes().state);
        let state = state.lane(lane);
        if state.waiting.len() > 0 || state.turns >= state.max_turns {
            return None;
        }
        state.turns += 1;
        Some(self.lanes().turn(lane, session, SLICE))
    }

    /// A turn for the calling thread, which waits for it: about a slice for each tenant with work. The thread must have no turn,
    /// and the lane must have threads.
    pub(crate) fn begin(&self, lane: Lane, session: &Arc<MemoryBudget>) -> Turn {
        if let Some(turn) = self.try_begin(lane, session) {
            return turn;
        }
        let waiting =
            Arc::new(WaitingThread { session: Arc::clone(session), thread: thread::current(), turn: Mutex::new(None) });
        self.lanes().push(lane, session.flow_keys(), Waiter::Thread(Arc::clone(&waiting)));
        loop {
            if let Some(turn) = waiting.turn.lock().unpoisoned().take() {
                return turn;
            }
            thread::park();
        }
    }

    pub(super) fn lanes(&self) -> &Arc<Lanes> {
        &self.0.0
    }
}

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        // The threads are not joined: the last reference to a device may be dropped by one of them.
        lock(&self.0.state).stopped = true;
        self.0.signals.iter().for_each(|signals| signals.changed.notify_all());
    }
}

impl Lanes {
    /// Makes a channel wait in a lane. The caller makes sure that it stands in none.
    pub(super) fn schedule(self: &Arc<Self>, channel: Arc<dyn RunCommands>, lane: Lane) {
        let keys = channel.session().flow_keys();
        self.push(lane, keys, Waiter::Channel(channel));
    }

    fn push(self: &Arc<Self>, lane: Lane, keys: FlowKeys, waiter: Waiter) {
        let mut state = lock(&self.state);
        self.enqueue(&mut state, lane, keys, waiter);
        self.give_turns(&mut state, lane);
    }

    fn enqueue(&self, state: &mut LanesState, lane: Lane, keys: FlowKeys, waiter: Waiter) {
        if state.lane(lane).push(keys, waiter) {
            self.signals(lane).interrupted.store(true, Ordering::Relaxed);
        }
    }

    /// Gives as many turns as there may be, to the next waiters.
    fn give_turns(self: &Arc<Self>, all: &mut LanesState, lane: Lane) {
        let (state, signals) = (all.lane(lane), self.signals(lane));
        while let Some((waiter, slice)) = state.next_turn() {
            signals.interrupted.store(false, Ordering::Relaxed);
            match waiter {
                Waiter::Channel(channel) => {
                    state.ready.push_back((channel, slice));
                    signals.changed.notify_one();
                }
                Waiter::Thread(waiting) => {
                    let turn = self.turn(lane, &waiting.session, slice);
                    *waiting.turn.lock().unpoisoned() = Some(turn);
                    waiting.thread.unpark();
                }
            }
        }
        state.update_contention();
        if state.held_until().is_some() {
            // A thread of the lane waits for the end of the hold.
            signals.changed.notify_one();
        }
        self.store_waiting(all, lane);
    }

    /// Stores the number of waiters for [`Turn::is_over`].
    fn store_waiting(&self, state: &mut LanesState, lane: Lane) {
        let polled = if lane == Lane::Short { state.polled.len() } else { 0 };
        let (signals, waiting) = (self.signals(lane), &state.lane(lane).waiting);
        signals.waiting.store(waiting.len() + polled, Ordering::Relaxed);
        let only = waiting.only_session().filter(|_| polled == 0);
        signals.only_session.store(only.unwrap_or(NO_SESSION), Ordering::Relaxed);
    }

    /// Puts a channel back into the short lane at the next poll. The caller makes sure that it stands in no lane.
    pub(super) fn schedule_poll(&self, channel: Arc<dyn RunCommands>) {
        let mut state = lock(&self.state);
        state.polled.push(channel);
        state.next_poll.get_or_insert_with(|| sync::now() + POLL_INTERVAL);
        self.store_waiting(&mut state, Lane::Short);
        drop(state);
        self.signals(Lane::Short).changed.notify_one();
    }

    /// Removes a channel from wherever it stands. Otherwise a client that opens and closes queues after a long program would
    /// make the lane grow.
    pub(super) fn remove(self: &Arc<Self>, channel: &Arc<dyn RunCommands>) {
        let keys = channel.session().flow_keys();
        let is_same = |waiter: &Waiter| matches!(waiter, Waiter::Channel(other) if Arc::ptr_eq(other, channel));
        let mut state = lock(&self.state);
        state.polled.retain(|c| !Arc::ptr_eq(c, channel));
        for lane in [Lane::Short, Lane::Long] {
            let of_lane = state.lane(lane);
            of_lane.waiting.remove(keys, is_same);
            let ready = of_lane.ready.len();
            of_lane.ready.retain(|(other, _)| !Arc::ptr_eq(other, channel));
            of_lane.turns -= ready - of_lane.ready.len();
            self.give_turns(&mut state, lane);
        }
    }

    /// A turn that `turns` of the lane counts already.
    fn turn(self: &Arc<Self>, lane: Lane, session: &Arc<MemoryBudget>, slice: Duration) -> Turn {
        Turn { lanes: Arc::clone(self), lane, session: Arc::clone(session), began: sync::now(), slice }
    }

    fn end_turn(self: &Arc<Self>, lane: Lane, session: &MemoryBudget, time: Duration) {
        session.add_device_time(time);
        self.busy_nanos.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        let mut state = lock(&self.state);
        let of_lane = state.lane(lane);
        of_lane.turns -= 1;
        let now = sync::now();
        let charged = of_lane.charged_time(time, now);
        of_lane.waiting.charge(session.flow_keys(), charged, session.share(), now);
        if of_lane.waiting.len() > 0 {
            self.give_turns(&mut state, lane);
        }
    }

    fn serve(self: &Arc<Self>, lane: Lane) {
        let mut state = lock(&self.state);
        while !state.stopped {
            if lane == Lane::Short && state.next_poll.is_some_and(|at| at <= sync::now()) {
                state.next_poll = None;
                for channel in std::mem::take(&mut state.polled) {
                    let keys = channel.session().flow_keys();
                    self.enqueue(&mut state, lane, keys, Waiter::Channel(channel));
                }
                self.give_turns(&mut state, lane);
            }
            if let Some((channel, slice)) = state.lane(lane).ready.pop_front() {
                drop(state);
                let turn = self.turn(lane, channel.session(), slice);
                // A panic would leave all queues of the device without the thread. It is a bug, which may end this queue only.
                if catch_unwind(AssertUnwindSafe(|| channel.run_commands(turn))).is_err() {
                    log::error!("bug in fanout: a thread of a device's queues panicked");
                }
                state = lock(&self.state);
                continue;
            }
            let next_poll = state.next_poll.filter(|_| lane == Lane::Short);
            let held_until = state.lane(lane).held_until();
            if held_until.is_some_and(|until| until <= sync::now()) {
                self.give_turns(&mut state, lane);
                continue;
            }
            let changed = &self.signals(lane).changed;
            state = match next_poll.into_iter().chain(held_until).min() {
                None => changed.wait(state).unpoisoned(),
                Some(until) => {
                    let left = until.saturating_duration_since(sync::now());
                    changed.wait_timeout(state, left).unpoisoned().0
                }
            };
        }
    }

    fn signals(&self, lane: Lane) -> &LaneSignals {
        &self.signals[lane as usize]
    }
}

impl LanesState {
    fn lane(&mut self, lane: Lane) -> &mut LaneState {
        &mut self.lanes[lane as usize]
    }
}

impl LaneState {
    /// When the next turn may be given, if all waiters are held and a turn is free.
    fn held_until(&self) -> Option<Instant> {
        self.waiting.held_until().filter(|_| self.turns < self.max_turns)
    }

    /// As [`FairQueue::push`].
    fn push(&mut self, keys: FlowKeys, waiter: Waiter) -> bool {
        let is_idle = self.turns == 0;
        self.waiting.push(keys, waiter, is_idle)
    }

    fn update_contention(&mut self) {
        match (self.waiting.len(), self.contended_since) {
            (0, _) => self.contended_since = None,
            (_, None) => self.contended_since = Some(sync::now()),
            (_, Some(_)) => {}
        }
    }

    /// The part of a turn of `time`, which ends `now`, that counts against its session: a slice, and the time since others wait.
    fn charged_time(&self, time: Duration, now: Instant) -> Duration {
        let contended = self.contended_since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        time.min(SLICE + contended)
    }

    /// The waiter that has the next turn, and its slice. `None`: none waits, or as many turns as there may be are under way.
    fn next_turn(&mut self) -> Option<(Waiter, Duration)> {
        if self.turns >= self.max_turns {
            return None;
        }
        let next = self.waiting.pop(sync::now())?;
        self.turns += 1;
        Some(next)
    }
}

#[cfg(test)]
mod tests;

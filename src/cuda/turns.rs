//! Turns on a GPU: while several sessions use it, each segment of a program is submitted in a turn of its session.
//!
//! A GPU executes all that its streams have got, in an order of the driver, and no work can be taken back. So a session that
//! submits seconds of work at once would put them in front of all others. Instead, a queue submits one segment (a slice of
//! estimated time) and keeps the turn until the event after the segment is reached. Deficit round robin ([`FairQueue`], as on a
//! CPU device) gives the next turn: between a request and its turn, each other tenant has about a slice. The submitting thread
//! waits for all that, so a program is done when [`Queue::run`](crate::device::Queue::run) returns. Uploads, downloads and copies
//! take no turn.
//!
//! A session that is alone waits for nothing: it submits all segments at once, and neither queries its stream nor records events.
//! It is alone unless another session is submitting, has work on its streams, or has submitted some within [`RECENT`]. Work that
//! was submitted before another session came is not taken back, so that session's first segments share the GPU with it. Their
//! time does not count as debt beyond a slice.
//!
//! # No deadlock
//! A turn lasts only while the GPU executes: it is requested when the stream has no earlier work, and a segment contains no waits.
//! The earlier work may wait for other queues, whose work is submitted, so it ends by itself. A thread that waits for a turn checks
//! whether its queue was aborted; a failed driver call ends its turn, and the next one.

use crate::device::{DeviceError, FairQueue, FlowKeys, MemoryBudget, RECENT, SLICE};
use crate::poison::Unpoisoned;
use crate::poison::lock;
use std::sync::{Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

/// Limit of a turn, in which a segment of any length is submitted. The segment then runs on without it.
const MAX_TURN: Duration = Duration::from_secs(1);

/// How often a thread that waits for a turn checks whether its queue was aborted.
const ABORT_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The stream of a queue, for other queues.
pub(super) trait StreamStatus: Send + Sync {
    /// Whether the stream has work that is not done, or a thread submits some.
    fn is_busy(&self) -> bool;
}

/// The turns on one device.
#[derive(Default)]
pub(super) struct GpuTurns {
    state: Mutex<TurnsState>,
    /// Wakes all threads that wait for a turn.
    changed: Condvar,
}

#[derive(Default)]
struct TurnsState {
    /// Queues that submitted programs, except those that other sessions found inactive.
    users: Vec<GpuUser>,
    /// The threads that wait for a turn, by ticket.
    waiting: FairQueue<u64>,
    /// The ticket of the turn under way.
    current: Option<u64>,
    last_ticket: u64,
    /// Whether a session was alone since the last request: nobody owes debts from before.
    was_alone: bool,
}

/// A queue that submitted a program.
struct GpuUser {
    session: FlowKeys,
    stream: Weak<dyn StreamStatus>,
    phase: Phase,
    /// When the phase began.
    since: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// No thread waits: what was submitted may run.
    Submitted,
    /// A thread waits until the stream has no work.
    Draining,
    /// A thread waits for a turn or has it.
    TakingTurn,
}

/// A queue that needs a turn because it is not alone. Other sessions see the queue as a user until this is dropped.
pub(super) struct TurnRequest<'a> {
    turns: &'a GpuTurns,
    session: &'a MemoryBudget,
    stream: &'a Weak<dyn StreamStatus>,
}

/// Permission to submit a segment. Dropping it ends the turn, and charges its time to the session.
pub(super) struct GpuTurn<'a> {
    request: &'a TurnRequest<'a>,
    began: Instant,
    /// Whether work of other sessions that was submitted without turns may still run.
    is_shared: bool,
}

impl GpuTurns {
    /// Number of threads that wait for a turn.
    pub(super) fn waiting(&self) -> usize {
        lock(&self.state).waiting.len()
    }

    /// Whether no other session uses the GPU.
    pub(super) fn is_alone(&self, session: &MemoryBudget) -> bool {
        lock(&self.state).is_alone(session.flow_keys(), Instant::now())
    }

    /// Records that a queue of `session` is about to submit a segment. `None` if the session is alone: it may submit at once.
    pub(super) fn request<'a>(
        &'a self,
        session: &'a MemoryBudget,
        stream: &'a Weak<dyn StreamStatus>,
    ) -> Option<TurnRequest<'a>> {
        let (keys, now) = (session.flow_keys(), Instant::now());
        let mut state = lock(&self.state);
        let is_alone = state.is_alone(keys, now);
        state.was_alone |= is_alone;
        state.set_phase(keys, stream, if is_alone { Phase::Submitted } else { Phase::Draining }, now);
        drop(state);
        (!is_alone).then(|| TurnRequest { turns: self, session, stream })
    }
}

impl TurnsState {
    /// Whether no other session uses the GPU. Forgets users that do not.
    fn is_alone(&mut self, session: FlowKeys, now: Instant) -> bool {
        self.users.retain(|user| match user.session == session {
            true => user.stream.strong_count() > 0,
            false => user.phase != Phase::Submitted || now.duration_since(user.since) < RECENT || user.is_busy(),
        });
        self.users.iter().all(|user| user.session == session)
    }

    fn set_phase(&mut self, session: FlowKeys, stream: &Weak<dyn StreamStatus>, phase: Phase, since: Instant) {
        let is_same = |user: &&mut GpuUser| std::ptr::addr_eq(user.stream.as_ptr(), stream.as_ptr());
        match self.users.iter_mut().find(is_same) {
            Some(user) => (user.phase, user.since) = (phase, since),
            None => self.users.push(GpuUser { session, stream: Weak::clone(stream), phase, since }),
        }
    }

    /// Whether work that another session submitted without turns may run.
    fn is_shared(&self, session: FlowKeys) -> bool {
        self.users.iter().any(|user| {
            let may_run = match user.phase {
                Phase::Submitted => user.is_busy(),
                Phase::Draining => true,
                Phase::TakingTurn => false,
            };
            user.session != session && may_run
        })
    }

    /// Gives the next turn if none is under way.
    fn give_turn(&mut self, now: Instant) {
        if self.current.is_none() {
            self.current = self.waiting.pop(now).map(|(ticket, _)| ticket);
        }
    }
}

impl GpuUser {
    fn is_busy(&self) -> bool {
        self.stream.upgrade().is_some_and(|stream| stream.is_busy())
    }
}

impl TurnRequest<'_> {
    /// Waits for a turn. The stream must have no work. Ends with the error of `check`, which is called now and then.
    pub(super) fn begin(&self, check: impl Fn() -> Result<(), DeviceError>) -> Result<GpuTurn<'_>, DeviceError> {
        let (keys, mut now) = (self.session.flow_keys(), Instant::now());
        let mut state = lock(&self.turns.state);
        state.set_phase(keys, self.stream, Phase::TakingTurn, now);
        state.last_ticket += 1;
        let (ticket, was_alone) = (state.last_ticket, std::mem::take(&mut state.was_alone));
        let is_idle = was_alone && state.current.is_none();
        state.waiting.push(keys, ticket, is_idle);
        loop {
            state.give_turn(now);
            if state.current == Some(ticket) {
                let is_shared = state.is_shared(keys);
                return Ok(GpuTurn { request: self, began: Instant::now(), is_shared });
            }
            if let Err(e) = check() {
                state.waiting.remove(keys, |other| *other == ticket);
                return Err(e);
            }
            // The end of a turn wakes all waiters; the end of a hold and an abort do not.
            let held = state.waiting.held_until().map(|until| until.saturating_duration_since(now));
            let timeout = held.map_or(ABORT_CHECK_INTERVAL, |held| held.min(ABORT_CHECK_INTERVAL));
            state = self.turns.changed.wait_timeout(state, timeout).unpoisoned().0;
            now = Instant::now();
        }
    }
}

impl Drop for TurnRequest<'_> {
    fn drop(&mut self) {
        let keys = self.session.flow_keys();
        lock(&self.turns.state).set_phase(keys, self.stream, Phase::Submitted, Instant::now());
    }
}

impl GpuTurn<'_> {
    /// Whether the turn has to end although its segment may still run.
    pub(super) fn is_over(&self) -> bool {
        self.began.elapsed() >= MAX_TURN
    }
}

impl Drop for GpuTurn<'_> {
    fn drop(&mut self) {
        let TurnRequest { turns, session, stream } = self.request;
        let now = Instant::now();
        let time = now.duration_since(self.began);
        session.add_device_time(time);
        let mut state = lock(&turns.state);
        let charged = if self.is_shared { time.min(SLICE) } else { time };
        state.waiting.charge(session.flow_keys(), charged, session.share(), now);
        if self.is_over() {
            // The segment runs on, so the next session's turn is shared: that session must not pay for this one.
            state.set_phase(session.flow_keys(), stream, Phase::Submitted, now);
        }
        state.current = None;
        state.give_turn(now);
        drop(state);
        turns.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::channel;

    /// A stream that is busy while the flag is set.
    #[derive(Default)]
    struct TestStream(AtomicBool);

    impl StreamStatus for TestStream {
        fn is_busy(&self) -> bool {
            self.0.load(Ordering::SeqCst)
        }
    }

    /// A queue of a session.
    struct TestQueue {
        session: Arc<MemoryBudget>,
        stream: Arc<TestStream>,
        weak: Weak<dyn StreamStatus>,
    }

    impl TestQueue {
        fn new(session: &Arc<MemoryBudget>) -> TestQueue {
            let stream = Arc::<TestStream>::default();
            let weak: Weak<dyn StreamStatus> = Arc::downgrade(&stream) as _;
            TestQueue { session: Arc::clone(session), stream, weak }
        }

        fn of_new_tenant() -> TestQueue {
            TestQueue::new(&MemoryBudget::for_client(0))
        }

        /// Submits a segment as if long ago, without a turn.
        fn submit_alone(&self, turns: &GpuTurns, is_busy: bool) {
            self.stream.0.store(is_busy, Ordering::SeqCst);
            let since = Instant::now().checked_sub(2 * RECENT).unwrap();
            lock(&turns.state).set_phase(self.session.flow_keys(), &self.weak, Phase::Submitted, since);
        }

        fn request<'a>(&'a self, turns: &'a GpuTurns) -> TurnRequest<'a> {
            turns.request(&self.session, &self.weak).unwrap()
        }
    }

    /// Turns on a GPU that a queue of another session keeps busy.
    fn contended() -> (GpuTurns, TestQueue) {
        let (turns, busy) = (GpuTurns::default(), TestQueue::of_new_tenant());
        busy.submit_alone(&turns, true);
        (turns, busy)
    }

    fn wait_until_waiting(turns: &GpuTurns, count: usize) {
        while lock(&turns.state).waiting.len() != count {
            std::thread::yield_now();
        }
    }

    /// Ends a turn as if it had taken `time`.
    fn end_after(mut turn: GpuTurn<'_>, time: Duration) {
        turn.began = Instant::now().checked_sub(time).unwrap();
    }

    #[test]
    fn a_session_takes_turns_while_another_is_busy_recent_or_waiting() {
        let turns = GpuTurns::default();
        let (a, b) = (TestQueue::of_new_tenant(), TestQueue::of_new_tenant());
        let second = TestQueue::new(&a.session);
        let is_alone = |queue: &TestQueue| turns.request(&queue.session, &queue.weak).is_none();
        assert!(is_alone(&a) && is_alone(&second), "queues of one session");
        assert!(!is_alone(&b), "the other session has just submitted");
        b.submit_alone(&turns, false);
        assert!(is_alone(&a), "the other session was active long ago");
        assert_eq!(lock(&turns.state).users.len(), 2, "a session that is inactive is forgotten");
        b.submit_alone(&turns, true);
        assert!(!is_alone(&a), "the other stream is busy");
        b.stream.0.store(false, Ordering::SeqCst);
        assert!(is_alone(&a));
        {
            let (keys, long_ago) = (b.session.flow_keys(), Instant::now().checked_sub(2 * RECENT).unwrap());
            lock(&turns.state).set_phase(keys, &b.weak, Phase::Draining, long_ago);
            assert!(!is_alone(&a), "a thread of the other session waits");
        }
        b.submit_alone(&turns, true);
        drop(b);
        assert!(is_alone(&a), "the other queue is gone");
        drop(second);
        assert!(is_alone(&a));
        assert_eq!(lock(&turns.state).users.len(), 1, "queues that are gone are forgotten");
    }

    /// Between a request and its turn, each other tenant has one segment, however many queues it has.
    #[test]
    fn a_tenant_waits_for_one_segment_of_each_other() {
        let (turns, _busy) = contended();
        let (first, tenants) = (TestQueue::of_new_tenant(), [(); 3].map(|()| MemoryBudget::for_client(0)));
        // The first tenant has 15 sessions with a queue each.
        let many = (0..15).map(|_| (0, TestQueue::new(&MemoryBudget::within(&tenants[0], 0))));
        let queues: Vec<_> = many.chain([1, 2].map(|tenant| (tenant, TestQueue::new(&tenants[tenant])))).collect();
        let request = first.request(&turns);
        let turn = request.begin(|| Ok(())).unwrap();
        let (to, order) = channel();
        std::thread::scope(|scope| {
            for (tenant, queue) in &queues {
                let (turns, to) = (&turns, to.clone());
                scope.spawn(move || {
                    let request = queue.request(turns);
                    let turn = request.begin(|| Ok(())).unwrap();
                    to.send(*tenant).unwrap();
                    end_after(turn, SLICE);
                });
            }
            wait_until_waiting(&turns, queues.len());
            end_after(turn, SLICE);
        });
        let order: Vec<usize> = order.try_iter().collect();
        assert_eq!(order.len(), queues.len());
        for tenant in 0..3 {
            assert!(order.iter().position(|other| *other == tenant) < Some(3), "{tenant}: {order:?}");
        }
    }

    #[test]
    fn two_sessions_with_long_programs_alternate_segment_by_segment() {
        const SEGMENTS: usize = 8;
        let (turns, _busy) = contended();
        let queues = [TestQueue::of_new_tenant(), TestQueue::of_new_tenant()];
        let order = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for (index, queue) in queues.iter().enumerate() {
                let (turns, order) = (&turns, &order);
                scope.spawn(move || {
                    for segment in 0..SEGMENTS {
                        let request = queue.request(turns);
                        let turn = request.begin(|| Ok(())).unwrap();
                        lock(order).push(index);
                        // The segment lasts until the other queue waits, which it does until it has had its last turn.
                        let has_ended = || lock(order).iter().filter(|i| **i != index).count() == SEGMENTS;
                        while lock(&turns.state).waiting.len() == 0 && !has_ended() && segment + 1 < SEGMENTS {
                            std::thread::yield_now();
                        }
                        end_after(turn, SLICE);
                    }
                });
            }
        });
        let order = order.into_inner().unwrap();
        let shared = &order[..2 * SEGMENTS - 1];
        assert!(shared.windows(2).all(|pair| pair[0] != pair[1]), "{order:?}");
    }

    #[test]
    fn an_abort_ends_a_wait_for_a_turn() {
        let (turns, _busy) = contended();
        let (holder, aborted, next) =
            (TestQueue::of_new_tenant(), TestQueue::of_new_tenant(), TestQueue::of_new_tenant());
        let request = holder.request(&turns);
        let turn = request.begin(|| Ok(())).unwrap();
        let is_aborted = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let request = aborted.request(&turns);
                let check = || if is_aborted.load(Ordering::SeqCst) { Err(DeviceError::Ended) } else { Ok(()) };
                request.begin(check).map(drop)
            });
            wait_until_waiting(&turns, 1);
            is_aborted.store(true, Ordering::SeqCst);
            assert_eq!(waits.join().unwrap(), Err(DeviceError::Ended));
            assert_eq!(lock(&turns.state).waiting.len(), 0);
            drop(turn);
            next.request(&turns).begin(|| Ok(())).map(drop).unwrap();
        });
        assert!(lock(&turns.state).current.is_none());
    }

    /// After a failed driver call the turn is dropped, like after a panic: all waiters get their turns, one after the other.
    #[test]
    fn turns_that_fail_let_all_waiters_pass() {
        let (turns, _busy) = contended();
        let queues: Vec<_> = (0..4).map(|_| TestQueue::of_new_tenant()).collect();
        let holder = TestQueue::of_new_tenant();
        let request = holder.request(&turns);
        let turn = request.begin(|| Ok(())).unwrap();
        let run = |queue: &TestQueue| -> Result<(), DeviceError> {
            let request = queue.request(&turns);
            let _turn = request.begin(|| Ok(()))?;
            Err(DeviceError::Ended)
        };
        std::thread::scope(|scope| {
            let runs: Vec<_> = queues.iter().map(|queue| scope.spawn(|| run(queue))).collect();
            wait_until_waiting(&turns, queues.len());
            drop(turn);
            for run in runs {
                assert_eq!(run.join().unwrap(), Err(DeviceError::Ended));
            }
        });
        let state = lock(&turns.state);
        assert!(state.current.is_none() && state.waiting.len() == 0);
    }

    /// A session pays for its turns, but not for work that others had submitted without turns.
    #[test]
    fn the_time_of_turns_is_charged() {
        for (is_busy, is_shared) in [(true, true), (false, false)] {
            let (turns, busy) = contended();
            let queue = TestQueue::of_new_tenant();
            let request = queue.request(&turns);
            busy.stream.0.store(is_busy, Ordering::SeqCst);
            let turn = request.begin(|| Ok(())).unwrap();
            assert_eq!(turn.is_shared, is_shared);
            assert!(!turn.is_over());
            end_after(turn, 100 * SLICE);
            assert!(queue.session.device_time() >= 100 * SLICE);
            // In debt, and held if it had to pay for all: another session is served first.
            let other = TestQueue::of_new_tenant();
            let mut state = lock(&turns.state);
            state.waiting.charge(other.session.flow_keys(), Duration::ZERO, 100, Instant::now());
            state.waiting.push(queue.session.flow_keys(), 7, false);
            assert_eq!(state.waiting.pop(Instant::now()).is_some(), is_shared, "a debt of 100 slices is held");
        }
    }

    #[test]
    fn a_turn_is_over_after_its_limit() {
        let (turns, busy) = contended();
        let queue = TestQueue::of_new_tenant();
        let request = queue.request(&turns);
        let mut turn = request.begin(|| Ok(())).unwrap();
        queue.stream.0.store(true, Ordering::SeqCst);
        turn.began = Instant::now().checked_sub(MAX_TURN).unwrap();
        assert!(turn.is_over());
        // Its segment runs on in the next turn.
        busy.stream.0.store(false, Ordering::SeqCst);
        drop(turn);
        let next = TestQueue::of_new_tenant();
        for is_running in [true, false] {
            queue.stream.0.store(is_running, Ordering::SeqCst);
            let request = next.request(&turns);
            assert_eq!(request.begin(|| Ok(())).unwrap().is_shared, is_running);
        }
    }
}

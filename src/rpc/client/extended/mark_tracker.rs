//! Mark tracking of one queue: which marks were placed in the message stream, requested from the server (NOTIFY_REACHED), and
//! reached.

use crate::poison::Unpoisoned;
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::time::Instant;

use super::super::connection::ConnectionShared;
use crate::device::{CompletionSource, DeviceError, Timeline, TimelinePoint};
use crate::poison::lock;
use crate::rpc::wire::ext::{ExtCommand, ExtRequest, NotifyReached};

/// Limit of recorded waits. A reached mark implies the marks that its queue waited for before. Waits beyond this limit are
/// forgotten; their marks are then reported only by their own queues.
const MAX_RECORDED_WAITS: usize = 64;

/// Client-side state of one queue of the server.
#[derive(Debug)]
pub(super) struct MarkTracker {
    shared: Weak<ConnectionShared>,
    /// Id of the connection.
    connection: u64,
    pub(super) queue: u32,
    /// Name of the queue's device, for errors.
    device: String,
    timeline: OnceLock<Weak<Timeline>>,
    state: Mutex<MarkTrackerState>,
    /// Notified when a mark is placed, and when the queue, or one that waits for a mark to be placed, fails or is closed.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct MarkTrackerState {
    /// The last mark that was sent or appended to the write buffer. Changes in the order of the messages.
    last_placed: u64,
    /// Last mark that was reached.
    last_reached: u64,
    /// Requested marks without a notification yet, with the time of the request.
    requested: BTreeMap<u64, Instant>,
    /// Marks that callers wait for, and that have to be requested when they are placed.
    awaited_unplaced: BTreeSet<u64>,
    /// Whether every mark is requested as soon as it is placed. Set when a caller waits for a mark after which later marks are
    /// placed already: then many marks are in flight, and requesting them one after the other would cost a round trip for each.
    request_at_once: bool,
    /// Marks that the data of a read directly before or after them will prove, so that no NOTIFY_REACHED is needed.
    covered_by_read: BTreeSet<u64>,
    /// Recorded waits: a mark of this queue, and the queue and mark that are reached before it.
    waits: VecDeque<(u64, (u32, u64))>,
    /// Whether the queue was closed; no message names it afterwards. Changes in the order of the messages.
    closed: bool,
    dependents: Vec<Dependent>,
    /// The mark of another queue whose placement this queue waits for.
    awaited_placement: Option<TimelinePoint>,
}

/// A dependent queue: its work waits for a mark of this queue.
#[derive(Debug)]
struct Dependent {
    tracker: Weak<MarkTracker>,
    /// Last mark of this queue that the dependent waits for.
    seq: u64,
    /// Mark of the dependent after its last wait: when it is reached, the dependent no longer waits.
    own_mark: u64,
}

/// Which dependents fail with a queue.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum FailureScope {
    /// All dependents.
    AllConnections,
    /// Dependents on other connections. The server itself reports the failure of this queue and of the dependents on its own
    /// connection.
    OtherConnections,
}

impl MarkTracker {
    /// The tracker and the timeline of a new queue.
    pub(super) fn new(shared: &Arc<ConnectionShared>, queue: u32, device: &str) -> (Arc<MarkTracker>, Arc<Timeline>) {
        let tracker = Arc::new(MarkTracker {
            shared: Arc::downgrade(shared),
            connection: shared.id(),
            queue,
            device: device.to_owned(),
            timeline: OnceLock::new(),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let timeline = Timeline::with_source(Arc::clone(&tracker) as Arc<dyn CompletionSource>);
        tracker.timeline.get_or_init(|| Arc::downgrade(&timeline));
        (tracker, timeline)
    }

    pub(super) fn belongs_to(&self, shared: &ConnectionShared) -> bool {
        self.connection == shared.id()
    }

    pub(super) fn device(&self) -> &str {
        &self.device
    }

    fn timeline(&self) -> Option<Arc<Timeline>> {
        self.timeline.get().and_then(Weak::upgrade)
    }

    pub(super) fn failure(&self) -> Option<DeviceError> {
        self.timeline().and_then(|timeline| timeline.failure())
    }

    /// Places mark `seq`; called with exclusive use of the writer. Returns whether the mark has to be requested
    /// (NOTIFY_REACHED) at once.
    pub(super) fn place_mark(&self, seq: u64) -> bool {
        let mut marks = lock(&self.state);
        // No mark is in flight: go back to requesting marks on demand.
        marks.request_at_once &= marks.last_reached < marks.last_placed;
        marks.last_placed = seq;
        let request_now = marks.awaited_unplaced.remove(&seq) | marks.request_at_once;
        if request_now {
            marks.requested.insert(seq, Instant::now());
        }
        drop(marks);
        self.changed.notify_all();
        request_now
    }

    /// Blocks until `point`, a mark of this queue, is placed, or this queue or `waiter`, for which the thread waits, fails. Only
    /// the placement is waited for here; the server itself waits for the mark (WAIT).
    pub(super) fn wait_until_placed(&self, point: &TimelinePoint, waiter: &MarkTracker) -> Result<(), DeviceError> {
        lock(&waiter.state).awaited_placement = Some(point.clone());
        let placed = self.wait_for_placement(point.seq(), waiter);
        let awaited = lock(&waiter.state).awaited_placement.take();
        drop(awaited);
        placed
    }

    fn wait_for_placement(&self, seq: u64, waiter: &MarkTracker) -> Result<(), DeviceError> {
        let mut marks = lock(&self.state);
        while marks.last_placed < seq {
            // A thread that fails either queue takes this lock afterwards and notifies, so the failure cannot be missed.
            if let Some(failure) = self.failure().or_else(|| waiter.failure()) {
                return Err(failure);
            }
            if marks.closed {
                return Err(DeviceError::Ended);
            }
            marks = self.changed.wait(marks).unpoisoned();
        }
        Ok(())
    }

    /// Ends the waits in [`MarkTracker::wait_until_placed`] for marks of this queue, and the one of this queue's thread. Called
    /// after the timeline has failed.
    pub(super) fn wake_placement_waiters(&self) {
        // A waiting thread checks the failure with this lock held, so it either sees the failure or is woken by this call.
        let awaited = lock(&self.state).awaited_placement.clone();
        self.changed.notify_all();
        if let Some(other) = awaited.as_ref().and_then(|point| point.completion_source::<MarkTracker>()) {
            drop(lock(&other.state));
            other.changed.notify_all();
        }
    }

    /// Whether the queue's thread waits for a mark of another queue to be placed.
    #[cfg(test)]
    pub(super) fn awaits_placement(&self) -> bool {
        lock(&self.state).awaited_placement.is_some()
    }

    /// Whether other queues of the server can wait for mark `seq`. With exclusive use of the writer the result holds until the
    /// writer is returned.
    pub(super) fn can_be_waited_for(&self, seq: u64) -> bool {
        let marks = lock(&self.state);
        marks.last_placed >= seq && !marks.closed
    }

    pub(super) fn is_reached(&self, seq: u64) -> bool {
        lock(&self.state).last_reached >= seq
    }

    /// Records that a read is sent, and returns the mark that its data proves. `directly_behind`: no message lies between the
    /// last mark and the read.
    pub(super) fn place_read(&self, directly_behind: bool) -> u64 {
        let mut marks = lock(&self.state);
        let placed = marks.last_placed;
        if directly_behind {
            marks.covered_by_read.insert(placed);
        }
        placed
    }

    /// Records that a read proves mark `seq`, which was just placed: no NOTIFY_REACHED is needed.
    pub(super) fn cover_by_read(&self, seq: u64) {
        let mut marks = lock(&self.state);
        marks.requested.remove(&seq);
        if seq > marks.last_reached {
            marks.covered_by_read.insert(seq);
        }
    }

    /// Records that the work that is sent from now on waits for a mark of another queue.
    pub(super) fn record_wait(&self, of: u32, number: u64) {
        let mut marks = lock(&self.state);
        if marks.waits.len() == MAX_RECORDED_WAITS {
            marks.waits.pop_front();
        }
        let next = marks.last_placed + 1;
        marks.waits.push_back((next, (of, number)));
    }

    /// Records that mark `seq` is reached. Returns the marks of other queues that are implied by it, or `None` if the mark was
    /// never placed.
    pub(super) fn record_reached(&self, seq: u64) -> Option<Vec<(u32, u64)>> {
        let mut marks = lock(&self.state);
        if seq > marks.last_placed {
            return None;
        }
        let waits = marks.waits.partition_point(|(next, _)| *next <= seq);
        let others = marks.waits.drain(..waits).map(|(_, other)| other).collect();
        marks.last_reached = marks.last_reached.max(seq);
        marks.requested = marks.requested.split_off(&(seq + 1));
        marks.covered_by_read = marks.covered_by_read.split_off(&(seq + 1));
        Some(others)
    }

    /// Advances the timeline to mark `seq`, which wakes its waiting threads.
    pub(super) fn advance_timeline(&self, seq: u64) {
        if let Some(timeline) = self.timeline() {
            timeline.advance(seq);
        }
    }

    /// Time of the oldest request for a mark that has not been reached.
    pub(super) fn oldest_request(&self) -> Option<Instant> {
        lock(&self.state).requested.values().min().copied()
    }

    /// Makes `dependent` fail with this queue, because its work from now on waits for mark `seq` of this queue; not if this
    /// mark is reached. Failures thus propagate along a chain over several servers: a thread that waits at the end of the chain
    /// sees at once which server is lost.
    pub(super) fn add_dependent(&self, dependent: &Arc<MarkTracker>, seq: u64) {
        let own_mark = dependent.last_placed() + 1;
        let mut marks = lock(&self.state);
        marks.dependents.retain(|existing| existing.tracker.strong_count() > 0);
        match marks
            .dependents
            .iter_mut()
            .find(|existing| std::ptr::eq(existing.tracker.as_ptr(), Arc::as_ptr(dependent)))
        {
            Some(existing) => (existing.seq, existing.own_mark) = (seq.max(existing.seq), own_mark),
            None => marks.dependents.push(Dependent { tracker: Arc::downgrade(dependent), seq, own_mark }),
        }
        let reached = marks.last_reached >= seq;
        drop(marks);
        // The dependent must be registered before this check: a thread that fails this queue then either finds the dependent,
        // or has failed the queue before the check.
        if let Some(failure) = self.failure().filter(|_| !reached) {
            dependent.fail_with_reads(&failure);
        }
    }

    /// Fails the queue, its outstanding reads and its dependents.
    pub(super) fn fail_with_reads(self: &Arc<MarkTracker>, error: &DeviceError) {
        match self.shared.upgrade().as_ref().and_then(|shared| shared.session.as_ref()) {
            Some(session) => session.fail_queue(self, error, FailureScope::AllConnections),
            None => self.fail_marks(error, FailureScope::AllConnections),
        }
    }

    /// As [`MarkTracker::fail_with_reads`], without the outstanding reads.
    pub(super) fn fail_marks(&self, error: &DeviceError, scope: FailureScope) {
        if let Some(timeline) = self.timeline() {
            timeline.fail(error.clone());
        }
        let mut marks = lock(&self.state);
        marks.requested.clear();
        marks.awaited_unplaced.clear();
        let done = marks.last_reached;
        let dependents = std::mem::take(&mut marks.dependents);
        drop(marks);
        self.wake_placement_waiters();
        for Dependent { tracker, own_mark, .. } in dependents.into_iter().filter(|dependent| dependent.seq > done) {
            let Some(dependent) = tracker.upgrade() else { continue };
            let reported_by_server = scope == FailureScope::OtherConnections && dependent.connection == self.connection;
            if !reported_by_server && !dependent.is_reached(own_mark) {
                dependent.fail_with_reads(error);
            }
        }
    }

    /// Closes the queue; called with exclusive use of the writer. Returns the last mark if it is not reached yet.
    pub(super) fn close(&self) -> Option<u64> {
        let mut marks = lock(&self.state);
        marks.closed = true;
        self.changed.notify_all();
        Some(marks.last_placed).filter(|&placed| placed > marks.last_reached)
    }

    /// Whether mark `seq` was placed.
    pub(super) fn is_placed(&self, seq: u64) -> bool {
        self.last_placed() >= seq
    }

    fn last_placed(&self) -> u64 {
        lock(&self.state).last_placed
    }

    pub(super) fn is_closed(&self) -> bool {
        lock(&self.state).closed
    }
}

impl CompletionSource for MarkTracker {
    /// Nothing to poll: notifications advance the timeline.
    fn poll(&self, _: &Timeline) {}

    fn request_notify(&self, _: &Timeline, seq: u64) -> bool {
        let mut marks = lock(&self.state);
        let will_be_reported =
            marks.closed || marks.covered_by_read.contains(&seq) || marks.requested.contains_key(&seq);
        if seq <= marks.last_reached || will_be_reported {
            return true;
        }
        let Some(shared) = self.shared.upgrade() else { return true };
        shared.count_wait();
        if seq > marks.last_placed {
            marks.awaited_unplaced.insert(seq);
            return true;
        }
        let last = marks.last_placed;
        marks.request_at_once |= seq < last;
        let missing = |number: &u64| !marks.requested.contains_key(number) && !marks.covered_by_read.contains(number);
        let numbers: Vec<u64> = (seq..=last).filter(missing).collect();
        let now = Instant::now();
        marks.requested.extend(numbers.iter().map(|&number| (number, now)));
        drop(marks);
        let queue = self.queue;
        shared.defer_send(move |guard| {
            // The queue may have been closed in the meantime, and must not be named afterwards.
            if !guard.shared.session.as_ref().is_some_and(|session| session.is_open(queue)) {
                return Ok(());
            }
            for &number in &numbers {
                guard.buffer(|out| ExtRequest::NotifyReached(NotifyReached { queue, number }).encode(out));
            }
            guard.flush(ExtCommand::NotifyReached.name())
        });
        true
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

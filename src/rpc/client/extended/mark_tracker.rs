//! The marks of one queue: which are made, asked for, reached.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::Instant;

use super::super::connection::{ConnectionShared, lock};
use crate::device::{DeviceError, Progress, Timeline};
use crate::rpc::wire::ext::{Ask, ExtCommand, ExtRequest};

/// Waits whose end a queue's next marks tell of. More of them are told of by their own queues alone.
const MAX_RECORDED_WAITS: usize = 64;

/// A queue of the server's, as this end knows it.
#[derive(Debug)]
pub(super) struct MarkTracker {
    shared: Weak<ConnectionShared>,
    /// The connection's number.
    connection: u64,
    pub(super) queue: u32,
    /// The name of its device, for errors.
    device: String,
    timeline: OnceLock<Weak<Timeline>>,
    state: Mutex<MarkTrackerState>,
    /// A mark is placed, or none will be any more.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct MarkTrackerState {
    /// The last that the server was told of, if only in the writer's buffer. Changes in the order of the messages.
    last_placed: u64,
    /// The last that is known to be reached.
    last_reached: u64,
    /// Asked for and not answered yet: since when.
    requested: BTreeMap<u64, Instant>,
    /// To be asked for when they are placed.
    awaited_unplaced: BTreeSet<u64>,
    /// Whether each is asked for as soon as it is placed: somebody has asked for one when later ones were placed already, so
    /// that many are under way, and asking for one after the other would cost a round trip for each.
    request_at_once: bool,
    /// Those that the bytes of a read right before or behind them will prove.
    covered_by_read: BTreeSet<u64>,
    /// What is reached before a mark of this queue is: that mark, and the other queue with its own.
    waits: VecDeque<(u64, (u32, u64))>,
    /// Nothing more is said of it. Changes in the order of the messages.
    closed: bool,
    dependents: Vec<Dependent>,
}

/// A queue whose work waits for another one's.
#[derive(Debug)]
struct Dependent {
    track: Weak<MarkTracker>,
    /// The last mark of the other one that it waits for.
    seq: u64,
    /// When this mark of its own is reached, it waits no more.
    own_mark: u64,
}

/// Whom a queue's failure fails.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum FailureScope {
    /// All that wait for its work.
    AllConnections,
    /// Those of other connections: its own server has said it, and says so of those that still wait.
    OtherConnections,
}

impl MarkTracker {
    /// A queue with its timeline.
    pub(super) fn new(shared: &Arc<ConnectionShared>, queue: u32, device: &str) -> (Arc<MarkTracker>, Arc<Timeline>) {
        let track = Arc::new(MarkTracker {
            shared: Arc::downgrade(shared),
            connection: shared.id(),
            queue,
            device: device.to_owned(),
            timeline: OnceLock::new(),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let timeline = Timeline::looked_at(Arc::clone(&track) as Arc<dyn Progress>);
        track.timeline.get_or_init(|| Arc::downgrade(&timeline));
        (track, timeline)
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

    /// The server is told of mark `seq`, in a turn. Whether it has to be asked for it at once.
    pub(super) fn place_mark(&self, seq: u64) -> bool {
        let mut marks = lock(&self.state);
        // Nothing is under way: one at a time again.
        marks.request_at_once &= marks.last_reached < marks.last_placed;
        marks.last_placed = seq;
        let asks = marks.awaited_unplaced.remove(&seq) | marks.request_at_once;
        if asks {
            marks.requested.insert(seq, Instant::now());
        }
        drop(marks);
        self.changed.notify_all();
        asks
    }

    /// Waits until the server is told of mark `seq`, for a thread that has nothing else to do: the mark itself is then for the
    /// server to wait for.
    pub(super) fn wait_until_placed(&self, seq: u64) -> Result<(), DeviceError> {
        let mut marks = lock(&self.state);
        while marks.last_placed < seq {
            // Whoever fails the queue takes the lock after that.
            if let Some(failure) = self.failure() {
                return Err(failure);
            }
            if marks.closed {
                return Err(DeviceError::Ended);
            }
            marks = self.changed.wait(marks).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    /// Whether others can be made to wait for mark `seq`. In a turn, that stays so until its end.
    pub(super) fn can_be_waited_for(&self, seq: u64) -> bool {
        let marks = lock(&self.state);
        marks.last_placed >= seq && !marks.closed
    }

    pub(super) fn is_reached(&self, seq: u64) -> bool {
        lock(&self.state).last_reached >= seq
    }

    /// A read is sent; `at_once`: right behind the last mark. Which mark its bytes will prove.
    pub(super) fn place_read(&self, at_once: bool) -> u64 {
        let mut marks = lock(&self.state);
        let placed = marks.last_placed;
        if at_once {
            marks.covered_by_read.insert(placed);
        }
        placed
    }

    /// Mark `seq`, which was just placed, is proved by a read: nobody need ask for it.
    pub(super) fn cover_by_read(&self, seq: u64) {
        let mut marks = lock(&self.state);
        marks.requested.remove(&seq);
        if seq > marks.last_reached {
            marks.covered_by_read.insert(seq);
        }
    }

    /// What it is sent from now on waits for a mark of another queue.
    pub(super) fn record_wait(&self, of: u32, number: u64) {
        let mut marks = lock(&self.state);
        if marks.waits.len() == MAX_RECORDED_WAITS {
            marks.waits.pop_front();
        }
        let next = marks.last_placed + 1;
        marks.waits.push_back((next, (of, number)));
    }

    /// The server has done all before mark `seq`: also all before these marks of other queues.
    /// `None` if it was never made.
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

    /// Tells whoever waits that mark `seq` is reached.
    pub(super) fn advance_timeline(&self, seq: u64) {
        if let Some(timeline) = self.timeline() {
            timeline.advance(seq);
        }
    }

    /// Since when somebody has been waiting for a mark.
    pub(super) fn oldest_request(&self) -> Option<Instant> {
        lock(&self.state).requested.values().min().copied()
    }

    /// What a queue is sent from now on waits for mark `seq` of this one: it fails with this one, unless it is known to have got
    /// further. So whoever waits at the end of a chain over several servers is told at once which one is lost.
    pub(super) fn add_dependent(&self, user: &Arc<MarkTracker>, seq: u64) {
        let behind = user.last_placed() + 1;
        let mut marks = lock(&self.state);
        marks.dependents.retain(|user| user.track.strong_count() > 0);
        match marks.dependents.iter_mut().find(|known| std::ptr::eq(known.track.as_ptr(), Arc::as_ptr(user))) {
            Some(known) => (known.seq, known.own_mark) = (seq.max(known.seq), behind),
            None => marks.dependents.push(Dependent { track: Arc::downgrade(user), seq, own_mark: behind }),
        }
        let reached = marks.last_reached >= seq;
        drop(marks);
        // After the push: whoever fails this one either sees the user, or has failed it before this.
        if let Some(failure) = self.failure().filter(|_| !reached) {
            user.fail_with_reads(&failure);
        }
    }

    /// The queue fails, and all that waits for it with it.
    pub(super) fn fail_with_reads(self: &Arc<MarkTracker>, error: &DeviceError) {
        match self.shared.upgrade().as_ref().and_then(|shared| shared.session.as_ref()) {
            Some(session) => session.fail_queue(self, error, FailureScope::AllConnections),
            None => self.fail_marks(error, FailureScope::AllConnections),
        }
    }

    /// As [`Track::end`], but for reads of it whose bytes have yet to come.
    pub(super) fn fail_marks(&self, error: &DeviceError, whom: FailureScope) {
        if let Some(timeline) = self.timeline() {
            timeline.fail(error.clone());
        }
        let mut marks = lock(&self.state);
        marks.requested.clear();
        marks.awaited_unplaced.clear();
        let done = marks.last_reached;
        let users = std::mem::take(&mut marks.dependents);
        drop(marks);
        self.changed.notify_all();
        for Dependent { track, own_mark: behind, .. } in users.into_iter().filter(|user| user.seq > done) {
            let Some(user) = track.upgrade() else { continue };
            let told = whom == FailureScope::OtherConnections && user.connection == self.connection;
            if !told && !user.is_reached(behind) {
                user.fail_with_reads(error);
            }
        }
    }

    /// Nothing more will be said of it, in a turn. The last mark that is not known to be reached.
    pub(super) fn close(&self) -> Option<u64> {
        let mut marks = lock(&self.state);
        marks.closed = true;
        self.changed.notify_all();
        Some(marks.last_placed).filter(|&placed| placed > marks.last_reached)
    }

    /// Whether the server was told of mark `seq`.
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

impl Progress for MarkTracker {
    /// There is nothing to look at: notices tell the timeline.
    fn look(&self, _: &Timeline) {}

    fn ask(&self, _: &Timeline, seq: u64) -> bool {
        let mut marks = lock(&self.state);
        let comes = marks.closed || marks.covered_by_read.contains(&seq) || marks.requested.contains_key(&seq);
        if seq <= marks.last_reached || comes {
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
        shared.defer_send(move |turn| {
            // A queue that is closed by now must not be named any more.
            if !turn.shared.session.as_ref().is_some_and(|session| session.is_open(queue)) {
                return Ok(());
            }
            for &number in &numbers {
                turn.buffer(|out| ExtRequest::Ask(Ask { queue, number }).encode(out));
            }
            turn.flush(ExtCommand::Ask.name())
        });
        true
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

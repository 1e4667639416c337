//! The marks of one queue: which are made, asked for, reached.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::Instant;

use super::super::connection::{Shared, lock};
use crate::device::{DeviceError, Progress, Timeline};
use crate::rpc::wire::ext::{Ask, ExtCommand, ExtRequest};

/// Waits whose end a queue's next marks tell of. More of them are told of by their own queues alone.
const WAITS: usize = 64;

/// A queue of the server's, as this end knows it.
#[derive(Debug)]
pub(super) struct Track {
    shared: Weak<Shared>,
    /// The connection's number.
    connection: u64,
    pub(super) queue: u32,
    /// The name of its device, for errors.
    device: String,
    timeline: OnceLock<Weak<Timeline>>,
    marks: Mutex<Marks>,
    /// A mark is placed, or none will be any more.
    moved: Condvar,
}

#[derive(Debug, Default)]
struct Marks {
    /// The last that the server was told of, if only in the writer's buffer. Changes in the order of the messages.
    placed: u64,
    /// The last that is known to be reached.
    done: u64,
    /// Asked for and not answered yet: since when.
    asked: BTreeMap<u64, Instant>,
    /// To be asked for when they are placed.
    wanted: BTreeSet<u64>,
    /// Whether each is asked for as soon as it is placed: somebody has asked for one when later ones were placed already, so
    /// that many are under way, and asking for one after the other would cost a round trip for each.
    eager: bool,
    /// Those that the bytes of a read right before or behind them will prove.
    covered: BTreeSet<u64>,
    /// What is reached before a mark of this queue is: that mark, and the other queue with its own.
    waits: VecDeque<(u64, (u32, u64))>,
    /// Nothing more is said of it. Changes in the order of the messages.
    closed: bool,
    users: Vec<User>,
}

/// A queue whose work waits for another one's.
#[derive(Debug)]
struct User {
    track: Weak<Track>,
    /// The last mark of the other one that it waits for.
    seq: u64,
    /// When this mark of its own is reached, it waits no more.
    behind: u64,
}

/// Whom a queue's failure fails.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Whom {
    /// All that wait for its work.
    All,
    /// Those of other connections: its own server has said it, and says so of those that still wait.
    Elsewhere,
}

impl Track {
    /// A queue with its timeline.
    pub(super) fn new(shared: &Arc<Shared>, queue: u32, device: &str) -> (Arc<Track>, Arc<Timeline>) {
        let track = Arc::new(Track {
            shared: Arc::downgrade(shared),
            connection: shared.number(),
            queue,
            device: device.to_owned(),
            timeline: OnceLock::new(),
            marks: Mutex::default(),
            moved: Condvar::new(),
        });
        let timeline = Timeline::looked_at(Arc::clone(&track) as Arc<dyn Progress>);
        track.timeline.get_or_init(|| Arc::downgrade(&timeline));
        (track, timeline)
    }

    pub(super) fn is_of(&self, shared: &Shared) -> bool {
        self.connection == shared.number()
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
    pub(super) fn place(&self, seq: u64) -> bool {
        let mut marks = lock(&self.marks);
        // Nothing is under way: one at a time again.
        marks.eager &= marks.done < marks.placed;
        marks.placed = seq;
        let asks = marks.wanted.remove(&seq) | marks.eager;
        if asks {
            marks.asked.insert(seq, Instant::now());
        }
        drop(marks);
        self.moved.notify_all();
        asks
    }

    /// Waits until the server is told of mark `seq`, for a thread that has nothing else to do: the mark itself is then for the
    /// server to wait for.
    pub(super) fn until_placed(&self, seq: u64) -> Result<(), DeviceError> {
        let mut marks = lock(&self.marks);
        while marks.placed < seq {
            // Whoever fails the queue takes the lock after that.
            if let Some(failure) = self.failure() {
                return Err(failure);
            }
            if marks.closed {
                return Err(DeviceError::Ended);
            }
            marks = self.moved.wait(marks).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    /// Whether others can be made to wait for mark `seq`. In a turn, that stays so until its end.
    pub(super) fn is_placed(&self, seq: u64) -> bool {
        let marks = lock(&self.marks);
        marks.placed >= seq && !marks.closed
    }

    pub(super) fn is_reached(&self, seq: u64) -> bool {
        lock(&self.marks).done >= seq
    }

    /// A read is sent; `at_once`: right behind the last mark. Which mark its bytes will prove.
    pub(super) fn read(&self, at_once: bool) -> u64 {
        let mut marks = lock(&self.marks);
        let placed = marks.placed;
        if at_once {
            marks.covered.insert(placed);
        }
        placed
    }

    /// Mark `seq`, which was just placed, is proved by a read: nobody need ask for it.
    pub(super) fn cover(&self, seq: u64) {
        let mut marks = lock(&self.marks);
        marks.asked.remove(&seq);
        if seq > marks.done {
            marks.covered.insert(seq);
        }
    }

    /// What it is sent from now on waits for a mark of another queue.
    pub(super) fn waits(&self, of: u32, number: u64) {
        let mut marks = lock(&self.marks);
        if marks.waits.len() == WAITS {
            marks.waits.pop_front();
        }
        let next = marks.placed + 1;
        marks.waits.push_back((next, (of, number)));
    }

    /// The server has done all before mark `seq`: also all before these marks of other queues.
    /// `None` if it was never made.
    pub(super) fn reached(&self, seq: u64) -> Option<Vec<(u32, u64)>> {
        let mut marks = lock(&self.marks);
        if seq > marks.placed {
            return None;
        }
        let waits = marks.waits.partition_point(|(next, _)| *next <= seq);
        let others = marks.waits.drain(..waits).map(|(_, other)| other).collect();
        marks.done = marks.done.max(seq);
        marks.asked = marks.asked.split_off(&(seq + 1));
        marks.covered = marks.covered.split_off(&(seq + 1));
        Some(others)
    }

    /// Tells whoever waits that mark `seq` is reached.
    pub(super) fn tell(&self, seq: u64) {
        if let Some(timeline) = self.timeline() {
            timeline.advance(seq);
        }
    }

    /// Since when somebody has been waiting for a mark.
    pub(super) fn oldest(&self) -> Option<Instant> {
        lock(&self.marks).asked.values().min().copied()
    }

    /// What a queue is sent from now on waits for mark `seq` of this one: it fails with this one, unless it is known to have got
    /// further. So whoever waits at the end of a chain over several servers is told at once which one is lost.
    pub(super) fn carries(&self, user: &Arc<Track>, seq: u64) {
        let behind = user.last_placed() + 1;
        let mut marks = lock(&self.marks);
        marks.users.retain(|user| user.track.strong_count() > 0);
        match marks.users.iter_mut().find(|known| std::ptr::eq(known.track.as_ptr(), Arc::as_ptr(user))) {
            Some(known) => (known.seq, known.behind) = (seq.max(known.seq), behind),
            None => marks.users.push(User { track: Arc::downgrade(user), seq, behind }),
        }
        let reached = marks.done >= seq;
        drop(marks);
        // After the push: whoever fails this one either sees the user, or has failed it before this.
        if let Some(failure) = self.failure().filter(|_| !reached) {
            user.end(&failure);
        }
    }

    /// The queue fails, and all that waits for it with it.
    pub(super) fn end(self: &Arc<Track>, error: &DeviceError) {
        match self.shared.upgrade().as_ref().and_then(|shared| shared.session.as_ref()) {
            Some(session) => session.end(self, error, Whom::All),
            None => self.fail(error, Whom::All),
        }
    }

    /// As [`Track::end`], but for reads of it whose bytes have yet to come.
    pub(super) fn fail(&self, error: &DeviceError, whom: Whom) {
        if let Some(timeline) = self.timeline() {
            timeline.fail(error.clone());
        }
        let mut marks = lock(&self.marks);
        marks.asked.clear();
        marks.wanted.clear();
        let done = marks.done;
        let users = std::mem::take(&mut marks.users);
        drop(marks);
        self.moved.notify_all();
        for User { track, behind, .. } in users.into_iter().filter(|user| user.seq > done) {
            let Some(user) = track.upgrade() else { continue };
            let told = whom == Whom::Elsewhere && user.connection == self.connection;
            if !told && !user.is_reached(behind) {
                user.end(error);
            }
        }
    }

    /// Nothing more will be said of it, in a turn. The last mark that is not known to be reached.
    pub(super) fn close(&self) -> Option<u64> {
        let mut marks = lock(&self.marks);
        marks.closed = true;
        self.moved.notify_all();
        Some(marks.placed).filter(|&placed| placed > marks.done)
    }

    /// Whether the server was told of mark `seq`.
    pub(super) fn has_placed(&self, seq: u64) -> bool {
        self.last_placed() >= seq
    }

    fn last_placed(&self) -> u64 {
        lock(&self.marks).placed
    }

    pub(super) fn is_closed(&self) -> bool {
        lock(&self.marks).closed
    }
}

impl Progress for Track {
    /// There is nothing to look at: notices tell the timeline.
    fn look(&self, _: &Timeline) {}

    fn ask(&self, _: &Timeline, seq: u64) -> bool {
        let mut marks = lock(&self.marks);
        let comes = marks.closed || marks.covered.contains(&seq) || marks.asked.contains_key(&seq);
        if seq <= marks.done || comes {
            return true;
        }
        let Some(shared) = self.shared.upgrade() else { return true };
        shared.count_wait();
        if seq > marks.placed {
            marks.wanted.insert(seq);
            return true;
        }
        let last = marks.placed;
        marks.eager |= seq < last;
        let missing = |number: &u64| !marks.asked.contains_key(number) && !marks.covered.contains(number);
        let numbers: Vec<u64> = (seq..=last).filter(missing).collect();
        let now = Instant::now();
        marks.asked.extend(numbers.iter().map(|&number| (number, now)));
        drop(marks);
        let queue = self.queue;
        shared.later(move |turn| {
            // A queue that is closed by now must not be named any more.
            if !turn.shared.session.as_ref().is_some_and(|session| session.is_open(queue)) {
                return Ok(());
            }
            for &number in &numbers {
                turn.put(|out| ExtRequest::Ask(Ask { queue, number }).encode(out));
            }
            turn.leave(ExtCommand::Ask.name())
        });
        true
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

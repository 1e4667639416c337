//! What proves that a point is reached: replies to reads that were sent after it.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::connection::{Connection, lock};
use super::queue_failure::QueueStatus;
use crate::device::{self, DeviceError, Timeline};
use crate::rpc::wire::TensorRecord;

/// What a connection knows of the work of its devices, where the server speaks 7.0.
#[derive(Debug, Default)]
pub(super) struct CompletionTracker {
    /// By device.
    progress: Mutex<Vec<Arc<DeviceProgress>>>,
    queues: Mutex<Vec<Weak<ProbedMarks>>>,
    /// By source and destination device: whether the server copies between the two.
    copy_support: Mutex<HashMap<(u32, u32), bool>>,
}

/// How far a device has come. Messages that it has work with are numbered from 1.
#[derive(Debug, Default)]
pub(super) struct DeviceProgress {
    /// The last that was sent. Changes only under the writer's lock, as `asked` does.
    pub(super) sent: AtomicU64,
    /// The last that a read was sent behind.
    pub(super) probed: AtomicU64,
    /// The last that is known to be done.
    done: AtomicU64,
}

/// What a writer knows of a device.
#[derive(Debug, Default)]
pub(super) struct DeviceWriteState {
    /// A byte of it that can be read, to prove that it has come so far.
    pub(super) probe: Option<TensorRecord>,
    /// The graph that it computed last, and the bytes of graphs that were sent since, its own too.
    pub(super) last_graph: Option<(u64, u64)>,
}

impl DeviceWriteState {
    /// The server may have dropped its graphs.
    pub(super) fn forget_graph(&mut self) {
        self.last_graph = None;
    }
}

impl DeviceProgress {
    pub(super) fn done(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    /// Whether a read that would prove message `number` is on its way, or would come later than one sent at once did.
    pub(super) fn probe_is_late(&self, number: u64) -> bool {
        self.probed.load(Ordering::Acquire) < number && self.sent.load(Ordering::Acquire) > number
    }
}

impl CompletionTracker {
    /// Makes room in the books for another device.
    pub(super) fn add_device(&self) -> Arc<DeviceProgress> {
        let progress = Arc::<DeviceProgress>::default();
        lock(&self.progress).push(Arc::clone(&progress));
        progress
    }

    pub(super) fn progress(&self, device: u32) -> Option<Arc<DeviceProgress>> {
        lock(&self.progress).get(device as usize).cloned()
    }

    /// A device has done its messages up to this one.
    pub(super) fn record_done(&self, (device, number): (u32, u64)) {
        if let Some(progress) = self.progress(device) {
            progress.done.fetch_max(number, Ordering::AcqRel);
            self.live_queues().iter().for_each(|track| track.advance_reached());
        }
    }

    fn live_queues(&self) -> Vec<Arc<ProbedMarks>> {
        lock(&self.queues).iter().filter_map(Weak::upgrade).collect()
    }

    pub(super) fn fail(&self, failure: &DeviceError) {
        self.live_queues().iter().for_each(|track| track.status.fail(failure));
    }

    /// Whether the server copies from one device to another, or within one, where that is known.
    pub(super) fn known_copy_support(&self, from: u32, to: u32) -> Option<bool> {
        lock(&self.copy_support).get(&(from, to)).copied()
    }

    pub(super) fn record_copy_support(&self, from: u32, to: u32, does: bool) {
        lock(&self.copy_support).insert((from, to), does);
    }
}

/// Messages that must be done, as the last one of each device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RequiredMessages(Vec<(u32, u64)>);

impl RequiredMessages {
    pub(super) fn add(&mut self, device: u32, number: u64) {
        match self.0.iter_mut().find(|(of, _)| *of == device) {
            Some((_, last)) => *last = number.max(*last),
            None => self.0.push((device, number)),
        }
    }

    pub(super) fn merge(&mut self, other: &RequiredMessages) {
        other.iter().for_each(|(device, number)| self.add(device, number));
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        self.0.iter().copied()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The marks of one queue on their way to being proved.
#[derive(Debug)]
pub(super) struct ProbedMarks {
    connection: Arc<Connection>,
    status: Arc<QueueStatus>,
    state: Mutex<ProbedMarksState>,
}

#[derive(Debug, Default)]
struct ProbedMarksState {
    /// Marks whose place among the messages is known, in order, until they are proved.
    marks: VecDeque<(u64, RequiredMessages)>,
    /// The last of them.
    last_placed: u64,
    /// The last that somebody has asked for.
    last_awaited: u64,
    /// Whether marks are asked for as soon as they are placed: somebody has asked too late before.
    probe_at_once: bool,
}

/// What is known of the work before a mark.
pub(super) enum PriorWork {
    /// All that has to be done has been sent, and what of it may not be done yet is this.
    Sent(RequiredMessages),
    /// Some of it has yet to be sent.
    Unsent,
}

impl ProbedMarks {
    /// A queue's timeline with its track.
    pub(super) fn new(connection: &Arc<Connection>) -> Result<(Arc<ProbedMarks>, Arc<Timeline>), DeviceError> {
        let fate = QueueStatus::new(connection.endpoint());
        let track = Arc::new(ProbedMarks { connection: Arc::clone(connection), status: fate, state: Mutex::default() });
        let timeline = Timeline::looked_at(Arc::clone(&track) as Arc<dyn device::Progress>);
        track.status.set_timeline(&timeline);
        let mut tracks = lock(&connection.completions.queues);
        tracks.retain(|track| track.strong_count() > 0);
        tracks.push(Arc::downgrade(&track));
        drop(tracks);
        // After the push: whoever fails the connection either sees the track, or has failed it before this.
        connection.check_alive()?;
        Ok((track, timeline))
    }

    pub(super) fn belongs_to(&self, connection: &Arc<Connection>) -> bool {
        Arc::ptr_eq(&self.connection, connection)
    }

    pub(super) fn status(&self) -> &Arc<QueueStatus> {
        &self.status
    }

    /// Mark `seq` stands behind these messages.
    pub(super) fn place_mark(&self, seq: u64, needs: &RequiredMessages) {
        let mut state = lock(&self.state);
        state.marks.push_back((seq, needs.clone()));
        state.last_placed = seq;
        let ask = state.probe_at_once || seq <= state.last_awaited;
        drop(state);
        self.advance_reached();
        if ask {
            self.connection.defer_probe(needs);
        }
    }

    /// Whether mark `seq` has its place.
    pub(super) fn is_placed(&self, seq: u64) -> bool {
        lock(&self.state).last_placed >= seq
    }

    /// What has to be done before mark `seq` is reached.
    pub(super) fn prior_work(&self, seq: u64) -> Result<PriorWork, DeviceError> {
        let state = lock(&self.state);
        let needs = state.marks.iter().find(|(mark, _)| *mark == seq).map(|(_, needs)| needs.clone());
        if needs.is_none() && state.last_placed >= seq {
            return Ok(PriorWork::Sent(RequiredMessages::default()));
        }
        drop(state);
        match self.status.timeline().and_then(|timeline| timeline.failure()) {
            Some(failure) => Err(failure),
            None => Ok(needs.map_or(PriorWork::Unsent, PriorWork::Sent)),
        }
    }

    /// Tells the timeline of marks that are proved.
    pub(super) fn advance_reached(&self) {
        // Marks of a queue that has failed stay where they are: they are not reached.
        if self.status.failure().is_some() {
            return;
        }
        let mut reached = None;
        let mut state = lock(&self.state);
        let done = |device| self.connection.completions.progress(device).map_or(0, |progress| progress.done());
        while let Some((seq, _)) = state.marks.pop_front_if(|(_, needs)| needs.iter().all(|(of, n)| done(of) >= n)) {
            reached = Some(seq);
        }
        drop(state);
        if let Some(seq) = reached {
            self.status.record_reached(seq);
        }
    }

    /// Of the marks up to `made`, those that have no place yet will never have one. The others may yet be proved.
    pub(super) fn close(&self, made: u64) {
        let unplaced = made > lock(&self.state).last_placed;
        if unplaced && let Some(timeline) = self.status.timeline() {
            timeline.fail(DeviceError::Ended);
        }
    }
}

impl device::Progress for ProbedMarks {
    /// There is nothing to look at: replies tell the timeline.
    fn look(&self, _: &Timeline) {}

    fn ask(&self, _: &Timeline, seq: u64) -> bool {
        let mut state = lock(&self.state);
        state.last_awaited = state.last_awaited.max(seq);
        let needs = state.marks.iter().find(|(mark, _)| *mark == seq).map(|(_, needs)| needs.clone());
        if let Some(needs) = &needs {
            let late = |(device, number)| {
                self.connection.completions.progress(device).is_some_and(|p| p.probe_is_late(number))
            };
            state.probe_at_once |= needs.iter().any(late);
        }
        drop(state);
        if let Some(needs) = &needs {
            self.connection.defer_probe(needs);
        }
        true
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

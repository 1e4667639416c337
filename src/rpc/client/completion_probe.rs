//! Completion probes: how points are reached on servers without the extensions. The replies of protocol 7.0 arrive in order, so
//! the reply to a read of a device proves that the server has done all work that was sent to this device before the read.
//! Probes are downloads that were sent anyway, or reads of one byte that are sent when a caller waits for a point.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::connection::Connection;
use super::queue_failure::QueueStatus;
use super::stored_graphs::StoredGraphs;
use crate::device::{self, DeviceError, Timeline};
use crate::poison::lock;
use crate::rpc::wire::TensorRecord;

/// Progress of a connection's devices; used for servers without the extensions.
#[derive(Debug, Default)]
pub(super) struct CompletionTracker {
    /// By device.
    progress: Mutex<Vec<Arc<DeviceProgress>>>,
    /// The marks of the connection's queues.
    queues: Mutex<Vec<Weak<ProbedMarks>>>,
    /// Whether the server can copy between two devices, by source and destination device; learned from the first copy.
    copy_support: Mutex<HashMap<(u32, u32), bool>>,
}

/// Progress of a device. The messages that carry work for it are numbered from 1.
#[derive(Debug, Default)]
pub(super) struct DeviceProgress {
    /// Number of the last message that was sent. Changes only with exclusive use of the writer, as does `probed`.
    pub(super) sent: AtomicU64,
    /// Number of the last message that is followed by a read.
    pub(super) probed: AtomicU64,
    /// Number of the last completed message.
    done: AtomicU64,
}

/// Per-device state of the writer.
#[derive(Debug, Default)]
pub(super) struct DeviceWriteState {
    /// One byte of the device's memory; reading it is the completion probe.
    pub(super) probe: Option<TensorRecord>,
    /// Id of the graph that the device computed last, and the bytes of all graphs that were sent to any device since, including
    /// this one.
    pub(super) last_graph: Option<(u64, u64)>,
    /// The graphs that a server of protocol 8.0 stores for the device.
    pub(super) stored_graphs: StoredGraphs,
}

impl DeviceWriteState {
    /// Makes the next computation send its graph again: the server may have dropped its cached graphs.
    pub(super) fn forget_graph(&mut self) {
        self.last_graph = None;
        self.stored_graphs.invalidate();
    }
}

impl DeviceProgress {
    pub(super) fn done(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    /// Whether a probe for message `number` is late: no read was sent after it, but more work was. The reply then arrives only
    /// after that work.
    pub(super) fn probe_is_late(&self, number: u64) -> bool {
        self.probed.load(Ordering::Acquire) < number && self.sent.load(Ordering::Acquire) > number
    }
}

impl CompletionTracker {
    /// Starts tracking one more device.
    pub(super) fn add_device(&self) -> Arc<DeviceProgress> {
        let progress = Arc::<DeviceProgress>::default();
        lock(&self.progress).push(Arc::clone(&progress));
        progress
    }

    pub(super) fn progress(&self, device: u32) -> Option<Arc<DeviceProgress>> {
        lock(&self.progress).get(device as usize).cloned()
    }

    /// Records that a device has done its messages up to `number`, and advances the queues with marks up to there.
    pub(super) fn record_done(&self, (device, number): (u32, u64)) {
        if let Some(progress) = self.progress(device) {
            progress.done.fetch_max(number, Ordering::AcqRel);
            self.live_queues().iter().for_each(|queue| queue.advance_reached());
        }
    }

    fn live_queues(&self) -> Vec<Arc<ProbedMarks>> {
        lock(&self.queues).iter().filter_map(Weak::upgrade).collect()
    }

    pub(super) fn fail(&self, failure: &DeviceError) {
        self.live_queues().iter().for_each(|queue| queue.status.fail(failure));
    }

    /// Whether the server can copy from one device to another, or within one; `None` before the first such copy.
    pub(super) fn known_copy_support(&self, from: u32, to: u32) -> Option<bool> {
        lock(&self.copy_support).get(&(from, to)).copied()
    }

    pub(super) fn record_copy_support(&self, from: u32, to: u32, supported: bool) {
        lock(&self.copy_support).insert((from, to), supported);
    }
}

/// Messages that must be done: for each device, the number of the last one. The device's earlier messages are implied.
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

/// The marks of one queue that wait for completion probes.
#[derive(Debug)]
pub(super) struct ProbedMarks {
    connection: Arc<Connection>,
    status: Arc<QueueStatus>,
    state: Mutex<ProbedMarksState>,
}

#[derive(Debug, Default)]
struct ProbedMarksState {
    /// Placed marks that are not reached yet, in order. A mark is placed when the messages of all work before it were sent.
    /// Each mark is listed with the messages that must be done.
    marks: VecDeque<(u64, RequiredMessages)>,
    /// The last mark that was placed.
    last_placed: u64,
    /// The last mark for which a caller has waited.
    last_awaited: u64,
    /// Whether marks are probed as soon as they are placed. Set when a probe was late.
    probe_at_once: bool,
}

/// State of the work that precedes a mark.
pub(super) enum PriorWork {
    /// All of it was sent; these messages may not be done yet.
    Sent(RequiredMessages),
    /// Some of it was not sent yet.
    Unsent,
}

impl ProbedMarks {
    /// The mark state of a new queue, and its timeline.
    pub(super) fn new(connection: &Arc<Connection>) -> Result<(Arc<ProbedMarks>, Arc<Timeline>), DeviceError> {
        let status = QueueStatus::new(connection.endpoint());
        let queue = Arc::new(ProbedMarks { connection: Arc::clone(connection), status, state: Mutex::default() });
        let timeline = Timeline::with_source(Arc::clone(&queue) as Arc<dyn device::CompletionSource>);
        queue.status.set_timeline(&timeline);
        let mut queues = lock(&connection.completions.queues);
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&queue));
        drop(queues);
        // The queue must be registered before this check: a thread that fails the connection then either finds the queue in the
        // list, or has failed the connection before the check.
        connection.check_alive()?;
        Ok((queue, timeline))
    }

    pub(super) fn belongs_to(&self, connection: &Arc<Connection>) -> bool {
        Arc::ptr_eq(&self.connection, connection)
    }

    pub(super) fn status(&self) -> &Arc<QueueStatus> {
        &self.status
    }

    /// Places mark `seq` after the given messages in the stream. Probes it at once if a caller already waits for it or if
    /// earlier probes were late.
    pub(super) fn place_mark(&self, seq: u64, required: &RequiredMessages) {
        let mut state = lock(&self.state);
        state.marks.push_back((seq, required.clone()));
        state.last_placed = seq;
        let probe_now = state.probe_at_once || seq <= state.last_awaited;
        drop(state);
        self.advance_reached();
        if probe_now {
            self.connection.defer_probe(required);
        }
    }

    /// Whether mark `seq` was placed.
    pub(super) fn is_placed(&self, seq: u64) -> bool {
        lock(&self.state).last_placed >= seq
    }

    /// The work that must be done before mark `seq` is reached.
    pub(super) fn prior_work(&self, seq: u64) -> Result<PriorWork, DeviceError> {
        let state = lock(&self.state);
        let required = state.marks.iter().find(|(mark, _)| *mark == seq).map(|(_, required)| required.clone());
        if required.is_none() && state.last_placed >= seq {
            return Ok(PriorWork::Sent(RequiredMessages::default()));
        }
        drop(state);
        match self.status.timeline().and_then(|timeline| timeline.failure()) {
            Some(failure) => Err(failure),
            None => Ok(required.map_or(PriorWork::Unsent, PriorWork::Sent)),
        }
    }

    /// Advances the timeline over all leading marks whose required messages are done.
    pub(super) fn advance_reached(&self) {
        // The marks of a failed queue are never reached.
        if self.status.failure().is_some() {
            return;
        }
        let mut reached = None;
        let mut state = lock(&self.state);
        let done = |device| self.connection.completions.progress(device).map_or(0, |progress| progress.done());
        while let Some((seq, _)) =
            state.marks.pop_front_if(|(_, required)| required.iter().all(|(of, n)| done(of) >= n))
        {
            reached = Some(seq);
        }
        drop(state);
        if let Some(seq) = reached {
            self.status.record_reached(seq);
        }
    }

    /// Closes the queue. `last_made` is the last mark that was made. Marks that were not placed can never be reached: if there
    /// are any, the timeline fails. Placed marks may still be reached.
    pub(super) fn close(&self, last_made: u64) {
        let unplaced = last_made > lock(&self.state).last_placed;
        if unplaced && let Some(timeline) = self.status.timeline() {
            timeline.fail(DeviceError::Ended);
        }
    }
}

impl device::CompletionSource for ProbedMarks {
    /// Nothing to poll: the replies advance the timeline.
    fn poll(&self, _: &Timeline) {}

    fn request_notify(&self, _: &Timeline, seq: u64) -> bool {
        let mut state = lock(&self.state);
        state.last_awaited = state.last_awaited.max(seq);
        let required = state.marks.iter().find(|(mark, _)| *mark == seq).map(|(_, required)| required.clone());
        if let Some(required) = &required {
            let late = |(device, number)| {
                self.connection.completions.progress(device).is_some_and(|p| p.probe_is_late(number))
            };
            state.probe_at_once |= required.iter().any(late);
        }
        drop(state);
        if let Some(required) = &required {
            self.connection.defer_probe(required);
        }
        true
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

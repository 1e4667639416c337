//! The event timeline of a queue: the CUDA events behind its timeline points.

use super::context::DeviceContext;
use super::events::{Event, POLL_INTERVAL, Stream};
use super::launch_log::LaunchLog;
use super::pinned::PinnedBlock;
use super::prediction::WorkTimes;
use super::turns::StreamStatus;
use crate::device::{CompletionSource, DeviceError, MemoryBudget, Timeline, TimelinePoint};
use crate::ops::OpCode;
use crate::poison::lock;
use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};
use std::time::{Duration, Instant};

/// Sequence numbers between two points of a queue, for events that its executor records for itself.
const NUMBERS_PER_POINT: u64 = 1 << 24;

/// Polls without a pause before a waiting thread sleeps between two polls.
const SPINS: u32 = 1000;

/// How often the queues are polled that a stream waits for.
const DEPENDENCY_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// If nobody has polled a queue for longer, its progress counts from the next poll on.
const MAX_POLL_GAP: Duration = Duration::from_secs(2);

/// The sequence number of a queue's `count`th point.
pub(super) fn point_seq(count: u64) -> u64 {
    count * NUMBERS_PER_POINT
}

/// Whether a sequence number belongs to a point.
pub(super) fn is_point_seq(seq: u64) -> bool {
    seq.is_multiple_of(NUMBERS_PER_POINT)
}

/// Event timeline of a queue: the recorded CUDA events by their sequence number, and everything that must live until an event
/// is reached. The completion source of the queue's [`Timeline`]: polling queries the events in order and advances the
/// timeline.
pub(super) struct EventTimeline {
    recorded: Mutex<RecordedEvents>,
    /// Advanced to each recorded event: what is submitted, and may be waited for on a device.
    submitted: Arc<Timeline>,
    /// Sequence number up to which the timeline was advanced and failures were propagated.
    advanced_to: AtomicU64,
    /// Recorded waits, in order: points of other queues that the stream waits for, each with the sequence number of this
    /// queue's next event after the wait.
    awaited_points: Mutex<Vec<(u64, TimelinePoint)>>,
    /// 0, or 1 + the number of the op whose kernel met an index outside its table.
    error_word: PinnedBlock,
    pub(super) launch_log: Arc<LaunchLog>,
    /// Objects that submitted work still uses, each with the sequence number of the event after that work.
    retained: Mutex<VecDeque<(u64, Box<dyn Any + Send>)>>,
    /// Whether the queue was aborted: submissions are refused, and the timeline fails once the submitted work is done.
    aborted: AtomicBool,
    /// Lock that is held during each submission. While an aborted queue's lock is free, its stream gets no more work.
    submission: Mutex<()>,
    /// The queue's stream; gone once the work of a dropped queue is done.
    stream: Weak<Stream>,
    context: Arc<DeviceContext>,
}

struct RecordedEvents {
    events: VecDeque<(u64, Event)>,
    /// Sequence number of the last event that was reached and removed from `events`.
    last_reached: u64,
    /// When the stream last made progress: an event was reached, or the first one recorded after all others were reached, or
    /// another queue was found working for which the stream waits.
    last_progress: Instant,
    times: WorkTimes,
    /// When the queues that the stream waits for were last polled.
    dependencies_checked: Instant,
    /// When the events were last polled. What happened long before is not known.
    polled: Instant,
}

impl fmt::Debug for EventTimeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "event timeline of a queue of {}", self.context.primary().name)
    }
}

impl EventTimeline {
    /// The timeline of a queue with this budget.
    pub(super) fn new(
        context: &Arc<DeviceContext>,
        stream: &Arc<Stream>,
        budget: &Arc<MemoryBudget>,
    ) -> Result<EventTimeline, DeviceError> {
        let launch_log = LaunchLog::new(budget);
        context.primary().add_launch_log(&launch_log);
        let now = Instant::now();
        Ok(EventTimeline {
            recorded: Mutex::new(RecordedEvents {
                events: VecDeque::new(),
                last_reached: 0,
                last_progress: now,
                times: WorkTimes::new(now),
                dependencies_checked: now,
                polled: now,
            }),
            submitted: Timeline::new(),
            advanced_to: AtomicU64::new(0),
            awaited_points: Mutex::default(),
            error_word: context.acquire_error_word()?,
            launch_log,
            retained: Mutex::default(),
            aborted: AtomicBool::new(false),
            submission: Mutex::default(),
            stream: Arc::downgrade(stream),
            context: Arc::clone(context),
        })
    }

    /// Device address of the error word.
    pub(super) fn error_word(&self) -> u64 {
        self.error_word.device_address(0)
    }

    /// Aborts the queue, from any thread. Does not block.
    pub(super) fn abort(&self) {
        self.aborted.store(true, Ordering::SeqCst);
        self.submitted.fail(DeviceError::Ended);
    }

    /// Fails the queue's timeline, and the points that are not submitted.
    pub(super) fn fail(&self, timeline: &Timeline, error: DeviceError) {
        self.submitted.fail(error.clone());
        timeline.fail(error);
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::SeqCst)
    }

    /// Fails if the queue was aborted, or the device is lost.
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        if self.is_aborted() { Err(DeviceError::Ended) } else { self.context.primary().check_lost() }
    }

    /// Guard of the submitting thread during a submission.
    pub(super) fn lock_submission(&self) -> MutexGuard<'_, ()> {
        lock(&self.submission)
    }

    /// Whether no work of the queue runs, and no thread submits any. If the queue was aborted, none will run.
    fn is_drained(&self) -> Result<bool, DeviceError> {
        let _submission = match self.submission.try_lock() {
            Ok(guard) => guard,
            // A thread that panicked in a submission submits nothing more.
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(false),
        };
        self.stream.upgrade().map_or(Ok(true), |stream| stream.is_idle())
    }

    /// Records event `seq` after all work submitted to the stream.
    pub(super) fn record(&self, stream: &Stream, seq: u64) -> Result<(), DeviceError> {
        let event = self.context.acquire_event()?;
        event.record(stream)?;
        let mut recorded = lock(&self.recorded);
        let now = Instant::now();
        if recorded.events.is_empty() {
            recorded.last_progress = now;
        }
        recorded.times.submitted(seq, self.launch_log.take_count(), now);
        recorded.events.push_back((seq, event));
        drop(recorded);
        self.submitted.advance(seq);
        Ok(())
    }

    /// The point at which the event of point `seq` is recorded, so that streams may wait for it.
    pub(super) fn submission_of(&self, seq: u64) -> TimelinePoint {
        TimelinePoint::new(&self.submitted, seq)
    }

    /// Calls `wait` with the first recorded event whose number is at least `seq`. Does not call it if that event is reached.
    pub(super) fn with_event_from(
        &self,
        seq: u64,
        wait: impl FnOnce(&Event) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let recorded = lock(&self.recorded);
        recorded.events.iter().find(|(at, _)| *at >= seq).map_or(Ok(()), |(_, event)| wait(event))
    }

    /// Records that the work before event `seq` waits for a point of another queue. If that queue fails, this queue fails too.
    pub(super) fn record_wait(&self, seq: u64, point: &TimelinePoint) {
        let mut awaited_points = lock(&self.awaited_points);
        match awaited_points.iter_mut().find(|(until, other)| *until == seq && other.is_same_timeline(point)) {
            Some((_, other)) if other.seq() >= point.seq() => {}
            Some((_, other)) => *other = point.clone(),
            None => awaited_points.push((seq, point.clone())),
        }
    }

    /// Drops the recorded waits up to event `seq`. Without this, two queues that wait for each other would keep each other
    /// alive.
    pub(super) fn forget_waits_until(&self, seq: u64) {
        let expired: Vec<_> = lock(&self.awaited_points).extract_if(.., |(until, _)| *until <= seq).collect();
        drop(expired);
    }

    /// Whether the stream waits for another device, or may do so: for a point of it that is not reached.
    pub(super) fn waits_for_other_device(&self) -> bool {
        let ordinal = self.context.gpu.ordinal;
        self.awaited_until(u64::MAX).iter().any(|(_, point)| {
            let source = point.completion_source::<EventTimeline>();
            source.is_none_or(|events| events.context.gpu.ordinal != ordinal) && point.poll() == Ok(false)
        })
    }

    fn awaited_until(&self, seq: u64) -> Vec<(u64, TimelinePoint)> {
        lock(&self.awaited_points).iter().filter(|(until, _)| *until <= seq).cloned().collect()
    }

    /// Retains an object until event `seq` is reached and the timeline is polled.
    pub(super) fn retain_until(&self, seq: u64, what: Box<dyn Any + Send>) {
        lock(&self.retained).push_back((seq, what));
    }

    /// Drops the objects that were retained up to event `seq`.
    pub(super) fn release_until(&self, seq: u64) {
        let mut retained = lock(&self.retained);
        let expired = retained.partition_point(|(until, _)| *until <= seq);
        let expired: Vec<_> = retained.drain(..expired).collect();
        drop(retained);
        drop(expired);
    }

    /// The error that a kernel reported in the error word, if any.
    pub(super) fn data_error(&self) -> Option<DeviceError> {
        let op = self.error_word.read_first_word().checked_sub(1)?;
        let op = OpCode::from_wire(op).unwrap_or(OpCode::None);
        Some(DeviceError::Data { op, reason: "an index lies outside its table".to_owned() })
    }

    /// Polls the events in order, returns reached ones to the event pool, and returns the number of the last reached event.
    ///
    /// # Errors
    /// The device is lost, also if the stream has made no progress for the device timeout; or a queue has failed for which the
    /// stream waits.
    pub(super) fn poll_events(&self) -> Result<u64, DeviceError> {
        self.context.primary().check_lost()?;
        self.context.bind()?;
        let (mut recorded, began, mut progressed) = (lock(&self.recorded), Instant::now(), false);
        if began.duration_since(recorded.polled) > MAX_POLL_GAP {
            recorded.last_progress = began;
        }
        while let Some((seq, event)) = recorded.events.front() {
            if !event.is_reached()? {
                break;
            }
            recorded.last_reached = *seq;
            progressed = true;
            if let Some((_, event)) = recorded.events.pop_front() {
                self.context.recycle_event(event);
            }
        }
        // The time within the queries is no gap between polls. A driver's query takes about a microsecond, but the emulated GPU runs a
        // kernel on the thread that queries: a kernel beyond the timeout would look like a queue that nobody has polled meanwhile.
        let (last_reached, now) = (recorded.last_reached, Instant::now());
        recorded.polled = now;
        if progressed {
            recorded.last_progress = now;
            recorded.times.reached(last_reached, now);
        }
        if !recorded.events.is_empty() {
            recorded.times.not_reached(now);
        }
        let waits_for = recorded.events.front().map(|(seq, _)| *seq);
        let is_due = now.duration_since(recorded.dependencies_checked) >= DEPENDENCY_CHECK_INTERVAL;
        let idle = now.duration_since(recorded.last_progress);
        if is_due {
            recorded.dependencies_checked = now;
        }
        drop(recorded);
        self.launch_log.forget_until(last_reached);
        if waits_for.is_none() {
            self.forget_idle_launches();
        }
        if let Some(seq) = waits_for.filter(|_| is_due) {
            self.check_progress(seq, idle)?;
        }
        Ok(last_reached)
    }

    /// Empties the launch log if the stream has no work. Launches without an event after them would otherwise count as running for
    /// as long as the queue lives, and a fault of another client could not be attributed.
    fn forget_idle_launches(&self) {
        // A thread that submits has logged its launches before they are in the stream.
        if !self.launch_log.is_empty()
            && let Ok(_submission) = self.submission.try_lock()
            && let Some(stream) = self.stream.upgrade()
            && stream.is_idle() == Ok(true)
        {
            self.launch_log.forget_until(u64::MAX);
        }
    }

    /// Checks whether the stream, which has made no progress for `idle` before event `seq`, waits for another queue, and whether the
    /// GPU hangs.
    fn check_progress(&self, seq: u64, idle: Duration) -> Result<(), DeviceError> {
        let mut waits = false;
        for (_, point) in self.awaited_until(seq) {
            // That queue finds out by itself whether its device hangs.
            waits |= !point.poll()?;
        }
        // Polling a queue of another device made that device's context current.
        self.context.bind()?;
        let timeout = self.context.options.device_timeout;
        // Streams share the hardware's connections, so one that waits for another device may be in front.
        waits = waits || (idle > timeout && self.context.waits_for_other_device());
        self.context.bind()?;
        if waits {
            lock(&self.recorded).last_progress = Instant::now();
            Ok(())
        } else if idle > timeout {
            Err(self.context.primary().mark_hung(timeout))
        } else {
            Ok(())
        }
    }

    /// Blocks until event `seq` is reached. Calls `check` at each poll, and returns its error.
    ///
    /// # Errors
    /// As `poll_events`.
    pub(super) fn wait_reached(
        &self,
        seq: u64,
        mut check: impl FnMut() -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        self.wait_until(|| Ok(self.poll_events()? >= seq), &mut check)
    }

    /// Blocks until `is_done` holds, which polls something.
    pub(super) fn wait_until(
        &self,
        mut is_done: impl FnMut() -> Result<bool, DeviceError>,
        mut check: impl FnMut() -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let mut polls = 0u32;
        while !is_done()? {
            check()?;
            polls = polls.saturating_add(1);
            if polls > SPINS {
                std::thread::sleep(POLL_INTERVAL);
            }
        }
        Ok(())
    }

    /// Advances the timeline to event `seq`, which is reached, or as far as the queues that were waited for are known not to
    /// fail. Fails if a kernel reported an error or a queue that was waited for has failed.
    fn advance_to(&self, timeline: &Timeline, seq: u64) -> Result<(), DeviceError> {
        self.release_until(seq);
        // The error word must be read after the event query: only then are the kernels' writes visible.
        self.data_error().map_or(Ok(()), Err)?;
        for (until, point) in self.awaited_until(seq) {
            // That queue may itself wait for an earlier event of this queue, and polls this timeline for it: advance first.
            timeline.advance(until - 1);
            // Undecided although its event is reached: that queue was aborted and is not drained. The work after it fails once
            // that queue fails.
            if !point.poll()? {
                return Ok(());
            }
        }
        timeline.advance(seq);
        // Must be last: another thread in `poll` skips this function once `advanced_to` covers `seq`, and would miss a failure.
        self.advanced_to.fetch_max(seq, Ordering::Release);
        self.forget_waits_until(seq);
        Ok(())
    }
}

impl StreamStatus for EventTimeline {
    fn is_busy(&self) -> bool {
        self.is_drained() == Ok(false)
    }
}

impl CompletionSource for EventTimeline {
    fn poll(&self, timeline: &Timeline) {
        // An aborted queue's events are reached, but its points are not: its work may be incomplete.
        let done = self.poll_events().and_then(|seq| {
            if !self.is_aborted() {
                return if self.advanced_to.load(Ordering::Acquire) >= seq {
                    Ok(())
                } else {
                    self.advance_to(timeline, seq)
                };
            }
            if self.is_drained()? {
                self.release_until(u64::MAX);
                return Err(DeviceError::Ended);
            }
            Ok(())
        });
        if let Err(e) = done {
            self.fail(timeline, e);
        }
    }

    fn expected_end(&self, seq: u64) -> Option<Instant> {
        lock(&self.recorded).times.expected_end(seq)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

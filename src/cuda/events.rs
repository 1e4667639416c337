//! Streams and events, and the event timeline of a queue: the CUDA events behind its timeline points.
#![allow(unsafe_code)]

use super::context::{DeviceContext, lock};
use super::memory::PinnedBuffer;
use super::turns::StreamStatus;
use crate::device::{CompletionSource, DEVICE_TIMEOUT, DeviceError, Timeline, TimelinePoint};
use crate::ops::OpCode;
use cudarc::driver::{CudaContext, result, sys};
use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};
use std::time::{Duration, Instant};

/// Number of pinned words for waits on host points, used in turn. They follow word 0, the error word.
pub(super) const WAIT_WORDS: u64 = 1000;

/// How often a thread that waits for something else than the GPU checks whether its queue was aborted.
pub(super) const ABORT_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Blocks the host until `is_done` holds: polls a thousand times, then sleeps 50 µs between polls. Calls `goes_on` at each poll;
/// ends with its error, or returns false if it is false.
///
/// # Errors
/// [`DeviceError::Deadline`] with `awaited` after the device timeout, the watchdog against a hung GPU.
pub(super) fn poll_until(
    awaited: &'static str,
    is_done: impl Fn() -> Result<bool, DeviceError>,
    mut goes_on: impl FnMut() -> Result<bool, DeviceError>,
) -> Result<bool, DeviceError> {
    let until = Instant::now() + DEVICE_TIMEOUT;
    let mut polls = 0u32;
    while !is_done()? {
        if !goes_on()? {
            return Ok(false);
        }
        if Instant::now() > until {
            return Err(DeviceError::Deadline(awaited));
        }
        polls += 1;
        if polls > 1000 {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
    Ok(true)
}

/// A CUDA stream: work on a device that is executed in the order of submission.
#[derive(Debug)]
pub(super) struct Stream {
    raw: sys::CUstream,
    cuda_context: Arc<CudaContext>,
}

// SAFETY: the driver allows the use of a stream handle from any thread; it locks internally.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Creates a stream that does not synchronise with the default stream.
    pub(super) fn new(context: &DeviceContext) -> Result<Stream, DeviceError> {
        context.bind()?;
        result::stream::create(result::stream::StreamKind::NonBlocking)
            .map(|raw| Stream { raw, cuda_context: Arc::clone(context.cuda_context()) })
            .map_err(|e| context.driver_error("cuStreamCreate", e))
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Makes later work on this stream wait until `event` is reached. The event may belong to another device.
    pub(super) fn wait_event(&self, context: &DeviceContext, event: &Event) -> Result<(), DeviceError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both handles are alive, because they are borrowed from their owners.
        unsafe { result::stream::wait_event(self.raw, event.raw, flags) }
            .map_err(|e| context.driver_error("cuStreamWaitEvent", e))
    }

    /// Makes later work on this stream wait until a word of pinned memory is at least `value` (cuStreamWaitValue32).
    pub(super) fn wait_value(
        &self,
        context: &DeviceContext,
        words: &PinnedBuffer,
        index: usize,
        value: u32,
    ) -> Result<(), DeviceError> {
        let at_least = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the word lies in pinned memory that the queue retains until the stream has passed the wait.
        unsafe { sys::cuStreamWaitValue32_v2(self.raw, words.device_address(4 * index), value, at_least) }
            .result()
            .map_err(|e| context.driver_error("cuStreamWaitValue32", e))
    }

    /// Queries whether all work of the stream is done. Does not block. Must not be called during a capture, which it would
    /// invalidate.
    pub(super) fn is_idle(&self, context: &DeviceContext) -> Result<bool, DeviceError> {
        // SAFETY: the handle is alive.
        match unsafe { sys::cuStreamQuery(self.raw) }.result() {
            Ok(()) => Ok(true),
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(e) => Err(context.driver_error("cuStreamQuery", e)),
        }
    }

    /// Blocks until all work of the stream is done.
    pub(super) fn synchronize(&self, context: &DeviceContext) -> Result<(), DeviceError> {
        // SAFETY: the handle is alive.
        unsafe { result::stream::synchronize(self.raw) }.map_err(|e| context.driver_error("cuStreamSynchronize", e))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.cuda_context.bind_to_thread().is_ok() {
            // SAFETY: the handle is destroyed once; the driver completes submitted work before it frees the stream.
            let _ = unsafe { result::stream::destroy(self.raw) };
        }
    }
}

/// A CUDA event: a position in a stream.
#[derive(Debug)]
pub(super) struct Event {
    raw: sys::CUevent,
    cuda_context: Arc<CudaContext>,
}

// SAFETY: the driver allows the use of an event handle from any thread; it locks internally.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event without a time stamp, which is cheaper.
    pub(super) fn new(context: &DeviceContext) -> Result<Event, DeviceError> {
        context.bind()?;
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        result::event::create(flags)
            .map(|raw| Event { raw, cuda_context: Arc::clone(context.cuda_context()) })
            .map_err(|e| context.driver_error("cuEventCreate", e))
    }

    /// Records the event behind all work submitted to `stream` so far.
    pub(super) fn record(&self, context: &DeviceContext, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: both handles are alive.
        unsafe { result::event::record(self.raw, stream.raw()) }.map_err(|e| context.driver_error("cuEventRecord", e))
    }

    /// Queries whether all work before the event is done. Does not block.
    pub(super) fn is_reached(&self, context: &DeviceContext) -> Result<bool, DeviceError> {
        // SAFETY: the handle is alive.
        match unsafe { result::event::query(self.raw) } {
            Ok(()) => Ok(true),
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(e) => Err(context.driver_error("cuEventQuery", e)),
        }
    }

    /// Blocks the host until the event is reached, as [`poll_until`]. Calls `check` at each poll, and returns its error.
    ///
    /// # Errors
    /// [`DeviceError::Deadline`] with `awaited` after the device timeout.
    pub(super) fn wait(
        &self,
        context: &DeviceContext,
        awaited: &'static str,
        mut check: impl FnMut() -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        poll_until(awaited, || self.is_reached(context), || check().map(|()| true)).map(drop)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.cuda_context.bind_to_thread().is_ok() {
            // SAFETY: the handle is destroyed once; the driver defers the release while a stream still waits for the event.
            let _ = unsafe { result::event::destroy(self.raw) };
        }
    }
}

/// Event timeline of a queue: the recorded CUDA events by their sequence number, and everything that must live until an event
/// is reached. The completion source of the queue's [`Timeline`]: polling queries the events in order and advances the
/// timeline.
pub(super) struct EventTimeline {
    recorded: Mutex<RecordedEvents>,
    /// Sequence number up to which the timeline was advanced and failures were propagated.
    advanced_to: AtomicU64,
    /// Recorded waits, in order: points of other queues that the stream waits for, each with the sequence number of this
    /// queue's next event behind the wait.
    awaited_points: Mutex<Vec<(u64, TimelinePoint)>>,
    /// Pinned words shared with the device. Word 0 is the error word: 0, or 1 + the number of the op whose kernel met an index
    /// outside its table. The queue uses the remaining words for waits on host points.
    pub(super) shared_words: PinnedBuffer,
    /// Entry name of the kernel launched last. CUDA reports faults asynchronously, so errors name this kernel as a hint.
    last_kernel: Mutex<&'static str>,
    /// Objects that submitted work still uses, each with the sequence number of the event behind that work.
    retained: Mutex<VecDeque<(u64, Box<dyn Any + Send>)>>,
    /// Number of waits on host points so far; selects the next word and its value.
    host_waits: AtomicU64,
    /// Whether the queue was aborted: submissions are refused, and the timeline fails once the submitted work is done.
    aborted: AtomicBool,
    /// Held during each submission. While an aborted queue's lock is free, its stream gets no more work.
    submission: Mutex<()>,
    /// The queue's stream; gone once the work of a dropped queue is done.
    stream: Weak<Stream>,
    context: Arc<DeviceContext>,
}

#[derive(Default)]
struct RecordedEvents {
    events: VecDeque<(u64, Event)>,
    /// Sequence number of the last event that was reached and removed from `events`.
    last_reached: u64,
}

impl fmt::Debug for EventTimeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "event timeline of a queue of {}", self.context.name)
    }
}

impl EventTimeline {
    pub(super) fn new(context: &Arc<DeviceContext>, stream: &Arc<Stream>) -> Result<EventTimeline, DeviceError> {
        let shared_words = PinnedBuffer::new(context, 4096)?;
        Ok(EventTimeline {
            context: Arc::clone(context),
            recorded: Mutex::default(),
            advanced_to: AtomicU64::new(0),
            awaited_points: Mutex::default(),
            shared_words,
            last_kernel: Mutex::new("nothing"),
            retained: Mutex::default(),
            host_waits: AtomicU64::new(0),
            aborted: AtomicBool::new(false),
            submission: Mutex::default(),
            stream: Arc::downgrade(stream),
        })
    }

    /// Aborts the queue, from any thread. Does not block.
    pub(super) fn abort(&self) {
        self.aborted.store(true, Ordering::SeqCst);
        self.release_host_waits();
    }

    /// Fails if the queue was aborted.
    pub(super) fn check_aborted(&self) -> Result<(), DeviceError> {
        if self.aborted.load(Ordering::SeqCst) { Err(DeviceError::Ended) } else { Ok(()) }
    }

    /// Held by the submitting thread during a submission.
    pub(super) fn lock_submission(&self) -> MutexGuard<'_, ()> {
        lock(&self.submission)
    }

    /// The word of the next wait on a host point and the value to wait for. `None` if that word is still in use.
    pub(super) fn next_host_wait(&self) -> Option<(usize, u32)> {
        let waits = self.host_waits.load(Ordering::Relaxed);
        let (index, value) = ((1 + waits % WAIT_WORDS) as usize, (waits / WAIT_WORDS + 1) as u32);
        (self.shared_words.read_word(index) + 1 == value).then_some((index, value))
    }

    /// Makes the stream wait until word `index` has the value, as [`EventTimeline::next_host_wait`] returned them.
    pub(super) fn submit_host_wait(&self, stream: &Stream, index: usize, value: u32) -> Result<(), DeviceError> {
        self.host_waits.fetch_add(1, Ordering::SeqCst);
        stream.wait_value(&self.context, &self.shared_words, index, value)?;
        // An abort before the count changed has not released this wait.
        if self.check_aborted().is_err() {
            self.release_host_wait(index, value);
        }
        Ok(())
    }

    /// Ends a wait for a word, once the stream reaches it.
    pub(super) fn release_host_wait(&self, index: usize, value: u32) {
        if let Some(word) = self.shared_words.word(index) {
            word.fetch_max(value, Ordering::Release);
        }
    }

    /// Releases all waits on host points, which may never be reached. No further wait may be submitted, or
    /// [`EventTimeline::abort`] was called before.
    pub(super) fn release_host_waits(&self) {
        // The value must not be greater than that of the current lap: the device compares by the sign of the 32-bit difference.
        let lap = (self.host_waits.load(Ordering::SeqCst) / WAIT_WORDS + 1) as u32;
        (1..=WAIT_WORDS as usize).for_each(|index| self.release_host_wait(index, lap));
    }

    /// Whether no work of the queue runs, and no thread submits any. If the queue was aborted, none will run.
    fn is_drained(&self) -> Result<bool, DeviceError> {
        let _submission = match self.submission.try_lock() {
            Ok(guard) => guard,
            // A thread that panicked in a submission submits nothing more.
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(false),
        };
        self.stream.upgrade().map_or(Ok(true), |stream| stream.is_idle(&self.context))
    }

    /// Records event `seq` behind all work submitted to the stream.
    pub(super) fn record(&self, stream: &Stream, seq: u64) -> Result<(), DeviceError> {
        let event = self.context.acquire_event()?;
        event.record(&self.context, stream)?;
        lock(&self.recorded).events.push_back((seq, event));
        Ok(())
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

    pub(super) fn record_launch(&self, entry: &'static str) {
        *lock(&self.last_kernel) = entry;
    }

    /// Adds the name of the kernel launched last to a driver error.
    pub(super) fn add_last_kernel(&self, e: DeviceError) -> DeviceError {
        match e {
            DeviceError::Driver { device, call, reason } => {
                let reason = format!("{reason}; the kernel launched last is {}", lock(&self.last_kernel));
                DeviceError::Driver { device, call, reason }
            }
            e => e,
        }
    }

    /// The error that a kernel reported in the error word, if any.
    pub(super) fn data_error(&self) -> Option<DeviceError> {
        let op = self.shared_words.read_word(0).checked_sub(1)?;
        let op = OpCode::from_wire(op).unwrap_or(OpCode::None);
        Some(DeviceError::Data { op, reason: "an index lies outside its table".to_owned() })
    }

    /// Polls the events in order, returns reached ones to the event pool, and returns the number of the last reached event.
    fn poll_events(&self) -> Result<u64, DeviceError> {
        self.context.bind()?;
        let mut recorded = lock(&self.recorded);
        while let Some((seq, event)) = recorded.events.front() {
            if !event.is_reached(&self.context)? {
                break;
            }
            recorded.last_reached = *seq;
            if let Some((_, event)) = recorded.events.pop_front() {
                self.context.recycle_event(event);
            }
        }
        Ok(recorded.last_reached)
    }

    /// Advances the timeline to event `seq`, which is reached, or as far as the queues that were waited for are known not to
    /// fail. Fails if a kernel reported an error or a queue that was waited for has failed.
    fn advance_to(&self, timeline: &Timeline, seq: u64) -> Result<(), DeviceError> {
        self.release_until(seq);
        // The error word must be read after the event query: only then are the kernels' writes visible.
        self.data_error().map_or(Ok(()), Err)?;
        let awaited_points: Vec<_> =
            lock(&self.awaited_points).iter().filter(|(until, _)| *until <= seq).cloned().collect();
        for (until, point) in awaited_points {
            // That queue may itself wait for an earlier event of this queue, and polls this timeline for it: advance first.
            timeline.advance(until - 1);
            // Undecided although its event is reached: that queue was aborted and is not drained. Its work ran too early, and so
            // did the work behind it, which fails once that queue fails.
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
        let reached = self.poll_events().map_err(|e| self.add_last_kernel(e));
        // Checked after the query: an abort releases waits, so that the work behind them runs too early. Its points must not
        // count as reached.
        let done = reached.and_then(|seq| match self.check_aborted() {
            Ok(()) if self.advanced_to.load(Ordering::Acquire) >= seq => Ok(()),
            Ok(()) => self.advance_to(timeline, seq),
            Err(aborted) if self.is_drained()? => {
                self.release_until(u64::MAX);
                Err(aborted)
            }
            Err(_) => Ok(()),
        });
        if let Err(e) = done {
            timeline.fail(e);
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

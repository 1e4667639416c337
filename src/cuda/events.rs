//! Streams and events, and the points of a queue that stand on them.
#![allow(unsafe_code)]

use super::core::{Core, lock};
use super::memory::Pinned;
use crate::device::{DeviceError, Point, Progress, Timeline};
use crate::ops::OpCode;
use cudarc::driver::{CudaContext, result, sys};
use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// An in-order sequence of work on a device.
#[derive(Debug)]
pub(super) struct Stream {
    raw: sys::CUstream,
    context: Arc<CudaContext>,
}

// SAFETY: a stream's handle may be used from any thread; the driver locks.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream that waits for no other.
    pub(super) fn new(core: &Core) -> Result<Stream, DeviceError> {
        core.bind()?;
        result::stream::create(result::stream::StreamKind::NonBlocking)
            .map(|raw| Stream { raw, context: Arc::clone(core.context()) })
            .map_err(|e| core.failed("cuStreamCreate", e))
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Makes later work wait for what `event` was recorded after, on whichever device.
    pub(super) fn wait(&self, core: &Core, event: &Event) -> Result<(), DeviceError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both handles are alive: they are borrowed from their owners.
        unsafe { result::stream::wait_event(self.raw, event.raw, flags) }
            .map_err(|e| core.failed("cuStreamWaitEvent", e))
    }

    /// Makes later work wait until a word of pinned memory has reached `value`.
    pub(super) fn wait_for_word(
        &self,
        core: &Core,
        words: &Pinned,
        index: usize,
        value: u32,
    ) -> Result<(), DeviceError> {
        let at_least = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the word lies in pinned memory that its queue keeps until the stream has passed.
        unsafe { sys::cuStreamWaitValue32_v2(self.raw, words.device(4 * index), value, at_least) }
            .result()
            .map_err(|e| core.failed("cuStreamWaitValue32", e))
    }

    /// Blocks until all its work is done.
    pub(super) fn synchronize(&self, core: &Core) -> Result<(), DeviceError> {
        // SAFETY: the handle is alive.
        unsafe { result::stream::synchronize(self.raw) }.map_err(|e| core.failed("cuStreamSynchronize", e))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: destroyed once; the driver lets its work end first.
            let _ = unsafe { result::stream::destroy(self.raw) };
        }
    }
}

/// A mark on a stream.
#[derive(Debug)]
pub(super) struct Event {
    raw: sys::CUevent,
    context: Arc<CudaContext>,
}

// SAFETY: an event's handle may be used from any thread; the driver locks.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event without a time stamp.
    pub(super) fn new(core: &Core) -> Result<Event, DeviceError> {
        core.bind()?;
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        result::event::create(flags)
            .map(|raw| Event { raw, context: Arc::clone(core.context()) })
            .map_err(|e| core.failed("cuEventCreate", e))
    }

    /// Marks the end of all work on `stream` so far.
    pub(super) fn record(&self, core: &Core, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: both handles are alive.
        unsafe { result::event::record(self.raw, stream.raw()) }.map_err(|e| core.failed("cuEventRecord", e))
    }

    /// Whether the work before it is done.
    pub(super) fn reached(&self, core: &Core) -> Result<bool, DeviceError> {
        // SAFETY: the handle is alive.
        match unsafe { result::event::query(self.raw) } {
            Ok(()) => Ok(true),
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(e) => Err(core.failed("cuEventQuery", e)),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: destroyed once; the driver keeps what a stream still waits for.
            let _ = unsafe { result::event::destroy(self.raw) };
        }
    }
}

/// The events behind a queue's points, and the word in which its kernels say what was wrong with their data.
pub(super) struct Marks {
    recorded: Mutex<Recorded>,
    /// The moment up to which its timeline is known to have come.
    settled: AtomicU64,
    /// Points of other queues that the stream waits for, each with the moment behind that wait, in order.
    awaited: Mutex<Vec<(u64, Point)>>,
    /// Word 0: 0, or 1 and the number of the op that met an index outside its table.
    pub(super) verdict: Pinned,
    /// The kernel launched last, for errors that come late.
    launched: Mutex<&'static str>,
    /// What work on its way needs, with the moment behind that work.
    kept: Mutex<VecDeque<(u64, Box<dyn Any + Send>)>>,
    core: Arc<Core>,
}

#[derive(Default)]
struct Recorded {
    events: VecDeque<(u64, Event)>,
    /// The moment of the last event that was seen to be reached, and is not among them any more.
    reached: u64,
}

impl fmt::Debug for Marks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "moments of a queue of {}", self.core.name)
    }
}

impl Marks {
    pub(super) fn new(core: &Arc<Core>) -> Result<Marks, DeviceError> {
        let verdict = Pinned::new(core, 4096)?;
        Ok(Marks {
            core: Arc::clone(core),
            recorded: Mutex::default(),
            settled: AtomicU64::new(0),
            awaited: Mutex::default(),
            verdict,
            launched: Mutex::new("nothing"),
            kept: Mutex::default(),
        })
    }

    /// Records moment `seq` behind all work on the stream.
    pub(super) fn record(&self, stream: &Stream, seq: u64) -> Result<(), DeviceError> {
        let event = self.core.event()?;
        event.record(&self.core, stream)?;
        lock(&self.recorded).events.push_back((seq, event));
        Ok(())
    }

    /// Calls `wait` with the event of the first recorded moment from `seq` on; not at all when it is reached already.
    pub(super) fn event_of(
        &self,
        seq: u64,
        wait: impl FnOnce(&Event) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let recorded = lock(&self.recorded);
        recorded.events.iter().find(|(at, _)| *at >= seq).map_or(Ok(()), |(_, event)| wait(event))
    }

    /// Notes that the work before moment `seq` waits for a point of another queue: when that fails, so does this queue.
    pub(super) fn awaits(&self, seq: u64, point: &Point) {
        let mut awaited = lock(&self.awaited);
        match awaited.iter_mut().find(|(until, known)| *until == seq && known.is_beside(point)) {
            Some((_, known)) if known.seq() >= point.seq() => {}
            Some((_, known)) => *known = point.clone(),
            None => awaited.push((seq, point.clone())),
        }
    }

    /// Lets go of the points that were waited for before `seq`. Their queues may hold points of this one.
    pub(super) fn forget(&self, seq: u64) {
        let over: Vec<_> = lock(&self.awaited).extract_if(.., |(until, _)| *until <= seq).collect();
        drop(over);
    }

    /// Keeps something until moment `seq` is reached and someone looked.
    pub(super) fn keep(&self, seq: u64, what: Box<dyn Any + Send>) {
        lock(&self.kept).push_back((seq, what));
    }

    /// Lets go of what was kept until `seq`.
    pub(super) fn release(&self, seq: u64) {
        let mut kept = lock(&self.kept);
        let over = kept.partition_point(|(until, _)| *until <= seq);
        let over: Vec<_> = kept.drain(..over).collect();
        drop(kept);
        drop(over);
    }

    pub(super) fn launched(&self, entry: &'static str) {
        *lock(&self.launched) = entry;
    }

    /// An error of the device with what it was busy with.
    pub(super) fn explain(&self, e: DeviceError) -> DeviceError {
        match e {
            DeviceError::Driver { device, call, reason } => {
                let reason = format!("{reason}; the kernel launched last is {}", lock(&self.launched));
                DeviceError::Driver { device, call, reason }
            }
            e => e,
        }
    }

    /// What a kernel found wrong with its data.
    pub(super) fn data_error(&self) -> Option<DeviceError> {
        let op = self.verdict.read_word(0).checked_sub(1)?;
        let op = OpCode::from_wire(op).unwrap_or(OpCode::None);
        Some(DeviceError::Data { op, reason: "an index lies outside its table".to_owned() })
    }

    /// The last moment whose event is reached.
    fn reached(&self) -> Result<u64, DeviceError> {
        self.core.bind()?;
        let mut recorded = lock(&self.recorded);
        while let Some((seq, event)) = recorded.events.front() {
            if !event.reached(&self.core)? {
                break;
            }
            recorded.reached = *seq;
            if let Some((_, event)) = recorded.events.pop_front() {
                self.core.reuse(event);
            }
        }
        Ok(recorded.reached)
    }

    /// Advances the timeline to `seq`, whose event is reached.
    fn settle(&self, timeline: &Timeline, seq: u64) -> Result<(), DeviceError> {
        self.release(seq);
        // After the query: what a kernel wrote before its end is visible now.
        self.data_error().map_or(Ok(()), Err)?;
        let awaited: Vec<_> = lock(&self.awaited).iter().filter(|(until, _)| *until <= seq).cloned().collect();
        for (until, point) in awaited {
            // Its queue may in turn have waited for an earlier moment of this one, and looks whether that is reached.
            timeline.advance(until - 1);
            point.poll()?;
        }
        timeline.advance(seq);
        // Not before: another thread may be here too, and must not miss a failure.
        self.settled.fetch_max(seq, Ordering::Release);
        self.forget(seq);
        Ok(())
    }
}

impl Progress for Marks {
    fn look(&self, timeline: &Timeline) {
        let done = self.reached().map_err(|e| self.explain(e)).and_then(|seq| {
            if self.settled.load(Ordering::Acquire) >= seq { Ok(()) } else { self.settle(timeline, seq) }
        });
        if let Err(e) = done {
            timeline.fail(e);
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

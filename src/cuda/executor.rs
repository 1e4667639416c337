//! The executor of a CUDA queue: submits its commands to one stream, in order. The queue holds the executor while it submits at once.
//! While commands wait for work that is not submitted yet, a thread of the device holds it: see `queue`.

mod copies;
mod layouts;
mod transfers;

use super::commands::{CudaCommand, EventNumbers};
use super::context::DeviceContext;
use super::copy::{QUEUE_UPLOAD_BYTES, SEGMENT, UploadSegment};
use super::deferred_drop::DeferredDrop;
use super::event_timeline::{EventTimeline, point_seq};
use super::events::Stream;
use super::kernel::COUNTER_BYTES;
use super::memory::DeviceMemory;
use super::program::{CudaProgram, ProgramRun};
use crate::device::{
    CommandOutcome, DeviceError, Executor, MemoryBudget, Program, Region, Reservation, Timeline, TimelinePoint, Turn,
    UploadSource,
};
use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

/// Limit of retained objects without an event after their work. Beyond it an event is recorded, so that they can be dropped.
const MAX_UNRECORDED: usize = 64;

/// The outcome of a wait for a point.
pub(super) enum Waited {
    /// The stream waits, or need not wait.
    Done,
    /// The stream may wait only once this point is reached.
    NotSubmitted(TimelinePoint),
}

pub(super) struct CudaExecutor {
    context: Arc<DeviceContext>,
    budget: Arc<MemoryBudget>,
    stream: Option<Arc<Stream>>,
    events: Arc<EventTimeline>,
    timeline: Arc<Timeline>,
    numbers: EventNumbers,
    /// Whether work was submitted since the event of the last point.
    pub(super) dirty: bool,
    /// Number of objects retained since the last recorded event.
    unrecorded: usize,
    /// The event after the work for which a held command waits.
    awaited: Option<u64>,
    /// The block that small uploads fill.
    segment: Option<UploadSegment>,
    /// Count the pinned memory of the queue's transfers.
    uploads: Arc<MemoryBudget>,
    downloads: Arc<MemoryBudget>,
    scratch: Option<QueueScratch>,
    /// Streams of other devices for copies from there through the host, by the ordinal of their GPU.
    source_streams: HashMap<usize, Arc<Stream>>,
}

/// Scratch memory of the queue, shared by all its programs; grows on demand.
struct QueueScratch {
    memory: DeviceMemory,
    /// Released together with the memory.
    _reservations: (Reservation, Reservation),
}

/// The memory behind a region of a CUDA device.
pub(super) fn memory(region: &Region) -> Result<&DeviceMemory, DeviceError> {
    region.buffer().memory().ok_or(DeviceError::Misuse("a region of another kind of device"))
}

impl CudaExecutor {
    pub(super) fn new(
        context: &Arc<DeviceContext>,
        budget: &Arc<MemoryBudget>,
        stream: Arc<Stream>,
        events: &Arc<EventTimeline>,
        timeline: &Arc<Timeline>,
    ) -> CudaExecutor {
        CudaExecutor {
            context: Arc::clone(context),
            budget: Arc::clone(budget),
            stream: Some(stream),
            events: Arc::clone(events),
            timeline: Arc::clone(timeline),
            numbers: EventNumbers::default(),
            dirty: false,
            unrecorded: 0,
            awaited: None,
            segment: None,
            uploads: MemoryBudget::within(&context.upload_memory.budget, QUEUE_UPLOAD_BYTES),
            downloads: MemoryBudget::within(&context.download_memory.budget, u64::MAX),
            scratch: None,
            source_streams: HashMap::new(),
        }
    }

    /// Runs `work`, which submits to the stream. Fails if the queue has failed or was aborted. Only the loss of the device fails the
    /// queue for good: after another error, what `work` would have written is unspecified, and later work is right.
    pub(super) fn submit<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let events = Arc::clone(&self.events);
        let _submission = events.lock_submission();
        self.check_failure()?;
        self.dirty = true;
        let done = self.context.bind().and_then(|()| work(self));
        if let Err(e @ DeviceError::Lost { .. }) = &done {
            self.events.fail(&self.timeline, e.clone());
        }
        done
    }

    /// Fails if the queue has failed or was aborted, or one of its kernels has reported an error.
    pub(super) fn check_failure(&self) -> Result<(), DeviceError> {
        if let Some(e) = self.events.data_error() {
            self.events.fail(&self.timeline, e);
        }
        self.timeline.failure().map_or_else(|| self.events.check(), Err)
    }

    fn stream(&self) -> Result<Arc<Stream>, DeviceError> {
        self.stream.clone().ok_or(DeviceError::Ended)
    }

    /// Retains an object until the work that is submitted next is done. Must be called before that work is submitted, because
    /// the submission may fail half-way.
    fn retain(&mut self, what: impl Any + Send) -> Result<(), DeviceError> {
        let recorded = if self.unrecorded >= MAX_UNRECORDED { self.record().map(drop) } else { Ok(()) };
        self.unrecorded += 1;
        // Also after a failure: earlier work may use it.
        self.events.retain_until(self.numbers.next(), Box::new(what));
        recorded
    }

    /// Retains an object again if an event was recorded since `until` was the number of the next one: it ends what was retained until
    /// then, while later work uses the object.
    fn retain_again(&self, until: &mut u64, what: impl Any + Send) {
        let next = self.numbers.next();
        if std::mem::replace(until, next) != next {
            self.events.retain_until(next, Box::new(what));
        }
    }

    /// Records an event after all work so far and returns its sequence number.
    fn record(&mut self) -> Result<u64, DeviceError> {
        let seq = self.numbers.record(&self.events, &*self.stream()?)?;
        self.after_record()?;
        Ok(seq)
    }

    /// Records the event of a point.
    pub(super) fn mark(&mut self, point: u64) -> Result<(), DeviceError> {
        // Its copies may be running until that event.
        if let Some(segment) = self.segment.take() {
            self.events.retain_until(self.numbers.next(), Box::new(segment));
        }
        self.events.record(&*self.stream()?, point_seq(point))?;
        self.numbers.set_last(point_seq(point));
        self.after_record()?;
        self.dirty = false;
        Ok(())
    }

    fn after_record(&mut self) -> Result<(), DeviceError> {
        self.unrecorded = 0;
        // Poll here, so that retained memory is freed even if the caller never waits for its points.
        self.timeline.poll();
        // Polling may have dropped memory of another device, which made that device's context current.
        self.context.bind()
    }

    /// Blocks until all work so far is done.
    fn wait_for_stream(&mut self) -> Result<(), DeviceError> {
        let (seq, events) = (self.record()?, Arc::clone(&self.events));
        events.wait_reached(seq, || events.check())?;
        self.context.bind()
    }

    /// Ensures that the scratch memory has `bytes` bytes and returns their address, after the counters. The old memory is retained for
    /// submitted work.
    fn ensure_scratch(&mut self, bytes: u64) -> Result<u64, DeviceError> {
        let bytes = if bytes == 0 { 0 } else { bytes + COUNTER_BYTES };
        let enough = |scratch: &QueueScratch| scratch.memory.address_of(0, bytes).is_ok();
        if bytes > 0 && !self.scratch.as_ref().is_some_and(enough) {
            // Rounded up to an eighth of a power of two, so that a queue whose graphs grow replaces it rarely.
            let size = bytes.next_multiple_of((bytes.next_power_of_two() / 8).max(1 << 20));
            let _reservations = (self.budget.reserve(size)?, self.context.budget.reserve(size)?);
            let stream = self.stream()?;
            let memory = DeviceMemory::uninitialized(&self.context, size, &stream)?;
            let filled = memory.fill(&stream, 0, COUNTER_BYTES, 0);
            let made = QueueScratch { memory, _reservations };
            let unused = if filled.is_ok() { self.scratch.replace(made) } else { Some(made) };
            // Also memory that was not filled: the stream allocates it.
            if let Some(unused) = unused {
                self.events.retain_until(self.numbers.next(), Box::new(unused));
            }
            filled?;
        }
        Ok(self.scratch.as_ref().map_or(0, |scratch| scratch.memory.address() + COUNTER_BYTES))
    }

    pub(super) fn fill(&mut self, dst: &Region, value: u8) -> Result<(), DeviceError> {
        self.retain(dst.clone())?;
        let _rows = self.lock_rows(&[self.row_access(dst, 0..dst.bytes(), true)?])?;
        memory(dst)?.fill(&*self.stream()?, dst.offset(), dst.bytes(), value)
    }

    /// Submits a program from a segment on. Returns the next segment if `yields` holds before it is done.
    pub(super) fn run(
        &mut self,
        program: &Program,
        bindings: &Arc<[Region]>,
        from: usize,
        yields: impl Fn() -> bool,
    ) -> Result<Option<usize>, DeviceError> {
        let compiled = program.compiled::<CudaProgram>();
        let compiled = compiled.ok_or(DeviceError::Misuse("a program of another device"))?;
        let scratch = self.ensure_scratch(compiled.scratch())?;
        let used = (program.clone(), Arc::clone(bindings));
        self.retain(used.clone())?;
        let (stream, mut until) = (self.stream()?, self.numbers.next());
        let layouts = self.lock_layouts(compiled, bindings)?;
        let mut run = ProgramRun {
            context: &self.context,
            stream: &stream,
            events: &self.events,
            numbers: &mut self.numbers,
            session: &self.budget,
            scratch,
            packed: Arc::clone(&layouts.packed),
        };
        let done = compiled.run(&mut run, bindings, from, yields);
        // Conversions, turns and long programs record events.
        self.retain_again(&mut until, used);
        done
    }

    /// Makes the stream wait for a point of any queue, if what it waits for is submitted. Streams share hardware queues and a stream
    /// in front blocks others, so a wait for work that is submitted later may never end.
    pub(super) fn wait_point(&mut self, point: &TimelinePoint) -> Result<Waited, DeviceError> {
        let events = point.completion_source::<EventTimeline>();
        // The stream is in order anyway.
        if events.is_some_and(|events| std::ptr::eq(events, &*self.events)) {
            return point.poll().map(|_| Waited::Done);
        }
        let reached = point.poll()?;
        // Polling a queue of another device made that device's context current.
        self.context.bind()?;
        if reached {
            return Ok(Waited::Done);
        }
        let Some(events) = events else { return Ok(Waited::NotSubmitted(point.clone())) };
        let submission = events.submission_of(point.seq());
        if !submission.poll()? {
            return Ok(Waited::NotSubmitted(submission));
        }
        self.events.record_wait(self.numbers.next(), point);
        let stream = self.stream()?;
        match events.with_event_from(point.seq(), |event| stream.wait_event(event)) {
            // The stream does not wait, so later work is held back until the point is reached.
            Err(DeviceError::Driver { .. }) => Ok(Waited::NotSubmitted(point.clone())),
            waits => waits.map(|()| Waited::Done),
        }
    }

    /// The point after the work of the stream, if it is not done. A held command that would wait for it is tried again then: the
    /// stream may wait for another device, and other queues' commands wait for this thread.
    fn unfinished_work(&mut self) -> Result<Option<TimelinePoint>, DeviceError> {
        if self.stream()?.is_idle()? {
            self.awaited = None;
            return Ok(None);
        }
        // The command is tried again and again, and submits nothing meanwhile: one event is enough.
        let seq = match self.awaited {
            Some(seq) => seq,
            None => self.record()?,
        };
        self.awaited = Some(seq);
        Ok(Some(TimelinePoint::new(&self.timeline, seq)))
    }

    /// Whether a held command would wait for earlier work of the stream.
    fn waits_for_stream(&self, command: &CudaCommand) -> bool {
        let context = &self.context;
        match command {
            CudaCommand::Run { .. } => !context.turns.is_alone(&self.budget),
            CudaCommand::Download(download) => {
                let bytes = download.ranges.last().map_or(0, |range| range.end);
                context.download_memory.acquire_share(&self.downloads, bytes).is_none()
            }
            CudaCommand::Upload { bytes, .. } => {
                let blocks = bytes.len().div_ceil(SEGMENT).max(1);
                let free: Vec<_> = (0..blocks).map_while(|_| self.try_upload_block(SEGMENT)).collect();
                free.len() < blocks
            }
            CudaCommand::Copy { .. } => self.try_upload_block(SEGMENT).is_none(),
            CudaCommand::Fill { .. } | CudaCommand::Wait(_) | CudaCommand::Mark(_) => false,
        }
    }

    /// Runs a held command.
    fn execute_command(
        &mut self,
        command: CudaCommand,
        turn: &Turn,
    ) -> Result<CommandOutcome<CudaCommand>, DeviceError> {
        if self.waits_for_stream(&command)
            && let Some(point) = self.unfinished_work()?
        {
            return Ok(CommandOutcome::AwaitPoint(point, command));
        }
        // The command adds work, after which the next one waits.
        self.awaited = None;
        match command {
            CudaCommand::Upload { dst, bytes, .. } => self.upload(&dst, UploadSource::Borrowed(&bytes))?,
            CudaCommand::Download(download) => self.download(download)?,
            CudaCommand::Fill { dst, value } => self.fill(&dst, value)?,
            CudaCommand::Copy { src, dst } => self.copy(&src, &dst)?,
            CudaCommand::Run { program, bindings, from } => {
                if let Some(from) = self.run(&program, &bindings, from, || turn.interrupts_command())? {
                    return Ok(CommandOutcome::TurnOver(CudaCommand::Run { program, bindings, from }));
                }
            }
            CudaCommand::Wait(point) => {
                if let Waited::NotSubmitted(until) = self.wait_point(&point)? {
                    return Ok(CommandOutcome::AwaitPoint(until, CudaCommand::Wait(point)));
                }
            }
            CudaCommand::Mark(point) => self.mark(point)?,
        }
        Ok(CommandOutcome::Done)
    }
}

impl Executor for CudaExecutor {
    type Command = CudaCommand;

    /// Runs a held command. Its failure fails the queue, since nobody is left to return it to.
    fn execute(&mut self, command: CudaCommand, turn: &Turn) -> CommandOutcome<CudaCommand> {
        self.submit(|executor| executor.execute_command(command, turn)).unwrap_or_else(|e| {
            // The timeline of an aborted queue fails once its work is done.
            if !self.events.is_aborted() {
                self.events.fail(&self.timeline, e);
            }
            CommandOutcome::Done
        })
    }
}

impl Drop for CudaExecutor {
    /// Does not block: the resources that the device still uses are kept until the submitted work is done.
    fn drop(&mut self) {
        // After a panic of a command. Otherwise the queue has failed the timeline, or does so once its work is done.
        if !self.events.is_aborted() {
            self.events.fail(&self.timeline, DeviceError::Ended);
        }
        self.events.forget_waits_until(u64::MAX);
        let Some(stream) = self.stream.take() else { return };
        let end = self.context.bind().and_then(|()| self.context.acquire_event());
        let end = end.and_then(|end| end.record(&stream).map(|()| end));
        // The events of the timeline show whether the GPU hangs.
        let _ = self.numbers.record(&self.events, &stream);
        let resources = (stream, self.segment.take(), self.scratch.take(), std::mem::take(&mut self.source_streams));
        match end {
            Ok(end) => DeferredDrop::new(&self.context, &self.events, end, Box::new(resources)).drop_when_complete(),
            // The driver has ended the work of a lost device.
            Err(_) if self.context.primary().lost().is_some() && !self.context.primary().is_hung() => {}
            // Nothing tells when the work is done that uses them.
            Err(_) => std::mem::forget((resources, Arc::clone(&self.events))),
        }
    }
}

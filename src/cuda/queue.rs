//! CUDA queue: submits work to one stream, in order, at once or from a thread of the device.
//!
//! A stream may wait only for work that is submitted: for a recorded event. So if a queue has to wait for anything else (a point of a
//! CPU queue, or of a CUDA queue that itself waits), the wait and all later commands are held back, in a [`CommandChannel`]. A thread
//! of the device submits them when the point is reached or submitted. While nothing is held back, the queue has the executor and
//! each call reaches the driver at once.
//!
//! Life cycle of a submission: check for an earlier failure, retain the operands until the event after the work is reached,
//! submit. Timeline points are CUDA events that are recorded on demand. Dropping a queue does not block (see `deferred_drop`).

use super::commands::{CudaCommand, Download, Downloaded};
use super::context::DeviceContext;
use super::copy::QUEUE_UPLOAD_BYTES;
use super::event_timeline::{EventTimeline, point_seq};
use super::events::Stream;
use super::executor::{CudaExecutor, Waited, memory};
use super::memory::DeviceMemory;
use super::program::CudaProgram;
use crate::device::{
    CommandChannel, CopyOutcome, DeviceError, MemoryBudget, PendingRead, Program, Queue, QueueAborter, Region,
    Timeline, TimelinePoint, UploadSource, check_copy,
};
use crate::tensor::TensorDesc;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How often a submitter that waits for held commands checks whether the queue has failed.
const FAILURE_CHECK_INTERVAL: Duration = Duration::from_millis(50);

pub(super) struct CudaQueue {
    context: Arc<DeviceContext>,
    budget: Arc<MemoryBudget>,
    events: Arc<EventTimeline>,
    timeline: Arc<Timeline>,
    channel: Arc<CommandChannel<CudaExecutor>>,
    /// `Some` while nothing is held back.
    executor: Option<Box<CudaExecutor>>,
    /// Number of points so far.
    points: u64,
    /// Whether a command was held back since the last point.
    held_since_point: bool,
}

impl CudaQueue {
    pub(super) fn new(context: &Arc<DeviceContext>, budget: &Arc<MemoryBudget>) -> Result<CudaQueue, DeviceError> {
        context.primary().check_lost()?;
        let stream = Arc::new(Stream::new(context.primary())?);
        let events = Arc::new(EventTimeline::new(context, &stream, budget)?);
        let source = Arc::clone(&events);
        let timeline = Timeline::with_source(source);
        context.add_queue(&timeline);
        let executor = CudaExecutor::new(context, budget, stream, &events, &timeline);
        // The order of sessions is that of their turns on the GPU (`turns`), so the channel takes turns of its own.
        let channel = CommandChannel::new(&context.queue_threads, &MemoryBudget::new(0));
        Ok(CudaQueue {
            context: Arc::clone(context),
            budget: Arc::clone(budget),
            events,
            timeline,
            channel,
            executor: Some(Box::new(executor)),
            points: 0,
            held_since_point: false,
        })
    }

    /// The executor, if all commands that were held back are submitted.
    fn executor_if_idle(&mut self) -> Option<&mut CudaExecutor> {
        if self.executor.is_none() {
            self.executor = self.channel.take_executor_if_idle();
        }
        self.executor.as_deref_mut()
    }

    /// The executor; blocks until all commands that were held back are submitted.
    fn wait_for_executor(&mut self) -> Result<&mut CudaExecutor, DeviceError> {
        if self.executor.is_none() {
            self.executor = loop {
                match self.channel.wait_idle(Instant::now() + FAILURE_CHECK_INTERVAL) {
                    Ok(executor) => break Some(executor),
                    // A CPU may work on what the commands wait for for any time. A failure or an abort ends the wait.
                    Err(e) => match (self.check_failure(), e) {
                        (Ok(()), DeviceError::Deadline(_)) => {}
                        (failed, e) => return Err(failed.err().unwrap_or(e)),
                    },
                }
            };
        }
        self.executor.as_deref_mut().ok_or(DeviceError::Ended)
    }

    /// Holds a command back, after a wait.
    fn hold(&mut self, command: CudaCommand) -> Result<(), DeviceError> {
        self.check_failure()?;
        self.held_since_point |= self.executor.as_ref().is_none_or(|executor| executor.dirty);
        let sent = self.channel.send(command, &mut self.executor);
        sent.map_err(|e| self.check_failure().err().unwrap_or(e))?;
        self.held_since_point = true;
        Ok(())
    }

    /// Fails if the queue has failed or was aborted.
    fn check_failure(&self) -> Result<(), DeviceError> {
        match &self.executor {
            Some(executor) => executor.check_failure(),
            None => self.timeline.failure().map_or_else(|| self.events.check(), Err),
        }
    }

    /// The memory behind a region; fails unless it belongs to this queue's device.
    fn own_memory<'a>(&self, region: &'a Region) -> Result<&'a DeviceMemory, DeviceError> {
        let memory = memory(region)?;
        let same = memory.context().gpu.ordinal == self.context.gpu.ordinal;
        if same { Ok(memory) } else { Err(DeviceError::Misuse("a region of another device")) }
    }

    /// Makes later work wait for a point, at once or when it may.
    fn wait_or_hold(&mut self, point: &TimelinePoint) -> Result<(), DeviceError> {
        if let Some(executor) = self.executor_if_idle() {
            match executor.submit(|executor| executor.wait_point(point))? {
                Waited::Done => return Ok(()),
                Waited::NotSubmitted(_) => {}
            }
        }
        self.hold(CudaCommand::Wait(point.clone()))
    }
}

impl Queue for CudaQueue {
    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: UploadSource<'_>) -> Result<(), DeviceError> {
        self.own_memory(&dst)?;
        tensor.into_iter().for_each(|tensor| self.context.precompiler.add_type(&self.context, tensor.dtype()));
        src.check_size(dst.bytes())?;
        if let Some(executor) = self.executor_if_idle() {
            return executor.submit(|executor| executor.upload(&dst, src));
        }
        self.check_failure()?;
        // The bytes of a held upload are copied. Large ones wait for the held commands instead.
        let reservation = self.budget.reserve(dst.bytes());
        let (Ok(_reservation), true) = (reservation, dst.bytes() <= QUEUE_UPLOAD_BYTES) else {
            return self.wait_for_executor()?.submit(|executor| executor.upload(&dst, src));
        };
        let bytes = src.into_bytes(dst.bytes())?;
        self.hold(CudaCommand::Upload { dst, bytes, _reservation })
    }

    fn download(&mut self, src: Region) -> Result<PendingRead, DeviceError> {
        self.download_all(&[src])?.pop().ok_or(DeviceError::Ended)
    }

    /// Downloads all regions into one pinned block, with one event after all copies.
    fn download_all(&mut self, srcs: &[Region]) -> Result<Vec<PendingRead>, DeviceError> {
        let beyond = DeviceError::Misuse("a download beyond the address space");
        let (mut ranges, mut end) = (Vec::with_capacity(srcs.len()), 0usize);
        for src in srcs {
            self.own_memory(src)?;
            let bytes = usize::try_from(src.bytes()).ok();
            let range = end..bytes.and_then(|bytes| end.checked_add(bytes)).ok_or_else(|| beyond.clone())?;
            end = range.end;
            ranges.push(range);
        }
        self.executor_if_idle();
        self.check_failure()?;
        if end == 0 {
            return Ok(ranges.iter().map(|_| PendingRead::ready(Vec::new())).collect());
        }
        self.points += 1;
        let (result, point) = (Arc::new(OnceLock::new()), self.points);
        let download = Download { srcs: srcs.to_vec(), ranges: ranges.clone(), result: Arc::clone(&result), point };
        match self.executor_if_idle() {
            Some(executor) => executor.submit(|executor| executor.download(download))?,
            None => {
                self.hold(CudaCommand::Download(download))?;
                self.held_since_point = false;
            }
        }
        let point = TimelinePoint::new(&self.timeline, point_seq(point));
        let pending_read = |(index, range): (usize, Range<usize>)| {
            let (point, result) = (point.clone(), Arc::clone(&result));
            PendingRead::at(point, move || {
                let bytes = match result.get() {
                    Some(Downloaded::Block(block)) => block.block.slice(range.end).and_then(|block| block.get(range)),
                    Some(Downloaded::Bytes(all)) => all.get(index).map(Vec::as_slice),
                    None => None,
                };
                bytes.map(<[u8]>::to_vec).ok_or(DeviceError::Misuse("a download beyond its block"))
            })
        };
        Ok(ranges.into_iter().enumerate().map(pending_read).collect())
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        self.own_memory(&dst)?;
        match self.executor_if_idle() {
            Some(executor) => executor.submit(|executor| executor.fill(&dst, value)),
            None => self.hold(CudaCommand::Fill { dst, value }),
        }
    }

    fn copy_from(
        &mut self,
        src: Region,
        dst: Region,
        after: Option<&TimelinePoint>,
    ) -> Result<CopyOutcome, DeviceError> {
        self.own_memory(&dst)?;
        check_copy(&src, &dst)?;
        if memory(&src).is_err() {
            return Ok(CopyOutcome::Unreachable);
        }
        if let Some(point) = after {
            self.wait_or_hold(point)?;
        }
        match self.executor_if_idle() {
            Some(executor) => executor.submit(|executor| executor.copy(&src, &dst))?,
            None => self.hold(CudaCommand::Copy { src, dst })?,
        }
        Ok(CopyOutcome::Submitted)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        let compiled = program.compiled::<CudaProgram>().filter(|compiled| compiled.is_for_device(&self.context));
        let compiled = compiled.ok_or(DeviceError::Misuse("a program of another device"))?;
        program.check_bindings(bindings)?;
        compiled.check_bindings(&self.context, bindings)?;
        match self.executor_if_idle() {
            Some(executor) => executor.submit(|executor| executor.run(program, bindings, 0, || false)).map(|_| ()),
            None => self.hold(CudaCommand::Run { program: program.clone(), bindings: Arc::clone(bindings), from: 0 }),
        }
    }

    fn mark(&mut self) -> TimelinePoint {
        self.executor_if_idle();
        // A failed queue records no event, and a queue without new work needs no new event.
        if self.check_failure().is_ok() && self.executor.as_ref().map_or(self.held_since_point, |x| x.dirty) {
            self.points += 1;
            let point = self.points;
            let marked = match self.executor_if_idle() {
                Some(executor) => executor.submit(|executor| executor.mark(point)),
                None => self.hold(CudaCommand::Mark(point)),
            };
            if let (Err(e), Ok(())) = (marked, self.check_failure()) {
                // No event was recorded. The queue is well, so its timeline must not fail: only this point does.
                let failed = Timeline::new();
                failed.fail(e);
                return TimelinePoint::new(&failed, 1);
            }
            self.held_since_point = false;
        }
        let count = if self.check_failure().is_err() { self.points + 1 } else { self.points };
        TimelinePoint::new(&self.timeline, point_seq(count))
    }

    fn wait(&mut self, point: &TimelinePoint) -> Result<(), DeviceError> {
        let waited = self.wait_or_hold(point);
        // The timeline of an aborted queue fails once its work is done.
        waited.inspect_err(|e| {
            if !self.events.is_aborted() {
                self.events.fail(&self.timeline, e.clone());
            }
        })
    }

    /// Work that the stream has got already runs to its end; then the timeline fails. Everything else ends at once: the
    /// submission of a program at its next launch, the commands that were held back, and the waits of the host.
    fn aborter(&mut self) -> Option<QueueAborter> {
        let (events, channel) = (Arc::downgrade(&self.events), Arc::downgrade(&self.channel));
        Some(QueueAborter::new(move || {
            if let Some(events) = events.upgrade() {
                events.abort();
            }
            if let Some(channel) = channel.upgrade() {
                channel.close();
            }
        }))
    }
}

impl Drop for CudaQueue {
    /// Does not block: dropping the executor keeps what the device still uses. If a thread has it, that happens after the command
    /// that it runs, which the abort ends.
    fn drop(&mut self) {
        self.events.fail(&self.timeline, DeviceError::Ended);
        self.events.abort();
        self.channel.close();
    }
}

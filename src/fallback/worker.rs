//! The worker: runs the commands of a fallback queue on the queue's thread, and copies bytes between the two devices.
//!
//! The worker blocks for downloads, and at each mark until the primary is done, so that the mark's point is reached as soon as
//! its work is done and not later. During such a wait the queues of both devices are in [`ParkedQueues`]. Dropping the fallback
//! queue takes them from there and drops them, which ends the wait.

use super::partition::{CopyRange, PartitionedGraph, SecondarySegment, Segment};
use super::{Fallback, Side};
use crate::device::{
    Buffer, Command, CommandOutcome, CopyOutcome, DEVICE_TIMEOUT, DeviceError, Executor, Lane, MemoryBudget,
    PendingRead, PendingReadSender, Program, Queue, QueueAborter, Region, Timeline, TimelinePoint, Turn, UploadSource,
};
use crate::poison::lock;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long the secondary device may run a program inline on this thread. During that time, dropping the fallback queue cannot
/// stop the program.
const INLINE_BUDGET: Duration = Duration::from_millis(2);

/// Chunk size of copies between the devices, in bytes.
const COPY_CHUNK_BYTES: u64 = 1 << 20;

/// Limit on chunks in flight between the devices. Bounds the host memory in use to 8 MiB.
const MAX_CHUNKS_IN_FLIGHT: usize = 8;

/// A command of the fallback queue that waits for the worker.
pub(super) enum FallbackCommand {
    Upload { dst: Region, bytes: Vec<u8> },
    Download { src: Region, sender: PendingReadSender },
    Fill { dst: Region, value: u8 },
    Copy { src: Region, dst: Region, after: Option<TimelinePoint> },
    Run { program: Program, bindings: Arc<[Region]> },
    Wait(TimelinePoint),
    Mark(u64),
}

impl Command for FallbackCommand {
    fn staged_bytes(&self) -> usize {
        if let FallbackCommand::Upload { bytes, .. } = self { bytes.len() } else { 0 }
    }

    /// The worker blocks for the devices.
    fn lane(&self) -> Lane {
        Lane::Long
    }
}

/// The queues of the two devices. The secondary device's queue is opened when it is first needed.
pub(super) struct DeviceQueues {
    pub(super) primary: Box<dyn Queue>,
    secondary: Option<Box<dyn Queue>>,
}

/// Holds the queues of both devices while the worker waits for one of them, so that [`ParkedQueues::close`] can drop them from
/// another thread.
#[derive(Default)]
pub(super) struct ParkedQueues(Mutex<ParkedState>);

#[derive(Default)]
struct ParkedState {
    queues: Option<DeviceQueues>,
    /// The fallback queue was dropped or aborted: the worker's later waits fail.
    closed: bool,
    /// End the queues of the devices, and the channel of the thread.
    aborters: Vec<QueueAborter>,
}

impl ParkedQueues {
    /// Drops the parked queues, and makes the worker's later waits fail.
    pub(super) fn close(&self) {
        let mut parked = lock(&self.0);
        parked.closed = true;
        let queues = parked.queues.take();
        drop(parked);
        drop(queues);
    }

    /// Whether the fallback queue was dropped or aborted.
    pub(super) fn is_closed(&self) -> bool {
        lock(&self.0).closed
    }

    /// Registers what an abort of the fallback queue ends. Ends it at once if the queue was dropped or aborted.
    pub(super) fn add_aborter(&self, aborter: QueueAborter) {
        let mut parked = lock(&self.0);
        if parked.closed {
            drop(parked);
            aborter.abort();
        } else {
            parked.aborters.push(aborter);
        }
    }

    /// Aborts the queues of both devices, wherever they are, and makes the worker's later waits fail.
    pub(super) fn abort(&self) {
        let mut parked = lock(&self.0);
        parked.closed = true;
        let aborters = std::mem::take(&mut parked.aborters);
        drop(parked);
        aborters.iter().for_each(QueueAborter::abort);
    }
}

/// Runs commands on the queue's thread. Its drop fails the timeline, also after a panic, so that waiters for its points return.
pub(super) struct Worker {
    device: Arc<Fallback>,
    budget: Arc<MemoryBudget>,
    /// `None` after the fallback queue was dropped during a wait.
    queues: Option<DeviceQueues>,
    pub(super) parked: Arc<ParkedQueues>,
    pub(super) timeline: Arc<Timeline>,
    /// Scratch memory on the secondary device, for the operands of its segments.
    scratch: Option<Buffer>,
}

impl Executor for Worker {
    type Command = FallbackCommand;

    /// Runs a command. After a failure, commands are dropped, and downloads fail with that failure.
    fn execute(&mut self, command: FallbackCommand, _: &Turn) -> CommandOutcome<FallbackCommand> {
        let done = match (self.timeline.failure(), command) {
            (Some(failure), FallbackCommand::Download { sender, .. }) => {
                sender.send(Err(failure));
                Ok(())
            }
            (Some(_), _) => Ok(()),
            (None, FallbackCommand::Download { src, sender }) => {
                let bytes = self.submit(Side::Primary, |queue| queue.download(src));
                let bytes = bytes.and_then(|read| self.wait(Side::Primary, |deadline| read.wait(deadline)));
                let done = bytes.as_ref().map(drop).map_err(Clone::clone);
                sender.send(bytes);
                done
            }
            (None, command) => self.run_command(command),
        };
        if let Err(error) = done {
            self.timeline.fail(error);
        }
        CommandOutcome::Done
    }
}

impl Worker {
    pub(super) fn new(device: Arc<Fallback>, budget: &Arc<MemoryBudget>) -> Result<Worker, DeviceError> {
        let queues = DeviceQueues { primary: device.primary.queue(budget)?, secondary: None };
        let budget = Arc::clone(budget);
        let (parked, timeline) = (Arc::default(), Timeline::new());
        Ok(Worker { device, budget, queues: Some(queues), parked, timeline, scratch: None })
    }

    pub(super) fn primary(&mut self) -> Result<&mut dyn Queue, DeviceError> {
        Ok(&mut *self.queues.as_mut().ok_or(DeviceError::Ended)?.primary)
    }

    fn run_command(&mut self, command: FallbackCommand) -> Result<(), DeviceError> {
        match command {
            FallbackCommand::Upload { dst, bytes } => {
                self.submit_primary(|queue| queue.upload(dst, None, UploadSource::Borrowed(&bytes)))
            }
            FallbackCommand::Fill { dst, value } => self.submit_primary(|queue| queue.fill(dst, value)),
            FallbackCommand::Copy { src, dst, after } => {
                self.submit_primary(|queue| match queue.copy_from(src, dst, after.as_ref())? {
                    CopyOutcome::Submitted => Ok(()),
                    CopyOutcome::Unreachable => {
                        Err(DeviceError::Bug("the device refuses a copy that it accepted before".to_owned()))
                    }
                })
            }
            FallbackCommand::Run { program, bindings } => match program.compiled::<PartitionedGraph>() {
                Some(partitioned) => self.run_partitioned(partitioned, &bindings),
                None => self.submit_primary(|queue| queue.run(&program, &bindings)),
            },
            FallbackCommand::Wait(point) => self.submit_primary(|queue| queue.wait(&point)),
            FallbackCommand::Mark(seq) => {
                self.wait_primary_done()?;
                self.timeline.advance(seq);
                Ok(())
            }
            FallbackCommand::Download { .. } => Ok(()), // handled in `execute`
        }
    }

    fn run_partitioned(&mut self, partitioned: &PartitionedGraph, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        for segment in &partitioned.segments {
            match segment {
                Segment::Primary { program, slots: None } => {
                    self.submit_primary(|queue| queue.run(program, bindings))?
                }
                Segment::Primary { program, slots: Some(slots) } => {
                    let bound = slots.iter().filter_map(|&slot| bindings.get(slot as usize).cloned()).collect();
                    self.submit_primary(|queue| queue.run(program, &bound))?;
                }
                Segment::Secondary(segment) => self.run_secondary(segment, bindings)?,
            }
        }
        Ok(())
    }

    fn run_secondary(&mut self, segment: &SecondarySegment, bindings: &[Region]) -> Result<(), DeviceError> {
        let scratch = self.scratch_region(segment.bytes)?;
        for padding in &segment.padding {
            let region = scratch.subregion(padding.start, padding.end - padding.start)?;
            self.submit(Side::Secondary, |queue| queue.fill(region, 0))?;
        }
        self.copy_ranges(&segment.reads, Side::Primary, bindings, &scratch)?;
        let bound = Arc::from([scratch.clone()]);
        self.submit(Side::Secondary, |queue| queue.run_inline(&segment.program, &bound, INLINE_BUDGET))?;
        self.copy_ranges(&segment.writes, Side::Secondary, bindings, &scratch)?;
        self.device.count_secondary_nodes(&segment.ops);
        Ok(())
    }

    /// The first `bytes` bytes of the scratch memory, which is replaced by a larger buffer if needed.
    fn scratch_region(&mut self, bytes: u64) -> Result<Region, DeviceError> {
        if let Some(buffer) = self.scratch.as_ref().filter(|buffer| buffer.bytes() >= bytes) {
            return buffer.region(0, bytes);
        }
        // The old buffer is freed first, so that the budget need not have room for both.
        self.scratch = None;
        let secondary = &self.device.secondary;
        let buffer = secondary.alloc(bytes, &self.budget).map_err(|e| e.on_device(&secondary.info().name))?;
        self.scratch.insert(buffer).region(0, bytes)
    }

    /// Copies bytes from one device to the other through the host, in chunks: downloads run ahead of uploads.
    fn copy_ranges(
        &mut self,
        ranges: &[CopyRange],
        from: Side,
        bindings: &[Region],
        scratch: &Region,
    ) -> Result<(), DeviceError> {
        let mut in_flight = VecDeque::with_capacity(MAX_CHUNKS_IN_FLIGHT);
        for &CopyRange { slot, slot_offset, scratch_offset, bytes } in ranges {
            let bound = bindings.get(slot as usize).ok_or(DeviceError::Misuse("a slot without a binding"))?;
            for start in (0..bytes).step_by(COPY_CHUNK_BYTES as usize) {
                let length = COPY_CHUNK_BYTES.min(bytes - start);
                let (on_primary, in_scratch) =
                    (bound.subregion(slot_offset + start, length)?, scratch.subregion(scratch_offset + start, length)?);
                let (src, dst) =
                    if from == Side::Primary { (on_primary, in_scratch) } else { (in_scratch, on_primary) };
                if in_flight.len() >= MAX_CHUNKS_IN_FLIGHT {
                    self.finish_oldest_chunk(&mut in_flight, from.other())?;
                }
                in_flight.push_back((self.submit(from, |queue| queue.download(src))?, dst));
            }
        }
        while !in_flight.is_empty() {
            self.finish_oldest_chunk(&mut in_flight, from.other())?;
        }
        Ok(())
    }

    /// Waits for the oldest download in flight and uploads its bytes to the other device.
    fn finish_oldest_chunk(
        &mut self,
        in_flight: &mut VecDeque<(PendingRead, Region)>,
        to: Side,
    ) -> Result<(), DeviceError> {
        let Some((read, dst)) = in_flight.pop_front() else { return Ok(()) };
        let bytes = self.wait(to.other(), |deadline| read.wait(deadline))?;
        self.submit(to, |queue| queue.upload(dst, None, UploadSource::Borrowed(&bytes)))
    }

    /// Waits until the primary has done all work submitted to it.
    fn wait_primary_done(&mut self) -> Result<(), DeviceError> {
        let point = self.primary()?.mark();
        self.wait(Side::Primary, |deadline| point.wait(deadline))
    }

    fn submit_primary(
        &mut self,
        work: impl FnOnce(&mut dyn Queue) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        self.submit(Side::Primary, work)
    }

    /// Submits work to one of the queues. Adds the device's name to an error.
    fn submit<T>(
        &mut self,
        side: Side,
        work: impl FnOnce(&mut dyn Queue) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let Worker { device, budget, queues, parked, .. } = self;
        let DeviceQueues { primary, secondary } = queues.as_mut().ok_or(DeviceError::Ended)?;
        let done = match (side, secondary) {
            (Side::Primary, _) => work(&mut **primary),
            (Side::Secondary, Some(queue)) => work(&mut **queue),
            (Side::Secondary, unopened) => device.secondary.queue(budget).and_then(|queue| {
                let queue = unopened.insert(queue);
                if let Some(aborter) = queue.aborter() {
                    parked.add_aborter(aborter);
                }
                work(&mut **queue)
            }),
        };
        done.map_err(|e| self.with_device_name(side, e))
    }

    /// Calls `wait`, which blocks until the deadline that it is passed, with the queues parked. Adds the device's name to an
    /// error.
    fn wait<T>(
        &mut self,
        side: Side,
        wait: impl FnOnce(Option<Instant>) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let mut parked = lock(&self.parked.0);
        if parked.closed {
            return Err(DeviceError::Ended);
        }
        parked.queues = self.queues.take();
        drop(parked);
        let done = wait(Some(Instant::now() + DEVICE_TIMEOUT));
        self.queues = lock(&self.parked.0).queues.take();
        done.map_err(|e| self.with_device_name(side, e))
    }

    fn with_device_name(&self, side: Side, error: DeviceError) -> DeviceError {
        let device = if side == Side::Primary { &self.device.primary } else { &self.device.secondary };
        error.on_device(&device.info().name)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.timeline.fail(DeviceError::Ended);
    }
}

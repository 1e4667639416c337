//! The queue of a fallback device: forwards to the primary's queue, except while programs that fall back are pending.
//!
//! The [`Worker`] owns the primary's queue, so only the side that holds the worker may submit to the primary. While no command
//! is pending, the submitter holds the worker, or takes it back from the channel before it submits. A program that falls back
//! is sent together with the worker to the queue's thread, which the first such program starts. All later commands are sent
//! there too, until the thread returns the worker.

use super::Fallback;
use super::partition::PartitionedGraph;
use super::worker::{FallbackCommand, ParkedQueues, Worker};
use crate::device::{
    Collectives, CommandChannel, CopyOutcome, DEVICE_TIMEOUT, DeviceError, LoadByDigest, LoadOutcome, Membership,
    MemoryBudget, PendingRead, Prefault, Program, Queue, QueueAborter, Region, TRANSFER_CHUNK_BYTES, TensorDigest,
    Timeline, TimelinePoint, UploadSource, check_copy,
};
use crate::poison::lock;
use crate::tensor::{ByteRuns, TensorDesc};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) struct FallbackQueue {
    device: Arc<Fallback>,
    /// `Some` while the submitter holds the worker. [`FallbackQueue::primary_if_idle`] takes it back from the thread.
    worker: Option<Box<Worker>>,
    /// Channel to the thread; `None` before the first program that falls back.
    thread: Option<Arc<CommandChannel<Worker>>>,
    parked: Arc<ParkedQueues>,
    /// Timeline of the commands that are sent to the thread.
    timeline: Arc<Timeline>,
    last_mark: u64,
    /// Whether a command was sent to the thread since the last mark.
    sent_since_mark: bool,
    /// Capabilities of the primary's queue, read once, because the thread may hold that queue later.
    capabilities: PrimaryCapabilities,
}

/// The optional capabilities of the primary's queue.
#[derive(Clone, Copy)]
struct PrimaryCapabilities {
    prefault: bool,
    load_by_digest: bool,
    collectives: bool,
    aborter: bool,
}

impl PrimaryCapabilities {
    fn of(queue: &mut dyn Queue) -> PrimaryCapabilities {
        PrimaryCapabilities {
            prefault: queue.prefault().is_some(),
            load_by_digest: queue.load_by_digest().is_some(),
            collectives: queue.collectives().is_some(),
            aborter: queue.aborter().is_some(),
        }
    }
}

impl FallbackQueue {
    pub(super) fn new(device: Arc<Fallback>, budget: &Arc<MemoryBudget>) -> Result<FallbackQueue, DeviceError> {
        let mut worker = Worker::new(Arc::clone(&device), budget)?;
        let capabilities = PrimaryCapabilities::of(worker.primary()?);
        let (parked, timeline) = (Arc::clone(&worker.parked), Arc::clone(&worker.timeline));
        if let Some(aborter) = worker.primary()?.aborter() {
            parked.add_aborter(aborter);
        }
        let worker = Some(Box::new(worker));
        Ok(FallbackQueue {
            device,
            worker,
            thread: None,
            parked,
            timeline,
            last_mark: 0,
            sent_since_mark: false,
            capabilities,
        })
    }

    /// The primary's queue, if all commands sent to the thread are done.
    ///
    /// # Errors
    /// The failure of a command on the thread, which sticks to the queue.
    fn primary_if_idle(&mut self) -> Result<Option<&mut dyn Queue>, DeviceError> {
        if let Some(thread) = &self.thread {
            if let Some(failure) = self.timeline.failure() {
                return Err(failure);
            }
            if self.worker.is_none() {
                self.worker = thread.take_executor_if_idle();
            }
            // An abort drops the pending marks. If the thread does not have the worker, nothing else fails their points.
            if self.worker.is_some() && self.parked.is_closed() {
                self.timeline.fail(DeviceError::Ended);
                return Err(DeviceError::Ended);
            }
        }
        self.worker.as_mut().map(|worker| worker.primary()).transpose()
    }

    /// The primary's queue; blocks until all commands sent to the thread are done.
    fn wait_for_primary(&mut self) -> Result<&mut dyn Queue, DeviceError> {
        if self.worker.is_none() {
            let thread = self.thread.as_ref().ok_or(DeviceError::Ended)?;
            self.worker = Some(thread.wait_idle(Instant::now() + DEVICE_TIMEOUT)?);
        }
        // Checks for a failure of the commands that were awaited.
        self.primary_if_idle()?.ok_or(DeviceError::Ended)
    }

    fn send_to_thread(&mut self, command: FallbackCommand) -> Result<(), DeviceError> {
        let thread = match &mut self.thread {
            Some(thread) => thread,
            unset => {
                let thread = unset.insert(CommandChannel::with_own_thread("fallback-queue")?);
                let channel = Arc::downgrade(thread);
                self.parked.add_aborter(QueueAborter::new(move || {
                    if let Some(channel) = channel.upgrade() {
                        channel.close();
                    }
                }));
                thread
            }
        };
        thread.send(command, &mut self.worker)?;
        self.sent_since_mark = true;
        Ok(())
    }

    /// Checks that a region is the primary's. Commands for the thread are validated at submission, so that misuse is returned
    /// to the submitter and does not stick to the queue.
    fn check_own(&self, region: &Region) -> Result<(), DeviceError> {
        region.check_device(self.device.primary.info().id)
    }

    fn send_program(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        program.check_bindings(bindings)?;
        bindings.iter().try_for_each(|region| self.check_own(region))?;
        self.send_to_thread(FallbackCommand::Run { program: program.clone(), bindings: Arc::clone(bindings) })
    }

    /// Whether a program has segments for the secondary device, so that it runs on the thread.
    fn falls_back(&self, program: &Program) -> Result<bool, DeviceError> {
        match program.compiled::<PartitionedGraph>() {
            Some(program) if program.is_made_for(&self.device) => Ok(true),
            Some(_) => Err(DeviceError::Misuse("a program of another device")),
            None => Ok(false),
        }
    }
}

// Without the adaptor of `ForwardQueue`, which would be one more call on the path of each graph. Its rule holds here too: no
// method may fall back to the default of the contract.
#[deny(clippy::missing_trait_methods)]
impl Queue for FallbackQueue {
    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: UploadSource<'_>) -> Result<(), DeviceError> {
        if let Some(primary) = self.primary_if_idle()? {
            return primary.upload(dst, tensor, src);
        }
        self.check_own(&dst)?;
        src.check_size(dst.bytes())?;
        if dst.bytes() > TRANSFER_CHUNK_BYTES {
            return self.wait_for_primary()?.upload(dst, tensor, src);
        }
        let bytes = src.into_bytes(dst.bytes())?;
        self.send_to_thread(FallbackCommand::Upload { dst, bytes })
    }

    fn download(&mut self, src: Region) -> Result<PendingRead, DeviceError> {
        if let Some(primary) = self.primary_if_idle()? {
            return primary.download(src);
        }
        self.check_own(&src)?;
        let (sender, read) = PendingRead::new();
        self.send_to_thread(FallbackCommand::Download { src, sender })?;
        Ok(read)
    }

    fn download_all(&mut self, srcs: &[Region]) -> Result<Vec<PendingRead>, DeviceError> {
        if let Some(primary) = self.primary_if_idle()? {
            return primary.download_all(srcs);
        }
        srcs.iter().map(|src| self.download(src.clone())).collect()
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        if let Some(primary) = self.primary_if_idle()? {
            return primary.fill(dst, value);
        }
        self.check_own(&dst)?;
        self.send_to_thread(FallbackCommand::Fill { dst, value })
    }

    fn copy_from(
        &mut self,
        src: Region,
        dst: Region,
        after: Option<&TimelinePoint>,
    ) -> Result<CopyOutcome, DeviceError> {
        let is_foreign = self.check_own(&src).is_err();
        let cached = lock(&self.device.copy_support).get(&src.buffer().device()).copied();
        if let Some(primary) = self.primary_if_idle()? {
            let uncached = (is_foreign && cached.is_none()).then(|| src.buffer().device());
            let outcome = primary.copy_from(src, dst, after)?;
            lock(&self.device.copy_support).extend(uncached.map(|device| (device, outcome.is_submitted())));
            return Ok(outcome);
        }
        self.check_own(&dst)?;
        check_copy(&src, &dst)?;
        // The outcome must be returned now, but the thread holds the primary's queue: rely on the cached result.
        if is_foreign && cached != Some(true) {
            return Ok(CopyOutcome::Unreachable);
        }
        self.send_to_thread(FallbackCommand::Copy { src, dst, after: after.cloned() })?;
        Ok(CopyOutcome::Submitted)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        let falls_back = self.falls_back(program)?;
        match self.primary_if_idle()? {
            Some(primary) if !falls_back => primary.run(program, bindings),
            _ => self.send_program(program, bindings),
        }
    }

    fn run_inline(&mut self, program: &Program, bindings: &Arc<[Region]>, budget: Duration) -> Result<(), DeviceError> {
        let falls_back = self.falls_back(program)?;
        match self.primary_if_idle()? {
            Some(primary) if !falls_back => primary.run_inline(program, bindings, budget),
            _ => self.send_program(program, bindings),
        }
    }

    fn mark(&mut self) -> TimelinePoint {
        let dirty = self.sent_since_mark;
        match self.primary_if_idle() {
            Ok(Some(primary)) => return primary.mark(),
            Ok(None) if dirty => {
                self.last_mark += 1;
                // Fails only if the thread has ended. Then the timeline has failed too, and with it the point.
                let _ = self.send_to_thread(FallbackCommand::Mark(self.last_mark));
                self.sent_since_mark = false;
            }
            Ok(None) => {}
            // A point that fails with the timeline.
            Err(_) => return TimelinePoint::new(&self.timeline, self.last_mark + 1),
        }
        TimelinePoint::new(&self.timeline, self.last_mark)
    }

    fn wait(&mut self, point: &TimelinePoint) -> Result<(), DeviceError> {
        if let Some(primary) = self.primary_if_idle()? {
            return primary.wait(point);
        }
        self.send_to_thread(FallbackCommand::Wait(point.clone()))
    }

    fn prefault(&mut self) -> Option<&mut dyn Prefault> {
        if self.capabilities.prefault { Some(self) } else { None }
    }

    fn load_by_digest(&mut self) -> Option<&mut dyn LoadByDigest> {
        if self.capabilities.load_by_digest { Some(self) } else { None }
    }

    fn collectives(&mut self) -> Option<&mut dyn Collectives> {
        if self.capabilities.collectives { Some(self) } else { None }
    }

    /// Aborts the queues of both devices and closes the thread's channel. The thread drops the worker, which fails the
    /// timeline, once its wait for a device has ended.
    fn aborter(&mut self) -> Option<QueueAborter> {
        let parked = Arc::clone(&self.parked);
        self.capabilities.aborter.then(|| QueueAborter::new(move || parked.abort()))
    }
}

impl Prefault for FallbackQueue {
    /// Drops the hint while the thread holds the primary's queue, because a hint must not block.
    fn prefault(&mut self, region: &Region) {
        if let Ok(Some(primary)) = self.primary_if_idle()
            && let Some(prefault) = primary.prefault()
        {
            prefault.prefault(region);
        }
    }
}

impl LoadByDigest for FallbackQueue {
    fn load_by_digest(
        &mut self,
        dst: Region,
        tensor: Option<&TensorDesc>,
        wanted: TensorDigest<'_>,
        runs: ByteRuns,
    ) -> Result<PendingRead<LoadOutcome>, DeviceError> {
        match self.wait_for_primary()?.load_by_digest() {
            Some(disk) => disk.load_by_digest(dst, tensor, wanted, runs),
            None => Ok(PendingRead::ready(LoadOutcome::Missing)),
        }
    }
}

impl Collectives for FallbackQueue {
    /// Waits until the thread returns the primary's queue. Collectives never run on the secondary device.
    fn join(&mut self, group: u32, member: Membership) -> Result<(), DeviceError> {
        let missing = DeviceError::Misuse("the primary device runs no collectives");
        self.wait_for_primary()?.collectives().ok_or(missing)?.join(group, member)
    }
}

impl Drop for FallbackQueue {
    fn drop(&mut self) {
        let Some(thread) = &self.thread else { return };
        self.timeline.fail(DeviceError::Ended);
        thread.close();
        if self.worker.is_none() {
            // The thread may be blocked in a call of a device's queue, for example for what that queue holds back.
            self.parked.abort();
        }
        // Drops the devices' queues if the thread waits for them: the devices stop their work, which ends the wait.
        self.parked.close();
    }
}

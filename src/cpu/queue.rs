//! The CPU's command queue: commands run in order, on the device's threads for queues or inline on the submitting thread.
//!
//! The queue's [`CpuExecutor`] runs the commands. While no command is pending, the submitting thread has the executor: it runs
//! small commands inline, and programs within the budget of `run_inline`. Any other command is sent to the device's threads
//! together with the executor; they return the executor when no command is pending. So a token of a decoding client (small
//! uploads, a short program, a small download) needs no thread switch.

use super::CpuDevice;
use super::executor::{CpuCommand, CpuExecutor, RunOutcome, cpu_program};
use super::joined_groups::NOT_JOINED;
use super::layout::{CpuMemory, Locking, PieceSource};
use super::program::{CpuProgram, RunLimits, RunPosition};
use crate::device::{
    Collectives, CommandChannel, CopyOutcome, DEVICE_TIMEOUT, Device, DeviceError, Lane, Membership, MemoryBudget,
    PendingRead, Prefault, Program, Queue, QueueAborter, Region, TRANSFER_CHUNK_BYTES, Timeline, TimelinePoint, Turn,
    UploadSource, check_copy,
};
use crate::tensor::TensorDesc;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Largest transfer in bytes that runs inline on the submitting thread. A larger upload waits for earlier commands and is then
/// written in place; a smaller one is copied into its command.
pub(super) const MAX_INLINE_BYTES: usize = TRANSFER_CHUNK_BYTES as usize;

/// Largest transfer in bytes that needs no turn inline: it takes a microsecond, less than the client's request.
const MAX_FREE_BYTES: u64 = 16 << 10;

/// Limit of the group numbers that a queue has joined, including the numbers of failed groups.
const MAX_JOINED_GROUPS: usize = 64;

/// A command queue of the CPU device.
pub(super) struct CpuQueue {
    device: Arc<CpuDevice>,
    budget: Arc<MemoryBudget>,
    channel: Arc<CommandChannel<CpuExecutor>>,
    /// The executor while no command is pending; `None` until the threads have returned it: see [`CpuQueue::idle_executor`].
    executor: Option<Box<CpuExecutor>>,
    timeline: Arc<Timeline>,
    abort: Arc<AtomicBool>,
    /// Staging buffer of a small upload, at most [`MAX_INLINE_BYTES`].
    staging: Vec<u8>,
    last_mark: u64,
    /// Whether a command was sent to the threads since the last mark.
    sent_since_mark: bool,
    /// The numbers of the groups that the queue has joined.
    joined: BTreeSet<u32>,
}

impl CpuQueue {
    pub(super) fn new(device: Arc<CpuDevice>, budget: Arc<MemoryBudget>) -> CpuQueue {
        let channel = CommandChannel::new(&device.queue_threads, &budget);
        let (timeline, abort) = (Timeline::new(), Arc::new(AtomicBool::new(false)));
        let executor =
            CpuExecutor::new(Arc::clone(&device), Arc::clone(&budget), Arc::clone(&timeline), Arc::clone(&abort));
        CpuQueue {
            device,
            budget,
            channel,
            executor: Some(Box::new(executor)),
            timeline,
            abort,
            staging: Vec::new(),
            last_mark: 0,
            sent_since_mark: false,
            joined: BTreeSet::new(),
        }
    }

    /// The executor, if all submitted commands have completed.
    ///
    /// # Errors
    /// The queue's failure.
    fn idle_executor(&mut self) -> Result<Option<&mut CpuExecutor>, DeviceError> {
        self.check_failure()?;
        if self.executor.is_none() {
            self.executor = self.channel.take_executor_if_idle();
        }
        Ok(self.executor.as_deref_mut())
    }

    /// Runs a command inline if it is small, no command is pending and nobody waits for the device; sends it to the device's
    /// threads otherwise.
    fn submit(&mut self, command: CpuCommand) -> Result<(), DeviceError> {
        let unfinished = match self.idle_executor()? {
            Some(executor) if command.runs_inline() => executor.execute_inline(command),
            _ => Some(command),
        };
        match unfinished {
            Some(command) => self.send(command),
            None => self.check_failure(),
        }
    }

    fn check_failure(&self) -> Result<(), DeviceError> {
        if self.abort.load(Ordering::Relaxed) {
            // No work runs while the submitter holds the executor. Otherwise the channel drops the executor, which fails the
            // timeline.
            if let Some(executor) = &self.executor {
                executor.fail(DeviceError::Ended);
            }
            return Err(DeviceError::Ended);
        }
        self.timeline.failure().map_or(Ok(()), Err)
    }

    fn send(&mut self, command: CpuCommand) -> Result<(), DeviceError> {
        self.channel.send(command, &mut self.executor)?;
        self.sent_since_mark = true;
        Ok(())
    }

    /// The compiled program, which can run on these bindings.
    fn check_bindings<'p>(&self, program: &'p Program, bindings: &[Region]) -> Result<&'p CpuProgram, DeviceError> {
        let compiled = cpu_program(program)?;
        program.check_bindings(bindings)?;
        if !compiled.groups().iter().all(|group| self.joined.contains(group)) {
            return Err(NOT_JOINED);
        }
        compiled.check_bindings(bindings)?;
        compiled.populate(bindings, &self.abort);
        Ok(compiled)
    }

    /// Waits for all submitted commands, then writes a region in place, piece by piece.
    fn upload_in_place(
        &mut self,
        dst: &Region,
        tensor: Option<&TensorDesc>,
        fill: &mut PieceSource<'_>,
    ) -> Result<(), DeviceError> {
        self.mark().wait(Some(Instant::now() + DEVICE_TIMEOUT))?;
        let begin_turn = |lane| self.device.queue_threads.begin(lane, &self.budget);
        let tensor = tensor.filter(|tensor| self.device.packs_on_upload(tensor));
        CpuMemory::of(dst)?.upload(dst.offset() as usize, dst.bytes() as usize, tensor, &begin_turn, fill)
    }
}

/// A turn of the short lane for a transfer of `bytes` bytes by the submitting thread, which may need none: `Some(None)`. `None`:
/// others wait for the device.
fn try_begin_transfer(executor: &CpuExecutor, bytes: u64) -> Option<Option<Turn>> {
    if bytes <= MAX_FREE_BYTES {
        return Some(None);
    }
    executor.device.queue_threads.try_begin(Lane::Short, &executor.budget).map(Some)
}

impl Queue for CpuQueue {
    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: UploadSource<'_>) -> Result<(), DeviceError> {
        let memory = CpuMemory::writable(&dst)?;
        src.check_size(dst.bytes())?;
        self.check_failure()?;
        if dst.bytes() <= MAX_INLINE_BYTES as u64 {
            let mut staging = std::mem::take(&mut self.staging);
            let bytes = match src {
                UploadSource::Borrowed(bytes) => bytes,
                UploadSource::Writer(fill) => {
                    staging.resize(dst.bytes() as usize, 0);
                    fill(&mut staging)?;
                    &staging
                }
            };
            // Inline if the queue is idle and the region needs no conversion, otherwise as a command with a copy of the bytes.
            let mut written = None;
            if let Some(executor) = self.idle_executor()?
                && let Some(_turn) = try_begin_transfer(executor, dst.bytes())
            {
                written = memory.write(dst.offset() as usize, bytes, Locking::Try).map_err(|e| executor.fail(e))?;
            }
            if written.is_none() {
                let bytes = bytes.to_vec();
                self.submit(CpuCommand::Upload { dst, bytes })?;
            }
            self.staging = staging;
            return Ok(());
        }
        match src {
            UploadSource::Borrowed(mut bytes) => self.upload_in_place(&dst, tensor, &mut |piece| {
                let (next, rest) = bytes.split_at(piece.len());
                piece.copy_from_slice(next);
                bytes = rest;
                Ok(())
            }),
            UploadSource::Writer(fill) => self.upload_in_place(&dst, tensor, fill),
        }
    }

    fn download(&mut self, src: Region) -> Result<PendingRead, DeviceError> {
        let memory = CpuMemory::of(&src)?;
        if let Some(executor) = self.idle_executor()?
            && src.bytes() <= MAX_INLINE_BYTES as u64
            && let Some(_turn) = try_begin_transfer(executor, src.bytes())
        {
            let (offset, bytes) = (src.offset() as usize, src.bytes() as usize);
            let mut read = Vec::new();
            if memory.read(offset, bytes, &mut read, Locking::Try).map_err(|e| executor.fail(e))? {
                return Ok(PendingRead::ready(read));
            }
        }
        let (to, pending) = PendingRead::new();
        self.submit(CpuCommand::Download { src, to, read: Vec::new() })?;
        Ok(pending)
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        CpuMemory::writable(&dst)?;
        self.submit(CpuCommand::Fill { dst, value, done: 0 })
    }

    fn copy_from(
        &mut self,
        src: Region,
        dst: Region,
        after: Option<&TimelinePoint>,
    ) -> Result<CopyOutcome, DeviceError> {
        CpuMemory::writable(&dst)?;
        check_copy(&src, &dst)?;
        if CpuMemory::of(&src).is_err() {
            return Ok(CopyOutcome::Unreachable);
        }
        self.submit(CpuCommand::Copy { src, dst, after: after.cloned(), done: 0 })?;
        Ok(CopyOutcome::Submitted)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        self.check_bindings(program, bindings)?;
        let position = RunPosition::default();
        self.submit(CpuCommand::Run { program: program.clone(), bindings: Arc::clone(bindings), position })
    }

    fn run_inline(&mut self, program: &Program, bindings: &Arc<[Region]>, budget: Duration) -> Result<(), DeviceError> {
        let code = self.check_bindings(program, bindings)?;
        let mut position = Some(RunPosition::default());
        if let Some(executor) = self.idle_executor()? {
            let threads = &executor.device.queue_threads;
            // A small program takes about as long as handing it to another thread.
            let turn = match code.is_small() {
                true => Some(threads.begin(Lane::Short, &executor.budget)),
                false => threads.try_begin(Lane::Long, &executor.budget),
            };
            if let Some(turn) = turn {
                let began = Instant::now();
                let pause = || turn.interrupts_command() || began.elapsed() > budget;
                let limits = RunLimits { pause: &pause, locking: Locking::Try, polls_at_first_collective: false };
                let ran = executor.run(code, bindings, RunPosition::default(), limits);
                position = match ran.map_err(|e| executor.fail(e))? {
                    RunOutcome::Done => None,
                    // This thread may have to submit the programs of the other ranks, so a thread of the device waits for them.
                    RunOutcome::Paused(next) | RunOutcome::AwaitsRanks(next, _) => Some(next),
                };
            }
        }
        let Some(position) = position else { return Ok(()) };
        self.submit(CpuCommand::Run { program: program.clone(), bindings: Arc::clone(bindings), position })
    }

    fn mark(&mut self) -> TimelinePoint {
        if self.sent_since_mark {
            self.last_mark += 1;
            // If the channel is closed, the timeline carries the failure, and waiting for the point returns it.
            let _ = self.submit(CpuCommand::Mark(self.last_mark));
            self.sent_since_mark = false;
        }
        TimelinePoint::new(&self.timeline, self.last_mark)
    }

    fn wait(&mut self, point: &TimelinePoint) -> Result<(), DeviceError> {
        self.submit(CpuCommand::Wait(point.clone()))
    }

    fn prefault(&mut self) -> Option<&mut dyn Prefault> {
        Some(self)
    }

    fn collectives(&mut self) -> Option<&mut dyn Collectives> {
        Some(self)
    }

    /// The timeline fails when the channel or its thread drops the executor, or, if the submitter holds it, at the submitter's
    /// next call.
    fn aborter(&mut self) -> Option<QueueAborter> {
        let (abort, channel) = (Arc::clone(&self.abort), Arc::clone(&self.channel));
        Some(QueueAborter::new(move || {
            abort.store(true, Ordering::Relaxed);
            channel.close();
        }))
    }
}

impl Prefault for CpuQueue {
    fn prefault(&mut self, region: &Region) {
        if let Ok(memory) = CpuMemory::of(region) {
            memory.populate(region.offset() as usize, region.bytes() as usize);
        }
    }
}

impl Collectives for CpuQueue {
    fn join(&mut self, group: u32, member: Membership) -> Result<(), DeviceError> {
        let Membership::InProcess(mut member) = member else {
            return Err(DeviceError::Misuse("a queue of a device of this process cannot join a group of servers"));
        };
        if self.joined.len() >= MAX_JOINED_GROUPS && !self.joined.contains(&group) {
            return Err(DeviceError::Misuse("a queue joins at most 64 group numbers"));
        }
        member.set_device(&self.device.info().name);
        self.submit(CpuCommand::Join { group, member })?;
        self.joined.insert(group);
        Ok(())
    }
}

impl Drop for CpuQueue {
    fn drop(&mut self) {
        // A running program ends at its next step.
        self.abort.store(true, Ordering::Relaxed);
        self.channel.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::MathMode;
    use crate::device::UploadError;

    /// A mark after completed work, placed after the abort: no thread would decide its point.
    #[test]
    fn points_fail_after_an_abort_while_the_submitter_holds_the_executor() {
        let device = CpuDevice::new("CPU", 1, MathMode::Exact, 1 << 20).unwrap();
        let budget = MemoryBudget::new(1 << 20);
        let buffer = device.alloc(1 << 19, &budget).unwrap();
        let until = Some(Instant::now() + Duration::from_secs(60));
        let mut queue = CpuQueue::new(Arc::clone(&device), budget);
        // A fill of more than 256 KiB runs on a thread of the device, which returns the executor.
        queue.fill(buffer.whole(), 1).unwrap();
        while queue.idle_executor().unwrap().is_none() {
            std::thread::yield_now();
        }
        queue.aborter().unwrap().abort();
        assert!(queue.sent_since_mark, "the mark has to submit a command");
        assert_eq!(queue.mark().wait(until), Err(DeviceError::Ended));
    }

    /// Larger than a chunk, so that the device could call the source again after it has failed.
    const BYTES: u64 = 3 << 20;

    #[test]
    fn source_error_is_returned_and_the_queue_stays_usable() {
        let device = CpuDevice::new("CPU", 1, MathMode::Exact, 2 * BYTES).unwrap();
        let budget = MemoryBudget::new(2 * BYTES);
        let mut queue = device.queue(&budget).unwrap();
        let region = device.alloc(BYTES, &budget).unwrap().whole();
        let mut left = BYTES / 2;
        let mut failures = 0;
        let done = queue.upload_from(region.clone(), None, |chunk| {
            left = left.checked_sub(chunk.len() as u64).ok_or_else(|| {
                failures += 1;
                failures
            })?;
            Ok(())
        });
        assert_eq!(done, Err(UploadError::Source(1)));
        assert_eq!(failures, 1, "a source is not called again after it has failed");
        let done = queue.upload_from(region.clone(), None, |chunk| {
            chunk.fill(7);
            Ok::<(), &str>(())
        });
        assert_eq!(done, Ok(()));
        assert_eq!(queue.download(region).unwrap().wait(None).unwrap(), [7; BYTES as usize]);
    }
}

//! The CPU's command queue: commands run in order, on the device's threads for queues or inline on the submitting thread.
//!
//! The queue's [`CpuExecutor`] runs the commands. While no command is pending, the submitting thread has the executor: it runs
//! small commands inline, and programs within the budget of `run_inline`. Any other command is sent to the device's threads
//! together with the executor; they return the executor when no command is pending. So a token of a decoding client (small
//! uploads, a short program, a small download) needs no thread switch.

use super::CpuDevice;
use super::executor::{CpuCommand, CpuExecutor, RunOutcome, cpu_memory, is_small, writable_memory};
use super::joined_groups::NOT_JOINED;
use super::layout::{Locking, PieceSource};
use super::program::{CpuProgram, RunLimits, RunPosition};
use crate::device::{
    Collectives, CommandChannel, CopyOutcome, DEVICE_TIMEOUT, Device, DeviceError, Lane, Membership, MemoryBudget,
    PendingRead, Prefault, Program, Queue, QueueAborter, Region, RunInline, TRANSFER_CHUNK_BYTES, Timeline,
    TimelinePoint, UploadSource, check_copy,
};
use crate::tensor::TensorDesc;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Largest transfer in bytes that runs inline on the submitting thread. A larger upload waits for earlier commands and is then
/// written in place; a smaller one is copied into its command.
pub(super) const MAX_INLINE_BYTES: usize = TRANSFER_CHUNK_BYTES as usize;

/// Limit of the group numbers that a queue has joined, including those of groups that have failed.
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
    fn idle_executor(&mut self) -> Option<&mut CpuExecutor> {
        if self.executor.is_none() {
            self.executor = self.channel.take_executor_if_idle();
        }
        self.executor.as_deref_mut()
    }

    /// Runs a command inline if it is small, no command is pending and nobody waits for the device; sends it to the device's
    /// threads otherwise.
    fn submit(&mut self, command: CpuCommand) -> Result<(), DeviceError> {
        self.check_failure()?;
        let mut unfinished = Some(command);
        if unfinished.as_ref().is_some_and(CpuCommand::runs_inline)
            && let Some(executor) = self.idle_executor()
        {
            unfinished = unfinished.and_then(|command| executor.execute_inline(command));
        }
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

    fn check_bindings(&self, program: &Program, bindings: &[Region]) -> Result<(), DeviceError> {
        let wrong_device = DeviceError::Misuse("the program was compiled for another kind of device");
        let compiled = program.compiled::<CpuProgram>().ok_or(wrong_device)?;
        program.check_bindings(bindings)?;
        if !compiled.groups().iter().all(|group| self.joined.contains(group)) {
            return Err(NOT_JOINED);
        }
        compiled.check_bindings(bindings)?;
        compiled.populate(bindings, &self.abort);
        Ok(())
    }

    /// Writes a small region: inline if the queue is idle and the region needs no conversion, otherwise as a command with a copy
    /// of the bytes.
    fn upload_small(&mut self, dst: Region, bytes: &[u8]) -> Result<(), DeviceError> {
        if let Some(executor) = self.idle_executor()
            && let Some(_turn) = executor.try_begin_transfer(dst.bytes())
        {
            let write = |_: &mut _| cpu_memory(&dst)?.write(dst.offset() as usize, bytes, Locking::Try);
            if executor.record_failure(write)?.is_some() {
                return Ok(());
            }
        }
        self.submit(CpuCommand::Upload { dst, bytes: bytes.to_vec() })
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
        cpu_memory(dst)?.upload(dst.offset() as usize, dst.bytes() as usize, tensor, &begin_turn, fill)
    }
}

impl Queue for CpuQueue {
    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: UploadSource<'_>) -> Result<(), DeviceError> {
        writable_memory(&dst)?;
        let small = dst.bytes() <= MAX_INLINE_BYTES as u64;
        src.check_size(dst.bytes())?;
        self.check_failure()?;
        if small {
            return match src {
                UploadSource::Borrowed(bytes) => self.upload_small(dst, bytes),
                UploadSource::Writer(fill) => {
                    let mut staging = std::mem::take(&mut self.staging);
                    staging.resize(dst.bytes() as usize, 0);
                    let filled = fill(&mut staging).map_err(DeviceError::Source);
                    let done = filled.and_then(|()| self.upload_small(dst, &staging));
                    self.staging = staging;
                    done
                }
            };
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
        let memory = cpu_memory(&src)?;
        self.check_failure()?;
        if src.bytes() <= MAX_INLINE_BYTES as u64
            && let Some(executor) = self.idle_executor()
            && let Some(_turn) = executor.try_begin_transfer(src.bytes())
        {
            let (offset, bytes) = (src.offset() as usize, src.bytes() as usize);
            let mut read = Vec::new();
            if executor.record_failure(|_| memory.read(offset, bytes, &mut read, Locking::Try))? {
                return Ok(PendingRead::ready(read));
            }
        }
        let (to, pending) = PendingRead::new();
        self.submit(CpuCommand::Download { src, to, read: Vec::new() })?;
        Ok(pending)
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        writable_memory(&dst)?;
        self.submit(CpuCommand::Fill { dst, value, done: 0 })
    }

    fn copy_from(
        &mut self,
        src: Region,
        dst: Region,
        after: Option<&TimelinePoint>,
    ) -> Result<CopyOutcome, DeviceError> {
        writable_memory(&dst)?;
        check_copy(&src, &dst)?;
        if cpu_memory(&src).is_err() {
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

    fn run_inline(&mut self) -> Option<&mut dyn RunInline> {
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
        if let Ok(memory) = cpu_memory(region) {
            memory.populate(region.offset() as usize, region.bytes() as usize);
        }
    }
}

impl RunInline for CpuQueue {
    fn run_inline(&mut self, program: &Program, bindings: &Arc<[Region]>, budget: Duration) -> Result<(), DeviceError> {
        self.check_bindings(program, bindings)?;
        self.check_failure()?;
        let mut position = Some(RunPosition::default());
        // A small program takes about as long as handing it to another thread.
        let is_small = is_small(program);
        if let Some(executor) = self.idle_executor()
            && let Some(turn) =
                if is_small { Some(executor.begin(Lane::Short)) } else { executor.try_begin(Lane::Long) }
        {
            let began = Instant::now();
            let pause = || turn.interrupts_command() || began.elapsed() > budget;
            let limits = RunLimits { pause: &pause, locking: Locking::Try, polls_at_first_collective: false };
            let start = RunPosition::default();
            let ran = executor.record_failure(|executor| executor.run(program, bindings, start, limits))?;
            position = match ran {
                RunOutcome::Done => None,
                // This thread may have to submit the programs of the other ranks, so a thread of the device waits for them.
                RunOutcome::Paused(next) | RunOutcome::AwaitsRanks(next, _) => Some(next),
            };
        }
        let Some(position) = position else { return Ok(()) };
        self.submit(CpuCommand::Run { program: program.clone(), bindings: Arc::clone(bindings), position })
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

    /// A mark behind completed work, placed after the abort: no thread would decide its point.
    #[test]
    fn points_fail_after_an_abort_while_the_submitter_holds_the_executor() {
        let device = CpuDevice::new("CPU", 1, MathMode::Exact, 1 << 20).unwrap();
        let budget = MemoryBudget::new(1 << 20);
        let buffer = device.alloc(1 << 19, &budget).unwrap();
        let until = Some(Instant::now() + Duration::from_secs(60));
        let mut queue = CpuQueue::new(Arc::clone(&device), budget);
        // A fill of more than 256 KiB runs on a thread of the device, which returns the executor.
        queue.fill(buffer.whole(), 1).unwrap();
        while queue.idle_executor().is_none() {
            std::thread::yield_now();
        }
        queue.aborter().unwrap().abort();
        assert!(queue.sent_since_mark, "the mark has to submit a command");
        assert_eq!(queue.mark().wait(until), Err(DeviceError::Ended));
    }
}

//! The executor, which runs the commands of a CPU queue: see [`CpuQueue`](super::queue::CpuQueue).

use super::CpuDevice;
use super::joined_groups::JoinedGroups;
use super::layout::{CpuMemory, Locking};
use super::memory::{HostMemory, charged_bytes};
use super::program::{CpuProgram, RunLimits, RunPosition, RunResources};
use super::queue::MAX_INLINE_BYTES;
use crate::device::{
    Command, CommandOutcome, DeviceError, Executor, GroupMember, Lane, MemoryBudget, PendingReadSender, Program,
    Region, Reservation, Timeline, TimelinePoint, Turn,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Largest transfer in bytes that runs in the short lane: it takes about a millisecond.
const MAX_SHORT_BYTES: u64 = 4 << 20;

/// A submitted command, with the regions and the data that it needs. `read`, `done` and `position` say what its earlier turns
/// have done.
pub(super) enum CpuCommand {
    Upload { dst: Region, bytes: Vec<u8> },
    Download { src: Region, to: PendingReadSender, read: Vec<u8> },
    Fill { dst: Region, value: u8, done: usize },
    Copy { src: Region, dst: Region, after: Option<TimelinePoint>, done: usize },
    Run { program: Program, bindings: Arc<[Region]>, position: RunPosition },
    Wait(TimelinePoint),
    Mark(u64),
    Join { group: u32, member: GroupMember },
}

/// The part of a program that a run has done.
pub(super) enum RunOutcome {
    /// All steps have run.
    Done,
    /// It continues at the position.
    Paused(RunPosition),
    /// It continues at the position once the point is decided: other ranks have not published their parts of a collective.
    AwaitsRanks(RunPosition, TimelinePoint),
}

impl Command for CpuCommand {
    fn staged_bytes(&self) -> usize {
        if let CpuCommand::Upload { bytes, .. } = self { bytes.len() } else { 0 }
    }

    fn lane(&self) -> Lane {
        let is_short = match self {
            CpuCommand::Upload { .. } | CpuCommand::Wait(_) | CpuCommand::Mark(_) | CpuCommand::Join { .. } => true,
            CpuCommand::Download { src: region, .. }
            | CpuCommand::Fill { dst: region, .. }
            | CpuCommand::Copy { dst: region, .. } => region.bytes() <= MAX_SHORT_BYTES,
            CpuCommand::Run { program, .. } => cpu_program(program).is_ok_and(CpuProgram::is_small),
        };
        if is_short { Lane::Short } else { Lane::Long }
    }
}

impl CpuCommand {
    /// Whether the command is short enough to run inline.
    pub(super) fn runs_inline(&self) -> bool {
        let small = |region: &Region| region.bytes() <= MAX_INLINE_BYTES as u64;
        match self {
            CpuCommand::Upload { .. } | CpuCommand::Mark(_) | CpuCommand::Join { .. } => true,
            CpuCommand::Download { src: region, .. } | CpuCommand::Fill { dst: region, .. } => small(region),
            CpuCommand::Copy { dst, after, .. } => small(dst) && after.as_ref().is_none_or(reached),
            CpuCommand::Run { .. } => false,
            CpuCommand::Wait(point) => reached(point),
        }
    }
}

pub(super) fn cpu_program(program: &Program) -> Result<&CpuProgram, DeviceError> {
    program.compiled().ok_or(DeviceError::Misuse("the program was compiled for another kind of device"))
}

fn reached(point: &TimelinePoint) -> bool {
    point.poll() == Ok(true)
}

/// Scratch memory of a queue. It grows to the largest need of its programs and is charged to the queue's budget.
#[derive(Default)]
struct QueueScratch(Option<(HostMemory, Reservation)>);

impl QueueScratch {
    fn reserve(&mut self, bytes: usize, budget: &Arc<MemoryBudget>) -> Result<&HostMemory, DeviceError> {
        let enough = self.0.as_ref().is_some_and(|(m, _)| m.bytes() >= bytes);
        if !enough {
            // The old memory is released first, so that the budget never holds both.
            self.0 = None;
            let reservation = budget.reserve(charged_bytes(bytes as u64))?;
            let memory = HostMemory::scratch(bytes, budget)?;
            self.0 = Some((memory, reservation));
        }
        self.0.as_ref().map(|(m, _)| m).ok_or(DeviceError::Ended)
    }
}

/// Runs the commands of one queue. Dropping it, also by a panic, fails the timeline, so that waiting threads wake up.
pub(super) struct CpuExecutor {
    pub(super) device: Arc<CpuDevice>,
    pub(super) budget: Arc<MemoryBudget>,
    timeline: Arc<Timeline>,
    abort: Arc<AtomicBool>,
    /// Scratch of the workers, one part each.
    locals: QueueScratch,
    /// Scratch that the workers share.
    shared: QueueScratch,
    /// How long the program under way has used the device.
    run_time: Duration,
    groups: JoinedGroups,
}

impl Executor for CpuExecutor {
    type Command = CpuCommand;

    /// After a failure no command runs; downloads report the failure.
    fn execute(&mut self, command: CpuCommand, turn: &Turn) -> CommandOutcome<CpuCommand> {
        match (self.timeline.failure(), command) {
            (Some(failure), CpuCommand::Download { to, .. }) => to.send(Err(failure)),
            (Some(_), _) => {}
            (None, command) => match self.try_execute(command, turn) {
                Ok(outcome) => return outcome,
                Err(error) => _ = self.fail(error),
            },
        }
        CommandOutcome::Done
    }
}

impl CpuExecutor {
    pub(super) fn new(
        device: Arc<CpuDevice>,
        budget: Arc<MemoryBudget>,
        timeline: Arc<Timeline>,
        abort: Arc<AtomicBool>,
    ) -> CpuExecutor {
        let (locals, shared) = (QueueScratch::default(), QueueScratch::default());
        let (run_time, groups) = (Duration::ZERO, JoinedGroups::default());
        CpuExecutor { device, budget, timeline, abort, locals, shared, run_time, groups }
    }

    /// Fails the queue's timeline and the groups that the queue has joined. The first failure of each stays. Returns the error.
    pub(super) fn fail(&self, error: DeviceError) -> DeviceError {
        self.groups.fail(&error);
        self.timeline.fail(error.clone());
        error
    }

    /// Runs a command on the submitting thread. Returns it if the threads have to run it, or the rest of it.
    pub(super) fn execute_inline(&mut self, command: CpuCommand) -> Option<CpuCommand> {
        match command {
            CpuCommand::Wait(_) => None,
            CpuCommand::Mark(seq) => {
                self.timeline.advance(seq);
                None
            }
            CpuCommand::Join { group, member } => {
                self.groups.join(group, member);
                None
            }
            command => {
                let turn = self.device.queue_threads.try_begin(Lane::Short, &self.budget);
                let Some(turn) = turn else { return Some(command) };
                match self.execute(command, &turn) {
                    CommandOutcome::Done => None,
                    CommandOutcome::AwaitPoint(_, command)
                    | CommandOutcome::NeedsLongLane(command)
                    | CommandOutcome::TurnOver(command) => Some(command),
                }
            }
        }
    }

    fn try_execute(&mut self, mut command: CpuCommand, turn: &Turn) -> Result<CommandOutcome<CpuCommand>, DeviceError> {
        // Programs, conversions and copies make some progress in each turn, also if it is over at once.
        let abort = Arc::clone(&self.abort);
        let pause = || turn.interrupts_command();
        let gives_way = || abort.load(Ordering::Relaxed) || pause();
        let locking = if turn.lane() == Lane::Short { Locking::Try } else { Locking::GiveWay(&gives_way) };
        if let CpuCommand::Wait(point) | CpuCommand::Copy { after: Some(point), .. } = &command
            && !point.poll()?
        {
            return Ok(CommandOutcome::AwaitPoint(point.clone(), command));
        }
        if let CpuCommand::Join { group, member } = command {
            self.groups.join(group, member);
            return Ok(CommandOutcome::Done);
        }
        // Whether a command that is not done had what it needs, and is to go on in the same lane.
        let mut may_go_on = turn.lane() == Lane::Long;
        let done = match &mut command {
            CpuCommand::Upload { dst, bytes } => {
                CpuMemory::of(dst)?.write(dst.offset() as usize, bytes, locking)?.is_some()
            }
            CpuCommand::Download { src, read, .. } => {
                let (before, at, bytes) = (read.len(), src.offset() as usize, src.bytes() as usize);
                let done = CpuMemory::of(src)?.read(at, bytes, read, locking)?;
                may_go_on |= read.len() > before;
                done
            }
            CpuCommand::Fill { dst, value, done } => {
                let (at, bytes) = (dst.offset() as usize, dst.bytes() as usize);
                *done = CpuMemory::of(dst)?.fill(at, bytes, *done, *value, locking)?;
                *done == bytes
            }
            CpuCommand::Copy { src, dst, done, .. } => {
                let (to, from, bytes) = (dst.offset() as usize, src.offset() as usize, src.bytes() as usize);
                *done = CpuMemory::of(dst)?.copy_from(to, CpuMemory::of(src)?, from, bytes, *done, locking)?;
                *done == bytes
            }
            CpuCommand::Run { program, bindings, position } => {
                let limits = RunLimits { pause: &pause, locking, polls_at_first_collective: true };
                match self.run(cpu_program(program)?, bindings, *position, limits)? {
                    RunOutcome::Done => true,
                    RunOutcome::Paused(next) => {
                        may_go_on |= next != *position;
                        *position = next;
                        false
                    }
                    RunOutcome::AwaitsRanks(next, point) => {
                        *position = next;
                        return Ok(CommandOutcome::AwaitPoint(point, command));
                    }
                }
            }
            CpuCommand::Wait(_) | CpuCommand::Join { .. } => true,
            CpuCommand::Mark(seq) => {
                self.timeline.advance(*seq);
                true
            }
        };
        Ok(match (done, may_go_on) {
            (true, _) => {
                if let CpuCommand::Download { to, read, .. } = command {
                    to.send(Ok(read));
                }
                CommandOutcome::Done
            }
            (false, true) => CommandOutcome::TurnOver(command),
            (false, false) => CommandOutcome::NeedsLongLane(command),
        })
    }

    /// Runs a program from a position on, within `limits`.
    pub(super) fn run(
        &mut self,
        code: &CpuProgram,
        bindings: &[Region],
        position: RunPosition,
        limits: RunLimits<'_>,
    ) -> Result<RunOutcome, DeviceError> {
        if let Some(member) = self.awaited_rank(code, position)? {
            while !member.poll_briefly(|| (limits.pause)())? {
                if let Some(point) = member.await_point() {
                    return Ok(RunOutcome::AwaitsRanks(position, point));
                }
            }
        }
        // One pool for scratch and run: `set_threads` may replace the device's pool meanwhile.
        let pool = self.device.pool();
        let (locals, shared) = code.scratch(pool.workers())?;
        let locals = self.locals.reserve(locals, &self.budget)?;
        let shared = self.shared.reserve(shared, &self.budget)?;
        if position == RunPosition::default() {
            self.run_time = Duration::ZERO;
        }
        let (began, max) = (Instant::now(), self.budget.max_run());
        let left = max.map(|max| max.saturating_sub(self.run_time));
        let pause = || (limits.pause)() || left.is_some_and(|left| began.elapsed() >= left);
        let limits = RunLimits { pause: &pause, ..limits };
        let resources = RunResources { scratch: (locals, shared), groups: &self.groups, abort: &self.abort };
        let next = code.run(&pool, bindings, resources, position, limits)?;
        self.run_time += began.elapsed();
        // An aborted run has left steps out.
        if self.abort.load(Ordering::Relaxed) {
            return Err(DeviceError::Ended);
        }
        // Also a run that has ended: its last part may have given no way for any time.
        if let Some(limit) = max.filter(|&max| self.run_time >= max) {
            return Err(DeviceError::RunTooLong { limit });
        }
        let Some(next) = next else { return Ok(RunOutcome::Done) };
        let point = self.awaited_rank(code, next)?.and_then(GroupMember::await_point);
        Ok(point.map_or(RunOutcome::Paused(next), |point| RunOutcome::AwaitsRanks(next, point)))
    }

    /// The member of the group whose ranks must all have published before a run goes on at a position.
    fn awaited_rank(&self, code: &CpuProgram, position: RunPosition) -> Result<Option<&GroupMember>, DeviceError> {
        code.awaited_group(position).map(|group| self.groups.member(group)).transpose()
    }
}

impl Drop for CpuExecutor {
    fn drop(&mut self) {
        self.timeline.fail(DeviceError::Ended);
    }
}

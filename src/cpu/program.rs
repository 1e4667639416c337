//! A compiled graph: one kernel per node or fused step, and the loop in which the members of a team run them.

use super::fuse;
use super::joined_groups::JoinedGroups;
use super::layout::{CpuMemory, LayoutAccess, LayoutGuard, LayoutRequirements, Locking, TensorUses, lock_order};
use super::memory::{BLOCK, HostMemory, LocalScratch, SharedScratch, View};
use super::ops::{self, Kernel, MathMode};
use super::packed_rhs_reuse;
use super::pool::{KernelContext, Member, Pool, StepProgress, Team};
use crate::device::{DeviceError, Region, Unsupported};
use crate::graph::fuse::{FUSION_PATTERNS, FusionPattern, KernelCall, select_kernels};
use crate::graph::{Graph, SlotOffset, TensorId};
use crate::ops::{MAX_SRC, NodeView, OpCode};
use crate::poison::lock;
use crate::tensor::TensorDesc;
use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Cost (see [`Kernel::new`]) below which a program runs on the submitting thread alone: about a millisecond on one processor.
const SMALL_PROGRAM_COST: usize = 1 << 22;

/// Cost of serial steps after which the leader checks whether to pause: some microseconds.
const PAUSE_CHECK_COST: usize = 1 << 14;

/// When a run pauses, and what it may wait for.
#[derive(Clone, Copy)]
pub(super) struct RunLimits<'a> {
    /// Whether to pause before the next step, or before the next claim of items of a step. The run makes some progress even if
    /// this is always true.
    pub(super) pause: &'a (dyn Fn() -> bool + Sync),
    /// No step runs before all memories are locked with the layouts that the steps need; [`Locking::Try`]: if that would take
    /// a wait for a lock or a conversion, [`Locking::GiveWay`]: if the conversion gives way.
    pub(super) locking: Locking<'a>,
    /// Whether the run may poll for other ranks at its first collective. A submitting thread must not: the other ranks may wait
    /// for this thread to submit their programs. At later collectives it may, because all ranks were in the first one.
    pub(super) polls_at_first_collective: bool,
}

/// Where a run begins: at a step that earlier runs may have done in part. The default is the start of the program.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct RunPosition {
    step: usize,
    progress: StepProgress,
}

/// The parts of its queue that a run uses.
#[derive(Clone, Copy)]
pub(super) struct RunResources<'a> {
    /// Scratch of the workers, and the scratch that they share: see [`CpuProgram::scratch`].
    pub(super) scratch: (&'a HostMemory, &'a HostMemory),
    /// The groups of the program's collectives.
    pub(super) groups: &'a JoinedGroups,
    /// Ends the run early.
    pub(super) abort: &'a AtomicBool,
}

/// A graph compiled for the CPU: the backend-specific part of a [`Program`](crate::device::Program).
pub(super) struct CpuProgram {
    steps: Vec<KernelStep>,
    /// The tensors that the steps name, each once.
    operands: Vec<Operand>,
    /// Scratch of each worker, in floats.
    floats: usize,
    /// Scratch that all workers share, in bytes.
    shared: usize,
    /// Cost of all steps.
    cost: usize,
    /// Layouts that the steps need, by slot.
    requirements: Vec<LayoutRequirements>,
    /// The groups of the program's collectives.
    groups: Vec<u32>,
    /// By slot: what nodes write to it, as ranges of bytes in order, at least [`BLOCK`] bytes apart.
    written: Vec<Vec<Range<usize>>>,
    /// By slot: the start of its region and the layout version of its memory in the last run. If both are unchanged, the
    /// layout need not be checked again.
    known_versions: Mutex<Vec<Option<(usize, u64)>>>,
}

/// A run, for its members.
struct RunState<'a> {
    begins_at: RunPosition,
    /// The leader has paused before a serial step, or before a step that needs the parts of other ranks.
    paused_by_leader: AtomicBool,
    polls_at_first_collective: bool,
    shared: SharedScratch<'a>,
    bound: &'a BoundMemories<'a>,
    groups: &'a JoinedGroups,
}

/// The memories of a run, with their layouts locked.
struct BoundMemories<'a> {
    guards: Vec<LayoutGuard<'a>>,
    /// By slot: index of the guard, and start of the region.
    slots: Vec<(usize, usize)>,
}

impl RunState<'_> {
    /// Whether all ranks of a group have published, so that the step that combines their parts can begin. Also true if the group
    /// has failed, since the run then ends with its error.
    fn all_published(&self, member: &Member<'_>, group: u32, polls: bool) -> bool {
        let give_up = || member.stopping() || member.pause_is_due();
        let rank = self.groups.member(group);
        let published = rank.and_then(|rank| if polls { rank.poll_briefly(give_up) } else { rank.poll() });
        published.unwrap_or_else(|error| {
            member.fail(error);
            true
        })
    }
}

/// A kernel with its operands. A fused step computes several nodes.
struct KernelStep {
    code: OpCode,
    kernel: Kernel,
    /// Whether an earlier step left source 1 packed in shared scratch: see [`packed_rhs_reuse`].
    rhs_is_packed: bool,
    /// The group whose ranks must all have published their parts before the step.
    awaits: Option<u32>,
    /// Index of the destination in [`CpuProgram::operands`].
    dst: u32,
    /// Indices of the sources; `None` for an absent source.
    srcs: Box<[Option<u32>]>,
}

/// A tensor of the graph: its description and its place in a slot.
pub(super) struct Operand {
    pub(super) desc: TensorDesc,
    pub(super) place: SlotOffset,
}

impl CpuProgram {
    pub(super) fn new(graph: &Arc<Graph>, math_mode: MathMode, workers: usize) -> Result<CpuProgram, DeviceError> {
        CpuProgram::with_patterns(graph, workers, FUSION_PATTERNS, |node| ops::select(node, math_mode))
    }

    /// As [`CpuProgram::new`], with these fusion patterns only and the caller's choice of kernels.
    pub(super) fn with_patterns(
        graph: &Arc<Graph>,
        workers: usize,
        patterns: &[FusionPattern],
        select: impl Fn(&NodeView<'_>) -> Result<Kernel, Unsupported>,
    ) -> Result<CpuProgram, DeviceError> {
        let (mut operands, mut numbers) = (Vec::new(), vec![None; graph.tensors().len()]);
        let mut uses = TensorUses::new(graph.slot_sizes().len());
        let mut operand = |id: TensorId, access: LayoutAccess| {
            let tensor = graph.tensor(id).ok_or(DeviceError::Misuse("a node of another graph"))?;
            let place = tensor.place.ok_or(DeviceError::Misuse("a node without memory"))?;
            uses.add(place, &tensor.desc, access);
            Ok::<_, DeviceError>(*numbers[id.index()].get_or_insert_with(|| {
                operands.push(Operand { desc: tensor.desc, place });
                (operands.len() - 1) as u32 // no more than tensors, which a u32 counts
            }))
        };
        let mut steps = Vec::with_capacity(graph.nodes().len());
        let (mut floats, mut shared, mut cost, mut groups) = (0, 0, 0usize, Vec::new());
        select_kernels(graph, patterns, select, fuse::kernel, |KernelCall { code, mut kernel, dst, srcs, .. }| {
            floats = floats.max(kernel.local);
            shared = shared.max(kernel.shared);
            cost = cost.saturating_add(kernel.cost);
            let dst = operand(dst, LayoutAccess::Rows)?;
            let srcs = srcs.into_iter().enumerate();
            let srcs = srcs.map(|(i, id)| id.map(|id| operand(id, kernel.access(i))).transpose());
            let srcs = srcs.collect::<Result<Box<[_]>, _>>()?;
            let awaits = kernel.take_publish().map(|(group, publish)| {
                groups.push(group);
                let srcs = srcs.clone();
                steps.push(KernelStep { code, kernel: *publish, rhs_is_packed: false, awaits: None, dst, srcs });
                group
            });
            steps.push(KernelStep { code, kernel, rhs_is_packed: false, awaits, dst, srcs });
            Ok::<_, DeviceError>(())
        })?;
        drop(numbers);
        steps.shrink_to_fit();
        operands.shrink_to_fit();
        let written = written_ranges(graph);
        let mut packed = packed_rhs_reuse::PackedRhs::default();
        for step in &mut steps {
            let operand = |n: &u32| &operands[*n as usize];
            match (step.kernel.packed_rhs, step.srcs.get(1)) {
                (Some(packing), Some(Some(b))) => {
                    step.rhs_is_packed = packed.after_product(packing, operand(&step.dst), operand(b));
                }
                _ => packed.after_other(
                    step.kernel.shared > 0 || step.awaits.is_some(),
                    step.srcs.iter().flatten().chain([&step.dst]).map(operand),
                ),
            }
        }
        let known_versions = Mutex::new(vec![None; graph.slot_sizes().len()]);
        let requirements = uses.requirements();
        groups.sort_unstable();
        groups.dedup();
        let program =
            CpuProgram { steps, operands, floats, shared, cost, requirements, groups, written, known_versions };
        program.scratch(workers)?;
        Ok(program)
    }

    /// The numbers of the groups that a queue must have joined to run the program.
    pub(super) fn groups(&self) -> &[u32] {
        &self.groups
    }

    /// The group for which a run waits before it goes on at a position: it must not begin there before all ranks have published.
    pub(super) fn awaited_group(&self, position: RunPosition) -> Option<u32> {
        self.steps.get(position.step)?.awaits
    }

    /// Whether a run takes about a millisecond at most, and no workers.
    pub(super) fn is_small(&self) -> bool {
        self.cost < SMALL_PROGRAM_COST
    }

    /// Scratch in bytes: the parts of `workers` workers together, and the shared part. A run may have another number of
    /// workers than the pool had when the program was compiled.
    pub(super) fn scratch(&self, workers: usize) -> Result<(usize, usize), DeviceError> {
        let too_much =
            || Unsupported { op: OpCode::None, reason: "its scratch memory exceeds the address space".to_owned() };
        let locals = LocalScratch::bytes(workers, self.floats).ok_or_else(too_much)?;
        locals.checked_add(self.shared).filter(|&n| n < 1 << 62).ok_or_else(too_much)?;
        Ok((locals, self.shared))
    }

    /// Whether the program can write to the memories of these bindings, one for each slot.
    pub(super) fn check_bindings(&self, bindings: &[Region]) -> Result<(), DeviceError> {
        let written = bindings.iter().zip(&self.written).filter(|(_, written)| !written.is_empty());
        written.map(|(region, _)| CpuMemory::writable(region)).try_for_each(|memory| memory.map(drop))
    }

    /// Prefaults the memory that the nodes write, where it is new, until `abort` is set. The thread that submits a run calls this,
    /// outside of turns: the system takes milliseconds for a huge page, so a claim that writes one element to each of a thousand
    /// pages would keep the device for seconds.
    pub(super) fn populate(&self, bindings: &[Region], abort: &AtomicBool) {
        for (region, written) in bindings.iter().zip(&self.written) {
            let Some(memory) = region.buffer().memory::<CpuMemory>() else { continue };
            let start = region.offset() as usize;
            for range in written {
                memory.pages().populate_new_blocks(start + range.start..start + range.end, abort);
            }
        }
    }

    /// Runs the steps from a position on, in order, within `limits`. Returns the position to continue at; `None` if all steps
    /// have run. The run that continues needs the same shared scratch, with the content that this run leaves.
    ///
    /// A run also ends at a collective for which other ranks are missing: then [`CpuProgram::awaited_group`] of the returned
    /// position is the collective's group.
    pub(super) fn run(
        &self,
        pool: &Pool,
        bindings: &[Region],
        resources: RunResources<'_>,
        position: RunPosition,
        limits: RunLimits<'_>,
    ) -> Result<Option<RunPosition>, DeviceError> {
        let RunResources { scratch, groups, abort } = resources;
        let Some(bound) = self.bind(pool, bindings, limits.locking)? else { return Ok(Some(position)) };
        if position == RunPosition::default() {
            for (requirements, &(guard, base)) in self.requirements.iter().zip(&bound.slots) {
                bound.guards[guard].count_run(requirements, base);
            }
        }
        let team = Team::new(abort, limits.pause);
        let locals = LocalScratch::new(scratch.0, self.floats);
        let run = RunState {
            begins_at: position,
            paused_by_leader: AtomicBool::new(false),
            polls_at_first_collective: limits.polls_at_first_collective,
            shared: SharedScratch::new(scratch.1),
            bound: &bound,
            groups,
        };
        let paused_at = AtomicUsize::new(self.steps.len());
        pool.run_team(!self.is_small(), &team, &locals, position.step, &|member, first, local| {
            if let Some(step) = self.run_steps(member, first, local, &run)
                && member.is_leader()
            {
                paused_at.store(step, Ordering::Relaxed);
            }
        });
        if let Some(failure) = team.failure() {
            return Err(failure);
        }
        let next = paused_at.into_inner();
        // An interrupted step is the last one that ran.
        let last = next.saturating_sub(1);
        let began = if last == position.step { position.progress } else { StepProgress::default() };
        if let Some(progress) = team.interrupted_step(began) {
            return Ok(Some(RunPosition { step: last, progress }));
        }
        let next = RunPosition { step: next, progress: StepProgress::default() };
        Ok((next.step < self.steps.len()).then_some(next))
    }

    /// Locks each bound memory once, in lock order, with the layouts that the steps need. `None`: see [`Locking`].
    fn bind<'a>(
        &self,
        pool: &Pool,
        bindings: &'a [Region],
        locking: Locking<'_>,
    ) -> Result<Option<BoundMemories<'a>>, DeviceError> {
        let mut regions = Vec::with_capacity(bindings.len());
        for (slot, region) in bindings.iter().enumerate().take(self.requirements.len()) {
            let memory = region.buffer().memory::<CpuMemory>();
            let memory = memory.ok_or(DeviceError::Misuse("a binding lies on another device"))?;
            regions.push((memory, slot, region.offset() as usize));
        }
        regions.sort_unstable_by(|a, b| lock_order(a.0, b.0));
        let mut bound = BoundMemories { guards: Vec::new(), slots: vec![(0, 0); regions.len()] };
        for same_memory in regions.chunk_by(|a, b| std::ptr::eq(a.0, b.0)) {
            // The mutex is released before any other lock is waited for.
            let known_version = |&(_, slot, base): &(_, usize, usize)| {
                lock(&self.known_versions)[slot].and_then(|(at, version)| (at == base).then_some(version))
            };
            let version =
                known_version(&same_memory[0]).filter(|v| same_memory.iter().all(|r| known_version(r) == Some(*v)));
            let requirements = same_memory.iter().map(|&(_, slot, base)| (&self.requirements[slot], base));
            let guard = same_memory[0].0.lock_layout(requirements, version, pool, locking)?;
            let Some(guard) = guard else { return Ok(None) };
            for &(_, slot, base) in same_memory {
                if let Some(now) = guard.version().filter(|&now| version != Some(now)) {
                    lock(&self.known_versions)[slot] = Some((base, now));
                }
                bound.slots[slot] = (bound.guards.len(), base);
            }
            bound.guards.push(guard);
        }
        Ok(Some(bound))
    }

    /// The steps of one team member from `first` on. Returns the step at which the run pauses; `None` at the end.
    fn run_steps<'a>(
        &'a self,
        member: &Member<'a>,
        first: usize,
        local: &mut [f32],
        run: &'a RunState<'a>,
    ) -> Option<usize> {
        let mut shared_before = false;
        // The leader's: the cost of its serial steps since the last check, and the step before which it has paused. It then
        // skips the steps up to the next barrier, at which all members end the run.
        let (mut unchecked, mut paused_before) = (0usize, None);
        let mut polls = run.polls_at_first_collective;
        for (at, step) in self.steps.iter().enumerate().skip(first) {
            let serial = step.kernel.runs_serially();
            // Between two steps that the leader runs serially no barrier is needed. A worker that joins has already passed the
            // barrier of its first step.
            let passed_by_join = at == first && !member.is_leader();
            let is_first = at == run.begins_at.step;
            if let Some(group) = step.awaits.filter(|_| member.is_leader() && paused_before.is_none()) {
                // The caller has checked the first step, to which no run comes back before all ranks have published.
                if !is_first && !run.all_published(member, group, polls) {
                    paused_before = Some(at);
                    run.paused_by_leader.store(true, Ordering::Relaxed);
                }
                polls = true;
            }
            // The first step of a run begins in any case, so that each turn of the device makes progress.
            let pause = || run.paused_by_leader.load(Ordering::Relaxed) || (member.pause_is_due() && !is_first);
            if (!serial || shared_before) && !passed_by_join && !member.step_barrier(at, pause) {
                return Some(paused_before.unwrap_or(at));
            }
            shared_before = !serial;
            if serial {
                unchecked = unchecked.saturating_add(step.kernel.cost);
                if member.is_leader() && unchecked > PAUSE_CHECK_COST && paused_before.is_none() {
                    unchecked = 0;
                    paused_before = (member.pause_is_due() && !is_first).then_some(at);
                    run.paused_by_leader.store(paused_before.is_some(), Ordering::Relaxed);
                }
                if !member.is_leader() || paused_before.is_some() {
                    continue;
                }
            }
            let first_step = is_first.then_some(run.begins_at.progress);
            let syncs = if serial || step.rhs_is_packed { 0 } else { step.kernel.syncs };
            let last = member.phase() + syncs;
            if !member.stopping() {
                // A panic of a kernel is a bug that an input triggered. It must fail this queue only, not the server.
                let run = AssertUnwindSafe(|| self.run_step(step, member, first_step, local, run));
                if let Err(panic) = catch_unwind(run) {
                    let text = panic.downcast_ref::<String>().map(String::as_str);
                    let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
                    member.fail(DeviceError::Bug(format!("the kernel of {} panicked: {text}", step.code)));
                }
            }
            // Every member passes the same number of barriers. A member that stopped early, or whose kernel panicked, passes
            // the rest here; otherwise the others would hang at the barrier.
            while member.phase() < last {
                member.sync();
            }
        }
        paused_before
    }

    /// An operand in the bound memories; `None` if it does not lie inside its binding.
    fn view<'a>(&'a self, number: u32, bound: &'a BoundMemories<'_>, access: LayoutAccess) -> Option<View<'a>> {
        let Operand { desc, place } = self.operands.get(number as usize)?;
        let &(guard, base) = bound.slots.get(place.slot as usize)?;
        bound.guards.get(guard)?.view(base.checked_add(place.offset)?, desc, access != LayoutAccess::Rows)
    }

    /// Runs a step's kernel on one member.
    fn run_step<'a>(
        &'a self,
        step: &'a KernelStep,
        member: &Member<'a>,
        first_step: Option<StepProgress>,
        local: &mut [f32],
        run: &'a RunState<'a>,
    ) {
        let bound = run.bound;
        let mut srcs = [None; MAX_SRC];
        for (i, (slot, operand)) in srcs.iter_mut().zip(&step.srcs).enumerate() {
            *slot = operand.and_then(|number| self.view(number, bound, step.kernel.access(i)));
        }
        let outside = DeviceError::Misuse("a binding is smaller than its slot");
        let Some(dst) = self.view(step.dst, bound, LayoutAccess::Rows) else { return member.fail(outside) };
        if step.srcs.iter().zip(&srcs).any(|(operand, view)| operand.is_some() && view.is_none()) {
            return member.fail(outside);
        }
        let local = &mut local[..step.kernel.local];
        step.kernel.run(&mut KernelContext {
            member,
            serial: step.kernel.runs_serially(),
            rhs_is_packed: step.rhs_is_packed,
            first_step,
            phase: Cell::new(0),
            dst,
            srcs: &srcs,
            local,
            shared: run.shared,
            groups: run.groups,
        });
    }
}

/// By slot: what the nodes write. By node, not by step: a fused step also writes the residual sum, which is one of its sources.
fn written_ranges(graph: &Graph) -> Vec<Vec<Range<usize>>> {
    let mut written = vec![Vec::new(); graph.slot_sizes().len()];
    for node in graph.nodes() {
        let updated = node.srcs.iter().enumerate().filter(|&(i, _)| node.op.updates(i)).filter_map(|(_, id)| *id);
        for tensor in updated.chain([node.dst]).filter_map(|id| graph.tensor(id)) {
            if let Some(place) = tensor.place
                && let Some(ranges) = written.get_mut(place.slot as usize)
            {
                ranges.push(place.offset..place.offset + tensor.desc.extent());
            }
        }
    }
    for ranges in &mut written {
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.dedup_by(|next, range| {
            let near = next.start < range.end + BLOCK;
            if near {
                range.end = range.end.max(next.end);
            }
            near
        });
        ranges.shrink_to_fit();
    }
    written
}

#[cfg(test)]
mod tests;

//! Planner: runs the passes, turns splits into steps on queues, and inserts the waits between queues.
//!
//! Steps follow the splits: for each split, first its new replicas, then the split itself. Waits follow from hazards: two steps
//! on different queues that access the same bytes, at least one of them writing, must keep their order. The later step waits
//! for the earlier step's mark. Wait elimination drops a wait when earlier waits of the queue already imply it. For this,
//! vector clocks track the completed steps that each queue is ordered after, over as many runs as it takes until the pattern
//! repeats.

use super::{
    ArenaKind, Devices, Options, Plan, PlanStep, QueueId, QueueRole, ReplicaOrigin, SchedError, SplitGraph, StepAction,
    StepWait, Task,
};
use super::{CopyPaths, Storage, assign, memory, split, verify};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

/// A memory that steps access.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum MemoryId {
    /// An arena buffer of a device. A ring buffer stands for the current run's copy.
    Arena { device: usize, kind: ArenaKind, buffer: u32 },
    /// A stored slot.
    Stored { slot: u32 },
}

/// Bytes of a memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct MemoryRange {
    pub(crate) memory: MemoryId,
    pub(crate) bytes: Range<u64>,
}

impl Plan {
    /// Plans a task: runs all passes. Allocates no device memory.
    ///
    /// # Errors
    /// [`SchedError`] for a task that these devices cannot run.
    pub fn new(task: Arc<Task>, devices: &Devices, options: &Options) -> Result<Plan, SchedError> {
        Plan::with_copy_paths(task, devices, &CopyPaths::new(devices), options)
    }

    /// As [`Plan::new`], with copy paths that were queried before.
    pub(super) fn with_copy_paths(
        task: Arc<Task>,
        devices: &Devices,
        copy_paths: &CopyPaths,
        options: &Options,
    ) -> Result<Plan, SchedError> {
        let depth = options.depth();
        let assigned = assign::assign(&task, devices, options)?;
        let split_graph = split::split(&task, &assigned);
        let layout = memory::place_tensors(&task, devices, copy_paths, &split_graph, depth)?;
        let (names, ids) = devices.iter().map(|device| (device.info().name.clone(), device.info().id)).unzip();
        let (queues, steps) = build_steps(&split_graph, copy_paths, depth);
        let mut plan = Plan {
            task,
            devices: names,
            device_ids: ids,
            copy_paths: copy_paths.clone(),
            assignments: assigned,
            split_graph,
            layout,
            queues,
            steps,
            marks: 0,
            depth,
        };
        insert_waits(&mut plan);
        if cfg!(debug_assertions) {
            verify::verify(&plan, devices).map_err(|fault| SchedError::InvalidPlan(fault.to_string()))?;
        }
        Ok(plan)
    }

    /// Where the nodes of a split access bytes of a slot: at home or in a replica. `None` if the split's device holds neither.
    pub(crate) fn locate(&self, split: usize, slot: u32, bytes: &Range<usize>) -> Option<MemoryRange> {
        let split = self.split_graph.splits.get(split)?;
        if self.home(slot) == Some(split.device) {
            return self.home_range(slot, bytes);
        }
        let holds = |&&number: &&u32| self.split_graph.replicas[number as usize].covers(slot, bytes);
        let number = *split.reads.iter().find(holds)?;
        let from = self.split_graph.replicas[number as usize].range.start;
        let whole = self.replica_range(number)?;
        let start = whole.bytes.start + (bytes.start - from) as u64;
        Some(MemoryRange { bytes: start..start + bytes.len() as u64, ..whole })
    }

    /// A slot's home: the device that holds its memory.
    pub(crate) fn home(&self, slot: u32) -> Option<usize> {
        self.split_graph.homes.get(slot as usize).copied().flatten()
    }

    /// Where bytes of a slot lie at its home.
    pub(crate) fn home_range(&self, slot: u32, bytes: &Range<usize>) -> Option<MemoryRange> {
        let (start, len) = (bytes.start as u64, bytes.len() as u64);
        if let Storage::Stored { .. } = self.task.storage().get(slot as usize)? {
            return Some(MemoryRange { memory: MemoryId::Stored { slot }, bytes: start..start + len });
        }
        let device = self.home(slot)?;
        let allocation = self.layout.slots.get(slot as usize).copied().flatten()?;
        let memory = MemoryId::Arena { device, kind: allocation.kind, buffer: allocation.buffer };
        let start = allocation.offset + start;
        Some(MemoryRange { memory, bytes: start..start + len })
    }

    /// Where a replica lies.
    pub(crate) fn replica_range(&self, number: u32) -> Option<MemoryRange> {
        let replica = self.split_graph.replicas.get(number as usize)?;
        let allocation = self.layout.replicas.get(number as usize)?;
        let memory = MemoryId::Arena { device: replica.device, kind: allocation.kind, buffer: allocation.buffer };
        Some(MemoryRange { memory, bytes: allocation.offset..allocation.offset + replica.range.len() as u64 })
    }
}

/// Builds the queues, and the steps in submission order, without waits.
fn build_steps(split_graph: &SplitGraph, copy_paths: &CopyPaths, depth: usize) -> (Vec<QueueId>, Vec<PlanStep>) {
    let mut queues: Vec<QueueId> = Vec::new();
    let mut queue = |device: usize, kind: QueueRole| {
        let kind = if depth == 1 { QueueRole::Compute } else { kind };
        let wanted = QueueId { device, role: kind };
        queues.iter().position(|queue| *queue == wanted).unwrap_or_else(|| {
            queues.push(wanted);
            queues.len() - 1
        })
    };
    let mut arriving: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    for (number, replica) in (0..).zip(&split_graph.replicas) {
        arriving.entry(replica.first_split).or_default().push(number);
    }
    // Copies of experts go last: another new replica of the split may hold the expert ids.
    let last = |replica: &u32| matches!(split_graph.replicas[*replica as usize].origin, ReplicaOrigin::Experts { .. });
    arriving.values_mut().for_each(|replicas| replicas.sort_by_key(last));
    let mut steps = Vec::new();
    for (number, split) in split_graph.splits.iter().enumerate() {
        let mut push = |queue, action| steps.push(PlanStep { queue, waits: Vec::new(), action, mark: None });
        for &replica in arriving.get(&number).map_or(&[][..], Vec::as_slice) {
            let device = split.device;
            match split_graph.replicas[replica as usize].origin {
                ReplicaOrigin::Host => push(queue(device, QueueRole::Transfer), StepAction::UploadInput(replica)),
                ReplicaOrigin::Device(home) if copy_paths.can_copy(device, home) => {
                    push(queue(device, QueueRole::Transfer), StepAction::DeviceCopy(replica));
                }
                ReplicaOrigin::Device(home) => {
                    push(queue(home, QueueRole::Compute), StepAction::Download(replica));
                    push(queue(device, QueueRole::Transfer), StepAction::UploadStaged(replica));
                }
                ReplicaOrigin::Experts { .. } => {
                    push(queue(device, QueueRole::Compute), StepAction::CopyExperts(replica))
                }
            }
        }
        push(queue(split.device, QueueRole::Compute), StepAction::RunSplit(number as u32));
    }
    (queues, steps)
}

/// The byte ranges that a step accesses, and whether it writes them: sorted, with adjacent ranges of the same kind merged.
fn accesses(plan: &Plan, step: &PlanStep) -> Vec<(MemoryRange, bool)> {
    let replica = |number: u32| plan.replica_range(number).map(|at| (at, true));
    let origin = |number: u32| {
        let replica = plan.split_graph.replicas.get(number as usize)?;
        plan.home_range(replica.slot, &replica.range).map(|at| (at, false))
    };
    let mut all: Vec<(MemoryRange, bool)> = Vec::new();
    match step.action {
        StepAction::UploadInput(number) | StepAction::UploadStaged(number) => all.extend(replica(number)),
        StepAction::Download(number) => all.extend(origin(number)),
        StepAction::DeviceCopy(number) => all.extend(replica(number).into_iter().chain(origin(number))),
        StepAction::CopyExperts(number) => {
            all.extend(replica(number).into_iter().chain(origin(number)));
            if let Some(at) = expert_ids_range(plan, number) {
                all.push((at, false));
            }
        }
        StepAction::RunSplit(split) => {
            let nodes = plan.split_graph.splits[split as usize].nodes.clone();
            for node in plan.task.graph().nodes().get(nodes).unwrap_or_default() {
                let read = plan.task.reads(node).map(|(_, slot, range)| (slot, range, false));
                let written = plan.task.write_range(node).map(|(slot, range)| (slot, range, true));
                for (slot, range, writes) in read.chain(written) {
                    all.extend(plan.locate(split as usize, slot, &range).map(|at| (at, writes)));
                }
            }
        }
    }
    all.retain(|(at, _)| !at.bytes.is_empty());
    all.sort_unstable_by_key(|(at, writes)| (at.memory, *writes, at.bytes.start));
    all.dedup_by(|next, last| {
        let joins = next.0.memory == last.0.memory && next.1 == last.1 && next.0.bytes.start <= last.0.bytes.end;
        if joins {
            last.0.bytes.end = last.0.bytes.end.max(next.0.bytes.end);
        }
        joins
    });
    all
}

/// Where the expert ids lie that select the bytes of a replica.
pub(crate) fn expert_ids_range(plan: &Plan, number: u32) -> Option<MemoryRange> {
    let replica = plan.split_graph.replicas.get(number as usize)?;
    let ReplicaOrigin::Experts { ids, .. } = replica.origin else { return None };
    let (slot, range) = plan.task.span(ids)?;
    plan.locate(replica.first_split, slot, &range)
}

/// A dependence on a step of another queue.
#[derive(Clone, Copy)]
struct Hazard {
    /// The step that must complete first.
    earlier: usize,
    /// Its run, counted back from the dependent step's run.
    ago: u32,
}

/// By step: the steps of other queues that must complete before it (read after write, write after read, write after write).
fn hazards(plan: &Plan) -> Vec<Vec<Hazard>> {
    let mut by_memory: HashMap<MemoryId, Vec<(Range<u64>, bool, usize)>> = HashMap::new();
    for (number, step) in plan.steps.iter().enumerate() {
        for (at, writes) in accesses(plan, step) {
            by_memory.entry(at.memory).or_default().push((at.bytes, writes, number));
        }
    }
    let mut found = vec![Vec::new(); plan.steps.len()];
    for (memory, mut accesses_by_start) in by_memory {
        let ring = matches!(memory, MemoryId::Arena { kind: ArenaKind::Ring, .. });
        let reuse_distance = if ring { plan.depth as u32 } else { 1 };
        accesses_by_start.sort_unstable_by_key(|(bytes, ..)| bytes.start);
        for (at, (bytes, writes, a)) in accesses_by_start.iter().enumerate() {
            let overlapping = accesses_by_start[at + 1..].iter().take_while(|(other, ..)| other.start < bytes.end);
            for (_, _, b) in overlapping.filter(|(_, too, _)| *writes || *too) {
                if plan.steps[*a].queue != plan.steps[*b].queue {
                    let (first, second) = (*a.min(b), *a.max(b));
                    found[second].push(Hazard { earlier: first, ago: 0 });
                    // Across runs: when the memory is reused, the first step must not start before the second step has
                    // completed.
                    found[first].push(Hazard { earlier: second, ago: reuse_distance });
                }
            }
        }
    }
    found
}

/// By queue: how many of its steps have completed, counted over all runs.
type VectorClock = Vec<usize>;

/// Wait insertion with wait elimination: gives the steps their waits and marks.
///
/// The loop simulates several runs. For each step it keeps the latest hazard with each queue, unless the clock of the step's
/// queue already covers it, and drops a hazard that another kept hazard implies. The plan gets the waits of the last simulated
/// run.
fn insert_waits(plan: &mut Plan) {
    let hazards = hazards(plan);
    let queue_count = plan.queues.len();
    // By queue: how many steps it has in a run. By step: its position on its queue.
    let mut lengths = vec![0; queue_count];
    let positions: Vec<usize> = plan
        .steps
        .iter()
        .map(|step| {
            lengths[step.queue] += 1;
            lengths[step.queue] - 1
        })
        .collect();
    let downloads: HashMap<u32, usize> = (0..)
        .zip(&plan.steps)
        .filter_map(|(number, step)| match step.action {
            StepAction::Download(replica) => Some((replica, number)),
            _ => None,
        })
        .collect();
    let runs = 2 * plan.depth + 3;
    let mut clocks: Vec<VectorClock> = vec![vec![0; queue_count]; queue_count];
    // By run and step: the clock of its queue after the step.
    let mut passed: Vec<Vec<VectorClock>> = Vec::with_capacity(runs);
    let mut waits: Vec<Vec<Hazard>> = Vec::new();
    for run in 0..runs {
        passed.push(Vec::with_capacity(plan.steps.len()));
        waits = vec![Vec::new(); plan.steps.len()];
        for (number, step) in plan.steps.iter().enumerate() {
            let count = |hazard: &Hazard| {
                let of = run.checked_sub(hazard.ago as usize)?;
                Some(of * lengths[plan.steps[hazard.earlier].queue] + positions[hazard.earlier] + 1)
            };
            let after = |hazard: &Hazard| &passed[run - hazard.ago as usize][hazard.earlier];
            if let StepAction::UploadStaged(replica) = step.action {
                let download = Hazard { earlier: downloads[&replica], ago: 0 };
                merge_clock(&mut clocks[step.queue], after(&download));
            }
            // By queue: its latest hazard that the clock does not cover.
            let mut latest: BTreeMap<usize, (usize, Hazard)> = BTreeMap::new();
            for hazard in &hazards[number] {
                let Some(count) = count(hazard) else { continue };
                let queue = plan.steps[hazard.earlier].queue;
                if clocks[step.queue][queue] < count && latest.get(&queue).is_none_or(|(best, _)| *best < count) {
                    latest.insert(queue, (count, *hazard));
                }
            }
            let implied = |queue: usize, count: usize| {
                latest.iter().any(|(&other, (_, hazard))| other != queue && after(hazard)[queue] >= count)
            };
            waits[number] =
                latest.iter().filter(|&(&queue, &(count, _))| !implied(queue, count)).map(|(_, (_, h))| *h).collect();
            for hazard in &waits[number] {
                merge_clock(&mut clocks[step.queue], after(hazard));
            }
            clocks[step.queue][step.queue] = run * lengths[step.queue] + positions[number] + 1;
            passed[run].push(clocks[step.queue].clone());
        }
    }
    let mut marked = vec![false; plan.steps.len()];
    waits.iter().flatten().for_each(|wait| marked[wait.earlier] = true);
    for (number, step) in plan.steps.iter().enumerate() {
        marked[number] |= positions[number] + 1 == lengths[step.queue];
    }
    for (step, marked) in plan.steps.iter_mut().zip(&marked) {
        step.mark = marked.then_some(plan.marks);
        plan.marks += u32::from(*marked);
    }
    let marks: Vec<Option<u32>> = plan.steps.iter().map(|step| step.mark).collect();
    for (step, waits) in plan.steps.iter_mut().zip(waits) {
        let wait = |h: Hazard| marks[h.earlier].map(|mark| StepWait { mark, runs_ago: h.ago });
        step.waits = waits.into_iter().filter_map(wait).collect();
    }
}

fn merge_clock(clock: &mut VectorClock, more: &VectorClock) {
    clock.iter_mut().zip(more).for_each(|(count, more)| *count = (*count).max(*more));
}

//! Steps on lanes, and what they wait for.
//!
//! Steps come from the splits, one after another: what a split needs from elsewhere, then the split. Waits come from what
//! steps touch: two steps of different lanes that touch the same bytes, one of them writing, must not swap. The later one
//! waits for the earlier one's mark, unless its lane knows already that it has passed: what lanes know is followed through
//! several runs, by vector clocks, until it repeats.

use super::{
    ArenaKind, Devices, Options, Plan, PlanStep, QueueId, QueueRole, ReplicaOrigin, SchedError, SplitGraph, StepAction,
    StepWait, Task,
};
use super::{CopyPaths, Storage, assign, memory, split, verify};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

/// A memory that steps touch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum MemoryId {
    /// A buffer of a device's room; of a ring, the present run's copy of it.
    Arena { device: usize, area: ArenaKind, chunk: u32 },
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
    /// Plans a task: all passes, one after another. Touches no device's memory.
    ///
    /// # Errors
    /// [`SchedError`] for a task that these devices cannot run.
    pub fn new(task: Arc<Task>, devices: &Devices, options: &Options) -> Result<Plan, SchedError> {
        Plan::with_copy_paths(task, devices, &CopyPaths::new(devices), options)
    }

    /// As [`Plan::new`], where it is known which devices copy from which.
    pub(super) fn with_copy_paths(
        task: Arc<Task>,
        devices: &Devices,
        reach: &CopyPaths,
        options: &Options,
    ) -> Result<Plan, SchedError> {
        let depth = options.depth();
        let assigned = assign::assign(&task, devices, options)?;
        let cut = split::split(&task, &assigned);
        let layout = memory::place_tensors(&task, devices, reach, &cut, depth)?;
        let (names, ids) = devices.iter().map(|device| (device.info().name.clone(), device.info().id)).unzip();
        let (lanes, steps) = build_steps(&cut, reach, depth);
        let reach = reach.clone();
        let mut plan = Plan {
            task,
            devices: names,
            device_ids: ids,
            copy_paths: reach,
            assignments: assigned,
            split_graph: cut,
            layout,
            queues: lanes,
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

    /// Where bytes of a slot lie for the nodes of a split; `None` where they do not lie on its device.
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

    /// The device whose memory holds a slot.
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
        let spot = self.layout.slots.get(slot as usize).copied().flatten()?;
        let memory = MemoryId::Arena { device, area: spot.kind, chunk: spot.buffer };
        let start = spot.offset + start;
        Some(MemoryRange { memory, bytes: start..start + len })
    }

    /// Where a replica lies.
    pub(crate) fn replica_range(&self, number: u32) -> Option<MemoryRange> {
        let replica = self.split_graph.replicas.get(number as usize)?;
        let spot = self.layout.replicas.get(number as usize)?;
        let memory = MemoryId::Arena { device: replica.device, area: spot.kind, chunk: spot.buffer };
        Some(MemoryRange { memory, bytes: spot.offset..spot.offset + replica.range.len() as u64 })
    }
}

/// The lanes, and the steps in the order they are submitted, without waits.
fn build_steps(cut: &SplitGraph, reach: &CopyPaths, depth: usize) -> (Vec<QueueId>, Vec<PlanStep>) {
    let mut lanes: Vec<QueueId> = Vec::new();
    let mut lane = |device: usize, kind: QueueRole| {
        let kind = if depth == 1 { QueueRole::Compute } else { kind };
        let wanted = QueueId { device, role: kind };
        lanes.iter().position(|lane| *lane == wanted).unwrap_or_else(|| {
            lanes.push(wanted);
            lanes.len() - 1
        })
    };
    let mut arriving: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    for (number, replica) in (0..).zip(&cut.replicas) {
        arriving.entry(replica.first_split).or_default().push(number);
    }
    // The numbers of the experts may be among what arrives.
    let last = |replica: &u32| matches!(cut.replicas[*replica as usize].origin, ReplicaOrigin::Experts { .. });
    arriving.values_mut().for_each(|replicas| replicas.sort_by_key(last));
    let mut steps = Vec::new();
    for (number, split) in cut.splits.iter().enumerate() {
        let mut push = |lane, work| steps.push(PlanStep { queue: lane, waits: Vec::new(), action: work, mark: None });
        for &replica in arriving.get(&number).map_or(&[][..], Vec::as_slice) {
            let device = split.device;
            match cut.replicas[replica as usize].origin {
                ReplicaOrigin::Host => push(lane(device, QueueRole::Transfer), StepAction::UploadInput(replica)),
                ReplicaOrigin::Device(home) if reach.can_copy(device, home) => {
                    push(lane(device, QueueRole::Transfer), StepAction::DeviceCopy(replica));
                }
                ReplicaOrigin::Device(home) => {
                    push(lane(home, QueueRole::Compute), StepAction::Download(replica));
                    push(lane(device, QueueRole::Transfer), StepAction::UploadStaged(replica));
                }
                ReplicaOrigin::Experts { .. } => {
                    push(lane(device, QueueRole::Compute), StepAction::CopyExperts(replica))
                }
            }
        }
        push(lane(split.device, QueueRole::Compute), StepAction::RunSplit(number as u32));
    }
    (lanes, steps)
}

/// What a step touches: bytes, and whether it writes them; sorted, and merged where they are alike.
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

/// Where the numbers of the experts lie that a replica is to hold.
pub(crate) fn expert_ids_range(plan: &Plan, number: u32) -> Option<MemoryRange> {
    let replica = plan.split_graph.replicas.get(number as usize)?;
    let ReplicaOrigin::Experts { ids, .. } = replica.origin else { return None };
    let (slot, range) = plan.task.span(ids)?;
    plan.locate(replica.first_split, slot, &range)
}

/// A step that must not run before another one has.
#[derive(Clone, Copy)]
struct Hazard {
    earlier: usize,
    /// How many runs ago.
    ago: u32,
}

/// For each step, the steps of other lanes that it must not overtake.
fn hazards(plan: &Plan) -> Vec<Vec<Hazard>> {
    let mut by_memory: HashMap<MemoryId, Vec<(Range<u64>, bool, usize)>> = HashMap::new();
    for (number, step) in plan.steps.iter().enumerate() {
        for (at, writes) in accesses(plan, step) {
            by_memory.entry(at.memory).or_default().push((at.bytes, writes, number));
        }
    }
    let mut found = vec![Vec::new(); plan.steps.len()];
    for (memory, mut touches) in by_memory {
        let ring = matches!(memory, MemoryId::Arena { area: ArenaKind::Ring, .. });
        let around = if ring { plan.depth as u32 } else { 1 };
        touches.sort_unstable_by_key(|(bytes, ..)| bytes.start);
        for (at, (bytes, writes, a)) in touches.iter().enumerate() {
            let overlapping = touches[at + 1..].iter().take_while(|(other, ..)| other.start < bytes.end);
            for (_, _, b) in overlapping.filter(|(_, too, _)| *writes || *too) {
                if plan.steps[*a].queue != plan.steps[*b].queue {
                    let (first, second) = (*a.min(b), *a.max(b));
                    found[second].push(Hazard { earlier: first, ago: 0 });
                    // Around the corner: the first of the next run after the second of this one.
                    found[first].push(Hazard { earlier: second, ago: around });
                }
            }
        }
    }
    found
}

/// What is known about the lanes: how many steps of each have been passed, counted over all runs.
type VectorClock = Vec<usize>;

/// Gives the steps their waits and marks.
fn insert_waits(plan: &mut Plan) {
    let hazards = hazards(plan);
    let lanes = plan.queues.len();
    // By step: its place on its lane; by lane: how many steps it has.
    let mut lengths = vec![0; lanes];
    let places: Vec<usize> = plan
        .steps
        .iter()
        .map(|step| {
            lengths[step.queue] += 1;
            lengths[step.queue] - 1
        })
        .collect();
    let fetches: HashMap<u32, usize> = (0..)
        .zip(&plan.steps)
        .filter_map(|(number, step)| match step.action {
            StepAction::Download(replica) => Some((replica, number)),
            _ => None,
        })
        .collect();
    let runs = 2 * plan.depth + 3;
    let mut known: Vec<VectorClock> = vec![vec![0; lanes]; lanes];
    // By run and step: what its lane knew when it had passed.
    let mut passed: Vec<Vec<VectorClock>> = Vec::with_capacity(runs);
    let mut waits: Vec<Vec<Hazard>> = Vec::new();
    for run in 0..runs {
        passed.push(Vec::with_capacity(plan.steps.len()));
        waits = vec![Vec::new(); plan.steps.len()];
        for (number, step) in plan.steps.iter().enumerate() {
            let count = |hazard: &Hazard| {
                let of = run.checked_sub(hazard.ago as usize)?;
                Some(of * lengths[plan.steps[hazard.earlier].queue] + places[hazard.earlier] + 1)
            };
            let after = |hazard: &Hazard| &passed[run - hazard.ago as usize][hazard.earlier];
            if let StepAction::UploadStaged(replica) = step.action {
                let fetch = Hazard { earlier: fetches[&replica], ago: 0 };
                merge_clock(&mut known[step.queue], after(&fetch));
            }
            // The latest of each lane, as far as it is news.
            let mut news: BTreeMap<usize, (usize, Hazard)> = BTreeMap::new();
            for hazard in &hazards[number] {
                let Some(count) = count(hazard) else { continue };
                let lane = plan.steps[hazard.earlier].queue;
                if known[step.queue][lane] < count && news.get(&lane).is_none_or(|(best, _)| *best < count) {
                    news.insert(lane, (count, *hazard));
                }
            }
            let told = |lane: usize, count: usize| {
                news.iter().any(|(&other, (_, hazard))| other != lane && after(hazard)[lane] >= count)
            };
            waits[number] =
                news.iter().filter(|&(&lane, &(count, _))| !told(lane, count)).map(|(_, (_, h))| *h).collect();
            for hazard in &waits[number] {
                merge_clock(&mut known[step.queue], after(hazard));
            }
            known[step.queue][step.queue] = run * lengths[step.queue] + places[number] + 1;
            passed[run].push(known[step.queue].clone());
        }
    }
    let mut marked = vec![false; plan.steps.len()];
    waits.iter().flatten().for_each(|wait| marked[wait.earlier] = true);
    for (number, step) in plan.steps.iter().enumerate() {
        marked[number] |= places[number] + 1 == lengths[step.queue];
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

fn merge_clock(known: &mut VectorClock, more: &VectorClock) {
    known.iter_mut().zip(more).for_each(|(known, more)| *known = (*known).max(*more));
}

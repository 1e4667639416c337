//! Steps on lanes, and what they wait for.
//!
//! Steps come from the splits, one after another: what a split needs from elsewhere, then the split. Waits come from what
//! steps touch: two steps of different lanes that touch the same bytes, one of them writing, must not swap. The later one
//! waits for the earlier one's mark, unless its lane knows already that it has passed: what lanes know is followed through
//! several runs, by vector clocks, until it repeats.

use super::{Area, Cut, Devices, Lane, LaneKind, Options, Origin, Plan, SchedError, Step, Task, Wait, Work};
use super::{Reach, Storage, assign, memory, split, verify};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

/// A memory that steps touch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Memory {
    /// A buffer of a device's room; of a ring, the present run's copy of it.
    Room { device: usize, area: Area, chunk: u32 },
    /// A stored slot.
    Stored { slot: u32 },
}

/// Bytes of a memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Located {
    pub(crate) memory: Memory,
    pub(crate) bytes: Range<u64>,
}

impl Plan {
    /// Plans a task: all passes, one after another. Touches no device's memory.
    ///
    /// # Errors
    /// [`SchedError`] for a task that these devices cannot run.
    pub fn new(task: Arc<Task>, devices: &Devices, options: &Options) -> Result<Plan, SchedError> {
        Plan::over(task, devices, &Reach::new(devices), options)
    }

    /// As [`Plan::new`], where it is known which devices copy from which.
    pub(super) fn over(
        task: Arc<Task>,
        devices: &Devices,
        reach: &Reach,
        options: &Options,
    ) -> Result<Plan, SchedError> {
        let depth = options.depth();
        let assigned = assign::assign(&task, devices, options)?;
        let cut = split::split(&task, &assigned);
        let layout = memory::place(&task, devices, reach, &cut, depth)?;
        let (names, ids) = devices.iter().map(|device| (device.info().name.clone(), device.info().id)).unzip();
        let (lanes, steps) = steps(&cut, reach, depth);
        let reach = reach.clone();
        let mut plan = Plan { task, devices: names, ids, reach, assigned, cut, layout, lanes, steps, marks: 0, depth };
        order(&mut plan);
        if cfg!(debug_assertions) {
            verify::verify(&plan, devices).map_err(|fault| SchedError::Unsound(fault.to_string()))?;
        }
        Ok(plan)
    }

    /// Where bytes of a slot lie for the nodes of a split; `None` where they do not lie on its device.
    pub(crate) fn locate(&self, split: usize, slot: u32, bytes: &Range<usize>) -> Option<Located> {
        let split = self.cut.splits.get(split)?;
        if self.home(slot) == Some(split.device) {
            return self.at_home(slot, bytes);
        }
        let holds = |&&number: &&u32| self.cut.replicas[number as usize].holds(slot, bytes);
        let number = *split.reads.iter().find(holds)?;
        let from = self.cut.replicas[number as usize].range.start;
        let whole = self.of_replica(number)?;
        let start = whole.bytes.start + (bytes.start - from) as u64;
        Some(Located { bytes: start..start + bytes.len() as u64, ..whole })
    }

    /// The device whose memory holds a slot.
    pub(crate) fn home(&self, slot: u32) -> Option<usize> {
        self.cut.homes.get(slot as usize).copied().flatten()
    }

    /// Where bytes of a slot lie at its home.
    pub(crate) fn at_home(&self, slot: u32, bytes: &Range<usize>) -> Option<Located> {
        let (start, len) = (bytes.start as u64, bytes.len() as u64);
        if let Storage::Stored { .. } = self.task.storage().get(slot as usize)? {
            return Some(Located { memory: Memory::Stored { slot }, bytes: start..start + len });
        }
        let device = self.home(slot)?;
        let spot = self.layout.slots.get(slot as usize).copied().flatten()?;
        let memory = Memory::Room { device, area: spot.area, chunk: spot.chunk };
        let start = spot.offset + start;
        Some(Located { memory, bytes: start..start + len })
    }

    /// Where a replica lies.
    pub(crate) fn of_replica(&self, number: u32) -> Option<Located> {
        let replica = self.cut.replicas.get(number as usize)?;
        let spot = self.layout.replicas.get(number as usize)?;
        let memory = Memory::Room { device: replica.device, area: spot.area, chunk: spot.chunk };
        Some(Located { memory, bytes: spot.offset..spot.offset + replica.range.len() as u64 })
    }
}

/// The lanes, and the steps in the order they are submitted, without waits.
fn steps(cut: &Cut, reach: &Reach, depth: usize) -> (Vec<Lane>, Vec<Step>) {
    let mut lanes: Vec<Lane> = Vec::new();
    let mut lane = |device: usize, kind: LaneKind| {
        let kind = if depth == 1 { LaneKind::Compute } else { kind };
        let wanted = Lane { device, kind };
        lanes.iter().position(|lane| *lane == wanted).unwrap_or_else(|| {
            lanes.push(wanted);
            lanes.len() - 1
        })
    };
    let mut arriving: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    for (number, replica) in (0..).zip(&cut.replicas) {
        arriving.entry(replica.split).or_default().push(number);
    }
    // The numbers of the experts may be among what arrives.
    let last = |replica: &u32| matches!(cut.replicas[*replica as usize].origin, Origin::Experts { .. });
    arriving.values_mut().for_each(|replicas| replicas.sort_by_key(last));
    let mut steps = Vec::new();
    for (number, split) in cut.splits.iter().enumerate() {
        let mut push = |lane, work| steps.push(Step { lane, waits: Vec::new(), work, mark: None });
        for &replica in arriving.get(&number).map_or(&[][..], Vec::as_slice) {
            let device = split.device;
            match cut.replicas[replica as usize].origin {
                Origin::Host => push(lane(device, LaneKind::Bring), Work::Upload(replica)),
                Origin::Device(home) if reach.copies(device, home) => {
                    push(lane(device, LaneKind::Bring), Work::Copy(replica));
                }
                Origin::Device(home) => {
                    push(lane(home, LaneKind::Compute), Work::Fetch(replica));
                    push(lane(device, LaneKind::Bring), Work::Deliver(replica));
                }
                Origin::Experts { .. } => push(lane(device, LaneKind::Compute), Work::Experts(replica)),
            }
        }
        push(lane(split.device, LaneKind::Compute), Work::Run(number as u32));
    }
    (lanes, steps)
}

/// What a step touches: bytes, and whether it writes them; sorted, and merged where they are alike.
fn touched(plan: &Plan, step: &Step) -> Vec<(Located, bool)> {
    let replica = |number: u32| plan.of_replica(number).map(|at| (at, true));
    let origin = |number: u32| {
        let replica = plan.cut.replicas.get(number as usize)?;
        plan.at_home(replica.slot, &replica.range).map(|at| (at, false))
    };
    let mut all: Vec<(Located, bool)> = Vec::new();
    match step.work {
        Work::Upload(number) | Work::Deliver(number) => all.extend(replica(number)),
        Work::Fetch(number) => all.extend(origin(number)),
        Work::Copy(number) => all.extend(replica(number).into_iter().chain(origin(number))),
        Work::Experts(number) => {
            all.extend(replica(number).into_iter().chain(origin(number)));
            if let Some(at) = experts(plan, number) {
                all.push((at, false));
            }
        }
        Work::Run(split) => {
            let nodes = plan.cut.splits[split as usize].nodes.clone();
            for node in plan.task.graph().nodes().get(nodes).unwrap_or_default() {
                let read = plan.task.reads(node).map(|(_, slot, range)| (slot, range, false));
                let written = plan.task.written(node).map(|(slot, range)| (slot, range, true));
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
pub(crate) fn experts(plan: &Plan, number: u32) -> Option<Located> {
    let replica = plan.cut.replicas.get(number as usize)?;
    let Origin::Experts { ids, .. } = replica.origin else { return None };
    let (slot, range) = plan.task.span(ids)?;
    plan.locate(replica.split, slot, &range)
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
    let mut by_memory: HashMap<Memory, Vec<(Range<u64>, bool, usize)>> = HashMap::new();
    for (number, step) in plan.steps.iter().enumerate() {
        for (at, writes) in touched(plan, step) {
            by_memory.entry(at.memory).or_default().push((at.bytes, writes, number));
        }
    }
    let mut found = vec![Vec::new(); plan.steps.len()];
    for (memory, mut touches) in by_memory {
        let ring = matches!(memory, Memory::Room { area: Area::Ring, .. });
        let around = if ring { plan.depth as u32 } else { 1 };
        touches.sort_unstable_by_key(|(bytes, ..)| bytes.start);
        for (at, (bytes, writes, a)) in touches.iter().enumerate() {
            let overlapping = touches[at + 1..].iter().take_while(|(other, ..)| other.start < bytes.end);
            for (_, _, b) in overlapping.filter(|(_, too, _)| *writes || *too) {
                if plan.steps[*a].lane != plan.steps[*b].lane {
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
type Clock = Vec<usize>;

/// Gives the steps their waits and marks.
fn order(plan: &mut Plan) {
    let hazards = hazards(plan);
    let lanes = plan.lanes.len();
    // By step: its place on its lane; by lane: how many steps it has.
    let mut lengths = vec![0; lanes];
    let places: Vec<usize> = plan
        .steps
        .iter()
        .map(|step| {
            lengths[step.lane] += 1;
            lengths[step.lane] - 1
        })
        .collect();
    let fetches: HashMap<u32, usize> = (0..)
        .zip(&plan.steps)
        .filter_map(|(number, step)| match step.work {
            Work::Fetch(replica) => Some((replica, number)),
            _ => None,
        })
        .collect();
    let runs = 2 * plan.depth + 3;
    let mut known: Vec<Clock> = vec![vec![0; lanes]; lanes];
    // By run and step: what its lane knew when it had passed.
    let mut passed: Vec<Vec<Clock>> = Vec::with_capacity(runs);
    let mut waits: Vec<Vec<Hazard>> = Vec::new();
    for run in 0..runs {
        passed.push(Vec::with_capacity(plan.steps.len()));
        waits = vec![Vec::new(); plan.steps.len()];
        for (number, step) in plan.steps.iter().enumerate() {
            let count = |hazard: &Hazard| {
                let of = run.checked_sub(hazard.ago as usize)?;
                Some(of * lengths[plan.steps[hazard.earlier].lane] + places[hazard.earlier] + 1)
            };
            let after = |hazard: &Hazard| &passed[run - hazard.ago as usize][hazard.earlier];
            if let Work::Deliver(replica) = step.work {
                let fetch = Hazard { earlier: fetches[&replica], ago: 0 };
                learn(&mut known[step.lane], after(&fetch));
            }
            // The latest of each lane, as far as it is news.
            let mut news: BTreeMap<usize, (usize, Hazard)> = BTreeMap::new();
            for hazard in &hazards[number] {
                let Some(count) = count(hazard) else { continue };
                let lane = plan.steps[hazard.earlier].lane;
                if known[step.lane][lane] < count && news.get(&lane).is_none_or(|(best, _)| *best < count) {
                    news.insert(lane, (count, *hazard));
                }
            }
            let told = |lane: usize, count: usize| {
                news.iter().any(|(&other, (_, hazard))| other != lane && after(hazard)[lane] >= count)
            };
            waits[number] =
                news.iter().filter(|&(&lane, &(count, _))| !told(lane, count)).map(|(_, (_, h))| *h).collect();
            for hazard in &waits[number] {
                learn(&mut known[step.lane], after(hazard));
            }
            known[step.lane][step.lane] = run * lengths[step.lane] + places[number] + 1;
            passed[run].push(known[step.lane].clone());
        }
    }
    let mut marked = vec![false; plan.steps.len()];
    waits.iter().flatten().for_each(|wait| marked[wait.earlier] = true);
    for (number, step) in plan.steps.iter().enumerate() {
        marked[number] |= places[number] + 1 == lengths[step.lane];
    }
    for (step, marked) in plan.steps.iter_mut().zip(&marked) {
        step.mark = marked.then_some(plan.marks);
        plan.marks += u32::from(*marked);
    }
    let marks: Vec<Option<u32>> = plan.steps.iter().map(|step| step.mark).collect();
    for (step, waits) in plan.steps.iter_mut().zip(waits) {
        let wait = |h: Hazard| marks[h.earlier].map(|mark| Wait { mark, ago: h.ago });
        step.waits = waits.into_iter().filter_map(wait).collect();
    }
}

fn learn(known: &mut Clock, more: &Clock) {
    known.iter_mut().zip(more).for_each(|(known, more)| *known = (*known).max(*more));
}

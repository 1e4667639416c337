//! A plan's splits as programs of their devices, bound to memory.

use super::super::plan::{self, Located, Memory};
use super::super::{Devices, Origin, Plan, SchedError, Work};
use super::rooms::Rooms;
use crate::device::{Program, Region};
use crate::graph::{Graph, Place, Tensor};
use crate::tensor::TensorDesc;
use std::ops::Range;
use std::sync::Arc;

/// What a plan needs to run.
#[derive(Debug)]
pub(super) struct Programs {
    /// Of the rooms that regions are in.
    generation: u64,
    splits: Vec<Split>,
    replicas: Vec<Ends>,
    /// By lane of the plan: the devices whose memory it touches.
    pub(super) touches: Vec<Vec<bool>>,
    /// By mark of the plan: the device whose lane makes it.
    pub(super) makers: Vec<usize>,
    /// Slots that the host writes before each run.
    pub(super) inputs: Vec<u32>,
}

#[derive(Debug)]
struct Split {
    program: Program,
    memories: Vec<Memory>,
    /// By copy of the ring.
    bindings: Vec<Arc<[Region]>>,
}

/// Between which memory a replica's bytes move.
#[derive(Debug)]
struct Ends {
    /// By copy of the ring, as those of `to`; none of an input.
    from: Vec<Region>,
    to: Vec<Region>,
    experts: Option<Experts>,
}

/// Which part of a replica is needed is in the numbers of the experts.
#[derive(Debug)]
pub(super) struct Experts {
    /// Where the numbers lie, by copy of the ring.
    pub(super) ids: Vec<Region>,
    pub(super) ids_desc: TensorDesc,
    /// Bytes from one expert to the next.
    pub(super) stride: u64,
    pub(super) count: u64,
}

impl Programs {
    pub(super) fn new(plan: &Plan, devices: &Devices, rooms: &Rooms) -> Result<Programs, SchedError> {
        let readers = plan.task.graph().readers();
        let mut splits = Vec::with_capacity(plan.cut.splits.len());
        for (number, split) in plan.cut.splits.iter().enumerate() {
            let (graph, memories) = part(plan, number, split.nodes.clone(), &readers)?;
            let device = &devices[split.device];
            let program = device.prepare(Arc::new(graph)).map_err(|e| SchedError::of(&device.info().name, e))?;
            splits.push(Split { program, memories, bindings: Vec::new() });
        }
        let mut touches = vec![vec![false; devices.len()]; plan.lanes.len()];
        let mut makers = vec![0; plan.marks as usize];
        let mut inputs = Vec::new();
        for step in &plan.steps {
            if let Some(maker) = step.mark.and_then(|mark| makers.get_mut(mark as usize)) {
                *maker = plan.lanes[step.lane].device;
            }
            let touches = &mut touches[step.lane];
            touches[plan.lanes[step.lane].device] = true;
            if let Work::Copy(number) | Work::Experts(number) = step.work
                && let Origin::Device(home) | Origin::Experts { home, .. } = plan.cut.replicas[number as usize].origin
            {
                touches[home] = true;
            }
            if let Work::Upload(number) = step.work {
                inputs.push(plan.cut.replicas[number as usize].slot);
            }
        }
        inputs.sort_unstable();
        inputs.dedup();
        let mut programs = Programs { generation: 0, splits, replicas: Vec::new(), touches, makers, inputs };
        programs.bind(plan, rooms)?;
        Ok(programs)
    }

    /// Binds everything to the memory that there is now.
    fn bind(&mut self, plan: &Plan, rooms: &Rooms) -> Result<(), SchedError> {
        for split in &mut self.splits {
            let bound = |copy| {
                let regions = split.memories.iter().map(|&memory| rooms.memory(plan, memory, copy));
                regions.collect::<Result<Arc<[Region]>, _>>()
            };
            split.bindings = (0..plan.depth).map(bound).collect::<Result<_, _>>()?;
        }
        let copies = |at: &Located| (0..plan.depth).map(|copy| rooms.region(plan, at, copy)).collect::<Result<_, _>>();
        self.replicas.clear();
        for (number, replica) in (0..).zip(&plan.cut.replicas) {
            let lost = SchedError::Bug("a replica without a place");
            let to = copies(&plan.of_replica(number).ok_or(lost)?)?;
            let from = plan.at_home(replica.slot, &replica.range);
            let from = from.map_or(Ok(Vec::new()), |at| copies(&at))?;
            let experts = match plan::experts(plan, number) {
                Some(at) => Some(Experts::new(plan, number, copies(&at)?)?),
                None => None,
            };
            self.replicas.push(Ends { from, to, experts });
        }
        self.generation = rooms.generation();
        Ok(())
    }

    /// Looks again where memory is, if it has changed.
    pub(super) fn refresh(&mut self, plan: &Plan, rooms: &Rooms) -> Result<(), SchedError> {
        if self.generation == rooms.generation() { Ok(()) } else { self.bind(plan, rooms) }
    }

    /// A split's program and its bindings for one of the copies.
    pub(super) fn split(&self, number: u32, copy: usize) -> Result<(&Program, &Arc<[Region]>), SchedError> {
        let split = self.splits.get(number as usize).ok_or(SchedError::Bug("a step of another plan"))?;
        let bindings = split.bindings.get(copy).ok_or(SchedError::Bug("a copy beyond the depth"))?;
        Ok((&split.program, bindings))
    }

    /// A replica's place in one of the copies.
    pub(super) fn to(&self, number: u32, copy: usize) -> Result<&Region, SchedError> {
        let ends = self.replicas.get(number as usize).and_then(|ends| ends.to.get(copy));
        ends.ok_or(SchedError::Bug("a step of another plan"))
    }

    /// Where a replica's bytes come from, in one of the copies.
    pub(super) fn from(&self, number: u32, copy: usize) -> Result<&Region, SchedError> {
        let from = self.replicas.get(number as usize).and_then(|ends| ends.from.get(copy));
        from.ok_or(SchedError::Bug("a replica without a home"))
    }

    pub(super) fn experts(&self, number: u32) -> Result<&Experts, SchedError> {
        let experts = self.replicas.get(number as usize).and_then(|ends| ends.experts.as_ref());
        experts.ok_or(SchedError::Bug("a replica without experts"))
    }
}

impl Experts {
    fn new(plan: &Plan, number: u32, ids: Vec<Region>) -> Result<Experts, SchedError> {
        let bug = || SchedError::Bug("experts without a node");
        let replica = plan.cut.replicas.get(number as usize).ok_or_else(bug)?;
        let Origin::Experts { ids: id, .. } = replica.origin else { return Err(bug()) };
        let graph = plan.task.graph();
        let nodes = plan.cut.splits.get(replica.split).map(|split| split.nodes.clone()).ok_or_else(bug)?;
        let weights = graph.nodes().get(nodes).unwrap_or_default().iter().find_map(|node| {
            let src = node.srcs[0].filter(|_| node.srcs[2] == Some(id))?;
            (plan.task.span(src)?.0 == replica.slot).then(|| graph.tensor(src)).flatten()
        });
        let weights = &weights.ok_or_else(bug)?.desc;
        let ids_desc = graph.tensor(id).ok_or_else(bug)?.desc;
        Ok(Experts { ids, ids_desc, stride: weights.nb()[2] as u64, count: weights.ne()[2] as u64 })
    }
}

/// The graph of some nodes of a split, and the memory that is to be bound to each of its slots.
pub(super) fn part(
    plan: &Plan,
    split: usize,
    nodes: Range<usize>,
    readers: &[u32],
) -> Result<(Graph, Vec<Memory>), SchedError> {
    let mut memories: Vec<Memory> = Vec::new();
    let mut sizes: Vec<usize> = Vec::new();
    let mut lost = false;
    let place = |tensor: &Tensor| {
        let place = tensor.place?;
        let bytes = place.offset..place.offset + tensor.desc.extent();
        let Some(at) = plan.locate(split, place.slot, &bytes) else {
            // Nothing of it is ever touched, so it may lie anywhere.
            lost |= !bytes.is_empty();
            return Some(Place { slot: 0, offset: 0 });
        };
        let slot = memories.iter().position(|&memory| memory == at.memory).unwrap_or_else(|| {
            memories.push(at.memory);
            sizes.push(size(plan, at.memory));
            memories.len() - 1
        });
        Some(Place { slot: slot as u32, offset: at.bytes.start as usize })
    };
    let graph = plan.task.graph().part(nodes, readers, Vec::new(), place);
    if lost {
        return Err(SchedError::Bug("a node's tensor is not on its device"));
    }
    Ok((graph.with_slots(sizes), memories))
}

/// Bytes of a memory that a program must find.
fn size(plan: &Plan, memory: Memory) -> usize {
    use super::super::Area;
    match memory {
        Memory::Stored { slot } => plan.task.graph().slots().get(slot as usize).copied().unwrap_or(0),
        Memory::Room { device, area, chunk } => {
            let room = plan.layout.rooms.get(device);
            let sizes = room.map(|room| if area == Area::Arena { &room.arena } else { &room.ring });
            sizes.and_then(|sizes| sizes.get(chunk as usize)).map_or(0, |&bytes| bytes as usize)
        }
    }
}

//! Programs of a plan's splits: each split is prepared by its device and bound to regions, once for each ring copy.

use super::super::plan::{self, MemoryId, MemoryRange};
use super::super::{Devices, Plan, ReplicaOrigin, SchedError, StepAction};
use super::arenas::Arenas;
use crate::device::{Program, Region};
use crate::graph::{Graph, SlotOffset, Tensor};
use crate::ops::Op;
use crate::tensor::TensorDesc;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The programs, bindings and replica regions of a prepared plan.
#[derive(Debug)]
pub(super) struct SplitPrograms {
    /// The [`Arenas::generation`] that the bindings refer to.
    generation: u64,
    splits: Vec<SplitProgram>,
    replicas: Vec<ReplicaRegions>,
    /// By queue of the plan, then by device: whether the queue accesses the device's memory.
    pub(super) touched_devices: Vec<Vec<bool>>,
    /// By mark of the plan: the device of the queue that makes it.
    pub(super) mark_devices: Vec<usize>,
    /// Slots that the host writes before each run.
    pub(super) inputs: Vec<u32>,
    /// By number of a collective group: bytes of the largest part that a rank has in a collective node.
    pub(super) largest_parts: BTreeMap<u32, u64>,
}

#[derive(Debug)]
struct SplitProgram {
    program: Program,
    memories: Vec<MemoryId>,
    /// By ring copy: the region of each of `memories`.
    bindings: Vec<Arc<[Region]>>,
}

/// Source and destination regions of a replica.
#[derive(Debug)]
struct ReplicaRegions {
    /// By ring copy: the region at home. Empty for an input.
    from: Vec<Region>,
    /// By ring copy: the region of the replica.
    to: Vec<Region>,
    experts: Option<ExpertWeights>,
}

/// Layout of a replica of expert weights (MUL_MAT_ID). Only the experts that the ids name are copied.
#[derive(Debug)]
pub(super) struct ExpertWeights {
    /// By ring copy: the region of the expert ids.
    pub(super) ids: Vec<Region>,
    pub(super) ids_desc: TensorDesc,
    /// Bytes from one expert to the next.
    pub(super) stride: u64,
    /// Number of experts.
    pub(super) count: u64,
}

impl SplitPrograms {
    pub(super) fn new(plan: &Plan, devices: &Devices, arenas: &Arenas) -> Result<SplitPrograms, SchedError> {
        let readers = plan.task.graph().reader_counts();
        let mut splits = Vec::with_capacity(plan.split_graph.splits.len());
        for (number, split) in plan.split_graph.splits.iter().enumerate() {
            let (graph, memories) = subgraph(plan, number, split.nodes.clone(), &readers)?;
            let device = &devices[split.device];
            let program =
                device.prepare(Arc::new(graph)).map_err(|e| SchedError::from_device(&device.info().name, e))?;
            splits.push(SplitProgram { program, memories, bindings: Vec::new() });
        }
        let mut touched_devices = vec![vec![false; devices.len()]; plan.queues.len()];
        let mut mark_devices = vec![0; plan.marks as usize];
        let mut inputs = Vec::new();
        for step in &plan.steps {
            if let Some(device) = step.mark.and_then(|mark| mark_devices.get_mut(mark as usize)) {
                *device = plan.queues[step.queue].device;
            }
            let touched = &mut touched_devices[step.queue];
            touched[plan.queues[step.queue].device] = true;
            if let StepAction::DeviceCopy(number) | StepAction::CopyExperts(number) = step.action
                && let ReplicaOrigin::Device(home) | ReplicaOrigin::Experts { home, .. } =
                    plan.split_graph.replicas[number as usize].origin
            {
                touched[home] = true;
            }
            if let StepAction::UploadInput(number) = step.action {
                inputs.push(plan.split_graph.replicas[number as usize].slot);
            }
        }
        inputs.sort_unstable();
        inputs.dedup();
        let mut largest_parts: BTreeMap<u32, u64> = BTreeMap::new();
        for node in plan.task.graph().nodes() {
            if let Op::Collective(op) = &node.op {
                let part = node.srcs[0].and_then(|id| plan.task.graph().tensor(id));
                let bytes = part.map_or(0, |part| part.desc.dense_bytes() as u64);
                let largest = largest_parts.entry(op.group).or_default();
                *largest = bytes.max(*largest);
            }
        }
        let mut programs = SplitPrograms {
            generation: 0,
            splits,
            replicas: Vec::new(),
            touched_devices,
            mark_devices,
            inputs,
            largest_parts,
        };
        programs.bind(plan, arenas)?;
        Ok(programs)
    }

    /// Binds all splits and replicas to the current buffers.
    fn bind(&mut self, plan: &Plan, arenas: &Arenas) -> Result<(), SchedError> {
        for split in &mut self.splits {
            let bound = |copy| {
                let regions = split.memories.iter().map(|&memory| arenas.buffer_region(plan, memory, copy));
                regions.collect::<Result<Arc<[Region]>, _>>()
            };
            split.bindings = (0..plan.depth).map(bound).collect::<Result<_, _>>()?;
        }
        let copies =
            |at: &MemoryRange| (0..plan.depth).map(|copy| arenas.region(plan, at, copy)).collect::<Result<_, _>>();
        self.replicas.clear();
        for (number, replica) in (0..).zip(&plan.split_graph.replicas) {
            let missing = SchedError::Bug("a replica without an allocation");
            let to = copies(&plan.replica_range(number).ok_or(missing)?)?;
            let from = plan.home_range(replica.slot, &replica.range);
            let from = from.map_or(Ok(Vec::new()), |at| copies(&at))?;
            let experts = match plan::expert_ids_range(plan, number) {
                Some(at) => Some(ExpertWeights::new(plan, number, copies(&at)?)?),
                None => None,
            };
            self.replicas.push(ReplicaRegions { from, to, experts });
        }
        self.generation = arenas.generation();
        Ok(())
    }

    /// Binds again if buffers have been replaced since the last binding.
    pub(super) fn rebind_if_moved(&mut self, plan: &Plan, arenas: &Arenas) -> Result<(), SchedError> {
        if self.generation == arenas.generation() { Ok(()) } else { self.bind(plan, arenas) }
    }

    /// A split's program, and its bindings for one ring copy.
    pub(super) fn bound_program(&self, number: u32, copy: usize) -> Result<(&Program, &Arc<[Region]>), SchedError> {
        let split = self.splits.get(number as usize).ok_or(SchedError::Bug("a step of another plan"))?;
        let bindings = split.bindings.get(copy).ok_or(SchedError::Bug("a ring copy beyond the depth"))?;
        Ok((&split.program, bindings))
    }

    /// A replica's region for one ring copy.
    pub(super) fn replica_region(&self, number: u32, copy: usize) -> Result<&Region, SchedError> {
        let ends = self.replicas.get(number as usize).and_then(|ends| ends.to.get(copy));
        ends.ok_or(SchedError::Bug("a step of another plan"))
    }

    /// The source region of a replica for one ring copy.
    pub(super) fn home_region(&self, number: u32, copy: usize) -> Result<&Region, SchedError> {
        let from = self.replicas.get(number as usize).and_then(|ends| ends.from.get(copy));
        from.ok_or(SchedError::Bug("a replica without a home"))
    }

    pub(super) fn experts(&self, number: u32) -> Result<&ExpertWeights, SchedError> {
        let experts = self.replicas.get(number as usize).and_then(|ends| ends.experts.as_ref());
        experts.ok_or(SchedError::Bug("a replica without experts"))
    }
}

impl ExpertWeights {
    fn new(plan: &Plan, number: u32, ids: Vec<Region>) -> Result<ExpertWeights, SchedError> {
        let bug = || SchedError::Bug("a replica of experts without a MUL_MAT_ID node");
        let replica = plan.split_graph.replicas.get(number as usize).ok_or_else(bug)?;
        let ReplicaOrigin::Experts { ids: id, .. } = replica.origin else { return Err(bug()) };
        let graph = plan.task.graph();
        let nodes =
            plan.split_graph.splits.get(replica.first_split).map(|split| split.nodes.clone()).ok_or_else(bug)?;
        let weights = graph.nodes().get(nodes).unwrap_or_default().iter().find_map(|node| {
            let src = node.srcs[0].filter(|_| node.srcs[2] == Some(id))?;
            (plan.task.span(src)?.0 == replica.slot).then(|| graph.tensor(src)).flatten()
        });
        let weights = &weights.ok_or_else(bug)?.desc;
        let ids_desc = graph.tensor(id).ok_or_else(bug)?.desc;
        Ok(ExpertWeights { ids, ids_desc, stride: weights.nb()[2] as u64, count: weights.ne()[2] as u64 })
    }
}

/// The subgraph of some nodes of a split, and for each of its slots the memory to bind.
pub(super) fn subgraph(
    plan: &Plan,
    split: usize,
    nodes: Range<usize>,
    readers: &[u32],
) -> Result<(Graph, Vec<MemoryId>), SchedError> {
    let mut memories: Vec<MemoryId> = Vec::new();
    let mut sizes: Vec<usize> = Vec::new();
    let mut missing = false;
    let place = |tensor: &Tensor| {
        let place = tensor.place?;
        let bytes = place.offset..place.offset + tensor.desc.extent();
        let Some(at) = plan.locate(split, place.slot, &bytes) else {
            // An empty tensor is never accessed, so any offset will do.
            missing |= !bytes.is_empty();
            return Some(SlotOffset { slot: 0, offset: 0 });
        };
        let slot = memories.iter().position(|&memory| memory == at.memory).unwrap_or_else(|| {
            memories.push(at.memory);
            sizes.push(memory_bytes(plan, at.memory));
            memories.len() - 1
        });
        Some(SlotOffset { slot: slot as u32, offset: at.bytes.start as usize })
    };
    let graph = plan.task.graph().subgraph(nodes, readers, Vec::new(), place);
    if missing {
        return Err(SchedError::Bug("a node's tensor is not on its device"));
    }
    Ok((graph.with_slots(sizes), memories))
}

/// Size in bytes of a memory, which is the size of its slot in the subgraph.
fn memory_bytes(plan: &Plan, memory: MemoryId) -> usize {
    use super::super::ArenaKind;
    match memory {
        MemoryId::Stored { slot } => plan.task.graph().slot_sizes().get(slot as usize).copied().unwrap_or(0),
        MemoryId::Arena { device, kind, buffer } => {
            let device_sizes = plan.layout.arenas.get(device);
            let sizes = device_sizes
                .map(|device_sizes| if kind == ArenaKind::Arena { &device_sizes.arena } else { &device_sizes.ring });
            sizes.and_then(|sizes| sizes.get(buffer as usize)).map_or(0, |&bytes| bytes as usize)
        }
    }
}

//! Emission: turns the steps of all ranks into one task for the scheduler, with each node pinned to its rank's device.
//!
//! If all devices of a group run collective nodes, a rank's nodes are one program: the nodes of one rank are emitted after those
//! of the other. Elsewhere collectives become nodes of ops that every device has: an all-reduce is a chain of additions in the
//! order of ranks, so that all ranks get the same bits, and an all-gather is a chain of concatenations. Their sources are on the
//! devices of other ranks, and the scheduler copies them. The steps between two such collectives form a segment, and each
//! segment of a rank is a program.

use super::propagate::{SlotState, SourcePart, SpmdProgram, SpmdStep};
use super::split_class::ClassId;
use super::views::{local_view, part_desc, subrange};
use super::{OutputPart, RankTask, TensorGroup, TensorSplitError};
use crate::device::Region;
use crate::graph::{Node, TensorId};
use crate::ops::binary::Binary;
use crate::ops::collective::{Collective, CollectiveKind, piece};
use crate::ops::concat::Concat;
use crate::ops::copy::CopyOp;
use crate::ops::{MAX_SRC, Op, OutputSpec};
use crate::sched::{Storage, Task, TaskBuilder};
use crate::tensor::{DType, TensorDesc};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// The regions of a stored tensor's parts: by name and rank.
pub(super) type Regions<'a> = &'a dyn Fn(&str, usize) -> Option<Region>;

/// Size in bytes of a partial sum from which on three or more ranks add pieces of it, and then gather them: each rank sends
/// 2 (n - 1)/n of the sum instead of n - 1 times all of it, but in two rounds. At 1 GB/s, 64 KiB take as long as a round.
const SCATTER_BYTES: usize = 64 << 10;

/// How partial sums are exchanged.
#[derive(Clone, Copy, Debug)]
pub(super) struct SumExchange {
    /// Whether they are rounded to BF16 first.
    pub(super) bf16: bool,
    /// See [`SCATTER_BYTES`].
    pub(super) scatter_bytes: usize,
}

impl Default for SumExchange {
    fn default() -> SumExchange {
        SumExchange { bf16: false, scatter_bytes: SCATTER_BYTES }
    }
}

/// Builds the task of all ranks.
pub(super) fn emit(
    task: &Task,
    groups: &[TensorGroup],
    has_collectives: &[bool],
    sums: SumExchange,
    program: &SpmdProgram,
    regions: Regions<'_>,
) -> Result<RankTask, TensorSplitError> {
    let mut b = TaskBuilder::new();
    let collective_groups = groups.iter().zip(has_collectives).map(|(group, &nodes)| {
        let number = (group.ranks() > 1).then(|| b.add_collective_group(group.devices().to_vec()));
        number.filter(|_| nodes)
    });
    let collective_groups: Vec<Option<u32>> = collective_groups.collect();
    let mut emitter = Emitter {
        task,
        groups,
        program,
        regions,
        sums,
        b,
        collective_groups: &collective_groups,
        local: HashMap::new(),
        whole: HashMap::new(),
        views: HashMap::new(),
        parts: HashMap::new(),
    };
    for segment in segments(task, program, &collective_groups)? {
        for rank in 0..groups[segment.group].ranks() {
            for step in &segment.steps {
                emitter.step(step, rank)?;
            }
        }
    }
    emitter.finish()
}

/// Consecutive steps of one group. A copied collective never reads a slot that its own segment writes, because each segment of a
/// rank becomes one program.
struct Segment<'a> {
    group: usize,
    steps: Vec<&'a SpmdStep>,
}

fn segments<'a>(
    task: &Task,
    program: &'a SpmdProgram,
    collective_groups: &[Option<u32>],
) -> Result<Vec<Segment<'a>>, TensorSplitError> {
    let mut segments: Vec<Segment<'a>> = Vec::new();
    // By slot: number (from 1) of the segment that wrote it last; 0 for stored slots and inputs.
    let mut written = vec![0; program.slots.len()];
    // By slot: number of the segment with its last copied collective. A rank that writes the slot in the same segment would
    // change what the ranks after it copy.
    let mut copied = vec![0; program.slots.len()];
    let written_by = |node: usize| {
        let written = task.graph().nodes().get(node).and_then(|node| task.write_range(node));
        written.map(|(slot, _)| slot as usize).ok_or(TensorSplitError::Bug("a node of another task"))
    };
    for step in &program.steps {
        let (group, needs) = match *step {
            SpmdStep::Node { group, node, .. } => (group, Some(copied[written_by(node)?])),
            SpmdStep::Collective { group, .. } if collective_groups[group].is_some() => (group, None),
            SpmdStep::Collective { group, slot, .. } => (group, Some(written[slot as usize])),
        };
        let current = segments.len();
        let goes_on = segments.last().is_some_and(|last| last.group == group && needs.is_none_or(|at| at < current));
        if !goes_on {
            segments.push(Segment { group, steps: Vec::new() });
        }
        let current = segments.len();
        match *step {
            SpmdStep::Node { node, .. } => written[written_by(node)?] = current,
            SpmdStep::Collective { group, slot, .. } if collective_groups[group].is_none() => {
                copied[slot as usize] = current;
            }
            SpmdStep::Collective { .. } => {}
        }
        if let Some(last) = segments.last_mut() {
            last.steps.push(step);
        }
    }
    Ok(segments)
}

/// Parts of a dimension, by rank.
type Parts = std::rc::Rc<[Range<usize>]>;

struct Emitter<'a> {
    task: &'a Task,
    groups: &'a [TensorGroup],
    program: &'a SpmdProgram,
    regions: Regions<'a>,
    sums: SumExchange,
    b: TaskBuilder,
    /// By group: its number in collective nodes; `None` if its devices do not run them.
    collective_groups: &'a [Option<u32>],
    /// By slot and rank of its group: the rank's own tensor. Inputs have one for all ranks of all groups.
    local: HashMap<(u32, usize), TensorId>,
    /// By slot and rank of its group: the result of the last collective.
    whole: HashMap<(u32, usize), TensorId>,
    /// By base tensor, layout and offset.
    views: HashMap<(TensorId, TensorDesc, usize), TensorId>,
    /// By class and length of the dimension.
    parts: HashMap<(ClassId, usize), Parts>,
}

/// Where the nodes of a collective go.
#[derive(Clone, Copy)]
struct RankPlace {
    group: usize,
    rank: usize,
    /// The group's number in collective nodes.
    number: u32,
    /// The slot that is made whole.
    slot: u32,
}

impl Emitter<'_> {
    fn step(&mut self, step: &SpmdStep, rank: usize) -> Result<(), TensorSplitError> {
        match *step {
            SpmdStep::Node { group, node, ref srcs } => self.node(group, rank, node, srcs),
            SpmdStep::Collective { group, slot, kind } if self.collective_groups[group].is_some() => {
                let (part, desc) = (self.local(slot, rank)?, self.program.slots[slot as usize].desc);
                let number = self.collective_groups[group].unwrap_or_default();
                let place = RankPlace { group, rank, number, slot };
                let whole = match kind {
                    CollectiveKind::AllReduce => self.all_reduce(place, part, &desc)?,
                    kind => self.collective(place, kind, part, OutputSpec { dtype: desc.dtype(), ne: desc.ne() })?,
                };
                self.whole.insert((slot, rank), whole);
                Ok(())
            }
            SpmdStep::Collective { group, slot, kind } => {
                let parts = (0..self.groups[group].ranks()).map(|rank| self.local(slot, rank));
                let parts = parts.collect::<Result<Vec<_>, _>>()?;
                let (&first, rest) = parts.split_first().ok_or(TensorSplitError::Bug("a group without ranks"))?;
                let mut all = first;
                for &next in rest {
                    let srcs = [Some(all), Some(next)];
                    all = match kind {
                        CollectiveKind::AllReduce => self.b.node(Binary::Add, &srcs)?,
                        CollectiveKind::AllGather { axis } => self.b.node(Concat::Concat { dim: axis }, &srcs)?,
                        CollectiveKind::ReduceScatter { .. } => {
                            return Err(TensorSplitError::Bug("a walk that scatters a sum"));
                        }
                    };
                    self.name_and_pin(all, self.task.slot_name(slot), group, rank)?;
                }
                self.whole.insert((slot, rank), all);
                Ok(())
            }
        }
    }

    /// The sum of the ranks' parts, on each rank.
    fn all_reduce(&mut self, at: RankPlace, part: TensorId, desc: &TensorDesc) -> Result<TensorId, TensorSplitError> {
        let f32_of = |ne| OutputSpec { dtype: DType::F32, ne };
        let bf16_of = |ne| OutputSpec { dtype: DType::BF16, ne };
        let part = match self.sums.bf16 {
            true => self.pinned(at, CopyOp::Cpy, part, bf16_of(desc.ne()))?,
            false => part,
        };
        let ranks = self.groups[at.group].ranks();
        let is_large = ranks > 2 && desc.dense_bytes() >= self.sums.scatter_bytes;
        let outermost = desc.ne().iter().rposition(|&n| n > 1).filter(|&axis| is_large && desc.ne()[axis] >= ranks);
        let Some(axis) = outermost else {
            return self.collective(at, CollectiveKind::AllReduce, part, f32_of(desc.ne()));
        };
        let mut ne = desc.ne();
        ne[axis] = piece(ne[axis], at.rank, ranks).len();
        let axis = axis as u8; // below `DIMS`
        let sum = self.collective(at, CollectiveKind::ReduceScatter { axis }, part, f32_of(ne))?;
        let gather = CollectiveKind::AllGather { axis };
        if !self.sums.bf16 {
            return self.collective(at, gather, sum, f32_of(desc.ne()));
        }
        let sum = self.pinned(at, CopyOp::Cpy, sum, bf16_of(ne))?;
        let whole = self.collective(at, gather, sum, bf16_of(desc.ne()))?;
        self.pinned(at, CopyOp::Cpy, whole, f32_of(desc.ne()))
    }

    fn collective(
        &mut self,
        at: RankPlace,
        kind: CollectiveKind,
        part: TensorId,
        out: OutputSpec,
    ) -> Result<TensorId, TensorSplitError> {
        self.pinned(at, Collective { kind, group: at.number }, part, out)
    }

    /// A node on the device of a rank.
    fn pinned(
        &mut self,
        at: RankPlace,
        op: impl Into<Op>,
        src: TensorId,
        out: OutputSpec,
    ) -> Result<TensorId, TensorSplitError> {
        let dst = self.b.node_as(op, &[Some(src)], out)?;
        self.name_and_pin(dst, self.task.slot_name(at.slot), at.group, at.rank)?;
        Ok(dst)
    }

    fn node(
        &mut self,
        group: usize,
        rank: usize,
        number: usize,
        accesses: &[Option<SourcePart>; MAX_SRC],
    ) -> Result<(), TensorSplitError> {
        let task = self.task;
        let node: &Node = task.graph().nodes().get(number).ok_or(TensorSplitError::Bug("a node of another task"))?;
        let mut srcs = [None; MAX_SRC];
        for (i, src) in srcs.iter_mut().enumerate() {
            if let (Some(id), Some(access)) = (node.srcs[i], accesses[i]) {
                *src = Some(self.source(group, rank, id, access)?);
            }
        }
        let count = node.srcs.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        let (desc, slot, offset) = self.placed(node.dst)?;
        let own = matches!(task.storage()[slot as usize], Storage::Computed);
        let dst = if own && offset == 0 && !self.local.contains_key(&(slot, rank)) {
            let local = self.local_desc(slot, rank)?;
            let out = OutputSpec { dtype: desc.dtype(), ne: local.ne() };
            let dst = self.b.node_as(node.op.clone(), &srcs[..count], out)?;
            self.local.insert((slot, rank), dst);
            dst
        } else {
            let to = self.local_part(node.dst, rank)?;
            self.b.node_onto(node.op.clone(), &srcs[..count], to)?
        };
        // Without larger groups the scheduler places nodes. With one, it must not: a node that joined the program of another
        // group's rank could wait for what follows that rank's collectives.
        if self.groups.iter().any(|group| group.ranks() > 1) || task.pin(number).is_some() {
            return self.name_and_pin(dst, task.name(node.dst), group, rank);
        }
        self.b.name(dst, task.name(node.dst));
        Ok(())
    }

    /// Names the node that was added last by its result, and pins it to a rank's device.
    fn name_and_pin(&mut self, dst: TensorId, name: &str, group: usize, rank: usize) -> Result<(), TensorSplitError> {
        self.b.name(dst, name);
        Ok(self.b.pin(self.groups[group].devices()[rank])?)
    }

    /// Layout, slot and offset of a tensor of the task.
    fn placed(&self, id: TensorId) -> Result<(TensorDesc, u32, usize), TensorSplitError> {
        let tensor = self.task.graph().tensor(id).ok_or(TensorSplitError::Bug("a node of another task"))?;
        let (slot, bytes) = self.task.span(id).ok_or(TensorSplitError::Bug("a tensor of a task without a slot"))?;
        Ok((tensor.desc, slot, bytes.start))
    }

    /// The part of a source that a rank reads.
    fn source(
        &mut self,
        group: usize,
        rank: usize,
        id: TensorId,
        access: SourcePart,
    ) -> Result<TensorId, TensorSplitError> {
        let (desc, slot, offset) = self.placed(id)?;
        let (axis, part) = match access {
            SourcePart::Local => return self.local_part(id, rank),
            SourcePart::Whole => return self.whole_view(group, rank, slot, desc, offset),
            SourcePart::Slice { axis, class } => (axis, self.part(class, desc.ne()[axis], rank)?),
            SourcePart::EnclosingSlice { axis, class } => {
                let ranks = self.groups[group].ranks();
                let fine = self.part(class, desc.ne()[axis] * ranks, rank)?;
                (axis, fine.start / ranks..fine.end.div_ceil(ranks))
            }
        };
        let (part, from) = subrange(&desc, axis, &part).ok_or(TensorSplitError::Bug("a slice that cuts a block"))?;
        self.whole_view(group, rank, slot, part, offset + from)
    }

    /// The local part of a tensor, which may be a view of a slot.
    fn local_part(&mut self, id: TensorId, rank: usize) -> Result<TensorId, TensorSplitError> {
        let (desc, slot, offset) = self.placed(id)?;
        let base = self.local(slot, rank)?;
        let (desc, offset) = match self.program.slots[slot as usize].state {
            SlotState::Split { axis, class } => {
                let whole = self.program.slots[slot as usize].desc;
                let part = self.part(class, whole.ne()[axis], rank)?;
                local_view(&whole, axis, &part, &desc, offset)
                    .ok_or(TensorSplitError::Bug("a view that has no local part"))?
            }
            _ => (desc, offset),
        };
        self.view(base, desc, offset)
    }

    /// A view of a slot that is whole, for a rank of a group: its own copy, or one of the ranks of the slot's group.
    fn whole_view(
        &mut self,
        group: usize,
        rank: usize,
        slot: u32,
        desc: TensorDesc,
        offset: usize,
    ) -> Result<TensorId, TensorSplitError> {
        let entry = &self.program.slots[slot as usize];
        let rank = if entry.group == group { rank } else { rank % self.groups[entry.group].ranks() };
        let base = match entry.state {
            SlotState::Mirrored | SlotState::Undecided => self.local(slot, rank)?,
            _ => *self.whole.get(&(slot, rank)).ok_or(TensorSplitError::Bug("a source without its collective"))?,
        };
        self.view(base, desc, offset)
    }

    fn view(&mut self, base: TensorId, desc: TensorDesc, offset: usize) -> Result<TensorId, TensorSplitError> {
        if offset == 0 && self.b.desc(base)? == desc {
            return Ok(base);
        }
        if let Some(&view) = self.views.get(&(base, desc, offset)) {
            return Ok(view);
        }
        let view = self.b.view(base, desc, offset)?;
        self.views.insert((base, desc, offset), view);
        Ok(view)
    }

    /// A rank's own tensor of a slot. Adds inputs and stored tensors on first use.
    fn local(&mut self, slot: u32, rank: usize) -> Result<TensorId, TensorSplitError> {
        let task = self.task;
        let storage = &task.storage()[slot as usize];
        let rank = if matches!(storage, Storage::Input) { 0 } else { rank };
        if let Some(&id) = self.local.get(&(slot, rank)) {
            return Ok(id);
        }
        let name = task.slot_name(slot);
        let desc = self.local_desc(slot, rank)?;
        let id = match storage {
            Storage::Input => self.b.input(name, desc.dtype(), desc.ne())?,
            Storage::Stored { .. } => {
                let group = &self.groups[self.program.slots[slot as usize].group];
                let own = if group.ranks() > 1 { format!("{name} of rank {rank}") } else { name.to_owned() };
                self.b.stored(own, desc, group.devices()[rank], (self.regions)(name, rank))?
            }
            Storage::Computed => return Err(TensorSplitError::Bug("a source that no node has written")),
        };
        self.local.insert((slot, rank), id);
        Ok(id)
    }

    fn local_desc(&mut self, slot: u32, rank: usize) -> Result<TensorDesc, TensorSplitError> {
        let desc = self.program.slots[slot as usize].desc;
        let SlotState::Split { axis, class } = self.program.slots[slot as usize].state else { return Ok(desc) };
        let part = self.part(class, desc.ne()[axis], rank)?;
        part_desc(&desc, axis, &part).ok_or(TensorSplitError::Bug("a part that cuts a block"))
    }

    fn part(&mut self, class: ClassId, length: usize, rank: usize) -> Result<Range<usize>, TensorSplitError> {
        let class = self.program.classes.find(class);
        let key = (class, length);
        if !self.parts.contains_key(&key) {
            let shares = self.groups[self.program.classes.group(class)].shares();
            let parts = self.program.classes.parts(class, length, shares);
            self.parts.insert(key, parts.ok_or(TensorSplitError::Bug("a dimension that its class cannot cut"))?.into());
        }
        self.parts[&key].get(rank).cloned().ok_or(TensorSplitError::Bug("a rank beyond its group"))
    }

    fn finish(mut self) -> Result<RankTask, TensorSplitError> {
        let mut outputs = BTreeMap::new();
        for slot in (0..self.program.slots.len() as u32).filter(|&slot| self.task.is_output(slot)) {
            let entry = &self.program.slots[slot as usize];
            let (group, whole) = (entry.group, entry.desc);
            let ranks = self.groups[group].ranks();
            let parts = match entry.state {
                SlotState::Split { axis, class } => {
                    let part = |rank: usize| {
                        let range = self.part(class, whole.ne()[axis], rank)?;
                        Ok(OutputPart { tensor: self.local(slot, rank)?, axis, range })
                    };
                    (0..ranks).map(part).collect::<Result<Vec<_>, TensorSplitError>>()?
                }
                _ => {
                    let tensor = self.whole_view(group, 0, slot, whole, 0)?;
                    vec![OutputPart { tensor, axis: 0, range: 0..whole.ne()[0] }]
                }
            };
            parts.iter().try_for_each(|part| self.b.output(part.tensor))?;
            let owner = self.task.slot_tensor(slot).ok_or(TensorSplitError::Bug("an output without a tensor"))?;
            outputs.insert(owner, (whole, parts));
        }
        let mut inputs = BTreeMap::new();
        for slot in 0..self.program.slots.len() as u32 {
            if matches!(self.task.storage()[slot as usize], Storage::Input) {
                let owner = self.task.slot_tensor(slot).ok_or(TensorSplitError::Bug("an input without a tensor"))?;
                inputs.insert(owner, self.local(slot, 0)?);
            }
        }
        Ok(RankTask { task: std::sync::Arc::new(self.b.build()?), inputs, outputs })
    }
}

//! Propagation: walks a task's nodes in order and decides how each tensor is split over the ranks of its group.
//!
//! The result of the walk is one list of steps that every rank executes (SPMD): nodes, each with the part of every source that a
//! rank reads, and collectives. The first use of a weight decides how it is split. If a later node contradicts a decision, the
//! weight is mirrored instead, and the walk starts again; each restart mirrors more weights, so that the walks end.

use super::split_class::{ClassId, SplitClasses};
use super::views::{CarriedSplit, blocks, carried_split};
use super::{Distribution, TensorGroup, TensorSplitError};
use crate::graph::{Node, TensorId};
use crate::ops::collective::CollectiveKind;
use crate::ops::rows::Rows;
use crate::ops::{MAX_SRC, Op};
use crate::sched::{Storage, Task};
use crate::tensor::TensorDesc;
use std::collections::{BTreeMap, BTreeSet};

/// Units per rank by which the rows of a weight are split at least: rounding then changes a rank's part by an eighth at most.
const MIN_UNITS_PER_RANK: usize = 8;

/// How the ranks hold a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SlotState {
    /// A stored tensor that no node has used yet, or a slot that no node has written yet.
    Undecided,
    /// Each rank has the same bytes.
    Mirrored,
    /// Each rank has a part of the dimension.
    Split { axis: usize, class: ClassId },
    /// Each rank has a partial sum of every element.
    Partial,
}

/// How an operand, which may be a view of a slot, is distributed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum OperandState {
    Undecided,
    Mirrored,
    /// Split in a dimension of the operand.
    Split {
        axis: usize,
        class: ClassId,
    },
    Partial,
    /// A view of a split slot whose parts are no ranges of one dimension.
    Scattered,
}

/// Which bytes a rank reads of a source.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum SourcePart {
    /// The rank's own part.
    Local,
    /// The whole tensor: mirrored, or the result of a collective.
    Whole,
    /// The rank's part of a tensor that it has as a whole.
    Slice { axis: usize, class: ClassId },
    /// As `Slice`, rounded to whole elements of a shorter dimension: the heads of K that the rank's heads of Q use.
    EnclosingSlice { axis: usize, class: ClassId },
}

/// A step that every rank of a group executes.
#[derive(Clone, Debug)]
pub(super) enum SpmdStep {
    Node {
        group: usize,
        /// Number of the node in the task.
        node: usize,
        srcs: Box<[Option<SourcePart>; MAX_SRC]>,
    },
    Collective {
        group: usize,
        slot: u32,
        kind: CollectiveKind,
    },
}

/// The result of the propagation.
#[derive(Debug)]
pub(super) struct SpmdProgram {
    pub(super) steps: Vec<SpmdStep>,
    /// By slot.
    pub(super) slots: Vec<SlotSplit>,
    pub(super) classes: SplitClasses,
}

/// A slot and its split.
#[derive(Clone, Debug)]
pub(super) struct SlotSplit {
    /// The tensor that the slot was made for: contiguous if the slot is split.
    pub(super) desc: TensorDesc,
    pub(super) group: usize,
    pub(super) state: SlotState,
}

/// The facts that are known before the walk.
#[derive(Clone, Debug, Default)]
pub(super) struct Decisions {
    /// By slot: distributions of stored tensors that were decided with an earlier task.
    pub(super) known: BTreeMap<u32, Distribution>,
    /// Weights that are mirrored because a walk contradicted their split.
    pub(super) mirrored: BTreeSet<u32>,
}

/// Why a walk ends early.
pub(super) enum Interrupt {
    /// Starts again with these weights mirrored.
    Mirror(Vec<u32>),
    Failed(TensorSplitError),
}

impl From<TensorSplitError> for Interrupt {
    fn from(e: TensorSplitError) -> Interrupt {
        Interrupt::Failed(e)
    }
}

/// Splits a task. `small` is the size in bytes up to which a weight is mirrored if its split would cost a collective.
pub(super) fn propagate(
    task: &Task,
    groups: &[TensorGroup],
    mut decisions: Decisions,
    small: usize,
) -> Result<SpmdProgram, TensorSplitError> {
    loop {
        let mut walk = Propagation::new(task, groups, &decisions, small)?;
        match walk.visit_nodes() {
            Ok(()) => return Ok(SpmdProgram { steps: walk.steps, slots: walk.slots, classes: walk.classes }),
            Err(Interrupt::Failed(e)) => return Err(e),
            Err(Interrupt::Mirror(weights)) => {
                let before = decisions.mirrored.len();
                decisions.mirrored.extend(weights);
                if decisions.mirrored.len() == before {
                    return Err(TensorSplitError::Bug("a walk asked twice for the same weights to be mirrored"));
                }
            }
        }
    }
}

/// One walk over the nodes.
pub(super) struct Propagation<'a> {
    pub(super) task: &'a Task,
    groups: &'a [TensorGroup],
    decisions: &'a Decisions,
    small: usize,
    pub(super) classes: SplitClasses,
    slots: Vec<SlotSplit>,
    /// Slots that several nodes write and that are not stored: they stay mirrored.
    written_again: Vec<bool>,
    /// Stored tensors whose rows a GET_ROWS node looks up.
    looked_up: Vec<bool>,
    /// Slots that a collective has made whole since they were written.
    whole: BTreeSet<u32>,
    steps: Vec<SpmdStep>,
    /// Group of the current node.
    pub(super) group: usize,
}

impl<'a> Propagation<'a> {
    fn new(
        task: &'a Task,
        groups: &'a [TensorGroup],
        decisions: &'a Decisions,
        small: usize,
    ) -> Result<Propagation<'a>, TensorSplitError> {
        let mut walk = Propagation {
            task,
            groups,
            decisions,
            small,
            classes: SplitClasses::default(),
            slots: Vec::new(),
            written_again: vec![false; task.storage().len()],
            looked_up: vec![false; task.storage().len()],
            whole: BTreeSet::new(),
            steps: Vec::new(),
            group: 0,
        };
        // Slots have the order of the tensors that they were made for.
        for tensor in task.graph().tensors() {
            let Some(place) = tensor.place else {
                return Err(TensorSplitError::Bug("a tensor of a task without a slot"));
            };
            if place.slot as usize == walk.slots.len() {
                walk.add_slot(place.slot, tensor.desc)?;
            }
        }
        let mut writers = vec![0; walk.slots.len()];
        for node in task.graph().nodes() {
            let slot = walk.slot_of(node.dst)?;
            writers[slot as usize] += 1;
            let stored = matches!(task.storage()[slot as usize], Storage::Stored { .. });
            walk.written_again[slot as usize] |= !stored && writers[slot as usize] > 1;
            if node.op == Op::Rows(Rows::GetRows)
                && let Some(table) = node.srcs[0]
            {
                let table = walk.slot_of(table)?;
                walk.looked_up[table as usize] = true;
            }
        }
        Ok(walk)
    }

    fn add_slot(&mut self, slot: u32, desc: TensorDesc) -> Result<(), TensorSplitError> {
        let mut entry = SlotSplit { desc, group: 0, state: SlotState::Undecided };
        match &self.task.storage()[slot as usize] {
            Storage::Input => entry.state = SlotState::Mirrored,
            Storage::Computed => {}
            Storage::Stored { device, .. } => {
                entry.group = *device;
                if *device >= self.groups.len() {
                    let name = self.task.slot_name(slot).to_owned();
                    return Err(TensorSplitError::UnknownGroup { name, group: *device, groups: self.groups.len() });
                }
                let ranks = self.groups[*device].ranks();
                match self.decisions.known.get(&slot) {
                    Some(Distribution::Split { axis, parts }) => {
                        let at = parts.iter().map(|part| part.start).chain(parts.last().map(|part| part.end));
                        let class = self.classes.add_fixed(*device, at.collect(), desc.ne()[*axis]);
                        entry.state = SlotState::Split { axis: *axis, class };
                    }
                    Some(Distribution::Mirrored) => entry.state = SlotState::Mirrored,
                    None if ranks == 1 || !desc.is_contiguous() || self.decisions.mirrored.contains(&slot) => {
                        entry.state = SlotState::Mirrored;
                    }
                    None => {}
                }
            }
        }
        self.slots.push(entry);
        Ok(())
    }

    fn visit_nodes(&mut self) -> Result<(), Interrupt> {
        let task = self.task;
        for (number, node) in task.graph().nodes().iter().enumerate() {
            if let Op::Collective(_) = node.op {
                return Err(TensorSplitError::AlreadySplit.into());
            }
            self.group = self.group_of(number, node)?;
            let slot = self.slot_of(node.dst)?;
            // A group of one has nothing to split, and slots that several nodes write stay mirrored.
            let splits = self.ranks() > 1 && !self.written_again[slot as usize];
            let (srcs, result) = if splits { self.split_node(node)? } else { self.mirror_node(node)? };
            self.steps.push(SpmdStep::Node { group: self.group, node: number, srcs: Box::new(srcs) });
            self.whole.remove(&slot);
            if self.is_own_slot(node) {
                let entry = &mut self.slots[slot as usize];
                entry.group = self.group;
                entry.state = match result {
                    OperandState::Split { axis, class } => SlotState::Split { axis, class },
                    OperandState::Partial => SlotState::Partial,
                    _ => SlotState::Mirrored,
                };
            }
        }
        for slot in 0..self.slots.len() as u32 {
            // Weights that no node has used are mirrored. Partial sums of an output are added.
            let state = &mut self.slots[slot as usize].state;
            match state {
                SlotState::Undecided => *state = SlotState::Mirrored,
                SlotState::Partial if task.is_output(slot) => self.make_whole(slot)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// The group of a node: that of the stored tensor that it writes, or of the computed slot that an earlier node has written; else
    /// its pin; else the group of its largest stored source; else that of the previous node. A pin to another group than that of
    /// the written tensor is an error.
    fn group_of(&self, number: usize, node: &Node) -> Result<usize, TensorSplitError> {
        let pin = self.task.pin(number);
        let stored = |id: &TensorId| {
            let slot = self.slot_of(*id).ok()? as usize;
            let bytes = self.slots[slot].desc.extent();
            matches!(self.task.storage()[slot], Storage::Stored { .. }).then_some((bytes, self.slots[slot].group))
        };
        // A node that writes a slot again runs where the slot is, on all of its ranks.
        let slot = &self.slots[self.slot_of(node.dst)? as usize];
        let home = Some(slot.group).filter(|_| self.is_stored(node.dst) || slot.state != SlotState::Undecided);
        if let (Some(pin), Some(home)) = (pin, home)
            && pin != home
        {
            let name = self.task.name(node.dst).to_owned();
            return Err(TensorSplitError::PinnedElsewhere { name, pin, home });
        }
        let of_source = || node.srcs.iter().flatten().filter_map(stored).max_by_key(|(bytes, _)| *bytes).map(|at| at.1);
        let group = pin.or(home).or_else(of_source).unwrap_or(self.group);
        let name = || self.task.name(node.dst).to_owned();
        let error = || TensorSplitError::UnknownGroup { name: name(), group, groups: self.groups.len() };
        if group < self.groups.len() { Ok(group) } else { Err(error()) }
    }

    /// Number of ranks of the current group.
    pub(super) fn ranks(&self) -> usize {
        self.groups[self.group].ranks()
    }

    pub(super) fn desc(&self, id: TensorId) -> Result<TensorDesc, TensorSplitError> {
        self.task.graph().tensor(id).map(|tensor| tensor.desc).ok_or(TensorSplitError::Bug("a node of another graph"))
    }

    pub(super) fn slot_of(&self, id: TensorId) -> Result<u32, TensorSplitError> {
        let span = self.task.span(id);
        span.map(|(slot, _)| slot).ok_or(TensorSplitError::Bug("a tensor of a task without a slot"))
    }

    /// Whether a node writes a whole slot that was made for its result.
    pub(super) fn is_own_slot(&self, node: &Node) -> bool {
        let slot = self.task.span(node.dst).map_or(usize::MAX, |(slot, _)| slot as usize);
        let computed = matches!(self.task.storage().get(slot), Some(Storage::Computed));
        computed && self.desc(node.dst).ok() == self.slots.get(slot).map(|entry| entry.desc)
    }

    pub(super) fn is_stored(&self, id: TensorId) -> bool {
        let slot = self.slot_of(id).unwrap_or(u32::MAX) as usize;
        matches!(self.task.storage().get(slot), Some(Storage::Stored { .. }))
    }

    /// Whether a stored tensor is also the table of a GET_ROWS node, such as embeddings that are tied to the output.
    pub(super) fn is_looked_up(&self, id: TensorId) -> bool {
        let slot = self.slot_of(id).unwrap_or(u32::MAX) as usize;
        self.looked_up.get(slot).copied().unwrap_or(false)
    }

    /// How a source, or the memory that a node writes, is distributed.
    pub(super) fn operand(&mut self, id: TensorId) -> Result<OperandState, Interrupt> {
        let slot = self.slot_of(id)?;
        let SlotSplit { desc, group, state } = self.slots[slot as usize].clone();
        Ok(match state {
            SlotState::Mirrored => OperandState::Mirrored,
            _ if group != self.group => {
                self.make_whole(slot)?;
                OperandState::Mirrored
            }
            SlotState::Undecided => OperandState::Undecided,
            SlotState::Partial => OperandState::Partial,
            SlotState::Split { axis, class } => match self.carried(id, &desc, axis)? {
                None => OperandState::Scattered,
                Some(split) if self.require(class, split.count) => OperandState::Split { axis: split.axis, class },
                Some(_) => self.contradict(class)?,
            },
        })
    }

    fn carried(&self, id: TensorId, slot: &TensorDesc, axis: usize) -> Result<Option<CarriedSplit>, TensorSplitError> {
        let offset = self.task.span(id).map_or(0, |(_, bytes)| bytes.start);
        Ok(carried_split(slot, axis, &self.desc(id)?, offset))
    }

    /// A view cuts where the class may not be cut. Mirrors the weights that began the class, if that is still possible.
    fn contradict(&self, class: ClassId) -> Result<OperandState, Interrupt> {
        match self.classes.weights(class) {
            [] => Ok(OperandState::Scattered),
            weights => Err(Interrupt::Mirror(weights.to_vec())),
        }
    }

    pub(super) fn require(&mut self, class: ClassId, count: usize) -> bool {
        let ranks = self.ranks();
        self.classes.require(class, count, ranks)
    }

    pub(super) fn merge(&mut self, a: ClassId, b: ClassId) -> bool {
        let ranks = self.ranks();
        self.classes.merge(a, b, ranks)
    }

    /// A new class for the rows of a weight. It prefers to cut at multiples of 64 rows, or of as many as leave at least
    /// [`MIN_UNITS_PER_RANK`] units to each rank: kernels compute several rows at once, so that odd numbers of rows cost time, and so
    /// do uneven parts.
    pub(super) fn new_class(&mut self, rows: usize, weight: Option<u32>) -> Option<ClassId> {
        let ranks = self.ranks();
        let even = |unit: &usize| rows.is_multiple_of(*unit) && rows / unit >= MIN_UNITS_PER_RANK * ranks;
        let unit = [64, 32, 16, 8, 4, 2].into_iter().find(even).unwrap_or(1);
        self.classes.add(self.group, ranks, rows / unit, weight)
    }

    /// Splits an undecided stored tensor so that dimension `axis` of the view `id` carries the class. Returns whether it can.
    pub(super) fn assign(&mut self, id: TensorId, axis: usize, class: ClassId) -> Result<bool, Interrupt> {
        let slot = self.slot_of(id)?;
        let desc = self.slots[slot as usize].desc;
        for of_slot in 0..desc.ne().len() {
            let Some(split) = self.carried(id, &desc, of_slot)?.filter(|split| split.axis == axis) else { continue };
            let blocks = blocks(&desc)[of_slot];
            if self.require(class, split.count) && self.require(class, blocks) {
                self.slots[slot as usize].state = SlotState::Split { axis: of_slot, class };
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Makes a tensor whole on each rank, by a collective unless it is already.
    pub(super) fn whole(&mut self, id: TensorId) -> Result<SourcePart, Interrupt> {
        let slot = self.slot_of(id)?;
        self.make_whole(slot)?;
        Ok(SourcePart::Whole)
    }

    fn make_whole(&mut self, slot: u32) -> Result<(), Interrupt> {
        let SlotSplit { group, state, .. } = self.slots[slot as usize];
        let kind = match state {
            SlotState::Mirrored => return Ok(()),
            SlotState::Undecided => {
                self.slots[slot as usize].state = SlotState::Mirrored;
                return Ok(());
            }
            SlotState::Partial => CollectiveKind::AllReduce,
            SlotState::Split { .. } if self.may_mirror(slot) => return Err(Interrupt::Mirror(vec![slot])),
            SlotState::Split { axis, class } => {
                let weights = self.classes.weights(class);
                let bytes = |slot: &u32| self.slots[*slot as usize].desc.extent();
                if !weights.is_empty() && weights.iter().map(bytes).sum::<usize>() <= self.small {
                    return Err(Interrupt::Mirror(weights.to_vec()));
                }
                CollectiveKind::AllGather { axis: axis as u8 }
            }
        };
        if self.whole.insert(slot) {
            self.steps.push(SpmdStep::Collective { group, slot, kind });
        }
        Ok(())
    }

    /// Whether a slot is a stored tensor whose split was decided in this walk: it can still be mirrored instead.
    pub(super) fn may_mirror(&self, slot: u32) -> bool {
        let stored = matches!(self.task.storage()[slot as usize], Storage::Stored { .. });
        stored && !self.decisions.known.contains_key(&slot) && !self.decisions.mirrored.contains(&slot)
    }

    /// The ranks' part of a tensor that is whole on each rank. `None` if the class cannot be cut as the dimension requires.
    pub(super) fn slice(&mut self, id: TensorId, axis: usize, class: ClassId) -> Result<Option<SourcePart>, Interrupt> {
        let desc = self.desc(id)?;
        if !self.require(class, blocks(&desc)[axis]) {
            return Ok(None);
        }
        self.whole(id)?;
        Ok(Some(SourcePart::Slice { axis, class }))
    }
}

//! Graphs cut into runs of nodes for either device, and what each run of the second moves.

use super::{Fallback, Side};
use crate::device::{Device, DeviceError, Program, Unsupported};
use crate::graph::{ByteRangeSet, Graph, Node, SlotOffset, Tensor, TensorId};
use crate::ops::OpCode;
use crate::tensor::TensorDesc;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::{Arc, Weak};

/// A graph of which some nodes fall back.
pub(super) struct Cut {
    /// Whose devices it is for.
    owner: Weak<Fallback>,
    pub(super) parts: Box<[Part]>,
}

/// Consecutive nodes that one device runs.
pub(super) enum Part {
    Primary { program: Program, slots: Option<Box<[u32]>> },
    Second(Away),
}

/// Nodes for the second device.
pub(super) struct Away {
    /// Its one slot is the scratch memory.
    pub(super) program: Program,
    /// Of the scratch memory.
    pub(super) bytes: u64,
    /// To the second device, before the nodes run.
    pub(super) reads: Box<[Move]>,
    /// Back to the primary, afterwards.
    pub(super) writes: Box<[Move]>,
    /// What the second device reserves behind tensors: it starts at 0, as in new buffers.
    pub(super) padding: Box<[Range<u64>]>,
    /// How many nodes of which ops.
    pub(super) ops: Box<[(OpCode, u64)]>,
}

/// Bytes that lie at one place on the primary and at another one in scratch memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Move {
    pub(super) slot: u32,
    /// From the start of the slot's region.
    pub(super) offset: u64,
    /// From the start of the scratch memory.
    pub(super) at: u64,
    pub(super) bytes: u64,
}

impl Cut {
    pub(super) fn new(fallback: &Fallback, graph: &Graph) -> Result<Cut, DeviceError> {
        let mut sides = Vec::with_capacity(graph.nodes().len());
        for node in graph.nodes() {
            let view = graph.node_view(node).ok_or(DeviceError::Misuse("a node of another graph"))?;
            let (side, lacks) = fallback.side(view)?;
            if let Some(lacks) = lacks {
                fallback.say(&lacks);
            }
            sides.push(side);
        }
        let (readers, mut parts, mut start) = (graph.reader_counts(), Vec::new(), 0);
        for run in sides.chunk_by(|a, b| a == b) {
            let nodes = start..start + run.len();
            start = nodes.end;
            parts.push(match run.first() {
                Some(Side::Second) => Part::Second(Away::new(fallback, graph, nodes, &readers)?),
                _ => primary(fallback, graph, nodes, &readers)?,
            });
        }
        Ok(Cut { owner: fallback.this.clone(), parts: parts.into() })
    }

    /// Whether it was made for these devices.
    pub(super) fn is_of(&self, fallback: &Arc<Fallback>) -> bool {
        std::ptr::eq(self.owner.as_ptr(), Arc::as_ptr(fallback))
    }
}

/// Nodes for the primary. Slots that they do not touch are left out, so that many short runs of a graph with many slots
/// take no more memory than one.
fn primary(fallback: &Fallback, graph: &Graph, nodes: Range<usize>, readers: &[u32]) -> Result<Part, DeviceError> {
    let used: BTreeSet<u32> = places(graph, nodes.clone()).map(|(_, place)| place.slot).collect();
    if used.len() == graph.slot_sizes().len() {
        let part = graph.subgraph(nodes, readers, graph.slot_sizes().to_vec(), |tensor| tensor.place);
        return Ok(Part::Primary { program: ready(&*fallback.primary, part)?, slots: None });
    }
    let numbers: HashMap<u32, u32> = used.iter().copied().zip(0..).collect();
    let sizes = used.iter().filter_map(|&slot| graph.slot_sizes().get(slot as usize).copied()).collect();
    let part = graph.subgraph(nodes, readers, sizes, |tensor| {
        let SlotOffset { slot, offset } = tensor.place?;
        Some(SlotOffset { slot: *numbers.get(&slot)?, offset })
    });
    let program = ready(&*fallback.primary, part)?;
    Ok(Part::Primary { program, slots: Some(used.into_iter().collect()) })
}

fn ready(device: &dyn Device, part: Graph) -> Result<Program, DeviceError> {
    device.prepare(Arc::new(part)).map_err(|e| e.on(&device.info().name))
}

/// The tensors that nodes name, with their places; often more than once.
fn places(graph: &Graph, nodes: Range<usize>) -> impl Iterator<Item = (&Tensor, SlotOffset)> {
    let nodes = graph.nodes().get(nodes).unwrap_or_default();
    let ids = nodes.iter().flat_map(|node| node.srcs.into_iter().flatten().chain([node.dst]));
    ids.filter_map(|id| graph.tensor(id)).filter_map(|tensor| Some((tensor, tensor.place?)))
}

/// The bytes that a tensor spans; its place has been checked to lie inside a slot.
fn span(tensor: &TensorDesc, place: SlotOffset) -> Range<usize> {
    place.offset..place.offset + tensor.extent()
}

impl Away {
    fn new(fallback: &Fallback, graph: &Graph, nodes: Range<usize>, readers: &[u32]) -> Result<Away, DeviceError> {
        let list = graph.nodes().get(nodes.clone()).unwrap_or_default();
        let scratch = Scratch::new(fallback, graph, nodes.clone()).ok_or_else(|| {
            let op = list.first().map_or(OpCode::None, |node| node.op.code());
            Unsupported { op, reason: "scratch beyond the address space".to_owned() }
        })?;
        let (reads, writes) = moves(graph, list);
        let part = graph.subgraph(nodes, readers, vec![scratch.bytes], |tensor| {
            let place = tensor.place?;
            let at = if tensor.desc.extent() == 0 { 0 } else { scratch.find(place.slot, place.offset)? };
            Some(SlotOffset { slot: 0, offset: at })
        });
        let mut ops: Vec<(OpCode, u64)> = Vec::new();
        for code in list.iter().map(|node| node.op.code()) {
            match ops.iter_mut().find(|(op, _)| *op == code) {
                Some((_, nodes)) => *nodes += 1,
                None => ops.push((code, 1)),
            }
        }
        let padding = scratch.patches.iter().map(|p| p.at + (p.end - p.start)..p.at + p.reserved);
        Ok(Away {
            program: ready(&*fallback.second, part)?,
            bytes: scratch.bytes as u64,
            reads: scratch.moves(&reads),
            writes: scratch.moves(&writes),
            padding: padding.filter(|p| !p.is_empty()).map(|p| p.start as u64..p.end as u64).collect(),
            ops: ops.into(),
        })
    }
}

/// What nodes for the second device must find there, and what of it must come back.
fn moves(graph: &Graph, nodes: &[Node]) -> (ByteRangeSet, ByteRangeSet) {
    let (mut reads, mut known) = (ByteRangeSet::default(), ByteRangeSet::default());
    let placed = |id: TensorId| graph.tensor(id).and_then(|tensor| Some((tensor, tensor.place?)));
    // How many of these nodes read a tensor, each counted once.
    let mut readers: HashMap<TensorId, u32> = HashMap::new();
    for node in nodes {
        let sources = node.srcs.iter().enumerate().filter_map(|(i, id)| Some((i, (*id)?)));
        for (i, id) in sources {
            if !node.srcs[..i].contains(&Some(id)) {
                *readers.entry(id).or_default() += 1;
            }
            if let Some((tensor, place)) = placed(id).filter(|_| !node.op.writes_onto(i)) {
                let read = |range| reads.insert(place.slot, range, |_| ());
                known.insert(place.slot, span(&tensor.desc, place), read);
            }
        }
        let Some((tensor, place)) = placed(node.dst) else { continue };
        // What a destination does not fill comes back too, and so must be there.
        let whole = tensor.desc.extent() == tensor.desc.dense_bytes() && !node.op.keeps_rest();
        known.insert(place.slot, span(&tensor.desc, place), |range| {
            if !whole {
                reads.insert(place.slot, range, |_| ());
            }
        });
    }
    let mut writes = ByteRangeSet::default();
    for node in nodes {
        let Some((tensor, place)) = placed(node.dst) else { continue };
        let span = span(&tensor.desc, place);
        // Nobody but these nodes reads it, and its memory is nobody else's: not one's whose content was read here.
        let passing = tensor.use_count.is_some() && tensor.use_count == readers.get(&node.dst).copied();
        let onto = (0..node.srcs.len()).any(|i| node.op.writes_onto(i));
        if !passing || onto || reads.intersects(place.slot, &span) {
            writes.insert(place.slot, span, |_| ());
        }
    }
    (reads, writes)
}

/// Where operands lie in the second device's memory: those that overlap lie to each other as they do on the primary.
struct Scratch {
    /// By slot and start.
    patches: Vec<Patch>,
    bytes: usize,
}

/// Bytes of a slot.
struct Patch {
    slot: u32,
    start: usize,
    end: usize,
    /// From the start of the scratch memory.
    at: usize,
    /// Bytes there.
    reserved: usize,
}

impl Scratch {
    /// `None` when it is larger than an address space.
    fn new(fallback: &Fallback, graph: &Graph, nodes: Range<usize>) -> Option<Scratch> {
        let mut ranges = ByteRangeSet::default();
        for (tensor, place) in places(graph, nodes.clone()) {
            ranges.insert(place.slot, span(&tensor.desc, place), |_| ());
        }
        let patch = |(slot, range): (u32, Range<usize>)| {
            let reserved = range.len();
            Patch { slot, start: range.start, end: range.end, at: 0, reserved }
        };
        let mut scratch = Scratch { patches: ranges.iter().map(patch).collect(), bytes: 0 };
        for (tensor, place) in places(graph, nodes) {
            if let Some(number) = scratch.number(place.slot, place.offset) {
                let patch = &mut scratch.patches[number];
                let size = usize::try_from(fallback.second.alloc_size(&tensor.desc)).ok()?;
                patch.reserved = patch.reserved.max(size.checked_add(place.offset - patch.start)?);
            }
        }
        let align = |device: &dyn Device| usize::try_from(device.info().alignment).unwrap_or(1).max(1);
        let (ours, theirs) = (align(&*fallback.primary), align(&*fallback.second));
        for patch in &mut scratch.patches {
            // What is aligned inside of it on the primary stays so.
            patch.at = scratch.bytes.checked_next_multiple_of(theirs)?.checked_add(patch.start % ours.min(theirs))?;
            scratch.bytes = patch.at.checked_add(patch.reserved)?;
        }
        Some(scratch)
    }

    /// The patch that holds a byte of a slot.
    fn number(&self, slot: u32, offset: usize) -> Option<usize> {
        let behind = self.patches.partition_point(|p| (p.slot, p.start) <= (slot, offset));
        let number = behind.checked_sub(1)?;
        let patch = &self.patches[number];
        (patch.slot == slot && offset < patch.end).then_some(number)
    }

    /// Where a byte of a slot lies.
    fn find(&self, slot: u32, offset: usize) -> Option<usize> {
        let patch = &self.patches[self.number(slot, offset)?];
        Some(patch.at + (offset - patch.start))
    }

    fn moves(&self, ranges: &ByteRangeSet) -> Box<[Move]> {
        let mut moves: Vec<Move> = Vec::new();
        for (slot, range) in ranges.iter() {
            let Some(at) = self.find(slot, range.start) else { continue };
            let next = Move { slot, offset: range.start as u64, at: at as u64, bytes: range.len() as u64 };
            match moves.last_mut() {
                Some(last) if last.is_before(&next) => last.bytes += next.bytes,
                _ => moves.push(next),
            }
        }
        moves.into()
    }
}

impl Move {
    /// Whether another one goes on where this one ends, on both sides.
    fn is_before(&self, next: &Move) -> bool {
        self.slot == next.slot && self.offset + self.bytes == next.offset && self.at + self.bytes == next.at
    }
}

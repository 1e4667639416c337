//! Partition of a graph into segments of consecutive nodes for the primary or the secondary device, and the copies that each
//! secondary segment needs.

use super::{Fallback, Side};
use crate::device::{Device, DeviceError, Program, Unsupported};
use crate::graph::{ByteRangeSet, Graph, Node, SlotOffset, Tensor, TensorId};
use crate::ops::OpCode;
use crate::tensor::TensorDesc;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::{Arc, Weak};

/// The program of a graph with nodes that only the secondary device supports: its segments, in execution order.
pub(super) struct PartitionedGraph {
    /// The device for which the graph was partitioned.
    owner: Weak<Fallback>,
    pub(super) segments: Box<[Segment]>,
}

/// Consecutive nodes that run on the same device.
pub(super) enum Segment {
    /// Nodes that run on the primary, in its memory.
    Primary {
        program: Program,
        /// The slots of the whole graph that the program binds; `None` if it binds all of them.
        slots: Option<Box<[u32]>>,
    },
    /// Nodes that run on the secondary device.
    Secondary(SecondarySegment),
}

/// Consecutive nodes that run on the secondary device, in scratch memory there.
pub(super) struct SecondarySegment {
    /// A program with one slot, which is bound to the scratch memory.
    pub(super) program: Program,
    /// Size of the scratch memory in bytes.
    pub(super) bytes: u64,
    /// Bytes to copy to the secondary device before the program runs.
    pub(super) reads: Box<[CopyRange]>,
    /// Bytes to copy back to the primary after the program ran.
    pub(super) writes: Box<[CopyRange]>,
    /// Padding that the secondary device reserves after tensors: byte ranges of the scratch memory, zeroed before each run
    /// because kernels expect zeros there, as in new buffers.
    pub(super) padding: Box<[Range<u64>]>,
    /// The ops of the nodes, with the number of nodes of each.
    pub(super) ops: Box<[(OpCode, u64)]>,
}

/// A copy between the primary's memory and scratch memory: where the bytes are on either side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct CopyRange {
    pub(super) slot: u32,
    /// Bytes from the start of the slot's region on the primary.
    pub(super) slot_offset: u64,
    /// Bytes from the start of the scratch memory.
    pub(super) scratch_offset: u64,
    pub(super) bytes: u64,
}

impl PartitionedGraph {
    pub(super) fn new(fallback: &Fallback, graph: &Graph) -> Result<PartitionedGraph, DeviceError> {
        let mut sides = Vec::with_capacity(graph.nodes().len());
        for node in graph.nodes() {
            let view = graph.node_view(node).ok_or(DeviceError::Misuse("a node of another graph"))?;
            let (side, unsupported) = fallback.choose_side(view)?;
            if let Some(unsupported) = unsupported {
                fallback.warn_once(&unsupported);
            }
            sides.push(side);
        }
        let (readers, mut segments, mut start) = (graph.reader_counts(), Vec::new(), 0);
        for run in sides.chunk_by(|a, b| a == b) {
            let nodes = start..start + run.len();
            start = nodes.end;
            segments.push(match run.first() {
                Some(Side::Secondary) => Segment::Secondary(SecondarySegment::new(fallback, graph, nodes, &readers)?),
                _ => primary_segment(fallback, graph, nodes, &readers)?,
            });
        }
        Ok(PartitionedGraph { owner: fallback.weak_self.clone(), segments: segments.into() })
    }

    /// Whether the graph was partitioned for this device.
    pub(super) fn is_made_for(&self, fallback: &Arc<Fallback>) -> bool {
        std::ptr::eq(self.owner.as_ptr(), Arc::as_ptr(fallback))
    }
}

/// Prepares nodes for the primary. The program has only the slots that its nodes access, so that many short segments of a graph
/// with many slots take no more memory than one program for the whole graph.
fn primary_segment(
    fallback: &Fallback,
    graph: &Graph,
    nodes: Range<usize>,
    readers: &[u32],
) -> Result<Segment, DeviceError> {
    let used: BTreeSet<u32> = operand_locations(graph, nodes.clone()).map(|(_, place)| place.slot).collect();
    if used.len() == graph.slot_sizes().len() {
        let subgraph = graph.subgraph(nodes, readers, graph.slot_sizes().to_vec(), |tensor| tensor.place);
        return Ok(Segment::Primary { program: prepare_on(&*fallback.primary, subgraph)?, slots: None });
    }
    let new_slots: HashMap<u32, u32> = used.iter().copied().zip(0..).collect();
    let sizes = used.iter().filter_map(|&slot| graph.slot_sizes().get(slot as usize).copied()).collect();
    let subgraph = graph.subgraph(nodes, readers, sizes, |tensor| {
        let SlotOffset { slot, offset } = tensor.place?;
        Some(SlotOffset { slot: *new_slots.get(&slot)?, offset })
    });
    let program = prepare_on(&*fallback.primary, subgraph)?;
    Ok(Segment::Primary { program, slots: Some(used.into_iter().collect()) })
}

fn prepare_on(device: &dyn Device, graph: Graph) -> Result<Program, DeviceError> {
    device.prepare(Arc::new(graph)).map_err(|e| e.on_device(&device.info().name))
}

/// The sources and destinations of nodes with their locations. A tensor occurs once for each use.
fn operand_locations(graph: &Graph, nodes: Range<usize>) -> impl Iterator<Item = (&Tensor, SlotOffset)> {
    let nodes = graph.nodes().get(nodes).unwrap_or_default();
    let ids = nodes.iter().flat_map(|node| node.srcs.into_iter().flatten().chain([node.dst]));
    ids.filter_map(|id| graph.tensor(id)).filter_map(|tensor| Some((tensor, tensor.place?)))
}

/// The byte range of a tensor within its slot. Cannot overflow: `validate::check` has checked that it is inside the slot.
fn byte_span(tensor: &TensorDesc, place: SlotOffset) -> Range<usize> {
    place.offset..place.offset + tensor.extent()
}

impl SecondarySegment {
    fn new(
        fallback: &Fallback,
        graph: &Graph,
        nodes: Range<usize>,
        readers: &[u32],
    ) -> Result<SecondarySegment, DeviceError> {
        let list = graph.nodes().get(nodes.clone()).unwrap_or_default();
        let scratch = ScratchLayout::new(fallback, graph, nodes.clone()).ok_or_else(|| {
            let op = list.first().map_or(OpCode::None, |node| node.op.code());
            Unsupported { op, reason: "the scratch memory would exceed the address space".to_owned() }
        })?;
        let (reads, writes) = required_copies(graph, list);
        let subgraph = graph.subgraph(nodes, readers, vec![scratch.bytes], |tensor| {
            let place = tensor.place?;
            let at = if tensor.desc.extent() == 0 { 0 } else { scratch.scratch_offset(place.slot, place.offset)? };
            Some(SlotOffset { slot: 0, offset: at })
        });
        let mut ops: Vec<(OpCode, u64)> = Vec::new();
        for code in list.iter().map(|node| node.op.code()) {
            match ops.iter_mut().find(|(op, _)| *op == code) {
                Some((_, nodes)) => *nodes += 1,
                None => ops.push((code, 1)),
            }
        }
        let padding = scratch.ranges.iter().map(|range| {
            let end = range.scratch_start + (range.end - range.start);
            end..range.scratch_start + range.reserved
        });
        Ok(SecondarySegment {
            program: prepare_on(&*fallback.secondary, subgraph)?,
            bytes: scratch.bytes as u64,
            reads: scratch.copies(&reads),
            writes: scratch.copies(&writes),
            padding: padding.filter(|p| !p.is_empty()).map(|p| p.start as u64..p.end as u64).collect(),
            ops: ops.into(),
        })
    }
}

/// The bytes that nodes for the secondary device read from the primary's memory, and the bytes to write back.
fn required_copies(graph: &Graph, nodes: &[Node]) -> (ByteRangeSet, ByteRangeSet) {
    let (mut reads, mut resident) = (ByteRangeSet::default(), ByteRangeSet::default());
    let placed = |id: TensorId| graph.tensor(id).and_then(|tensor| Some((tensor, tensor.place?)));
    // By tensor: the number of these nodes that read it. A node that reads it twice counts once.
    let mut readers: HashMap<TensorId, u32> = HashMap::new();
    for node in nodes {
        let sources = node.srcs.iter().enumerate().filter_map(|(i, id)| Some((i, (*id)?)));
        for (i, id) in sources {
            if !node.srcs[..i].contains(&Some(id)) {
                *readers.entry(id).or_default() += 1;
            }
            if let Some((tensor, place)) = placed(id).filter(|_| !node.op.writes_onto(i)) {
                let read = |range| reads.insert(place.slot, range, |_| ());
                resident.insert(place.slot, byte_span(&tensor.desc, place), read);
            }
        }
        let Some((tensor, place)) = placed(node.dst) else { continue };
        // The whole span of a destination is written back, so bytes of it that the node does not write must be copied in first.
        let writes_all = tensor.desc.extent() == tensor.desc.dense_bytes() && !node.op.keeps_rest();
        resident.insert(place.slot, byte_span(&tensor.desc, place), |range| {
            if !writes_all {
                reads.insert(place.slot, range, |_| ());
            }
        });
    }
    let mut writes = ByteRangeSet::default();
    for node in nodes {
        for (i, &id) in node.srcs.iter().enumerate() {
            if let Some((tensor, place)) = id.filter(|_| node.op.updates(i)).and_then(placed) {
                writes.insert(place.slot, byte_span(&tensor.desc, place), |_| ());
            }
        }
        let Some((tensor, place)) = placed(node.dst) else { continue };
        let span = byte_span(&tensor.desc, place);
        // An intermediate result that only these nodes read is not written back, unless its memory is shared: with a source
        // that it overwrites, or with bytes that these nodes read before.
        let intermediate = tensor.use_count.is_some() && tensor.use_count == readers.get(&node.dst).copied();
        let overwrites_source = (0..node.srcs.len()).any(|i| node.op.writes_onto(i));
        if !intermediate || overwrites_source || reads.intersects(place.slot, &span) {
            writes.insert(place.slot, span, |_| ());
        }
    }
    (reads, writes)
}

/// The layout of operands in scratch memory. Operands that overlap on the primary are in one range and keep their relative
/// offsets.
struct ScratchLayout {
    /// Sorted by slot and start.
    ranges: Vec<ScratchRange>,
    bytes: usize,
}

/// A byte range of a slot and its position in scratch memory.
struct ScratchRange {
    slot: u32,
    start: usize,
    end: usize,
    /// Bytes from the start of the scratch memory.
    scratch_start: usize,
    /// Bytes reserved in scratch memory: the range, and padding after its tensors.
    reserved: usize,
}

impl ScratchLayout {
    /// `None` if the scratch memory would exceed the address space.
    fn new(fallback: &Fallback, graph: &Graph, nodes: Range<usize>) -> Option<ScratchLayout> {
        let mut ranges = ByteRangeSet::default();
        for (tensor, place) in operand_locations(graph, nodes.clone()) {
            ranges.insert(place.slot, byte_span(&tensor.desc, place), |_| ());
        }
        let to_scratch_range = |(slot, range): (u32, Range<usize>)| {
            let reserved = range.len();
            ScratchRange { slot, start: range.start, end: range.end, scratch_start: 0, reserved }
        };
        let mut scratch = ScratchLayout { ranges: ranges.iter().map(to_scratch_range).collect(), bytes: 0 };
        for (tensor, place) in operand_locations(graph, nodes) {
            if let Some(index) = scratch.range_index(place.slot, place.offset) {
                let range = &mut scratch.ranges[index];
                let size = usize::try_from(fallback.secondary.alloc_size(&tensor.desc)).ok()?;
                range.reserved = range.reserved.max(size.checked_add(place.offset - range.start)?);
            }
        }
        let align = |device: &dyn Device| usize::try_from(device.info().alignment).unwrap_or(1).max(1);
        let (primary_align, secondary_align) = (align(&*fallback.primary), align(&*fallback.secondary));
        for range in &mut scratch.ranges {
            // The offset keeps its remainder modulo the alignment, so tensors within the range stay aligned.
            range.scratch_start = scratch
                .bytes
                .checked_next_multiple_of(secondary_align)?
                .checked_add(range.start % primary_align.min(secondary_align))?;
            scratch.bytes = range.scratch_start.checked_add(range.reserved)?;
        }
        Some(scratch)
    }

    /// The index of the range that contains a byte of a slot.
    fn range_index(&self, slot: u32, offset: usize) -> Option<usize> {
        let after = self.ranges.partition_point(|range| (range.slot, range.start) <= (slot, offset));
        let index = after.checked_sub(1)?;
        let range = &self.ranges[index];
        (range.slot == slot && offset < range.end).then_some(index)
    }

    /// The position of a byte of a slot in scratch memory.
    fn scratch_offset(&self, slot: u32, offset: usize) -> Option<usize> {
        let range = &self.ranges[self.range_index(slot, offset)?];
        Some(range.scratch_start + (offset - range.start))
    }

    fn copies(&self, ranges: &ByteRangeSet) -> Box<[CopyRange]> {
        let mut copies: Vec<CopyRange> = Vec::new();
        for (slot, range) in ranges.iter() {
            let Some(at) = self.scratch_offset(slot, range.start) else { continue };
            let next = CopyRange {
                slot,
                slot_offset: range.start as u64,
                scratch_offset: at as u64,
                bytes: range.len() as u64,
            };
            match copies.last_mut() {
                Some(last) if last.is_followed_by(&next) => last.bytes += next.bytes,
                _ => copies.push(next),
            }
        }
        copies.into()
    }
}

impl CopyRange {
    /// Whether `next` continues where this copy ends, on both sides, so that both can be merged.
    fn is_followed_by(&self, next: &CopyRange) -> bool {
        self.slot == next.slot
            && self.slot_offset + self.bytes == next.slot_offset
            && self.scratch_offset + self.bytes == next.scratch_offset
    }
}

//! Memory planner: computes lifetimes of slots and replicas (liveness analysis), reuses memory in place, and packs the rest
//! into arenas.
//!
//! `pack` contains the packing heuristics. The executor allocates the device memory: see `exec/arenas.rs`.

mod pack;
#[cfg(test)]
mod tests;

use super::{
    Allocation, ArenaKind, ArenaSizes, CopyPaths, Devices, MemoryLayout, ReplicaOrigin, SchedError, SplitGraph,
    Storage, Task,
};
use crate::device::Device;
use crate::graph::{Node, TensorId};
use pack::PackItem;
use std::sync::Arc;

/// Upper bound on buffer sizes, larger than any real buffer. It keeps sums of offsets far from overflow.
const MAX_BUFFER_BYTES: u64 = 1 << 44;

/// Allocates computed slots and replicas in arenas.
///
/// With a `depth` above 1, replicas are in the ring and share memory with nothing. So are slots that devices of other domains
/// copy from: the home device can then overwrite nothing that is still being copied, and need not wait for the copy's
/// completion.
///
/// # Errors
/// [`SchedError::TensorTooLarge`] for a tensor larger than its device's largest buffer.
pub(crate) fn place_tensors(
    task: &Task,
    devices: &Devices,
    copy_paths: &CopyPaths,
    split_graph: &SplitGraph,
    depth: usize,
) -> Result<MemoryLayout, SchedError> {
    let mut lives = Lifetimes::new(task, devices, split_graph);
    if depth > 1 {
        lives.mark_exclusive(split_graph, copy_paths);
    }
    lives.reuse_in_place(task, split_graph);
    let mut layout = MemoryLayout {
        arenas: vec![ArenaSizes::default(); devices.len()],
        slots: vec![None; lives.slots.len()],
        replicas: vec![
            Allocation { kind: ArenaKind::Arena, buffer: 0, offset: 0, bytes: 0 };
            split_graph.replicas.len()
        ],
    };
    let (in_ring, in_arena): (Vec<usize>, Vec<usize>) = (0..split_graph.replicas.len()).partition(|_| depth > 1);
    for (number, device) in devices.iter().enumerate() {
        let here = |replica: &usize| split_graph.replicas[*replica].device == number;
        let slots =
            (0..lives.slots.len()).filter(|&slot| lives.is_base(slot) && split_graph.homes[slot] == Some(number));
        let (exclusive, residents): (Vec<Resident>, Vec<Resident>) =
            slots.map(Resident::Slot).partition(|of| matches!(of, Resident::Slot(slot) if lives.exclusive[*slot]));
        let replicas_here = |of: &[usize]| of.iter().copied().filter(here).map(Resident::Replica).collect::<Vec<_>>();
        let arena = [residents, replicas_here(&in_arena)].concat();
        let ring = [replicas_here(&in_ring), exclusive].concat();
        for (kind, residents) in [(ArenaKind::Arena, arena), (ArenaKind::Ring, ring)] {
            let limits = BufferLimits::new(device);
            let items = residents.iter().map(|of| limits.item(task, split_graph, lives.of(*of), *of));
            let items = items.collect::<Result<Vec<PackItem>, SchedError>>()?;
            let packed = match kind {
                ArenaKind::Arena => pack::pack(&items, limits.buffer_bytes),
                ArenaKind::Ring => pack::pack_disjoint(&items, limits.buffer_bytes),
            };
            for ((of, item), (buffer, offset)) in
                residents.iter().zip(&items).zip(packed.allocations(limits.buffer_bytes))
            {
                let allocation = Allocation { kind, buffer, offset, bytes: item.bytes };
                match *of {
                    Resident::Slot(slot) => layout.slots[slot] = Some(allocation),
                    Resident::Replica(replica) => layout.replicas[replica] = allocation,
                }
            }
            let sizes = packed.buffer_sizes(&items, limits.buffer_bytes);
            match kind {
                ArenaKind::Arena => layout.arenas[number].arena = sizes,
                ArenaKind::Ring => layout.arenas[number].ring = sizes,
            }
        }
    }
    for slot in 0..lives.slots.len() {
        layout.slots[slot] = layout.slots[lives.base(slot)];
    }
    Ok(layout)
}

/// The owner of an allocation.
#[derive(Clone, Copy)]
enum Resident {
    Slot(usize),
    Replica(usize),
}

/// The nodes during which memory is in use, both ends included, and its bytes.
#[derive(Clone, Copy, Default)]
struct Lifetime {
    start: usize,
    end: usize,
    bytes: u64,
}

struct Lifetimes {
    /// By slot: `Some` for computed slots that a node accesses.
    slots: Vec<Option<Lifetime>>,
    /// By slot: the owner of the memory that the slot reuses in place. In a chain of reuses, the first slot of the chain.
    reuses: Vec<Option<usize>>,
    /// By slot: whether it has its own memory in every run in flight.
    exclusive: Vec<bool>,
    /// By replica.
    replicas: Vec<Lifetime>,
}

impl Lifetimes {
    fn new(task: &Task, devices: &Devices, split_graph: &SplitGraph) -> Lifetimes {
        let (graph, sizes) = (task.graph(), task.graph().slot_sizes());
        let lives = split_graph.replicas.iter().map(|r| Lifetime {
            // The host uploads inputs before the first node runs.
            start: if r.origin == ReplicaOrigin::Host { 0 } else { split_graph.splits[r.first_split].nodes.start },
            end: r.last_node,
            bytes: r.range.len() as u64,
        });
        let mut lives = Lifetimes {
            slots: vec![None; sizes.len()],
            reuses: vec![None; sizes.len()],
            exclusive: vec![false; sizes.len()],
            replicas: lives.collect(),
        };
        for split in &split_graph.splits {
            let device = &devices[split.device];
            for at in split.nodes.clone() {
                let node = &graph.nodes()[at];
                let written = task.write_range(node).map(|(slot, range)| (node.dst, slot, range));
                for (id, slot, range) in task.reads(node).chain(written) {
                    let slot = slot as usize;
                    let required = graph.tensor(id).map_or(0, |tensor| device.alloc_size(&tensor.desc));
                    if split_graph.homes[slot] != Some(split.device) {
                        let holds = |r: &&u32| split_graph.replicas[**r as usize].covers(slot as u32, &range);
                        if let Some(&replica) = split.reads.iter().find(holds) {
                            let skipped = range.start - split_graph.replicas[replica as usize].range.start;
                            lives.replicas[replica as usize].grow_to(skipped, required);
                        }
                    } else if matches!(task.storage()[slot], Storage::Computed) {
                        let life = lives.slots[slot].get_or_insert(Lifetime { start: at, end: at, bytes: 0 });
                        life.end = at;
                        life.grow_to(0, sizes[slot] as u64);
                        life.grow_to(range.start, required);
                    }
                }
            }
        }
        // A copy reads its source when the first split that uses the replica begins.
        for replica in &split_graph.replicas {
            if let Some(life) = &mut lives.slots[replica.slot as usize] {
                life.end = life.end.max(split_graph.splits[replica.first_split].nodes.start);
            }
        }
        for (slot, life) in lives.slots.iter_mut().enumerate() {
            if let Some(life) = life.as_mut().filter(|_| task.is_output(slot as u32)) {
                life.end = graph.nodes().len();
            }
        }
        lives
    }

    /// Marks the slots that devices of other domains copy from: they share memory with no other slot.
    fn mark_exclusive(&mut self, split_graph: &SplitGraph, copy_paths: &CopyPaths) {
        for replica in &split_graph.replicas {
            if let ReplicaOrigin::Device(home) = replica.origin
                && copy_paths.crosses_domains(replica.device, home)
            {
                self.exclusive[replica.slot as usize] = true;
            }
        }
    }

    /// In-place reuse: gives a destination the memory of a source that dies at the same node, where the op allows it.
    fn reuse_in_place(&mut self, task: &Task, split_graph: &SplitGraph) {
        let nodes = task.graph().nodes();
        for at in split_graph.splits.iter().flat_map(|split| split.nodes.clone()) {
            let Some(new) = self.new_destination(task, &nodes[at], at) else { continue };
            let reused = (0..nodes[at].srcs.len()).find_map(|i| self.reusable_source(task, split_graph, at, i, new));
            let Some(base) = reused else { continue };
            let (Some(dst), Some(src)) = (self.slots[new], self.slots[base]) else { continue };
            self.reuses[new] = Some(base);
            self.slots[base] = Some(Lifetime { end: dst.end, bytes: dst.bytes.max(src.bytes), ..src });
        }
    }

    /// The slot of a node's destination, if the node writes the whole slot and is the first to access it.
    fn new_destination(&self, task: &Task, node: &Node, at: usize) -> Option<usize> {
        let (slot, range) = task.write_range(node)?;
        let life = self.slots[slot as usize]?;
        let whole = range.start == 0 && range.end == task.graph().slot_sizes()[slot as usize];
        (whole && life.start == at && !self.exclusive[slot as usize]).then_some(slot as usize)
    }

    /// The base slot of a node's source, if its lifetime ends at the node and the destination can reuse its memory.
    fn reusable_source(
        &self,
        task: &Task,
        split_graph: &SplitGraph,
        at: usize,
        source: usize,
        new: usize,
    ) -> Option<usize> {
        let (graph, node) = (task.graph(), &task.graph().nodes()[at]);
        let dst = graph.tensor(node.dst)?;
        // Whether a tensor covers the slot from its start and has the destination's layout.
        let covers = |id: TensorId, slot: u32| {
            let whole = task.span(id).is_some_and(|(s, range)| s == slot && range.start == 0);
            whole && graph.tensor(id).is_some_and(|t| t.desc.same_layout(&dst.desc))
        };
        let (old, range) = task.span(node.srcs[source]?)?;
        let base = self.base(old as usize);
        let dies = base != self.base(new)
            && !self.exclusive[base]
            && split_graph.homes[old as usize] == split_graph.homes[new]
            && range.len() == graph.slot_sizes()[old as usize]
            // Of a chain of reuses, only the last slot is still live in the memory.
            && self.slots[old as usize].is_some_and(|life| self.is_last(base, life, at));
        // Another source may be a view of the same memory with another layout: the node would overwrite its elements before it
        // reads them.
        let mut others = node.srcs.iter().enumerate().filter_map(|(i, id)| Some((i, (*id)?)));
        let safe = others.all(|(i, id)| {
            task.span(id).is_none_or(|(slot, range)| {
                range.is_empty() || self.base(slot as usize) != base || (node.op.in_place(i) && covers(id, old))
            })
        });
        (dies && safe && !range.is_empty()).then_some(base)
    }

    /// Whether node `at` ends both `life` and the lifetime of the memory of `base`.
    fn is_last(&self, base: usize, life: Lifetime, at: usize) -> bool {
        life.end == at && self.slots[base].is_some_and(|whole| whole.end == at)
    }

    /// The slot that owns a slot's memory: the slot itself, or the first slot of its chain of reuses.
    fn base(&self, slot: usize) -> usize {
        self.reuses[slot].unwrap_or(slot)
    }

    fn is_base(&self, slot: usize) -> bool {
        self.slots[slot].is_some() && self.reuses[slot].is_none()
    }

    fn of(&self, resident: Resident) -> Lifetime {
        match resident {
            Resident::Slot(slot) => self.slots[slot].unwrap_or_default(),
            Resident::Replica(replica) => self.replicas[replica],
        }
    }
}

impl Lifetime {
    /// Grows to hold `bytes` bytes from offset `start` on.
    fn grow_to(&mut self, start: usize, bytes: u64) {
        self.bytes = self.bytes.max((start as u64).saturating_add(bytes));
    }
}

/// Alignment and maximum buffer size of a device.
struct BufferLimits<'a> {
    device: &'a Arc<dyn Device>,
    alignment: u64,
    /// Maximum buffer size, rounded down to the alignment. The packer treats buffers as one address space with a boundary,
    /// which no tensor may straddle, at each multiple of this size.
    buffer_bytes: u64,
}

impl<'a> BufferLimits<'a> {
    fn new(device: &'a Arc<dyn Device>) -> BufferLimits<'a> {
        let alignment = device.info().alignment.max(1);
        let largest = device.info().max_buffer.min(MAX_BUFFER_BYTES);
        BufferLimits { device, alignment, buffer_bytes: (largest - largest % alignment).max(alignment) }
    }

    fn item(
        &self,
        task: &Task,
        split_graph: &SplitGraph,
        life: Lifetime,
        of: Resident,
    ) -> Result<PackItem, SchedError> {
        // Empty tensors get one byte, so that they have a buffer.
        let bytes = life.bytes.max(1).checked_next_multiple_of(self.alignment);
        if let Some(bytes) = bytes.filter(|&bytes| bytes <= self.buffer_bytes.min(self.device.info().max_buffer)) {
            return Ok(PackItem { start: life.start, end: life.end, bytes });
        }
        let slot = match of {
            Resident::Slot(slot) => slot as u32,
            Resident::Replica(replica) => split_graph.replicas[replica].slot,
        };
        let name = task.slot_tensor(slot).map_or("", |id| task.name(id));
        let info = self.device.info();
        Err(SchedError::TensorTooLarge {
            tensor: if name.is_empty() { format!("the tensor of slot {slot}") } else { name.to_owned() },
            device: info.name.clone(),
            bytes: life.bytes,
            limit: self.buffer_bytes.min(info.max_buffer),
        })
    }
}

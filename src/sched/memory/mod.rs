//! Where tensors lie on their devices.

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

/// Larger than any buffer there is; sums of so many bytes stay far from the end of `u64`.
const MAX_BUFFER_BYTES: u64 = 1 << 44;

/// Places computed slots and replicas. With a `depth` above 1 replicas lie in the ring, and live for ever; so do slots that
/// devices of other domains copy from, whose device need not wait then until it knows that they have.
///
/// # Errors
/// [`SchedError::TooLarge`] for a tensor larger than its device's largest buffer.
pub(crate) fn place_tensors(
    task: &Task,
    devices: &Devices,
    reach: &CopyPaths,
    cut: &SplitGraph,
    depth: usize,
) -> Result<MemoryLayout, SchedError> {
    let mut lives = Lifetimes::new(task, devices, cut);
    if depth > 1 {
        lives.mark_exclusive(cut, reach);
    }
    lives.reuse_in_place(task, cut);
    let mut layout = MemoryLayout {
        arenas: vec![ArenaSizes::default(); devices.len()],
        slots: vec![None; lives.slots.len()],
        replicas: vec![Allocation { kind: ArenaKind::Arena, buffer: 0, offset: 0, bytes: 0 }; cut.replicas.len()],
    };
    let (ringed, in_arena): (Vec<usize>, Vec<usize>) = (0..cut.replicas.len()).partition(|_| depth > 1);
    for (number, device) in devices.iter().enumerate() {
        let here = |replica: &usize| cut.replicas[*replica].device == number;
        let slots = (0..lives.slots.len()).filter(|&slot| lives.is_base(slot) && cut.homes[slot] == Some(number));
        let (apart, residents): (Vec<Resident>, Vec<Resident>) =
            slots.map(Resident::Slot).partition(|of| matches!(of, Resident::Slot(slot) if lives.exclusive[*slot]));
        let brought = |of: &[usize]| of.iter().copied().filter(here).map(Resident::Replica).collect::<Vec<_>>();
        let arena = [residents, brought(&in_arena)].concat();
        let ring = [brought(&ringed), apart].concat();
        for (area, residents) in [(ArenaKind::Arena, arena), (ArenaKind::Ring, ring)] {
            let walls = BufferLimits::new(device);
            let items = residents.iter().map(|of| walls.item(task, cut, lives.of(*of), *of));
            let items = items.collect::<Result<Vec<PackItem>, SchedError>>()?;
            let packed = match area {
                ArenaKind::Arena => pack::pack(&items, walls.buffer_bytes),
                ArenaKind::Ring => pack::pack_disjoint(&items, walls.buffer_bytes),
            };
            for ((of, item), (chunk, offset)) in
                residents.iter().zip(&items).zip(packed.allocations(walls.buffer_bytes))
            {
                let spot = Allocation { kind: area, buffer: chunk, offset, bytes: item.bytes };
                match *of {
                    Resident::Slot(slot) => layout.slots[slot] = Some(spot),
                    Resident::Replica(replica) => layout.replicas[replica] = spot,
                }
            }
            let chunks = packed.buffer_sizes(&items, walls.buffer_bytes);
            match area {
                ArenaKind::Arena => layout.arenas[number].arena = chunks,
                ArenaKind::Ring => layout.arenas[number].ring = chunks,
            }
        }
    }
    for slot in 0..lives.slots.len() {
        layout.slots[slot] = layout.slots[lives.base(slot)];
    }
    Ok(layout)
}

/// What takes up room on a device.
#[derive(Clone, Copy)]
enum Resident {
    Slot(usize),
    Replica(usize),
}

/// Nodes between which something is in use, both included, and the bytes it takes.
#[derive(Clone, Copy, Default)]
struct Lifetime {
    start: usize,
    end: usize,
    bytes: u64,
}

struct Lifetimes {
    /// By slot: computed ones that some node touches.
    slots: Vec<Option<Lifetime>>,
    /// By slot: the first one of those whose memory it takes over.
    reuses: Vec<Option<usize>>,
    /// By slot: whether it shares memory with no other, nor with itself in the next runs.
    exclusive: Vec<bool>,
    /// By replica.
    replicas: Vec<Lifetime>,
}

impl Lifetimes {
    fn new(task: &Task, devices: &Devices, cut: &SplitGraph) -> Lifetimes {
        let (graph, sizes) = (task.graph(), task.graph().slot_sizes());
        let lives = cut.replicas.iter().map(|r| Lifetime {
            // What the host writes is there before anything runs.
            start: if r.origin == ReplicaOrigin::Host { 0 } else { cut.splits[r.first_split].nodes.start },
            end: r.last_node,
            bytes: r.range.len() as u64,
        });
        let mut lives = Lifetimes {
            slots: vec![None; sizes.len()],
            reuses: vec![None; sizes.len()],
            exclusive: vec![false; sizes.len()],
            replicas: lives.collect(),
        };
        for split in &cut.splits {
            let device = &devices[split.device];
            for at in split.nodes.clone() {
                let node = &graph.nodes()[at];
                let written = task.write_range(node).map(|(slot, range)| (node.dst, slot, range));
                for (id, slot, range) in task.reads(node).chain(written) {
                    let slot = slot as usize;
                    let wanted = graph.tensor(id).map_or(0, |tensor| device.alloc_size(&tensor.desc));
                    if cut.homes[slot] != Some(split.device) {
                        let holds = |r: &&u32| cut.replicas[**r as usize].covers(slot as u32, &range);
                        if let Some(&replica) = split.reads.iter().find(holds) {
                            let skipped = range.start - cut.replicas[replica as usize].range.start;
                            lives.replicas[replica as usize].grow_to(skipped, wanted);
                        }
                    } else if matches!(task.storage()[slot], Storage::Computed) {
                        let life = lives.slots[slot].get_or_insert(Lifetime { start: at, end: at, bytes: 0 });
                        life.end = at;
                        life.grow_to(0, sizes[slot] as u64);
                        life.grow_to(range.start, wanted);
                    }
                }
            }
        }
        // A copy reads its source when the split that needs it begins.
        for replica in &cut.replicas {
            if let Some(life) = &mut lives.slots[replica.slot as usize] {
                life.end = life.end.max(cut.splits[replica.first_split].nodes.start);
            }
        }
        for (slot, life) in lives.slots.iter_mut().enumerate() {
            if let Some(life) = life.as_mut().filter(|_| task.is_output(slot as u32)) {
                life.end = graph.nodes().len();
            }
        }
        lives
    }

    /// Slots that devices of other domains copy from share memory with no other.
    fn mark_exclusive(&mut self, cut: &SplitGraph, reach: &CopyPaths) {
        for replica in &cut.replicas {
            if let ReplicaOrigin::Device(home) = replica.origin
                && reach.crosses_domains(replica.device, home)
            {
                self.exclusive[replica.slot as usize] = true;
            }
        }
    }

    /// Gives destinations the memory of sources that die there, where the op allows it.
    fn reuse_in_place(&mut self, task: &Task, cut: &SplitGraph) {
        let nodes = task.graph().nodes();
        for at in cut.splits.iter().flat_map(|split| split.nodes.clone()) {
            let Some(new) = self.new_destination(task, &nodes[at], at) else { continue };
            let taken = (0..nodes[at].srcs.len()).find_map(|i| self.reusable_source(task, cut, at, i, new));
            let Some(base) = taken else { continue };
            let (Some(dst), Some(src)) = (self.slots[new], self.slots[base]) else { continue };
            self.reuses[new] = Some(base);
            self.slots[base] = Some(Lifetime { end: dst.end, bytes: dst.bytes.max(src.bytes), ..src });
        }
    }

    /// The slot of a node's destination, where that is all of it and this node is the first to touch it.
    fn new_destination(&self, task: &Task, node: &Node, at: usize) -> Option<usize> {
        let (slot, range) = task.write_range(node)?;
        let life = self.slots[slot as usize]?;
        let whole = range.start == 0 && range.end == task.graph().slot_sizes()[slot as usize];
        (whole && life.start == at && !self.exclusive[slot as usize]).then_some(slot as usize)
    }

    /// The slot whose memory a node's source has, where that dies there and can become the destination.
    fn reusable_source(&self, task: &Task, cut: &SplitGraph, at: usize, source: usize, new: usize) -> Option<usize> {
        let (graph, node) = (task.graph(), &task.graph().nodes()[at]);
        let dst = graph.tensor(node.dst)?;
        // Whether it lies on all of the slot, as the destination will.
        let covers = |id: TensorId, slot: u32| {
            let whole = task.span(id).is_some_and(|(s, range)| s == slot && range.start == 0);
            whole && graph.tensor(id).is_some_and(|t| t.desc.same_layout(&dst.desc))
        };
        let (old, range) = task.span(node.srcs[source]?)?;
        let base = self.base(old as usize);
        let dies = base != self.base(new)
            && !self.exclusive[base]
            && cut.homes[old as usize] == cut.homes[new]
            && range.len() == graph.slot_sizes()[old as usize]
            // Only the last that took over a memory still lives there.
            && self.slots[old as usize].is_some_and(|life| self.is_last(base, life, at));
        // The same memory under another description could be read after it was overwritten.
        let mut others = node.srcs.iter().enumerate().filter_map(|(i, id)| Some((i, (*id)?)));
        let safe = others.all(|(i, id)| {
            task.span(id).is_none_or(|(slot, range)| {
                range.is_empty() || self.base(slot as usize) != base || (node.op.in_place(i) && covers(id, old))
            })
        });
        (dies && safe && !range.is_empty()).then_some(base)
    }

    /// Whether what lies in the memory of `base` ends with `life`, at a node.
    fn is_last(&self, base: usize, life: Lifetime, at: usize) -> bool {
        life.end == at && self.slots[base].is_some_and(|whole| whole.end == at)
    }

    /// The slot whose memory a slot has: its own, or the first of those taken over.
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
    /// Grows to hold `bytes` from `start` on.
    fn grow_to(&mut self, start: usize, bytes: u64) {
        self.bytes = self.bytes.max((start as u64).saturating_add(bytes));
    }
}

/// Where tensors may begin on a device, and which bytes none may straddle.
struct BufferLimits<'a> {
    device: &'a Arc<dyn Device>,
    alignment: u64,
    /// Buffers end at multiples of this.
    buffer_bytes: u64,
}

impl<'a> BufferLimits<'a> {
    fn new(device: &'a Arc<dyn Device>) -> BufferLimits<'a> {
        let alignment = device.info().alignment.max(1);
        let largest = device.info().max_buffer.min(MAX_BUFFER_BYTES);
        BufferLimits { device, alignment, buffer_bytes: (largest - largest % alignment).max(alignment) }
    }

    fn item(&self, task: &Task, cut: &SplitGraph, life: Lifetime, of: Resident) -> Result<PackItem, SchedError> {
        // Nothing is so small that it lies in no buffer.
        let bytes = life.bytes.max(1).checked_next_multiple_of(self.alignment);
        if let Some(bytes) = bytes.filter(|&bytes| bytes <= self.buffer_bytes.min(self.device.info().max_buffer)) {
            return Ok(PackItem { start: life.start, end: life.end, bytes });
        }
        let slot = match of {
            Resident::Slot(slot) => slot as u32,
            Resident::Replica(replica) => cut.replicas[replica].slot,
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

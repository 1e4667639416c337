//! Arenas: the device buffers in which plans place computed slots and replicas.

use super::super::plan::{MemoryId, MemoryRange};
use super::super::{ArenaKind, ArenaSizes, Devices, Plan, SchedError, Storage};
use crate::device::{Buffer, MemoryBudget, Region};
use std::sync::Arc;

/// Arena and ring buffers of all devices. They only grow: each is as large as any plan so far has needed.
#[derive(Debug, Default)]
pub(super) struct Arenas {
    /// By device: arena buffers.
    arenas: Vec<Vec<Buffer>>,
    /// By device, then by ring copy: ring buffers.
    rings: Vec<Vec<Vec<Buffer>>>,
    /// Incremented when buffers are replaced. Bindings of an older generation must be renewed.
    generation: u64,
}

impl Arenas {
    /// Whether the buffers are large enough for a plan.
    pub(super) fn are_large_enough(&self, required: &[ArenaSizes], depth: usize) -> bool {
        let fits = |buffers: Option<&Vec<Buffer>>, sizes: &[u64]| {
            let buffers = buffers.map_or(&[][..], Vec::as_slice);
            sizes.len() <= buffers.len() && sizes.iter().zip(buffers).all(|(&size, buffer)| size <= buffer.bytes())
        };
        required.iter().enumerate().all(|(device, device_sizes)| {
            let rings = self.rings.get(device).map_or(&[][..], Vec::as_slice);
            let copies = if device_sizes.ring.is_empty() { 0 } else { depth };
            fits(self.arenas.get(device), &device_sizes.arena)
                && (0..copies).all(|copy| fits(rings.get(copy), &device_sizes.ring))
        })
    }

    /// Replaces buffers that are too small for a plan. The caller must have waited for all work on the existing buffers.
    pub(super) fn grow(
        &mut self,
        devices: &Devices,
        budget: &Arc<MemoryBudget>,
        required: &[ArenaSizes],
        depth: usize,
    ) -> Result<(), SchedError> {
        self.generation += 1;
        self.arenas.resize(devices.len(), Vec::new());
        self.rings.resize(devices.len(), Vec::new());
        for (number, (device, device_sizes)) in devices.iter().zip(required).enumerate() {
            let enlarge = |buffers: &mut Vec<Buffer>, sizes: &[u64]| {
                for (index, &bytes) in sizes.iter().enumerate() {
                    if buffers.get(index).is_some_and(|buffer| buffer.bytes() >= bytes) {
                        continue;
                    }
                    // Drops the old buffer before it allocates the new one: the device need not hold both at once.
                    let later = buffers.split_off(index.min(buffers.len()));
                    let rest = later.into_iter().skip(1);
                    let buffer = device.alloc(bytes, budget);
                    buffers.push(buffer.map_err(|e| SchedError::from_device(&device.info().name, e))?);
                    buffers.extend(rest);
                }
                Ok(())
            };
            enlarge(&mut self.arenas[number], &device_sizes.arena)?;
            if !device_sizes.ring.is_empty() {
                let copies = self.rings[number].len().max(depth);
                self.rings[number].resize(copies, Vec::new());
                self.rings[number].iter_mut().take(depth).try_for_each(|ring| enlarge(ring, &device_sizes.ring))?;
            }
        }
        Ok(())
    }

    /// A counter of buffer replacements.
    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    /// Frees all buffers.
    pub(super) fn clear(&mut self) {
        *self = Arenas { arenas: Vec::new(), rings: Vec::new(), generation: self.generation + 1 };
    }

    /// By device: bytes of all buffers.
    pub(super) fn bytes(&self) -> Vec<u64> {
        let sum = |buffers: &[Buffer]| buffers.iter().map(Buffer::bytes).sum::<u64>();
        let rings = |device: usize| self.rings.get(device).map_or(0, |rings| rings.iter().map(|ring| sum(ring)).sum());
        self.arenas.iter().enumerate().map(|(device, arena)| sum(arena) + rings(device)).collect()
    }

    /// The region of a whole memory, for one ring copy.
    pub(super) fn buffer_region(&self, plan: &Plan, memory: MemoryId, copy: usize) -> Result<Region, SchedError> {
        match memory {
            MemoryId::Arena { device, kind, buffer } => {
                let buffers = match kind {
                    ArenaKind::Arena => self.arenas.get(device),
                    ArenaKind::Ring => self.rings.get(device).and_then(|rings| rings.get(copy)),
                };
                let buffer = buffers.and_then(|buffers| buffers.get(buffer as usize));
                buffer.map(Buffer::whole).ok_or(SchedError::Bug("a plan's arena buffer was not allocated"))
            }
            MemoryId::Stored { slot } => match plan.task.storage().get(slot as usize) {
                Some(Storage::Stored { region: Some(region), .. }) => Ok(region.clone()),
                _ => Err(SchedError::StoredWithoutRegion { name: plan.task.slot_name(slot).to_owned() }),
            },
        }
    }

    /// The region of a memory range, for one ring copy.
    pub(super) fn region(&self, plan: &Plan, at: &MemoryRange, copy: usize) -> Result<Region, SchedError> {
        let whole = self.buffer_region(plan, at.memory, copy)?;
        let part = whole.subregion(at.bytes.start, at.bytes.end - at.bytes.start);
        part.map_err(|_| SchedError::Bug("a located tensor lies outside its memory"))
    }
}

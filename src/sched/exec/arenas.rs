//! Memory of the devices that plans' tensors lie in.

use super::super::plan::{MemoryId, MemoryRange};
use super::super::{ArenaKind, ArenaSizes, Devices, Plan, SchedError, Storage};
use crate::device::{Account, Buffer, Region};
use std::sync::Arc;

/// Buffers of all devices: as large as the largest plan so far needs them.
#[derive(Debug, Default)]
pub(super) struct Arenas {
    /// By device, then chunk.
    arenas: Vec<Vec<Buffer>>,
    /// By device, then copy, then chunk.
    rings: Vec<Vec<Vec<Buffer>>>,
    /// Who holds regions of older buffers must look again.
    generation: u64,
}

impl Arenas {
    /// Whether a plan's tensors have room.
    pub(super) fn are_large_enough(&self, rooms: &[ArenaSizes], depth: usize) -> bool {
        let fits = |buffers: Option<&Vec<Buffer>>, sizes: &[u64]| {
            let buffers = buffers.map_or(&[][..], Vec::as_slice);
            sizes.len() <= buffers.len() && sizes.iter().zip(buffers).all(|(&size, buffer)| size <= buffer.bytes())
        };
        rooms.iter().enumerate().all(|(device, room)| {
            let rings = self.rings.get(device).map_or(&[][..], Vec::as_slice);
            let copies = if room.ring.is_empty() { 0 } else { depth };
            fits(self.arenas.get(device), &room.arena) && (0..copies).all(|copy| fits(rings.get(copy), &room.ring))
        })
    }

    /// Makes room for a plan. Nothing may be running in what is there.
    pub(super) fn grow(
        &mut self,
        devices: &Devices,
        account: &Arc<Account>,
        rooms: &[ArenaSizes],
        depth: usize,
    ) -> Result<(), SchedError> {
        self.generation += 1;
        self.arenas.resize(devices.len(), Vec::new());
        self.rings.resize(devices.len(), Vec::new());
        for (number, (device, room)) in devices.iter().zip(rooms).enumerate() {
            let enlarge = |buffers: &mut Vec<Buffer>, sizes: &[u64]| {
                for (chunk, &bytes) in sizes.iter().enumerate() {
                    if buffers.get(chunk).is_some_and(|buffer| buffer.bytes() >= bytes) {
                        continue;
                    }
                    // The old one goes first: a device need not hold both.
                    let later = buffers.split_off(chunk.min(buffers.len()));
                    let rest = later.into_iter().skip(1);
                    let buffer = device.alloc(bytes, account);
                    buffers.push(buffer.map_err(|e| SchedError::from_device(&device.info().name, e))?);
                    buffers.extend(rest);
                }
                Ok(())
            };
            enlarge(&mut self.arenas[number], &room.arena)?;
            if !room.ring.is_empty() {
                let copies = self.rings[number].len().max(depth);
                self.rings[number].resize(copies, Vec::new());
                self.rings[number].iter_mut().take(depth).try_for_each(|ring| enlarge(ring, &room.ring))?;
            }
        }
        Ok(())
    }

    /// Counts the changes of buffers.
    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    /// Gives all of it back.
    pub(super) fn clear(&mut self) {
        *self = Arenas { arenas: Vec::new(), rings: Vec::new(), generation: self.generation + 1 };
    }

    /// Bytes on each device.
    pub(super) fn bytes(&self) -> Vec<u64> {
        let sum = |buffers: &[Buffer]| buffers.iter().map(Buffer::bytes).sum::<u64>();
        let rings = |device: usize| self.rings.get(device).map_or(0, |rings| rings.iter().map(|ring| sum(ring)).sum());
        self.arenas.iter().enumerate().map(|(device, arena)| sum(arena) + rings(device)).collect()
    }

    /// The memory of a slot of a split's graph, for one of the copies.
    pub(super) fn buffer_region(&self, plan: &Plan, memory: MemoryId, copy: usize) -> Result<Region, SchedError> {
        match memory {
            MemoryId::Arena { device, area, chunk } => {
                let buffers = match area {
                    ArenaKind::Arena => self.arenas.get(device),
                    ArenaKind::Ring => self.rings.get(device).and_then(|rings| rings.get(copy)),
                };
                let buffer = buffers.and_then(|buffers| buffers.get(chunk as usize));
                buffer.map(Buffer::whole).ok_or(SchedError::Bug("a plan's room was not made"))
            }
            MemoryId::Stored { slot } => match plan.task.storage().get(slot as usize) {
                Some(Storage::Stored { region: Some(region), .. }) => Ok(region.clone()),
                _ => Err(SchedError::StoredWithoutRegion { name: plan.task.slot_name(slot).to_owned() }),
            },
        }
    }

    /// The bytes of something that has been located, for one of the copies.
    pub(super) fn region(&self, plan: &Plan, at: &MemoryRange, copy: usize) -> Result<Region, SchedError> {
        let whole = self.buffer_region(plan, at.memory, copy)?;
        let part = whole.part(at.bytes.start, at.bytes.end - at.bytes.start);
        part.map_err(|_| SchedError::Bug("a located tensor lies outside its memory"))
    }
}

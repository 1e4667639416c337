//! Snapshot of the live allocations: lookup, and copies and fills by the host.

use std::sync::{Arc, Mutex, PoisonError};

use super::space::FreedAllocations;
use super::{Allocation, AllocationKind, PhysicalMemory};
use crate::fault::FaultKind;

/// An immutable list of the live allocations.
#[derive(Debug)]
pub struct MemorySnapshot {
    allocations: Vec<Arc<Allocation>>,
    graves: Arc<Mutex<FreedAllocations>>,
}

impl MemorySnapshot {
    pub(super) fn new(allocations: Vec<Arc<Allocation>>, graves: Arc<Mutex<FreedAllocations>>) -> Self {
        Self { allocations, graves }
    }

    /// All allocations, sorted by address.
    pub fn allocations(&self) -> &[Arc<Allocation>] {
        &self.allocations
    }

    /// Index of the last allocation that starts at or before `address`.
    fn before(&self, address: u64) -> Option<usize> {
        self.allocations.partition_point(|a| a.base() <= address).checked_sub(1)
    }

    /// Index in [`MemorySnapshot::allocations`] of the allocation that contains all of the bytes.
    #[inline]
    pub fn index_of(&self, address: u64, bytes: u64) -> Option<usize> {
        let index = self.before(address)?;
        let allocation = &self.allocations[index];
        let at = address - allocation.base();
        (at < allocation.bytes() && allocation.bytes() - at >= bytes && !allocation.is_freed()).then_some(index)
    }

    /// The allocation that contains all of the bytes.
    pub fn find(&self, address: u64, bytes: u64) -> Result<&Arc<Allocation>, FaultKind> {
        match self.index_of(address, bytes) {
            Some(index) => Ok(&self.allocations[index]),
            None => Err(self.explain_miss(address, bytes)),
        }
    }

    /// As [`MemorySnapshot::find`]; also fails if a kernel on `device`, with access to the devices in `peers`, may not access
    /// the allocation.
    pub fn reachable(
        &self,
        address: u64,
        bytes: u64,
        device: u32,
        peers: u64,
        write: bool,
    ) -> Result<&Arc<Allocation>, FaultKind> {
        let allocation = self.find(address, bytes)?;
        if allocation.allows(device, peers, write) {
            return Ok(allocation);
        }
        let what = allocation.describe();
        Err(FaultKind::NotAccessible(match allocation.kind() {
            AllocationKind::Constant => format!("{what} is constant: kernels may not write it"),
            _ => format!("{what}: device {device} has no peer access to device {} enabled", allocation.device()),
        }))
    }

    /// The fault for a range without allocation: it names the freed allocation there, or the nearest one.
    pub(crate) fn explain_miss(&self, address: u64, bytes: u64) -> FaultKind {
        let graves = self.graves.lock().unwrap_or_else(PoisonError::into_inner);
        let index = self.before(address);
        let before = index.map(|i| &self.allocations[i]);
        if let Some(freed) = before.filter(|a| a.is_freed() && address < a.end()) {
            return FaultKind::UseAfterFree(format!("byte {} of {}, freed", address - freed.base(), freed.describe()));
        }
        if let Some((base, grave)) = graves.at(address)
            && before.is_none_or(|a| a.end() <= address)
        {
            return FaultKind::UseAfterFree(format!("byte {} of {}, freed", address - base, grave.text));
        }
        let after = self.allocations.get(index.map_or(0, |i| i + 1));
        if let Some(a) = before.filter(|a| address < a.end()) {
            let over = address.saturating_add(bytes).saturating_sub(a.end());
            return FaultKind::OutOfBounds(format!("its last byte lies {over} bytes past the end of {}", a.describe()));
        }
        if address < 4096 {
            return FaultKind::OutOfBounds(format!("{address:#x}: a null pointer plus {address} bytes"));
        }
        let past = before.map(|a| (address - a.end(), a, "past the end of"));
        let ahead = after.map(|a| (a.base() - address, a, "before the start of"));
        match past.into_iter().chain(ahead).min_by_key(|near| near.0) {
            Some((distance, a, side)) => FaultKind::OutOfBounds(format!("{distance} bytes {side} {}", a.describe())),
            None => FaultKind::OutOfBounds(format!("{address:#x}: there is no allocation at all")),
        }
    }

    /// The memory of the allocation that contains all of the bytes, and their offset in it; `None` if there are no bytes.
    fn place(&self, address: u64, bytes: u64) -> Result<Option<(&PhysicalMemory, u64)>, FaultKind> {
        if bytes == 0 {
            return Ok(None);
        }
        let allocation = self.find(address, bytes)?;
        Ok(Some((allocation.physical(), address - allocation.base())))
    }

    /// Copies to the host.
    pub fn read(&self, address: u64, out: &mut [u8]) -> Result<(), FaultKind> {
        let Some((physical, at)) = self.place(address, out.len() as u64)? else { return Ok(()) };
        physical.backing().read(at as usize, out);
        Ok(())
    }

    /// Copies from the host.
    pub fn write(&self, address: u64, data: &[u8]) -> Result<(), FaultKind> {
        let Some((physical, at)) = self.place(address, data.len() as u64)? else { return Ok(()) };
        physical.backing().write(at as usize, data);
        physical.mark_written(at, data.len() as u64);
        Ok(())
    }

    /// Repeats a pattern of 1 or 4 bytes `count` times; the address must be a multiple of its size.
    pub fn fill(&self, address: u64, pattern: &[u8], count: u64) -> Result<(), FaultKind> {
        let unit = pattern.len() as u64;
        if !matches!(unit, 1 | 4) {
            return Err(FaultKind::InvalidValue(format!("a pattern of {unit} bytes; 1 or 4 are possible")));
        }
        if !address.is_multiple_of(unit) {
            return Err(FaultKind::Misaligned);
        }
        let bytes = count.checked_mul(unit).ok_or_else(|| self.explain_miss(address, u64::MAX))?;
        let Some((physical, at)) = self.place(address, bytes)? else { return Ok(()) };
        let mut chunk = [0; 4096];
        for to in chunk.chunks_exact_mut(pattern.len()) {
            to.copy_from_slice(pattern);
        }
        for done in (0..bytes).step_by(chunk.len()) {
            let step = (bytes - done).min(chunk.len() as u64);
            physical.backing().write((at + done) as usize, &chunk[..step as usize]);
        }
        physical.mark_written(at, bytes);
        Ok(())
    }

    /// Copies bytes and their written bits between devices or within one.
    pub fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<(), FaultKind> {
        if let (Some((source, from)), Some((target, to))) = (self.place(from, bytes)?, self.place(to, bytes)?) {
            target.copy_from(to, source, from, bytes);
        }
        Ok(())
    }

    /// The first unwritten address of a range.
    pub fn first_uninitialised(&self, address: u64, bytes: u64) -> Result<Option<u64>, FaultKind> {
        let Some((physical, at)) = self.place(address, bytes)? else { return Ok(None) };
        Ok(physical.first_unwritten(at, bytes).map(|missing| address + (missing - at)))
    }
}

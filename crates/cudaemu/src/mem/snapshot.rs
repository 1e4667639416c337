//! Snapshot of the live allocations: lookup, and copies and fills by the host.

use std::sync::{Arc, Mutex, PoisonError};

use super::space::FreedAllocations;
use super::{Allocation, AllocationKind};
use crate::fault::FaultKind;

/// An immutable list of the live allocations.
#[derive(Debug)]
pub struct MemorySnapshot {
    allocations: Vec<Arc<Allocation>>,
    graves: Arc<Mutex<FreedAllocations>>,
}

/// A part of a range that is in one allocation.
struct Piece<'a> {
    allocation: &'a Allocation,
    /// Offset in the allocation's memory.
    at: u64,
    bytes: u64,
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
            AllocationKind::Mapped => {
                format!("{what}: cuMemSetAccess gave device {device} no right to {} it", verb(write))
            }
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

    /// Calls `f` for each part of a range, with the part's offset in the range. The range may span adjacent mappings, but no
    /// other allocations.
    fn pieces(&self, address: u64, bytes: u64, f: &mut dyn FnMut(Piece<'_>, u64)) -> Result<(), FaultKind> {
        // The first pass checks the whole range, the second one acts on it.
        for act in [false, true] {
            let mut done = 0;
            while done < bytes {
                let here = address.checked_add(done).ok_or_else(|| self.explain_miss(address, bytes))?;
                let allocation = self.find(here, 1)?;
                let at = here - allocation.base();
                let step = (bytes - done).min(allocation.bytes() - at);
                if step < bytes - done && allocation.kind() != AllocationKind::Mapped {
                    return Err(self.explain_miss(here, bytes - done));
                }
                if act {
                    f(Piece { allocation, at: allocation.offset() + at, bytes: step }, done);
                }
                done += step;
            }
        }
        Ok(())
    }

    /// Copies to the host.
    pub fn read(&self, address: u64, out: &mut [u8]) -> Result<(), FaultKind> {
        self.pieces(address, out.len() as u64, &mut |piece, from| {
            let out = &mut out[from as usize..(from + piece.bytes) as usize];
            piece.allocation.physical().backing().read(piece.at as usize, out);
        })
    }

    /// Copies from the host.
    pub fn write(&self, address: u64, data: &[u8]) -> Result<(), FaultKind> {
        self.pieces(address, data.len() as u64, &mut |piece, from| {
            let physical = piece.allocation.physical();
            physical.backing().write(piece.at as usize, &data[from as usize..(from + piece.bytes) as usize]);
            physical.mark_written(piece.at, piece.bytes);
        })
    }

    /// Repeats a pattern of 1, 2 or 4 bytes `count` times; the address must be a multiple of its size.
    pub fn fill(&self, address: u64, pattern: &[u8], count: u64) -> Result<(), FaultKind> {
        let unit = pattern.len() as u64;
        if !matches!(unit, 1 | 2 | 4) {
            return Err(FaultKind::InvalidValue(format!("a pattern of {unit} bytes; 1, 2 or 4 are possible")));
        }
        if !address.is_multiple_of(unit) {
            return Err(FaultKind::Misaligned);
        }
        let bytes = count.checked_mul(unit).ok_or_else(|| self.explain_miss(address, u64::MAX))?;
        let mut chunk = [0; 4096];
        for to in chunk.chunks_exact_mut(pattern.len()) {
            to.copy_from_slice(pattern);
        }
        self.pieces(address, bytes, &mut |piece, _| {
            let physical = piece.allocation.physical();
            for done in (0..piece.bytes).step_by(chunk.len()) {
                let step = (piece.bytes - done).min(chunk.len() as u64);
                physical.backing().write((piece.at + done) as usize, &chunk[..step as usize]);
            }
            physical.mark_written(piece.at, piece.bytes);
        })
    }

    /// Copies bytes and their written bits between devices or within one.
    pub fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<(), FaultKind> {
        self.pieces(from, bytes, &mut |_, _| ())?;
        let mut inner = Ok(());
        self.pieces(to, bytes, &mut |target, done| {
            let source = self.pieces(from + done, target.bytes, &mut |source, at| {
                let memory = source.allocation.physical();
                target.allocation.physical().copy_from(target.at + at, memory, source.at, source.bytes);
            });
            if inner.is_ok() {
                inner = source;
            }
        })?;
        inner
    }

    /// The first unwritten address of a range.
    pub fn first_uninitialised(&self, address: u64, bytes: u64) -> Result<Option<u64>, FaultKind> {
        let mut first = None;
        self.pieces(address, bytes, &mut |piece, done| {
            if first.is_none() {
                let missing = piece.allocation.physical().first_unwritten(piece.at, piece.bytes);
                first = missing.map(|at| address + done + (at - piece.at));
            }
        })?;
        Ok(first)
    }
}

fn verb(write: bool) -> &'static str {
    if write { "write" } else { "read" }
}

//! Checked accesses to global memory.

use std::sync::Arc;

use crate::fault::{Fault, FaultAccess, FaultKind, MemorySpace};
use crate::mem::{Allocation, AllocationKind, Footprint, MemorySnapshot, PhysicalMemory};

use super::{AccessEnv, Addresses, LANES, Lanes, consecutive, lanes};

/// Size of the cache of recently used allocations. Most kernels use at most four at once: matrix, vector, result, scales.
const RECENT: usize = 4;

/// Global memory as one worker thread sees it during a launch.
#[derive(Debug)]
pub struct Global {
    view: Arc<MemorySnapshot>,
    device: u32,
    peers: u64,
    counting: bool,
    footprint: Option<Arc<Footprint>>,
    recent: [Recent; RECENT],
    /// The cache entry to evict next.
    oldest: usize,
}

/// A cached allocation.
#[derive(Clone, Debug, Default)]
struct Recent {
    base: u64,
    bytes: u64,
    /// `None` for an empty entry, whose 0 bytes match no access.
    allocation: Option<Arc<Allocation>>,
    /// Index in the snapshot.
    index: usize,
    readable: bool,
    writable: bool,
}

/// A checked range.
#[derive(Clone, Copy)]
struct CheckedRange<'a> {
    physical: &'a PhysicalMemory,
    /// Offset in the allocation, and the allocation's index.
    at: u64,
    index: usize,
    allocation_bytes: u64,
}

/// The allocation that contains the bytes of all lanes of an access.
#[derive(Clone, Copy)]
struct SharedAllocation<'a> {
    physical: &'a PhysicalMemory,
    /// The allocation's first address, and its index.
    start: u64,
    index: usize,
    /// Whether all lanes have the same address.
    same: bool,
}

fn access<const N: usize>(address: u64, write: bool) -> FaultAccess {
    FaultAccess { memory: MemorySpace::Global, address, bytes: N as u32, write }
}

/// Whether all bytes that a load uses were written.
#[cold]
fn known<const N: usize>(physical: &PhysicalMemory, at: u64, padding: u32) -> bool {
    let mut used = (0..N as u64).filter(|byte| padding >> byte & 1 == 0);
    physical.is_written(at, N as u64) || padding != 0 && used.all(|byte| physical.is_written(at + byte, 1))
}

/// Number of distinct 32-byte sectors.
fn sectors(at: &Addresses, mask: u32) -> u64 {
    if mask == u32::MAX {
        // Fast path for ascending addresses, the common case: a sector is new if it differs from the neighbouring lane's.
        let (mut new, mut falls) = (1, 0);
        for lane in 1..LANES {
            let (before, here) = (at[lane - 1] >> 5, at[lane] >> 5);
            new += u64::from(here != before);
            falls |= u64::from(here < before);
        }
        if falls == 0 {
            return new;
        }
    }
    let mut seen = [0; LANES];
    let mut count = 0;
    let mut highest = 0;
    for lane in lanes(mask) {
        // Sectors are counted from 1, so that the first one is above the initial `highest`.
        let sector = (at[lane] >> 5) + 1;
        if sector > highest || !seen[..count].contains(&sector) {
            seen[count] = sector;
            count += 1;
            highest = highest.max(sector);
        }
    }
    count as u64
}

/// Counts the sectors that the block has not read before. Lanes that follow one in the same sector are skipped.
fn count_block_sectors(at: &Addresses, mask: u32, env: &mut AccessEnv<'_>) {
    let mut before = None;
    for lane in lanes(mask) {
        let sector = Some(at[lane] >> 5);
        if sector != before {
            env.counts.block_sectors += u64::from(env.block_sectors.insert(at[lane]));
        }
        before = sector;
    }
}

impl Global {
    /// The memory that a kernel on `device` sees; `peers` is the mask of devices whose memory it may access. `counting` counts
    /// bytes and sectors, and distinct bytes if there is a footprint.
    pub fn new(
        view: Arc<MemorySnapshot>,
        device: u32,
        peers: u64,
        counting: bool,
        footprint: Option<Arc<Footprint>>,
    ) -> Self {
        Self { view, device, peers, counting, footprint, recent: Default::default(), oldest: 0 }
    }

    /// Whether an address is in constant memory.
    pub fn is_constant(&self, address: u64) -> bool {
        let index = self.view.index_of(address, 1);
        index.is_some_and(|index| self.view.allocations()[index].kind() == AllocationKind::Constant)
    }

    /// A cached allocation that contains the range.
    #[inline(always)]
    fn lookup(&self, address: u64, bytes: u64, write: bool) -> Option<CheckedRange<'_>> {
        for recent in &self.recent {
            let at = address.wrapping_sub(recent.base);
            if at < recent.bytes && recent.bytes - at >= bytes {
                let allocation = recent.allocation.as_ref()?;
                let allowed = if write { recent.writable } else { recent.readable };
                if !allowed || allocation.is_freed() {
                    return None;
                }
                let physical = allocation.physical();
                let allocation_bytes = recent.bytes;
                return Some(CheckedRange { physical, at, index: recent.index, allocation_bytes });
            }
        }
        None
    }

    /// Finds a range, first in the cache of recent allocations; fails if it is not accessible.
    #[inline(always)]
    fn place(&mut self, address: u64, bytes: u64, write: bool) -> Result<CheckedRange<'_>, FaultKind> {
        if self.lookup(address, bytes, write).is_none() {
            self.fetch(address, bytes, write)?;
        }
        let lost = || FaultKind::Internal(format!("an allocation at {address:#x} was found and lost"));
        self.lookup(address, bytes, write).ok_or_else(lost)
    }

    /// Finds an allocation and puts it into the cache.
    #[cold]
    fn fetch(&mut self, address: u64, bytes: u64, write: bool) -> Result<(), FaultKind> {
        let allocation = self.view.reachable(address, bytes, self.device, self.peers, write)?.clone();
        let index = self.view.index_of(address, bytes).ok_or_else(|| FaultKind::Internal("a view changed".into()))?;
        self.recent[self.oldest] = Recent {
            base: allocation.base(),
            bytes: allocation.bytes(),
            index,
            readable: allocation.allows(self.device, self.peers, false),
            writable: allocation.allows(self.device, self.peers, true),
            allocation: Some(allocation),
        };
        self.oldest = (self.oldest + 1) % RECENT;
        Ok(())
    }

    /// Fast path: if all lanes of the mask lie aligned in one allocation, returns the offset that address 0 would have. Then
    /// only written bytes remain to be checked per lane. `None` means that each lane needs its own check.
    #[inline(always)]
    fn together<const N: usize>(&mut self, at: &Addresses, mask: u32, write: bool) -> Option<SharedAllocation<'_>> {
        let first = at[mask.trailing_zeros() as usize & 31];
        let place = self.place(first, N as u64, write).ok()?;
        let start = first - place.at;
        let last = place.allocation_bytes - N as u64;
        let mut wrong = 0;
        let mut different = 0;
        for lane in 0..LANES {
            // Lanes outside the mask have arbitrary addresses: use the first lane's address in their place.
            let address = if mask >> lane & 1 != 0 { at[lane] } else { first };
            let inside = address.wrapping_sub(start);
            wrong |= u64::from(inside > last) | address & (N as u64 - 1);
            different |= address ^ first;
        }
        (wrong == 0).then_some(SharedAllocation {
            physical: place.physical,
            start,
            index: place.index,
            same: different == 0,
        })
    }

    /// Finds one lane's bytes and checks everything except whether they were written.
    #[inline(always)]
    fn lane<const N: usize>(&mut self, address: u64, lane: usize, write: bool) -> Result<CheckedRange<'_>, Box<Fault>> {
        if !address.is_multiple_of(N as u64) {
            return Err(Fault::access(FaultKind::Misaligned, lane, access::<N>(address, write)));
        }
        self.place(address, N as u64, write).map_err(|kind| Fault::access(kind, lane, access::<N>(address, write)))
    }

    #[inline(always)]
    fn touch(&self, index: usize, at: u64, bytes: u64, write: bool) {
        if let Some(footprint) = &self.footprint {
            footprint.touch(index, at, bytes, write);
        }
    }

    #[inline(always)]
    fn touch_lanes<const N: usize>(&self, index: usize, start: u64, at: &Addresses, mask: u32, write: bool) {
        if let Some(footprint) = &self.footprint {
            lanes(mask).for_each(|lane| footprint.touch(index, at[lane] - start, N as u64, write));
        }
    }

    #[inline(always)]
    fn count<const N: usize>(&self, at: &Addresses, mask: u32, write: bool, env: &mut AccessEnv<'_>) {
        if self.counting {
            let to = if write { &mut env.counts.global_written } else { &mut env.counts.global_read };
            to.count(u64::from(mask.count_ones()) * N as u64, sectors(at, mask));
            if !write {
                count_block_sectors(at, mask, env);
            }
        }
    }

    #[inline(always)]
    fn count_run<const N: usize>(&self, first: u64, write: bool, env: &mut AccessEnv<'_>) {
        if self.counting {
            let to = if write { &mut env.counts.global_written } else { &mut env.counts.global_read };
            let bytes = (LANES * N) as u64;
            let sectors = first >> 5..=(first + bytes - 1) >> 5;
            to.count(bytes, sectors.end() - sectors.start() + 1);
            if !write {
                let new = sectors.filter(|sector| env.block_sectors.insert(sector << 5));
                env.counts.block_sectors += new.count() as u64;
            }
        }
    }

    pub(super) fn load<const N: usize>(
        &mut self,
        at: &Addresses,
        mask: u32,
        env: &mut AccessEnv<'_>,
    ) -> Result<Lanes<[u8; N]>, Box<Fault>> {
        let mut out = [[0; N]; LANES];
        let run = (LANES * N) as u64;
        if mask == u32::MAX && at[0].is_multiple_of(N as u64) && consecutive::<N>(at) {
            // If the fast path finds a fault, fall through to the per-lane path, which reports the right lane.
            if let Ok(place) = self.place(at[0], run, false)
                && place.physical.is_written(place.at, run)
            {
                place.physical.backing().read(place.at as usize, out.as_flattened_mut());
                let (index, offset) = (place.index, place.at);
                self.touch(index, offset, run, false);
                self.count_run::<N>(at[0], false, env);
                return Ok(out);
            }
        }
        if let Some(all) = self.together::<N>(at, mask, false) {
            let SharedAllocation { physical, start, index, same } = all;
            let written = |lane: usize| physical.is_written(at[lane] - start, N as u64);
            let load = |lane: usize| physical.backing().load((at[lane] - start) as usize);
            let first = mask.trailing_zeros() as usize & 31;
            let known = physical.is_full() || if same { written(first) } else { lanes(mask).all(written) };
            if known {
                if same {
                    out = [load(first); LANES];
                } else {
                    lanes(mask).for_each(|lane| out[lane] = load(lane));
                }
                self.touch_lanes::<N>(index, start, at, mask, false);
                self.count::<N>(at, mask, false, env);
                return Ok(out);
            }
        }
        let mut reported = false;
        for lane in lanes(mask) {
            let place = self.lane::<N>(at[lane], lane, false)?;
            out[lane] = place.physical.backing().load(place.at as usize);
            if !reported && !known::<N>(place.physical, place.at, env.padding) {
                env.report(Fault::access(FaultKind::Uninitialised, lane, access::<N>(at[lane], false)))?;
                reported = true;
            }
            let (index, offset) = (place.index, place.at);
            self.touch(index, offset, N as u64, false);
        }
        self.count::<N>(at, mask, false, env);
        Ok(out)
    }

    pub(super) fn store<const N: usize>(
        &mut self,
        at: &Addresses,
        values: &Lanes<[u8; N]>,
        mask: u32,
        env: &mut AccessEnv<'_>,
    ) -> Result<(), Box<Fault>> {
        let run = (LANES * N) as u64;
        if mask == u32::MAX
            && at[0].is_multiple_of(N as u64)
            && consecutive::<N>(at)
            && let Ok(place) = self.place(at[0], run, true)
        {
            place.physical.backing().write(place.at as usize, values.as_flattened());
            place.physical.mark_written(place.at, run);
            let (index, offset) = (place.index, place.at);
            self.touch(index, offset, run, true);
            self.count_run::<N>(at[0], true, env);
            return Ok(());
        }
        if let Some(all) = self.together::<N>(at, mask, true) {
            for lane in lanes(mask) {
                let place = at[lane] - all.start;
                all.physical.backing().store(place as usize, values[lane]);
                all.physical.mark_written(place, N as u64);
            }
            let (index, start) = (all.index, all.start);
            self.touch_lanes::<N>(index, start, at, mask, true);
            self.count::<N>(at, mask, true, env);
            return Ok(());
        }
        for lane in lanes(mask) {
            let place = self.lane::<N>(at[lane], lane, true)?;
            place.physical.backing().store(place.at as usize, values[lane]);
            place.physical.mark_written(place.at, N as u64);
            let (index, offset) = (place.index, place.at);
            self.touch(index, offset, N as u64, true);
        }
        self.count::<N>(at, mask, true, env);
        Ok(())
    }

    pub(super) fn update<const N: usize>(
        &mut self,
        at: &Addresses,
        mask: u32,
        update: &mut dyn FnMut(usize, [u8; N]) -> [u8; N],
        env: &mut AccessEnv<'_>,
    ) -> Result<Lanes<[u8; N]>, Box<Fault>> {
        let mut out = [[0; N]; LANES];
        for lane in lanes(mask) {
            let place = self.lane::<N>(at[lane], lane, true)?;
            if !place.physical.is_written(place.at, N as u64) {
                env.report(Fault::access(FaultKind::Uninitialised, lane, access::<N>(at[lane], false)))?;
            }
            let (backing, offset) = (place.physical.backing(), place.at as usize);
            let mut old = backing.load(offset);
            while let Err(other) = backing.exchange(offset, old, update(lane, old)) {
                old = other;
            }
            out[lane] = old;
            place.physical.mark_written(place.at, N as u64);
            let (index, offset) = (place.index, place.at);
            self.touch(index, offset, N as u64, false);
            self.touch(index, offset, N as u64, true);
        }
        self.count::<N>(at, mask, false, env);
        self.count::<N>(at, mask, true, env);
        Ok(out)
    }

    /// Checks the source of one lane's asynchronous copy; returns whether all of its bytes were written.
    pub(super) fn check_source(&mut self, address: u64, bytes: u64) -> Result<bool, FaultKind> {
        let place = self.place(address, bytes, false)?;
        Ok(place.physical.is_written(place.at, bytes))
    }

    /// Reads the source of one lane's asynchronous copy.
    pub(super) fn read_source(&mut self, address: u64, out: &mut [u8]) -> Result<(), FaultKind> {
        let place = self.place(address, out.len() as u64, false)?;
        place.physical.backing().read(place.at as usize, out);
        let (index, offset) = (place.index, place.at);
        self.touch(index, offset, out.len() as u64, false);
        Ok(())
    }

    /// Counts the traffic of an asynchronous copy's sources.
    pub(super) fn count_sources(&self, at: &Addresses, bytes: &Lanes<u32>, mask: u32, env: &mut AccessEnv<'_>) {
        if self.counting {
            let sum = lanes(mask).map(|lane| u64::from(bytes[lane])).sum();
            let read = lanes(mask).filter(|&lane| bytes[lane] > 0).fold(0, |read, lane| read | 1 << lane);
            env.counts.global_read.count(sum, if read == 0 { 0 } else { sectors(at, read) });
            count_block_sectors(at, read, env);
        }
    }
}

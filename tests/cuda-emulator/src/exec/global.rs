//! Checked accesses to global memory.

use std::sync::Arc;

use crate::fault::{Access, Fault, Kind, Memory};
use crate::mem::{Allocation, Footprint, Physical, View};

use super::cx::{Env, lanes};
use super::{Addresses, LANES, Lanes};

/// Allocations that a kernel uses at once, mostly: matrix, vector, result, scales.
const RECENT: usize = 4;

/// Global memory as one thread of the emulator sees it, for one launch.
#[derive(Debug)]
pub struct Global {
    view: Arc<View>,
    device: u32,
    peers: u64,
    counting: bool,
    footprint: Option<Arc<Footprint>>,
    recent: [Recent; RECENT],
    /// Which of them is replaced next.
    oldest: usize,
}

/// An allocation that was used lately.
#[derive(Clone, Debug, Default)]
struct Recent {
    base: u64,
    bytes: u64,
    /// `None`: an empty place (of 0 bytes, so that nothing is found there).
    allocation: Option<Arc<Allocation>>,
    /// Index in the view.
    index: usize,
    readable: bool,
    writable: bool,
}

/// A range found, ready for use.
#[derive(Clone, Copy)]
struct Place<'a> {
    physical: &'a Physical,
    /// Where in the memory.
    at: u64,
    /// Where in the allocation, and its index.
    in_allocation: u64,
    index: usize,
}

fn access<const N: usize>(address: u64, write: bool) -> Access {
    Access { memory: Memory::Global, address, bytes: N as u32, write }
}

/// Whether lane i's address is lane 0's plus `i * N`.
#[inline(always)]
fn consecutive<const N: usize>(at: &Addresses) -> bool {
    let mut difference = 0;
    for lane in 0..LANES {
        difference |= at[lane] ^ at[0].wrapping_add((lane * N) as u64);
    }
    difference == 0
}

/// Distinct 32-byte sectors.
fn sectors(at: &Addresses, mask: u32) -> u64 {
    let mut seen = [0; LANES];
    let mut count = 0;
    let mut highest = 0;
    for lane in lanes(mask) {
        // Plus one, so that sector 0 is above the initial `highest`.
        let sector = (at[lane] >> 5) + 1;
        if sector > highest || !seen[..count].contains(&sector) {
            seen[count] = sector;
            count += 1;
            highest = highest.max(sector);
        }
    }
    count as u64
}

impl Global {
    /// The memory that a kernel on `device` sees, with the memory of the devices in the mask `peers` enabled.
    /// `counting`: bytes and sectors are counted; with a footprint, distinct bytes too.
    pub fn new(view: Arc<View>, device: u32, peers: u64, counting: bool, footprint: Option<Arc<Footprint>>) -> Self {
        Self { view, device, peers, counting, footprint, recent: Default::default(), oldest: 0 }
    }

    /// A place among the recent ones that holds the range.
    #[inline(always)]
    fn lookup(&self, address: u64, bytes: u64, write: bool) -> Option<Place<'_>> {
        for recent in &self.recent {
            let at = address.wrapping_sub(recent.base);
            if at < recent.bytes && recent.bytes - at >= bytes {
                let allocation = recent.allocation.as_ref()?;
                let allowed = if write { recent.writable } else { recent.readable };
                if !allowed || allocation.is_freed() {
                    return None;
                }
                let physical = allocation.physical();
                return Some(Place { physical, at: at + allocation.offset(), in_allocation: at, index: recent.index });
            }
        }
        None
    }

    /// The place of a range, or why there is none.
    #[inline(always)]
    fn place(&mut self, address: u64, bytes: u64, write: bool) -> Result<Place<'_>, Kind> {
        if self.lookup(address, bytes, write).is_none() {
            self.fetch(address, bytes, write)?;
        }
        let lost = || Kind::Internal(format!("an allocation at {address:#x} was found and lost"));
        self.lookup(address, bytes, write).ok_or_else(lost)
    }

    /// Brings an allocation among the recent ones.
    #[cold]
    fn fetch(&mut self, address: u64, bytes: u64, write: bool) -> Result<(), Kind> {
        let allocation = self.view.reachable(address, bytes, self.device, self.peers, write)?.clone();
        let index = self.view.index_of(address, bytes).ok_or_else(|| Kind::Internal("a view changed".into()))?;
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

    /// Finds one lane's bytes and checks everything but whether they were written.
    #[inline(always)]
    fn lane<const N: usize>(&mut self, address: u64, lane: usize, write: bool) -> Result<Place<'_>, Box<Fault>> {
        if !address.is_multiple_of(N as u64) {
            return Err(Fault::access(Kind::Misaligned, lane, access::<N>(address, write)));
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
    fn count<const N: usize>(&self, at: &Addresses, mask: u32, write: bool, env: &mut Env<'_>) {
        if self.counting {
            let to = if write { &mut env.counts.global_written } else { &mut env.counts.global_read };
            to.count(u64::from(mask.count_ones()) * N as u64, sectors(at, mask));
        }
    }

    #[inline(always)]
    fn count_run<const N: usize>(&self, first: u64, write: bool, env: &mut Env<'_>) {
        if self.counting {
            let to = if write { &mut env.counts.global_written } else { &mut env.counts.global_read };
            let bytes = (LANES * N) as u64;
            to.count(bytes, ((first + bytes - 1) >> 5) - (first >> 5) + 1);
        }
    }

    pub(super) fn load<const N: usize>(
        &mut self,
        at: &Addresses,
        mask: u32,
        env: &mut Env<'_>,
    ) -> Result<Lanes<[u8; N]>, Box<Fault>> {
        let mut out = [[0; N]; LANES];
        let run = (LANES * N) as u64;
        if mask == u32::MAX && at[0].is_multiple_of(N as u64) && consecutive::<N>(at) {
            // A run that does not end well is left to the lanes, which say who is wrong.
            if let Ok(place) = self.place(at[0], run, false)
                && place.physical.is_written(place.at, run)
            {
                place.physical.backing().read(place.at as usize, out.as_flattened_mut());
                let (index, offset) = (place.index, place.in_allocation);
                self.touch(index, offset, run, false);
                self.count_run::<N>(at[0], false, env);
                return Ok(out);
            }
        }
        let mut reported = false;
        for lane in lanes(mask) {
            let place = self.lane::<N>(at[lane], lane, false)?;
            out[lane] = place.physical.backing().load(place.at as usize);
            if !reported && !place.physical.is_written(place.at, N as u64) {
                env.report(Fault::access(Kind::Uninitialised, lane, access::<N>(at[lane], false)))?;
                reported = true;
            }
            let (index, offset) = (place.index, place.in_allocation);
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
        env: &mut Env<'_>,
    ) -> Result<(), Box<Fault>> {
        let run = (LANES * N) as u64;
        if mask == u32::MAX
            && at[0].is_multiple_of(N as u64)
            && consecutive::<N>(at)
            && let Ok(place) = self.place(at[0], run, true)
        {
            place.physical.backing().write(place.at as usize, values.as_flattened());
            place.physical.mark(place.at, run);
            let (index, offset) = (place.index, place.in_allocation);
            self.touch(index, offset, run, true);
            self.count_run::<N>(at[0], true, env);
            return Ok(());
        }
        for lane in lanes(mask) {
            let place = self.lane::<N>(at[lane], lane, true)?;
            place.physical.backing().store(place.at as usize, values[lane]);
            place.physical.mark(place.at, N as u64);
            let (index, offset) = (place.index, place.in_allocation);
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
        env: &mut Env<'_>,
    ) -> Result<Lanes<[u8; N]>, Box<Fault>> {
        let mut out = [[0; N]; LANES];
        for lane in lanes(mask) {
            let place = self.lane::<N>(at[lane], lane, true)?;
            if !place.physical.is_written(place.at, N as u64) {
                env.report(Fault::access(Kind::Uninitialised, lane, access::<N>(at[lane], true)))?;
            }
            let (backing, offset) = (place.physical.backing(), place.at as usize);
            let mut old = backing.load(offset);
            while let Err(other) = backing.exchange(offset, old, update(lane, old)) {
                old = other;
            }
            out[lane] = old;
            place.physical.mark(place.at, N as u64);
            let (index, offset) = (place.index, place.in_allocation);
            self.touch(index, offset, N as u64, false);
            self.touch(index, offset, N as u64, true);
        }
        self.count::<N>(at, mask, false, env);
        self.count::<N>(at, mask, true, env);
        Ok(out)
    }

    /// Checks the source of an asynchronous copy of one lane; whether all of its bytes were written.
    pub(super) fn check_source(&mut self, address: u64, bytes: u64) -> Result<bool, Kind> {
        let place = self.place(address, bytes, false)?;
        Ok(place.physical.is_written(place.at, bytes))
    }

    /// Reads the source of an asynchronous copy of one lane.
    pub(super) fn read_source(&mut self, address: u64, out: &mut [u8]) -> Result<(), Kind> {
        let place = self.place(address, out.len() as u64, false)?;
        place.physical.backing().read(place.at as usize, out);
        let (index, offset) = (place.index, place.in_allocation);
        self.touch(index, offset, out.len() as u64, false);
        Ok(())
    }

    /// Counts the sources of an asynchronous copy.
    pub(super) fn count_sources(&self, at: &Addresses, bytes: &Lanes<u32>, mask: u32, env: &mut Env<'_>) {
        if self.counting {
            let sum = lanes(mask).map(|lane| u64::from(bytes[lane])).sum();
            env.counts.global_read.count(sum, sectors(at, mask));
        }
    }
}

//! Checked accesses to shared memory, with a race detector.
//!
//! Besides bounds, alignment and unwritten bytes, it checks for races: two threads access a byte, at least one of them writes,
//! and no barrier lies between. Barriers of the block or a part of its warps ([`Shared::arrive`], [`Shared::release`]) and of a
//! warp's lanes ([`Shared::warp_sync`]) order accesses. Nothing else does: by Volta's rule, a warp's lanes do not run in
//! lockstep, and shuffles and votes order nothing. Atomics do not race with atomics. An unordered write of the value that
//! memory already holds is accepted: `flag = true` by many threads is common and harmless.

mod banks;
mod shadow_cell;
mod shadow_memory;
#[cfg(test)]
mod tests;
mod vector_clocks;

use crate::fault::{Fault, FaultAccess, FaultKind, MemorySpace};

use super::{AccessEnv, Addresses, LANES, Lanes, consecutive, lanes};
use shadow_cell::{Accessor, Hazard};
use shadow_memory::ShadowMemory;

/// Shared memory of the current block of a worker.
#[derive(Debug)]
pub struct Shared {
    bytes: usize,
    data: Vec<u8>,
    shadow: ShadowMemory,
    counting: bool,
}

fn access<const N: usize>(address: u64, write: bool) -> FaultAccess {
    FaultAccess { memory: MemorySpace::Shared, address, bytes: N as u32, write }
}

/// The words that an access touches, with a mask of the bytes in each.
#[inline(always)]
fn words<const N: usize>(at: usize) -> (std::ops::Range<usize>, u8) {
    if N >= 4 { (at / 4..(at + N) / 4, 0xf) } else { (at / 4..at / 4 + 1, ((1 << N) - 1) << (at % 4)) }
}

/// Mask of the bytes of a word that a load starting at `at` does not use; `padding` as in [`crate::operands::Args::padding`].
#[inline(always)]
fn padding<const N: usize>(at: usize, word: usize, padding: u32) -> u8 {
    let bits = if N >= 4 { u64::from(padding) >> (word * 4 - at) } else { u64::from(padding) << (at % 4) };
    (bits & 0xf) as u8
}

impl Shared {
    /// `bytes` of memory for blocks of up to `threads` threads (at most 1024). `counting` counts passes and bank conflicts.
    pub fn new(bytes: u32, threads: u32, counting: bool) -> Self {
        let words = (bytes as usize).div_ceil(4);
        let shadow = ShadowMemory::new(words, (threads as usize).div_ceil(LANES));
        Self { bytes: bytes as usize, data: vec![0; words * 4], shadow, counting }
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u32 {
        self.bytes as u32
    }

    /// Resets for the next block: nothing is written or accessed. Takes constant time, independent of the size.
    pub fn reset(&mut self) {
        self.shadow.reset();
    }

    /// Records a warp's arrival at one of the barriers 0 to 15. The executor calls it when the last lane of the warp arrives.
    pub fn arrive(&mut self, barrier: u32, warp: u32) {
        self.shadow.order().arrive(barrier as usize % vector_clocks::BARRIERS, warp as usize % vector_clocks::WARPS);
        self.shadow.rewind();
    }

    /// Completes a barrier: the warps in the mask, which waited (`bar.sync`, `bar.red`), continue. Warps that only arrived
    /// (`bar.arrive`) are not in the mask.
    pub fn release(&mut self, barrier: u32, waiting: u32) {
        self.shadow.order().release(barrier as usize % vector_clocks::BARRIERS, waiting);
        self.shadow.rewind();
    }

    /// Synchronises these warps at barrier 0.
    pub fn barrier(&mut self, warps: u32) {
        lanes(warps).for_each(|warp| self.arrive(0, warp as u32));
        self.release(0, warps);
    }

    /// Synchronises these lanes of a warp (`bar.warp.sync`); `live` are the lanes that have not exited.
    pub fn warp_sync(&mut self, warp: u32, lanes: u32, live: u32) {
        self.shadow.order().warp_sync(warp as usize % vector_clocks::WARPS, lanes, live);
        self.shadow.rewind();
    }

    /// Records that all lanes of a warp have exited: barriers no longer wait for it, and they order its accesses.
    pub fn exit(&mut self, warp: u32) {
        self.shadow.order().exit(warp as usize % vector_clocks::WARPS);
    }

    /// Offset of one lane's bytes.
    #[inline(always)]
    fn place<const N: usize>(&self, address: u64, lane: usize, write: bool) -> Result<usize, Box<Fault>> {
        let inside = address < self.bytes as u64 && self.bytes as u64 - address >= N as u64;
        if inside && address.is_multiple_of(N as u64) {
            return Ok(address as usize);
        }
        let kind = if !address.is_multiple_of(N as u64) {
            FaultKind::Misaligned
        } else {
            FaultKind::OutOfBounds(format!("the block has {} bytes of shared memory", self.bytes))
        };
        Err(Fault::access(kind, lane, access::<N>(address, write)))
    }

    /// Reports a hazard of an access. `together`: the conflicting write was another lane's in the same instruction.
    #[cold]
    fn report_hazard(
        found: Hazard,
        together: bool,
        lane: usize,
        access: FaultAccess,
        env: &mut AccessEnv<'_>,
    ) -> Result<(), Box<Fault>> {
        let kind = match found {
            Hazard::Uninitialised => FaultKind::Uninitialised,
            Hazard::Pending(line) => {
                FaultKind::PendingCopy(format!("the copy into these bytes started at PTX line {line}"))
            }
            Hazard::AfterWrite(thread, _) if together => FaultKind::Race(format!(
                "two lanes of one instruction: thread {thread} of the block writes another value"
            )),
            Hazard::AfterWrite(thread, line) => FaultKind::Race(format!(
                "thread {thread} of the block wrote it at PTX line {line}, with no barrier since"
            )),
            Hazard::AfterRead(thread) => FaultKind::Race(format!(
                "thread {thread} of the block (or another of its warp) read it, with no barrier since"
            )),
        };
        // If an atomic finds uninitialised bytes, the faulty part is its read.
        let write = access.write && found != Hazard::Uninitialised;
        env.report(Fault::access(kind, lane, FaultAccess { write, ..access }))
    }

    pub(super) fn load<const N: usize>(
        &mut self,
        at: &Addresses,
        mask: u32,
        env: &mut AccessEnv<'_>,
    ) -> Result<Lanes<[u8; N]>, Box<Fault>> {
        let mut out = [[0; N]; LANES];
        let warp = self.shadow.accessor(env.warp, env.line);
        let known = self.run::<N>(at, mask).filter(|&start| self.shadow.read_run(start / 4, N / 4, &warp));
        if let Some(start) = known {
            out.as_flattened_mut().copy_from_slice(&self.data[start..start + LANES * N]);
        } else if self.load_one(at, mask, &warp, &mut out) {
            // All lanes read one word, and `load_one` has done it.
        } else {
            self.load_lanes(at, mask, &warp, &mut out, env)?;
        }
        env.counts.shared_read.count(u64::from(mask.count_ones()) * N as u64, 0);
        self.count_passes::<N>(at, mask, env);
        Ok(out)
    }

    /// Fast path: all lanes read the same word, and its shadow cell is in the simple state.
    #[inline(always)]
    fn load_one<const N: usize>(
        &mut self,
        at: &Addresses,
        mask: u32,
        who: &Accessor,
        out: &mut Lanes<[u8; N]>,
    ) -> bool {
        let first = at[0];
        if N != 4 || mask != u32::MAX || at.iter().any(|&at| at != first) {
            return false;
        }
        let Ok(place) = self.place::<N>(first, 0, false) else { return false };
        if !self.shadow.read_together(place / 4, mask, who) {
            return false;
        }
        out[0].copy_from_slice(&self.data[place..place + N]);
        *out = [out[0]; LANES];
        true
    }

    /// Offset of a contiguous access in whole words by all lanes; `None` for other accesses.
    #[inline(always)]
    fn run<const N: usize>(&self, at: &Addresses, mask: u32) -> Option<usize> {
        let bytes = self.bytes as u64;
        let fits = N >= 4
            && mask == u32::MAX
            && at[0].is_multiple_of(N as u64)
            && at[0] < bytes
            && bytes - at[0] >= (LANES * N) as u64
            && consecutive::<N>(at);
        fits.then_some(at[0] as usize)
    }

    fn load_lanes<const N: usize>(
        &mut self,
        at: &Addresses,
        mask: u32,
        warp: &Accessor,
        out: &mut Lanes<[u8; N]>,
        env: &mut AccessEnv<'_>,
    ) -> Result<(), Box<Fault>> {
        for lane in lanes(mask) {
            let place = self.place::<N>(at[lane], lane, false)?;
            let who = warp.lane(lane);
            let (words, bytes) = words::<N>(place);
            for word in words {
                let bytes = bytes & !padding::<N>(place, word, env.padding);
                if bytes == 0 || self.shadow.read_simple(word, bytes, &who) {
                    continue;
                }
                if let Some(found) = self.shadow.read(word, bytes, &who) {
                    Self::report_hazard(found, false, lane, access::<N>(at[lane], false), env)?;
                }
            }
            out[lane].copy_from_slice(&self.data[place..place + N]);
        }
        Ok(())
    }

    pub(super) fn store<const N: usize>(
        &mut self,
        at: &Addresses,
        values: &Lanes<[u8; N]>,
        mask: u32,
        env: &mut AccessEnv<'_>,
    ) -> Result<(), Box<Fault>> {
        let warp = self.shadow.accessor(env.warp, env.line);
        let known = self.run::<N>(at, mask).filter(|&start| self.shadow.write_run(start / 4, N / 4, &warp));
        if let Some(start) = known {
            self.data[start..start + LANES * N].copy_from_slice(values.as_flattened());
        } else {
            self.store_lanes(at, values, mask, &warp, env)?;
        }
        env.counts.shared_written.count(u64::from(mask.count_ones()) * N as u64, 0);
        self.count_passes::<N>(at, mask, env);
        Ok(())
    }

    fn store_lanes<const N: usize>(
        &mut self,
        at: &Addresses,
        values: &Lanes<[u8; N]>,
        mask: u32,
        warp: &Accessor,
        env: &mut AccessEnv<'_>,
    ) -> Result<(), Box<Fault>> {
        for lane in lanes(mask) {
            let place = self.place::<N>(at[lane], lane, true)?;
            let who = warp.lane(lane);
            let (words, bytes) = words::<N>(place);
            for word in words {
                if self.shadow.write_simple(word, bytes, &who) {
                    continue;
                }
                let Some(found) = self.shadow.write(word, bytes, &who, false) else { continue };
                let same = self.data[place..place + N] == values[lane];
                if !(same && matches!(found, Hazard::AfterWrite(..))) {
                    let earlier = mask & ((1 << lane) - 1);
                    let together = lanes(earlier).any(|other| at[other] == at[lane]);
                    Self::report_hazard(found, together, lane, access::<N>(at[lane], true), env)?;
                }
            }
            self.data[place..place + N].copy_from_slice(&values[lane]);
        }
        Ok(())
    }

    /// Executes an atomic lane by lane, and counts it as a load and a store. No other synchronisation is needed, because a block
    /// runs on one worker thread.
    pub(super) fn update<const N: usize>(
        &mut self,
        at: &Addresses,
        mask: u32,
        update: &mut dyn FnMut(usize, [u8; N]) -> [u8; N],
        env: &mut AccessEnv<'_>,
    ) -> Result<Lanes<[u8; N]>, Box<Fault>> {
        let mut out = [[0; N]; LANES];
        let warp = self.shadow.accessor(env.warp, env.line);
        for lane in lanes(mask) {
            let place = self.place::<N>(at[lane], lane, true)?;
            let who = warp.lane(lane);
            let (words, bytes) = words::<N>(place);
            for word in words {
                if let Some(found) = self.shadow.write(word, bytes, &who, true) {
                    Self::report_hazard(found, false, lane, access::<N>(at[lane], true), env)?;
                }
            }
            let bytes = &mut self.data[place..place + N];
            out[lane].copy_from_slice(bytes);
            bytes.copy_from_slice(&update(lane, out[lane]));
        }
        let bytes = u64::from(mask.count_ones()) * N as u64;
        env.counts.shared_read.count(bytes, 0);
        env.counts.shared_written.count(bytes, 0);
        self.count_passes::<N>(at, mask, env);
        self.count_passes::<N>(at, mask, env);
        Ok(out)
    }

    #[inline(always)]
    fn count_passes<const N: usize>(&self, at: &Addresses, mask: u32, env: &mut AccessEnv<'_>) {
        if self.counting {
            banks::count::<N>(at, mask, env.counts);
        }
    }

    /// Counts the writes of a warp's asynchronous copies of `size` bytes: as a store, because they are one instruction.
    pub(super) fn count_async_write(&self, to: &Addresses, size: u32, mask: u32, env: &mut AccessEnv<'_>) {
        env.counts.shared_written.count(u64::from(mask.count_ones() * size), 0);
        match size {
            4 => self.count_passes::<4>(to, mask, env),
            8 => self.count_passes::<8>(to, mask, env),
            _ => self.count_passes::<16>(to, mask, env),
        }
    }

    /// Checks the destination of one lane's asynchronous copy (`size` is 4, 8 or 16) and marks it as pending.
    pub(super) fn begin_async_write(
        &mut self,
        address: u64,
        size: u32,
        lane: usize,
        env: &mut AccessEnv<'_>,
    ) -> Result<u32, Box<Fault>> {
        let place = match size {
            4 => self.place::<4>(address, lane, true)?,
            8 => self.place::<8>(address, lane, true)?,
            _ => self.place::<16>(address, lane, true)?,
        };
        let who = self.shadow.accessor(env.warp, env.line).lane(lane);
        let access = FaultAccess { memory: MemorySpace::Shared, address, bytes: size, write: true };
        for word in place / 4..(place + size as usize) / 4 {
            if let Some(found) = self.shadow.mark_pending(word, &who) {
                Self::report_hazard(found, false, lane, access, env)?;
            }
        }
        Ok(place as u32)
    }

    /// Writes the bytes of an asynchronous copy that `lane` started at `line`.
    pub(super) fn finish_async_write(&mut self, to: u32, data: &[u8], lane: usize, line: u32, env: &mut AccessEnv<'_>) {
        let who = self.shadow.accessor(env.warp, line).lane(lane);
        let place = to as usize;
        for word in place / 4..(place + data.len()) / 4 {
            self.shadow.complete_pending(word, &who);
        }
        self.data[place..place + data.len()].copy_from_slice(data);
    }
}

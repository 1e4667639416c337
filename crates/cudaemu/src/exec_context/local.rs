//! Checked accesses to local memory, which is private to each thread.

use crate::fault::{Fault, FaultAccess, FaultKind, MemorySpace};

use super::{AccessEnv, Addresses, LANES, Lanes, lanes};

/// Local memory of a warp's 32 threads.
#[derive(Debug)]
pub struct Local {
    /// Bytes per thread, as requested.
    bytes: usize,
    /// Distance between threads: `bytes` rounded up, so that a word of `written` belongs to one thread.
    stride: usize,
    data: Vec<u8>,
    /// Written bits, one per byte.
    written: Vec<u64>,
}

impl Local {
    /// `bytes` bytes per thread, all unwritten.
    pub fn new(bytes: u32) -> Self {
        let stride = (bytes as usize).next_multiple_of(64);
        Self { bytes: bytes as usize, stride, data: vec![0; stride * LANES], written: vec![0; stride / 64 * LANES] }
    }

    /// Bytes per thread.
    pub fn bytes(&self) -> u32 {
        self.bytes as u32
    }

    /// Marks all bytes as unwritten, for the next warp.
    pub fn reset(&mut self) {
        self.written.fill(0);
    }

    /// Enters a frame of `bytes` at offset `frame`: marks it as unwritten, so that values of an earlier call do not count as
    /// initialised.
    pub fn enter_frame(&mut self, frame: u32, bytes: u32, mask: u32) {
        for lane in lanes(mask) {
            let start = (frame as usize).min(self.bytes);
            let end = start.saturating_add(bytes as usize).min(self.bytes);
            for at in (start..end).map(|at| lane * self.stride + at) {
                self.written[at / 64] &= !(1 << (at % 64));
            }
        }
    }

    /// Offset of one lane's bytes.
    #[inline(always)]
    fn place<const N: usize>(&self, address: u64, lane: usize, write: bool) -> Result<usize, Box<Fault>> {
        let kind = if !address.is_multiple_of(N as u64) {
            FaultKind::Misaligned
        } else if address > self.bytes as u64 || self.bytes as u64 - address < N as u64 {
            FaultKind::OutOfBounds(format!("a thread has {} bytes of local memory", self.bytes))
        } else {
            return Ok(lane * self.stride + address as usize);
        };
        Err(Fault::access(kind, lane, access::<N>(address, write)))
    }

    /// Index of the word of `written`, and the mask of `N` aligned bytes.
    #[inline(always)]
    fn bits<const N: usize>(at: usize) -> (usize, u64) {
        (at / 64, ((1 << N) - 1) << (at % 64))
    }

    pub(super) fn load<const N: usize>(
        &mut self,
        at: &Addresses,
        mask: u32,
        env: &mut AccessEnv<'_>,
    ) -> Result<Lanes<[u8; N]>, Box<Fault>> {
        let mut out = [[0; N]; LANES];
        let mut reported = false;
        for lane in lanes(mask) {
            let place = self.place::<N>(at[lane], lane, false)?;
            let (word, bits) = Self::bits::<N>(place);
            let used = bits & !(u64::from(env.padding) << (place % 64));
            if self.written[word] & used != used && !reported {
                env.report(Fault::access(FaultKind::Uninitialised, lane, access::<N>(at[lane], false)))?;
                reported = true;
            }
            out[lane].copy_from_slice(&self.data[place..place + N]);
        }
        env.counts.local_read.count(u64::from(mask.count_ones()) * N as u64, 0);
        Ok(out)
    }

    pub(super) fn store<const N: usize>(
        &mut self,
        at: &Addresses,
        values: &Lanes<[u8; N]>,
        mask: u32,
        env: &mut AccessEnv<'_>,
    ) -> Result<(), Box<Fault>> {
        for lane in lanes(mask) {
            let place = self.place::<N>(at[lane], lane, true)?;
            let (word, bits) = Self::bits::<N>(place);
            self.written[word] |= bits;
            self.data[place..place + N].copy_from_slice(&values[lane]);
        }
        env.counts.local_written.count(u64::from(mask.count_ones()) * N as u64, 0);
        Ok(())
    }

    /// An atomic on local memory: no other thread can access it, so a load and a store suffice.
    pub(super) fn update<const N: usize>(
        &mut self,
        at: &Addresses,
        mask: u32,
        update: &mut dyn FnMut(usize, [u8; N]) -> [u8; N],
        env: &mut AccessEnv<'_>,
    ) -> Result<Lanes<[u8; N]>, Box<Fault>> {
        let old = self.load::<N>(at, mask, env)?;
        let mut new = old;
        lanes(mask).for_each(|lane| new[lane] = update(lane, old[lane]));
        self.store(at, &new, mask, env)?;
        Ok(old)
    }

    /// Reads a thread's bytes for the executor (arguments of calls), with a bounds check only.
    pub fn peek(&self, lane: usize, address: u64, out: &mut [u8]) -> Result<(), Box<Fault>> {
        let range = self.range(lane, address, out.len(), false)?;
        out.copy_from_slice(&self.data[range]);
        Ok(())
    }

    /// Writes a thread's bytes for the executor (results of calls) and marks them as written.
    pub fn poke(&mut self, lane: usize, address: u64, data: &[u8]) -> Result<(), Box<Fault>> {
        let range = self.range(lane, address, data.len(), true)?;
        for at in range.clone() {
            self.written[at / 64] |= 1 << (at % 64);
        }
        self.data[range].copy_from_slice(data);
        Ok(())
    }

    /// Copies a thread's bytes and their written bits: a `.param` variable into the callee's frame.
    pub fn copy_param(&mut self, lane: usize, from: u64, to: u64, bytes: usize) -> Result<(), Box<Fault>> {
        let (source, target) = (self.range(lane, from, bytes, false)?, self.range(lane, to, bytes, true)?);
        for (source, target) in source.clone().zip(target.clone()) {
            let bit = self.written[source / 64] >> (source % 64) & 1;
            let word = &mut self.written[target / 64];
            *word = *word & !(1 << (target % 64)) | bit << (target % 64);
        }
        self.data.copy_within(source, target.start);
        Ok(())
    }

    fn range(
        &self,
        lane: usize,
        address: u64,
        bytes: usize,
        write: bool,
    ) -> Result<std::ops::Range<usize>, Box<Fault>> {
        let fits = usize::try_from(address).ok().filter(|&at| at <= self.bytes && self.bytes - at >= bytes);
        let start = fits.ok_or_else(|| {
            let access = FaultAccess { memory: MemorySpace::Local, address, bytes: bytes as u32, write };
            Fault::access(FaultKind::StackOverflow, lane, access)
        })?;
        let start = lane * self.stride + start;
        Ok(start..start + bytes)
    }
}

fn access<const N: usize>(address: u64, write: bool) -> FaultAccess {
    FaultAccess { memory: MemorySpace::Local, address, bytes: N as u32, write }
}

//! Shadow cell: access history of one word or byte of shared memory (last write, and reads since), in 16 bytes.

use super::super::LANES;

/// All four bytes were written (in a cell of a single byte all four bits are set).
pub(super) const WRITTEN: u64 = 0xf;
/// An asynchronous copy into the word is pending.
pub(super) const PENDING: u64 = 1 << 4;
/// The word is split: its four byte cells apply instead.
pub(super) const SPLIT: u64 = 1 << 5;
/// The last write was an atomic.
pub(super) const ATOMIC: u64 = 1 << 6;
const LINE: u32 = 7;
const LINE_BITS: u32 = 21;
const THREAD: u32 = 28;
pub(super) const CLOCK: u32 = 38;

/// In [`ShadowCell::read`]: the low half is a mask of warps instead of lanes.
const SEVERAL: u64 = 1 << 32;
const WARP: u32 = 33;
/// In the clock of [`ShadowCell::read`], above all real clocks: the low half is an index into the pool of reads.
const POOLED: u64 = (1 << 26) - 1;

/// Access history of a word or byte.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ShadowCell {
    /// The last write: clock (26 bits), thread (10), line (21), flags. A clock below the block's first one means no write in
    /// this block.
    pub(super) write: u64,
    /// The reads since: clock (26 bits; 0: none), then either warp (5 bits), 0 and a mask of its lanes; or 0, 1 and a mask of
    /// warps that read at this clock.
    read: u64,
}

/// The reads since the last write, unpacked.
#[derive(Clone, Copy, Debug)]
pub(super) enum LastReads {
    /// Lanes of one warp.
    Warp { clock: u32, warp: usize, lanes: u32 },
    /// At least one lane of each of these warps.
    Warps { clock: u32, warps: u32 },
    /// Reads in this entry of the pool.
    Pool(usize),
}

/// The thread of an access, and its clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Accessor {
    pub(super) thread: usize,
    pub(super) clock: u32,
    /// Accesses up to this clock happen before the thread's access.
    pub(super) settled: u32,
    pub(super) line: u32,
    pub(super) lanes: u32,
    /// Whether the block used barriers for a part of its warps.
    pub(super) partial: bool,
}

impl Accessor {
    /// The accessor for the next lane of the same instruction.
    #[inline(always)]
    pub(super) fn lane(self, lane: usize) -> Self {
        Self { thread: self.thread & !31 | lane, lanes: 1 << lane, ..self }
    }

    pub(super) fn warp(&self) -> usize {
        self.thread / LANES
    }

    #[inline(always)]
    fn write(&self) -> u64 {
        let line = u64::from(self.line.min((1 << LINE_BITS) - 1));
        u64::from(self.clock) << CLOCK | (self.thread as u64) << THREAD | line << LINE
    }

    #[inline(always)]
    fn read(&self) -> u64 {
        u64::from(self.clock) << CLOCK | ((self.thread / LANES) as u64) << WARP | u64::from(self.lanes)
    }
}

/// Hazard of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hazard {
    Uninitialised,
    /// An asynchronous copy started at this line is still pending.
    Pending(u32),
    /// Unordered after a write by this thread at this line.
    AfterWrite(usize, u32),
    /// Unordered after a read by this thread. The line of reads is not kept: it would enlarge every cell by half.
    AfterRead(usize),
}

impl ShadowCell {
    /// A cell without accesses, with these flags, at a clock.
    pub(super) fn blank(clock: u32, flags: u64) -> Self {
        Self { write: u64::from(clock) << CLOCK | flags, read: 0 }
    }

    #[inline(always)]
    pub(super) fn clock(&self) -> u32 {
        (self.write >> CLOCK) as u32
    }

    #[inline(always)]
    pub(super) fn thread(&self) -> usize {
        (self.write >> THREAD) as usize & 1023
    }

    pub(super) fn line(&self) -> u32 {
        (self.write >> LINE) as u32 & ((1 << LINE_BITS) - 1)
    }

    /// Clock of the newest read; above all real clocks if the reads are in the pool.
    #[inline(always)]
    pub(super) fn read_clock(&self) -> u32 {
        (self.read >> CLOCK) as u32
    }

    pub(super) fn reads(&self) -> Option<LastReads> {
        let (clock, low) = (self.read_clock(), self.read as u32);
        match clock {
            0 => None,
            _ if u64::from(clock) == POOLED => Some(LastReads::Pool(low as usize)),
            _ if self.read & SEVERAL != 0 => Some(LastReads::Warps { clock, warps: low }),
            _ => Some(LastReads::Warp { clock, warp: (self.read >> WARP) as usize % 32, lanes: low }),
        }
    }

    pub(super) fn forget_reads(&mut self) {
        self.read = 0;
    }

    pub(super) fn pool_reads(&mut self, index: usize) {
        self.read = POOLED << CLOCK | index as u64;
    }

    /// Makes `who` the only reader.
    #[inline(always)]
    pub(super) fn set_reader(&mut self, who: &Accessor) {
        self.read = who.read();
    }

    /// Adds `who` to the readers at the same clock.
    #[inline(always)]
    pub(super) fn add_reader(&mut self, who: &Accessor) {
        let mine = who.read();
        self.read = if (self.read ^ mine) >> 32 == 0 {
            self.read | mine
        } else {
            let others = if self.read & SEVERAL != 0 { self.read as u32 } else { 1 << (self.read >> WARP & 31) };
            u64::from(who.clock) << CLOCK | SEVERAL | u64::from(others | 1 << (who.thread / LANES))
        };
    }

    /// Makes `who` the last writer and clears the reads.
    #[inline(always)]
    pub(super) fn set_writer(&mut self, who: &Accessor, flags: u64) {
        *self = Self { write: who.write() | WRITTEN | flags, read: 0 };
    }

    /// Fast path of a read: returns false without a change if the cell's state is not simple. Clocks below `floor` belong to
    /// earlier blocks.
    #[inline(always)]
    pub(super) fn read_simple(&mut self, who: &Accessor, floor: u32) -> bool {
        let clock = self.clock();
        if self.write & (WRITTEN | PENDING | SPLIT) != WRITTEN
            || clock < floor
            || clock > who.settled && self.thread() != who.thread
        {
            return false;
        }
        if self.read_clock() <= who.settled {
            self.set_reader(who);
        } else if (self.read ^ who.read()) >> 32 == 0 {
            self.read |= u64::from(who.lanes);
        } else if self.read_clock() == who.clock && !who.partial {
            self.add_reader(who);
        } else {
            return false;
        }
        true
    }

    /// Fast path of a write, likewise.
    #[inline(always)]
    pub(super) fn write_simple(&mut self, who: &Accessor, floor: u32) -> bool {
        let clock = self.clock();
        if self.write & (PENDING | SPLIT) != 0
            || clock < floor
            || clock > who.settled && self.thread() != who.thread
            || self.read_clock() > who.settled && self.read != who.read()
        {
            return false;
        }
        self.set_writer(who, 0);
        true
    }
}

//! Shadow memory of shared memory: for each byte whether it was written, its last write, and the reads since.
//!
//! Most accesses cover whole words, so a cell describes a word of four bytes. A partial access *splits* a word into four cells
//! of a byte each, until a write covers all of it again. A cell keeps the last write and the reads since. Reads of several
//! warps at one clock fit into the cell; other combinations go to a pool. A newer read replaces older ones of the same warp.

use super::super::LANES;
use super::shadow_cell::{ATOMIC, Accessor, Hazard, LastReads, PENDING, SPLIT, ShadowCell, WRITTEN};
use super::vector_clocks::{LAST_CLOCK, VectorClocks, WARPS};
use crate::exec_context::lanes;

/// Reads of one warp.
#[derive(Clone, Copy, Debug, Default)]
struct Reads {
    clock: u32,
    lanes: u32,
}

/// Reads of several warps at different clocks.
#[derive(Clone, Debug)]
struct Readers {
    newest: u32,
    by_warp: [Reads; WARPS],
}

/// Vector clocks, and the pool of reads that do not fit into a cell.
#[derive(Debug)]
struct AccessHistory {
    order: VectorClocks,
    pool: Vec<Readers>,
    free: Vec<usize>,
}

/// Shadow of a block's shared memory.
#[derive(Debug)]
pub(super) struct ShadowMemory {
    words: Vec<ShadowCell>,
    /// Four cells per word; allocated when the first word is split.
    bytes: Vec<ShadowCell>,
    history: AccessHistory,
    /// Clocks below it belong to earlier blocks.
    floor: u32,
}

impl AccessHistory {
    fn release(&mut self, cell: &mut ShadowCell) {
        if let Some(LastReads::Pool(index)) = cell.reads() {
            self.free.push(index);
        }
        cell.forget_reads();
    }

    /// A thread whose read since the last write is unordered with the access of `who`.
    fn unordered_reader(&self, cell: &ShadowCell, who: &Accessor) -> Option<usize> {
        let check = |warp: usize, reads: Reads| {
            let mut threads = lanes(reads.lanes).map(|lane| warp * LANES + lane);
            threads.find(|&thread| !self.order.ordered(thread, reads.clock, who.thread))
        };
        match cell.reads()? {
            LastReads::Pool(index) => (0..WARPS).find_map(|warp| check(warp, self.pool[index].by_warp[warp])),
            LastReads::Warp { clock, warp, lanes } => check(warp, Reads { clock, lanes }),
            // The cell does not record which lanes read. For other warps any lane represents the warp; the accessor's own warp
            // is skipped, because the result for the other warps stands for it.
            LastReads::Warps { clock, warps } => {
                lanes(warps & !(1 << who.warp())).find_map(|warp| check(warp, Reads { clock, lanes: 1 }))
            }
        }
    }

    /// Adds a read.
    fn record(&mut self, cell: &mut ShadowCell, who: &Accessor) {
        if let Some(reads) = cell.reads() {
            match reads {
                LastReads::Pool(index) if self.pool[index].newest > who.settled => {
                    let readers = &mut self.pool[index];
                    let mine = &mut readers.by_warp[who.warp()];
                    let before = if mine.clock == who.clock { mine.lanes } else { 0 };
                    *mine = Reads { clock: who.clock, lanes: before | who.lanes };
                    readers.newest = readers.newest.max(who.clock);
                    return;
                }
                LastReads::Warp { clock, warp, .. } if clock == who.clock && warp == who.warp() => {
                    return cell.add_reader(who);
                }
                LastReads::Warp { clock, .. } | LastReads::Warps { clock, .. }
                    if clock > who.settled && self.unordered_reader(cell, who).is_some() =>
                {
                    if clock == who.clock {
                        return cell.add_reader(who);
                    }
                    // A newer read replaces older ones of the same warp.
                    if !matches!(reads, LastReads::Warp { warp, .. } if warp == who.warp()) {
                        return self.promote(cell, reads, who);
                    }
                }
                _ => {}
            }
        }
        self.release(cell);
        cell.set_reader(who);
    }

    /// Moves a cell's reads to the pool, because another one does not fit.
    fn promote(&mut self, cell: &mut ShadowCell, reads: LastReads, who: &Accessor) {
        let mut by_warp = [Reads::default(); WARPS];
        let newest = match reads {
            LastReads::Warp { clock, warp, lanes } => {
                by_warp[warp] = Reads { clock, lanes };
                clock
            }
            LastReads::Warps { clock, warps } => {
                // For other warps any lane represents all of them.
                lanes(warps).for_each(|warp| by_warp[warp] = Reads { clock, lanes: 1 });
                clock
            }
            LastReads::Pool(_) => 0,
        };
        by_warp[who.warp()] = Reads { clock: who.clock, lanes: who.lanes };
        let index = self.keep(Readers { newest: newest.max(who.clock), by_warp });
        cell.pool_reads(index);
    }

    fn keep(&mut self, readers: Readers) -> usize {
        match self.free.pop() {
            Some(index) => {
                self.pool[index] = readers;
                index
            }
            None => {
                self.pool.push(readers);
                self.pool.len() - 1
            }
        }
    }

    fn unordered_write(&self, cell: &ShadowCell, who: &Accessor) -> Option<Hazard> {
        let ordered = self.order.ordered(cell.thread(), cell.clock(), who.thread);
        (!ordered).then(|| Hazard::AfterWrite(cell.thread(), cell.line()))
    }

    fn read(&mut self, cell: &mut ShadowCell, who: &Accessor) -> Option<Hazard> {
        let unwritten = cell.write & WRITTEN != WRITTEN;
        let found = if unwritten { Some(Hazard::Uninitialised) } else { self.unordered_write(cell, who) };
        self.record(cell, who);
        found
    }

    fn write(&mut self, cell: &mut ShadowCell, who: &Accessor, atomic: bool) -> Option<Hazard> {
        let both_atomic = atomic && cell.write & ATOMIC != 0;
        let missing = || (atomic && cell.write & WRITTEN != WRITTEN).then_some(Hazard::Uninitialised);
        let writer = || self.unordered_write(cell, who).filter(|_| !both_atomic);
        let reader = self.unordered_reader(cell, who).map(Hazard::AfterRead);
        let found = reader.or_else(writer).or_else(missing);
        self.release(cell);
        cell.set_writer(who, if atomic { ATOMIC } else { 0 });
        found
    }
}

impl ShadowMemory {
    pub(super) fn new(words: usize, warps: usize) -> Self {
        let history = AccessHistory { order: VectorClocks::new(warps), pool: Vec::new(), free: Vec::new() };
        let mut shadow = Self { words: vec![ShadowCell::default(); words], bytes: Vec::new(), history, floor: 1 };
        shadow.reset();
        shadow
    }

    pub(super) fn order(&mut self) -> &mut VectorClocks {
        &mut self.history.order
    }

    /// Resets for a new block: nothing is written. Old cells stay and are recognised by their clocks.
    pub(super) fn reset(&mut self) {
        let latest = self.history.order.latest();
        self.floor = if latest > LAST_CLOCK / 2 {
            self.words.fill(ShadowCell::default());
            1
        } else {
            latest + 1
        };
        // The floor's own clock means "no access", which is ordered before everything.
        self.history.order.restart(self.floor);
        self.history.pool.clear();
        self.history.free.clear();
    }

    /// Restarts the clocks before they overflow: all accesses so far count as ordered.
    pub(super) fn rewind(&mut self) {
        if self.history.order.latest() < LAST_CLOCK {
            return;
        }
        let rewound = |cell: &ShadowCell, floor: u32| {
            let kept = cell.write & (WRITTEN | PENDING | SPLIT);
            if cell.clock() < floor { ShadowCell::default() } else { ShadowCell::blank(1, kept) }
        };
        let floor = self.floor;
        self.words.iter_mut().for_each(|cell| *cell = rewound(cell, floor));
        self.bytes.iter_mut().for_each(|cell| *cell = rewound(cell, floor));
        self.floor = 1;
        self.history.order.rewind();
        self.history.pool.clear();
        self.history.free.clear();
    }

    /// The accessor for lane 0 of a warp at its current clock.
    #[inline(always)]
    pub(super) fn accessor(&self, warp: u32, line: u32) -> Accessor {
        let order = &self.history.order;
        let warp = warp as usize % WARPS;
        Accessor {
            thread: warp * LANES,
            clock: order.clock[warp],
            settled: order.settled[warp],
            line,
            lanes: 1,
            partial: order.partial,
        }
    }

    /// Fast path: reads these bytes of a word if the cells' states are simple; returns false otherwise. It may have recorded a
    /// part of the read then, which is harmless because recording it again changes nothing.
    #[inline(always)]
    pub(super) fn read_simple(&mut self, word: usize, bytes: u8, who: &Accessor) -> bool {
        let floor = self.floor;
        if bytes == 0xf {
            return self.words[word].read_simple(who, floor);
        }
        self.parts(word, bytes, |cell| cell.read_simple(who, floor))
    }

    /// As [`ShadowMemory::read_simple`], for a write.
    #[inline(always)]
    pub(super) fn write_simple(&mut self, word: usize, bytes: u8, who: &Accessor) -> bool {
        let floor = self.floor;
        if bytes == 0xf {
            return self.words[word].write_simple(who, floor);
        }
        self.parts(word, bytes, |cell| cell.write_simple(who, floor))
    }

    /// Whether `check` holds for the cells of these bytes of a split word.
    #[inline(always)]
    fn parts(&mut self, word: usize, bytes: u8, simple: impl Fn(&mut ShadowCell) -> bool) -> bool {
        let whole = &self.words[word];
        if whole.write & (PENDING | SPLIT) != SPLIT || whole.clock() < self.floor {
            return false;
        }
        let cells = &mut self.bytes[word * 4..word * 4 + 4];
        cells.iter_mut().enumerate().all(|(byte, cell)| bytes >> byte & 1 == 0 || simple(cell))
    }

    /// Fast path: each lane reads the next `each` words (see [`ShadowMemory::read_simple`]).
    #[inline(always)]
    pub(super) fn read_run(&mut self, word: usize, each: usize, who: &Accessor) -> bool {
        let floor = self.floor;
        let cells = self.words[word..word + LANES * each].chunks_exact_mut(each).enumerate();
        cells
            .map(|(lane, cells)| (who.lane(lane), cells))
            .all(|(who, cells)| cells.iter_mut().all(|cell| cell.read_simple(&who, floor)))
    }

    /// As [`ShadowMemory::read_run`], for writes.
    #[inline(always)]
    pub(super) fn write_run(&mut self, word: usize, each: usize, who: &Accessor) -> bool {
        let floor = self.floor;
        let cells = self.words[word..word + LANES * each].chunks_exact_mut(each).enumerate();
        cells
            .map(|(lane, cells)| (who.lane(lane), cells))
            .all(|(who, cells)| cells.iter_mut().all(|cell| cell.write_simple(&who, floor)))
    }

    /// Fast path: these lanes of a warp read the same word, whose write is ordered before them; otherwise as
    /// [`ShadowMemory::read_simple`].
    #[inline(always)]
    pub(super) fn read_together(&mut self, word: usize, lanes: u32, who: &Accessor) -> bool {
        let floor = self.floor;
        let cell = &mut self.words[word];
        // At most one of the lanes can be the writer.
        cell.clock() <= who.settled && cell.read_simple(&Accessor { lanes, ..*who }, floor)
    }

    /// Clears a cell that belongs to an earlier block.
    fn freshen(&mut self, word: usize) {
        let cell = &mut self.words[word];
        if cell.clock() < self.floor {
            *cell = ShadowCell::blank(self.floor, 0);
        }
    }

    /// Splits a word into cells per byte.
    fn split(&mut self, word: usize) {
        if self.bytes.is_empty() {
            self.bytes = vec![ShadowCell::default(); self.words.len() * 4];
        }
        let whole = self.words[word];
        if whole.write & SPLIT != 0 {
            return;
        }
        for byte in 0..4 {
            let mut cell = whole;
            if let Some(LastReads::Pool(index)) = whole.reads()
                && byte > 0
            {
                let readers = self.history.pool[index].clone();
                cell.pool_reads(self.history.keep(readers));
            }
            self.bytes[word * 4 + byte] = cell;
        }
        self.words[word] = ShadowCell::blank(whole.clock(), SPLIT);
    }

    /// Joins the bytes of a word again if all are written and all their accesses are ordered before every thread.
    fn join(&mut self, word: usize) {
        let past = self.history.order.settled_for_all;
        let cells = &self.bytes[word * 4..word * 4 + 4];
        let done =
            |cell: &ShadowCell| cell.write & WRITTEN == WRITTEN && cell.clock() <= past && cell.read_clock() <= past;
        if cells.iter().all(done) {
            self.words[word] = ShadowCell::blank(past, WRITTEN);
        }
    }

    /// Reads the bytes of a word that are in the mask. The read is recorded even if it is a hazard.
    #[inline(never)]
    pub(super) fn read(&mut self, word: usize, bytes: u8, who: &Accessor) -> Option<Hazard> {
        self.freshen(word);
        let cell = &self.words[word];
        if cell.write & PENDING != 0 {
            return Some(Hazard::Pending(cell.line()));
        }
        if bytes != 0xf {
            self.split(word);
        } else if self.words[word].write & SPLIT != 0 {
            self.join(word);
        }
        if self.words[word].write & SPLIT == 0 {
            return self.history.read(&mut self.words[word], who);
        }
        let mut found = None;
        for byte in (0..4).filter(|byte| bytes >> byte & 1 != 0) {
            let one = self.history.read(&mut self.bytes[word * 4 + byte], who);
            found = found.or(one);
        }
        found
    }

    /// Writes the bytes of a word that are in the mask. The write is recorded even if it is a hazard.
    #[inline(never)]
    pub(super) fn write(&mut self, word: usize, bytes: u8, who: &Accessor, atomic: bool) -> Option<Hazard> {
        self.freshen(word);
        let cell = &self.words[word];
        if cell.write & PENDING != 0 {
            return Some(Hazard::Pending(cell.line()));
        }
        if bytes != 0xf {
            self.split(word);
        }
        if self.words[word].write & SPLIT == 0 {
            return self.history.write(&mut self.words[word], who, atomic);
        }
        let mut found = None;
        for byte in (0..4).filter(|byte| bytes >> byte & 1 != 0) {
            let one = self.history.write(&mut self.bytes[word * 4 + byte], who, atomic);
            found = found.or(one);
        }
        if bytes == 0xf {
            self.words[word] = self.bytes[word * 4];
        }
        found
    }

    /// Marks a word as pending: an asynchronous copy may write it at any time from now on.
    pub(super) fn mark_pending(&mut self, word: usize, who: &Accessor) -> Option<Hazard> {
        let found = self.write(word, 0xf, who, false);
        let cell = &mut self.words[word];
        cell.write = cell.write & !WRITTEN | PENDING;
        found
    }

    /// Records the write of an asynchronous copy.
    pub(super) fn complete_pending(&mut self, word: usize, who: &Accessor) {
        let cell = &mut self.words[word];
        self.history.release(cell);
        cell.set_writer(who, 0);
    }
}

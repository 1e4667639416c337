//! What is known of each byte of shared memory: written or not, by whom last, read by whom since.
//!
//! A cell describes a word of four bytes, for most accesses cover whole words. A word that is accessed in part is *split* into
//! four cells of a byte each, until a write covers all of it again. A cell keeps the last write and the reads since; reads
//! of several warps at one clock fit into it, others go to a pool. Older reads of a warp are dropped for newer ones.

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

/// The clocks, and the reads that do not fit into a cell.
#[derive(Debug)]
struct Books {
    order: VectorClocks,
    pool: Vec<Readers>,
    free: Vec<usize>,
}

/// Everything known of a block's shared memory.
#[derive(Debug)]
pub(super) struct ShadowMemory {
    words: Vec<ShadowCell>,
    /// Four for each word; made when the first word is split.
    bytes: Vec<ShadowCell>,
    books: Books,
    /// Clocks below it are of earlier blocks.
    floor: u32,
}

impl Books {
    fn release(&mut self, cell: &mut ShadowCell) {
        if let Some(LastReads::Pool(index)) = cell.reads() {
            self.free.push(index);
        }
        cell.forget_reads();
    }

    /// A thread whose read since the last write is not ordered before what `who` does.
    fn unordered_reader(&self, cell: &ShadowCell, who: &Accessor) -> Option<usize> {
        let check = |warp: usize, reads: Reads| {
            let mut threads = lanes(reads.lanes).map(|lane| warp * LANES + lane);
            threads.find(|&thread| !self.order.ordered(thread, reads.clock, who.thread))
        };
        match cell.reads()? {
            LastReads::Pool(index) => (0..WARPS).find_map(|warp| check(warp, self.pool[index].by_warp[warp])),
            LastReads::Warp { clock, warp, lanes } => check(warp, Reads { clock, lanes }),
            // Which lanes read is not known: of other warps it does not matter, and they decide for the own one.
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
                    // Older reads of the same warp are dropped.
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

    /// Moves a cell's reads to the pool, for one that does not fit.
    fn promote(&mut self, cell: &mut ShadowCell, reads: LastReads, who: &Accessor) {
        let mut by_warp = [Reads::default(); WARPS];
        let newest = match reads {
            LastReads::Warp { clock, warp, lanes } => {
                by_warp[warp] = Reads { clock, lanes };
                clock
            }
            LastReads::Warps { clock, warps } => {
                // Any lane stands for all to other warps.
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
        let books = Books { order: VectorClocks::new(warps), pool: Vec::new(), free: Vec::new() };
        let mut shadow = Self { words: vec![ShadowCell::default(); words], bytes: Vec::new(), books, floor: 1 };
        shadow.reset();
        shadow
    }

    pub(super) fn order(&mut self) -> &mut VectorClocks {
        &mut self.books.order
    }

    /// A new block: nothing is written. Old cells are told by their clocks.
    pub(super) fn reset(&mut self) {
        let latest = self.books.order.latest();
        self.floor = if latest > LAST_CLOCK / 2 {
            self.words.fill(ShadowCell::default());
            1
        } else {
            latest + 1
        };
        // The floor's own clock means "no access": it is ordered before everything.
        self.books.order.restart(self.floor);
        self.books.pool.clear();
        self.books.free.clear();
    }

    /// Starts the clocks again where they would overflow: accesses so far count as ordered.
    pub(super) fn rewind(&mut self) {
        if self.books.order.latest() < LAST_CLOCK {
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
        self.books.order.rewind();
        self.books.pool.clear();
        self.books.free.clear();
    }

    /// Lane 0 of a warp, now.
    #[inline(always)]
    pub(super) fn accessor(&self, warp: u32, line: u32) -> Accessor {
        let order = &self.books.order;
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

    /// Reads these bytes of a word if nothing about them is special; else does nothing (or a part of it, which does no
    /// harm: doing it again changes nothing) and says so.
    #[inline(always)]
    pub(super) fn read_simple(&mut self, word: usize, bytes: u8, who: &Accessor) -> bool {
        let floor = self.floor;
        if bytes == 0xf {
            return self.words[word].read_simple(who, floor);
        }
        self.parts(word, bytes, |cell| cell.read_simple(who, floor))
    }

    /// The same for a write.
    #[inline(always)]
    pub(super) fn write_simple(&mut self, word: usize, bytes: u8, who: &Accessor) -> bool {
        let floor = self.floor;
        if bytes == 0xf {
            return self.words[word].write_simple(who, floor);
        }
        self.parts(word, bytes, |cell| cell.write_simple(who, floor))
    }

    /// Whether something holds for the cells of these bytes, of a word that is split.
    #[inline(always)]
    fn parts(&mut self, word: usize, bytes: u8, simple: impl Fn(&mut ShadowCell) -> bool) -> bool {
        let whole = &self.words[word];
        if whole.write & (PENDING | SPLIT) != SPLIT || whole.clock() < self.floor {
            return false;
        }
        let cells = &mut self.bytes[word * 4..word * 4 + 4];
        cells.iter_mut().enumerate().all(|(byte, cell)| bytes >> byte & 1 == 0 || simple(cell))
    }

    /// Each lane reads the next `each` words, if nothing about them is special (see [`Shadow::read_simple`]).
    #[inline(always)]
    pub(super) fn read_run(&mut self, word: usize, each: usize, who: &Accessor) -> bool {
        let floor = self.floor;
        let cells = self.words[word..word + LANES * each].chunks_exact_mut(each).enumerate();
        cells
            .map(|(lane, cells)| (who.lane(lane), cells))
            .all(|(who, cells)| cells.iter_mut().all(|cell| cell.read_simple(&who, floor)))
    }

    /// The same for writes.
    #[inline(always)]
    pub(super) fn write_run(&mut self, word: usize, each: usize, who: &Accessor) -> bool {
        let floor = self.floor;
        let cells = self.words[word..word + LANES * each].chunks_exact_mut(each).enumerate();
        cells
            .map(|(lane, cells)| (who.lane(lane), cells))
            .all(|(who, cells)| cells.iter_mut().all(|cell| cell.write_simple(&who, floor)))
    }

    /// These lanes of a warp all read the same word, which others wrote long ago; else as [`Shadow::read_simple`].
    #[inline(always)]
    pub(super) fn read_together(&mut self, word: usize, lanes: u32, who: &Accessor) -> bool {
        let floor = self.floor;
        let cell = &mut self.words[word];
        // Only one of the lanes can be the writer.
        cell.clock() <= who.settled && cell.read_simple(&Accessor { lanes, ..*who }, floor)
    }

    /// What lies in a cell of an earlier block is forgotten.
    fn freshen(&mut self, word: usize) {
        let cell = &mut self.words[word];
        if cell.clock() < self.floor {
            *cell = ShadowCell::blank(self.floor, 0);
        }
    }

    /// Gives each byte of a word its own cell.
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
                let readers = self.books.pool[index].clone();
                cell.pool_reads(self.books.keep(readers));
            }
            self.bytes[word * 4 + byte] = cell;
        }
        self.words[word] = ShadowCell::blank(whole.clock(), SPLIT);
    }

    /// Joins the bytes of a word again if all of them are written and everything about them is past for all.
    fn join(&mut self, word: usize) {
        let past = self.books.order.settled_for_all;
        let cells = &self.bytes[word * 4..word * 4 + 4];
        let done =
            |cell: &ShadowCell| cell.write & WRITTEN == WRITTEN && cell.clock() <= past && cell.read_clock() <= past;
        if cells.iter().all(done) {
            self.words[word] = ShadowCell::blank(past, WRITTEN);
        }
    }

    /// Reads the bytes of a word that are in the mask. The read counts even if something is wrong with it.
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
            return self.books.read(&mut self.words[word], who);
        }
        let mut found = None;
        for byte in (0..4).filter(|byte| bytes >> byte & 1 != 0) {
            let one = self.books.read(&mut self.bytes[word * 4 + byte], who);
            found = found.or(one);
        }
        found
    }

    /// Writes the bytes of a word that are in the mask. The write counts even if something is wrong with it.
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
            return self.books.write(&mut self.words[word], who, atomic);
        }
        let mut found = None;
        for byte in (0..4).filter(|byte| bytes >> byte & 1 != 0) {
            let one = self.books.write(&mut self.bytes[word * 4 + byte], who, atomic);
            found = found.or(one);
        }
        if bytes == 0xf {
            self.words[word] = self.bytes[word * 4];
        }
        found
    }

    /// Marks a word as the target of an asynchronous copy, which writes it at some time from now on.
    pub(super) fn mark_pending(&mut self, word: usize, who: &Accessor) -> Option<Hazard> {
        let found = self.write(word, 0xf, who, false);
        let cell = &mut self.words[word];
        cell.write = cell.write & !WRITTEN | PENDING;
        found
    }

    /// An asynchronous copy wrote a word.
    pub(super) fn complete_pending(&mut self, word: usize, who: &Accessor) {
        let cell = &mut self.words[word];
        self.books.release(cell);
        cell.set_writer(who, 0);
    }
}

//! What is known of each byte of shared memory: written or not, by whom last, read by whom since.
//!
//! A cell describes a word of four bytes, for most accesses cover whole words. A word that is accessed in part is *split* into
//! four cells of a byte each, until a write covers all of it again. A cell keeps the last write and the reads since; reads
//! of several warps at one clock fit into it, others go to a pool. Older reads of a warp are dropped for newer ones.

use super::super::LANES;
use super::super::cx::lanes;
use super::order::{LAST_CLOCK, Order, WARPS};

/// The four bytes were written (in a cell of one byte: that byte; all four bits then).
const WRITTEN: u64 = 0xf;
/// An asynchronous copy into the word is not waited for.
const PENDING: u64 = 1 << 4;
/// See the four cells of its bytes.
const SPLIT: u64 = 1 << 5;
/// The last write was an atomic.
const ATOMIC: u64 = 1 << 6;
const LINE: u32 = 7;
const LINE_BITS: u32 = 21;
const THREAD: u32 = 28;
const CLOCK: u32 = 38;

/// In [`Cell::read_clock`]: the rest is an index of the pool. It makes the clock higher than any.
const POOLED: u32 = 1 << 31;

/// What is known of a word or byte.
#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    /// The last write: clock, thread, line, flags. A clock below the block's first means: nothing in this block.
    write: u64,
    /// Clock of the reads since (0: none).
    read_clock: u32,
    /// PTX line of one of them.
    read_line: u32,
    /// Warps that read, and lanes, of all these warps together.
    warps: u32,
    lanes: u32,
}

impl Cell {
    #[inline(always)]
    fn clock(&self) -> u32 {
        (self.write >> CLOCK) as u32
    }

    #[inline(always)]
    fn thread(&self) -> usize {
        (self.write >> THREAD) as usize & 1023
    }

    fn line(&self) -> u32 {
        (self.write >> LINE) as u32 & ((1 << LINE_BITS) - 1)
    }
}

/// Reads of one warp.
#[derive(Clone, Copy, Debug, Default)]
struct Reads {
    clock: u32,
    lanes: u32,
    line: u32,
}

/// Reads of several warps at different clocks.
#[derive(Clone, Debug)]
struct Readers {
    newest: u32,
    by_warp: [Reads; WARPS],
}

/// Who accesses, and when.
#[derive(Clone, Copy, Debug)]
pub(super) struct Who {
    thread: usize,
    clock: u32,
    settled: u32,
    line: u32,
    warp_bit: u32,
    lane_bit: u32,
    partial: bool,
}

impl Who {
    /// The same instruction's next lane.
    #[inline(always)]
    pub(super) fn lane(self, lane: usize) -> Self {
        Self { thread: self.thread & !31 | lane, lane_bit: 1 << lane, ..self }
    }

    #[inline(always)]
    fn packed(&self) -> u64 {
        let line = u64::from(self.line.min((1 << LINE_BITS) - 1));
        u64::from(self.clock) << CLOCK | (self.thread as u64) << THREAD | line << LINE
    }
}

/// What is wrong with an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    Uninitialised,
    /// An asynchronous copy, started at this line, was not waited for.
    Pending(u32),
    /// The other access of a race.
    Race {
        thread: usize,
        line: u32,
        wrote: bool,
    },
}

/// The clocks, and the reads that do not fit into a cell.
#[derive(Debug)]
struct Books {
    order: Order,
    pool: Vec<Readers>,
    free: Vec<u32>,
}

/// Everything known of a block's shared memory.
#[derive(Debug)]
pub(super) struct Shadow {
    words: Vec<Cell>,
    /// Four for each word; made when the first word is split.
    bytes: Vec<Cell>,
    books: Books,
    /// Clocks below it are of earlier blocks.
    floor: u32,
}

impl Books {
    fn release(&mut self, cell: &mut Cell) {
        if cell.read_clock & POOLED != 0 {
            self.free.push(cell.read_clock & !POOLED);
        }
        (cell.read_clock, cell.warps, cell.lanes) = (0, 0, 0);
    }

    /// A read since the last write that is not ordered before what `who` does: thread, line.
    fn unordered_reader(&self, cell: &Cell, who: &Who) -> Option<(usize, u32)> {
        let check = |warp: usize, reads: Reads| {
            lanes(reads.lanes).map(|lane| warp * LANES + lane).find_map(|thread| {
                (!self.order.ordered(thread, reads.clock, who.thread)).then_some((thread, reads.line))
            })
        };
        if cell.read_clock & POOLED != 0 {
            let readers = &self.pool[(cell.read_clock & !POOLED) as usize];
            return (0..WARPS).find_map(|warp| check(warp, readers.by_warp[warp]));
        }
        let several = cell.warps.count_ones() > 1;
        lanes(cell.warps).find_map(|warp| {
            // Whose lanes are whose is not known of several warps: the other warps' reads decide.
            let of_warp = if several && warp == who.thread / LANES { 0 } else { cell.lanes };
            check(warp, Reads { clock: cell.read_clock, lanes: of_warp, line: cell.read_line })
        })
    }

    /// Adds a read.
    fn record(&mut self, cell: &mut Cell, who: &Who) {
        let warp = who.thread / LANES;
        if cell.read_clock & POOLED != 0 {
            let readers = &mut self.pool[(cell.read_clock & !POOLED) as usize];
            if readers.newest > who.settled {
                let mine = &mut readers.by_warp[warp];
                let before = if mine.clock == who.clock { mine.lanes } else { 0 };
                *mine = Reads { clock: who.clock, lanes: before | who.lane_bit, line: who.line };
                readers.newest = readers.newest.max(who.clock);
                return;
            }
        } else if cell.read_clock == who.clock && cell.warps == who.warp_bit {
            cell.lanes |= who.lane_bit;
            return;
        } else if cell.read_clock > who.settled && self.unordered_reader(cell, who).is_some() {
            if cell.read_clock == who.clock {
                cell.warps |= who.warp_bit;
                cell.lanes |= who.lane_bit;
                return;
            }
            if cell.warps != who.warp_bit {
                return self.promote(cell, who);
            }
        }
        self.release(cell);
        cell.read_clock = who.clock;
        cell.read_line = who.line;
        cell.warps = who.warp_bit;
        cell.lanes = who.lane_bit;
    }

    /// Moves a cell's reads to the pool, for one that does not fit.
    fn promote(&mut self, cell: &mut Cell, who: &Who) {
        let mut by_warp = [Reads::default(); WARPS];
        let one = cell.warps.is_power_of_two();
        for warp in lanes(cell.warps) {
            // The lanes of several warps are mixed up; one of them stands for all to other warps.
            let of_warp = if one { cell.lanes } else { 1 << cell.lanes.trailing_zeros() };
            by_warp[warp] = Reads { clock: cell.read_clock, lanes: of_warp, line: cell.read_line };
        }
        by_warp[who.thread / LANES] = Reads { clock: who.clock, lanes: who.lane_bit, line: who.line };
        let index = self.keep(Readers { newest: cell.read_clock.max(who.clock), by_warp });
        (cell.read_clock, cell.warps, cell.lanes) = (POOLED | index, 0, 0);
    }

    fn keep(&mut self, readers: Readers) -> u32 {
        match self.free.pop() {
            Some(index) => {
                self.pool[index as usize] = readers;
                index
            }
            None => {
                self.pool.push(readers);
                self.pool.len() as u32 - 1
            }
        }
    }

    fn unordered_write(&self, cell: &Cell, who: &Who) -> Option<Found> {
        let (thread, clock) = (cell.thread(), cell.clock());
        let race = Found::Race { thread, line: cell.line(), wrote: true };
        (!self.order.ordered(thread, clock, who.thread)).then_some(race)
    }

    fn read(&mut self, cell: &mut Cell, who: &Who) -> Option<Found> {
        let found =
            if cell.write & WRITTEN != WRITTEN { Some(Found::Uninitialised) } else { self.unordered_write(cell, who) };
        self.record(cell, who);
        found
    }

    fn write(&mut self, cell: &mut Cell, who: &Who, atomic: bool) -> Option<Found> {
        let both_atomic = atomic && cell.write & ATOMIC != 0;
        let missing = || (atomic && cell.write & WRITTEN != WRITTEN).then_some(Found::Uninitialised);
        let writer = || self.unordered_write(cell, who).filter(|_| !both_atomic);
        let reader = || {
            let (thread, line) = self.unordered_reader(cell, who)?;
            Some(Found::Race { thread, line, wrote: false })
        };
        let found = reader().or_else(writer).or_else(missing);
        self.release(cell);
        cell.write = who.packed() | WRITTEN | if atomic { ATOMIC } else { 0 };
        found
    }
}

impl Shadow {
    pub(super) fn new(words: usize, warps: usize) -> Self {
        let books = Books { order: Order::new(warps), pool: Vec::new(), free: Vec::new() };
        let mut shadow = Self { words: vec![Cell::default(); words], bytes: Vec::new(), books, floor: 1 };
        shadow.reset();
        shadow
    }

    pub(super) fn order(&mut self) -> &mut Order {
        &mut self.books.order
    }

    /// A new block: nothing is written. Old cells are told by their clocks.
    pub(super) fn reset(&mut self) {
        let latest = self.books.order.latest();
        self.floor = if latest > LAST_CLOCK / 2 {
            self.words.fill(Cell::default());
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
        let rewound = |cell: &Cell, floor: u32| {
            let flags = if cell.clock() < floor { 0 } else { cell.write & (WRITTEN | PENDING | SPLIT) | 1 << CLOCK };
            Cell { write: flags, ..Cell::default() }
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
    pub(super) fn who(&self, warp: u32, line: u32) -> Who {
        let order = &self.books.order;
        let warp = warp as usize % WARPS;
        Who {
            thread: warp * LANES,
            clock: order.clock[warp],
            settled: order.settled[warp],
            line,
            warp_bit: 1 << warp,
            lane_bit: 1,
            partial: order.partial,
        }
    }

    /// Reads a whole word if nothing about it is special; else does nothing and says so.
    #[inline(always)]
    pub(super) fn read_simple(&mut self, word: usize, who: &Who) -> bool {
        let cell = &mut self.words[word];
        let clock = cell.clock();
        if cell.write & (WRITTEN | PENDING | SPLIT) != WRITTEN
            || clock < self.floor
            || clock > who.settled && cell.thread() != who.thread
        {
            return false;
        }
        if cell.read_clock == who.clock && (cell.warps == who.warp_bit || !who.partial) {
            cell.warps |= who.warp_bit;
            cell.lanes |= who.lane_bit;
        } else if cell.read_clock <= who.settled {
            cell.read_clock = who.clock;
            cell.read_line = who.line;
            cell.warps = who.warp_bit;
            cell.lanes = who.lane_bit;
        } else {
            return false;
        }
        true
    }

    /// Writes a whole word if nothing about it is special; else does nothing and says so.
    #[inline(always)]
    pub(super) fn write_simple(&mut self, word: usize, who: &Who) -> bool {
        let cell = &mut self.words[word];
        let clock = cell.clock();
        let mine = cell.warps == who.warp_bit && cell.lanes == who.lane_bit;
        if cell.write & (PENDING | SPLIT) != 0
            || clock < self.floor
            || clock > who.settled && cell.thread() != who.thread
            || cell.read_clock > who.settled && !mine
        {
            return false;
        }
        cell.write = who.packed() | WRITTEN;
        (cell.read_clock, cell.warps, cell.lanes) = (0, 0, 0);
        true
    }

    /// What lies in a cell of an earlier block is forgotten.
    fn freshen(&mut self, word: usize) {
        let cell = &mut self.words[word];
        if cell.clock() < self.floor {
            *cell = Cell { write: u64::from(self.floor) << CLOCK, ..Cell::default() };
        }
    }

    /// Gives each byte of a word its own cell.
    fn split(&mut self, word: usize) {
        if self.bytes.is_empty() {
            self.bytes = vec![Cell::default(); self.words.len() * 4];
        }
        let whole = self.words[word];
        if whole.write & SPLIT != 0 {
            return;
        }
        for byte in 0..4 {
            let mut cell = whole;
            if whole.read_clock & POOLED != 0 && byte > 0 {
                let readers = self.books.pool[(whole.read_clock & !POOLED) as usize].clone();
                cell.read_clock = POOLED | self.books.keep(readers);
            }
            self.bytes[word * 4 + byte] = cell;
        }
        self.words[word] = Cell { write: u64::from(whole.clock()) << CLOCK | SPLIT, ..Cell::default() };
    }

    /// Joins the bytes of a word again if all of them are written and everything about them is past for all.
    fn join(&mut self, word: usize) {
        let past = self.books.order.settled_for_all;
        let cells = &self.bytes[word * 4..word * 4 + 4];
        let done = |cell: &Cell| cell.write & WRITTEN == WRITTEN && cell.clock() <= past && cell.read_clock <= past;
        if cells.iter().all(done) {
            self.words[word] = Cell { write: u64::from(past) << CLOCK | WRITTEN, ..Cell::default() };
        }
    }

    /// Reads the bytes of a word that are in the mask. The read counts even if something is wrong with it.
    #[inline(never)]
    pub(super) fn read(&mut self, word: usize, bytes: u8, who: &Who) -> Option<Found> {
        self.freshen(word);
        let cell = &self.words[word];
        if cell.write & PENDING != 0 {
            return Some(Found::Pending(cell.line()));
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
    pub(super) fn write(&mut self, word: usize, bytes: u8, who: &Who, atomic: bool) -> Option<Found> {
        self.freshen(word);
        let cell = &self.words[word];
        if cell.write & PENDING != 0 {
            return Some(Found::Pending(cell.line()));
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
    pub(super) fn expect(&mut self, word: usize, who: &Who) -> Option<Found> {
        let found = self.write(word, 0xf, who, false);
        let cell = &mut self.words[word];
        cell.write = cell.write & !WRITTEN | PENDING;
        found
    }

    /// An asynchronous copy wrote a word.
    pub(super) fn arrived(&mut self, word: usize, who: &Who) {
        let cell = &mut self.words[word];
        self.books.release(cell);
        cell.write = who.packed() | WRITTEN;
    }
}

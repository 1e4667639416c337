//! The cells of a KV cache that several sequences share.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use thiserror::Error;

/// The number by which devices identify the sequence that wrote a cell. A tag is not used again while any cell carries it, even if its
/// sequence has left: so a cell is free without being erased, and is hidden from all other sequences.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SequenceTag(u32);

impl SequenceTag {
    /// The number, from 1 to one more than the number of cells, so that F32 represents it.
    pub fn number(self) -> u32 {
        self.0
    }
}

/// A sequence cannot have cells.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum CellError {
    /// Other sequences have the cells.
    #[error("{wanted} cells of the KV cache are needed, and {left} of {capacity} are not reserved for other sequences")]
    Full {
        /// Cells that the sequence needs.
        wanted: usize,
        /// Cells that are not reserved.
        left: usize,
        /// All cells.
        capacity: usize,
    },
    /// More tokens than the sequence was reserved cells (caller's error).
    #[error("position {position} is beyond the {reserved} cells of the sequence")]
    BeyondReservation {
        /// The first position without a cell.
        position: usize,
        /// Cells of the sequence.
        reserved: usize,
    },
    /// The sequence has left (caller's error).
    #[error("the sequence has left its group")]
    Unknown,
}

/// Which sequence has which cells of a KV cache.
///
/// As many cells are reserved for a sequence as it may ever have positions, so that none runs out of cells half way. Each is chosen
/// when it is needed. A sequence takes whole blocks of cells while there are some, those with the lowest numbers first: a device can then
/// skip the blocks that the mask hides, which belong to other sequences. When no whole block is left, sequences take the cells that
/// are left in the blocks of others. Attention that skips nothing reads fewer cells with blocks of 1, up to 63 for each sequence.
#[derive(Clone, Debug)]
pub struct KvCells {
    /// By cell: the tag that it carries on the devices, perhaps of a sequence that has left; `None` before it is written.
    tags: Vec<Option<SequenceTag>>,
    /// Cells of a block; the last block may have fewer.
    block: u32,
    free: BTreeSet<u32>,
    /// Numbers of the blocks whose cells are all free.
    free_blocks: BTreeSet<u32>,
    sequences: BTreeMap<SequenceTag, SequenceCells>,
}

#[derive(Clone, Debug)]
struct SequenceCells {
    reserved: usize,
    /// By position: the cell. After `length` the cells of positions that were cut off: they still carry the sequence's tag, so the
    /// sequence keeps them, and overwrites them in the same order before their positions come to be visible again.
    cells: Vec<u32>,
    length: usize,
}

impl KvCells {
    /// Most cells of a cache: F32 represents all their positions and tags.
    pub const MAX_CELLS: usize = (1 << 24) - 2;

    /// The size of a block for flash attention: that of this crate's CPU device skips blocks of so many positions.
    pub const BLOCK: usize = 64;

    /// A cache of `capacity` cells, at most [`KvCells::MAX_CELLS`], in blocks of `block` cells, at least 1. None of them is in use.
    pub fn new(capacity: usize, block: usize) -> KvCells {
        let block = block.clamp(1, KvCells::MAX_CELLS);
        let capacity = capacity.min(KvCells::MAX_CELLS);
        KvCells {
            tags: vec![None; capacity],
            block: block as u32,
            free: (0..capacity as u32).collect(),
            free_blocks: (0..capacity.div_ceil(block) as u32).collect(),
            sequences: BTreeMap::new(),
        }
    }

    /// Number of cells.
    pub fn capacity(&self) -> usize {
        self.tags.len()
    }

    /// Cells that are not reserved to a sequence.
    pub fn unreserved(&self) -> usize {
        self.capacity() - self.sequences.values().map(|sequence| sequence.reserved).sum::<usize>()
    }

    /// Adds a sequence of up to `positions` tokens.
    ///
    /// # Errors
    /// [`CellError::Full`].
    pub fn join(&mut self, positions: usize) -> Result<SequenceTag, CellError> {
        let left = self.unreserved();
        if positions > left {
            return Err(CellError::Full { wanted: positions, left, capacity: self.capacity() });
        }
        let carried: BTreeSet<SequenceTag> = self.tags.iter().flatten().chain(self.sequences.keys()).copied().collect();
        // From 1 on, because cells of zeroed memory carry 0.
        let gap = carried.iter().zip(1..).find(|&(tag, number)| tag.0 != number).map(|(_, number)| number);
        let tag = SequenceTag(gap.unwrap_or(carried.len() as u32 + 1));
        self.sequences.insert(tag, SequenceCells { reserved: positions, cells: Vec::new(), length: 0 });
        Ok(tag)
    }

    /// Removes a sequence; its cells are free.
    pub fn leave(&mut self, tag: SequenceTag) {
        let Some(sequence) = self.sequences.remove(&tag) else { return };
        self.free.extend(&sequence.cells);
        for number in sequence.cells.into_iter().map(|cell| cell / self.block).collect::<BTreeSet<_>>() {
            let Range { start, end } = cells_of(number, self.block);
            let cells = start..end.min(self.tags.len() as u32);
            if self.free.range(cells.clone()).count() == cells.len() {
                self.free_blocks.insert(number);
            }
        }
    }

    /// Number of positions of a sequence; 0 after it has left.
    pub fn length(&self, tag: SequenceTag) -> usize {
        self.sequences.get(&tag).map_or(0, |sequence| sequence.length)
    }

    /// Checks that a sequence may have a position.
    ///
    /// # Errors
    /// [`CellError::BeyondReservation`], [`CellError::Unknown`].
    pub fn check_position(&self, tag: SequenceTag, position: usize) -> Result<(), CellError> {
        let reserved = self.sequences.get(&tag).ok_or(CellError::Unknown)?.reserved;
        if position < reserved { Ok(()) } else { Err(CellError::BeyondReservation { position, reserved }) }
    }

    /// Appends a position to a sequence; returns it and its cell.
    ///
    /// # Errors
    /// [`CellError::BeyondReservation`], [`CellError::Unknown`].
    pub fn append(&mut self, tag: SequenceTag) -> Result<(usize, u32), CellError> {
        let position = self.length(tag);
        self.check_position(tag, position)?;
        let sequence = self.sequences.get_mut(&tag).ok_or(CellError::Unknown)?;
        let cell = match sequence.cells.get(position) {
            Some(&cell) => cell,
            None => {
                let last_block = sequence.cells.last().map(|&last| cells_of(last / self.block, self.block));
                let in_last_block = last_block.and_then(|cells| self.free.range(cells).next());
                let in_free_block = || self.free_blocks.first().map(|&number| cells_of(number, self.block).start);
                // There is a free one, because no more cells are reserved than there are.
                let full = CellError::Full { wanted: 1, left: 0, capacity: self.tags.len() };
                let cell =
                    in_last_block.copied().or_else(in_free_block).or_else(|| self.free.first().copied()).ok_or(full)?;
                self.free.remove(&cell);
                self.free_blocks.remove(&(cell / self.block));
                self.tags[cell as usize] = Some(tag);
                sequence.cells.push(cell);
                cell
            }
        };
        sequence.length += 1;
        Ok((position, cell))
    }

    /// Shortens a sequence to its first `length` positions.
    pub fn truncate(&mut self, tag: SequenceTag, length: usize) {
        if let Some(sequence) = self.sequences.get_mut(&tag) {
            sequence.length = sequence.length.min(length);
        }
    }

    /// Cells that attention must read: one more than the highest number of a cell in use.
    pub fn seen(&self) -> usize {
        let used = self.sequences.values().flat_map(|sequence| &sequence.cells[..sequence.length]);
        used.max().map_or(0, |&cell| cell as usize + 1)
    }
}

/// The cells of block number `number`, of `block` cells each; the last block of a cache may have fewer.
fn cells_of(number: u32, block: u32) -> Range<u32> {
    number * block..(number + 1) * block
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap fails the test
mod tests {
    use super::*;

    #[test]
    fn cells_are_reserved_given_lowest_first_and_reused() {
        let mut cells = KvCells::new(6, KvCells::BLOCK);
        let a = cells.join(3).unwrap();
        let b = cells.join(2).unwrap();
        assert_eq!(cells.join(2), Err(CellError::Full { wanted: 2, left: 1, capacity: 6 }));
        assert_eq!([a, b, a, b].map(|tag| cells.append(tag).unwrap()), [(0, 0), (0, 1), (1, 2), (1, 3)]);
        assert_eq!(cells.append(b), Err(CellError::BeyondReservation { position: 2, reserved: 2 }));
        assert_eq!(cells.seen(), 4);
        cells.leave(a);
        assert_eq!((cells.append(a), cells.length(a), cells.unreserved()), (Err(CellError::Unknown), 0, 4));
        let c = cells.join(4).unwrap();
        assert_eq!([c, c, c].map(|tag| cells.append(tag).unwrap()), [(0, 0), (1, 2), (2, 4)]);
        assert_eq!(cells.seen(), 5);
    }

    #[test]
    fn sequences_have_blocks_of_their_own_while_there_are_some() {
        let block = KvCells::BLOCK as u32;
        let mut cells = KvCells::new(3 * KvCells::BLOCK + 1, KvCells::BLOCK);
        let (a, b) = (cells.join(KvCells::BLOCK + 2).unwrap(), cells.join(KvCells::BLOCK + 1).unwrap());
        let append = |cells: &mut KvCells, tag| cells.append(tag).unwrap().1;
        assert_eq!([a, b, a, b].map(|tag| append(&mut cells, tag)), [0, block, 1, block + 1], "in turn");
        let last = (2..=KvCells::BLOCK).map(|_| append(&mut cells, a)).last();
        assert_eq!(last, Some(2 * block), "a's second block");
        let last = (2..=KvCells::BLOCK).map(|_| append(&mut cells, b)).last();
        assert_eq!(last, Some(3 * block), "a block of one cell");
        let c = cells.join(2).unwrap();
        assert_eq!([c, a].map(|tag| append(&mut cells, tag)), [2 * block + 1, 2 * block + 2], "no block is left");
        cells.leave(a);
        assert_eq!(append(&mut cells, c), 2 * block, "the block that it shared");
        let d = cells.join(KvCells::BLOCK).unwrap();
        assert_eq!(append(&mut cells, d), 0, "a's first block is free again, its second one is not");
        cells.leave(b);
        cells.leave(c);
        let blocks: Vec<u32> = cells.free_blocks.iter().copied().collect();
        assert_eq!(blocks, [1, 2, 3]);
    }

    /// What a device sees: the last writer of each cell. A model of it must never show a sequence a cell that is not its own.
    #[test]
    fn no_sequence_sees_a_cell_of_another_one_or_of_a_position_that_was_cut_off() {
        let mut rng = fastrand::Rng::with_seed(34);
        for (capacity, block) in [(1, 64), (5, 1), (16, 4), (2 * KvCells::BLOCK + 3, KvCells::BLOCK)] {
            let mut cells = KvCells::new(capacity, block);
            // By cell, as the device has it: tag, position, and a number that only the test knows.
            let mut device = vec![None; capacity];
            let mut live: Vec<(SequenceTag, Vec<u32>)> = Vec::new();
            for written in 0..4000 {
                match rng.u32(..10) {
                    0 | 1 => {
                        let positions = rng.usize(1..=capacity);
                        if let Ok(tag) = cells.join(positions) {
                            assert!(live.iter().all(|(other, _)| *other != tag));
                            live.push((tag, Vec::new()));
                        }
                    }
                    2 if !live.is_empty() => cells.leave(live.swap_remove(rng.usize(..live.len())).0),
                    3 if !live.is_empty() => {
                        let at = rng.usize(..live.len());
                        let (tag, own) = &mut live[at];
                        own.truncate(rng.usize(..=own.len()));
                        cells.truncate(*tag, own.len());
                    }
                    _ if !live.is_empty() => {
                        let at = rng.usize(..live.len());
                        let (tag, own) = &mut live[at];
                        let Ok((position, cell)) = cells.append(*tag) else { continue };
                        assert_eq!(position, own.len());
                        device[cell as usize] = Some((*tag, position, written));
                        own.push(written);
                        // The mask of this token.
                        let mut visible: Vec<_> = device[..cells.seen()]
                            .iter()
                            .flatten()
                            .filter(|(writer, of, _)| writer == tag && *of <= position)
                            .map(|&(_, of, written)| (of, written))
                            .collect();
                        visible.sort_unstable();
                        assert_eq!(visible, own.iter().copied().enumerate().collect::<Vec<_>>());
                    }
                    _ => {}
                }
            }
        }
    }
}

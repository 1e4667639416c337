//! Interval map: a value for each byte of a memory, stored as runs of equal bytes.

use std::collections::BTreeMap;
use std::ops::Range;

/// A value for each byte from 0 on. Key: the first byte of a piece; value: one past its last byte, and the piece's value.
/// Pieces cover the memory without gaps.
#[derive(Clone, Debug)]
pub(super) struct ByteMap<T>(BTreeMap<u64, (u64, T)>);

impl<T: Clone> ByteMap<T> {
    pub(super) fn new(len: u64, all: T) -> ByteMap<T> {
        let mut bytes = ByteMap(BTreeMap::new());
        if len > 0 {
            bytes.0.insert(0, (len, all));
        }
        bytes
    }

    /// Iterates over the pieces of a range, and splits the pieces that straddle its ends.
    pub(super) fn pieces_in(&mut self, range: Range<u64>) -> impl Iterator<Item = (Range<u64>, &mut T)> {
        self.split_at(range.start);
        self.split_at(range.end);
        self.0.range_mut(range).map(|(&start, (end, what))| (start..*end, what))
    }

    /// Overwrites a range with one piece.
    pub(super) fn set(&mut self, range: Range<u64>, what: T) {
        if range.is_empty() {
            return;
        }
        self.split_at(range.start);
        self.split_at(range.end);
        while let Some((&start, _)) = self.0.range(range.start + 1..range.end).next() {
            self.0.remove(&start);
        }
        self.0.insert(range.start, (range.end, what));
    }

    /// Splits the piece that contains byte `at`, so that a piece begins there.
    fn split_at(&mut self, at: u64) {
        if let Some((_, (end, what))) = self.0.range_mut(..at).next_back().filter(|(_, (end, _))| *end > at) {
            let rest = (std::mem::replace(end, at), what.clone());
            self.0.insert(at, rest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_maps_behave_like_arrays() {
        let mut rng = fastrand::Rng::with_seed(5);
        for _ in 0..100 {
            let (mut bytes, mut array) = (ByteMap::new(40, 0), [0; 40]);
            for value in 1..20 {
                let start = rng.u64(0..40);
                let range = start..rng.u64(start + 1..=40);
                let mut next = range.start;
                for (piece, what) in bytes.pieces_in(range.clone()) {
                    assert_eq!(std::mem::replace(&mut next, piece.end), piece.start, "gap between pieces");
                    assert!(piece.clone().all(|at| array[at as usize] == *what));
                }
                assert_eq!(next, range.end);
                bytes.set(range.clone(), value);
                array[range.start as usize..range.end as usize].fill(value);
            }
        }
    }
}

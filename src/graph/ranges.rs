//! Sets of byte ranges, by slot.

use std::collections::BTreeMap;
use std::ops::Range;

/// A set of disjoint byte ranges. Ranges that overlap are merged; adjacent ranges stay separate.
#[derive(Default)]
pub(crate) struct ByteRangeSet(BTreeMap<(u32, usize), usize>);

impl ByteRangeSet {
    /// Adds a range, and calls `missing` with each part of it that the set did not contain before.
    pub(crate) fn insert(&mut self, slot: u32, range: Range<usize>, mut missing: impl FnMut(Range<usize>)) {
        if range.is_empty() {
            return;
        }
        // `whole` is the merged range. The bytes of `range` from `unseen` on are already reported or in the set.
        let (mut whole, mut unseen) = (range.clone(), range.end);
        // Each removed range is merged and never visited again, so an insertion costs amortised O(log n).
        while let Some(found) = self.last_before(slot, range.end).filter(|found| found.end > range.start) {
            self.0.remove(&(slot, found.start));
            whole = whole.start.min(found.start)..whole.end.max(found.end);
            if found.end < unseen {
                missing(found.end..unseen);
            }
            unseen = found.start;
        }
        if range.start < unseen {
            missing(range.start..unseen);
        }
        self.0.insert((slot, whole.start), whole.end);
    }

    /// Whether the set contains any byte of a range.
    pub(crate) fn intersects(&self, slot: u32, range: &Range<usize>) -> bool {
        !range.is_empty() && self.last_before(slot, range.end).is_some_and(|found| found.end > range.start)
    }

    /// All ranges, ordered by slot and start.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, Range<usize>)> {
        self.0.iter().map(|(&(slot, start), &end)| (slot, start..end))
    }

    /// The last range of a slot that starts before `end`.
    fn last_before(&self, slot: u32, end: usize) -> Option<Range<usize>> {
        self.0.range((slot, 0)..(slot, end)).next_back().map(|(&(_, start), &end)| start..end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn behaves_as_a_set_of_bytes() {
        let mut rng = fastrand::Rng::with_seed(3);
        for _ in 0..200 {
            let (mut ranges, mut contained) = (ByteRangeSet::default(), [[false; 40]; 2]);
            for _ in 0..12 {
                let (slot, start) = (rng.usize(0..2), rng.usize(0..40));
                let range = start..rng.usize(start..=40);
                let touched = contained[slot][range.clone()].contains(&true);
                assert_eq!(ranges.intersects(slot as u32, &range), touched && !range.is_empty());
                let mut added = contained[slot];
                ranges.insert(slot as u32, range.clone(), |missing| {
                    for i in missing {
                        assert!(!std::mem::replace(&mut added[i], true), "byte {i} was already in the set");
                    }
                });
                contained[slot][range].fill(true);
                assert_eq!(added, contained[slot]);
            }
            let mut found = [[false; 40]; 2];
            for (slot, range) in ranges.iter() {
                assert!(range.clone().all(|i| !std::mem::replace(&mut found[slot as usize][i], true)));
            }
            assert_eq!(found, contained);
        }
    }

    #[test]
    fn overlapping_ranges_merge_and_adjacent_ranges_do_not() {
        let mut ranges = ByteRangeSet::default();
        for range in [0..4, 4..8, 12..16, 7..9, 20..20] {
            ranges.insert(0, range, |_| ());
        }
        assert_eq!(ranges.iter().map(|(_, range)| range).collect::<Vec<_>>(), [0..4, 4..9, 12..16]);
    }
}

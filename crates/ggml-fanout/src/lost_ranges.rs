//! Ranges of bytes whose content was lost with a server.

use std::ops::Range;

/// A set of bytes, as sorted ranges that do not touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LostRanges(Vec<Range<u64>>);

impl LostRanges {
    /// All bytes below `bytes`.
    pub(crate) fn all(bytes: u64) -> LostRanges {
        let mut all = LostRanges::default();
        all.insert(0..bytes);
        all
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether any byte of the range is lost.
    pub(crate) fn overlaps(&self, range: &Range<u64>) -> bool {
        !range.is_empty() && self.first_after(range.start).is_some_and(|lost| lost.start < range.end)
    }

    /// The lost parts of a range.
    pub(crate) fn within(&self, range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<'_> {
        let range = range.clone();
        let first = self.0.partition_point(|lost| lost.end <= range.start);
        let overlapping = self.0[first..].iter().take_while({
            let end = range.end;
            move |lost| lost.start < end
        });
        overlapping.map(move |lost| lost.start.max(range.start)..lost.end.min(range.end))
    }

    /// Adds a range.
    pub(crate) fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let first = self.0.partition_point(|lost| lost.end < range.start);
        let last = self.0.partition_point(|lost| lost.start <= range.end);
        let joined = match self.0.get(first..last) {
            Some([one]) => one.start.min(range.start)..one.end.max(range.end),
            Some([from, .., to]) => from.start.min(range.start)..to.end.max(range.end),
            _ => range,
        };
        self.0.splice(first..last, [joined]);
    }

    /// Removes a range, whose bytes are written.
    pub(crate) fn remove(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let first = self.0.partition_point(|lost| lost.end <= range.start);
        let last = self.0.partition_point(|lost| lost.start < range.end);
        if first >= last {
            return;
        }
        let (before, after) = (self.0[first].start..range.start, range.end..self.0[last - 1].end);
        self.0.splice(first..last, [before, after].into_iter().filter(|rest| rest.start < rest.end));
    }

    fn first_after(&self, position: u64) -> Option<&Range<u64>> {
        self.0.get(self.0.partition_point(|lost| lost.end <= position))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with a list of flags, for seeded changes.
    #[test]
    fn ranges_agree_with_flags() {
        let (mut ranges, mut flags, mut state) = (LostRanges::default(), [false; 64], 1u64);
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for _ in 0..5000 {
            let start = random(64);
            let range = start..start + random(65 - start);
            let lost = random(2) == 0;
            if lost {
                ranges.insert(range.clone())
            } else {
                ranges.remove(range.clone())
            }
            flags[range.start as usize..range.end as usize].fill(lost);
            let probe = random(64);
            let probe = probe..probe + random(65 - probe);
            let expected: Vec<u64> = probe.clone().filter(|&at| flags[at as usize]).collect();
            assert_eq!(ranges.within(&probe).flatten().collect::<Vec<_>>(), expected);
            assert_eq!(ranges.overlaps(&probe), !expected.is_empty());
            assert!(ranges.0.iter().zip(ranges.0.iter().skip(1)).all(|(a, b)| a.end < b.start), "{ranges:?}");
        }
    }
}

//! When weights are repacked: the policy of devices that store weights in a layout of their own.
//!
//! The first product that reads a weight packs it, and some uploads do. A program that needs it as rows converts it back. Products
//! then read it as rows for a number of runs before it is packed again, so that two programs that need it in different layouts do
//! not convert it back and forth: 16 runs, and twice as many after each further conversion (1024 at most). New content ends the
//! delay.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Smallest tensor worth packing, in bytes. Packed tensors share no byte, and neither do ranges with a delay, so each list of a
/// memory has at most one entry per this many bytes: the lists take some 0.5% of the memory.
pub(crate) const MIN_PACKED_BYTES: usize = 16 << 10;

/// Runs of the first delay. A conversion there and back takes about as long as ten products of one column.
pub(crate) const FIRST_REPACK_DELAY: u32 = 16;

/// The longest delay: a tensor that programs need in both layouts for ever is then converted every 1024 runs.
const MAX_REPACK_DELAY: u32 = 1024;

/// A new version of a memory's layout. Versions are unique in a process: equal versions mean the same memory in the same state.
pub(crate) fn next_layout_version() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The ranges of a memory that must not be packed for some runs; sorted and disjoint.
#[derive(Debug, Default)]
pub(crate) struct RepackDelays(Vec<RepackDelay>);

/// A range that was packed until a program needed it as rows.
#[derive(Debug)]
struct RepackDelay {
    range: Range<usize>,
    /// Runs of the last delay. The next delay is twice as long.
    runs: u32,
    /// Runs that are left of it: counted down under a shared lock.
    left: AtomicU32,
    /// The conversion to rows gave way, and is to go on first.
    converting: bool,
}

impl RepackDelay {
    fn is_over(&self) -> bool {
        !self.converting && self.left.load(Ordering::Relaxed) == 0
    }

    /// The parts before and after a range, if they are worth packing.
    fn outside(&self, range: &Range<usize>) -> impl Iterator<Item = RepackDelay> {
        let parts =
            [self.range.start..range.start.max(self.range.start), range.end.min(self.range.end)..self.range.end];
        let (runs, left, converting) = (self.runs, self.left.load(Ordering::Relaxed), self.converting);
        let delay = move |range| RepackDelay { range, runs, left: AtomicU32::new(left), converting };
        parts.into_iter().filter(|part| part.len() >= MIN_PACKED_BYTES).map(delay)
    }
}

impl RepackDelays {
    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether some byte of a range must not be packed yet.
    pub(crate) fn is_delayed(&self, range: &Range<usize>) -> bool {
        self.0[self.indices(range)].iter().any(|delay| !delay.is_over())
    }

    /// Counts a run that multiplies a range as rows, if it reads the start of a range with a delay.
    pub(crate) fn count_run(&self, range: &Range<usize>) {
        let delays = self.0[self.indices(range)].iter();
        for delay in delays.filter(|delay| !delay.converting && range.start <= delay.range.start) {
            let count = |left: u32| left.checked_sub(1);
            _ = delay.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count);
        }
    }

    fn indices(&self, range: &Range<usize>) -> Range<usize> {
        let first = self.0.partition_point(|delay| delay.range.end <= range.start);
        let count = self.0[first..].partition_point(|delay| delay.range.start < range.end);
        first..first + count
    }

    /// Delays packing of a range, whose conversion to rows begins, or goes on.
    pub(crate) fn begin(&mut self, range: Range<usize>) {
        let at = self.indices(&range);
        let goes_on = |delay: &&mut RepackDelay| {
            !delay.is_over() && delay.range.start <= range.start && range.end <= delay.range.end
        };
        if let Some(delay) = self.0[at.clone()].iter_mut().find(goes_on) {
            delay.converting = true;
            return;
        }
        let (mut runs, mut left) = (0, 0);
        let (mut before, mut after) = (Vec::new(), Vec::new());
        for delay in self.0.drain(at.clone()) {
            (runs, left) = (runs.max(delay.runs), left.max(delay.left.load(Ordering::Relaxed)));
            for part in delay.outside(&range) {
                if part.range.start < range.start { before.push(part) } else { after.push(part) }
            }
        }
        if left == 0 {
            runs = (2 * runs).clamp(FIRST_REPACK_DELAY, MAX_REPACK_DELAY);
            left = runs;
        }
        let new = RepackDelay { range, runs, left: AtomicU32::new(left), converting: true };
        self.0.splice(at.start..at.start, before.into_iter().chain([new]).chain(after));
    }

    /// Records that the conversion of a range to rows has reached its end.
    pub(crate) fn finish(&mut self, range: &Range<usize>) {
        let at = self.indices(range);
        self.0[at].iter_mut().for_each(|delay| delay.converting = false);
    }

    /// Forgets the delays of a range that gets a new content: another tensor may take its place.
    pub(crate) fn forget(&mut self, range: &Range<usize>) {
        let at = self.indices(range);
        let kept: Vec<RepackDelay> = self.0[at.clone()].iter().flat_map(|delay| delay.outside(range)).collect();
        self.0.splice(at, kept);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_until_new_content_arrives() {
        let (mut delays, range, mut runs) = (RepackDelays::default(), 0..4 * MIN_PACKED_BYTES, FIRST_REPACK_DELAY);
        let convert = |delays: &mut RepackDelays| {
            delays.begin(range.clone());
            assert!(delays.is_delayed(&range), "not before the conversion is done");
            delays.finish(&range);
        };
        for _ in 0..10 {
            convert(&mut delays);
            for run in 0..runs {
                assert!(delays.is_delayed(&range), "run {run} of {runs}");
                delays.count_run(&range);
            }
            assert!(!delays.is_delayed(&range), "after {runs} runs");
            runs = (2 * runs).min(MAX_REPACK_DELAY);
        }
        convert(&mut delays);
        delays.forget(&(MIN_PACKED_BYTES..range.end));
        assert!(delays.is_delayed(&range), "a part has its old content");
        delays.forget(&range);
        assert!(!delays.is_delayed(&range) && delays.is_empty());
    }
}

//! Record of the blocks of a large mapping whose pages the system has allocated, so that a program can prefault the others
//! before its kernels write them.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a block: a huge page of x86-64. Two turns of a device are at most as far apart as the system takes for one block
/// on each worker, which was 5 ms in a virtual machine whose host had to provide the memory first.
pub(crate) const BLOCK: usize = 2 << 20;

/// Smallest mapping with a record, in bytes: a claim of a kernel touches at most eight blocks of a smaller one.
const MIN_BYTES: usize = 16 << 20;

/// One bit for each block, counted from the start of the memory. A bit is set once the pages of its block were requested, also
/// if the system has no call for that: then the first write takes the page faults.
pub(super) struct PopulatedBlocks(Box<[AtomicU64]>);

impl PopulatedBlocks {
    /// The record of a new mapping; `None` if it needs none.
    pub(super) fn new(bytes: usize) -> Option<PopulatedBlocks> {
        (bytes >= MIN_BYTES)
            .then(|| PopulatedBlocks((0..bytes.div_ceil(64 * BLOCK)).map(|_| AtomicU64::new(0)).collect()))
    }

    /// The first block that a range of bytes touches and that is not populated.
    pub(super) fn first_missing(&self, range: &Range<usize>) -> Option<usize> {
        let mut block = range.start / BLOCK;
        let end = range.end.div_ceil(BLOCK);
        while block < end {
            let missing = !self.0.get(block / 64)?.load(Ordering::Relaxed) >> (block % 64);
            if missing != 0 {
                block += missing.trailing_zeros() as usize;
                return (block < end).then_some(block);
            }
            block = (block / 64 + 1) * 64;
        }
        None
    }

    /// Records the blocks that lie inside a range, or at its end if that is the end of the memory.
    pub(super) fn insert(&self, range: &Range<usize>, bytes: usize) {
        let end = if range.end == bytes { bytes.div_ceil(BLOCK) } else { range.end / BLOCK };
        for block in range.start.div_ceil(BLOCK)..end {
            if let Some(bits) = self.0.get(block / 64) {
                bits.fetch_or(1 << (block % 64), Ordering::Relaxed);
            }
        }
    }
}

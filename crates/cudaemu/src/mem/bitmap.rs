//! Bitmap with one bit per byte of some memory: written, or touched.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::Error;
use super::backing::Backing;

/// A set of byte offsets that several threads may extend concurrently. Uses memory only for touched pages.
#[derive(Debug)]
pub struct Bitmap {
    bits: Backing,
    bytes: u64,
}

/// The bits `at..at + count` of a word; `at + count <= 64`.
#[inline(always)]
fn mask(at: u64, count: u64) -> u64 {
    debug_assert!(count <= 64 && at + count <= 64);
    if count == 64 { u64::MAX } else { ((1 << count) - 1) << at }
}

/// The words of a range of bits: (index, mask of bits).
#[inline(always)]
fn words(at: u64, count: u64) -> impl Iterator<Item = (usize, u64)> {
    let end = at + count;
    let mut next = at;
    std::iter::from_fn(move || {
        if next >= end {
            return None;
        }
        let word = next / 64;
        let stop = end.min((word + 1) * 64);
        let item = (word as usize, mask(next % 64, stop - next));
        next = stop;
        Some(item)
    })
}

impl Bitmap {
    /// An empty set for `bytes` bytes.
    pub fn new(bytes: u64) -> Result<Self, Error> {
        Ok(Self { bits: Backing::new(bytes.div_ceil(64) * 8)?, bytes })
    }

    #[inline(always)]
    fn words(&self) -> &[AtomicU64] {
        self.bits.words()
    }

    /// Number of 64-bit words.
    pub(crate) fn word_count(&self) -> u64 {
        self.bytes.div_ceil(64)
    }

    /// Bits of the last word that represent no byte.
    pub(crate) fn padding(&self) -> u64 {
        match self.bytes % 64 {
            0 => 0,
            rest => u64::MAX << rest,
        }
    }

    /// Word `index`; 0 past the end.
    #[inline(always)]
    pub(crate) fn word(&self, index: usize) -> u64 {
        self.words().get(index).map_or(0, |word| word.load(Relaxed))
    }

    /// Whether the set contains a whole range.
    #[inline(always)]
    pub fn contains(&self, at: u64, count: u64) -> bool {
        let (shift, index) = (at % 64, (at / 64) as usize);
        if shift + count <= 64 {
            let mask = mask(shift, count);
            return self.word(index) & mask == mask;
        }
        words(at, count).all(|(index, mask)| self.word(index) & mask == mask)
    }

    /// The first offset of a range that the set lacks.
    pub fn first_missing(&self, at: u64, count: u64) -> Option<u64> {
        words(at, count).find_map(|(index, mask)| {
            let missing = !self.word(index) & mask;
            (missing != 0).then(|| index as u64 * 64 + u64::from(missing.trailing_zeros()))
        })
    }

    /// Sets bits of one word; returns whether that filled the word.
    #[inline(always)]
    fn add_word(&self, index: usize, mask: u64, full: u64) -> bool {
        let Some(word) = self.words().get(index) else { return false };
        // Most stores overwrite written bytes: check first, because a locked instruction costs twenty times as much.
        if word.load(Relaxed) & mask == mask {
            return false;
        }
        let old = word.fetch_or(mask, Relaxed);
        old & full != full && (old | mask) & full == full
    }

    /// Adds a range; returns how many words it filled (padding counts as set).
    #[inline(always)]
    pub fn add(&self, at: u64, count: u64) -> u64 {
        let last = self.word_count() - 1;
        let full = |index: usize| if index as u64 == last { !self.padding() } else { u64::MAX };
        let (shift, index) = (at % 64, (at / 64) as usize);
        if shift + count <= 64 {
            return u64::from(self.add_word(index, mask(shift, count), full(index)));
        }
        words(at, count).map(|(index, mask)| u64::from(self.add_word(index, mask, full(index)))).sum()
    }

    /// Removes a range; returns how many words were full before.
    pub(crate) fn remove(&self, at: u64, count: u64) -> u64 {
        let last = self.word_count() - 1;
        words(at, count)
            .map(|(index, mask)| {
                let full = if index as u64 == last { !self.padding() } else { u64::MAX };
                let Some(word) = self.words().get(index) else { return 0 };
                u64::from(word.fetch_and(!mask, Relaxed) & full == full && mask & full != 0)
            })
            .sum()
    }

    /// Up to 64 bits from `at` on (bits after the end are 0).
    pub(crate) fn bits(&self, at: u64, count: u64) -> u64 {
        let (shift, index) = (at % 64, (at / 64) as usize);
        let mut bits = self.word(index) >> shift;
        if shift != 0 && shift + count > 64 {
            bits |= self.word(index + 1) << (64 - shift);
        }
        bits & mask(0, count)
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.words().iter().all(|word| word.load(Relaxed) == 0)
    }
}

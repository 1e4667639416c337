//! Which ranges of a memory lie in strips, and which may not: plain data.

use crate::cpu::strip::{self, STRIP};
use crate::tensor::{DType, TensorDesc};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Smallest tensor that is worth a mark, in bytes. As marks share no byte, and neither do ranges that stay plain, a
/// memory has at most this fraction of its bytes in entries of either list: some 0.3% of it.
pub(super) const LEAST: usize = 16 << 10;

/// Largest strip in bytes: rewriting one needs as much scratch, which no account pays for. Rows of 128 KiB are far
/// longer than those of any model.
const MOST: usize = STRIP * (128 << 10);

/// How rows lie that are in strips.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Strips {
    pub(super) dtype: DType,
    pub(super) row_bytes: usize,
}

impl Strips {
    /// Bytes of a strip.
    pub(super) fn bytes(self) -> usize {
        STRIP * self.row_bytes
    }
}

/// Bytes `range` of a memory, as whole strips.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Span {
    pub(super) range: Range<usize>,
    pub(super) strips: Strips,
}

impl Span {
    /// The span of a tensor at `offset`; `None` for tensors that cannot lie in strips: these are packed ones of whole
    /// strips, so that no strip belongs to two matrices.
    pub(super) fn of(offset: usize, desc: &TensorDesc) -> Option<Span> {
        let [k, m, ..] = desc.ne();
        let strips = Strips { dtype: desc.dtype(), row_bytes: desc.row_bytes() };
        let whole = m.is_multiple_of(STRIP) && desc.is_contiguous() && !desc.is_empty();
        let end = offset.checked_add(desc.extent())?;
        (whole && strip::packs(desc.dtype(), k) && strips.bytes() <= MOST)
            .then_some(Span { range: offset..end, strips })
    }

    /// Whether `inner` is strips of this span.
    pub(super) fn holds(&self, inner: &Span) -> bool {
        self.strips == inner.strips
            && self.range.start <= inner.range.start
            && inner.range.end <= self.range.end
            && (inner.range.start - self.range.start).is_multiple_of(self.strips.bytes())
    }

    /// The same span, `by` bytes further on.
    pub(super) fn moved(&self, by: usize) -> Option<Span> {
        Some(Span { range: moved(&self.range, by)?, strips: self.strips })
    }
}

/// A range `by` bytes further on.
pub(super) fn moved(range: &Range<usize>, by: usize) -> Option<Range<usize>> {
    Some(range.start.checked_add(by)?..range.end.checked_add(by)?)
}

/// The state of a memory: what lies in strips, what must not.
#[derive(Debug)]
pub(super) struct Marks {
    /// What lies in strips; sorted, without common bytes.
    packed: Vec<Span>,
    /// What stays plain for good, because it was packed and then used plainly; sorted, without common bytes.
    plain: Vec<Range<usize>>,
    /// What is being written in pieces, one entry per upload.
    pinned: Vec<Range<usize>>,
    stamp: u64,
}

/// Stamps are never used twice in a process, so that equal ones mean the same memory in the same state.
fn next_stamp() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn meet(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Marks {
    pub(super) fn new() -> Marks {
        Marks { packed: Vec::new(), plain: Vec::new(), pinned: Vec::new(), stamp: next_stamp() }
    }

    /// Changes whenever the answers of the others may.
    pub(super) fn stamp(&self) -> u64 {
        self.stamp
    }

    #[cfg(test)]
    pub(super) fn packed(&self) -> &[Span] {
        &self.packed
    }

    fn packed_at(&self, range: &Range<usize>) -> Range<usize> {
        let first = self.packed.partition_point(|mark| mark.range.end <= range.start);
        let count = self.packed[first..].partition_point(|mark| mark.range.start < range.end);
        first..if range.is_empty() { first } else { first + count }
    }

    /// Whether no byte of a range lies in strips.
    pub(super) fn is_plain(&self, range: &Range<usize>) -> bool {
        self.packed_at(range).is_empty()
    }

    /// Whether a span lies in strips, as it says.
    pub(super) fn holds(&self, span: &Span) -> bool {
        match &self.packed[self.packed_at(&span.range)] {
            [mark] => mark.holds(span),
            _ => false,
        }
    }

    /// Whether a range that is plain may be packed.
    pub(super) fn may_pack(&self, range: &Range<usize>) -> bool {
        self.is_plain(range) && !self.stays_plain(range) && !self.pinned.iter().any(|pin| meet(pin, range))
    }

    /// Whether some byte of a range was packed once and must not be again.
    pub(super) fn stays_plain(&self, range: &Range<usize>) -> bool {
        let next = self.plain.partition_point(|plain| plain.end <= range.start);
        self.plain.get(next).is_some_and(|plain| meet(plain, range))
    }

    /// Marks a span, which [`Marks::may_pack`] has allowed, as packed.
    pub(super) fn pack(&mut self, span: Span) {
        let at = self.packed_at(&span.range).start;
        self.packed.insert(at, span);
        self.stamp = next_stamp();
    }

    /// Takes the marks off that have bytes of a range, and keeps what they marked plain from now on.
    pub(super) fn unpack(&mut self, range: &Range<usize>) -> Vec<Span> {
        let at = self.packed_at(range);
        if at.is_empty() {
            return Vec::new();
        }
        self.stamp = next_stamp();
        let taken: Vec<Span> = self.packed.drain(at).collect();
        for span in &taken {
            self.keep_plain(span.range.clone());
        }
        taken
    }

    fn keep_plain(&mut self, mut range: Range<usize>) {
        let first = self.plain.partition_point(|plain| plain.end < range.start);
        let count = self.plain[first..].partition_point(|plain| plain.start <= range.end);
        // Neighbours become one: entries stay as few as they can be.
        for plain in self.plain.drain(first..first + count) {
            range = range.start.min(plain.start)..range.end.max(plain.end);
        }
        self.plain.insert(first, range);
    }

    /// Takes the marks off that lie inside a range: it is about to be overwritten.
    pub(super) fn forget(&mut self, range: &Range<usize>) {
        let inside = |mark: &Span| range.start <= mark.range.start && mark.range.end <= range.end;
        let mut at = self.packed_at(range);
        // Only the first and the last one can reach beyond it.
        at.start += self.packed[at.clone()].first().is_some_and(|mark| !inside(mark)) as usize;
        at.end -= self.packed[at.clone()].last().is_some_and(|mark| !inside(mark)) as usize;
        if !at.is_empty() {
            self.packed.drain(at);
            self.stamp = next_stamp();
        }
    }

    /// Keeps a range plain until [`Marks::unpin`].
    pub(super) fn pin(&mut self, range: Range<usize>) {
        self.pinned.push(range);
        self.stamp = next_stamp();
    }

    pub(super) fn unpin(&mut self, range: &Range<usize>) {
        if let Some(at) = self.pinned.iter().position(|pin| pin == range) {
            self.pinned.swap_remove(at);
        }
        self.stamp = next_stamp();
    }
}

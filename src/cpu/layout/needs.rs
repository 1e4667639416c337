//! What a program needs of its memories' layouts: found once, when it is made.

use super::marks::{LEAST, Marks, Span, Strips, moved};
use crate::graph::SlotOffset;
use crate::tensor::TensorDesc;
use std::cmp::Reverse;
use std::ops::Range;

/// How a node uses a tensor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(in crate::cpu) enum Access {
    /// Byte by byte where they belong, or written.
    Plain,
    /// In strips as well as plain.
    Either,
    /// Faster in strips.
    Strips,
}

/// A program's uses of tensors, by slot.
pub(in crate::cpu) struct Uses(Vec<Vec<Use>>);

#[derive(Clone, PartialEq, Eq)]
struct Use {
    range: Range<usize>,
    /// How it lies where it may lie in strips.
    strips: Option<Strips>,
    access: Access,
}

/// What a program needs of the memory bound to one slot; ranges count from the slot's start and share no byte.
#[derive(Default)]
pub(in crate::cpu) struct Needs {
    /// Best in strips, otherwise plain.
    pub(super) packs: Vec<Span>,
    /// In strips or plain.
    pub(super) reads: Vec<Span>,
    pub(super) plain: Vec<Range<usize>>,
}

impl Uses {
    pub(in crate::cpu) fn new(slots: usize) -> Uses {
        Uses((0..slots).map(|_| Vec::new()).collect())
    }

    /// Adds a use of a tensor, which lies inside its slot.
    pub(in crate::cpu) fn add(&mut self, place: SlotOffset, desc: &TensorDesc, access: Access) {
        let span = Span::of(place.offset, desc).filter(|_| access != Access::Plain);
        if let Some(uses) = self.0.get_mut(place.slot as usize)
            && !desc.is_empty()
        {
            // Most tensors are used again and again: room for one use of each is enough.
            if uses.len() == uses.capacity() {
                sort(uses);
                uses.dedup();
                uses.reserve(uses.len().max(4));
            }
            let range = place.offset..place.offset.saturating_add(desc.extent());
            uses.push(Use { range, strips: span.map(|span| span.strips), access });
        }
    }

    /// What all uses together need, slot by slot.
    pub(in crate::cpu) fn needs(self) -> Vec<Needs> {
        self.0.into_iter().map(needs).collect()
    }
}

impl Use {
    fn span(&self) -> Option<Span> {
        self.strips.map(|strips| Span { range: self.range.clone(), strips })
    }
}

/// By place, the widest first, and equal ones side by side.
fn sort(uses: &mut [Use]) {
    uses.sort_unstable_by_key(|u| (u.range.start, Reverse(u.range.end), u.strips, u.access));
}

/// Uses that share bytes, directly or through others, are decided together: by the widest of the first ones, if all
/// are strips of it, and plain otherwise.
fn needs(mut uses: Vec<Use>) -> Needs {
    sort(&mut uses);
    let mut needs = Needs::default();
    let mut uses = uses.into_iter().peekable();
    while let Some(first) = uses.next() {
        let (mut span, mut range, mut access) = (first.span(), first.range, first.access);
        while let Some(next) = uses.next_if(|next| next.range.start < range.end) {
            range.end = range.end.max(next.range.end);
            span = span.filter(|span| next.span().is_some_and(|next| span.holds(&next)));
            access = access.max(next.access);
        }
        match span {
            Some(span) if access == Access::Strips && span.range.len() >= LEAST => needs.packs.push(span),
            Some(span) => needs.reads.push(span),
            None => needs.plain.push(range),
        }
    }
    needs
}

impl Needs {
    /// Whether a memory needs no change for them; `base` is where the slot's region starts.
    pub(super) fn met(&self, base: usize, marks: &Marks) -> bool {
        let packs = |span: &Span| {
            span.moved(base)
                .is_none_or(|span| marks.holds(&span) || (marks.is_plain(&span.range) && !marks.may_pack(&span.range)))
        };
        let reads = |span: &Span| span.moved(base).is_none_or(|span| marks.holds(&span) || marks.is_plain(&span.range));
        let plain = |range: &Range<usize>| moved(range, base).is_none_or(|range| marks.is_plain(&range));
        self.packs.iter().all(packs) && self.reads.iter().all(reads) && self.plain.iter().all(plain)
    }
}

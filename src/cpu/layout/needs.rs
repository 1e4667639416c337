//! What a program needs of its memories' layouts: found once, when it is made.

use super::marks::{LEAST, Marks, Span, moved};
use crate::graph::Place;
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

struct Use {
    range: Range<usize>,
    /// Where it may lie in strips.
    span: Option<Span>,
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
    pub(in crate::cpu) fn add(&mut self, place: Place, desc: &TensorDesc, access: Access) {
        let span = Span::of(place.offset, desc).filter(|_| access != Access::Plain);
        if let Some(uses) = self.0.get_mut(place.slot as usize)
            && !desc.is_empty()
        {
            uses.push(Use { range: place.offset..place.offset.saturating_add(desc.extent()), span, access });
        }
    }

    /// What all uses together need, slot by slot.
    pub(in crate::cpu) fn needs(self) -> Vec<Needs> {
        self.0.into_iter().map(needs).collect()
    }
}

/// Uses that share bytes, directly or through others, are decided together: by the widest of the first ones, if all
/// are strips of it, and plain otherwise.
fn needs(mut uses: Vec<Use>) -> Needs {
    uses.sort_unstable_by_key(|u| (u.range.start, Reverse(u.range.end)));
    let mut needs = Needs::default();
    let mut uses = uses.into_iter().peekable();
    while let Some(first) = uses.next() {
        let (mut range, mut span, mut access) = (first.range, first.span, first.access);
        while let Some(next) = uses.next_if(|next| next.range.start < range.end) {
            range.end = range.end.max(next.range.end);
            span = span.filter(|span| next.span.is_some_and(|next| span.holds(&next)));
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

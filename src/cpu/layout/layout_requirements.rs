//! Layouts that a program needs of its memories, computed once when the program is compiled.

use super::layout_map::{LayoutMap, PanelLayout, PanelSpan, shifted};
use crate::device::MIN_PACKED_BYTES;
use crate::graph::SlotOffset;
use crate::tensor::TensorDesc;
use std::cmp::Reverse;
use std::ops::Range;

/// How a node accesses a tensor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(in crate::cpu) enum LayoutAccess {
    /// As row-major bytes, or by writing.
    Rows,
    /// As rows or as panels.
    RowsOrPanels,
    /// As rows or as panels; faster as panels.
    PreferPanels,
}

/// The tensor accesses of a program, by slot.
pub(in crate::cpu) struct TensorUses(Vec<Vec<TensorUse>>);

#[derive(Clone, PartialEq, Eq)]
struct TensorUse {
    range: Range<usize>,
    /// The panel layout of the tensor; `None` if it cannot be packed or the access needs rows.
    layout: Option<PanelLayout>,
    access: LayoutAccess,
}

/// Layouts that a program needs of the memory bound to one slot. Ranges count from the slot's start and are disjoint.
#[derive(Default)]
pub(in crate::cpu) struct LayoutRequirements {
    /// Spans to pack where packing is allowed. Where it is not, they must be row-major.
    pub(super) prefer_panels: Vec<PanelSpan>,
    /// Spans that must be row-major or exactly these panels.
    pub(super) rows_or_panels: Vec<PanelSpan>,
    /// Ranges that must be row-major.
    pub(super) rows_only: Vec<Range<usize>>,
}

impl TensorUses {
    pub(in crate::cpu) fn new(slots: usize) -> TensorUses {
        TensorUses((0..slots).map(|_| Vec::new()).collect())
    }

    /// Adds an access to a tensor, which lies inside its slot.
    pub(in crate::cpu) fn add(&mut self, place: SlotOffset, desc: &TensorDesc, access: LayoutAccess) {
        let span = PanelSpan::of(place.offset, desc).filter(|_| access != LayoutAccess::Rows);
        if let Some(uses) = self.0.get_mut(place.slot as usize)
            && !desc.is_empty()
        {
            // Most tensors are accessed many times: duplicates are removed before the list grows.
            if uses.len() == uses.capacity() {
                sort(uses);
                uses.dedup();
                uses.reserve(uses.len().max(4));
            }
            let range = place.offset..place.offset.saturating_add(desc.extent());
            uses.push(TensorUse { range, layout: span.map(|span| span.layout), access });
        }
    }

    /// The combined requirements of all accesses, by slot.
    pub(in crate::cpu) fn requirements(self) -> Vec<LayoutRequirements> {
        self.0.into_iter().map(requirements).collect()
    }
}

impl TensorUse {
    fn span(&self) -> Option<PanelSpan> {
        self.layout.map(|layout| PanelSpan { range: self.range.clone(), layout })
    }
}

/// Sorts by start, the widest range first, so that equal entries lie side by side.
fn sort(uses: &mut [TensorUse]) {
    uses.sort_unstable_by_key(|u| (u.range.start, Reverse(u.range.end), u.layout, u.access));
}

/// Combines the accesses of a slot. Overlapping accesses, also indirectly overlapping ones, get one decision: panels of the
/// first and widest span if every other access consists of whole panels of it, rows otherwise.
fn requirements(mut uses: Vec<TensorUse>) -> LayoutRequirements {
    sort(&mut uses);
    let mut requirements = LayoutRequirements::default();
    let mut uses = uses.into_iter().peekable();
    while let Some(first) = uses.next() {
        let (mut span, mut range, mut access) = (first.span(), first.range, first.access);
        while let Some(next) = uses.next_if(|next| next.range.start < range.end) {
            range.end = range.end.max(next.range.end);
            span = span.filter(|span| next.span().is_some_and(|next| span.contains(&next)));
            access = access.max(next.access);
        }
        match span {
            Some(span) if access == LayoutAccess::PreferPanels && span.range.len() >= MIN_PACKED_BYTES => {
                requirements.prefer_panels.push(span)
            }
            Some(span) => requirements.rows_or_panels.push(span),
            None => requirements.rows_only.push(range),
        }
    }
    requirements
}

impl LayoutRequirements {
    /// Whether a memory needs no conversion; `base` is the start of the slot's region.
    pub(super) fn satisfied_by(&self, base: usize, map: &LayoutMap) -> bool {
        let packed_if_allowed = |span: &PanelSpan| {
            span.shifted(base)
                .is_none_or(|span| map.contains(&span) || (map.is_row_major(&span.range) && !map.may_pack(&span.range)))
        };
        let rows_or_these_panels = |span: &PanelSpan| {
            span.shifted(base).is_none_or(|span| map.contains(&span) || map.is_row_major(&span.range))
        };
        let row_major = |range: &Range<usize>| shifted(range, base).is_none_or(|range| map.is_row_major(&range));
        self.prefer_panels.iter().all(packed_if_allowed)
            && self.rows_or_panels.iter().all(rows_or_these_panels)
            && self.rows_only.iter().all(row_major)
    }

    /// Whether packing of a span that the program prefers as panels is delayed; `base` as in
    /// [`LayoutRequirements::satisfied_by`].
    pub(super) fn is_delayed(&self, base: usize, map: &LayoutMap) -> bool {
        self.preferred(base).any(|span| map.delays.is_delayed(&span.range))
    }

    /// Counts a run of the program for the delays of its spans.
    pub(super) fn count_run(&self, base: usize, map: &LayoutMap) {
        self.preferred(base).for_each(|span| map.delays.count_run(&span.range));
    }

    fn preferred(&self, base: usize) -> impl Iterator<Item = PanelSpan> {
        self.prefer_panels.iter().filter_map(move |span| span.shifted(base))
    }
}

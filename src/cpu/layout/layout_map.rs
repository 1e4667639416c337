//! Layout map of a memory: which ranges hold panels (repacked weights), and which must stay row-major. Plain data, without the
//! lock.

use crate::cpu::panel::{self, PANEL_ROWS};
use crate::device::{RepackDelays, next_layout_version};
use crate::tensor::{DType, TensorDesc};
use std::ops::Range;

/// Largest panel in bytes. Rewriting a panel needs scratch of its size, which is charged to no memory budget. Rows of 128 KiB
/// are far longer than the rows of any model.
const MAX_PANEL_BYTES: usize = PANEL_ROWS * (128 << 10);

/// Type and length of the rows of a panel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct PanelLayout {
    pub(super) dtype: DType,
    pub(super) row_bytes: usize,
}

impl PanelLayout {
    /// Bytes of a panel.
    pub(super) fn bytes(self) -> usize {
        PANEL_ROWS * self.row_bytes
    }
}

/// A byte range of a memory that consists of whole panels of one layout.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct PanelSpan {
    pub(super) range: Range<usize>,
    pub(super) layout: PanelLayout,
}

impl PanelSpan {
    /// The span of a tensor at `offset`; `None` if the tensor cannot be packed. Packable tensors are contiguous, and each of
    /// their matrices has a multiple of sixteen rows, so that no panel belongs to two matrices.
    pub(super) fn of(offset: usize, desc: &TensorDesc) -> Option<PanelSpan> {
        let [k, m, ..] = desc.ne();
        let layout = PanelLayout { dtype: desc.dtype(), row_bytes: desc.row_bytes() };
        let whole = m.is_multiple_of(PANEL_ROWS) && desc.is_contiguous() && !desc.is_empty();
        let end = offset.checked_add(desc.extent())?;
        (whole && panel::can_pack(desc.dtype(), k) && layout.bytes() <= MAX_PANEL_BYTES)
            .then_some(PanelSpan { range: offset..end, layout })
    }

    /// Whether `inner` consists of whole panels of this span.
    pub(super) fn contains(&self, inner: &PanelSpan) -> bool {
        self.range.start <= inner.range.start && inner.range.end <= self.range.end && self.has_panels_of(inner)
    }

    /// Whether panels of this span are panels of the other one where both overlap.
    fn has_panels_of(&self, other: &PanelSpan) -> bool {
        let distance = self.range.start.abs_diff(other.range.start);
        self.layout == other.layout && distance.is_multiple_of(self.layout.bytes())
    }

    /// Number of panels.
    pub(super) fn panels(&self) -> usize {
        self.range.len() / self.layout.bytes()
    }

    /// The same span, `by` bytes further.
    pub(super) fn shifted(&self, by: usize) -> Option<PanelSpan> {
        Some(PanelSpan { range: shifted(&self.range, by)?, layout: self.layout })
    }
}

/// A range `by` bytes further.
pub(super) fn shifted(range: &Range<usize>, by: usize) -> Option<Range<usize>> {
    Some(range.start.checked_add(by)?..range.end.checked_add(by)?)
}

/// Layout of a memory: the packed spans, the delays of packing, and the pinned ranges.
#[derive(Debug)]
pub(super) struct LayoutMap {
    /// Spans that hold panels; sorted and disjoint.
    packed: Vec<PanelSpan>,
    pub(super) delays: RepackDelays,
    /// Ranges that uploads are writing piece by piece, one entry per upload.
    pinned: Vec<Range<usize>>,
    version: u64,
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

impl LayoutMap {
    pub(super) fn new() -> LayoutMap {
        LayoutMap {
            packed: Vec::new(),
            delays: RepackDelays::default(),
            pinned: Vec::new(),
            version: next_layout_version(),
        }
    }

    /// Version of the map; changes with every change of the layout.
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    #[cfg(test)]
    pub(super) fn packed(&self) -> &[PanelSpan] {
        &self.packed
    }

    /// Indices of the packed spans that overlap a range. If there are none, the result is empty and starts at the index at
    /// which a span of this range would be inserted.
    fn packed_indices(&self, range: &Range<usize>) -> Range<usize> {
        let first = self.packed.partition_point(|span| span.range.end <= range.start);
        let count = self.packed[first..].partition_point(|span| span.range.start < range.end);
        first..if range.is_empty() { first } else { first + count }
    }

    /// Whether no byte of a range belongs to a panel.
    pub(super) fn is_row_major(&self, range: &Range<usize>) -> bool {
        self.packed_indices(range).is_empty()
    }

    /// Whether a span is packed, panel for panel: inside one packed span, or inside several side by side, such as experts that
    /// were uploaded one by one.
    pub(super) fn contains(&self, span: &PanelSpan) -> bool {
        let mut end = span.range.start;
        for packed in self.packed_in(&span.range) {
            if packed.range.start > end || !packed.has_panels_of(span) {
                return false;
            }
            end = packed.range.end;
        }
        end >= span.range.end
    }

    /// The packed spans that overlap a range, in ascending order.
    pub(super) fn packed_in(&self, range: &Range<usize>) -> &[PanelSpan] {
        &self.packed[self.packed_indices(range)]
    }

    /// Whether a row-major range may be packed.
    pub(super) fn may_pack(&self, range: &Range<usize>) -> bool {
        self.is_unclaimed(range) && !self.delays.is_delayed(range)
    }

    /// Whether a range is row-major, and no upload writes it.
    pub(super) fn is_unclaimed(&self, range: &Range<usize>) -> bool {
        self.is_row_major(range) && !self.pinned.iter().any(|pin| overlap(pin, range))
    }

    /// The part of a span that has yet to be packed: all of it, or what an unfinished conversion and uploads of parts have left. Empty if
    /// the span is packed, or if packing it is not allowed.
    pub(super) fn unpacked_rests(&self, span: &PanelSpan) -> Vec<PanelSpan> {
        let (mut rests, mut end) = (Vec::new(), span.range.start);
        let packed = self.packed_in(&span.range);
        for next in
            packed.iter().map(|packed| packed.range.clone()).chain(std::iter::once(span.range.end..span.range.end))
        {
            if end < next.start {
                rests.push(PanelSpan { range: end..next.start, layout: span.layout });
            }
            end = next.end;
        }
        // Its packed part has these panels, and belongs to no larger tensor.
        let allowed = packed.iter().all(|packed| span.contains(packed))
            && !self.delays.is_delayed(&span.range)
            && rests.iter().all(|rest| self.may_pack(&rest.range));
        if allowed { rests } else { Vec::new() }
    }

    /// Records panels of the tensor at `start` as packed: all of it, or what continues the packed panels before. The caller has
    /// checked that they may be packed.
    pub(super) fn mark_packed(&mut self, start: usize, panels: PanelSpan) {
        let at = self.packed_indices(&panels.range).start;
        match self.packed[..at].last_mut() {
            // Spans of different tensors are not merged, because a span is converted back as a whole.
            Some(before)
                if start <= before.range.start
                    && before.range.end == panels.range.start
                    && before.layout == panels.layout =>
            {
                before.range.end = panels.range.end;
            }
            _ => self.packed.insert(at, panels),
        }
        self.version = next_layout_version();
    }

    /// Removes from the map the panels that a conversion has not packed: they are the end of a packed span. Of several such ends,
    /// the one that was marked last is removed first.
    pub(super) fn unmark_packed(&mut self, end: &PanelSpan) {
        let at = self.packed_indices(&end.range).start;
        if let Some(span) = self.packed.get_mut(at).filter(|span| span.range.end == end.range.end) {
            span.range.end = end.range.start;
            if span.range.is_empty() {
                self.packed.remove(at);
            }
        }
        self.version = next_layout_version();
    }

    /// Removes the packed spans that overlap a range, because a program needs it as rows, and delays packing them again.
    /// Returns them: the caller has to convert them to rows.
    pub(super) fn remove_packed(&mut self, range: &Range<usize>) -> Vec<PanelSpan> {
        let at = self.packed_indices(range);
        if at.is_empty() {
            return Vec::new();
        }
        self.version = next_layout_version();
        let removed: Vec<PanelSpan> = self.packed.drain(at).collect();
        for span in &removed {
            self.delays.begin(span.range.clone());
        }
        removed
    }

    /// Removes the packed spans inside a range that is about to be overwritten: they may be packed again at once.
    pub(super) fn forget_overwritten(&mut self, range: &Range<usize>) {
        let inside = |span: &PanelSpan| range.start <= span.range.start && span.range.end <= range.end;
        let mut at = self.packed_indices(range);
        // Only the first and the last span can reach beyond the range.
        at.start += self.packed[at.clone()].first().is_some_and(|span| !inside(span)) as usize;
        at.end -= self.packed[at.clone()].last().is_some_and(|span| !inside(span)) as usize;
        if !at.is_empty() {
            // An overwritten span has nothing left to convert; its delay must not wait for that conversion.
            for span in self.packed.drain(at).collect::<Vec<_>>() {
                self.delays.finish(&span.range);
            }
            self.version = next_layout_version();
        }
    }

    /// The end of the panel that holds the byte before `at`; `at` itself in rows.
    pub(super) fn panel_end(&self, at: usize) -> usize {
        let last = at.saturating_sub(1)..at;
        self.packed_in(&last)
            .first()
            .map_or(at, |span| span.range.start + (at - span.range.start).next_multiple_of(span.layout.bytes()))
    }

    /// Keeps a range row-major until [`LayoutMap::unpin`].
    pub(super) fn pin(&mut self, range: Range<usize>) {
        self.pinned.push(range);
        self.version = next_layout_version();
    }

    pub(super) fn unpin(&mut self, range: &Range<usize>) {
        if let Some(at) = self.pinned.iter().position(|pin| pin == range) {
            self.pinned.swap_remove(at);
        }
        self.version = next_layout_version();
    }
}

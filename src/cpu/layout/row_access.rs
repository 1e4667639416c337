//! Reads and writes of row-major bytes where a memory may hold panels. The layout stays as it is: a read unpacks into the
//! reader's bytes, a write packs into the panels that it touches.

use super::layout_map::{LayoutMap, PanelSpan};
use super::{CpuMemory, Locking, OUT_OF_BOUNDS, WriteLock, check_bounds};
use crate::cpu::panel::{self, PANEL_ROWS};
use crate::device::DeviceError;
use std::ops::Range;
use std::sync::RwLockWriteGuard;

/// Bytes of a row of a panel that an access touches.
struct RowPart {
    /// Number of the row in its panel.
    row: usize,
    /// Bytes of the row.
    bytes: Range<usize>,
}

impl RowPart {
    /// The bytes of the blocks that the part touches: panels hold the first blocks of all rows, then the second blocks, so that
    /// nothing else of the row need be read.
    fn blocks(&self, span: &PanelSpan) -> Range<usize> {
        let block = panel::panel_block_bytes(span.layout.dtype);
        self.bytes.start / block * block..self.bytes.end.next_multiple_of(block)
    }
}

impl CpuMemory {
    /// Appends the row-major bytes of a range to `out`.
    pub(super) fn read_rows(&self, map: &LayoutMap, range: Range<usize>, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        if range.end > self.pages.bytes() {
            return Err(OUT_OF_BOUNDS);
        }
        let mut at = range.start;
        for span in map.packed_in(&range) {
            let packed = overlap(&span.range, &range);
            check_bounds(self.pages.append_to(out, at..packed.start))?;
            self.read_panels(span, packed.clone(), out)?;
            at = packed.end;
        }
        check_bounds(self.pages.append_to(out, at..range.end))
    }

    /// As `read_rows`, for a range inside a packed span.
    fn read_panels(&self, span: &PanelSpan, range: Range<usize>, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        let row_bytes = span.layout.row_bytes;
        let mut scratch = Vec::new();
        for at in panels_of(span, &range) {
            let panel = self.pages.shared_bytes(at.clone()).ok_or(OUT_OF_BOUNDS)?;
            let wanted = overlap(&at, &range);
            let filled = out.len();
            out.resize(filled + wanted.len(), 0);
            let mut to = &mut out[filled..];
            if wanted == at {
                panel::unpack(span.layout.dtype, panel, to);
                continue;
            }
            for part in row_parts(&at, &wanted, row_bytes) {
                let (bytes, rest) = to.split_at_mut(part.bytes.len());
                let blocks = part.blocks(span);
                let panel = &panel[blocks.start * PANEL_ROWS..blocks.end * PANEL_ROWS];
                scratch.resize(blocks.len(), 0);
                panel::unpack_row(span.layout.dtype, panel, part.row, &mut scratch);
                bytes.copy_from_slice(&scratch[part.bytes.start - blocks.start..][..bytes.len()]);
                to = rest;
            }
        }
        Ok(())
    }

    /// Writes row-major bytes from `at` on. `map` belongs to the lock which [`CpuMemory::lock_for_write`] gave for the range: it
    /// is exclusive if the range has panels.
    pub(super) fn write_rows(&self, map: &LayoutMap, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        let range = at..at + bytes.len();
        if range.end > self.pages.bytes() {
            return Err(OUT_OF_BOUNDS);
        }
        let mut done = range.start;
        for span in map.packed_in(&range) {
            let packed = overlap(&span.range, &range);
            check_bounds(self.pages.write(done, &bytes[done - at..packed.start - at]))?;
            self.write_panels(span, packed.start, &bytes[packed.start - at..packed.end - at])?;
            done = packed.end;
        }
        check_bounds(self.pages.write(done, &bytes[done - at..]))
    }

    /// As `write_rows`, inside a packed span. The caller holds the lock exclusively.
    fn write_panels(&self, span: &PanelSpan, start: usize, mut bytes: &[u8]) -> Result<(), DeviceError> {
        let (row_bytes, range) = (span.layout.row_bytes, start..start + bytes.len());
        let mut scratch = Vec::new();
        for at in panels_of(span, &range) {
            let written = overlap(&at, &range);
            let (now, later) = bytes.split_at(written.len());
            bytes = later;
            self.pages.rewrite_in_pieces(at.start, at.len(), at.len(), &mut |panel| {
                if written == at {
                    super::pack_panel(span, now, panel);
                    return Ok(());
                }
                let mut from = now;
                for part in row_parts(&at, &written, row_bytes) {
                    let (bytes, rest) = from.split_at(part.bytes.len());
                    let blocks = part.blocks(span);
                    let panel = &mut panel[blocks.start * PANEL_ROWS..blocks.end * PANEL_ROWS];
                    scratch.resize(blocks.len(), 0);
                    if blocks != part.bytes {
                        panel::unpack_row(span.layout.dtype, panel, part.row, &mut scratch);
                    }
                    scratch[part.bytes.start - blocks.start..][..bytes.len()].copy_from_slice(bytes);
                    panel::pack_row(span.layout.dtype, &scratch, part.row, panel);
                    from = rest;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// A lock for writes to a range: shared if no byte of it is packed, exclusive otherwise. Packed spans that lie in the range
    /// as a whole count as rows from now on, because another tensor may be about to take their place; but not if they reach
    /// into `kept`, which the caller has yet to read. `None`: see [`Locking`].
    pub(super) fn lock_for_write(
        &self,
        range: &Range<usize>,
        kept: Option<&Range<usize>>,
        locking: Locking<'_>,
    ) -> Result<Option<WriteLock<'_>>, DeviceError> {
        if range.end > self.pages.bytes() {
            return Err(OUT_OF_BOUNDS);
        }
        let Some(map) = self.read_map_with(locking) else { return Ok(None) };
        if map.is_row_major(range) {
            return Ok(Some(WriteLock::Shared(map)));
        }
        if let Locking::Try = locking {
            return Ok(None);
        }
        drop(map);
        let mut map = self.write_map();
        if kept.is_none_or(|kept| kept.is_empty() || kept.end <= range.start || range.end <= kept.start) {
            map.forget_overwritten(range);
        }
        if map.is_row_major(range) {
            return Ok(Some(WriteLock::Shared(RwLockWriteGuard::downgrade(map))));
        }
        Ok(Some(WriteLock::Exclusive(map)))
    }
}

/// The bytes that two ranges share, which overlap.
fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.max(b.start)..a.end.min(b.end)
}

/// The panels of a span that overlap a range inside it.
fn panels_of(span: &PanelSpan, range: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let (start, bytes) = (span.range.start, span.layout.bytes());
    let panels = (range.start - start) / bytes..(range.end - start).div_ceil(bytes);
    panels.map(move |panel| start + panel * bytes..start + (panel + 1) * bytes)
}

/// The rows, in part or whole, that a range inside a panel covers.
fn row_parts(panel: &Range<usize>, range: &Range<usize>, row_bytes: usize) -> impl Iterator<Item = RowPart> {
    let (from, to) = (range.start - panel.start, range.end - panel.start);
    (from / row_bytes..to.div_ceil(row_bytes)).map(move |row| {
        let start = row * row_bytes;
        RowPart { row, bytes: from.max(start) - start..to.min(start + row_bytes) - start }
    })
}

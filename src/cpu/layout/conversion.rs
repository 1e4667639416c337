//! Conversion of spans between rows and panels, in place and panel by panel.

use super::layout_map::{LayoutMap, PanelSpan};
use super::{CpuMemory, Locking};
use crate::cpu::panel;
use crate::cpu::pool::Pool;
use crate::device::DeviceError;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Target of a conversion.
#[derive(Clone, Copy)]
enum Layout {
    Panels,
    Rows,
}

impl CpuMemory {
    /// Packs spans, which the map records as packed already. False: the conversion gave way, and the map records only the
    /// panels that it has packed.
    pub(super) fn pack(
        &self,
        map: &mut LayoutMap,
        spans: &[PanelSpan],
        pool: &Pool,
        locking: Locking<'_>,
    ) -> Result<bool, DeviceError> {
        let panels = self.convert(spans, Layout::Panels, pool, locking)?;
        let rests = unconverted(spans, panels);
        // The last one first: each is the end of its span then.
        rests.iter().rev().for_each(|rest| map.unmark_packed(rest));
        Ok(rests.is_empty())
    }

    /// Converts spans to rows, which were removed from the map. False: the conversion gave way, and the map records the panels
    /// that it has not converted; packing them again stays delayed.
    pub(super) fn unpack(
        &self,
        map: &mut LayoutMap,
        spans: &[PanelSpan],
        pool: &Pool,
        locking: Locking<'_>,
    ) -> Result<bool, DeviceError> {
        let panels = self.convert(spans, Layout::Rows, pool, locking)?;
        let rests = unconverted(spans, panels);
        let done = rests.is_empty();
        if done {
            spans.iter().for_each(|span| map.delays.finish(&span.range));
        }
        rests.into_iter().for_each(|rest| map.mark_packed(rest.range.start, rest));
        Ok(done)
    }

    /// Converts spans in place. The caller holds the lock exclusively, so that no other thread reads them meanwhile. Returns the
    /// number of panels converted, from the first span's first panel on: all of them, unless the conversion gave way.
    fn convert(
        &self,
        spans: &[PanelSpan],
        to: Layout,
        pool: &Pool,
        locking: Locking<'_>,
    ) -> Result<usize, DeviceError> {
        // Panels up to and including each span.
        let ends: Vec<usize> = spans
            .iter()
            .scan(0, |end, span| {
                *end += span.panels();
                Some(*end)
            })
            .collect();
        let Some(&total) = ends.last() else { return Ok(0) };
        let (next, failed, stopped) = (AtomicUsize::new(0), AtomicBool::new(false), AtomicBool::new(false));
        let gives_way = || match locking {
            Locking::GiveWay(is_due) => stopped.load(Relaxed) || is_due(),
            Locking::Try => false,
        };
        let work = || {
            let mut scratch = Vec::new();
            // Each worker converts a panel in any case, so that repeated calls reach the end.
            let mut first = true;
            loop {
                if !std::mem::take(&mut first) && gives_way() {
                    stopped.store(true, Relaxed);
                    return Ok(());
                }
                let unit = next.fetch_add(1, Relaxed);
                if unit >= total {
                    return Ok(());
                }
                let at = ends.partition_point(|&end| end <= unit);
                let (span, first) = (&spans[at], if at == 0 { 0 } else { ends[at - 1] });
                let bytes = span.layout.bytes();
                scratch.resize(bytes, 0);
                self.pages.rewrite_in_pieces(
                    span.range.start + (unit - first) * bytes,
                    bytes,
                    bytes,
                    &mut |panel| {
                        scratch.copy_from_slice(panel);
                        match to {
                            Layout::Panels => pack_panel(span, &scratch, panel),
                            Layout::Rows => panel::unpack(span.layout.dtype, &scratch, panel),
                        }
                        Ok(())
                    },
                )?;
            }
        };
        // A worker of the pool must return normally, so a panic is caught here.
        let job = |_is_leader: bool| {
            if !matches!(catch_unwind(AssertUnwindSafe(work)), Ok(Ok::<_, DeviceError>(()))) {
                failed.store(true, Relaxed);
            }
        };
        pool.run(&job);
        if failed.into_inner() {
            return Err(DeviceError::Bug("converting a range between rows and panels failed".to_owned()));
        }
        Ok(next.into_inner().min(total))
    }
}

/// What is left of spans after the first `panels` panels.
fn unconverted(spans: &[PanelSpan], mut panels: usize) -> Vec<PanelSpan> {
    let mut rests = Vec::new();
    for span in spans {
        let done = panels.min(span.panels());
        panels -= done;
        let rest = span.range.start + done * span.layout.bytes()..span.range.end;
        if !rest.is_empty() {
            rests.push(PanelSpan { range: rest, layout: span.layout });
        }
    }
    rests
}

pub(super) fn pack_panel(span: &PanelSpan, rows: &[u8], panel: &mut [u8]) {
    let n = span.layout.row_bytes;
    panel::pack(span.layout.dtype, &std::array::from_fn(|r| &rows[r * n..][..n]), panel);
}

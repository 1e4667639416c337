//! GEMM by SIMD kernels, blocked as in BLIS. The columns of b are packed once per node. Workers claim *units*: a few rows of a
//! with up to [`COLUMN_SPAN`] columns of one group. A unit runs over cache blocks of columns and of k, and calls the
//! micro-kernel on panels.

use super::rhs_groups::{Column, RhsGroups};
use crate::cpu::memory::View;
use crate::cpu::panel::PANEL_ROWS;
use crate::cpu::pool::KernelContext;
use crate::cpu::simd::{
    GemmKernels, MAX_DOT_COLUMNS, MAX_PANELS, MAX_TILE_COLUMNS, MicroKernel, PanelSums, RHS_PIECE, TileOutput,
};
use crate::tensor::TensorDesc;
use std::ops::Range;

/// Most panels of a in a unit with few columns.
const FEW_PANELS: usize = 4;
/// Most rows of a in a unit with few columns.
const FEW_ROWS: usize = FEW_PANELS * PANEL_ROWS;
/// Most panels of a in a unit with many columns.
const MANY_PANELS: usize = 16;
/// Most rows of a in a unit with many columns.
const MANY_ROWS: usize = MANY_PANELS * PANEL_ROWS;

/// Bytes of a's rows in a unit with few columns: small, to balance cores of different speed.
const FEW_BYTES: usize = 128 << 10;

/// Bytes of a's rows in a unit with many columns: they stay in the L2 cache while all columns pass.
const MANY_BYTES: usize = 512 << 10;

/// Number of columns from which on a unit counts as one with many columns.
const MANY_COLUMNS: usize = 32;

/// Units of many columns per worker, if there are enough rows: limits the wait for the slowest worker to part of a unit.
const UNITS_PER_WORKER: usize = 4;

/// Most columns of a unit: enough to amortise reading the rows.
const COLUMN_SPAN: usize = 512;

/// Most multiplications of a unit: a fraction of a second with the slowest type of weights.
const MAX_PRODUCTS: usize = 1 << 30;

/// Columns below which a unit is not made smaller to keep to [`UNIT_PRODUCTS`], only to [`MAX_PRODUCTS`].
const MIN_COLUMN_SPAN: usize = 4 * COLUMN_BLOCK;

/// Multiplications of a unit with many columns, if it then has enough rows and columns: about a millisecond, as a run can only
/// pause between two units.
const UNIT_PRODUCTS: usize = 1 << 27;

/// Cache block of columns: together with a block of the rows they fit the L2 cache.
const COLUMN_BLOCK: usize = 48;

/// Bytes of a float panel in a cache block along k.
const DEPTH_BYTES: usize = 16 << 10;

/// Multiplications of the smallest claim.
const GRAIN: usize = 1 << 16;

/// Bytes of packed columns up to which each worker packs all columns for itself: that takes less time than a barrier.
const OWN_PACK_BYTES: usize = 8 << 10;

/// Division of a node's work and sizes of its packed columns, computed from the shapes.
#[derive(Clone, Copy)]
pub(super) struct GemmPlan {
    kernels: GemmKernels,
    /// The micro-kernel for whole rows; `None` if they cannot be packed into panels.
    micro_kernel: Option<MicroKernel>,
    k: usize,
    /// Rows of a in a unit.
    unit: usize,
    /// Bytes of a packed column.
    column: usize,
    /// Bytes from one packed column to the next.
    stride: usize,
    /// Bytes of all packed columns.
    packed: usize,
    /// Floats of scratch for values being packed into columns, or rows being packed into panels.
    staging: usize,
}

impl GemmPlan {
    pub(super) fn new(kernels: GemmKernels, a: &TensorDesc, b: &TensorDesc, columns: usize) -> GemmPlan {
        let [k, m, ..] = a.ne();
        let (bytes, max_rows, row) = if columns < MANY_COLUMNS {
            (FEW_BYTES, FEW_ROWS, a.row_bytes())
        } else {
            // Panels of types that are expanded are larger than their rows.
            (MANY_BYTES, MANY_ROWS, kernels.panel_bytes(k) / PANEL_ROWS)
        };
        let step = kernels.panels() * PANEL_ROWS;
        let unit = (bytes / row.max(1)).min(m) / step * step;
        let unit = unit.clamp(step, max_rows);
        let (micro_kernel, packing) = (kernels.micro_kernel(k), kernels.packing());
        let (column, stride) = (packing.column_bytes(k), packing.stride(k));
        let packed = stride.saturating_mul(b.rows());
        let staging = if micro_kernel.is_some() { kernels.panel_bytes(k) / 4 * unit / PANEL_ROWS } else { 0 };
        let staging = staging.max(RHS_PIECE).next_multiple_of(16);
        GemmPlan { kernels, micro_kernel, k, unit, column, stride, packed, staging }
    }

    /// Cache block along k, in elements, for `columns` columns. With floats, two panels and a register tile's columns must fit
    /// the L1 cache; a multiple of 8.
    fn depth(&self, columns: usize) -> usize {
        let floats = !self.kernels.is_block() && columns > self.kernels.tile_columns();
        if floats { DEPTH_BYTES / (self.kernels.panel_bytes(8) / 8) } else { self.k }
    }

    /// Whether each worker packs all columns for itself, into its own scratch.
    fn packs_per_worker(&self) -> bool {
        self.packed <= OWN_PACK_BYTES
    }

    /// Barriers of [`GemmPlan::run`].
    pub(super) fn syncs(&self) -> usize {
        usize::from(!self.packs_per_worker())
    }

    /// Floats of scratch for each worker.
    pub(super) fn local(&self) -> usize {
        self.staging.saturating_add(if self.packs_per_worker() { self.packed / 4 } else { 0 })
    }

    /// Bytes of shared scratch.
    pub(super) fn shared(&self) -> usize {
        if self.packs_per_worker() { 0 } else { self.packed }
    }

    /// Most columns of a unit. Does not depend on the number of workers, because sums of floats depend on it.
    fn column_span(&self) -> usize {
        let rows = self.kernels.panels() * PANEL_ROWS;
        let products = self.k.saturating_mul(rows).max(1);
        let fewest = (MAX_PRODUCTS / products).clamp(1, MIN_COLUMN_SPAN);
        (UNIT_PRODUCTS / products / COLUMN_BLOCK * COLUMN_BLOCK).clamp(fewest, COLUMN_SPAN)
    }

    /// Packs the columns: all of them, or this worker's share followed by a barrier. Then computes the units that this worker
    /// claims.
    pub(super) fn run<'w>(
        &self,
        ctx: &KernelContext<'_>,
        scratch: &mut [f32],
        groups: impl FnOnce() -> Option<RhsGroups<'w>>,
    ) {
        let (staging, own) = scratch.split_at_mut(self.staging);
        let (own, shared): (&mut [u8], _) = (bytemuck::cast_slice_mut(own), ctx.shared());
        if self.packs_per_worker() {
            let mut write = |at: usize, part: &[u8]| own[at..at + part.len()].copy_from_slice(part);
            self.pack(ctx, 0..self.pieces(ctx), staging, &mut write);
        } else if !ctx.rhs_is_packed() {
            let mut write = |at: usize, part: &[u8]| shared.write(at, part);
            for pieces in ctx.chunks(self.pieces(ctx), (2 * RHS_PIECE / self.k).max(1)) {
                self.pack(ctx, pieces, staging, &mut write);
            }
            ctx.sync();
        }
        let packed = if self.packs_per_worker() { &*own } else { shared.read(0, self.packed) };
        let Some(groups) = groups() else { return };
        GemmRun { ctx, plan: *self, groups, a: ctx.src(0), dst: ctx.dst(), packed }.run(staging);
    }

    /// Number of pieces in which the rows of b are packed.
    fn pieces(&self, ctx: &KernelContext<'_>) -> usize {
        ctx.src(1).desc().rows() * self.k.div_ceil(RHS_PIECE)
    }

    fn pack(
        &self,
        ctx: &KernelContext<'_>,
        pieces: Range<usize>,
        buffer: &mut [f32],
        write: &mut dyn FnMut(usize, &[u8]),
    ) {
        let (b, packing, per_row) = (ctx.src(1), self.kernels.packing(), self.k.div_ceil(RHS_PIECE));
        for piece in pieces {
            let (row, first) = (piece / per_row, piece % per_row * RHS_PIECE);
            let [i1, i2, i3] = b.desc().row_index(row);
            let write = |at: usize, part: &[u8]| write(row * self.stride + at, part);
            if b.desc().dtype().is_block() {
                packing.pack_blocks(self.k, first, b.desc().dtype(), b.row([i1, i2, i3]), write);
            } else {
                let values = b.fetch([first, i1, i2, i3], &mut buffer[..RHS_PIECE.min(self.k - first)]);
                packing.pack(self.k, first, values, write);
            }
        }
    }
}

/// One worker's share of a product, once the columns are packed.
struct GemmRun<'a> {
    ctx: &'a KernelContext<'a>,
    plan: GemmPlan,
    groups: RhsGroups<'a>,
    a: View<'a>,
    dst: View<'a>,
    /// All rows of b, packed.
    packed: &'a [u8],
}

impl GemmRun<'_> {
    fn run(&self, staging: &mut [f32]) {
        let (m, max_columns) = (self.a.ne()[1], self.groups.max_columns());
        let column_span = self.plan.column_span();
        let spans = max_columns.div_ceil(column_span);
        let unit_rows = self.unit_rows(max_columns, m.saturating_mul(self.groups.len() * spans));
        let blocks = m.div_ceil(unit_rows);
        let cost = unit_rows.min(m).saturating_mul(self.plan.k).saturating_mul(max_columns.min(column_span));
        let grain = (GRAIN / cost.max(m).max(1)).max(1);
        let (groups, pieces, unrouted) = (self.groups.len(), blocks * spans, self.groups.unrouted().len());
        // Heads that lie side by side in each row of a KV cache share its pages.
        let side_by_side = self.a.desc().nb()[2] < self.a.desc().nb()[1];
        for unit in self.ctx.chunks(groups * pieces + unrouted, grain).flatten() {
            if unit >= groups * pieces {
                self.groups.clear_unrouted(&self.dst, unit - groups * pieces);
                continue;
            }
            // Units of the same rows are far apart, units of the same columns adjacent: workers that run at the same time
            // share columns in the cache.
            let (group, rest) =
                if side_by_side { (unit % groups, unit / groups) } else { (unit / pieces, unit % pieces) };
            let (row, first) = (rest % blocks * unit_rows, rest / blocks * column_span);
            let (rows, count) = (row..m.min(row + unit_rows), self.groups.count(group));
            let span = first..count.min(first + column_span);
            let kernels = &self.plan.kernels;
            let use_row_dots = count <= kernels.max_dot_columns() || self.plan.micro_kernel.is_none();
            // Array sizes by case, since small units must not pay for initialising large arrays.
            match (self.a.is_packed(), span.len(), rows.len() <= FEW_ROWS) {
                (true, 1, _) => self.stream_panels::<1>(group, rows, span),
                (true, n, true) if n <= kernels.tile_columns() => {
                    self.stream_panels::<MAX_TILE_COLUMNS>(group, rows, span)
                }
                (false, ..=2, true) if use_row_dots => self.row_dots::<FEW_ROWS, 2>(group, rows, span),
                (false, _, true) if use_row_dots => self.row_dots::<FEW_ROWS, MAX_DOT_COLUMNS>(group, rows, span),
                (false, _, false) if use_row_dots => self.row_dots::<MANY_ROWS, MAX_DOT_COLUMNS>(group, rows, span),
                (_, ..=MAX_TILE_COLUMNS, true) => {
                    self.blocked_panels::<FEW_PANELS, MAX_TILE_COLUMNS>(group, rows, span, staging)
                }
                (_, _, true) => self.blocked_panels::<FEW_PANELS, COLUMN_BLOCK>(group, rows, span, staging),
                (_, _, false) => self.blocked_panels::<MANY_PANELS, COLUMN_BLOCK>(group, rows, span, staging),
            }
        }
    }

    /// Rows of a in a unit, if the groups have at most `columns` columns; `rows` counts the rows of all groups and column
    /// spans.
    fn unit_rows(&self, columns: usize, rows: usize) -> usize {
        let (unit, step) = (self.plan.unit, self.plan.kernels.panels() * PANEL_ROWS);
        let fair = rows / (UNITS_PER_WORKER * self.ctx.dividing_workers());
        let short = UNIT_PRODUCTS / self.plan.k.saturating_mul(columns.min(COLUMN_SPAN)).max(1);
        if columns < MANY_COLUMNS { unit } else { (fair.min(short) / step * step).clamp(step, unit) }
    }

    /// A packed column.
    fn packed(&self, column: &Column) -> &[u8] {
        let ([i1, i2, i3], bn) = (column.b, self.ctx.src(1).ne());
        &self.packed[((i3 * bn[2] + i2) * bn[1] + i1) * self.plan.stride..][..self.plan.column]
    }

    fn store(&self, column: &Column, row: usize, values: &[f32]) {
        let [i1, i2, i3] = column.dst;
        self.dst.store([row, i1, i2, i3], values);
    }

    /// Selects columns from `first` on of a group, with their packed bytes; as many as `chosen` has entries.
    fn select_columns<'b>(&'b self, group: usize, first: usize, chosen: &mut [Column], packed: &mut [&'b [u8]]) {
        for (c, (column, packed)) in chosen.iter_mut().zip(packed).enumerate() {
            *column = self.groups.column(group, first + c);
            *packed = self.packed(column);
        }
    }

    /// Row dot products on rows in place.
    fn row_dots<const ROWS: usize, const COLUMNS: usize>(&self, group: usize, rows: Range<usize>, span: Range<usize>) {
        let [i2, i3] = self.groups.matrix(group);
        let mut slices: [&[u8]; ROWS] = [&[]; ROWS];
        let slices = &mut slices[..rows.len()];
        self.a.row_slices([rows.start, i2, i3], slices);
        let (mut chosen, mut packed): (_, [&[u8]; COLUMNS]) = ([Column::default(); COLUMNS], [&[]; COLUMNS]);
        let mut sums = [[0f32; ROWS]; COLUMNS];
        for first in span.clone().step_by(COLUMNS) {
            let count = COLUMNS.min(span.end - first);
            self.select_columns(group, first, &mut chosen[..count], &mut packed[..count]);
            let sums = &mut sums.as_flattened_mut()[..rows.len() * count];
            self.plan.kernels.dot(self.plan.k, slices, &packed[..count], sums);
            for (column, sums) in chosen[..count].iter().zip(sums.chunks_exact(rows.len())) {
                self.store(column, rows.start, sums);
            }
        }
    }

    /// Panels with few columns (at most `COLUMNS`): each panel is read once, for all columns.
    fn stream_panels<const COLUMNS: usize>(&self, group: usize, rows: Range<usize>, span: Range<usize>) {
        let micro_kernel = self.plan.micro_kernel.expect("rows that are packed have a micro-kernel");
        let [i2, i3] = self.groups.matrix(group);
        let (mut chosen, mut packed): (_, [&[u8]; COLUMNS]) = ([Column::default(); COLUMNS], [&[]; COLUMNS]);
        let (chosen, packed) = (&mut chosen[..span.len()], &mut packed[..span.len()]);
        self.select_columns(group, span.start, chosen, packed);
        let at_once = self.plan.kernels.panels();
        let mut out: [[PanelSums; MAX_PANELS]; COLUMNS] = [[[0.0; PANEL_ROWS]; MAX_PANELS]; COLUMNS];
        let out = &mut out.as_flattened_mut()[..packed.len() * at_once];
        for row in rows.clone().step_by(at_once * PANEL_ROWS) {
            // A last single panel is passed twice.
            let last = (row + (at_once - 1) * PANEL_ROWS).min(rows.end - PANEL_ROWS);
            let pair = [self.a.panel([row, i2, i3]), self.a.panel([last, i2, i3])];
            micro_kernel.run(
                &pair[..at_once],
                packed,
                TileOutput { sums: &mut *out, stride: at_once, accumulate: false },
            );
            for (column, sums) in chosen.iter().zip(out.chunks_exact(at_once)) {
                self.store(column, row, &sums.as_flattened()[..last + PANEL_ROWS - row]);
            }
        }
    }

    /// Panels with many columns in cache blocks; at most `PANELS` panels. Rows that are not packed yet are packed into
    /// `staging`.
    fn blocked_panels<const PANELS: usize, const COLUMNS: usize>(
        &self,
        group: usize,
        rows: Range<usize>,
        span: Range<usize>,
        staging: &mut [f32],
    ) {
        let (kernels, k) = (&self.plan.kernels, self.plan.k);
        let mut panels: [&[u8]; PANELS] = [&[]; PANELS];
        let panels = &mut panels[..rows.len().div_ceil(PANEL_ROWS)];
        let buffer = bytemuck::cast_slice_mut::<_, u8>(staging).chunks_exact_mut(kernels.panel_bytes(k));
        for ((panel, buffer), row) in panels.iter_mut().zip(buffer).zip(rows.clone().step_by(PANEL_ROWS)) {
            *panel = self.panel(group, row, rows.end, buffer);
        }
        let (mut chosen, mut packed): ([Column; COLUMNS], [&[u8]; COLUMNS]) =
            ([Column::default(); COLUMNS], [&[]; COLUMNS]);
        let mut sums = [[[0f32; PANEL_ROWS]; PANELS]; COLUMNS];
        for first in span.clone().step_by(COLUMNS) {
            let count = COLUMNS.min(span.end - first);
            self.select_columns(group, first, &mut chosen[..count], &mut packed[..count]);
            let depth = self.plan.depth(count);
            for start in (0..k).step_by(depth) {
                let at = start..k.min(start + depth);
                let micro_kernel =
                    kernels.micro_kernel(at.len()).expect("rows that fit panels; only rows of floats are split");
                let mut parts: [&[u8]; COLUMNS] = [&[]; COLUMNS];
                for (part, column) in parts.iter_mut().zip(&packed[..count]) {
                    *part = column_part(column, &at, k, kernels.packing().element_bytes());
                }
                for (p, at_once) in panels.chunks(kernels.panels()).enumerate() {
                    // A last single panel is passed twice.
                    let pair = [at_once[0], at_once[at_once.len() - 1]].map(|panel| panel_part(panel, &at, k));
                    let sums = &mut sums.as_flattened_mut()[p * kernels.panels()..];
                    let out = TileOutput { sums, stride: PANELS, accumulate: start > 0 };
                    micro_kernel.run(&pair[..kernels.panels()], &parts[..count], out);
                }
            }
            for (column, sums) in chosen[..count].iter().zip(&sums) {
                self.store(column, rows.start, &sums.as_flattened()[..rows.len()]);
            }
        }
    }

    /// The panel of the rows from `row` on, below `end`: in place if a is packed, otherwise packed into `buffer`.
    fn panel<'r>(&'r self, group: usize, row: usize, end: usize, buffer: &'r mut [u8]) -> &'r [u8] {
        let [i2, i3] = self.groups.matrix(group);
        if self.a.is_packed() {
            return self.a.panel([row, i2, i3]);
        }
        let mut slices: [&[u8]; PANEL_ROWS] = [&[]; PANEL_ROWS];
        for (r, slice) in slices.iter_mut().enumerate() {
            // Copies of the last row fill up the panel; the sums of the copies are not stored.
            *slice = self.a.row([(row + r).min(end - 1), i2, i3]);
        }
        self.plan.kernels.pack_panel(&slices, buffer);
        buffer
    }
}

/// Elements `at` of a panel of rows of `k`: a part only for float types.
fn panel_part<'a>(panel: &'a [u8], at: &Range<usize>, k: usize) -> &'a [u8] {
    let bytes = panel.len() / k;
    if at.len() == k { panel } else { &panel[bytes * at.start..bytes * at.end] }
}

/// Elements `at` of a packed column of `k`: a part only for floats of `bytes` each. The last part includes the padding.
fn column_part<'a>(column: &'a [u8], at: &Range<usize>, k: usize, bytes: usize) -> &'a [u8] {
    let end = if at.end == k { column.len() } else { bytes * at.end };
    &column[bytes * at.start..end]
}

#[cfg(test)]
mod tests {
    use super::super::MAX_ROW;
    use super::*;
    use crate::tensor::DType;

    #[test]
    fn units_of_long_rows_have_fewer_columns() {
        for dtype in [DType::F32, DType::F16, DType::Q4_0, DType::Q8_0] {
            let kernels = GemmKernels::of(dtype).unwrap();
            let rows = kernels.panels() * PANEL_ROWS;
            for k in (5..=MAX_ROW.ilog2()).map(|bits| 1 << bits) {
                let (a, b) = (TensorDesc::contiguous(dtype, [k, 4096, 1, 1]), [k, 4096, 1, 1]);
                let b = TensorDesc::contiguous(DType::F32, b).unwrap();
                let plan = GemmPlan::new(kernels, &a.unwrap(), &b, 4096);
                let span = plan.column_span();
                assert!(span > 0 && span * rows * k <= MAX_PRODUCTS, "{dtype} rows of {k}: {span} columns");
                // Rows of models: as without the limit.
                if k <= 1 << 17 {
                    let want = UNIT_PRODUCTS / (k * rows) / COLUMN_BLOCK * COLUMN_BLOCK;
                    assert_eq!(span, want.clamp(MIN_COLUMN_SPAN, COLUMN_SPAN), "{dtype} rows of {k}");
                }
            }
        }
    }
}

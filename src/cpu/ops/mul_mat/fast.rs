//! Products by vector kernels: columns packed once per node, rows of a in units that workers claim.

use super::columns::{Column, Columns};
use crate::cpu::memory::View;
use crate::cpu::pool::Work;
use crate::cpu::simd::{Kernels, MAX_FEW, MAX_STRIPS, MAX_TILE, Out, PIECE, Sums, Tiles};
use crate::cpu::strip::{self, STRIP};
use crate::tensor::TensorDesc;
use std::ops::Range;

/// Most rows of a in a unit that meets few columns, and in one that meets many.
const FEW_STRIPS: usize = 4;
const FEW_ROWS: usize = FEW_STRIPS * STRIP;
const MANY_STRIPS: usize = 16;
const MANY_ROWS: usize = MANY_STRIPS * STRIP;

/// Bytes of a's rows in a unit that meets few columns: small enough to even out cores of different speed.
const FEW_BYTES: usize = 128 << 10;

/// Bytes of a's rows in a unit that meets many columns: they stay in the second cache level while all columns pass.
const MANY_BYTES: usize = 512 << 10;

/// Columns from which on a unit counts as one that meets many.
const MANY: usize = 32;

/// Units of many columns for each worker, where rows suffice: who is done first waits for no more than a part of one.
const SHARE: usize = 4;

/// Columns in a unit: many enough that reading the rows for them does not matter.
const SPAN: usize = 512;

/// Columns that a unit of rows meets before the next ones: with a piece of the rows they stay in the second cache level.
const TOGETHER: usize = 48;

/// Bytes of a strip of floats that meet columns at once.
const DEPTH_BYTES: usize = 16 << 10;

/// Multiplications worth claiming at once.
const GRAIN: usize = 1 << 16;

/// Bytes of packed columns that each worker rather packs for itself than waits for: less than a barrier's time.
const OWN_BYTES: usize = 8 << 10;

/// How a node is divided and where its packed columns lie: what can be told from its shapes.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    kernels: Kernels,
    /// Of whole rows, if they have strips.
    tiles: Option<Tiles>,
    k: usize,
    /// Rows of a in a unit.
    unit: usize,
    /// Bytes of a packed column, from one to the next, and of all.
    column: usize,
    stride: usize,
    packed: usize,
    /// Floats of scratch for values on their way into columns, or rows on their way into strips.
    staging: usize,
}

impl Plan {
    pub(super) fn new(kernels: Kernels, a: &TensorDesc, b: &TensorDesc, columns: usize) -> Plan {
        let [k, m, ..] = a.ne();
        let (bytes, most) = if columns < MANY { (FEW_BYTES, FEW_ROWS) } else { (MANY_BYTES, MANY_ROWS) };
        let step = kernels.strips() * STRIP;
        let unit = (bytes / a.row_bytes().max(1)).min(m) / step * step;
        let unit = unit.clamp(step, most);
        let (tiles, packing) = (kernels.tiles(k), kernels.packing());
        let (column, stride) = (packing.column_bytes(k), packing.stride(k));
        let packed = stride.saturating_mul(b.rows());
        let staging = if tiles.is_some() { kernels.strip_bytes(k) / 4 * unit / STRIP } else { 0 };
        let staging = staging.max(PIECE).next_multiple_of(16);
        Plan { kernels, tiles, k, unit, column, stride, packed, staging }
    }

    /// Elements of a row that meet all of `columns` before the next ones do. Floats take so many bytes that two strips and a
    /// tile of columns would not stay in the first cache level otherwise; a multiple of 8.
    fn depth(&self, columns: usize) -> usize {
        let floats = !self.kernels.is_block() && columns > self.kernels.tile_columns();
        if floats { DEPTH_BYTES / (self.kernels.strip_bytes(8) / 8) } else { self.k }
    }

    /// Whether each worker packs all columns for itself.
    fn own(&self) -> bool {
        self.packed <= OWN_BYTES
    }

    /// Synchronisations of [`Plan::pack`].
    pub(super) fn syncs(&self) -> usize {
        usize::from(!self.own())
    }

    /// Floats of scratch for each worker.
    pub(super) fn local(&self) -> usize {
        self.staging.saturating_add(if self.own() { self.packed / 4 } else { 0 })
    }

    /// Bytes of shared scratch.
    pub(super) fn shared(&self) -> usize {
        if self.own() { 0 } else { self.packed }
    }

    /// Packs the columns, or this worker's part of them and waits for those of the others; then computes the parts of the
    /// product that this worker gets.
    pub(super) fn run<'w>(&self, work: &Work<'_>, scratch: &mut [f32], groups: impl FnOnce() -> Option<Columns<'w>>) {
        let (staging, own) = scratch.split_at_mut(self.staging);
        let (own, shared): (&mut [u8], _) = (bytemuck::cast_slice_mut(own), work.shared());
        if self.own() {
            let mut write = |at: usize, part: &[u8]| own[at..at + part.len()].copy_from_slice(part);
            self.pack(work, 0..self.pieces(work), staging, &mut write);
        } else if !work.finds_columns() {
            let mut write = |at: usize, part: &[u8]| shared.write(at, part);
            for pieces in work.chunks(self.pieces(work), (2 * PIECE / self.k).max(1)) {
                self.pack(work, pieces, staging, &mut write);
            }
            work.sync();
        }
        let packed = if self.own() { &*own } else { shared.read(0, self.packed) };
        let Some(columns) = groups() else { return };
        Product { work, plan: *self, columns, a: work.src(0), dst: work.dst(), packed }.run(staging);
    }

    /// Pieces that the rows of b are packed in.
    fn pieces(&self, work: &Work<'_>) -> usize {
        work.src(1).desc().rows() * self.k.div_ceil(PIECE)
    }

    fn pack(&self, work: &Work<'_>, pieces: Range<usize>, room: &mut [f32], write: &mut dyn FnMut(usize, &[u8])) {
        let (b, packing, per_row) = (work.src(1), self.kernels.packing(), self.k.div_ceil(PIECE));
        for piece in pieces {
            let (row, first) = (piece / per_row, piece % per_row * PIECE);
            let [i1, i2, i3] = b.desc().row_index(row);
            let values = b.fetch([first, i1, i2, i3], &mut room[..PIECE.min(self.k - first)]);
            packing.pack(self.k, first, values, |at, part| write(row * self.stride + at, part));
        }
    }
}

struct Product<'a> {
    work: &'a Work<'a>,
    plan: Plan,
    columns: Columns<'a>,
    a: View<'a>,
    dst: View<'a>,
    /// All rows of b, packed.
    packed: &'a [u8],
}

impl Product<'_> {
    fn run(&self, staging: &mut [f32]) {
        let (m, most) = (self.a.ne()[1], self.columns.most());
        let spans = most.div_ceil(SPAN);
        let unit_rows = self.unit_rows(most, m.saturating_mul(self.columns.groups() * spans));
        let blocks = m.div_ceil(unit_rows);
        let cost = unit_rows.min(m).saturating_mul(self.plan.k).saturating_mul(most.min(SPAN));
        let grain = (GRAIN / cost.max(1)).max(1);
        let (groups, pieces) = (self.columns.groups(), blocks * spans);
        // Heads that lie side by side in each row of a cache share its pages.
        let side_by_side = self.a.desc().nb()[2] < self.a.desc().nb()[1];
        for unit in self.work.chunks(groups * pieces, grain).flatten() {
            // Units of the same rows are neighbours last: workers that run side by side share columns.
            let (group, rest) =
                if side_by_side { (unit % groups, unit / groups) } else { (unit / pieces, unit % pieces) };
            let (row, first) = (rest % blocks * unit_rows, rest / blocks * SPAN);
            let (rows, count) = (row..m.min(row + unit_rows), self.columns.count(group));
            let span = first..count.min(first + SPAN);
            let kernels = &self.plan.kernels;
            let few = count <= kernels.few() || self.plan.tiles.is_none();
            // Small units are not to pay for large arrays.
            match (self.a.packed(), span.len(), rows.len() <= FEW_ROWS) {
                (true, 1, _) => self.by_tiles::<1>(group, rows, span),
                (true, n, true) if n <= kernels.tile_columns() => self.by_tiles::<MAX_TILE>(group, rows, span),
                (false, ..=2, true) if few => self.by_rows::<FEW_ROWS, 2>(group, rows, span),
                (false, _, true) if few => self.by_rows::<FEW_ROWS, MAX_FEW>(group, rows, span),
                (false, _, false) if few => self.by_rows::<MANY_ROWS, MAX_FEW>(group, rows, span),
                (_, ..=MAX_TILE, true) => self.by_strips::<FEW_STRIPS, MAX_TILE>(group, rows, span, staging),
                (_, _, true) => self.by_strips::<FEW_STRIPS, TOGETHER>(group, rows, span, staging),
                (_, _, false) => self.by_strips::<MANY_STRIPS, TOGETHER>(group, rows, span, staging),
            }
        }
    }

    /// Rows of a in a unit, where `rows` are met in all by at most `columns` each.
    fn unit_rows(&self, columns: usize, rows: usize) -> usize {
        let (unit, step) = (self.plan.unit, self.plan.kernels.strips() * STRIP);
        let fair = rows / (SHARE * self.work.workers()) / step * step;
        if columns < MANY { unit } else { fair.clamp(step, unit) }
    }

    /// A column, packed.
    fn packed(&self, column: &Column) -> &[u8] {
        let ([i1, i2, i3], bn) = (column.b, self.work.src(1).ne());
        &self.packed[((i3 * bn[2] + i2) * bn[1] + i1) * self.plan.stride..][..self.plan.column]
    }

    fn store(&self, column: &Column, row: usize, values: &[f32]) {
        let [i1, i2, i3] = column.dst;
        self.dst.store([row, i1, i2, i3], values);
    }

    /// Columns `first` and on of a group, with their packed bytes: as many as `chosen` has room for.
    fn choose<'b>(&'b self, group: usize, first: usize, chosen: &mut [Column], packed: &mut [&'b [u8]]) {
        for (c, (column, packed)) in chosen.iter_mut().zip(packed).enumerate() {
            *column = self.columns.column(group, first + c);
            *packed = self.packed(column);
        }
    }

    /// Rows where they lie.
    fn by_rows<const ROWS: usize, const COLUMNS: usize>(&self, group: usize, rows: Range<usize>, span: Range<usize>) {
        let [i2, i3] = self.columns.matrix(group);
        let mut slices: [&[u8]; ROWS] = [&[]; ROWS];
        let slices = &mut slices[..rows.len()];
        self.a.row_slices([rows.start, i2, i3], slices);
        let (mut chosen, mut packed): (_, [&[u8]; COLUMNS]) = ([Column::default(); COLUMNS], [&[]; COLUMNS]);
        let mut sums = [[0f32; ROWS]; COLUMNS];
        for first in span.clone().step_by(COLUMNS) {
            let count = COLUMNS.min(span.end - first);
            self.choose(group, first, &mut chosen[..count], &mut packed[..count]);
            let sums = &mut sums.as_flattened_mut()[..rows.len() * count];
            self.plan.kernels.dot(self.plan.k, slices, &packed[..count], sums);
            for (column, sums) in chosen[..count].iter().zip(sums.chunks_exact(rows.len())) {
                self.store(column, rows.start, sums);
            }
        }
    }

    /// Rows that lie in strips, with so few columns that a strip meets all of them at once: at most `COLUMNS`.
    fn by_tiles<const COLUMNS: usize>(&self, group: usize, rows: Range<usize>, span: Range<usize>) {
        let tiles = self.plan.tiles.expect("a that lies in strips");
        let [i2, i3] = self.columns.matrix(group);
        let (mut chosen, mut packed): (_, [&[u8]; COLUMNS]) = ([Column::default(); COLUMNS], [&[]; COLUMNS]);
        let (chosen, packed) = (&mut chosen[..span.len()], &mut packed[..span.len()]);
        self.choose(group, span.start, chosen, packed);
        let at_once = self.plan.kernels.strips();
        let mut out: [[Sums; MAX_STRIPS]; COLUMNS] = [[[0.0; STRIP]; MAX_STRIPS]; COLUMNS];
        let out = &mut out.as_flattened_mut()[..packed.len() * at_once];
        for row in rows.clone().step_by(at_once * STRIP) {
            // The last strip may stand alone: it meets the columns twice.
            let last = (row + (at_once - 1) * STRIP).min(rows.end - STRIP);
            let pair = [self.a.strip([row, i2, i3]), self.a.strip([last, i2, i3])];
            tiles.run(&pair[..at_once], packed, Out { sums: &mut *out, stride: at_once, adds: false });
            for (column, sums) in chosen.iter().zip(out.chunks_exact(at_once)) {
                self.store(column, row, &sums.as_flattened()[..last + STRIP - row]);
            }
        }
    }

    /// Rows in strips: at most `STRIPS`.
    fn by_strips<const STRIPS: usize, const COLUMNS: usize>(
        &self,
        group: usize,
        rows: Range<usize>,
        span: Range<usize>,
        staging: &mut [f32],
    ) {
        let (kernels, k) = (&self.plan.kernels, self.plan.k);
        let mut strips: [&[u8]; STRIPS] = [&[]; STRIPS];
        let strips = &mut strips[..rows.len().div_ceil(STRIP)];
        let room = bytemuck::cast_slice_mut::<_, u8>(staging).chunks_exact_mut(kernels.strip_bytes(k));
        for ((strip, room), row) in strips.iter_mut().zip(room).zip(rows.clone().step_by(STRIP)) {
            *strip = self.strip(group, row, rows.end, room);
        }
        let (mut chosen, mut packed): ([Column; COLUMNS], [&[u8]; COLUMNS]) =
            ([Column::default(); COLUMNS], [&[]; COLUMNS]);
        let mut sums = [[[0f32; STRIP]; STRIPS]; COLUMNS];
        for first in span.clone().step_by(COLUMNS) {
            let count = COLUMNS.min(span.end - first);
            self.choose(group, first, &mut chosen[..count], &mut packed[..count]);
            let depth = self.plan.depth(count);
            for start in (0..k).step_by(depth) {
                let at = start..k.min(start + depth);
                let tiles = kernels.tiles(at.len()).expect("rows that have strips, of floats in part");
                let mut parts: [&[u8]; COLUMNS] = [&[]; COLUMNS];
                for (part, column) in parts.iter_mut().zip(&packed[..count]) {
                    *part = column_part(column, &at, k, kernels.packing().element_bytes());
                }
                for (p, some) in strips.chunks(kernels.strips()).enumerate() {
                    // The last strip may stand alone: it meets the columns twice.
                    let pair = [some[0], some[some.len() - 1]].map(|strip| strip_part(strip, &at, k));
                    let sums = &mut sums.as_flattened_mut()[p * kernels.strips()..];
                    let out = Out { sums, stride: STRIPS, adds: start > 0 };
                    tiles.run(&pair[..kernels.strips()], &parts[..count], out);
                }
            }
            for (column, sums) in chosen[..count].iter().zip(&sums) {
                self.store(column, rows.start, &sums.as_flattened()[..rows.len()]);
            }
        }
    }

    /// The strip of the rows from `row` on, below `end`: where it lies, or packed into `room`.
    fn strip<'r>(&'r self, group: usize, row: usize, end: usize, room: &'r mut [u8]) -> &'r [u8] {
        let [i2, i3] = self.columns.matrix(group);
        if self.a.packed() {
            return self.a.strip([row, i2, i3]);
        }
        let mut slices: [&[u8]; STRIP] = [&[]; STRIP];
        for (r, slice) in slices.iter_mut().enumerate() {
            // Rows beyond the last stand for nothing: any will do.
            *slice = self.a.row([(row + r).min(end - 1), i2, i3]);
        }
        strip::pack(self.a.desc().dtype(), &slices, room);
        room
    }
}

/// Elements `at` of rows of `k` in a strip: all, or of a float type.
fn strip_part<'a>(strip: &'a [u8], at: &Range<usize>, k: usize) -> &'a [u8] {
    let bytes = strip.len() / k;
    if at.len() == k { strip } else { &strip[bytes * at.start..bytes * at.end] }
}

/// Elements `at` of a packed column of `k`: all, or of floats of `bytes` each. The last part comes with the padding.
fn column_part<'a>(column: &'a [u8], at: &Range<usize>, k: usize, bytes: usize) -> &'a [u8] {
    let end = if at.end == k { column.len() } else { bytes * at.end };
    &column[bytes * at.start..end]
}

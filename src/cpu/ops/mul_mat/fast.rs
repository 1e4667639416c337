//! Products by vector kernels: columns packed once per node, rows of a in units that workers claim.

use super::columns::{Column, Columns};
use crate::cpu::memory::View;
use crate::cpu::pool::Work;
use crate::cpu::simd::{Kernels, MAX_FEW, MAX_TILE, PIECE, STRIP};

/// Most rows of a in a unit.
const MAX_ROWS: usize = 8 * STRIP;

/// Rows of a in a unit, for rows of `k` elements: strips stay in the second cache level, and short rows (heads of
/// attention) come in numbers that make claiming a unit worth while.
fn unit_rows(k: usize) -> usize {
    match k {
        ..=128 => MAX_ROWS,
        129..=8192 => 2 * STRIP,
        _ => STRIP,
    }
}

/// Columns in a unit: many enough that expanding the rows for them does not matter.
const COLUMNS: usize = 512;

/// Multiplications worth claiming at once.
const GRAIN: usize = 1 << 16;

/// Synchronisations of [`run`].
pub(super) const SYNCS: usize = 1;

/// Floats of scratch for each worker in [`run`], a multiple of 16 (so that what follows is aligned too).
pub(super) fn scratch(kernels: &Kernels, k: usize) -> usize {
    (unit_rows(k) / STRIP).saturating_mul(kernels.strip_bytes(k) / 4).max(PIECE)
}

/// Bytes of shared scratch for [`run`]: the packed rows of b.
pub(super) fn shared(kernels: &Kernels, k: usize, rows: usize) -> usize {
    kernels.packing().column_bytes(k).saturating_mul(rows)
}

/// Packs this worker's part of the columns, and waits for those of the others.
pub(super) fn pack(work: &Work<'_>, kernels: &Kernels, scratch: &mut [f32]) {
    let (b, shared, packing) = (work.src(1), work.shared(), kernels.packing());
    let k = b.ne()[0];
    let (pieces, bytes) = (k.div_ceil(PIECE), packing.column_bytes(k));
    for unit in work.chunks(b.desc().rows() * pieces, (2 * PIECE / k).max(1)).flatten() {
        let (row, first) = (unit / pieces, unit % pieces * PIECE);
        let values = &mut scratch[..PIECE.min(k - first)];
        let [i1, i2, i3] = b.desc().row_index(row);
        b.load([first, i1, i2, i3], values);
        packing.pack(k, first, values, |at, bytes_of| shared.write(row * bytes + at, bytes_of));
    }
    work.sync();
}

/// Computes the parts of the product that this worker gets.
pub(super) fn run(work: &Work<'_>, kernels: &Kernels, columns: &Columns<'_>, scratch: &mut [f32]) {
    let [k, m, ..] = work.src(0).ne();
    let most = columns.most();
    let unit_rows = unit_rows(k);
    let (blocks, spans) = (m.div_ceil(unit_rows), most.div_ceil(COLUMNS));
    let cost = unit_rows.min(m).saturating_mul(k).saturating_mul(most.min(COLUMNS));
    let product = Product { work, kernels, columns, a: work.src(0), dst: work.dst(), k };
    for unit in work.chunks(columns.groups() * blocks * spans, (GRAIN / cost.max(1)).max(1)).flatten() {
        // Units of the same rows are neighbours last: workers that run side by side share columns.
        let (group, rest) = (unit / (blocks * spans), unit % (blocks * spans));
        let (row, first) = (rest % blocks * unit_rows, rest / blocks * COLUMNS);
        let (rows, count) = (unit_rows.min(m - row), columns.count(group));
        let span = first..count.min(first + COLUMNS);
        if count <= kernels.few() {
            product.few(group, row, rows);
        } else if !span.is_empty() {
            product.many(group, row, rows, span, scratch);
        }
    }
}

struct Product<'a> {
    work: &'a Work<'a>,
    kernels: &'a Kernels,
    columns: &'a Columns<'a>,
    a: View<'a>,
    dst: View<'a>,
    k: usize,
}

impl Product<'_> {
    /// A column, packed.
    fn packed(&self, column: &Column) -> &[u8] {
        let ([i1, i2, i3], bn) = (column.b, self.work.src(1).ne());
        let bytes = self.kernels.packing().column_bytes(self.k);
        self.work.shared().read(((i3 * bn[2] + i2) * bn[1] + i1) * bytes, bytes)
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

    /// Rows by few columns: each row once, where it lies.
    fn few(&self, group: usize, row: usize, rows: usize) {
        let [i2, i3] = self.columns.matrix(group);
        let count = self.columns.count(group);
        let (mut chosen, mut packed): ([Column; MAX_FEW], [&[u8]; MAX_FEW]) = Default::default();
        let (chosen, packed) = (&mut chosen[..count], &mut packed[..count]);
        self.choose(group, 0, chosen, packed);
        let mut slices: [&[u8]; MAX_ROWS] = [&[]; MAX_ROWS];
        for (r, slice) in slices[..rows].iter_mut().enumerate() {
            *slice = self.a.row([row + r, i2, i3]);
        }
        let mut sums = [0f32; MAX_ROWS * MAX_FEW];
        let sums = &mut sums[..rows * count];
        self.kernels.dot(self.k, &slices[..rows], packed, sums);
        for (column, sums) in chosen.iter().zip(sums.chunks_exact(rows)) {
            self.store(column, row, sums);
        }
    }

    /// Rows by many columns: expanded once, then met by tiles of columns.
    fn many(&self, group: usize, row: usize, rows: usize, span: std::ops::Range<usize>, scratch: &mut [f32]) {
        let [i2, i3] = self.columns.matrix(group);
        let bytes = self.kernels.strip_bytes(self.k);
        let strips = &mut bytemuck::cast_slice_mut::<_, u8>(scratch)[..rows.div_ceil(STRIP) * bytes];
        for (s, strip) in strips.chunks_exact_mut(bytes).enumerate() {
            let mut slices: [&[u8]; STRIP] = [&[]; STRIP];
            for (r, slice) in slices.iter_mut().enumerate() {
                // Rows beyond the last stand for nothing: any will do.
                *slice = self.a.row([row + (s * STRIP + r).min(rows - 1), i2, i3]);
            }
            self.kernels.expand(self.k, &slices, strip);
        }
        let tile = self.kernels.tile_columns();
        let (mut chosen, mut packed): ([Column; MAX_TILE], [&[u8]; MAX_TILE]) = Default::default();
        let mut sums = [[0f32; MAX_ROWS]; MAX_TILE];
        for first in span.clone().step_by(tile) {
            let count = tile.min(span.end - first);
            self.choose(group, first, &mut chosen[..count], &mut packed[..count]);
            for (s, strip) in strips.chunks_exact(bytes).enumerate() {
                let mut tile = [[0f32; STRIP]; MAX_TILE];
                self.kernels.tile(self.k, strip, &packed[..count], &mut tile[..count]);
                for c in 0..count {
                    sums[c].as_chunks_mut().0[s] = tile[c];
                }
            }
            for (column, sums) in chosen[..count].iter().zip(&sums) {
                self.store(column, row, &sums[..rows]);
            }
        }
    }
}

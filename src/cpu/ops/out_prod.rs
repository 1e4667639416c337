//! OUT_PROD as a blocked GEMM: a claim is a tile of dst, computed from packed blocks of a and b by a micro-kernel of 16 × 4
//! elements. Products with few rows read a in place.

use super::{Kernel, empty_sum, unsupported_types};
use crate::cpu::memory::View;
use crate::cpu::pool::KernelContext;
use crate::cpu::simd::multiversion;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::tensor::DType::F32;
use crate::tensor::quant::dequantiser;
use std::ops::Range;

/// Size of a tile of dst: elements of a row, a multiple of every block length, and rows.
const TILE: [usize; 2] = [256, 64];
/// Size of the micro-kernel's part of a tile: two vectors of AVX2 in each of four rows, whose sums stay in registers.
const MICRO: [usize; 2] = [16, 4];
/// Summands of a packed block: a strip of a and a strip of b then fit the L1 cache, and the block of a the L2 cache.
const DEPTH: usize = 64;
/// Summands between two barriers, at which a run can pause: a claim takes some milliseconds.
const DEPTH_PER_PHASE: usize = 64 * DEPTH;

/// Up to this number of rows, packing a would take longer than the products: tiles are then wide and read a in place.
const FEW_ROWS: usize = 4;
/// As [`TILE`], for few rows. The sums take as much scratch.
const WIDE_TILE: [usize; 2] = [TILE[0] * TILE[1] / FEW_ROWS, FEW_ROWS];
/// Summands that are added together where there are few rows, so that sums are loaded and stored less often.
const UNROLL: usize = 4;
/// Cost of reading a summand of a tile, beside its elements.
const SUMMAND_COST: usize = 32;

pub(super) fn select(node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let (Some(a), Some(b)) = (node.srcs.get(0), node.srcs.get(1)) else { return Err(unsupported_types(node)) };
    if (b.dtype(), node.dst.dtype()) != (F32, F32) || dequantiser(a.dtype()).is_none() {
        return Err(unsupported_types(node));
    }
    if a.is_empty() {
        return Ok(empty_sum(node));
    }
    let (depth, [n, m, n2, n3]) = (a.ne()[1], node.dst.ne());
    let tile = if m <= FEW_ROWS { WIDE_TILE } else { TILE };
    let tiles = n.div_ceil(tile[0]).saturating_mul(m.div_ceil(tile[1])).saturating_mul(n2).saturating_mul(n3);
    let reads = tiles.saturating_mul(depth).saturating_mul(n.min(tile[0]) + m.min(tile[1]) + SUMMAND_COST);
    // Four multiplications and additions cost as much as an element operation.
    let products = node.dst.elements().saturating_mul(depth) / 4;
    let phases = depth.div_ceil(DEPTH_PER_PHASE);
    let scratch = (TILE[0] + TILE[1]) * DEPTH + TILE[0] * TILE[1] + TILE[0];
    let kernel = Kernel::new(products.saturating_add(reads), move |w| out_prod(w, tile, depth, phases));
    Ok(kernel.with_local(scratch).with_syncs(phases.saturating_sub(1)))
}

fn out_prod(ctx: &mut KernelContext<'_>, tile: [usize; 2], depth: usize, phases: usize) {
    let (dst, a, b) = (ctx.dst(), ctx.src(0), ctx.src(1));
    if dst.desc().is_empty() {
        return;
    }
    let ([n, m, n2, n3], [_, _, a2, a3]) = (dst.ne(), a.ne());
    let (r2, r3) = (n2 / a2, n3 / a3);
    let (wide, high) = (n.div_ceil(tile[0]), m.div_ceil(tile[1]));
    let (sums, buffers) = ctx.take_local_scratch().split_at_mut(TILE[0] * TILE[1]);
    for phase in 0..phases {
        if phase > 0 {
            ctx.sync();
        }
        let summands = phase * DEPTH_PER_PHASE..depth.min((phase + 1) * DEPTH_PER_PHASE);
        for k in ctx.chunks(wide * high * n2 * n3, 1).flatten() {
            let (i0, j0) = (k % wide * tile[0], k / wide % high * tile[1]);
            let (i2, i3) = (k / wide / high % n2, k / wide / high / n2);
            let [columns, rows] = [tile[0].min(n - i0), tile[1].min(m - j0)];
            if phase == 0 {
                sums.fill(0.0);
            } else {
                for (j, sums) in sums.chunks_exact_mut(tile[0]).take(rows).enumerate() {
                    dst.load([i0, j0 + j, i2, i3], &mut sums[..columns]);
                }
            }
            let a = (Plane { view: a, i0, i2: i2 / r2, i3: i3 / r3 }, columns);
            let b = (Plane { view: b, i0: j0, i2, i3 }, rows);
            if tile == WIDE_TILE {
                add_to_few_rows(sums, a, b, summands.clone(), buffers);
            } else {
                add_packed(sums, a, b, summands.clone(), buffers);
            }
            for (j, sums) in sums.chunks_exact(tile[0]).take(rows).enumerate() {
                dst.store([i0, j0 + j, i2, i3], &sums[..columns]);
            }
        }
    }
}

/// The rows of a plane, from column `i0` on.
#[derive(Clone, Copy)]
struct Plane<'a> {
    view: View<'a>,
    i0: usize,
    i2: usize,
    i3: usize,
}

impl<'a> Plane<'a> {
    /// The first elements of row `k`, as many as `buffer` has.
    fn fetch<'b>(&self, k: usize, buffer: &'b mut [f32]) -> &'b [f32]
    where
        'a: 'b,
    {
        self.view.fetch([self.i0, k, self.i2, self.i3], buffer)
    }
}

/// Adds the products of the summands to a tile of [`TILE`].
fn add_packed(
    sums: &mut [f32],
    (a, columns): (Plane<'_>, usize),
    (b, rows): (Plane<'_>, usize),
    summands: Range<usize>,
    buffers: &mut [f32],
) {
    let (a_block, rest) = buffers.split_at_mut(TILE[0] * DEPTH);
    let (b_block, row) = rest.split_at_mut(TILE[1] * DEPTH);
    for first in summands.clone().step_by(DEPTH) {
        let count = DEPTH.min(summands.end - first);
        for k in 0..count {
            pack::<{ MICRO[0] }>(a_block, k, a.fetch(first + k, &mut row[..columns]));
            pack::<{ MICRO[1] }>(b_block, k, b.fetch(first + k, &mut row[..rows]));
        }
        add_tile(sums, a_block, b_block, columns, rows, count);
    }
}

/// Adds the products of the summands to a tile of [`WIDE_TILE`].
fn add_to_few_rows(
    sums: &mut [f32],
    (a, columns): (Plane<'_>, usize),
    (b, rows): (Plane<'_>, usize),
    summands: Range<usize>,
    buffers: &mut [f32],
) {
    let [a0, a1, a2, a3, ..] = buffers.as_chunks_mut::<{ WIDE_TILE[0] }>().0 else { return };
    let mut factors = [[0.0; FEW_ROWS]; UNROLL];
    let mut k = summands.start;
    while k < summands.end {
        let count = if k + UNROLL <= summands.end { UNROLL } else { 1 };
        for (k, factors) in (k..k + count).zip(&mut factors) {
            let mut values = [0.0; FEW_ROWS];
            factors[..rows].copy_from_slice(b.fetch(k, &mut values[..rows]));
        }
        let first = a.fetch(k, &mut a0[..columns]);
        if count == 1 {
            add_few_rows(sums, [first], [factors[0]], rows);
        } else {
            let [second, third] =
                [(k + 1, &mut *a1), (k + 2, &mut *a2)].map(|(k, row)| a.fetch(k, &mut row[..columns]));
            let a = [first, second, third, a.fetch(k + 3, &mut a3[..columns])];
            add_few_rows(sums, a, factors, rows);
        }
        k += count;
    }
}

multiversion! {
    /// Adds `K` summands to the rows of a tile of [`WIDE_TILE`].
    fn add_few_rows<'a, const K: usize>(
        sums: &'a mut [f32],
        a: [&'a [f32]; K],
        factors: [[f32; FEW_ROWS]; K],
        rows: usize,
    ) {
        let columns = a[0].len();
        let a = a.map(|a| &a[..columns]);
        for (j, sums) in sums.chunks_exact_mut(WIDE_TILE[0]).take(rows).enumerate() {
            let sums = &mut sums[..columns];
            for i in 0..columns {
                let mut sum = sums[i];
                for k in 0..K {
                    sum += a[k][i] * factors[k][j];
                }
                sums[i] = sum;
            }
        }
    }
}

/// Writes the values of summand `k` to a packed block: strips of `N` values for each of [`DEPTH`] summands. The last strip is
/// filled up with zeros.
fn pack<const N: usize>(block: &mut [f32], k: usize, values: &[f32]) {
    let strips = block.as_chunks_mut::<N>().0.chunks_exact_mut(DEPTH);
    for (strip, values) in strips.zip(values.chunks(N)) {
        let mut packed = [0.0; N];
        packed[..values.len()].copy_from_slice(values);
        strip[k] = packed;
    }
}

multiversion! {
    /// Adds the products of packed blocks to a tile of sums.
    fn add_tile<'a>(sums: &'a mut [f32], a: &'a [f32], b: &'a [f32], columns: usize, rows: usize, count: usize) {
        const N: usize = MICRO[0];
        const M: usize = MICRO[1];
        let a = a.as_chunks::<N>().0.chunks_exact(DEPTH);
        let b = b.as_chunks::<M>().0.chunks_exact(DEPTH);
        for (sums, b) in sums.chunks_exact_mut(TILE[0] * M).zip(b).take(rows.div_ceil(M)) {
            for (strip, a) in a.clone().take(columns.div_ceil(N)).enumerate() {
                let mut acc = [[0.0; N]; M];
                for (acc, sums) in acc.iter_mut().zip(sums.chunks_exact(TILE[0])) {
                    acc.copy_from_slice(&sums[strip * N..][..N]);
                }
                for (a, b) in a.iter().zip(b).take(count) {
                    for r in 0..M {
                        for l in 0..N {
                            acc[r][l] += a[l] * b[r];
                        }
                    }
                }
                for (acc, sums) in acc.iter().zip(sums.chunks_exact_mut(TILE[0])) {
                    sums[strip * N..][..N].copy_from_slice(acc);
                }
            }
        }
    }
}

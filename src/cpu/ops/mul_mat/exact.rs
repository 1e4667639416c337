//! Reference GEMM: f32 products accumulated in f64.

use super::rhs_groups::{Column, RhsGroups};
use crate::cpu::pool::KernelContext;

/// Rows of a in a cache block. Both packed panels of a cache block fit the L2 cache.
const ROWS: usize = 16;
/// Columns of b in a cache block.
const COLUMNS: usize = 32;
/// Most columns of b in a unit, or fewer if these would take more than [`UNIT_PRODUCTS`]. A run can only pause between two units.
const COLUMN_SPAN: usize = 4 * COLUMNS;
/// Most products of a unit of more than one column.
const UNIT_PRODUCTS: usize = 1 << 28;
/// Elements of each row and column in a cache block: a whole number of blocks of every type.
const DEPTH: usize = 512;

/// Floats of scratch for [`run`].
pub(super) const SCRATCH: usize = (ROWS + COLUMNS) * DEPTH;

/// Computes the blocks that this worker claims.
pub(super) fn run(ctx: &KernelContext<'_>, groups: &RhsGroups<'_>, scratch: &mut [f32]) {
    let (a, b, dst) = (ctx.src(0), ctx.src(1), ctx.dst());
    let [k, m, ..] = a.ne();
    let (panel_a, panel_b) = scratch.split_at_mut(ROWS * DEPTH);
    let column_span = (UNIT_PRODUCTS / (ROWS * k.max(1))).clamp(1, COLUMN_SPAN);
    let (blocks, spans) = (m.div_ceil(ROWS), groups.max_columns().div_ceil(column_span));
    let units = groups.len() * blocks * spans;
    for unit in ctx.chunks(units + groups.unrouted().len(), 1).flatten() {
        if unit >= units {
            groups.clear_unrouted(&dst, unit - units);
            continue;
        }
        let (block, start) = (unit / spans, unit % spans * column_span);
        let (group, row) = (block / blocks, block % blocks * ROWS);
        let (rows, count, [i2, i3]) = (ROWS.min(m - row), groups.count(group), groups.matrix(group));
        for first in (start..count.min(start + column_span)).step_by(COLUMNS) {
            let mut chosen = [Column::default(); COLUMNS];
            let chosen = &mut chosen[..COLUMNS.min(count - first)];
            for (c, column) in chosen.iter_mut().enumerate() {
                *column = groups.column(group, first + c);
            }
            let mut sums = [[0f64; ROWS]; COLUMNS];
            for start in (0..k).step_by(DEPTH) {
                let depth = DEPTH.min(k - start);
                for (r, x) in panel_a.chunks_exact_mut(DEPTH).take(rows).enumerate() {
                    a.load([start, row + r, i2, i3], &mut x[..depth]);
                }
                for (column, y) in chosen.iter().zip(panel_b.chunks_exact_mut(DEPTH)) {
                    let [i1, i2, i3] = column.b;
                    b.load([start, i1, i2, i3], &mut y[..depth]);
                }
                for (y, sums) in panel_b.chunks_exact(DEPTH).zip(&mut sums[..chosen.len()]) {
                    for (x, sum) in panel_a.chunks_exact(DEPTH).zip(&mut sums[..rows]) {
                        *sum += dot(&x[..depth], &y[..depth]);
                    }
                }
            }
            for (column, sums) in chosen.iter().zip(&sums) {
                let [i1, i2, i3] = column.dst;
                dst.store([row, i1, i2, i3], &sums.map(|sum| sum as f32)[..rows]);
            }
        }
    }
}

/// Dot product with independent partial sums, so that the loop vectorises.
fn dot(x: &[f32], y: &[f32]) -> f64 {
    let (xs, x) = x.as_chunks::<8>();
    let (ys, y) = y.as_chunks::<8>();
    let mut lanes = [0f64; 8];
    for (x, y) in xs.iter().zip(ys) {
        for l in 0..8 {
            lanes[l] += f64::from(x[l] * y[l]);
        }
    }
    let rest: f64 = x.iter().zip(y).map(|(&x, &y)| f64::from(x * y)).sum();
    lanes.iter().sum::<f64>() + rest
}

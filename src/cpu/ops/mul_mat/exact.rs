//! Products in f32, accumulated in f64: the reference for everything else.

use super::columns::{Column, Columns};
use crate::cpu::pool::Work;

/// Rows of a, columns and elements of either in a block: both panels stay in the second cache level.
const ROWS: usize = 16;
const COLUMNS: usize = 32;
const DEPTH: usize = 512; // a whole number of blocks of every type

/// Floats of scratch for [`run`].
pub(super) const SCRATCH: usize = (ROWS + COLUMNS) * DEPTH;

/// Computes the parts of the product that this worker gets.
pub(super) fn run(work: &Work<'_>, columns: &Columns<'_>, scratch: &mut [f32]) {
    let (a, b, dst) = (work.src(0), work.src(1), work.dst());
    let [k, m, ..] = a.ne();
    let (panel_a, panel_b) = scratch.split_at_mut(ROWS * DEPTH);
    let blocks = m.div_ceil(ROWS);
    for unit in work.chunks(columns.groups() * blocks, 1).flatten() {
        let (group, row) = (unit / blocks, unit % blocks * ROWS);
        let (rows, count, [i2, i3]) = (ROWS.min(m - row), columns.count(group), columns.matrix(group));
        for first in (0..count).step_by(COLUMNS) {
            let mut chosen = [Column::default(); COLUMNS];
            let chosen = &mut chosen[..COLUMNS.min(count - first)];
            for (c, column) in chosen.iter_mut().enumerate() {
                *column = columns.column(group, first + c);
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

/// Lanes keep the sums independent of each other, so that they vectorise.
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

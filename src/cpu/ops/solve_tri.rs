//! SOLVE_TRI: forward substitution of a group of columns at a time, which vectors run across.
//!
//! A claim solves some rows of a group. A pause is possible between claims only, so a large matrix is divided into phases of
//! rows; the rows that earlier phases have solved are read from the destination.

use super::{Kernel, unsupported_types};
use crate::cpu::pool::KernelContext;
use crate::cpu::simd::multiversion;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::tensor::DType::F32;

/// Columns of a group: four vectors of eight, because an addition waits four cycles for the one before it.
const WIDTH: usize = 32;

/// Products of a claim, unless one row has more: about half a millisecond.
const CLAIM_PRODUCTS: usize = 1 << 22;

pub(super) fn select(node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let (Some(a), F32) = (node.srcs.get(0), node.dst.dtype()) else { return Err(unsupported_types(node)) };
    let n = a.ne()[0];
    let rows_per_phase = (CLAIM_PRODUCTS / n.saturating_mul(WIDTH).max(1)).max(1);
    // The solved rows of a group, and a row of the matrix.
    let local = n.saturating_mul(WIDTH + 1);
    let cost = node.dst.elements().saturating_mul(n / 2 + 1);
    let kernel = Kernel::new(cost, move |w| solve_tri(w, rows_per_phase));
    Ok(kernel.with_local(local).with_syncs(n.div_ceil(rows_per_phase).saturating_sub(1)))
}

fn solve_tri(ctx: &mut KernelContext<'_>, rows_per_phase: usize) {
    let (dst, a, b) = (ctx.dst(), ctx.src(0), ctx.src(1));
    let [columns, n, b2, b3] = dst.ne();
    if dst.desc().is_empty() {
        return;
    }
    let (solved, matrix_row) = ctx.take_local_scratch().split_at_mut(n * WIDTH);
    let solved = solved.as_chunks_mut::<WIDTH>().0;
    let groups = columns.div_ceil(WIDTH);
    for first in (0..n).step_by(rows_per_phase) {
        if first > 0 {
            ctx.sync();
        }
        for claim in ctx.chunks(groups * b2 * b3, 1).flatten() {
            let (column, plane) = (claim % groups * WIDTH, claim / groups);
            let (i2, i3, width) = (plane % b2, plane / b2, WIDTH.min(columns - column));
            for (i, row) in solved[..first].iter_mut().enumerate() {
                row[width..].fill(0.0);
                dst.load([column, i, i2, i3], &mut row[..width]);
            }
            for i in first..n.min(first + rows_per_phase) {
                let mut right = [0.0; WIDTH];
                b.load([column, i, i2, i3], &mut right[..width]);
                let factors = a.fetch([0, i, i2, i3], &mut matrix_row[..i + 1]);
                let (before, rest) = solved.split_at_mut(i);
                rest[0] = solve_row(factors, before, right);
                dst.store([column, i, i2, i3], &rest[0][..width]);
            }
        }
    }
}

multiversion! {
    /// A row of the solution: `(right - Σ_t factors[t] before[t]) / factors[i]`, where `before` has the i rows above.
    fn solve_row<'a>(factors: &'a [f32], before: &'a [[f32; WIDTH]], right: [f32; WIDTH]) -> [f32; WIDTH] {
        let mut sums = [0.0; WIDTH];
        for (factor, row) in factors.iter().zip(before) {
            for l in 0..WIDTH {
                sums[l] += factor * row[l];
            }
        }
        let (diagonal, mut out) = (factors[before.len()], [0.0; WIDTH]);
        for l in 0..WIDTH {
            out[l] = (right[l] - sums[l]) / diagonal;
        }
        out
    }
}

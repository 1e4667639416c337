//! SUM, SUM_ROWS, MEAN with f64 accumulators; CUMSUM with an f32 accumulator, as in ggml; ARGMAX; COUNT_EQUAL.

use super::{CHUNK, Kernel, RowPieces, for_each_piece, math, rows_per_chunk, unsupported_types};
use crate::cpu::pool::KernelContext;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::reduce::Reduce;
use crate::tensor::DType::{F32, I32, I64};

/// Partial results of SUM and COUNT_EQUAL: a fixed number, so that the result does not depend on the number of workers.
const PARTS: usize = 64;

pub(super) fn select(op: Reduce, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let Some(x) = node.srcs.get(0) else { return Err(unsupported_types(node)) };
    let cost = x.elements();
    Ok(match (op, x.dtype(), node.dst.dtype()) {
        (Reduce::Sum, a, b) if a.is_float() && b.is_float() => {
            Kernel::new(cost, sum).with_shared(PARTS * size_of::<f64>()).with_syncs(1)
        }
        (Reduce::SumRows, F32, F32) => Kernel::new(cost, |w| sum_rows(w, |sum, _| sum as f32)),
        (Reduce::Cumsum, F32, F32) => {
            // Each sum waits for the one before it.
            Kernel::new(cost.saturating_mul(16), cumsum).with_parts(x.rows().div_ceil(rows_per_chunk(x, 4 * CHUNK)))
        }
        (Reduce::Mean, F32, F32) => Kernel::new(cost, |w| sum_rows(w, |sum, n| sum as f32 / n as f32)),
        (Reduce::Argmax, F32, I32) => Kernel::new(cost, argmax),
        (Reduce::CountEqual, I32, I64) if node.srcs.get(1).is_some_and(|y| y.dtype() == I32) => {
            Kernel::new(cost.saturating_mul(2), count_equal).with_shared(PARTS * size_of::<i64>()).with_syncs(1)
        }
        _ => return Err(unsupported_types(node)),
    })
}

fn sum(ctx: &mut KernelContext<'_>) {
    let (dst, src, parts) = (ctx.dst(), ctx.src(0), ctx.shared());
    let pieces = RowPieces::new(src.desc());
    let per_part = pieces.count().div_ceil(PARTS).max(1);
    let mut x = [0.0; CHUNK];
    for range in ctx.chunks(pieces.count(), per_part) {
        let part = range.start / per_part;
        let mut total = 0.0;
        for k in range {
            let (i, n) = pieces.get(k);
            src.load(i, &mut x[..n]);
            total += math::sum(&x[..n]);
        }
        parts.write(part * size_of::<f64>(), &[total]);
    }
    ctx.sync();
    for _ in ctx.chunks(1, 1) {
        let parts = parts.read::<f64>(0, pieces.count().div_ceil(per_part));
        dst.store([0; 4], &[parts.iter().sum::<f64>() as f32]);
    }
}

fn sum_rows(ctx: &mut KernelContext<'_>, finish: impl Fn(f64, usize) -> f32) {
    let (dst, src) = (ctx.dst(), ctx.src(0));
    let mut x = [0.0; CHUNK];
    for rows in ctx.chunks(src.desc().rows(), rows_per_chunk(src.desc(), 4 * CHUNK)) {
        for r in rows {
            let mut total = 0.0;
            for_each_piece(src.desc(), r..r + 1, CHUNK, |i, n| {
                src.load(i, &mut x[..n]);
                total += math::sum(&x[..n]);
            });
            let [i1, i2, i3] = dst.desc().row_index(r);
            dst.store([0, i1, i2, i3], &[finish(total, src.ne()[0])]);
        }
    }
}

fn cumsum(ctx: &mut KernelContext<'_>) {
    let (dst, src) = (ctx.dst(), ctx.src(0));
    let mut x = [0.0; CHUNK];
    for rows in ctx.chunks(src.desc().rows(), rows_per_chunk(src.desc(), 4 * CHUNK)) {
        for r in rows {
            // -0, so that a first element of -0 stays -0.
            let mut sum = -0.0;
            for_each_piece(src.desc(), r..r + 1, CHUNK, |i, n| {
                let x = &mut x[..n];
                src.load(i, x);
                for x in x.iter_mut() {
                    sum += *x;
                    *x = sum;
                }
                dst.store(i, x);
            });
        }
    }
}

fn count_equal(ctx: &mut KernelContext<'_>) {
    let (dst, x, y, parts) = (ctx.dst(), ctx.src(0), ctx.src(1), ctx.shared());
    let pieces = RowPieces::new(x.desc());
    let per_part = pieces.count().div_ceil(PARTS).max(1);
    let (mut a, mut b) = ([0; CHUNK], [0; CHUNK]);
    for range in ctx.chunks(pieces.count(), per_part) {
        let part = range.start / per_part;
        let mut equal = 0i64;
        for k in range {
            let (i, n) = pieces.get(k);
            x.indices(i, &mut a[..n]);
            y.indices(i, &mut b[..n]);
            equal += a[..n].iter().zip(&b[..n]).filter(|(a, b)| a == b).count() as i64;
        }
        parts.write(part * size_of::<i64>(), &[equal]);
    }
    ctx.sync();
    for _ in ctx.chunks(1, 1) {
        let parts = parts.read::<i64>(0, pieces.count().div_ceil(per_part));
        dst.store_raw([0; 4], &[parts.iter().sum::<i64>()]);
    }
}

fn argmax(ctx: &mut KernelContext<'_>) {
    let (dst, src) = (ctx.dst(), ctx.src(0));
    let mut x = [0.0; CHUNK];
    for rows in ctx.chunks(src.desc().rows(), rows_per_chunk(src.desc(), 4 * CHUNK)) {
        for r in rows {
            let (mut best, mut index) = (f32::NEG_INFINITY, 0);
            for_each_piece(src.desc(), r..r + 1, CHUNK, |i, n| {
                let x = &mut x[..n];
                src.load(i, x);
                // The index is searched only in the few pieces that raise the maximum.
                let max = math::max(x);
                if max >= best
                    && let Some(k) = x.iter().rposition(|&x| x == max)
                {
                    (best, index) = (max, i[0] + k);
                }
            });
            dst.set_i32([r, 0, 0, 0], index as i32);
        }
    }
}

//! SILU_BACK, RMS_NORM_BACK and SOFT_MAX_BACK by rows, with f64 sums; REPEAT_BACK and GET_ROWS_BACK with f32 sums in ggml's
//! order.

use super::rows::check_row;
use super::{CHUNK, Kernel, RowPieces, for_each_piece, math, rows_per_chunk, unsupported_types};
use crate::cpu::pool::KernelContext;
use crate::cpu::simd::multiversion;
use crate::device::Unsupported;
use crate::ops::backward::Backward;
use crate::ops::{NodeView, OpCode};
use crate::tensor::DType::{F16, F32};
use crate::tensor::TensorDesc;

/// Elements that a claim of REPEAT_BACK or GET_ROWS_BACK adds: a fraction of a millisecond.
const ELEMENTS_PER_CLAIM: usize = 1 << 18;

pub(super) fn select(op: Backward, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let dtype = |i| node.srcs.get(i).map(TensorDesc::dtype);
    let (Some(dy), dst) = (node.srcs.get(0), node.dst.dtype()) else { return Err(unsupported_types(node)) };
    let all = |of| dtype(0) == Some(of) && dtype(1) == Some(of) && dst == of;
    let by_rows = |kernel: Kernel| kernel.with_parts(dy.rows().div_ceil(rows_per_chunk(dy, 4 * CHUNK)));
    Ok(match op {
        Backward::Silu if all(F32) || all(F16) => {
            Kernel::new(dy.elements().saturating_mul(5), silu).with_local(3 * CHUNK)
        }
        Backward::RmsNorm { eps } if all(F32) => {
            by_rows(Kernel::new(dy.elements().saturating_mul(4), move |w| rms_norm(w, eps))).with_local(3 * CHUNK)
        }
        Backward::SoftMax { scale } if all(F32) => {
            by_rows(Kernel::new(dy.elements().saturating_mul(3), move |w| softmax(w, scale))).with_local(3 * CHUNK)
        }
        Backward::Repeat if dtype(0) == Some(F32) && dst == F32 => {
            let sum = RepeatSum::new(dy, node.dst);
            Kernel::new(dy.elements(), move |w| sum.run(w))
                .with_local(2 * CHUNK)
                .with_syncs(sum.phases.saturating_sub(1))
        }
        Backward::GetRows if matches!(dtype(0), Some(F32 | F16)) && dst == F32 => {
            let ids = node.srcs.get(1).map_or(0, |ids| ids.ne()[0]);
            let phases = IdRuns::new(ids, node.dst);
            let cost = dy.elements().saturating_add(node.dst.elements());
            Kernel::new(cost, move |w| phases.run(w)).with_local(2 * CHUNK).with_syncs(phases.phases())
        }
        _ => return Err(unsupported_types(node)),
    })
}

#[derive(Clone, Copy)]
enum RowGradient {
    Silu,
    /// `(dy + x factor) scale`.
    RmsNorm {
        factor: f32,
        scale: f32,
    },
    /// `(dy - dot) x scale`.
    SoftMax {
        dot: f32,
        scale: f32,
    },
}

multiversion! {
    /// The elements of one piece of a row. The formula's constants of the row are `a`, `b` and `c`.
    fn gradients<'a>(op: RowGradient, out: &'a mut [f32], dy: &'a [f32], x: &'a [f32]) {
        match op {
            RowGradient::Silu => math::zip(out, dy, x, |dy, x| {
                let s = math::sigmoid(x);
                dy * s * (1.0 + x * (1.0 - s))
            }),
            RowGradient::RmsNorm { factor, scale } => math::zip(out, dy, x, |dy, x| (x * factor + dy) * scale),
            RowGradient::SoftMax { dot, scale } => math::zip(out, dy, x, |dy, x| (dy - dot) * x * scale),
        }
    }
}

fn silu(ctx: &mut KernelContext<'_>) {
    let (dst, dy, x) = (ctx.dst(), ctx.src(0), ctx.src(1));
    let [a, b, out, ..] = ctx.take_local_scratch().as_chunks_mut::<CHUNK>().0 else { return };
    RowPieces::new(dst.desc()).share(ctx, |i, n| {
        let (dy, x, out) = (dy.fetch(i, &mut a[..n]), x.fetch(i, &mut b[..n]), &mut out[..n]);
        gradients(RowGradient::Silu, out, dy, x);
        dst.store(i, out);
    });
}

fn rms_norm(ctx: &mut KernelContext<'_>, eps: f32) {
    let n = ctx.dst().ne()[0] as f32;
    by_rows(
        ctx,
        |dy, x| [sum_of_products(x, x), sum_of_products(x, dy)],
        |[xx, x_dy]| {
            let (xx, x_dy) = (xx as f32, x_dy as f32);
            RowGradient::RmsNorm { factor: -x_dy / (xx + eps * n), scale: 1.0 / (xx / n + eps).sqrt() }
        },
    );
}

fn softmax(ctx: &mut KernelContext<'_>, scale: f32) {
    by_rows(ctx, |dy, y| [sum_of_products(y, dy), 0.0], |[dot, _]| RowGradient::SoftMax { dot: dot as f32, scale });
}

/// Two passes over each row: `sums` adds up pieces of both sources, and `gradient` gives the formula of the row. Both sources
/// are read up to the end of the row before dst, which may lie on either, is written.
fn by_rows(
    ctx: &mut KernelContext<'_>,
    sums: impl Fn(&[f32], &[f32]) -> [f64; 2],
    gradient: impl Fn([f64; 2]) -> RowGradient,
) {
    let (dst, dy, x) = (ctx.dst(), ctx.src(0), ctx.src(1));
    let [a, b, out, ..] = ctx.take_local_scratch().as_chunks_mut::<CHUNK>().0 else { return };
    let t = dst.desc();
    for rows in ctx.chunks(t.rows(), rows_per_chunk(t, 4 * CHUNK)) {
        for r in rows {
            let mut total = [0.0; 2];
            for_each_piece(t, r..r + 1, CHUNK, |i, n| {
                let part = sums(dy.fetch(i, &mut a[..n]), x.fetch(i, &mut b[..n]));
                total = [total[0] + part[0], total[1] + part[1]];
            });
            let op = gradient(total);
            for_each_piece(t, r..r + 1, CHUNK, |i, n| {
                let (dy, x, out) = (dy.fetch(i, &mut a[..n]), x.fetch(i, &mut b[..n]), &mut out[..n]);
                gradients(op, out, dy, x);
                dst.store(i, out);
            });
        }
    }
}

multiversion! {
    /// Sum in f64 of the f32 products `x y`.
    fn sum_of_products<'a>(x: &'a [f32], y: &'a [f32]) -> f64 {
        let (mut total, mut products) = (0.0, [0.0; CHUNK]);
        for (x, y) in x.chunks(CHUNK).zip(y.chunks(CHUNK)) {
            let products = &mut products[..x.len()];
            math::zip(products, x, y, |x, y| x * y);
            total += math::total_of(products);
        }
        total
    }
}

/// The sums of REPEAT_BACK. A claim adds a bounded number of copies to one piece of dst, since a small dst may be the sum of
/// any number of copies; after each phase the partial sums lie in dst.
#[derive(Clone, Copy)]
struct RepeatSum {
    /// Copies of dst in the gradient, per dimension.
    copies: [usize; 4],
    per_phase: usize,
    phases: usize,
}

impl RepeatSum {
    fn new(dy: &TensorDesc, dst: &TensorDesc) -> RepeatSum {
        let (n, m) = (dy.ne(), dst.ne());
        let copies = [0, 1, 2, 3].map(|d| n[d] / m[d].max(1));
        let total = copies.iter().product::<usize>();
        let per_phase = (ELEMENTS_PER_CLAIM / m[0].clamp(1, CHUNK)).max(1);
        RepeatSum { copies, per_phase, phases: total.div_ceil(per_phase) }
    }

    fn run(self, ctx: &mut KernelContext<'_>) {
        let (dst, dy) = (ctx.dst(), ctx.src(0));
        let (ne, [c0, c1, c2, _]) = (dst.ne(), self.copies);
        let total = self.copies.iter().product::<usize>();
        let [buffer, sum, ..] = ctx.take_local_scratch().as_chunks_mut::<CHUNK>().0 else { return };
        let pieces = RowPieces::new(dst.desc());
        // Short rows are read several at a time: copies along dimension 0 follow each other in memory.
        let together = if ne[0] <= CHUNK { CHUNK / ne[0].max(1) } else { 1 };
        let grain = (4 * CHUNK / ne[0].clamp(1, CHUNK) / self.per_phase.min(total).max(1)).max(1);
        for phase in 0..self.phases {
            if phase > 0 {
                ctx.sync();
            }
            let end = total.min((phase + 1) * self.per_phase);
            for claim in ctx.chunks(pieces.count(), grain) {
                for (i, n) in claim.map(|k| pieces.get(k)) {
                    let sum = &mut sum[..n];
                    if phase == 0 {
                        sum.fill(0.0)
                    } else {
                        dst.load(i, sum)
                    }
                    let mut copy = phase * self.per_phase;
                    while copy < end {
                        let (k0, k1) = (copy % c0, copy / c0 % c1);
                        let (k2, k3) = (copy / c0 / c1 % c2, copy / c0 / c1 / c2);
                        let count = together.min(c0 - k0).min(end - copy);
                        let from = [k0 * ne[0] + i[0], k1 * ne[1] + i[1], k2 * ne[2] + i[2], k3 * ne[3] + i[3]];
                        for part in dy.fetch(from, &mut buffer[..count * n]).chunks_exact(n) {
                            sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
                        }
                        copy += count;
                    }
                    dst.store(i, sum);
                }
            }
        }
    }
}

/// The sums of GET_ROWS_BACK. Workers divide the columns, so that each adds the rows of one id in order. A long list of ids is
/// divided into phases, between which a run can pause.
#[derive(Clone, Copy)]
struct IdRuns {
    ids: usize,
    per_phase: usize,
    /// Columns of a claim.
    columns: usize,
}

impl IdRuns {
    fn new(ids: usize, dst: &TensorDesc) -> IdRuns {
        // A claim reads each id once, so few columns are not worth a claim.
        let columns = dst.ne()[0].div_ceil(8).clamp(64, CHUNK);
        IdRuns { ids, per_phase: ELEMENTS_PER_CLAIM / columns, columns }
    }

    fn phases(self) -> usize {
        self.ids.div_ceil(self.per_phase)
    }

    fn run(self, ctx: &mut KernelContext<'_>) {
        let (dst, dy, ids) = (ctx.dst(), ctx.src(0), ctx.src(1));
        let [n, rows, ..] = dst.ne();
        let [row, sum, ..] = ctx.take_local_scratch().as_chunks_mut::<CHUNK>().0 else { return };
        sum.fill(0.0);
        RowPieces::new(dst.desc()).share(ctx, |i, n| dst.store(i, &sum[..n]));
        for phase in 0..self.phases() {
            ctx.sync();
            let part = phase * self.per_phase..self.ids.min((phase + 1) * self.per_phase);
            for claim in ctx.chunks(n.div_ceil(self.columns), 1).flatten() {
                let i0 = claim * self.columns;
                let len = self.columns.min(n - i0);
                for k in part.clone() {
                    let to = match check_row(OpCode::GetRowsBack, ids.index([k, 0, 0, 0]), rows) {
                        Ok(to) => [i0, to, 0, 0],
                        Err(error) => return ctx.fail(error),
                    };
                    let sum = &mut sum[..len];
                    dst.load(to, sum);
                    let row = dy.fetch([i0, k, 0, 0], &mut row[..len]);
                    sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
                    dst.store(to, sum);
                }
            }
        }
    }
}

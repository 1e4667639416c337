//! CROSS_ENTROPY_LOSS with f64 sums, its gradient, and the steps of AdamW and SGD.

use super::{CHUNK, Kernel, RowPieces, for_each_piece, math, rows_per_chunk, unsupported_types};
use crate::cpu::memory::View;
use crate::cpu::pool::KernelContext;
use crate::cpu::simd::multiversion;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::training::Training;
use crate::tensor::DType::F32;

/// Partial sums of the loss: a fixed number, so that the result does not depend on the number of workers.
const PARTS: usize = 256;

pub(super) fn select(op: Training, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let types = (0..5).filter_map(|i| node.srcs.get(i)).chain([node.dst]).all(|t| t.dtype() == F32);
    let Some(x) = node.srcs.get(usize::from(op == Training::CrossEntropyLossBack)).filter(|_| types) else {
        return Err(unsupported_types(node));
    };
    let (elements, parts) = (x.elements(), x.rows().div_ceil(rows_per_chunk(x, 4 * CHUNK)));
    Ok(match op {
        Training::CrossEntropyLoss => Kernel::new(elements.saturating_mul(6), loss)
            .with_local(3 * CHUNK)
            .with_shared(PARTS * size_of::<f64>())
            .with_syncs(1)
            .with_parts(x.rows()),
        Training::CrossEntropyLossBack => {
            Kernel::new(elements.saturating_mul(9), loss_gradient).with_local(3 * CHUNK).with_parts(parts)
        }
        Training::OptStepAdamw => Kernel::new(elements.saturating_mul(4), adamw_step).with_local(5 * CHUNK),
        Training::OptStepSgd => Kernel::new(elements.saturating_mul(2), sgd_step).with_local(3 * CHUNK),
    })
}

/// The maximum of row `r`, and the sum of `e^(x - max)` over it.
fn max_and_sum(x: &View<'_>, r: usize, buffer: &mut [f32], copy: &mut [f32]) -> (f32, f64) {
    let (mut top, mut sum) = (f32::NEG_INFINITY, 0.0);
    for_each_piece(x.desc(), r..r + 1, CHUNK, |i, n| top = top.max(math::max(x.fetch(i, &mut buffer[..n]))));
    for_each_piece(x.desc(), r..r + 1, CHUNK, |i, n| {
        let copy = &mut copy[..n];
        x.load(i, copy);
        sum += math::exp_sum(copy, top);
    });
    (top, sum)
}

fn loss(ctx: &mut KernelContext<'_>) {
    let (dst, x, t, parts) = (ctx.dst(), ctx.src(0), ctx.src(1), ctx.shared());
    let [a, b, out, ..] = ctx.take_local_scratch().as_chunks_mut::<CHUNK>().0 else { return };
    let rows = x.desc().rows();
    let per_part = rows.div_ceil(PARTS).max(1);
    for range in ctx.chunks(rows, per_part) {
        let (part, mut total) = (range.start / per_part, 0.0);
        for r in range {
            let (top, sum) = max_and_sum(&x, r, a, out);
            let log_sum = sum.ln() as f32;
            for_each_piece(x.desc(), r..r + 1, CHUNK, |i, n| {
                let (x, t, out) = (x.fetch(i, &mut a[..n]), t.fetch(i, &mut b[..n]), &mut out[..n]);
                loss_terms(out, x, t, top, log_sum);
                total += math::sum(out);
            });
        }
        parts.write(part * size_of::<f64>(), &[total]);
    }
    ctx.sync();
    for _ in ctx.chunks(1, 1) {
        let parts = parts.read::<f64>(0, rows.div_ceil(per_part));
        dst.store([0; 4], &[(-parts.iter().sum::<f64>() / rows as f64) as f32]);
    }
}

multiversion! {
    /// `out = t (x - top - log_sum)`.
    fn loss_terms<'a>(out: &'a mut [f32], x: &'a [f32], t: &'a [f32], top: f32, log_sum: f32) {
        math::zip(out, x, t, |x, t| t * (x - top - log_sum));
    }
}

fn loss_gradient(ctx: &mut KernelContext<'_>) {
    let (dst, x, t) = (ctx.dst(), ctx.src(1), ctx.src(2));
    let [a, b, out, ..] = ctx.take_local_scratch().as_chunks_mut::<CHUNK>().0 else { return };
    let mut g = [0.0];
    ctx.src(0).load([0; 4], &mut g);
    let rows = dst.desc().rows();
    let factor = g[0] / rows as f32;
    for range in ctx.chunks(rows, rows_per_chunk(dst.desc(), 4 * CHUNK)) {
        for r in range {
            let (top, sum) = max_and_sum(&x, r, a, out);
            let scale = (1.0 / sum) as f32;
            for_each_piece(dst.desc(), r..r + 1, CHUNK, |i, n| {
                let (x, t, out) = (x.fetch(i, &mut a[..n]), t.fetch(i, &mut b[..n]), &mut out[..n]);
                gradient_terms(out, x, t, top, scale, factor);
                dst.store(i, out);
            });
        }
    }
}

multiversion! {
    /// `out = (e^(x - top) scale - t) factor`.
    fn gradient_terms<'a>(out: &'a mut [f32], x: &'a [f32], t: &'a [f32], top: f32, scale: f32, factor: f32) {
        math::zip(out, x, t, |x, t| (math::exp(x - top) * scale - t) * factor);
    }
}

fn adamw_step(ctx: &mut KernelContext<'_>) {
    let (dst, w, g, m, v) = (ctx.dst(), ctx.src(0), ctx.src(1), ctx.src(2), ctx.src(3));
    let [a, b, moment, variance, out, ..] = ctx.take_local_scratch().as_chunks_mut::<CHUNK>().0 else { return };
    let constants = constants::<7>(&ctx.src(4));
    RowPieces::new(dst.desc()).share(ctx, |i, n| {
        let (moment, variance, out) = (&mut moment[..n], &mut variance[..n], &mut out[..n]);
        m.load(i, moment);
        v.load(i, variance);
        let (w, g) = (w.fetch(i, &mut a[..n]), g.fetch(i, &mut b[..n]));
        adamw_terms(out, w, g, moment, variance, constants);
        m.store(i, moment);
        v.store(i, variance);
        dst.store(i, out);
    });
}

/// The numbers of a vector with `N` elements, however many dimensions it has.
fn constants<const N: usize>(t: &View<'_>) -> [f32; N] {
    let mut values = [0.0; N];
    let pieces = RowPieces::new(t.desc());
    let mut rest = &mut values[..];
    for k in 0..pieces.count() {
        let (i, n) = pieces.get(k);
        let (row, behind) = rest.split_at_mut(n);
        t.load(i, row);
        rest = behind;
    }
    values
}

multiversion! {
    fn adamw_terms<'a>(
        out: &'a mut [f32],
        w: &'a [f32],
        g: &'a [f32],
        moment: &'a mut [f32],
        variance: &'a mut [f32],
        constants: [f32; 7],
    ) {
        let [alpha, beta1, beta2, eps, decay, beta1_correction, beta2_correction] = constants;
        let keep = 1.0 - alpha * decay;
        let sources = w.iter().zip(g).zip(moment).zip(variance);
        for (out, (((w, g), m), v)) in out.iter_mut().zip(sources) {
            *m = *m * beta1 + g * (1.0 - beta1);
            *v = *v * beta2 + g * g * (1.0 - beta2);
            *out = w * keep - alpha * (*m * beta1_correction) / ((*v * beta2_correction).sqrt() + eps);
        }
    }
}

fn sgd_step(ctx: &mut KernelContext<'_>) {
    let (dst, w, g) = (ctx.dst(), ctx.src(0), ctx.src(1));
    let [a, b, out, ..] = ctx.take_local_scratch().as_chunks_mut::<CHUNK>().0 else { return };
    let [alpha, decay] = constants::<2>(&ctx.src(2));
    RowPieces::new(dst.desc()).share(ctx, |i, n| {
        let (w, g, out) = (w.fetch(i, &mut a[..n]), g.fetch(i, &mut b[..n]), &mut out[..n]);
        sgd_terms(out, w, g, 1.0 - alpha * decay, alpha);
        dst.store(i, out);
    });
}

multiversion! {
    fn sgd_terms<'a>(out: &'a mut [f32], w: &'a [f32], g: &'a [f32], keep: f32, alpha: f32) {
        math::zip(out, w, g, |w, g| w * keep - alpha * g);
    }
}

//! SOFT_MAX: three passes over each row. Rows up to [`MAX_BUFFERED_ROW`] stay in scratch between the passes, longer rows in
//! the destination.

use super::norm::MAX_BUFFERED_ROW;
use super::{CHUNK, Kernel, alibi_slope, for_each_piece, math, rows_per_chunk, unsupported_types};
use crate::cpu::pool::KernelContext;
use crate::cpu::simd::multiversion;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::softmax::SoftMax;
use crate::tensor::DType::F32;

pub(super) fn select(op: SoftMax, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    if node.dst.dtype() != F32 || node.srcs.get(0).is_some_and(|x| x.dtype() != F32) {
        return Err(unsupported_types(node));
    }
    let local = 3 * node.dst.ne()[0].min(MAX_BUFFERED_ROW);
    let parts = node.dst.rows().div_ceil(rows_per_chunk(node.dst, 4 * CHUNK));
    let kernel = Kernel::new(node.dst.elements().saturating_mul(4), move |w| softmax(w, op));
    Ok(kernel.with_local(local).with_parts(parts))
}

fn softmax(ctx: &mut KernelContext<'_>, op: SoftMax) {
    let (dst, x, mask) = (ctx.dst(), ctx.src(0), ctx.optional_src(1));
    let (t, heads, [n, ..]) = (dst.desc(), dst.ne()[2], dst.ne());
    let local = ctx.take_local_scratch();
    let (z, rest) = local.split_at_mut(n.min(MAX_BUFFERED_ROW));
    let (x_buffer, mask_buffer) = rest.split_at_mut(n.min(MAX_BUFFERED_ROW));
    let (piece, row_fits) = (z.len(), z.len() == n);
    for rows in ctx.chunks(t.rows(), rows_per_chunk(t, 4 * CHUNK)) {
        for r in rows {
            let h = t.row_index(r)[1];
            let slope = alibi_slope(op.max_bias, heads, h);
            let sink = ctx.optional_src(2).map(|sinks| {
                let mut sink = [0.0];
                sinks.load([h, 0, 0, 0], &mut sink);
                sink[0]
            });
            // Pass 1, logits. Each piece of x and of the mask is read before dst is written there, since dst may lie on
            // either. The masked tail of a row (most of a prompt's first rows) becomes 0 and is skipped by the later passes.
            let (mut top, mut end) = (sink.unwrap_or(f32::NEG_INFINITY), 0);
            for_each_piece(t, r..r + 1, piece, |i, n| {
                let mask = mask.as_ref().map(|mask| {
                    let ne = mask.ne();
                    mask.fetch([i[0], i[1], i[2] % ne[2], i[3] % ne[3]], &mut mask_buffer[..n])
                });
                let shown = mask.map_or(n, math::unmasked);
                if shown > 0 {
                    let (z, x) = (&mut z[..shown], x.fetch(i, &mut x_buffer[..shown]));
                    let mask = mask.map(|mask| &mask[..shown]);
                    top = top.max(logits_of(z, x, mask, op.scale, slope));
                    end = i[0] + shown;
                }
                z[shown..n].fill(f32::NEG_INFINITY);
                if !row_fits {
                    dst.store(i, &z[..n]);
                }
            });
            // A completely masked row has no sum to divide by: it becomes NaN, as on the other devices.
            let end = if end == 0 { n } else { end };
            // Pass 2, exponentials and their sum.
            let mut sum = sink.map_or(0.0, |sink| f64::from(math::exp(sink - top)));
            for_each_piece(t, r..r + 1, piece, |i, n| {
                let z = &mut z[..n.min(end.saturating_sub(i[0]))];
                if !row_fits {
                    dst.load(i, z);
                }
                sum += math::exp_sum(z, top);
                if !row_fits {
                    dst.store(i, z);
                }
            });
            // Pass 3, division by the sum.
            let factor = (1.0 / sum) as f32;
            for_each_piece(t, r..r + 1, piece, |i, n| {
                let shown = n.min(end.saturating_sub(i[0]));
                if !row_fits {
                    dst.load(i, &mut z[..shown]);
                }
                math::scale(&mut z[..shown], factor);
                z[shown..n].fill(0.0);
                dst.store(i, &z[..n]);
            });
        }
    }
}

multiversion! {
    /// `z = x scale + slope mask`, and the maximum of z.
    fn logits_of<'a>(z: &'a mut [f32], x: &'a [f32], mask: Option<&'a [f32]>, scale: f32, slope: f32) -> f32 {
        match mask {
            Some(mask) => math::zip(z, x, mask, |x, m| x * scale + slope * m),
            None => math::zip(z, x, x, |x, _| x * scale),
        }
        math::largest(z)
    }
}

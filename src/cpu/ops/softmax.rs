//! SOFT_MAX: three passes over each row, which is kept between them, or lies in the destination when it is too long.

use super::norm::KEPT;
use super::{CHUNK, Kernel, alibi_slope, math, pieces, rows_of, types};
use crate::cpu::pool::Work;
use crate::cpu::simd::{Level, Wide, widest};
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::softmax::SoftMax;
use crate::tensor::DType::F32;

pub(super) fn select(op: SoftMax, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    if node.dst.dtype() != F32 || node.srcs.get(0).is_some_and(|x| x.dtype() != F32) {
        return Err(types(node));
    }
    let local = 3 * node.dst.ne()[0].min(KEPT);
    let parts = node.dst.rows().div_ceil(rows_of(node.dst, 4 * CHUNK));
    let kernel = Kernel::new(node.dst.elements().saturating_mul(4), move |w| softmax(w, op));
    Ok(kernel.with_local(local).with_parts(parts))
}

fn softmax(work: &mut Work<'_>, op: SoftMax) {
    let (dst, x, mask) = (work.dst(), work.src(0), work.optional(1));
    let (t, heads, [n, ..]) = (dst.desc(), dst.ne()[2], dst.ne());
    let local = work.take_local();
    let (z, rest) = local.split_at_mut(n.min(KEPT));
    let (x_buffer, mask_buffer) = rest.split_at_mut(n.min(KEPT));
    let (piece, whole) = (z.len(), z.len() == n);
    for rows in work.chunks(t.rows(), rows_of(t, 4 * CHUNK)) {
        for r in rows {
            let h = t.row_index(r)[1];
            let slope = alibi_slope(op.max_bias, heads, h);
            let sink = work.optional(2).map(|sinks| {
                let mut sink = [0.0];
                sinks.load([h, 0, 0, 0], &mut sink);
                sink[0]
            });
            // Logits. Each piece of x and of the mask is read before dst, which may lie on either, is written there. What the
            // mask hides at the end of a row (most of a prompt's first rows) ends as 0 and is not looked at again.
            let (mut top, mut end) = (sink.unwrap_or(f32::NEG_INFINITY), 0);
            pieces(t, r..r + 1, piece, |i, n| {
                let mask = mask.as_ref().map(|mask| {
                    let ne = mask.ne();
                    mask.fetch([i[0], i[1], i[2] % ne[2], i[3] % ne[3]], &mut mask_buffer[..n])
                });
                let shown = mask.map_or(n, math::unmasked);
                if shown > 0 {
                    let (z, x) = (&mut z[..shown], x.fetch(i, &mut x_buffer[..shown]));
                    let mask = mask.map(|mask| &mask[..shown]);
                    top = top.max(widest(Logits { z, x, mask, scale: op.scale, slope }));
                    end = i[0] + shown;
                }
                z[shown..n].fill(f32::NEG_INFINITY);
                if !whole {
                    dst.store(i, &z[..n]);
                }
            });
            // Where all is hidden there is nothing to divide by: NaN, as elsewhere.
            let end = if end == 0 { n } else { end };
            let mut sum = sink.map_or(0.0, |sink| f64::from(math::exp(sink - top)));
            pieces(t, r..r + 1, piece, |i, n| {
                let z = &mut z[..n.min(end.saturating_sub(i[0]))];
                if !whole {
                    dst.load(i, z);
                }
                sum += math::exp_sum(z, top);
                if !whole {
                    dst.store(i, z);
                }
            });
            let factor = (1.0 / sum) as f32;
            pieces(t, r..r + 1, piece, |i, n| {
                let shown = n.min(end.saturating_sub(i[0]));
                if !whole {
                    dst.load(i, &mut z[..shown]);
                }
                math::scale(&mut z[..shown], factor);
                z[shown..n].fill(0.0);
                dst.store(i, &z[..n]);
            });
        }
    }
}

/// `z = x scale + slope mask`, and the largest of them.
struct Logits<'a> {
    z: &'a mut [f32],
    x: &'a [f32],
    mask: Option<&'a [f32]>,
    scale: f32,
    slope: f32,
}

impl Wide for Logits<'_> {
    type Out = f32;

    #[inline(always)]
    fn run<L: Level>(self) -> f32 {
        let Logits { z, x, mask, scale, slope } = self;
        match mask {
            Some(mask) => math::zip(z, x, mask, |x, m| x * scale + slope * m),
            None => math::zip(z, x, x, |x, _| x * scale),
        }
        math::largest(z)
    }
}

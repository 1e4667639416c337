//! SOFT_MAX: three passes over each row, with the destination as the place of what lies between them.

use super::{CHUNK, Kernel, alibi_slope, math, pieces, rows_of, types};
use crate::cpu::pool::Work;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::softmax::SoftMax;
use crate::tensor::DType::F32;

pub(super) fn select(op: SoftMax, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    if node.dst.dtype() != F32 || node.srcs.get(0).is_some_and(|x| x.dtype() != F32) {
        return Err(types(node));
    }
    Ok(Kernel::new(node.dst.elements().saturating_mul(4), move |w| softmax(w, op)))
}

fn softmax(work: &mut Work<'_>, op: SoftMax) {
    let (dst, x, mask) = (work.dst(), work.src(0), work.optional(1));
    let (t, heads) = (dst.desc(), dst.ne()[2]);
    let (mut z, mut m) = ([0.0; CHUNK], [0.0; CHUNK]);
    for rows in work.chunks(t.rows(), rows_of(t, 4 * CHUNK)) {
        for r in rows {
            let h = t.row_index(r)[1];
            let slope = alibi_slope(op.max_bias, heads, h);
            let sink = work.optional(2).map(|sinks| {
                let mut sink = [0.0];
                sinks.load([h, 0, 0, 0], &mut sink);
                sink[0]
            });
            // Logits. Each piece of x and of the mask is read before dst, which may lie on either, is written there.
            let mut top = sink.unwrap_or(f32::NEG_INFINITY);
            pieces(t, r..r + 1, CHUNK, |i, n| {
                let z = &mut z[..n];
                x.load(i, z);
                if let Some(mask) = mask {
                    let (m, ne) = (&mut m[..n], mask.ne());
                    mask.load([i[0], i[1], i[2] % ne[2], i[3] % ne[3]], m);
                    for (z, m) in z.iter_mut().zip(m) {
                        *z = *z * op.scale + slope * *m;
                    }
                } else {
                    for z in z.iter_mut() {
                        *z *= op.scale;
                    }
                }
                top = top.max(math::max(z));
                dst.store(i, z);
            });
            let mut sum = sink.map_or(0.0, |sink| f64::from(math::exp(sink - top)));
            pieces(t, r..r + 1, CHUNK, |i, n| {
                let z = &mut z[..n];
                dst.load(i, z);
                sum += math::exp_sum(z, top);
                dst.store(i, z);
            });
            let factor = (1.0 / sum) as f32;
            pieces(t, r..r + 1, CHUNK, |i, n| {
                let z = &mut z[..n];
                dst.load(i, z);
                for z in z.iter_mut() {
                    *z *= factor;
                }
                dst.store(i, z);
            });
        }
    }
}

//! ARANGE and TIMESTEP_EMBEDDING.

use super::{CHUNK, Kernel, RowPieces, math, unsupported_types};
use crate::cpu::pool::KernelContext;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::sequence::Sequence;
use crate::tensor::DType::F32;

/// Cost of an element of a timestep embedding: an exponential, a cosine and a sine for two of them.
const WAVE_COST: usize = 16;

pub(super) fn select(op: Sequence, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let n = node.dst.elements();
    if node.dst.dtype() != F32 || node.srcs.get(0).is_some_and(|t| t.dtype() != F32) {
        return Err(unsupported_types(node));
    }
    Ok(match op {
        Sequence::Arange { start, step, .. } => Kernel::new(n, move |w| arange(w, start, step)).with_local(CHUNK),
        Sequence::TimestepEmbedding { max_period, .. } => {
            Kernel::new(n.saturating_mul(WAVE_COST), move |w| timestep_embedding(w, max_period)).with_local(3 * CHUNK)
        }
    })
}

fn arange(ctx: &mut KernelContext<'_>, start: f32, step: f32) {
    let (dst, values) = (ctx.dst(), ctx.take_local_scratch());
    RowPieces::new(dst.desc()).share(ctx, |i, n| {
        for (k, value) in values[..n].iter_mut().enumerate() {
            *value = start + step * (i[0] + k) as f32;
        }
        dst.store(i, &values[..n]);
    });
}

fn timestep_embedding(ctx: &mut KernelContext<'_>, max_period: i32) {
    let (dst, timesteps) = (ctx.dst(), ctx.src(0));
    let [angles, cos, sin, ..] = ctx.take_local_scratch().as_chunks_mut::<CHUNK>().0 else { return };
    let [dim, count, ..] = dst.ne();
    let (half, exponent) = (dim / 2, -(max_period as f32).ln());
    let pieces = half.div_ceil(CHUNK).max(1);
    for range in ctx.chunks(count * pieces, CHUNK / half.clamp(1, CHUNK)) {
        for (r, piece) in range.map(|k| (k / pieces, k % pieces)) {
            let mut t = [0.0];
            timesteps.load([r, 0, 0, 0], &mut t);
            let (first, last) = (piece * CHUNK, half.min((piece + 1) * CHUNK));
            let n = last - first;
            for (j, angle) in (first..last).zip(&mut *angles) {
                // In ggml's order of operations.
                *angle = t[0] * (exponent * j as f32 / half as f32).exp();
            }
            math::cos_sin(&angles[..n], 1.0, &mut cos[..n], &mut sin[..n]);
            dst.store([first, r, 0, 0], &cos[..n]);
            dst.store([first + half, r, 0, 0], &sin[..n]);
            if dim % 2 == 1 && piece == 0 {
                dst.store([dim - 1, r, 0, 0], &[0.0]);
            }
        }
    }
}

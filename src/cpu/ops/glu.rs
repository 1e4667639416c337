//! GLU: gated linear units of one or two sources, computed in f32.

use super::{CHUNK, Kernel, RowPieces, math, unsupported_types};
use crate::cpu::pool::KernelContext;
use crate::cpu::simd::multiversion;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::glu::{Glu, GluKind};

pub(super) fn select(op: Glu, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let float = |i| node.srcs.get(i).is_none_or(|s| s.dtype().is_float());
    if !(float(0) && float(1) && node.dst.dtype().is_float()) {
        return Err(unsupported_types(node));
    }
    // An exponential costs about four times a load and a store.
    let cost = if op.kind == GluKind::Reglu { 1 } else { 4 };
    let kernel = Kernel::new(node.dst.elements().saturating_mul(cost), move |w| glu(w, op));
    Ok(kernel.with_local(3 * CHUNK))
}

multiversion! {
    /// The gated unit on two rows.
    fn gate<'a>(kind: GluKind, out: &'a mut [f32], x: &'a [f32], g: &'a [f32]) {
        match kind {
            GluKind::Reglu => math::zip(out, x, g, |x, g| if x > 0.0 { x * g } else { 0.0 }),
            GluKind::Geglu => math::zip(out, x, g, |x, g| math::gelu(x) * g),
            GluKind::Swiglu => math::zip(out, x, g, |x, g| math::silu(x) * g),
            GluKind::SwigluOai { alpha, limit } => math::zip(out, x, g, |x, g| {
                let x = clamp_above(x, limit);
                x / (1.0 + math::exp(-alpha * x)) * (clamp_both(g, limit) + 1.0)
            }),
            GluKind::GegluErf => math::zip(out, x, g, |x, g| math::gelu_erf(x) * g),
            GluKind::GegluQuick => math::zip(out, x, g, |x, g| math::gelu_quick(x) * g),
            GluKind::SwigluClamp { limit } => {
                math::zip(out, x, g, |x, g| math::silu(clamp_above(x, limit)) * clamp_both(g, limit));
            }
        }
    }
}

/// `min(x, limit)`, NaN for NaN.
#[inline(always)]
fn clamp_above(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}

/// `x` clamped to ±limit, NaN for NaN. (`f32::clamp` panics for a negative limit.)
#[inline(always)]
fn clamp_both(x: f32, limit: f32) -> f32 {
    let x = clamp_above(x, limit);
    if x < -limit { -limit } else { x }
}

fn glu(ctx: &mut KernelContext<'_>, op: Glu) {
    let (dst, a) = (ctx.dst(), ctx.src(0));
    let half = dst.ne()[0];
    let (b, x_at, g_at) = match ctx.optional_src(1) {
        Some(b) => (b, 0, 0),
        None if op.swapped => (a, half, 0),
        None => (a, 0, half),
    };
    let [x, g, out, ..] = ctx.take_local_scratch().as_chunks_mut::<CHUNK>().0 else { return };
    RowPieces::new(dst.desc()).share(ctx, |i, n| {
        let x = a.fetch([i[0] + x_at, i[1], i[2], i[3]], &mut x[..n]);
        let g = b.fetch([i[0] + g_at, i[1], i[2], i[3]], &mut g[..n]);
        let out = &mut out[..n];
        gate(op.kind, out, x, g);
        dst.store(i, out);
    });
}

//! GLU: gated units of one or two sources, computed in f32.

use super::{CHUNK, Kernel, Pieces, is_float, math, types};
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::glu::{Glu, Kind};

pub(super) fn select(op: Glu, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let float = |i| node.srcs.get(i).is_none_or(|s| is_float(s.dtype()));
    if !(float(0) && float(1) && is_float(node.dst.dtype())) {
        return Err(types(node));
    }
    let (n, swapped) = (node.dst.elements(), op.swapped);
    // An exponential costs about four times a load and a store.
    let e = n * 4;
    Ok(match op.kind {
        Kind::Reglu => gate(n, swapped, |x, g| if x > 0.0 { x * g } else { 0.0 }),
        Kind::Geglu => gate(e, swapped, |x, g| math::gelu(x) * g),
        Kind::Swiglu => gate(e, swapped, |x, g| math::silu(x) * g),
        Kind::SwigluOai { alpha, limit } => gate(e, swapped, move |x, g| {
            let x = below(x, limit);
            x / (1.0 + math::exp(-alpha * x)) * (within(g, limit) + 1.0)
        }),
        Kind::GegluErf => gate(e, swapped, |x, g| math::gelu_erf(x) * g),
        Kind::GegluQuick => gate(e, swapped, |x, g| math::gelu_quick(x) * g),
        Kind::SwigluClamp { limit } => gate(e, swapped, move |x, g| math::silu(below(x, limit)) * within(g, limit)),
    })
}

/// `min(x, limit)`, NaN for NaN.
#[inline(always)]
fn below(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}

/// `x` clamped to ±limit, NaN for NaN. (`f32::clamp` panics for a negative limit.)
#[inline(always)]
fn within(x: f32, limit: f32) -> f32 {
    let x = below(x, limit);
    if x < -limit { -limit } else { x }
}

fn gate(cost: usize, swapped: bool, f: impl Fn(f32, f32) -> f32 + Send + Sync + 'static) -> Kernel {
    Kernel::new(cost, move |work| {
        let (dst, a) = (work.dst(), work.src(0));
        let half = dst.ne()[0];
        let (b, x_at, g_at) = match work.optional(1) {
            Some(b) => (b, 0, 0),
            None if swapped => (a, half, 0),
            None => (a, 0, half),
        };
        let (mut x, mut g) = ([0.0; CHUNK], [0.0; CHUNK]);
        Pieces::of(dst.desc()).share(work, |i, n| {
            let (x, g) = (&mut x[..n], &mut g[..n]);
            a.load([i[0] + x_at, i[1], i[2], i[3]], x);
            b.load([i[0] + g_at, i[1], i[2], i[3]], g);
            for (x, g) in x.iter_mut().zip(g.iter()) {
                *x = f(*x, *g);
            }
            dst.store(i, x);
        });
    })
}

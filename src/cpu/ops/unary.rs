//! SQR, SQRT, LOG, SIN, COS, SCALE, CLAMP, LEAKY_RELU, FILL and the kinds of UNARY, computed in f32.

use super::{CHUNK, Kernel, RowPieces, math, unsupported_types};
use crate::cpu::pool::KernelContext;
use crate::cpu::simd::multiversion;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::unary::{Unary, UnaryKind};

pub(super) fn select(op: Unary, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let (Some(x), dst) = (node.srcs.get(0), node.dst) else { return Err(unsupported_types(node)) };
    // ggml's table lists fewer pairs (mostly equal types). The other pairs of float types need no extra code here.
    if !(x.dtype().is_float() && dst.dtype().is_float()) {
        return Err(unsupported_types(node));
    }
    let n = dst.elements();
    Ok(match op {
        Unary::Fill { value } => Kernel::new(n, move |w| fill(w, value)),
        _ => Kernel::new(n.saturating_mul(cost(op)), move |w| map(w, op)).with_local(CHUNK),
    })
}

/// Cost per element, relative to a load and a store.
fn cost(op: Unary) -> usize {
    use UnaryKind::{Elu, Exp, Expm1, Gelu, GeluErf, GeluQuick, Sigmoid, Silu, Softplus, Tanh, Xielu};
    match op {
        Unary::Kind(Tanh | Elu | Sigmoid | Gelu | GeluQuick | Silu | Exp | Expm1 | Softplus | GeluErf) => 4,
        Unary::Kind(Xielu { .. }) | Unary::Log | Unary::Sin | Unary::Cos => 4,
        _ => 1,
    }
}

multiversion! {
    /// The op on one row, in place.
    fn apply<'a>(op: Unary, x: &'a mut [f32]) {
        // 0 for NaN, as in ggml.
        let hard_sigmoid = |x: f32| if x > -3.0 { ((x + 3.0) / 6.0).min(1.0) } else { 0.0 };
        let kind = match op {
            Unary::Sqr => return math::update(x, |x| x * x),
            Unary::Sqrt => return math::update(x, f32::sqrt),
            Unary::Log => return math::update(x, math::ln),
            Unary::Sin => return math::sin(x),
            Unary::Cos => return math::cos(x),
            Unary::LeakyRelu { slope } => {
                // ggml's sum, in which a NaN is neither above nor below 0.
                return math::update(x, |x| {
                    let (above, below) = (if x > 0.0 { x } else { 0.0 }, if x < 0.0 { x } else { 0.0 });
                    above + slope * below
                });
            }
            Unary::Scale { scale, bias: 0.0 } => return math::update(x, |x| x * scale),
            Unary::Scale { scale, bias } => return math::update(x, |x| x * scale + bias),
            Unary::Clamp { min, max } => {
                return math::update(x, |x| {
                    let x = if x < max { x } else { max };
                    if x > min { x } else { min }
                });
            }
            Unary::Fill { value } => return x.fill(value),
            Unary::Kind(kind) => kind,
        };
        match kind {
            UnaryKind::Abs => math::update(x, f32::abs),
            UnaryKind::Sgn => math::update(x, |x| f32::from(i8::from(x > 0.0) - i8::from(x < 0.0))),
            UnaryKind::Neg => math::update(x, |x| -x),
            UnaryKind::Step => math::update(x, |x| if x > 0.0 { 1.0 } else { 0.0 }),
            UnaryKind::Tanh => math::update(x, math::tanh),
            UnaryKind::Elu => math::update(x, |x| if x > 0.0 { x } else { x.exp_m1() }),
            UnaryKind::Relu => math::update(x, |x| if x > 0.0 { x } else { 0.0 }),
            UnaryKind::Sigmoid => math::update(x, math::sigmoid),
            UnaryKind::Gelu => math::update(x, math::gelu),
            UnaryKind::GeluQuick => math::update(x, math::gelu_quick),
            UnaryKind::Silu => math::update(x, math::silu),
            UnaryKind::HardSwish => math::update(x, |x| x * hard_sigmoid(x)),
            UnaryKind::HardSigmoid => math::update(x, hard_sigmoid),
            UnaryKind::Exp => math::update(x, math::exp),
            UnaryKind::Expm1 => math::update(x, |x| math::exp(x) - 1.0),
            UnaryKind::Softplus => math::update(x, |x| if x > 20.0 { x } else { x.exp().ln_1p() }),
            UnaryKind::GeluErf => math::update(x, math::gelu_erf),
            UnaryKind::Xielu { alpha_n, alpha_p, beta, eps } => math::update(x, |x| {
                let curve = if x > 0.0 { alpha_p * x * x } else { (x.min(eps).exp_m1() - x) * alpha_n };
                curve + beta * x
            }),
            UnaryKind::Floor => math::update(x, f32::floor),
            UnaryKind::Ceil => math::update(x, f32::ceil),
            UnaryKind::Round => math::update(x, f32::round),
            UnaryKind::Trunc => math::update(x, f32::trunc),
        }
    }
}

fn map(ctx: &mut KernelContext<'_>, op: Unary) {
    let (dst, src, buffer) = (ctx.dst(), ctx.src(0), ctx.take_local_scratch());
    RowPieces::new(dst.desc()).share(ctx, |i, n| {
        let x = &mut buffer[..n];
        src.load(i, x);
        apply(op, x);
        dst.store(i, x);
    });
}

fn fill(ctx: &mut KernelContext<'_>, value: f32) {
    let (dst, values) = (ctx.dst(), [value; CHUNK]);
    RowPieces::new(dst.desc()).share(ctx, |i, n| dst.store(i, &values[..n]));
}

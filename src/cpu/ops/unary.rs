//! SQR, SQRT, SCALE, CLAMP, FILL and the kinds of UNARY, computed in f32.

use super::{CHUNK, Kernel, Pieces, is_float, math, types};
use crate::cpu::pool::Work;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::unary::{Kind, Unary};

pub(super) fn select(op: Unary, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let (Some(x), dst) = (node.srcs.get(0), node.dst) else { return Err(types(node)) };
    // ggml's table has fewer pairs (mostly equal types); the others cost nothing more here.
    if !(is_float(x.dtype()) && is_float(dst.dtype())) {
        return Err(types(node));
    }
    let n = dst.elements();
    Ok(match op {
        Unary::Sqr => map(n, |x| x * x),
        Unary::Sqrt => map(n, f32::sqrt),
        Unary::Scale { scale, bias: 0.0 } => map(n, move |x| x * scale),
        Unary::Scale { scale, bias } => map(n, move |x| x * scale + bias),
        Unary::Clamp { min, max } => map(n, move |x| {
            let x = if x < max { x } else { max };
            if x > min { x } else { min }
        }),
        Unary::Fill { value } => Kernel::new(n, move |w| fill(w, value)),
        Unary::Kind(kind) => select_kind(kind, n),
    })
}

fn select_kind(kind: Kind, n: usize) -> Kernel {
    let hard_sigmoid = |x: f32| ((x + 3.0) / 6.0).clamp(0.0, 1.0);
    // What an exponential costs beside a load and a store.
    let e = n * 4;
    match kind {
        Kind::Abs => map(n, f32::abs),
        Kind::Sgn => map(n, |x| f32::from(i8::from(x > 0.0) - i8::from(x < 0.0))),
        Kind::Neg => map(n, |x| -x),
        Kind::Step => map(n, |x| if x > 0.0 { 1.0 } else { 0.0 }),
        Kind::Tanh => map(e, math::tanh),
        Kind::Elu => map(e, |x| if x > 0.0 { x } else { x.exp_m1() }),
        Kind::Relu => map(n, |x| if x > 0.0 { x } else { 0.0 }),
        Kind::Sigmoid => map(e, math::sigmoid),
        Kind::Gelu => map(e, math::gelu),
        Kind::GeluQuick => map(e, math::gelu_quick),
        Kind::Silu => map(e, math::silu),
        Kind::HardSwish => map(n, move |x| x * hard_sigmoid(x)),
        Kind::HardSigmoid => map(n, hard_sigmoid),
        Kind::Exp => map(e, math::exp),
        Kind::Expm1 => map(e, |x| math::exp(x) - 1.0),
        Kind::Softplus => map(e, |x| if x > 20.0 { x } else { x.exp().ln_1p() }),
        Kind::GeluErf => map(e, math::gelu_erf),
        Kind::Xielu { alpha_n, alpha_p, beta, eps } => map(e, move |x| {
            let curve = if x > 0.0 { alpha_p * x * x } else { (x.min(eps).exp_m1() - x) * alpha_n };
            curve + beta * x
        }),
        Kind::Floor => map(n, f32::floor),
        Kind::Ceil => map(n, f32::ceil),
        Kind::Round => map(n, f32::round),
        Kind::Trunc => map(n, f32::trunc),
    }
}

fn map(cost: usize, f: impl Fn(f32) -> f32 + Send + Sync + 'static) -> Kernel {
    Kernel::new(cost, move |work| {
        let (dst, src) = (work.dst(), work.src(0));
        let mut x = [0.0; CHUNK];
        Pieces::of(dst.desc()).share(work, |i, n| {
            let x = &mut x[..n];
            src.load(i, x);
            for x in x.iter_mut() {
                *x = f(*x);
            }
            dst.store(i, x);
        });
    })
}

fn fill(work: &mut Work<'_>, value: f32) {
    let (dst, values) = (work.dst(), [value; CHUNK]);
    Pieces::of(dst.desc()).share(work, |i, n| dst.store(i, &values[..n]));
}

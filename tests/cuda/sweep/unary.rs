use super::Sweep;
use crate::common::{Case, normal};
use fanout::ops::Out;
use fanout::ops::unary::{Kind, Unary};
use fanout::tensor::DType::{BF16, F16, F32};

/// Every op, packed, of each type, with a length that is no multiple of a thread's share; and every pair of types.
pub fn run(sweep: &Sweep) {
    let xielu = Kind::Xielu { alpha_n: 0.5, alpha_p: 0.7, beta: 0.3, eps: -1e-6 };
    let kinds = Kind::ALL.map(|kind| if matches!(kind, Kind::Xielu { .. }) { xielu } else { kind });
    let ops = kinds.into_iter().map(Unary::Kind).chain([
        Unary::Sqr,
        Unary::Scale { scale: 0.5, bias: -1.0 },
        Unary::Clamp { min: -0.5, max: 1.0 },
        Unary::Fill { value: 3.0 },
    ]);
    for op in ops {
        for t in [F32, F16, BF16] {
            one(sweep, op, t, t, [1021, 3, 1, 1]);
        }
    }
    for from in [F32, F16, BF16] {
        for to in [F32, F16, BF16] {
            one(sweep, Unary::Kind(Kind::Silu), from, to, [300, 2, 3, 2]);
        }
    }
}

#[track_caller]
fn one(sweep: &Sweep, op: Unary, from: fanout::tensor::DType, to: fanout::tensor::DType, ne: [usize; 4]) {
    let mut case = Case::new();
    let x = case.leaf(from, ne, &normal(7, ne.iter().product()));
    let y = case.b.node_as(op, &[Some(x)], Out { dtype: to, ne }).unwrap();
    // A value next to a border between two roundings may fall on the other side.
    let bound = if to == F32 { 1e-12 } else { 1e-6 };
    sweep.check(&case.build(), &[y], bound, &format!("{op:?} {from} -> {to}"));
}

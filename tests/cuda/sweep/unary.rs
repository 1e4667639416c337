//! Cases of the unary ops.

use super::Sweep;
use fanout::device::Support;
use fanout::ops::unary::{Unary, UnaryKind};
use fanout::ops::{NodeView, Op, OutputSpec, Sources};
use fanout::tensor::DType::{BF16, F16, F32};
use fanout::tensor::TensorDesc;
use fanout_testing::inputs::normal;
use fanout_testing::op_case::Case;

/// Every op on contiguous tensors of each type, with a length that is not a multiple of a thread's elements; and every pair of
/// types.
pub fn run(sweep: &Sweep) {
    let xielu = UnaryKind::Xielu { alpha_n: 0.5, alpha_p: 0.7, beta: 0.3, eps: -1e-6 };
    let kinds = UnaryKind::ALL.map(|kind| if matches!(kind, UnaryKind::Xielu { .. }) { xielu } else { kind });
    let ops = kinds.into_iter().map(Unary::Kind).chain([
        Unary::Sqr,
        Unary::Sin,
        Unary::Cos,
        Unary::LeakyRelu { slope: 0.1 },
        Unary::Scale { scale: 0.5, bias: -1.0 },
        Unary::Clamp { min: -0.5, max: 1.0 },
        Unary::Fill { value: 3.0 },
    ]);
    for op in ops {
        for t in [F32, F16, BF16] {
            check_case(sweep, op, t, t, [1021, 3, 1, 1]);
        }
    }
    logarithm(sweep);
    for from in [F32, F16, BF16] {
        for to in [F32, F16, BF16] {
            check_case(sweep, Unary::Kind(UnaryKind::Silu), from, to, [300, 2, 3, 2]);
            check_case(sweep, Unary::Kind(UnaryKind::Silu), from, to, [3, 170, 2, 2]);
            check_case(sweep, Unary::Fill { value: 3.0 }, from, to, [3, 5, 1, 1]);
        }
    }
    layouts(sweep);
    // More pieces per row than a grid permits blocks in y.
    let ne = [1 << 27, 3, 1, 1];
    let (x, y) = (TensorDesc::contiguous(F32, ne).unwrap(), TensorDesc::contiguous(F16, ne).unwrap());
    let op = Op::from(Unary::Sqr);
    let node = NodeView { op: &op, dst: &y, srcs: Sources::new(op.code(), &[Some(&x)]), aligned: true };
    assert_eq!(sweep.gpu.device.support(node), Support::Yes);
}

/// LOG of positive numbers: others are NaN on both sides, which no error bounds.
fn logarithm(sweep: &Sweep) {
    let mut case = Case::new();
    let values: Vec<f32> = normal(3, 3000).iter().map(|x| x.exp()).collect();
    let x = case.leaf(F32, [1000, 3, 1, 1], &values);
    let y = case.b.node(Unary::Log, &[Some(x)]).unwrap();
    sweep.check(&case.build(), &[y], 1e-12, "LOG");
}

/// Strided rows and elements, out of place and in place.
fn layouts(sweep: &Sweep) {
    for (ne, nb) in [([7, 90, 3, 1], [4, 40, 3600, 10_800]), ([300, 5, 1, 2], [8, 2400, 12_000, 12_000])] {
        let (desc, n) = (TensorDesc::strided(F32, ne, nb).unwrap(), ne.iter().product());
        let mut case = Case::new();
        let (x, y) = (case.leaf_with_desc(desc, &normal(8, n)), case.leaf_with_desc(desc, &normal(9, n)));
        let packed = case.b.node(Unary::Kind(UnaryKind::Gelu), &[Some(x)]).unwrap();
        let onto = case.b.view(y, desc, 0).unwrap();
        case.b.node_into(Unary::Kind(UnaryKind::Tanh), &[Some(y)], onto).unwrap();
        sweep.check(&case.build(), &[packed, onto], 1e-12, &format!("{ne:?} / {nb:?}"));
    }
}

#[track_caller]
fn check_case(sweep: &Sweep, op: Unary, from: fanout::tensor::DType, to: fanout::tensor::DType, ne: [usize; 4]) {
    let mut case = Case::new();
    let x = case.leaf(from, ne, &normal(7, ne.iter().product()));
    let y = case.b.node_with_output(op, &[Some(x)], OutputSpec { dtype: to, ne }).unwrap();
    // A value next to a rounding boundary may round to the other side.
    let bound = if to == F32 { 1e-12 } else { 1e-6 };
    sweep.check(&case.build(), &[y], bound, &format!("{op:?} {from} -> {to}"));
}

//! SQR, SQRT, LOG, SIN, COS, SCALE, CLAMP, LEAKY_RELU, FILL and the kinds of UNARY: results of every device against the formulas in f64.

use crate::devices::devices;
use fanout::ops::unary::{Unary, UnaryKind};
use fanout::ops::{Op, OpCode, OpParams, OutputSpec};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::compare::{assert_close, rounding};
use fanout_testing::inputs::{normal, uniform};
use fanout_testing::op_case::Case;

const XIELU: UnaryKind = UnaryKind::Xielu { alpha_n: 0.9, alpha_p: 0.7, beta: 0.5, eps: -1e-6 };

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// erf by its series of positive terms `2/sqrt(π) e^(-x²) Σ 2^n x^(2n+1) / (2n+1)!!`.
pub fn erf(x: f64) -> f64 {
    let (mut term, mut total, mut n) = (x, x, 1.0);
    while term.abs() > total.abs() * 1e-17 {
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        total += term;
        n += 1.0;
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * total
}

pub fn kind_oracle(kind: UnaryKind, x: f64) -> f64 {
    match kind {
        UnaryKind::Abs => x.abs(),
        UnaryKind::Sgn => match x {
            x if x > 0.0 => 1.0,
            x if x < 0.0 => -1.0,
            _ => 0.0,
        },
        UnaryKind::Neg => -x,
        UnaryKind::Step => f64::from(u8::from(x > 0.0)),
        UnaryKind::Tanh => x.tanh(),
        UnaryKind::Elu => x.max(0.0) + x.min(0.0).exp_m1(),
        UnaryKind::Relu => x.max(0.0),
        UnaryKind::Sigmoid => sigmoid(x),
        UnaryKind::Gelu => 0.5 * x * (1.0 + (0.797_884_560_802_865_4 * x * (1.0 + 0.044_715 * x * x)).tanh()),
        UnaryKind::GeluQuick => x * sigmoid(1.702 * x),
        UnaryKind::Silu => x * sigmoid(x),
        UnaryKind::HardSwish => x * ((x + 3.0) / 6.0).clamp(0.0, 1.0),
        UnaryKind::HardSigmoid => ((x + 3.0) / 6.0).clamp(0.0, 1.0),
        UnaryKind::Exp => x.exp(),
        UnaryKind::Expm1 => x.exp_m1(),
        UnaryKind::Softplus => x.exp().ln_1p(),
        UnaryKind::GeluErf => 0.5 * x * (1.0 + erf(x / 2f64.sqrt())),
        UnaryKind::Xielu { alpha_n, alpha_p, beta, eps } => {
            let [alpha_n, alpha_p, beta, eps] = [alpha_n, alpha_p, beta, eps].map(f64::from);
            let curve = if x > 0.0 { alpha_p * x * x } else { (x.min(eps).exp() - 1.0 - x) * alpha_n };
            curve + beta * x
        }
        UnaryKind::Floor => x.floor(),
        UnaryKind::Ceil => x.ceil(),
        UnaryKind::Round => x.round(),
        UnaryKind::Trunc => x.trunc(),
    }
}

fn oracle(op: Unary, x: f64) -> f64 {
    match op {
        Unary::Sqr => x * x,
        Unary::Sqrt => x.sqrt(),
        Unary::Log => x.ln(),
        Unary::Sin => x.sin(),
        Unary::Cos => x.cos(),
        Unary::LeakyRelu { slope } => x.max(0.0) + f64::from(slope) * x.min(0.0),
        Unary::Kind(kind) => kind_oracle(kind, x),
        Unary::Scale { scale, bias } => x * f64::from(scale) + f64::from(bias),
        Unary::Clamp { min, max } => x.min(f64::from(max)).max(f64::from(min)),
        Unary::Fill { value } => f64::from(value),
    }
}

fn ops() -> Vec<Unary> {
    let kinds = UnaryKind::ALL.map(|kind| if matches!(kind, UnaryKind::Xielu { .. }) { XIELU } else { kind });
    let mut all = kinds.map(Unary::Kind).to_vec();
    all.extend([
        Unary::Sqr,
        Unary::Sqrt,
        Unary::Log,
        Unary::Sin,
        Unary::Cos,
        Unary::LeakyRelu { slope: 0.1 },
        Unary::Scale { scale: 0.125, bias: 0.0 },
        Unary::Scale { scale: -1.5, bias: 2.25 },
        Unary::Clamp { min: -0.5, max: 1.5 },
        Unary::Clamp { min: 1.0, max: -1.0 },
        Unary::Fill { value: -3.5 },
    ]);
    all
}

/// Compares the ops on one source with the oracle. `dst` returns the layout of the destination; with `in_place` the destination
/// is the source instead.
fn compare(dx: TensorDesc, values: &[f32], ops: &[Unary], dst: impl Fn(&TensorDesc) -> TensorDesc, in_place: bool) {
    for &op in ops {
        let mut case = Case::new();
        let x = case.leaf_with_desc(dx, values);
        let out = dst(&dx);
        let y = if in_place { case.b.view(x, dx, 0).unwrap() } else { case.b.leaf_with_desc(out).unwrap() };
        case.b.node_into(op, &[Some(x)], y).unwrap();
        let case = case.build();
        let want: Vec<f64> = case.values(x).into_iter().map(|x| oracle(op, x)).collect();
        for on in devices() {
            let what = format!("{op:?} {dx:?} -> {} {}", out.dtype(), on.name);
            assert_close(&case.run(on).values(y), &want, rounding(out.dtype()), 3e-7, &what);
        }
    }
}

fn contiguous(dtype: DType, ne: [usize; 4]) -> TensorDesc {
    TensorDesc::contiguous(dtype, ne).unwrap()
}

#[test]
fn every_op_matches_the_oracle_over_its_range() {
    for (n, spread) in [(1, 1.0), (999, 1.0), (6000, 12.0)] {
        let x = uniform(1, n, -spread, spread);
        let (roots, others): (Vec<_>, Vec<_>) =
            ops().into_iter().partition(|op| matches!(op, Unary::Sqrt | Unary::Log));
        compare(contiguous(DType::F32, [n, 1, 1, 1]), &x, &others, |x| *x, false);
        let x: Vec<f32> = x.iter().map(|x| x.abs()).collect();
        compare(contiguous(DType::F32, [n, 1, 1, 1]), &x, &roots, |x| *x, false);
    }
}

#[test]
fn all_shapes_match_the_oracle() {
    let sample_ops = [Unary::Sqr, Unary::Kind(UnaryKind::Silu), Unary::Fill { value: 0.5 }];
    for ne in [[1, 50, 3, 2], [7, 3, 5, 2], [1024, 3, 1, 1], [1025, 2, 2, 1], [5000, 5, 1, 1], [64, 400, 2, 1]] {
        compare(contiguous(DType::F32, ne), &normal(2, ne.iter().product()), &sample_ops, |x| *x, false);
    }
}

#[test]
fn pairs_of_types_match_the_oracle() {
    use DType::{BF16, F16, F32};
    let ne = [65, 3, 2, 1];
    let x: Vec<f32> = normal(3, 390).iter().map(|x| x.abs() + 0.01).collect();
    for (a, b) in [(F16, F16), (BF16, BF16), (F16, F32), (BF16, F32), (F32, F16), (F32, BF16)] {
        compare(contiguous(a, ne), &x, &ops(), |_| contiguous(b, ne), false);
    }
}

#[test]
fn all_layouts_match_the_oracle() {
    let ne = [6, 4, 3, 2];
    let desc = |nb| TensorDesc::strided(DType::F32, ne, nb).unwrap();
    let (padded, permuted) = (desc([4, 40, 200, 800]), desc([4, 72, 24, 288]));
    let (transposed, repeated) = (desc([16, 4, 96, 288]), desc([4, 0, 24, 72]));
    let sample_ops = [Unary::Sqr, Unary::Kind(UnaryKind::Gelu), Unary::Scale { scale: 2.0, bias: 1.0 }];
    let x = normal(4, 144);
    for (from, to) in [(padded, permuted), (permuted, transposed), (transposed, padded), (repeated, padded)] {
        compare(from, &x, &sample_ops, |_| to, false);
    }
    for at in [padded, permuted, transposed, contiguous(DType::F32, ne), contiguous(DType::F16, ne)] {
        compare(at, &x, &ops()[..4], |x| *x, true);
        compare(at, &x, &sample_ops, |x| *x, true);
        compare(at, &x, &[Unary::Fill { value: 4.0 }, Unary::Clamp { min: 0.0, max: 0.5 }], |x| *x, true);
    }
}

/// Halves, signs and large values, for which the f64 oracle agrees with f32 arithmetic. The results for infinities and NaN are
/// listed.
#[test]
fn special_values_match_the_formula() {
    const INF: f32 = f32::INFINITY;
    const NAN: f32 = f32::NAN;
    let finite = [-100.0, -10.5, -2.5, -0.5, -0.0, 0.0, 0.5, 1.5, 20.5, 100.0];
    let ends = [-INF, INF, NAN];
    let cases = [
        (Unary::Kind(UnaryKind::Round), ends),
        (Unary::Kind(UnaryKind::Floor), ends),
        (Unary::Kind(UnaryKind::Ceil), ends),
        (Unary::Kind(UnaryKind::Trunc), ends),
        (Unary::Kind(UnaryKind::Abs), [INF, INF, NAN]),
        (Unary::Kind(UnaryKind::Sgn), [-1.0, 1.0, 0.0]),
        (Unary::Kind(UnaryKind::Step), [0.0, 1.0, 0.0]),
        (Unary::Kind(UnaryKind::Relu), [0.0, INF, 0.0]),
        (Unary::Kind(UnaryKind::Elu), [-1.0, INF, NAN]),
        (Unary::Kind(UnaryKind::Exp), [0.0, INF, NAN]),
        (Unary::Kind(UnaryKind::Expm1), [-1.0, INF, NAN]),
        (Unary::Kind(UnaryKind::Sigmoid), [0.0, 1.0, NAN]),
        (Unary::Kind(UnaryKind::Softplus), [0.0, INF, NAN]),
        (Unary::Kind(UnaryKind::Tanh), [-1.0, 1.0, NAN]),
        (Unary::Kind(UnaryKind::Gelu), [0.0, INF, NAN]),
        (Unary::Kind(UnaryKind::Silu), [NAN, INF, NAN]),
        (Unary::Clamp { min: -1.0, max: 2.0 }, [-1.0, 2.0, 2.0]),
        (Unary::Log, [NAN, INF, NAN]),
        (Unary::Sin, [NAN; 3]),
        (Unary::Cos, [NAN; 3]),
        (Unary::LeakyRelu { slope: 0.25 }, [-INF, INF, 0.0]),
        (Unary::Scale { scale: 2.0, bias: -1.0 }, ends),
        (Unary::Fill { value: INF }, [INF, INF, INF]),
    ];
    let x = [&finite[..], &ends].concat();
    for (op, at_ends) in cases {
        let mut want: Vec<f64> = finite.iter().map(|&x| f64::from(oracle(op, f64::from(x)) as f32)).collect();
        want.extend(at_ends.map(f64::from));
        let mut case = Case::new();
        let x = case.leaf(DType::F32, [x.len(), 1, 1, 1], &x);
        let y = case.b.node(op, &[Some(x)]).unwrap();
        let case = case.build();
        for on in devices() {
            assert_close(&case.run(on).values(y), &want, 3e-7, 3e-7, &format!("{op:?} {}", on.name));
        }
    }
}

#[test]
fn parameters_round_trip() {
    for op in ops() {
        let op = Op::from(op);
        assert_eq!(Op::decode(op.code(), &op.encode()), Ok(Some(op)));
    }
    let words = OpParams::default().with_int(0, 17).with_float(1, 0.9).with_float(2, 0.7).with_float(3, 0.5);
    assert_eq!(Op::from(Unary::Kind(XIELU)).encode(), words.with_float(4, -1e-6));
    for (k, kind) in UnaryKind::ALL.into_iter().enumerate() {
        let words = OpParams::default().with_int(0, k as i32);
        assert_eq!(Op::decode(OpCode::Unary, &words), Ok(Some(Unary::Kind(kind).into())));
    }
    for kind in [-1, 22, i32::MAX, i32::MIN] {
        let error = Op::decode(OpCode::Unary, &OpParams::default().with_int(0, kind)).unwrap_err();
        assert_eq!((error.word, error.name, error.got), (0, "kind", kind.to_string()));
    }
}

#[test]
fn invalid_nodes_are_rejected() {
    let mut case = Case::new();
    assert!(case.b.node(Unary::Sqr, &fanout::graph::NO_SOURCES).is_err(), "no source");
    let x = case.leaf(DType::F32, [8, 3, 1, 1], &normal(5, 24));
    assert!(
        case.b.node_with_output(Unary::Sqr, &[Some(x)], OutputSpec { dtype: DType::F32, ne: [24, 1, 1, 1] }).is_err(),
        "another shape"
    );
    let mut case = Case::new();
    let x = case.leaf(DType::F32, [8, 3, 1, 1], &normal(5, 24));
    let shifted = case.b.view(x, contiguous(DType::F32, [8, 2, 1, 1]), 0).unwrap();
    let onto = case.b.view(x, contiguous(DType::F32, [8, 2, 1, 1]), 32).unwrap();
    assert!(case.b.node_into(Unary::Sqr, &[Some(shifted)], onto).is_err(), "onto half of the source");
    let mut case = Case::new();
    let x = case.indices(DType::I32, [8, 1, 1, 1], &[0; 8]);
    case.b.node(Unary::Kind(UnaryKind::Abs), &[Some(x)]).unwrap();
    let case = case.build();
    assert!(devices()[0].device.prepare(case.graph).is_err(), "integers");
}

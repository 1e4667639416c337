//! GLU: results of every device against the formulas in f64, parameters and shape rules.

use crate::devices::devices;
use crate::unary::kind_oracle;
use fanout::graph::TensorId;
use fanout::ops::glu::{Glu, GluKind};
use fanout::ops::{Op, OpCode, OpParams, OutputSpec, unary};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::compare::{assert_close, rounding};
use fanout_testing::inputs::{at, index, normal};
use fanout_testing::op_case::Case;

const KINDS: [GluKind; 8] = [
    GluKind::Reglu,
    GluKind::Geglu,
    GluKind::Swiglu,
    GluKind::SwigluOai { alpha: 1.702, limit: 1.25 },
    GluKind::GegluErf,
    GluKind::GegluQuick,
    GluKind::SwigluClamp { limit: 0.75 },
    GluKind::SwigluClamp { limit: -0.5 },
];

fn oracle(kind: GluKind, x: f64, g: f64) -> f64 {
    let of = |kind| kind_oracle(kind, x) * g;
    let clamped = |limit: f32| {
        let limit = f64::from(limit);
        let g = g.min(limit);
        (x.min(limit), if g < -limit { -limit } else { g })
    };
    match kind {
        GluKind::Reglu => of(unary::UnaryKind::Relu),
        GluKind::Geglu => of(unary::UnaryKind::Gelu),
        GluKind::Swiglu => of(unary::UnaryKind::Silu),
        GluKind::GegluErf => of(unary::UnaryKind::GeluErf),
        GluKind::GegluQuick => of(unary::UnaryKind::GeluQuick),
        GluKind::SwigluOai { alpha, limit } => {
            let (x, g) = clamped(limit);
            x / (1.0 + (-f64::from(alpha) * x).exp()) * (g + 1.0)
        }
        GluKind::SwigluClamp { limit } => {
            let (x, g) = clamped(limit);
            x / (1.0 + (-x).exp()) * g
        }
    }
}

/// Compares one source of twice the row length (`b` is `None`), or two sources, with the oracle.
fn compare(glu: Glu, a: (TensorDesc, u64), b: Option<(TensorDesc, u64)>, dst: TensorDesc) {
    let mut case = Case::new();
    let mut leaf = |(desc, seed): (TensorDesc, u64)| case.leaf_with_desc(desc, &normal(seed, desc.elements()));
    let (a_id, b_id) = (leaf(a), b.map(&mut leaf));
    let y = case.b.leaf_with_desc(dst).unwrap();
    let srcs: [Option<TensorId>; 2] = [Some(a_id), b_id];
    case.b.node_into(glu, &srcs[..1 + usize::from(b.is_some())], y).unwrap();
    let case = case.build();
    let (ne, ane) = (dst.ne(), a.0.ne());
    let (av, bv) = (case.values(a_id), b_id.map(|b| case.values(b)));
    let want: Vec<f64> = (0..dst.elements())
        .map(|k| {
            let i = index(ne, k);
            let first = av[at(ane, i)];
            let second = match &bv {
                Some(bv) => bv[k],
                None => av[at(ane, [i[0] + ne[0], i[1], i[2], i[3]])],
            };
            if glu.swapped { oracle(glu.kind, second, first) } else { oracle(glu.kind, first, second) }
        })
        .collect();
    for on in devices() {
        let what = format!("{glu:?} {:?} {:?} {}", a.0, b.map(|b| b.0), on.name);
        assert_close(&case.run(on).values(y), &want, rounding(dst.dtype()), 1e-6, &what);
    }
}

fn contiguous(dtype: DType, ne: [usize; 4]) -> TensorDesc {
    TensorDesc::contiguous(dtype, ne).unwrap()
}

#[test]
fn one_source_is_split_into_value_and_gate() {
    // A row of odd length leaves its last element unused.
    for ne in [[2, 1, 1, 1], [7, 3, 2, 2], [14, 3, 2, 2], [2050, 3, 1, 1], [9000, 2, 1, 1]] {
        let dst = contiguous(DType::F32, [ne[0] / 2, ne[1], ne[2], ne[3]]);
        for kind in KINDS {
            for swapped in [false, true] {
                compare(Glu { kind, swapped }, (contiguous(DType::F32, ne), 1), None, dst);
            }
        }
    }
}

#[test]
fn two_sources_are_value_and_gate() {
    for ne in [[1, 1, 1, 1], [9, 3, 2, 1], [1500, 3, 1, 1]] {
        let x = contiguous(DType::F32, ne);
        for kind in KINDS {
            compare(Glu { kind, swapped: false }, (x, 2), Some((x, 3)), x);
        }
    }
}

#[test]
fn all_types_and_layouts_match_the_oracle() {
    use DType::{BF16, F16, F32};
    for (a, b) in [(F16, F16), (BF16, BF16), (F16, F32), (F32, BF16)] {
        for kind in KINDS {
            let (x, y) = (contiguous(a, [66, 3, 1, 1]), contiguous(b, [33, 3, 1, 1]));
            compare(Glu { kind, swapped: true }, (x, 4), None, y);
            let x = contiguous(a, [33, 3, 1, 1]);
            compare(Glu { kind, swapped: false }, (x, 5), Some((x, 6)), y);
        }
    }
    let desc = |ne, nb| TensorDesc::strided(F32, ne, nb).unwrap();
    let (ne, double) = ([6, 4, 3, 2], [12, 4, 3, 2]);
    let (padded, permuted) = (desc(ne, [4, 40, 200, 800]), desc(ne, [4, 72, 24, 288]));
    let wide = desc(double, [4, 64, 300, 1000]);
    let glu = Glu { kind: GluKind::Swiglu, swapped: false };
    compare(glu, (padded, 7), Some((permuted, 8)), padded);
    compare(glu, (permuted, 7), Some((padded, 8)), contiguous(F32, ne));
    compare(glu, (wide, 7), None, padded);
    compare(Glu { swapped: true, ..glu }, (wide, 7), None, permuted);
}

#[test]
fn parameters_round_trip() {
    for kind in KINDS {
        for swapped in [false, true] {
            let op = Op::from(Glu { kind, swapped });
            assert_eq!(Op::decode(OpCode::Glu, &op.encode()), Ok(Some(op)));
        }
    }
    let oai = OpParams::default().with_int(0, 3).with_int(1, 1).with_float(2, 1.702).with_float(3, 7.0);
    let want = Glu { kind: GluKind::SwigluOai { alpha: 1.702, limit: 7.0 }, swapped: true };
    assert_eq!(Op::decode(OpCode::Glu, &oai), Ok(Some(want.into())));
    for (word, name, value) in [(0, "kind", -1), (0, "kind", 7), (1, "swapped", 2), (1, "swapped", -1)] {
        let error = Op::decode(OpCode::Glu, &OpParams::default().with_int(word, value)).unwrap_err();
        assert_eq!((error.word, error.name, error.got), (word, name, value.to_string()));
    }
}

#[test]
fn invalid_nodes_are_rejected() {
    let refused = |swapped, ane: [usize; 4], bne: Option<[usize; 4]>, ne| {
        let mut case = Case::new();
        let a = case.leaf(DType::F32, ane, &normal(9, ane.iter().product()));
        let b = bne.map(|bne| case.leaf(DType::F32, bne, &normal(9, bne.iter().product())));
        let out = OutputSpec { dtype: DType::F32, ne };
        case.b.node_with_output(Glu { kind: GluKind::Swiglu, swapped }, &[Some(a), b], out).is_err()
    };
    let (n, half) = ([8, 3, 1, 1], [4, 3, 1, 1]);
    assert!(!refused(true, n, None, half) && !refused(false, n, Some(n), n));
    assert!(refused(false, n, None, n), "half a row of one source");
    assert!(refused(false, n, Some(n), half), "whole rows of two sources");
    assert!(refused(false, n, Some([8, 1, 1, 1]), n), "no broadcast");
    assert!(refused(true, n, Some(n), n), "nothing to swap");
}

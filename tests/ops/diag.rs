//! DIAG, DIAG_MASK_INF, DIAG_MASK_ZERO and TRI: results of every device element by element, and the shape rules.

use crate::devices::devices;
use fanout::ops::diag::{Diag, Triangle};
use fanout::ops::{Op, OpCode, OpParams, OutputSpec};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::inputs::{at, index, normal};
use fanout_testing::op_case::Case;

const SQUARES: [[usize; 4]; 3] = [[1, 1, 1, 1], [5, 5, 2, 3], [70, 70, 1, 2]];

fn oracle(op: Diag, x: &[f64], xne: [usize; 4], ne: [usize; 4]) -> Vec<f64> {
    (0..ne.iter().product())
        .map(|k| {
            let i = index(ne, k);
            let own = || x[at(xne, i)];
            match op {
                Diag::Diag if i[0] == i[1] => x[at(xne, [i[0], 0, i[2], i[3]])],
                Diag::MaskInf { n_past } if i[0] > n_past as usize + i[1] => f64::NEG_INFINITY,
                Diag::MaskZero { n_past } if i[0] > n_past as usize + i[1] => 0.0,
                Diag::MaskInf { .. } | Diag::MaskZero { .. } => own(),
                Diag::Tri(Triangle::UpperWithDiagonal) if i[0] >= i[1] => own(),
                Diag::Tri(Triangle::Upper) if i[0] > i[1] => own(),
                Diag::Tri(Triangle::LowerWithDiagonal) if i[0] <= i[1] => own(),
                Diag::Tri(Triangle::Lower) if i[0] < i[1] => own(),
                Diag::Diag | Diag::Tri(_) => 0.0,
            }
        })
        .collect()
}

fn check(op: Diag, x: TensorDesc, in_place: bool) {
    let mut case = Case::new();
    let src = case.leaf_with_desc(x, &normal(1, x.elements()));
    let dst = if in_place {
        let onto = case.b.view(src, x, 0).unwrap();
        case.b.node_into(op, &[Some(src)], onto).unwrap()
    } else {
        case.b.node(op, &[Some(src)]).unwrap()
    };
    let ne = case.b.tensor(dst).unwrap().desc.ne();
    let case = case.build();
    let want = oracle(op, &case.values(src), x.ne(), ne);
    for on in devices() {
        assert_eq!(case.run(on).values(dst), want, "{op:?} {x:?} in place {in_place} {}", on.name);
    }
}

#[test]
fn triangles_match_the_oracle() {
    for kind in Triangle::ALL {
        for ne in SQUARES {
            check(Diag::Tri(kind), TensorDesc::contiguous(DType::F32, ne).unwrap(), false);
        }
    }
    // Rows of two pieces.
    check(Diag::Tri(Triangle::Lower), TensorDesc::contiguous(DType::F32, [1030, 1030, 1, 1]).unwrap(), false);
}

#[test]
fn diagonal_matrices_match_the_oracle() {
    for [n, _, n2, n3] in SQUARES {
        check(Diag::Diag, TensorDesc::contiguous(DType::F32, [n, 1, n2, n3]).unwrap(), false);
    }
    let every_second = TensorDesc::strided(DType::F32, [6, 1, 3, 1], [8, 48, 60, 180]).unwrap();
    check(Diag::Diag, every_second, false);
    check(Diag::Diag, TensorDesc::contiguous(DType::F16, [6, 1, 2, 1]).unwrap(), false);
}

#[test]
fn masks_match_the_oracle() {
    let strided = TensorDesc::strided(DType::F32, [7, 5, 3, 2], [4, 40, 200, 600]).unwrap();
    for n_past in [0, 1, 3, 1000, i32::MAX as u32] {
        for op in [Diag::MaskInf { n_past }, Diag::MaskZero { n_past }] {
            for in_place in [false, true] {
                check(op, strided, in_place);
                for ne in [[1, 1, 1, 1], [9, 4, 2, 3], [4, 9, 2, 1], [2100, 3, 1, 1]] {
                    check(op, TensorDesc::contiguous(DType::F32, ne).unwrap(), in_place);
                }
            }
        }
    }
}

#[test]
fn parameters_round_trip() {
    let words = |word| OpParams::default().with_int(0, word);
    for (code, op, params) in [
        (OpCode::Diag, Diag::Diag, words(0)),
        (OpCode::DiagMaskInf, Diag::MaskInf { n_past: 5 }, words(5)),
        (OpCode::DiagMaskZero, Diag::MaskZero { n_past: 9 }, words(9)),
        (OpCode::Tri, Diag::Tri(Triangle::UpperWithDiagonal), words(0)),
        (OpCode::Tri, Diag::Tri(Triangle::Upper), words(1)),
        (OpCode::Tri, Diag::Tri(Triangle::LowerWithDiagonal), words(2)),
        (OpCode::Tri, Diag::Tri(Triangle::Lower), words(3)),
    ] {
        assert_eq!((Op::from(op).code(), Op::from(op).encode()), (code, params));
        assert_eq!(Op::decode(code, &params), Ok(Some(op.into())));
    }
    for (code, word) in
        [(OpCode::DiagMaskInf, -1), (OpCode::DiagMaskZero, i32::MIN), (OpCode::Tri, 4), (OpCode::Tri, -1)]
    {
        assert!(Op::decode(code, &words(word)).is_err(), "{code} {word}");
    }
}

#[test]
fn invalid_nodes_are_rejected() {
    let built = |op: Diag, x: TensorDesc, out: Option<[usize; 4]>| {
        let mut case = Case::new();
        let src = case.b.leaf_with_desc(x).unwrap();
        let ne = out.unwrap_or(x.ne());
        case.b.node_with_output(op, &[Some(src)], OutputSpec { dtype: x.dtype(), ne }).map(|_| case.b.build())
    };
    let t = |ne| TensorDesc::contiguous(DType::F32, ne).unwrap();
    let tri = Diag::Tri(Triangle::Lower);
    let transposed = TensorDesc::strided(DType::F32, [4, 4, 1, 1], [16, 4, 64, 64]).unwrap();
    assert!(built(tri, t([4, 4, 1, 1]), None).is_ok());
    assert!(built(tri, t([4, 5, 1, 1]), None).is_err(), "not square");
    assert!(built(tri, transposed, None).is_err(), "transposed");
    assert!(built(Diag::Diag, t([4, 1, 1, 1]), Some([4, 4, 1, 1])).is_ok());
    assert!(built(Diag::Diag, t([4, 1, 1, 1]), None).is_err(), "no matrix");
    assert!(built(Diag::Diag, t([4, 2, 1, 1]), Some([4, 4, 1, 1])).is_err(), "two rows");
    assert!(built(Diag::MaskInf { n_past: 0 }, t([4, 3, 1, 1]), Some([3, 4, 1, 1])).is_err(), "another shape");
    assert!(built(Diag::MaskZero { n_past: u32::MAX }, t([4, 3, 1, 1]), None).is_err(), "n_past beyond an i32");
    let integers = TensorDesc::contiguous(DType::I32, [4, 4, 1, 1]).unwrap();
    assert!(devices()[0].device.prepare(built(tri, integers, None).unwrap().into()).is_err(), "integers");
}

//! OUT_PROD: results of every device against the sum in f64, and the shape rules.

use crate::devices::devices;
use fanout::ops::out_prod::OutProd;
use fanout::ops::{Op, OpCode, OpParams};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::compare::assert_close;
use fanout_testing::inputs::{at, index, normal};
use fanout_testing::op_case::Case;

fn oracle(a: &[f64], an: [usize; 4], b: &[f64], bn: [usize; 4]) -> Vec<f64> {
    let ne = [an[0], bn[0], bn[2], bn[3]];
    let (r2, r3) = (bn[2] / an[2], bn[3] / an[3]);
    (0..ne.iter().product())
        .map(|k| {
            let [i, j, i2, i3] = index(ne, k);
            let product = |l| a[at(an, [i, l, i2 / r2, i3 / r3])] * b[at(bn, [j, l, i2, i3])];
            (0..an[1]).map(product).sum()
        })
        .collect()
}

#[track_caller]
fn check(a: TensorDesc, b: TensorDesc) {
    let mut case = Case::new();
    let x = case.leaf_with_desc(a, &normal(1, a.elements()));
    let y = case.leaf_with_desc(b, &normal(2, b.elements()));
    let dst = case.b.node(OutProd, &[Some(x), Some(y)]).unwrap();
    let case = case.build();
    let want = oracle(&case.values(x), a.ne(), &case.values(y), b.ne());
    for on in devices() {
        let tolerance = 1e-6 * (a.ne()[1] as f64).sqrt();
        assert_close(&case.run(on).values(dst), &want, tolerance, 4.0 * tolerance, &format!("{a:?} {b:?} {}", on.name));
    }
}

fn packed(dtype: DType, ne: [usize; 4]) -> TensorDesc {
    TensorDesc::contiguous(dtype, ne).unwrap()
}

#[test]
fn products_match_the_oracle() {
    for ([n, m, k], [a2, a3], [r2, r3]) in [
        ([1, 1, 1], [1, 1], [1, 1]),
        ([16, 4, 64], [1, 1], [1, 1]),
        ([17, 5, 65], [1, 2], [3, 1]),
        ([257, 65, 3], [2, 1], [1, 2]),
        ([300, 70, 130], [1, 1], [1, 1]),
        ([5, 130, 33], [2, 3], [2, 2]),
    ] {
        check(packed(DType::F32, [n, k, a2, a3]), packed(DType::F32, [m, k, a2 * r2, a3 * r3]));
    }
}

/// More summands than a phase has.
#[test]
fn long_sums_match_the_oracle() {
    check(packed(DType::F32, [3, 9000, 1, 1]), packed(DType::F32, [70, 9000, 1, 1]));
}

#[test]
fn every_type_of_a_matches_the_oracle() {
    for dtype in [DType::F16, DType::BF16, DType::Q8_0, DType::Q4_1, DType::Q4_K, DType::Q6_K, DType::F8_E4M3] {
        check(packed(dtype, [512, 5, 2, 1]), packed(DType::F32, [7, 5, 2, 1]));
        check(packed(dtype, [256, 3, 1, 1]), packed(DType::F32, [2, 3, 2, 1]));
    }
}

#[test]
fn strided_operands_match_the_oracle() {
    let (an, bn) = ([10, 6, 2, 1], [5, 6, 2, 1]);
    let a = TensorDesc::strided(DType::F32, an, [4, 96, 48, 576]).unwrap();
    let transposed = TensorDesc::strided(DType::F32, bn, [24, 4, 120, 240]).unwrap();
    let repeated = TensorDesc::strided(DType::F32, bn, [0, 4, 24, 48]).unwrap();
    for b in [packed(DType::F32, bn), transposed, repeated] {
        check(a, b);
    }
    // Rows of dst apart from each other.
    let mut case = Case::new();
    let (x, y) = (case.leaf_with_desc(a, &normal(1, 120)), case.leaf_with_desc(transposed, &normal(2, 60)));
    let dst = TensorDesc::strided(DType::F32, [10, 5, 2, 1], [4, 88, 44, 440]).unwrap();
    let dst = case.b.leaf_with_desc(dst).unwrap();
    case.b.node_into(OutProd, &[Some(x), Some(y)], dst).unwrap();
    let case = case.build();
    let want = oracle(&case.values(x), an, &case.values(y), bn);
    for on in devices() {
        assert_close(&case.run(on).values(dst), &want, 1e-6, 1e-5, on.name);
    }
}

/// No rows, so nothing is added.
#[test]
fn a_product_of_no_rows_is_zero() {
    let mut case = Case::new();
    let (a, b) = (case.leaf(DType::F32, [70, 0, 1, 1], &[]), case.leaf(DType::F32, [3, 0, 2, 1], &[]));
    let dst = case.b.node(OutProd, &[Some(a), Some(b)]).unwrap();
    let case = case.build();
    for on in devices() {
        assert_eq!(case.run(on).values(dst), vec![0.0; 420], "{}", on.name);
    }
}

#[test]
fn invalid_nodes_are_rejected() {
    assert_eq!(Op::decode(OpCode::OutProd, &OpParams::default()), Ok(Some(OutProd.into())));
    let build = |a: TensorDesc, b: TensorDesc| {
        let mut case = Case::new();
        let (a, b) = (case.b.leaf_with_desc(a).unwrap(), case.b.leaf_with_desc(b).unwrap());
        case.b.node(OutProd, &[Some(a), Some(b)]).map(|_| case.b.build())
    };
    let (f32, t) = (|ne| packed(DType::F32, ne), |nb| TensorDesc::strided(DType::F32, [8, 4, 2, 1], nb).unwrap());
    assert!(build(f32([8, 4, 2, 1]), f32([3, 4, 4, 1])).is_ok());
    for (a, b, what) in [
        (f32([8, 4, 2, 1]), f32([3, 5, 2, 1]), "different numbers of rows"),
        (f32([8, 4, 2, 1]), f32([3, 4, 3, 1]), "planes that do not repeat"),
        (f32([0, 4, 1, 1]), f32([3, 4, 1, 1]), "no result"),
        (t([16, 4, 128, 256]), f32([3, 4, 2, 1]), "a transposed"),
        (t([4, 0, 32, 64]), f32([3, 4, 2, 1]), "repeated rows of a"),
    ] {
        assert!(build(a, b).is_err(), "{what}");
    }
    for (a, b) in [(DType::I32, DType::F32), (DType::F32, DType::F16), (DType::I64, DType::F32)] {
        let graph = build(packed(a, [32, 4, 1, 1]), packed(b, [3, 4, 1, 1])).unwrap();
        assert!(devices()[0].device.prepare(graph.into()).is_err(), "{a} {b}");
    }
}

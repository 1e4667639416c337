//! ADD, SUB, MUL, DIV and ADD_ID: results of every device against the formulas in f64, and invalid expert ids.

use crate::devices::devices;
use fanout::graph::TensorId;
use fanout::ops::OpCode;
use fanout::ops::binary::Binary;
use fanout::ops::mul_mat::NO_EXPERT;
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::compare::{assert_close, rounding};
use fanout_testing::inputs::{at, index, normal, uniform};
use fanout_testing::op_case::Case;

type Oracle = fn(f64, f64) -> f64;
const OPS: [(Binary, Oracle); 4] = [
    (Binary::Add, |a, b| a + b),
    (Binary::Sub, |a, b| a - b),
    (Binary::Mul, |a, b| a * b),
    (Binary::Div, |a, b| a / b),
];

/// The op in f64, with b broadcast to a.
fn oracle(f: Oracle, a: &[f64], ane: [usize; 4], b: &[f64], bne: [usize; 4]) -> Vec<f64> {
    (0..a.len())
        .map(|k| {
            let i = index(ane, k);
            f(a[k], b[at(bne, [i[0] % bne[0], i[1] % bne[1], i[2] % bne[2], i[3] % bne[3]])])
        })
        .collect()
}

#[test]
fn broadcast_matches_the_oracle() {
    let shapes = [
        ([1, 1, 1, 1], [1, 1, 1, 1]),
        ([5, 3, 2, 2], [5, 3, 2, 2]),
        ([2050, 3, 1, 1], [2050, 1, 1, 1]),
        ([4100, 2, 1, 1], [1, 2, 1, 1]),
        ([3000, 2, 1, 1], [1500, 1, 1, 1]),
        ([12, 4, 6, 2], [4, 2, 3, 1]),
        ([64, 40, 9, 3], [64, 1, 9, 1]),
    ];
    for (ane, bne) in shapes {
        for (op, f) in OPS {
            let mut case = Case::new();
            let a = case.leaf(DType::F32, ane, &normal(1, ane.iter().product()));
            let b = case.leaf(DType::F32, bne, &uniform(2, bne.iter().product(), 0.5, 2.0));
            let dst = case.b.node(op, &[Some(a), Some(b)]).unwrap();
            let case = case.build();
            let want = oracle(f, &case.values(a), ane, &case.values(b), bne);
            for on in devices() {
                assert_close(
                    &case.run(on).values(dst),
                    &want,
                    2e-7,
                    0.0,
                    &format!("{op:?} {ane:?} {bne:?} {}", on.name),
                );
            }
        }
    }
}

#[test]
fn every_pair_of_float_types_matches_the_oracle() {
    use DType::{BF16, F16, F32};
    let ne = [33, 5, 2, 1];
    for (ta, tb, td) in
        [(F16, F16, F16), (BF16, BF16, BF16), (BF16, F32, BF16), (BF16, F32, F32), (F16, F32, F16), (F16, F32, F32)]
    {
        for (op, f) in OPS {
            let mut case = Case::new();
            let a = case.leaf(ta, ne, &normal(3, 330));
            let b = case.leaf(tb, ne, &uniform(4, 330, 0.5, 2.0));
            let dst =
                case.b.node_with_output(op, &[Some(a), Some(b)], fanout::ops::OutputSpec { dtype: td, ne }).unwrap();
            let case = case.build();
            let want = oracle(f, &case.values(a), ne, &case.values(b), ne);
            for on in devices() {
                let what = format!("{op:?} {ta} {tb} {td} {}", on.name);
                assert_close(&case.run(on).values(dst), &want, rounding(td), 1e-7, &what);
            }
        }
    }
}

/// Strided rows, a permuted and a transposed second source; the destination on either source.
#[test]
fn strided_and_in_place_operands_match_the_oracle() {
    let ne = [6, 4, 3, 2];
    let desc = |nb| TensorDesc::strided(DType::F32, ne, nb).unwrap();
    let padded = desc([4, 40, 200, 800]);
    let permuted = desc([4, 72, 24, 288]);
    let transposed = desc([16, 4, 96, 288]);
    for (da, db) in [(padded, permuted), (permuted, padded), (padded, transposed)] {
        for onto in [None, Some(0), Some(1)] {
            if onto == Some(1) && db == transposed {
                continue; // the destination's rows must be dense
            }
            let mut case = Case::new();
            let (a, b) = (case.leaf_with_desc(da, &normal(5, 144)), case.leaf_with_desc(db, &normal(6, 144)));
            let srcs: [Option<TensorId>; 2] = [Some(a), Some(b)];
            let dst = match onto {
                None => case.b.node(Binary::Sub, &srcs).unwrap(),
                Some(i) => {
                    let (parent, desc) = ([a, b][i], [da, db][i]);
                    let view = case.b.view(parent, desc, 0).unwrap();
                    case.b.node_into(Binary::Sub, &srcs, view).unwrap()
                }
            };
            let case = case.build();
            let want = oracle(|x, y| x - y, &case.values(a), ne, &case.values(b), ne);
            for on in devices() {
                assert_close(
                    &case.run(on).values(dst),
                    &want,
                    2e-7,
                    0.0,
                    &format!("{da:?} {db:?} onto {onto:?} {}", on.name),
                );
            }
        }
    }
}

#[test]
fn add_id_adds_the_row_of_each_expert() {
    let (n, used, tokens, experts) = (70, 3, 5, 4);
    // -1 adds nothing.
    let id = |k: usize| if k % 5 == 2 { NO_EXPERT } else { (k * 7 % experts) as i64 };
    let ids: Vec<i64> = (0..used * tokens).map(id).collect();
    let mut case = Case::new();
    let a = case.leaf(DType::F32, [n, used, tokens, 1], &normal(7, n * used * tokens));
    let b = case.leaf(DType::F32, [n, experts, 1, 1], &normal(8, n * experts));
    let i = case.indices(DType::I32, [used, tokens, 1, 1], &ids);
    let dst = case.b.node(Binary::AddId, &[Some(a), Some(b), Some(i)]).unwrap();
    let case = case.build();
    let (av, bv) = (case.values(a), case.values(b));
    let added = |k: usize| usize::try_from(ids[k / n]).map_or(0.0, |expert| bv[expert * n + k % n]);
    let want: Vec<f64> = (0..av.len()).map(|k| av[k] + added(k)).collect();
    for on in devices() {
        assert_close(&case.run(on).values(dst), &want, 2e-7, 0.0, on.name);
    }
}

#[test]
fn add_id_rejects_unknown_experts() {
    for bad in [-2, 4, i64::from(i32::MAX), i64::from(i32::MIN)] {
        let mut case = Case::new();
        let a = case.leaf(DType::F32, [8, 1, 2, 1], &normal(9, 16));
        let b = case.leaf(DType::F32, [8, 4, 1, 1], &normal(10, 32));
        let i = case.indices(DType::I32, [1, 2, 1, 1], &[0, bad]);
        case.b.node(Binary::AddId, &[Some(a), Some(b), Some(i)]).unwrap();
        let case = case.build();
        for on in devices() {
            let error = case.try_run(on).err();
            assert!(on.reported_bad_data(&error, OpCode::AddId), "{bad}: {error:?}");
        }
    }
}

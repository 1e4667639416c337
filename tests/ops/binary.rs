//! ADD, ADD1, SUB, MUL, DIV and ADD_ID: results of every device against the formulas in f64, and invalid expert ids.

use crate::devices::devices;
use fanout::graph::TensorId;
use fanout::ops::binary::Binary;
use fanout::ops::mul_mat::NO_EXPERT;
use fanout::ops::{OpCode, OutputSpec};
use fanout::tensor::quant::{dequantiser, quantiser};
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
            let dst = case.b.node_with_output(op, &[Some(a), Some(b)], OutputSpec { dtype: td, ne }).unwrap();
            let case = case.build();
            let want = oracle(f, &case.values(a), ne, &case.values(b), ne);
            for on in devices() {
                let what = format!("{op:?} {ta} {tb} {td} {}", on.name);
                assert_close(&case.run(on).values(dst), &want, rounding(td), 1e-7, &what);
            }
        }
    }
}

/// ADD of a quantised source: every type that converts to f32, to f32, to halves and to its own or another quantised type, also in
/// place.
#[test]
fn quantised_sums_match_the_oracle() {
    let types = DType::ALL.iter().copied().filter(|&t| dequantiser(t).is_some() && !t.is_float());
    for (k, a_type) in types.enumerate() {
        let ne = [if k % 2 == 0 { 256 } else { 1280 }, 3, 2, 1];
        let n = ne.iter().product();
        let own = quantiser(a_type).map(|_| a_type);
        for dst_type in [DType::F32, DType::BF16, DType::Q5_1].into_iter().chain(own) {
            let mut case = Case::new();
            let (a, b) = (case.leaf(a_type, ne, &normal(5, n)), case.leaf(DType::F32, ne, &uniform(6, n, 0.5, 2.0)));
            let dst =
                case.b.node_with_output(Binary::Add, &[Some(a), Some(b)], OutputSpec { dtype: dst_type, ne }).unwrap();
            let onto = [b, a].into_iter().zip([DType::F32, a_type]).find(|(_, t)| *t == dst_type).map(|(id, _)| id);
            let mut copy = Case::new();
            let case = case.build();
            let sums: Vec<f32> = case.values(a).iter().zip(case.values(b)).map(|(&a, b)| a as f32 + b as f32).collect();
            let mut want = vec![0; n / dst_type.block_len() * dst_type.block_bytes()];
            quantiser(dst_type).unwrap()(&sums, &mut want);
            for on in devices() {
                assert!(case.run(on).bytes(dst) == want, "{a_type} to {dst_type} {}", on.name);
            }
            // In place, on the source of the same type.
            let Some(onto) = onto else { continue };
            let (a2, b2) = (copy.leaf(a_type, ne, &normal(5, n)), copy.leaf(DType::F32, ne, &uniform(6, n, 0.5, 2.0)));
            let target = if onto == a { a2 } else { b2 };
            let view = copy.b.view(target, TensorDesc::contiguous(dst_type, ne).unwrap(), 0).unwrap();
            copy.b.node_into(Binary::Add, &[Some(a2), Some(b2)], view).unwrap();
            let copy = copy.build();
            for on in devices() {
                assert!(copy.run(on).bytes(view) == want, "{a_type} onto {dst_type} {}", on.name);
            }
        }
    }
}

#[test]
fn add1_adds_its_number_to_every_element() {
    use DType::{BF16, F16, F32, Q4_0, Q8_0};
    let ne = [64, 5, 2, 1];
    for (ta, tb) in [(F32, F32), (F16, F16), (F16, F32), (BF16, BF16), (BF16, F32), (Q8_0, F32), (Q4_0, F32)] {
        for in_place in [false, true] {
            let mut case = Case::new();
            let a = case.leaf(ta, ne, &normal(3, 640));
            let b = case.leaf(tb, [1; 4], &[0.75]);
            let srcs = [Some(a), Some(b)];
            let dst = if in_place {
                let onto = case.b.view(a, TensorDesc::contiguous(ta, ne).unwrap(), 0).unwrap();
                case.b.node_into(Binary::Add1, &srcs, onto).unwrap()
            } else {
                case.b.node(Binary::Add1, &srcs).unwrap()
            };
            let case = case.build();
            let want = requantised(ta, &case.values(a).iter().map(|x| x + 0.75).collect::<Vec<_>>());
            for on in devices() {
                let what = format!("{ta} {tb} in place {in_place} {}", on.name);
                assert_close(&case.run(on).values(dst), &want, rounding(ta), 1e-6, &what);
            }
        }
    }
}

/// The values after rounding to a type.
fn requantised(dtype: DType, values: &[f64]) -> Vec<f64> {
    let mut case = Case::new();
    let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
    let id = case.leaf(dtype, [values.len(), 1, 1, 1], &values);
    case.build().values(id)
}

/// A quantised first source: rows are dequantised, and quantised again if dst is.
#[test]
fn add_to_quantised_rows_matches_the_oracle() {
    use DType::{BF16, F16, F32, Q4_K, Q5_1, Q8_0};
    let ne = [1280, 3, 2, 1];
    let strided = |dtype: DType| {
        let row = dtype.row_bytes(1280).unwrap();
        TensorDesc::strided(dtype, ne, [dtype.block_bytes(), 2 * row, row, 6 * row]).unwrap()
    };
    for (ta, td) in [(Q8_0, F32), (Q5_1, Q5_1), (Q4_K, F16), (Q8_0, Q4_K), (Q4_K, BF16), (DType::F8_E4M3, F32)] {
        for desc in [TensorDesc::contiguous(ta, ne).unwrap(), strided(ta)] {
            let mut case = Case::new();
            let a = case.leaf_with_desc(desc, &normal(11, 7680));
            let b = case.leaf(F32, ne, &normal(12, 7680));
            let out = fanout::ops::OutputSpec { dtype: td, ne };
            let dst = case.b.node_with_output(Binary::Add, &[Some(a), Some(b)], out).unwrap();
            let case = case.build();
            let want = oracle(|x, y| x + y, &case.values(a), ne, &case.values(b), ne);
            let want = requantised(td, &want);
            for on in devices() {
                assert_close(&case.run(on).values(dst), &want, rounding(td), 1e-6, &format!("{ta} {td} {}", on.name));
            }
        }
    }
}

#[test]
fn quantised_sums_of_other_shapes_and_types_are_rejected() {
    use DType::{F16, F32, I32, Q4_0, Q8_0};
    let ne = [64, 4, 1, 1];
    let node = |op, a, (b, bne), dtype| {
        let mut case = Case::new();
        let (a, b) = (case.b.leaf(a, ne).unwrap(), case.b.leaf(b, bne).unwrap());
        case.b.node_with_output(op, &[Some(a), Some(b)], OutputSpec { dtype, ne }).map(|_| case)
    };
    assert!(node(Binary::Add, Q8_0, (F32, [64, 1, 1, 1]), F32).is_err(), "a broadcast b");
    for (what, case) in [
        ("a difference", node(Binary::Sub, Q8_0, (F32, ne), F32)),
        ("a product", node(Binary::Mul, Q4_0, (F32, ne), Q4_0)),
        ("b of F16", node(Binary::Add, Q8_0, (F16, ne), F32)),
        ("two quantised sources", node(Binary::Add, Q8_0, (Q8_0, ne), Q8_0)),
        ("integers", node(Binary::Add, Q8_0, (F32, ne), I32)),
    ] {
        let case = case.unwrap().build();
        for on in devices() {
            assert!(case.try_run(on).is_err(), "{what} {}", on.name);
        }
    }
}

#[test]
fn invalid_additions_are_rejected() {
    let built = |op, (ta, an): (DType, [usize; 4]), (tb, bn): (DType, [usize; 4]), td| {
        let mut case = Case::new();
        let (a, b) = (case.b.leaf(ta, an).unwrap(), case.b.leaf(tb, bn).unwrap());
        case.b.node_with_output(op, &[Some(a), Some(b)], OutputSpec { dtype: td, ne: an }).map(|_| case.b.build())
    };
    use DType::{F16, F32, I32, Q8_0};
    let (wide, ne) = ([64, 2, 1, 1], [32, 2, 1, 1]);
    assert!(built(Binary::Add1, (F32, ne), (F32, [2, 1, 1, 1]), F32).is_err(), "two numbers");
    assert!(built(Binary::Add1, (F32, ne), (F32, [1; 4]), F16).is_err(), "another type");
    assert!(built(Binary::Add, (Q8_0, wide), (F32, ne), F32).is_err(), "a row of b that is shorter");
    // Valid shapes without a kernel.
    for (op, ta, tb, td) in [
        (Binary::Sub, Q8_0, F32, F32),
        (Binary::Add, Q8_0, F16, F32),
        (Binary::Add, F32, F32, I32),
        (Binary::Add1, I32, I32, I32),
    ] {
        let graph = built(op, (ta, ne), (tb, if op == Binary::Add1 { [1; 4] } else { ne }), td).unwrap();
        assert!(devices()[0].device.prepare(std::sync::Arc::new(graph)).is_err(), "{op:?} {ta} {tb} {td}");
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

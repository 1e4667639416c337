//! ARGSORT and TOP_K: results of every device against a stable sort, and the shape rules.

use crate::devices::devices;
use fanout::ops::sort::Sort;
use fanout::ops::{Op, OpCode, OpParams, OutputSpec};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::inputs::normal;
use fanout_testing::op_case::Case;

const SHAPES: [[usize; 4]; 6] =
    [[1, 1, 1, 1], [2, 3, 1, 1], [7, 5, 3, 2], [64, 40, 1, 1], [1025, 3, 1, 1], [6000, 1, 2, 1]];

/// Rows with many ties among few values, infinities, and NaNs of both signs.
fn values(n: usize) -> Vec<f32> {
    let special = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0];
    normal(1, n)
        .into_iter()
        .enumerate()
        .map(|(i, v)| match i % 5 {
            0 if i % 2 == 0 => special[i / 10 % special.len()],
            1 => (2.0 * v).round(),
            _ => v,
        })
        .collect()
}

#[test]
fn argsort_orders_ties_by_index() {
    for ne in SHAPES {
        for descending in [false, true] {
            let v = values(ne.iter().product());
            let mut case = Case::new();
            let src = case.leaf(DType::F32, ne, &v);
            let dst = case.b.node(Sort::Argsort { descending }, &[Some(src)]).unwrap();
            let case = case.build();
            let want: Vec<f64> = v
                .chunks(ne[0])
                .flat_map(|row| {
                    let mut order: Vec<usize> = (0..ne[0]).collect();
                    order.sort_by(
                        |&a, &b| {
                            if descending { row[b].total_cmp(&row[a]) } else { row[a].total_cmp(&row[b]) }
                        },
                    );
                    order.into_iter().map(|i| i as f64)
                })
                .collect();
            for on in devices() {
                assert_eq!(case.run(on).values(dst), want, "{ne:?} {descending} {}", on.name);
            }
        }
    }
}

#[test]
fn top_k_contains_the_largest() {
    for ne in SHAPES {
        for k in [1, ne[0].div_ceil(3), ne[0]] {
            let v = values(ne.iter().product());
            let mut case = Case::new();
            let src = case.leaf(DType::F32, ne, &v);
            let out = OutputSpec { dtype: DType::I32, ne: [k, ne[1], ne[2], ne[3]] };
            let dst = case.b.node_with_output(Sort::TopK, &[Some(src)], out).unwrap();
            let case = case.build();
            for on in devices() {
                let got = case.run(on).values(dst);
                for (row, got) in v.chunks(ne[0]).zip(got.chunks(k)) {
                    let mut want = row.to_vec();
                    want.sort_by(|a, b| b.total_cmp(a));
                    let mut held: Vec<f32> = got.iter().map(|&i| row[i as usize]).collect();
                    held.sort_by(|a, b| b.total_cmp(a));
                    let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&held), bits(&want[..k]), "{ne:?} {k} {}", on.name);
                    let mut distinct: Vec<usize> = got.iter().map(|&i| i as usize).collect();
                    distinct.sort_unstable();
                    distinct.dedup();
                    assert_eq!(distinct.len(), k, "{ne:?} {k} {}: an index twice", on.name);
                }
            }
        }
    }
}

#[test]
fn argsort_supports_strided_rows() {
    let (ne, v) = ([300, 20, 2, 1], normal(2, 12_000));
    let mut case = Case::new();
    let src = case.leaf_with_desc(TensorDesc::strided(DType::F32, ne, [80, 4, 24_000, 48_000]).unwrap(), &v);
    let dst = case.b.leaf_with_desc(TensorDesc::strided(DType::I32, ne, [4, 1204, 30_000, 60_000]).unwrap()).unwrap();
    case.b.node_into(Sort::Argsort { descending: false }, &[Some(src)], dst).unwrap();
    let case = case.build();
    for on in devices() {
        for (row, got) in v.chunks(300).zip(case.run(on).values(dst).chunks(300)) {
            assert!(got.windows(2).all(|w| row[w[0] as usize] <= row[w[1] as usize]), "{}", on.name);
        }
    }
}

#[test]
fn invalid_nodes_are_rejected() {
    for op in [Sort::TopK, Sort::Argsort { descending: false }, Sort::Argsort { descending: true }].map(Op::from) {
        assert_eq!(Op::decode(op.code(), &op.encode()).unwrap(), Some(op));
    }
    for order in [-1, 2, i32::MIN, i32::MAX] {
        assert!(Op::decode(OpCode::Argsort, &OpParams::default().with_int(0, order)).is_err(), "{order}");
    }
    let built = |op: Sort, src: [usize; 4], dst: (DType, [usize; 4])| {
        let mut case = Case::new();
        let src = case.b.leaf(DType::F32, src).unwrap();
        case.b.node_with_output(op, &[Some(src)], OutputSpec { dtype: dst.0, ne: dst.1 }).is_ok()
    };
    let (ne, up) = ([6, 4, 1, 1], Sort::Argsort { descending: false });
    assert!(built(up, ne, (DType::I32, ne)) && built(Sort::TopK, ne, (DType::I32, [2, 4, 1, 1])));
    assert!(!built(up, ne, (DType::F32, ne)), "indices are I32");
    assert!(!built(up, ne, (DType::I32, [5, 4, 1, 1])), "the source's shape");
    assert!(!built(Sort::TopK, ne, (DType::I32, [7, 4, 1, 1])), "more than there are");
    assert!(!built(Sort::TopK, ne, (DType::I32, [2, 3, 1, 1])), "fewer rows");
    assert!(!built(up, [1 << 31, 1, 1, 1], (DType::I32, [1 << 31, 1, 1, 1])), "indices beyond an i32");
    // Whether the device supports another type is not a matter of the shape rule.
    let mut case = Case::new();
    let src = case.b.leaf(DType::F16, ne).unwrap();
    case.b.node(up, &[Some(src)]).unwrap();
    let case = case.build();
    for on in devices() {
        assert!(case.try_run(on).is_err(), "{}", on.name);
    }
}

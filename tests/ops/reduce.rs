//! SUM, SUM_ROWS, MEAN, CUMSUM, ARGMAX and COUNT_EQUAL: results of every device against the formulas in f64, and the shape rules.

use crate::devices::devices;
use fanout::device::DeviceKind;
use fanout::graph::validate::GraphError;
use fanout::ops::reduce::Reduce;
use fanout::ops::{Op, OpCode, OpParams, OutputSpec};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::compare::{assert_close, rounding};
use fanout_testing::inputs::{index, normal, uniform};
use fanout_testing::op_case::Case;

const SHAPES: [[usize; 4]; 6] =
    [[1, 1, 1, 1], [7, 1, 1, 1], [1, 9, 2, 1], [33, 5, 3, 2], [2500, 11, 1, 1], [200_003, 1, 1, 1]];

#[test]
fn sums_and_means_match_the_oracle() {
    for ne in SHAPES {
        let mut case = Case::new();
        let x = case.leaf(DType::F32, ne, &normal(1, ne.iter().product()));
        let dsts = [Reduce::Sum, Reduce::SumRows, Reduce::Mean].map(|op| case.b.node(op, &[Some(x)]).unwrap());
        let case = case.build();
        let values = case.values(x);
        let sums: Vec<f64> = values.chunks(ne[0]).map(|row| row.iter().sum()).collect();
        let means: Vec<f64> = sums.iter().map(|s| s / ne[0] as f64).collect();
        for on in devices() {
            let run = case.run(on);
            for (dst, want) in dsts.into_iter().zip([&vec![sums.iter().sum()], &sums, &means]) {
                assert_close(&run.values(dst), want, 1.5e-7, 1e-11, &format!("{ne:?} {}", on.name));
            }
        }
    }
}

/// A sequential f32 accumulator would lose every summand after the first.
#[test]
fn sums_are_accumulated_in_f64() {
    let mut values = vec![0.25; 4097];
    values[0] = 16_777_216.0;
    let mut case = Case::new();
    let x = case.leaf(DType::F32, [4097, 1, 1, 1], &values);
    let dsts = [Reduce::Sum, Reduce::SumRows].map(|op| case.b.node(op, &[Some(x)]).unwrap());
    let case = case.build();
    for on in devices() {
        let run = case.run(on);
        for dst in dsts {
            assert_eq!(run.values(dst), [16_777_216.0 + 1024.0], "{}", on.name);
        }
    }
}

#[test]
fn sum_of_half_types_is_rounded_to_the_type() {
    for dtype in [DType::F16, DType::BF16] {
        let mut case = Case::new();
        let x = case.leaf(dtype, [300, 70, 1, 1], &normal(2, 21_000));
        let same = case.b.node(Reduce::Sum, &[Some(x)]).unwrap();
        let case = case.build();
        let want: f64 = case.values(x).iter().sum();
        for on in devices() {
            assert_close(&case.run(on).values(same), &[want], rounding(dtype), 0.0, on.name);
        }
    }
}

#[test]
fn sums_of_all_layouts_match_the_oracle() {
    let ne = [50, 4, 3, 2];
    for nb in [[4, 216, 1000, 4000], [4, 600, 200, 2400], [16, 4, 800, 2400], [4, 0, 200, 600]] {
        let mut case = Case::new();
        let x = case.leaf_with_desc(TensorDesc::strided(DType::F32, ne, nb).unwrap(), &normal(3, 1200));
        // Enlarges the memory: the shape rules reject a broadcast source with more bytes of elements than its memory.
        case.leaf(DType::F32, [1200, 1, 1, 1], &[0.0; 1200]);
        let sum = case.b.node(Reduce::Sum, &[Some(x)]).unwrap();
        let rows = TensorDesc::strided(DType::F32, [1, 4, 3, 2], [4, 8, 40, 160]).unwrap();
        let rows = case.b.leaf_with_desc(rows).unwrap();
        case.b.node_into(Reduce::SumRows, &[Some(x)], rows).unwrap();
        let case = case.build();
        let want: Vec<f64> = case.values(x).chunks(50).map(|row| row.iter().sum()).collect();
        for on in devices() {
            let (run, what) = (case.run(on), format!("{nb:?} {}", on.name));
            assert_close(&run.values(rows), &want, 1e-7, 1e-9, &what);
            assert_close(&run.values(sum), &[want.iter().sum()], 1e-7, 1e-9, &what);
        }
    }
}

fn running_sums(x: &[f64], n: usize) -> Vec<f64> {
    let row = |x: &[f64]| -> Vec<f64> {
        let mut sum = 0.0;
        x.iter().map(|x| (sum += x, sum).1).collect()
    };
    x.chunks(n).flat_map(row).collect()
}

/// Sums of integers are exact in any order.
#[test]
fn cumsum_of_integers_is_exact() {
    let longer = [[1, 70, 3, 1], [1023, 2, 1, 1], [1024, 1, 3, 1], [1025, 3, 2, 1], [2049, 1, 1, 1]];
    for ne in SHAPES.into_iter().chain(longer) {
        let values: Vec<f32> = normal(6, ne.iter().product()).iter().map(|v| (v * 8.0).round()).collect();
        let mut case = Case::new();
        let x = case.leaf(DType::F32, ne, &values);
        let dst = case.b.node(Reduce::Cumsum, &[Some(x)]).unwrap();
        let case = case.build();
        let want = running_sums(&case.values(x), ne[0]);
        for on in devices() {
            assert_close(&case.run(on).values(dst), &want, 0.0, 0.0, &format!("{ne:?} {}", on.name));
        }
    }
}

#[test]
fn cumsum_rounds_each_sum() {
    let n = 40_001;
    let values = uniform(7, 2 * n, 0.0, 1.0);
    let mut case = Case::new();
    let x = case.leaf(DType::F32, [n, 2, 1, 1], &values);
    let dst = case.b.node(Reduce::Cumsum, &[Some(x)]).unwrap();
    let case = case.build();
    let one_by_one: Vec<u8> = values
        .chunks(n)
        .flat_map(|row| row.iter().scan(0f32, |sum, x| (*sum += x, Some(*sum)).1))
        .flat_map(f32::to_le_bytes)
        .collect();
    for on in devices() {
        let run = case.run(on);
        assert_close(&run.values(dst), &running_sums(&case.values(x), n), 5e-5, 0.0, on.name);
        if on.device.info().kind == DeviceKind::Cpu {
            assert!(run.bytes(dst) == one_by_one, "{}: another order than ggml's", on.name);
        }
    }
}

#[test]
fn cumsum_propagates_infinities_and_nan() {
    const NAN: f32 = f32::NAN;
    const INF: f32 = f32::INFINITY;
    let rows: [([f32; 4], [f32; 4]); 4] = [
        ([1.0, INF, 2.0, 3.0], [1.0, INF, INF, INF]),
        ([INF, 1.0, -INF, 1.0], [INF, INF, NAN, NAN]),
        ([2.0, NAN, 1.0, 1.0], [2.0, NAN, NAN, NAN]),
        ([f32::MAX, f32::MAX, -1.0, 0.0], [f32::MAX, INF, INF, INF]),
    ];
    let mut case = Case::new();
    let x = case.leaf(DType::F32, [4, 4, 1, 1], &rows.map(|(row, _)| row).concat());
    let dst = case.b.node(Reduce::Cumsum, &[Some(x)]).unwrap();
    let case = case.build();
    let want: Vec<f64> = rows.iter().flat_map(|(_, want)| want.map(f64::from)).collect();
    for on in devices() {
        assert_close(&case.run(on).values(dst), &want, 0.0, 0.0, on.name);
    }
}

#[test]
fn cumsum_of_all_layouts_is_exact() {
    let desc = |ne, nb| TensorDesc::strided(DType::F32, ne, nb).unwrap();
    let ne = [6, 4, 3, 2];
    let (padded, permuted) = (desc(ne, [4, 40, 200, 800]), desc(ne, [4, 72, 24, 288]));
    let (transposed, repeated) = (desc(ne, [16, 4, 96, 288]), desc(ne, [4, 0, 24, 72]));
    let long = desc([2050, 3, 1, 1], [12, 4, 24_600, 24_600]);
    let cases = [(padded, permuted), (permuted, padded), (transposed, padded), (repeated, transposed), (long, long)];
    for (dx, dd) in cases {
        let values: Vec<f32> = normal(8, dx.elements()).iter().map(|v| (v * 8.0).round()).collect();
        let mut case = Case::new();
        let x = case.leaf_with_desc(dx, &values);
        // Enlarges the memory: the shape rules reject a broadcast source with more bytes of elements than its memory.
        case.leaf(DType::F32, [dx.elements(), 1, 1, 1], &vec![0.0; dx.elements()]);
        let dst = case.b.leaf_with_desc(dd).unwrap();
        case.b.node_into(Reduce::Cumsum, &[Some(x)], dst).unwrap();
        let case = case.build();
        let want = running_sums(&case.values(x), dx.ne()[0]);
        for on in devices() {
            assert_close(&case.run(on).values(dst), &want, 0.0, 0.0, &format!("{dx:?} {}", on.name));
        }
    }
}

#[test]
fn argmax_returns_the_last_maximum() {
    const NAN: f32 = f32::NAN;
    const INF: f32 = f32::INFINITY;
    let rows: [([f32; 5], f64); 8] = [
        ([1.0, 3.0, 2.0, 3.0, 0.0], 3.0),
        ([-1.0, -3.0, -2.0, -3.0, -4.0], 0.0),
        ([0.0, -0.0, 0.0, -0.0, -1.0], 3.0),
        ([-INF; 5], 4.0),
        ([NAN, 1.0, NAN, 2.0, NAN], 3.0),
        ([NAN; 5], 0.0),
        ([2.0, INF, 3.0, INF, 4.0], 3.0),
        ([7.0; 5], 4.0),
    ];
    let mut case = Case::new();
    let desc = TensorDesc::strided(DType::F32, [5, 8, 1, 1], [4, 28, 224, 224]).unwrap();
    let x = case.leaf_with_desc(desc, &rows.map(|(row, _)| row).concat());
    let dst = case.b.node(Reduce::Argmax, &[Some(x)]).unwrap();
    let case = case.build();
    for on in devices() {
        assert_eq!(case.run(on).values(dst), rows.map(|(_, want)| want), "{}", on.name);
    }
}

#[test]
fn argmax_of_long_rows_returns_the_last_maximum() {
    for (n, m) in [(1024, 3), (1025, 20), (40_000, 4)] {
        // Few distinct values, so that equal maxima lie in different pieces of a row.
        let values: Vec<f32> = normal(4, n * m).iter().map(|v| v.round()).collect();
        let mut case = Case::new();
        let x = case.leaf(DType::F32, [n, m, 1, 1], &values);
        let dst = case.b.node(Reduce::Argmax, &[Some(x)]).unwrap();
        let case = case.build();
        let last_of_largest = |row: &[f32]| (0..n).fold(0, |best, k| if row[k] >= row[best] { k } else { best }) as f64;
        let want: Vec<f64> = values.chunks(n).map(last_of_largest).collect();
        for on in devices() {
            assert_eq!(case.run(on).values(dst), want, "{n} {}", on.name);
        }
    }
}

#[test]
fn equal_integers_are_counted() {
    for (ne, permuted) in
        [([1, 1, 1, 1], false), ([1500, 3, 1, 1], false), ([40, 5, 3, 2], false), ([40, 5, 3, 2], true)]
    {
        let n: usize = ne.iter().product();
        let values = |seed| normal(seed, n).iter().map(|v| v.round() as i64).collect::<Vec<_>>();
        let (a, b) = (values(6), values(7));
        let mut case = Case::new();
        let (x, mut y) = (case.indices(DType::I32, ne, &a), case.indices(DType::I32, ne, &b));
        let mut order: Vec<usize> = (0..n).collect();
        if permuted {
            // The elements of y with the last dimension first.
            let strides = [4 * ne[1] * ne[2] * ne[3], 4, 4 * ne[1], 4 * ne[1] * ne[2]];
            y = case.b.view(y, TensorDesc::strided(DType::I32, ne, strides).unwrap(), 0).unwrap();
            for (k, place) in order.iter_mut().enumerate() {
                let i = index(ne, k);
                *place = (0..4).map(|d| i[d] * strides[d] / 4).sum();
            }
        }
        let dst = case.b.node(Reduce::CountEqual, &[Some(x), Some(y)]).unwrap();
        let case = case.build();
        let want = (0..n).filter(|&k| a[k] == b[order[k]]).count() as f64;
        for on in devices() {
            assert_eq!(case.run(on).values(dst), [want], "{ne:?} {permuted} {}", on.name);
        }
    }
    let refused = |ta: DType, tb: DType, bn: [usize; 4]| {
        let mut case = Case::new();
        let (x, y) = (case.b.leaf(ta, [4, 3, 1, 1]).unwrap(), case.b.leaf(tb, bn).unwrap());
        case.b.node(Reduce::CountEqual, &[Some(x), Some(y)]).is_err()
            || devices()[0].device.prepare(case.b.build().into()).is_err()
    };
    assert!(!refused(DType::I32, DType::I32, [4, 3, 1, 1]));
    assert!(refused(DType::I32, DType::I32, [12, 1, 1, 1]), "another shape");
    assert!(refused(DType::F32, DType::F32, [4, 3, 1, 1]), "floats");
    assert!(refused(DType::I32, DType::I64, [4, 3, 1, 1]), "two types");
}

#[test]
fn invalid_nodes_are_rejected() {
    for (op, code) in [
        (Reduce::Sum, OpCode::Sum),
        (Reduce::SumRows, OpCode::SumRows),
        (Reduce::Cumsum, OpCode::Cumsum),
        (Reduce::Mean, OpCode::Mean),
        (Reduce::Argmax, OpCode::Argmax),
        (Reduce::CountEqual, OpCode::CountEqual),
    ] {
        assert_eq!(Op::decode(code, &OpParams::default()), Ok(Some(op.into())));
        assert_eq!((Op::from(op).code(), Op::from(op).encode()), (code, OpParams::default()));
    }
    let refused = |op, ne, out: Option<(DType, [usize; 4])>| {
        let mut case = Case::new();
        let x = case.leaf(DType::F32, ne, &normal(5, ne.iter().product()));
        match out {
            Some((dtype, ne)) => case.b.node_with_output(op, &[Some(x)], OutputSpec { dtype, ne }),
            None => case.b.node(op, &[Some(x)]),
        }
        .is_err()
    };
    let ne = [4, 3, 2, 1];
    assert!(refused(Reduce::Argmax, ne, None), "no matrix");
    assert!(refused(Reduce::Argmax, [4, 3, 1, 1], Some((DType::F32, [3, 1, 1, 1]))), "indices as floats");
    assert!(refused(Reduce::Sum, ne, Some((DType::F32, [2, 1, 1, 1]))));
    assert!(refused(Reduce::SumRows, ne, Some((DType::F32, [1, 3, 1, 1]))));
    assert!(refused(Reduce::Cumsum, ne, Some((DType::F32, [4, 3, 1, 2]))));
    assert!(refused(Reduce::Cumsum, ne, Some((DType::F16, ne))));
    assert!(refused(Reduce::Cumsum, [4, 0, 2, 1], None), "nothing to sum");
    assert!(!refused(Reduce::Cumsum, ne, Some((DType::F32, ne))));
    assert!(refused(Reduce::Mean, ne, Some((DType::F32, ne))));
    assert!(!refused(Reduce::Mean, ne, Some((DType::F32, [1, 3, 2, 1]))));
}

#[test]
fn invalid_cumsum_is_rejected() {
    let ne = [8, 3, 1, 1];
    let mut case = Case::new();
    let x = case.leaf(DType::F32, ne, &normal(9, 24));
    let same = case.b.view(x, TensorDesc::contiguous(DType::F32, ne).unwrap(), 0).unwrap();
    let error = case.b.node_into(Reduce::Cumsum, &[Some(x)], same).unwrap_err();
    assert!(matches!(error.rule(), Some(GraphError::Overlap { index: 0, .. })), "in place: {error:?}");
    assert!(Case::new().b.node(Reduce::Cumsum, &fanout::graph::NO_SOURCES).is_err(), "no source");
    for dtype in [DType::F16, DType::I32] {
        let mut case = Case::new();
        let x = case.leaf(dtype, ne, &normal(9, 24));
        case.b.node(Reduce::Cumsum, &[Some(x)]).unwrap();
        let graph = case.build().graph;
        assert!(devices()[0].device.prepare(graph).is_err(), "{dtype}");
    }
}

//! SILU_BACK, RMS_NORM_BACK, SOFT_MAX_BACK, REPEAT_BACK and GET_ROWS_BACK: results of every device against the formulas in f64;
//! the gradients also against differences of the ops.

use crate::devices::devices;
use fanout::ops::backward::Backward;
use fanout::ops::{Op, OpCode, OpParams, OutputSpec};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::compare::{assert_close, rounding};
use fanout_testing::inputs::{at, index, normal};
use fanout_testing::op_case::Case;

const EPS: f32 = 0.02;
const SCALE: f32 = 0.5;
const ELEMENTWISE: [Backward; 3] = [Backward::Silu, Backward::RmsNorm { eps: EPS }, Backward::SoftMax { scale: SCALE }];

/// The gradient of a row.
fn row_gradient(op: Backward, dy: &[f64], x: &[f64]) -> Vec<f64> {
    let n = x.len() as f64;
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let pairs = dy.iter().zip(x);
    match op {
        Backward::Silu => pairs
            .map(|(dy, x)| {
                let s = 1.0 / (1.0 + (-x).exp());
                dy * s * (1.0 + x * (1.0 - s))
            })
            .collect(),
        Backward::RmsNorm { eps } => {
            let (xx, xdy, eps) = (dot(x, x), dot(x, dy), f64::from(eps));
            pairs.map(|(dy, x)| (dy - x * xdy / (xx + n * eps)) / (xx / n + eps).sqrt()).collect()
        }
        Backward::SoftMax { scale } => {
            let sum = dot(x, dy);
            pairs.map(|(dy, y)| (dy - sum) * y * f64::from(scale)).collect()
        }
        Backward::Repeat | Backward::GetRows => unreachable!("no op on rows"),
    }
}

/// The forward op whose gradient it is.
fn forward(op: Backward, x: &[f64]) -> Vec<f64> {
    match op {
        Backward::RmsNorm { eps } => {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
            x.iter().map(|x| x / (mean + f64::from(eps)).sqrt()).collect()
        }
        Backward::SoftMax { scale } => {
            let e: Vec<f64> = x.iter().map(|x| (x * f64::from(scale)).exp()).collect();
            let sum: f64 = e.iter().sum();
            e.iter().map(|e| e / sum).collect()
        }
        _ => x.iter().map(|x| x / (1.0 + (-x).exp())).collect(),
    }
}

/// The oracle itself: the gradient is the derivative of the forward op.
#[test]
fn the_oracle_is_the_derivative() {
    let [x, dy] = [1, 2].map(|seed| normal(seed, 9).into_iter().map(f64::from).collect::<Vec<_>>());
    for op in ELEMENTWISE {
        // The gradient of a softmax takes its result.
        let source = if let Backward::SoftMax { .. } = op { forward(op, &x) } else { x.clone() };
        let gradient = row_gradient(op, &dy, &source);
        for k in 0..x.len() {
            let loss = |step: f64| {
                let mut x = x.clone();
                x[k] += step;
                forward(op, &x).iter().zip(&dy).map(|(y, dy)| y * dy).sum::<f64>()
            };
            let difference = (loss(1e-5) - loss(-1e-5)) / 2e-5;
            assert!((gradient[k] - difference).abs() < 1e-8, "{op:?}: {} {difference}", gradient[k]);
        }
    }
}

#[track_caller]
fn check(op: Backward, (dy, x, out): (TensorDesc, TensorDesc, TensorDesc), onto: Option<usize>) {
    let mut case = Case::new();
    let ids = [(dy, 1), (x, 2)].map(|(t, seed)| case.leaf_with_desc(t, &normal(seed, t.elements())));
    let dst = match onto {
        Some(i) => case.b.view(ids[i], [dy, x][i], 0).unwrap(),
        None => case.b.leaf_with_desc(out).unwrap(),
    };
    case.b.node_into(op, &ids.map(Some), dst).unwrap();
    let case = case.build();
    let n = dy.ne()[0];
    let (dys, xs) = (case.values(ids[0]), case.values(ids[1]));
    let rows = dys.chunks(n).zip(xs.chunks(n));
    let want: Vec<f64> = rows.flat_map(|(dy, x)| row_gradient(op, dy, x)).collect();
    for on in devices() {
        let what = format!("{op:?} {dy:?} {x:?} onto {onto:?} {}", on.name);
        assert_close(&case.run(on).values(dst), &want, rounding(dy.dtype()), 1e-5, &what);
    }
}

#[test]
fn gradients_of_rows_match_the_oracle() {
    for op in ELEMENTWISE {
        for ne in [[1, 1, 1, 1], [7, 3, 2, 2], [1000, 5, 1, 1], [2500, 3, 2, 1], [64, 90, 1, 1]] {
            let t = TensorDesc::contiguous(DType::F32, ne).unwrap();
            for onto in [None, Some(0), Some(1)] {
                check(op, (t, t, t), onto);
            }
        }
    }
    let half = TensorDesc::contiguous(DType::F16, [1200, 3, 1, 1]).unwrap();
    check(Backward::Silu, (half, half, half), None);
    let ne = [6, 4, 3, 2];
    let t = |nb| TensorDesc::strided(DType::F32, ne, nb).unwrap();
    let (padded, permuted) = (t([4, 40, 200, 800]), t([4, 72, 24, 288]));
    for op in &ELEMENTWISE[..2] {
        check(*op, (padded, permuted, permuted), None);
        check(*op, (padded, permuted, permuted), Some(0));
        check(*op, (t([16, 4, 96, 288]), padded, padded), Some(1));
    }
}

#[test]
fn repeated_elements_are_summed() {
    for (n, m) in [
        ([1, 1, 1, 1], [1, 1, 1, 1]),
        ([12, 6, 4, 2], [12, 6, 4, 2]),
        ([12, 6, 4, 2], [4, 3, 2, 1]),
        ([12, 6, 4, 2], [1, 6, 1, 2]),
        ([1500, 4, 1, 1], [1500, 1, 1, 1]),
        ([3000, 8, 1, 1], [1500, 2, 1, 1]),
        ([2048, 40, 2, 1], [2, 1, 2, 1]),
        ([3, 5000, 1, 1], [1, 1, 1, 1]),
        // More summands than a phase has.
        ([600_000, 1, 1, 1], [1, 1, 1, 1]),
        ([1025, 600, 1, 1], [1025, 1, 1, 1]),
    ] {
        for strided in [false, true] {
            let nb = [4, 4 * n[0] * n[2] * n[3], 4 * n[0], 4 * n[0] * n[2]];
            let desc =
                if strided { TensorDesc::strided(DType::F32, n, nb) } else { TensorDesc::contiguous(DType::F32, n) };
            let desc = desc.unwrap();
            // Integers, so that sums of any order are exact.
            let values: Vec<f32> = normal(1, desc.elements()).iter().map(|v| (v * 4.0).round()).collect();
            let mut case = Case::new();
            let dy = case.leaf_with_desc(desc, &values);
            let out = OutputSpec { dtype: DType::F32, ne: m };
            let dst = case.b.node_with_output(Backward::Repeat, &[Some(dy)], out).unwrap();
            let case = case.build();
            let mut want = vec![0.0; m.iter().product()];
            for (k, value) in values.iter().enumerate() {
                let i = index(n, k);
                want[at(m, [i[0] % m[0], i[1] % m[1], i[2] % m[2], i[3] % m[3]])] += f64::from(*value);
            }
            for on in devices() {
                assert_eq!(case.run(on).values(dst), want, "{n:?} {m:?} {strided} {}", on.name);
            }
        }
    }
}

/// Sums the rows of a gradient `[n, ids]` into the rows that the ids name.
fn check_row_sums(dy: TensorDesc, values: &[f32], ids: &[i64], rows: usize) {
    let n = dy.ne()[0];
    let mut case = Case::new();
    let gradient = case.leaf_with_desc(dy, values);
    let list = case.indices(DType::I32, [ids.len(), 1, 1, 1], ids);
    let out = OutputSpec { dtype: DType::F32, ne: [n, rows, 1, 1] };
    let dst = case.b.node_with_output(Backward::GetRows, &[Some(gradient), Some(list)], out).unwrap();
    let case = case.build();
    let mut want = vec![0.0; n * rows];
    for (i, value) in values.iter().enumerate() {
        want[ids[i / n] as usize * n + i % n] += f64::from(*value);
    }
    for on in devices() {
        assert_eq!(case.run(on).values(dst), want, "{dy:?} to {rows} rows {}", on.name);
    }
}

#[test]
fn rows_are_summed_by_id() {
    for (n, k, rows, dtype) in [
        (1, 1, 1, DType::F32),
        (9, 0, 4, DType::F32),
        (70, 9, 5, DType::F32),
        (1500, 40, 7, DType::F16),
        (5, 3000, 12, DType::F32),
        (8192, 300, 3, DType::F32),
    ] {
        let values: Vec<f32> = normal(1, n * k).iter().map(|v| (v * 4.0).round()).collect();
        let ids: Vec<i64> = (0..k as i64).map(|i| (i * i + 3) % rows as i64).collect();
        let desc = TensorDesc::strided(dtype, [n, k, 1, 1], [dtype.block_bytes(), (n + 3) * 4, 0, 0]).unwrap();
        check_row_sums(desc, &values, &ids, rows);
    }
}

/// More rows of gradients than a grid has blocks in y and z (65,535).
#[test]
fn gradients_of_many_rows_are_added() {
    let (n, k, rows) = (2, 70_000, 5);
    let values: Vec<f32> = (0..n * k).map(|i| (i % 7) as f32).collect();
    let ids: Vec<i64> = (0..k).map(|i| (i * i % rows) as i64).collect();
    check_row_sums(TensorDesc::contiguous(DType::F32, [n, k, 1, 1]).unwrap(), &values, &ids, rows);
}

#[test]
fn ids_outside_of_the_rows_are_rejected() {
    for bad in [-1, 4, i64::from(i32::MAX), i64::from(i32::MIN)] {
        let mut case = Case::new();
        let dy = case.leaf(DType::F32, [8, 3, 1, 1], &normal(1, 24));
        let ids = case.indices(DType::I32, [3, 1, 1, 1], &[0, bad, 1]);
        let out = OutputSpec { dtype: DType::F32, ne: [8, 4, 1, 1] };
        case.b.node_with_output(Backward::GetRows, &[Some(dy), Some(ids)], out).unwrap();
        let case = case.build();
        for on in devices() {
            let error = case.try_run(on).err();
            assert!(on.reported_bad_data(&error, OpCode::GetRowsBack), "{bad}: {error:?}");
        }
    }
}

#[test]
fn parameters_round_trip() {
    for (code, op, words) in [
        (OpCode::SiluBack, Backward::Silu, OpParams::default()),
        (OpCode::RmsNormBack, Backward::RmsNorm { eps: 0.5 }, OpParams::default().with_float(0, 0.5)),
        (OpCode::SoftMaxBack, Backward::SoftMax { scale: 2.0 }, OpParams::default().with_float(0, 2.0)),
        (OpCode::RepeatBack, Backward::Repeat, OpParams::default()),
        (OpCode::GetRowsBack, Backward::GetRows, OpParams::default()),
    ] {
        assert_eq!((Op::from(op).code(), Op::from(op).encode()), (code, words));
        assert_eq!(Op::decode(code, &words), Ok(Some(op.into())));
    }
    for eps in [-1.0, f32::NAN] {
        assert!(Op::decode(OpCode::RmsNormBack, &OpParams::default().with_float(0, eps)).is_err());
    }
    for max_bias in [8.0, -1.0, f32::NAN] {
        assert!(Op::decode(OpCode::SoftMaxBack, &OpParams::default().with_float(1, max_bias)).is_err());
    }
}

#[test]
fn invalid_nodes_are_rejected() {
    let build = |op: Backward, a: TensorDesc, b: Option<TensorDesc>, ne: [usize; 4]| {
        let mut case = Case::new();
        let a = case.b.leaf_with_desc(a).unwrap();
        let b = b.map(|b| case.b.leaf_with_desc(b).unwrap());
        case.b.node_with_output(op, &[Some(a), b], OutputSpec { dtype: DType::F32, ne })
    };
    let (f32, i32) =
        (|ne| TensorDesc::contiguous(DType::F32, ne).unwrap(), |ne| TensorDesc::contiguous(DType::I32, ne).ok());
    let ne = [6, 4, 1, 1];
    for op in ELEMENTWISE {
        assert!(build(op, f32(ne), Some(f32(ne)), ne).is_ok());
        assert!(build(op, f32(ne), None, ne).is_err(), "{op:?}: one source");
        assert!(build(op, f32(ne), Some(f32([6, 1, 1, 1])), ne).is_err(), "{op:?}: broadcast");
        assert!(build(op, f32(ne), Some(f32(ne)), [4, 6, 1, 1]).is_err(), "{op:?}: another shape");
    }
    let gaps = TensorDesc::strided(DType::F32, ne, [4, 32, 128, 128]).unwrap();
    assert!(build(ELEMENTWISE[2], gaps, Some(f32(ne)), ne).is_err(), "a softmax with gaps");
    assert!(build(Backward::Repeat, f32(ne), None, [4, 4, 1, 1]).is_err(), "no multiple");
    assert!(build(Backward::GetRows, f32(ne), i32([4, 1, 1, 1]), [6, 9, 1, 1]).is_ok());
    for (dy, ids, ne, what) in [
        (f32(ne), i32([5, 1, 1, 1]), [6, 9, 1, 1], "more ids than rows"),
        (f32(ne), i32([2, 2, 1, 1]), [6, 9, 1, 1], "a matrix of ids"),
        (f32(ne), i32([4, 1, 1, 1]), [5, 9, 1, 1], "shorter rows"),
        (f32([6, 4, 2, 1]), i32([4, 1, 1, 1]), [6, 9, 1, 1], "planes of gradients"),
        (f32(ne), TensorDesc::contiguous(DType::I64, [4, 1, 1, 1]).ok(), [6, 9, 1, 1], "wide ids"),
    ] {
        assert!(build(Backward::GetRows, dy, ids, ne).is_err(), "{what}");
    }
    let half = TensorDesc::contiguous(DType::F16, ne).unwrap();
    let mut case = Case::new();
    let (a, b) = (case.b.leaf_with_desc(half).unwrap(), case.b.leaf_with_desc(half).unwrap());
    case.b.node(ELEMENTWISE[1], &[Some(a), Some(b)]).unwrap();
    assert!(devices()[0].device.prepare(case.b.build().into()).is_err(), "a norm of F16");
}

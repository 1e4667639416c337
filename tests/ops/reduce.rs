use crate::common::{Case, assert_close, devices, normal, rounding};
use fanout::ops::reduce::Reduce;
use fanout::ops::{Op, OpCode, Out, Words};
use fanout::tensor::{DType, TensorDesc};

const SHAPES: [[usize; 4]; 6] =
    [[1, 1, 1, 1], [7, 1, 1, 1], [1, 9, 2, 1], [33, 5, 3, 2], [2500, 11, 1, 1], [200_003, 1, 1, 1]];

#[test]
fn sums_and_means() {
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

/// A f32 accumulator would lose every second summand here.
#[test]
fn sums_are_exact_where_f32_is_not() {
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
fn sum_of_half_types() {
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
fn layouts() {
    let ne = [50, 4, 3, 2];
    for nb in [[4, 216, 1000, 4000], [4, 600, 200, 2400], [16, 4, 800, 2400], [4, 0, 200, 600]] {
        let mut case = Case::new();
        let x = case.leaf_of(TensorDesc::strided(DType::F32, ne, nb).unwrap(), &normal(3, 1200));
        // Repeated rows must not hold more elements than the buffer could.
        case.leaf(DType::F32, [1200, 1, 1, 1], &[0.0; 1200]);
        let sum = case.b.node(Reduce::Sum, &[Some(x)]).unwrap();
        let rows = TensorDesc::strided(DType::F32, [1, 4, 3, 2], [4, 8, 40, 160]).unwrap();
        let rows = case.b.leaf_of(rows).unwrap();
        case.b.node_onto(Reduce::SumRows, &[Some(x)], rows).unwrap();
        let case = case.build();
        let want: Vec<f64> = case.values(x).chunks(50).map(|row| row.iter().sum()).collect();
        for on in devices() {
            let (run, what) = (case.run(on), format!("{nb:?} {}", on.name));
            assert_close(&run.values(rows), &want, 1e-7, 1e-9, &what);
            assert_close(&run.values(sum), &[want.iter().sum()], 1e-7, 1e-9, &what);
        }
    }
}

#[test]
fn argmax_takes_the_last_of_equals() {
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
    let x = case.leaf_of(desc, &rows.map(|(row, _)| row).concat());
    let dst = case.b.node(Reduce::Argmax, &[Some(x)]).unwrap();
    let case = case.build();
    for on in devices() {
        assert_eq!(case.run(on).values(dst), rows.map(|(_, want)| want), "{}", on.name);
    }
}

#[test]
fn argmax_of_long_rows() {
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
fn rules() {
    for (op, code) in [
        (Reduce::Sum, OpCode::Sum),
        (Reduce::SumRows, OpCode::SumRows),
        (Reduce::Mean, OpCode::Mean),
        (Reduce::Argmax, OpCode::Argmax),
    ] {
        assert_eq!(Op::decode(code, &Words::default()), Ok(Some(op.into())));
        assert_eq!((Op::from(op).code(), Op::from(op).encode()), (code, Words::default()));
    }
    let refused = |op, ne, out: Option<(DType, [usize; 4])>| {
        let mut case = Case::new();
        let x = case.leaf(DType::F32, ne, &normal(5, ne.iter().product()));
        match out {
            Some((dtype, ne)) => case.b.node_as(op, &[Some(x)], Out { dtype, ne }).unwrap(),
            None => case.b.node(op, &[Some(x)]).unwrap(),
        };
        case.b.build().is_err()
    };
    let ne = [4, 3, 2, 1];
    assert!(refused(Reduce::Argmax, ne, None), "no matrix");
    assert!(refused(Reduce::Argmax, [4, 3, 1, 1], Some((DType::F32, [3, 1, 1, 1]))), "indices as floats");
    assert!(refused(Reduce::Sum, ne, Some((DType::F32, [2, 1, 1, 1]))));
    assert!(refused(Reduce::SumRows, ne, Some((DType::F32, [1, 3, 1, 1]))));
    assert!(refused(Reduce::Mean, ne, Some((DType::F32, ne))));
    assert!(!refused(Reduce::Mean, ne, Some((DType::F32, [1, 3, 2, 1]))));
}

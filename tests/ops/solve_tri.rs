//! SOLVE_TRI: solutions of every device against forward substitution in f64, and shape rules.

use crate::devices::devices;
use fanout::ops::solve_tri::SolveTri;
use fanout::ops::{Op, OpCode, OpParams};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::compare::assert_close;
use fanout_testing::inputs::{at, normal, uniform};
use fanout_testing::op_case::Case;

/// Columns of the right side, rows, and planes.
const SHAPES: [[usize; 4]; 8] = [
    [1, 1, 1, 1],
    [5, 7, 2, 3],
    [32, 64, 2, 1],
    [33, 20, 1, 2],
    [100, 40, 2, 2],
    [31, 128, 1, 1],
    [3, 1, 1, 1],
    // Several phases.
    [2, 500, 1, 1],
];

#[test]
fn solutions_match_the_oracle() {
    for ne in SHAPES {
        let [k, n, b2, b3] = ne;
        let matrix = [n, n, b2, b3];
        let mut a = uniform(1, n * n * b2 * b3, -1.0, 1.0);
        for (i, a) in a.iter_mut().enumerate() {
            let (column, row) = (i % n, i / n % n);
            match column.cmp(&row) {
                // Small, so that the solution does not grow.
                std::cmp::Ordering::Less => *a /= (n as f32).sqrt(),
                std::cmp::Ordering::Equal => *a += 1.5,
                std::cmp::Ordering::Greater => *a = f32::NAN,
            }
        }
        let mut case = Case::new();
        let srcs = [case.leaf(DType::F32, matrix, &a), case.leaf(DType::F32, ne, &normal(2, ne.iter().product()))];
        let dst = case.b.node(SolveTri, &srcs.map(Some)).unwrap();
        let case = case.build();
        let (a, b) = (case.values(srcs[0]), case.values(srcs[1]));
        let mut want = vec![0.0; b.len()];
        for plane in 0..b2 * b3 {
            let (i2, i3) = (plane % b2, plane / b2);
            for column in 0..k {
                for row in 0..n {
                    let factor = |t: usize| a[at(matrix, [t, row, i2, i3])];
                    let sum: f64 = (0..row).map(|t| factor(t) * want[at(ne, [column, t, i2, i3])]).sum();
                    let place = at(ne, [column, row, i2, i3]);
                    want[place] = (b[place] - sum) / factor(row);
                }
            }
        }
        for on in devices() {
            assert_close(&case.run(on).values(dst), &want, 1e-4, 1e-4, &format!("{}: {ne:?}", on.name));
        }
    }
}

#[test]
fn invalid_nodes_are_rejected() {
    assert_eq!(Op::decode(OpCode::SolveTri, &OpParams::default()).unwrap(), Some(SolveTri.into()));
    let build = |a: TensorDesc, b: TensorDesc| {
        let mut case = Case::new();
        let srcs = [a, b].map(|desc| Some(case.b.leaf_with_desc(desc).unwrap()));
        case.b.node(SolveTri, &srcs).is_ok()
    };
    let packed = |dtype, ne| TensorDesc::contiguous(dtype, ne).unwrap();
    let (a, b) = (packed(DType::F32, [4, 4, 2, 3]), packed(DType::F32, [5, 4, 2, 3]));
    assert!(build(a, b));
    for wrong in [[4, 5, 2, 3], [5, 5, 2, 3], [4, 4, 1, 3], [4, 4, 2, 1]] {
        assert!(!build(packed(DType::F32, wrong), b), "{wrong:?}");
    }
    assert!(!build(packed(DType::F16, [4, 4, 2, 3]), b), "F16");
    assert!(!build(a, packed(DType::F16, [5, 4, 2, 3])), "F16");
    let gaps = TensorDesc::strided(DType::F32, [4, 4, 2, 3], [4, 20, 80, 160]).unwrap();
    assert!(!build(gaps, b), "gaps between rows");
}

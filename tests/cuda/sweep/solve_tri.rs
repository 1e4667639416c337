//! Cases of SOLVE_TRI.

use super::Sweep;
use fanout::ops::solve_tri::SolveTri;
use fanout::tensor::DType::F32;
use fanout_testing::inputs::{normal, uniform};
use fanout_testing::op_case::Case;

/// More columns than threads of a block; matrices in batches; rows that fit shared memory, and one more.
pub fn run(sweep: &Sweep) {
    for (n, columns, planes) in
        [(1, 1, [1, 1]), (5, 3, [2, 2]), (64, 64, [3, 1]), (33, 40, [1, 2]), (384, 2, [1, 1]), (385, 33, [1, 1])]
    {
        let (matrices, [b2, b3]) = (planes[0] * planes[1], planes);
        // Small elements beside a diagonal around 1 keep the solution of the size of the right side.
        let mut a: Vec<f32> = normal(1, n * n * matrices).iter().map(|v| v / n as f32).collect();
        let diagonal = uniform(2, n * matrices, 0.5, 2.0);
        for (k, value) in diagonal.into_iter().enumerate() {
            a[k / n * n * n + k % n * (n + 1)] = value;
        }
        let mut case = Case::new();
        let a = case.leaf(F32, [n, n, b2, b3], &a);
        let b = case.leaf(F32, [columns, n, b2, b3], &normal(3, columns * n * matrices));
        let x = case.b.node(SolveTri, &[Some(a), Some(b)]).unwrap();
        sweep.check(&case.build(), &[x], 1e-11, &format!("{n} rows, {columns} columns, {planes:?}"));
    }
}

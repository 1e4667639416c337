//! Cases of POOL_1D and POOL_2D.

use super::Sweep;
use super::layouts::{LAYOUTS, desc, leaf, onto};
use fanout::ops::pool::{Pool, PoolAxis, PoolKind};
use fanout::tensor::DType::{F16, F32};
use fanout_testing::inputs::normal;
use fanout_testing::op_case::Case;

/// Random windows, also wholly in the padding; rows longer than a block of threads; NaN.
pub fn run(sweep: &Sweep) {
    let mut rng = fastrand::Rng::with_seed(3);
    for round in 0..48 {
        let (dtype, layout) = ([F32, F16][round % 2], LAYOUTS[round / 2 % 4]);
        let kind = [PoolKind::Max, PoolKind::Average][round / 8 % 2];
        let ne =
            [rng.usize(1..if round % 5 == 0 { 600 } else { 20 }), rng.usize(1..9), rng.usize(1..4), rng.usize(1..3)];
        let mut axis = |n: usize| loop {
            let axis = PoolAxis { kernel: rng.i32(1..6), stride: rng.i32(1..4), padding: rng.i32(-1..7) };
            if let Some(outputs) = axis.output(n) {
                return (axis, outputs);
            }
        };
        let ((x, ow), (y, oh)) = (axis(ne[0]), axis(ne[1]));
        for (op, out) in [
            (Pool::Pool1d { kind, axis: x }, [ow, ne[1], ne[2], ne[3]]),
            (Pool::Pool2d { kind, axes: [x, y] }, [ow, oh, ne[2], ne[3]]),
        ] {
            let mut case = Case::new();
            let x = leaf(&mut case, dtype, ne, layout, round as u64);
            let dst = onto(&mut case, F32, out, layout);
            let dst = case.b.node_into(op, &[Some(x)], dst).unwrap();
            sweep.check_bytes(&case.build(), &[dst], &format!("{op:?} {dtype} {ne:?} {layout:?}"));
        }
    }
    // A NaN is the maximum unless an element follows it in the window.
    let mut values = normal(4, 90);
    values[7] = f32::NAN;
    values[40..44].fill(f32::NAN);
    let axis = PoolAxis { kernel: 3, stride: 2, padding: 1 };
    let mut case = Case::new();
    let x = case.leaf_with_desc(desc(F32, [10, 9, 1, 1], LAYOUTS[0]), &values);
    let y = case.b.node(Pool::Pool2d { kind: PoolKind::Max, axes: [axis; 2] }, &[Some(x)]).unwrap();
    sweep.check_bytes(&case.build(), &[y], "the maximum of NaN");
}

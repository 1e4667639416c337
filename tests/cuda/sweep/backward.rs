//! Cases of REPEAT_BACK.

use super::Sweep;
use super::layouts::{LAYOUTS, leaf, onto};
use fanout::ops::backward::Backward;
use fanout::tensor::DType::F32;
use fanout_testing::op_case::Case;

/// Copies in all dimensions at once, and none; rows longer than a block of threads.
pub fn run(sweep: &Sweep) {
    for (k, (ne, copies)) in [
        ([1, 1, 1, 1], [300, 2, 1, 1]),
        ([3, 2, 2, 2], [5, 3, 2, 2]),
        ([300, 3, 1, 1], [1, 4, 1, 3]),
        ([7, 1, 3, 1], [2, 9, 1, 1]),
        ([5, 4, 3, 2], [1, 1, 1, 1]),
    ]
    .into_iter()
    .enumerate()
    {
        for round in 0..2 {
            let layout = LAYOUTS[(k + round) % 4];
            let mut case = Case::new();
            let dy = leaf(&mut case, F32, std::array::from_fn(|d| ne[d] * copies[d]), layout, 1);
            let dst = onto(&mut case, F32, ne, layout);
            let dst = case.b.node_into(Backward::Repeat, &[Some(dy)], dst).unwrap();
            sweep.check_bytes(&case.build(), &[dst], &format!("{ne:?} times {copies:?} {layout:?}"));
        }
    }
}

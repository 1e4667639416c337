//! Cases of TOP_K_MASK.

use super::Sweep;
use super::layouts::{LAYOUTS, Layout, desc, leaf, onto};
use fanout::ops::topk_mask::TopkMask;
use fanout::tensor::DType::{F16, F32, I32};
use fanout_testing::inputs::normal;
use fanout_testing::op_case::Case;

/// With and without scores, blocks and extra cells; picks and cells out of range, scores of -inf and NaN; rows longer than a block
/// of threads; masks that repeat.
pub fn run(sweep: &Sweep) {
    let mut rng = fastrand::Rng::with_seed(6);
    for round in 0..32 {
        let [with_score, with_blocks, with_extra] = [1, 2, 4].map(|bit| round & bit != 0);
        let (dtype, layout) = ([F32, F16][round / 8 % 2], LAYOUTS[round / 8]);
        let n_kv = if round % 5 == 0 { 2100 } else { rng.usize(1..70) };
        let (n_pick, n_top, n_block) = (rng.usize(1..40), rng.usize(1..30), rng.usize(1..6));
        let (rows, repeats) = ([3, 2, 2], [1, 2, 1]);
        let outer = |n: usize| [n, rows[0] * repeats[0], rows[1] * repeats[1], rows[2] * repeats[2]];
        let mut indices = |case: &mut Case, ne: [usize; 4], below: usize| {
            let below = below as i64;
            let values: Vec<i64> = (0..ne.iter().product::<usize>()).map(|_| rng.i64(-2..below + 2)).collect();
            case.indices(I32, ne, &values)
        };
        let mut case = Case::new();
        let mask = leaf(&mut case, dtype, [n_kv, rows[0], rows[1], rows[2]], Layout::Gaps, 1);
        let picks = indices(&mut case, outer(n_top), if with_score || with_blocks { n_pick } else { n_kv });
        let score = with_score.then(|| {
            let ne = outer(n_pick);
            let mut values = normal(2, ne.iter().product());
            values.iter_mut().step_by(5).for_each(|v| *v = f32::NEG_INFINITY);
            values.iter_mut().step_by(7).for_each(|v| *v = f32::NAN);
            case.leaf_with_desc(desc(F32, ne, layout), &values)
        });
        let blocks = with_blocks.then(|| indices(&mut case, [n_block, n_pick, 1, 1], n_kv));
        let extra = with_extra.then(|| indices(&mut case, outer(4), n_kv));
        let dst = onto(&mut case, dtype, outer(n_kv), Layout::Gaps);
        let dst = case.b.node_into(TopkMask, &[Some(mask), Some(picks), score, blocks, extra], dst).unwrap();
        sweep.check_bytes(&case.build(), &[dst], &format!("round {round}: {dtype}, {n_kv} cells"));
    }
}

//! Cases of OUT_PROD.

use super::Sweep;
use super::layouts::{LAYOUTS, Layout, leaf, onto};
use fanout::ops::out_prod::OutProd;
use fanout::tensor::DType::{BF16, F16, F32};
use fanout_testing::op_case::Case;

/// Rows longer than a block of threads; rows of dst around the number of a thread; shared planes; b in every layout; no products.
pub fn run(sweep: &Sweep) {
    for (k, (n, m, depth, a, b)) in [
        (1, 1, 1, [1, 1], [1, 1]),
        (33, 7, 5, [1, 1], [2, 3]),
        (300, 9, 40, [2, 1], [4, 1]),
        (64, 17, 130, [1, 2], [3, 2]),
        (5, 70, 3, [2, 2], [2, 2]),
        (16, 3, 0, [1, 1], [1, 1]),
    ]
    .into_iter()
    .enumerate()
    {
        for (dtype, layout) in [(F32, k), (F16, k + 1), (BF16, k + 2)].map(|(dtype, k)| (dtype, LAYOUTS[k % 4])) {
            let mut case = Case::new();
            let x = leaf(&mut case, dtype, [n, depth, a[0], a[1]], [Layout::Packed, Layout::Gaps][k % 2], 1);
            let y = leaf(&mut case, F32, [m, depth, b[0], b[1]], layout, 2);
            let dst = onto(&mut case, F32, [n, m, b[0], b[1]], [Layout::Gaps, Layout::Packed][k % 2]);
            let dst = case.b.node_into(OutProd, &[Some(x), Some(y)], dst).unwrap();
            sweep.check(&case.build(), &[dst], 1e-12, &format!("{n} {m} {depth} {a:?} {b:?} {dtype} {layout:?}"));
        }
    }
}

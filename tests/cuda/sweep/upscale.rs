//! Cases of UPSCALE.

use super::Sweep;
use super::layouts::{LAYOUTS, leaf, onto};
use fanout::ops::upscale::{ScaleMode, Upscale};
use fanout::tensor::DType::F32;
use fanout_testing::op_case::Case;

/// Larger and smaller images in every layout and mode; single elements; rows longer than a block of threads; more and fewer planes.
pub fn run(sweep: &Sweep) {
    let sizes = [
        ([4, 3, 2, 1], [8, 6, 2, 1]),
        ([1, 1, 1, 1], [5, 1, 2, 3]),
        ([13, 7, 3, 2], [5, 3, 2, 1]),
        ([20, 9, 2, 2], [33, 4, 5, 3]),
        ([100, 3, 1, 1], [517, 5, 1, 1]),
        ([600, 40, 1, 1], [7, 3, 1, 1]),
        ([9, 9, 2, 1], [1, 1, 2, 1]),
    ];
    for (k, (ne, out)) in sizes.into_iter().enumerate() {
        for (mode, antialias) in [
            (ScaleMode::Nearest, false),
            (ScaleMode::Bilinear, false),
            (ScaleMode::Bilinear, true),
            (ScaleMode::Bicubic, false),
        ] {
            for align_corners in [false, true] {
                let op = Upscale { mode, align_corners, antialias };
                let layout = LAYOUTS[(k + usize::from(align_corners)) % 4];
                let mut case = Case::new();
                let x = leaf(&mut case, F32, ne, layout, k as u64);
                let y = onto(&mut case, F32, out, layout);
                let y = case.b.node_into(op, &[Some(x)], y).unwrap();
                sweep.check_bytes(&case.build(), &[y], &format!("{op:?} {ne:?} {out:?} {layout:?}"));
            }
        }
    }
}

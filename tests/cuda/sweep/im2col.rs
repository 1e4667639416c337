//! Cases of IM2COL, IM2COL_3D and COL2IM_1D.

use super::Sweep;
use super::layouts::{LAYOUTS, Layout, leaf, onto, window};
use fanout::ops::ConvAxis;
use fanout::ops::im2col::Im2col;
use fanout::tensor::DType::{self, BF16, F16, F32};
use fanout_testing::op_case::Case;

/// Images of one to three dimensions in every layout; windows with gaps between their taps, backwards, partly and wholly outside.
pub fn run(sweep: &Sweep) {
    let mut rng = fastrand::Rng::with_seed(1);
    for round in 0..40 {
        let (x_type, y_type) = [(F32, F32), (F32, F16), (F16, F16)][round % 3];
        let layout = LAYOUTS[round / 3 % 4];
        let (w, h, c, n) = (rng.usize(1..24), rng.usize(1..9), rng.usize(1..5), rng.usize(1..3));
        let ((x, kw, ow), (y, kh, oh)) = (window(&mut rng, w), window(&mut rng, h));
        let line = Im2col::Im2col { axes: [x, ConvAxis::PLAIN], two_d: false };
        check(sweep, line, [kw, c, 2, 1], (x_type, [w, c, n, 1]), (y_type, [c * kw, ow, n, 1]), layout);
        let plane = Im2col::Im2col { axes: [x, y], two_d: true };
        check(sweep, plane, [kw, kh, c, 1], (x_type, [w, h, c, n]), (y_type, [c * kh * kw, ow, oh, n]), layout);
        if x_type == F32 {
            let d = rng.usize(1..5);
            let (z, kd, od) = window(&mut rng, d);
            let op = Im2col::Im2col3d { axes: [x, y, z], channels: c as i32 };
            let patches = [c * kd * kh * kw, ow, oh, od * n];
            check(sweep, op, [kw, kh, kd, 2 * c], (F32, [w, h, d, n * c]), (y_type, patches), layout);
        }
    }
    // More elements of a patch than threads of a block.
    let plain = [ConvAxis::PLAIN; 2];
    let op = Im2col::Im2col { axes: plain, two_d: true };
    check(sweep, op, [3, 3, 70, 1], (F32, [20, 4, 70, 1]), (F16, [630, 18, 2, 1]), Layout::Packed);
    for (k, dtype) in [F32, F16, BF16].into_iter().enumerate() {
        for (samples, channels, columns, stride, padding) in
            [(1, 1, 1, 1, 0), (4, 3, 300, 1, 1), (16, 2, 40, 8, 4), (3, 5, 9, 7, 0), (20, 3, 6, 3, 9)]
        {
            let mut case = Case::new();
            let columns = leaf(&mut case, dtype, [samples * channels, columns, 1, 1], Layout::Packed, k as u64);
            let op = Im2col::Col2im1d { stride, channels: channels as i32, padding };
            let dense = case.b.node(op, &[Some(columns)]).unwrap();
            let ne = case.b.tensor(dense).unwrap().desc.ne();
            let gaps = onto(&mut case, dtype, ne, LAYOUTS[1 + k % 3]);
            let gaps = case.b.node_into(op, &[Some(columns)], gaps).unwrap();
            sweep.check_bytes(&case.build(), &[dense, gaps], &format!("{op:?} of {samples} samples, {dtype}"));
        }
    }
}

#[track_caller]
fn check(
    sweep: &Sweep,
    op: Im2col,
    kernel: [usize; 4],
    (x_type, image): (DType, [usize; 4]),
    (y_type, patches): (DType, [usize; 4]),
    layout: Layout,
) {
    let mut case = Case::new();
    let srcs = [Some(leaf(&mut case, F16, kernel, Layout::Packed, 2)), Some(leaf(&mut case, x_type, image, layout, 3))];
    let dst = onto(&mut case, y_type, patches, layout);
    let dst = case.b.node_into(op, &srcs, dst).unwrap();
    sweep.check_bytes(&case.build(), &[dst], &format!("{op:?} {kernel:?} {x_type} {image:?} {y_type} {layout:?}"));
}

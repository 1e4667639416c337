//! Cases of CONV_2D, CONV_2D_DW, CONV_3D, CONV_TRANSPOSE_1D and CONV_TRANSPOSE_2D.

use super::layouts::{LAYOUTS, Layout, leaf, onto, window};
use super::{Sweep, conv_gemm};
use fanout::ops::ConvAxis;
use fanout::ops::conv::Conv;
use fanout::tensor::DType::{self, F16, F32};
use fanout_testing::op_case::Case;

/// Bound of the NMSE: sums of f32, with and without fused multiply-adds.
const BOUND: f64 = 1e-12;

/// Random windows and layouts; strides above the kernel's size, whose outputs have no taps; enough outputs for several channels
/// per thread.
pub fn run(sweep: &Sweep) {
    let mut rng = fastrand::Rng::with_seed(2);
    for round in 0..32 {
        let (dtype, layout) = ([F32, F16][round % 2], LAYOUTS[round / 2 % 4]);
        let (w, h, d) = (rng.usize(1..20), rng.usize(1..8), rng.usize(1..5));
        let (c, out, n) = (rng.usize(1..6), rng.usize(1..11), rng.usize(1..3));
        let ((x, kw, ow), (y, kh, oh), (z, kd, od)) = (window(&mut rng, w), window(&mut rng, h), window(&mut rng, d));
        let image = [w, h, c, n];
        check(sweep, Conv::Conv2d { axes: [x, y] }, (dtype, [kw, kh, c, out]), image, [ow, oh, out, n], layout);
        check(sweep, Conv::Conv2dDw { axes: [x, y] }, (dtype, [kw, kh, 1, c]), image, [ow, oh, c, n], layout);
        let volume = Conv::Conv3d { axes: [x, y, z], channels: c as i32, batches: n as i32, outputs: out as i32 };
        check(sweep, volume, (dtype, [kw, kh, kd, out * c]), [w, h, d, n * c], [ow, oh, od, n * out], layout);
        let stride = rng.usize(1..6);
        let larger = |n: usize, k: usize| (n - 1) * stride + k;
        let line = Conv::Transpose1d { stride: stride as i32 };
        check(sweep, line, (dtype, [kw, out, c, 1]), [w, c, 1, 1], [larger(w, kw), out, 1, 1], layout);
        let plane = Conv::Transpose2d { stride: stride as i32 };
        let outputs = [larger(w, kw), larger(h, kh), out, n];
        check(sweep, plane, (dtype, [kw, kh, out, c]), image, outputs, layout);
    }
    let plain = [ConvAxis { stride: 1, padding: 1, dilation: 1 }; 2];
    for dtype in [F32, F16] {
        // 8 output channels per thread, and fewer in the last group: several images, strides and layouts; volumes; transposed.
        let strided = Conv::Conv2d { axes: [ConvAxis { stride: 2, padding: 1, dilation: 1 }, plain[1]] };
        check(sweep, strided, (dtype, [3, 3, 2, 13]), [129, 65, 2, 4], [65, 65, 13, 4], Layout::Reversed);
        let op = Conv::Conv3d { axes: [ConvAxis::PLAIN; 3], channels: 2, batches: 2, outputs: 9 };
        check(sweep, op, (dtype, [2, 1, 2, 18]), [66, 32, 9, 4], [65, 32, 8, 18], Layout::Gaps);
        let op = Conv::Transpose2d { stride: 2 };
        check(sweep, op, (dtype, [2, 2, 9, 2]), [64, 65, 2, 2], [128, 130, 9, 2], Layout::Packed);
        // More depthwise channels than threads of a block.
        let op = Conv::Conv2d { axes: plain };
        check(sweep, op, (dtype, [3, 3, 1, 13]), [129, 129, 1, 1], [129, 129, 13, 1], Layout::Packed);
        let op = Conv::Conv2dDw { axes: plain };
        check(sweep, op, (dtype, [3, 3, 1, 300]), [5, 4, 300, 1], [5, 4, 300, 1], Layout::ChannelsLast);
        // Sums over no taps.
        let op = Conv::Conv2d { axes: [ConvAxis::PLAIN; 2] };
        check(sweep, op, (dtype, [0, 3, 2, 4]), [4, 5, 2, 1], [5, 3, 4, 1], Layout::Packed);
        check(sweep, op, (dtype, [3, 3, 0, 4]), [5, 5, 0, 1], [3, 3, 4, 1], Layout::Packed);
    }
    conv_gemm::run(sweep);
}

#[track_caller]
fn check(
    sweep: &Sweep,
    op: Conv,
    (dtype, kernel): (DType, [usize; 4]),
    image: [usize; 4],
    outputs: [usize; 4],
    layout: Layout,
) {
    let mut case = Case::new();
    let srcs = [Some(leaf(&mut case, dtype, kernel, layout, 1)), Some(leaf(&mut case, F32, image, layout, 2))];
    let dst = onto(&mut case, F32, outputs, layout);
    let dst = case.b.node_into(op, &srcs, dst).unwrap();
    sweep.check(&case.build(), &[dst], BOUND, &format!("{op:?} {dtype} {kernel:?} {image:?} {layout:?}"));
}

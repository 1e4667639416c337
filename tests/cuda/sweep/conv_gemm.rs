//! Cases of CONV_2D and CONV_3D with kernels of F16 on tensor cores.

use super::Sweep;
use super::layouts::{LAYOUTS, Layout, desc, leaf, onto};
use fanout::ops::ConvAxis;
use fanout::ops::conv::Conv;
use fanout::tensor::DType::{F16, F32};
use fanout_testing::compare::nmse;
use fanout_testing::inputs::normal;
use fanout_testing::op_case::Case;

/// Bound of the NMSE: patches are rounded to F16.
const BOUND: f64 = 1e-7;

fn axis(stride: i32, padding: i32, dilation: i32) -> ConvAxis {
    ConvAxis { stride, padding, dilation }
}

/// Launches of a convolution with a kernel of this shape whose columns are converted in so many chunks. Rows of the
/// kernel at other addresses than multiples of 16 bytes are copied.
fn launches(kernel: [usize; 4], chunks: u64) -> u64 {
    let k = kernel[..3].iter().product::<usize>();
    1 + u64::from(!k.is_multiple_of(8)) + 2 * chunks
}

/// A convolution: kernel and image, and their layouts and that of the result.
struct Convolution {
    op: Conv,
    kernel: [usize; 4],
    image: [usize; 4],
    outputs: [usize; 4],
    layouts: [Layout; 3],
}

impl Convolution {
    fn of_plane(kernel: [usize; 4], image: [usize; 4], axes: [ConvAxis; 2]) -> Convolution {
        let [ow, oh] = [0, 1].map(|d| axes[d].output(image[d], kernel[d]).unwrap());
        let outputs = [ow, oh, kernel[3], image[3]];
        Convolution { op: Conv::Conv2d { axes }, kernel, image, outputs, layouts: [Layout::Packed; 3] }
    }

    /// The kernel is `[x, y, z, output channels]`, the image `[x, y, z, images]`.
    fn of_volume(kernel: [usize; 4], image: [usize; 4], channels: usize, axes: [ConvAxis; 3]) -> Convolution {
        let [ow, oh, od] = [0, 1, 2].map(|d| axes[d].output(image[d], kernel[d]).unwrap());
        let [[kw, kh, kd, out], [w, h, d, n]] = [kernel, image];
        let op = Conv::Conv3d { axes, channels: channels as i32, batches: n as i32, outputs: out as i32 };
        let (kernel, image) = ([kw, kh, kd, out * channels], [w, h, d, n * channels]);
        Convolution { op, kernel, image, outputs: [ow, oh, od, n * out], layouts: [Layout::Packed; 3] }
    }

    fn with_layouts(self, kernel: Layout, image: Layout, dst: Layout) -> Convolution {
        Convolution { layouts: [kernel, image, dst], ..self }
    }

    #[track_caller]
    fn check(&self, sweep: &Sweep, launches: u64) {
        let &Convolution { ref op, kernel, image, outputs, layouts: [of_kernel, of_image, of_dst] } = self;
        let mut case = Case::new();
        let srcs = [Some(leaf(&mut case, F16, kernel, of_kernel, 1)), Some(leaf(&mut case, F32, image, of_image, 2))];
        let dst = onto(&mut case, F32, outputs, of_dst);
        let dst = case.b.node_into(*op, &srcs, dst).unwrap();
        let what = format!("{op:?} {kernel:?} {image:?} {:?}", self.layouts);
        sweep.check_launches(launches, &what, || sweep.check(&case.build(), &[dst], BOUND, &what));
    }

    /// The values of the result for those of the image, on the CPU and on the GPU.
    fn run(&self, sweep: &Sweep, image: &[f32], what: &str) -> Option<[Vec<f64>; 2]> {
        let mut case = Case::new();
        let srcs = [
            Some(leaf(&mut case, F16, self.kernel, Layout::Packed, 1)),
            Some(case.leaf_with_desc(desc(F32, self.image, Layout::Packed), image)),
        ];
        let dst = case.b.node(self.op, &srcs).unwrap();
        let case = case.build();
        let on_gpu = || case.run(&sweep.gpu).values(dst);
        let launches = launches(self.kernel, 1);
        let results = || [case.run(&sweep.cpu).values(dst), sweep.check_launches(launches, what, on_gpu)];
        sweep.tally.begin(what).then(results)
    }
}

pub(super) fn run(sweep: &Sweep) {
    // The direct kernels have cases of their own.
    if !sweep.has_mma {
        return;
    }
    let (plain, padded) = ([ConvAxis::PLAIN; 2], [axis(1, 1, 1); 2]);
    for (i, (kernel, image, axes)) in [
        // Output channels, positions and elements that are no multiples of a tile's, and more than one tile of each.
        ([3, 3, 5, 17], [13, 9, 5, 1], padded),
        ([3, 3, 32, 130], [17, 17, 32, 1], padded),
        ([3, 3, 4, 32], [9, 9, 4, 2], padded),
        // Pixels as they are, and every other one.
        ([1, 1, 72, 40], [9, 9, 72, 1], plain),
        ([1, 1, 33, 16], [20, 20, 33, 2], [axis(2, 0, 1); 2]),
        // Strides, dilations, and taps in the opposite order or at one place.
        ([3, 3, 7, 33], [21, 19, 7, 3], [axis(2, 1, 1), axis(1, 2, 2)]),
        ([3, 2, 9, 16], [12, 11, 9, 1], [axis(1, 3, -1), axis(1, 0, 0)]),
        // Patches that are apart, and patches outside of the image.
        ([7, 7, 3, 64], [56, 56, 3, 1], [axis(7, 0, 1); 2]),
        ([2, 2, 8, 16], [4, 5, 8, 1], [axis(7, 30, 1), axis(5, 20, 9)]),
        // Shares of k for the blocks of both kernels.
        ([3, 3, 140, 20], [8, 8, 140, 1], padded),
    ]
    .into_iter()
    .enumerate()
    {
        let dst = [Layout::Packed, Layout::ChannelsLast][i % 2];
        let convolution = Convolution::of_plane(kernel, image, axes);
        convolution.with_layouts(Layout::Packed, LAYOUTS[i % 4], dst).check(sweep, launches(kernel, 1));
    }
    for (kernel, image, channels, axes) in [
        ([3, 3, 3, 16], [6, 5, 4, 1], 4, [axis(1, 1, 1); 3]),
        ([2, 3, 2, 19], [9, 8, 7, 2], 6, [axis(2, 1, 1), axis(1, 0, 2), axis(1, 1, 3)]),
    ] {
        let [kw, kh, kd, _] = kernel;
        let launches = launches([kw, kh, kd * channels, 1], 1);
        let volume = Convolution::of_volume(kernel, image, channels, axes);
        volume.with_layouts(Layout::Packed, Layout::Reversed, Layout::Packed).check(sweep, launches);
    }
    // Too few output channels, elements or positions; then a kernel and a result whose strides the GEMM does not take.
    for convolution in [
        Convolution::of_plane([3, 3, 5, 15], [9, 9, 5, 1], padded),
        Convolution::of_plane([3, 3, 3, 16], [9, 9, 3, 1], padded),
        Convolution::of_plane([3, 3, 5, 16], [9, 7, 5, 1], padded),
    ] {
        convolution.check(sweep, 1);
    }
    for (kernel, dst) in [(Layout::Gaps, Layout::Packed), (Layout::Packed, Layout::Gaps)] {
        let convolution = Convolution::of_plane([3, 3, 5, 16], [9, 9, 5, 1], padded);
        convolution.with_layouts(kernel, Layout::Packed, dst).check(sweep, 1);
    }
    magnitudes(sweep);
    special_values(sweep);
}

/// More columns than are converted at a time on a GPU with so few multiprocessors: parts of an image, whole images, and
/// parts of several images; with two, also shares of k for the blocks of the GEMM.
pub fn check_chunks(sweep: &Sweep, multiprocessors: u32) {
    let of_one = [([50, 50, 5, 1], 2), ([34, 34, 5, 3], 2), ([50, 50, 5, 2], 4)];
    let of_two = [([20, 20, 128, 1], 4), ([9, 9, 128, 5], 3), ([16, 20, 128, 2], 6)];
    for (i, (image, chunks)) in if multiprocessors == 1 { of_one } else { of_two }.into_iter().enumerate() {
        let dst = [Layout::ChannelsLast, Layout::Packed][i % 2];
        let convolution = Convolution::of_plane([3, 3, image[2], 18], image, [axis(1, 1, 1); 2]);
        let launches = launches(convolution.kernel, chunks);
        convolution.with_layouts(Layout::Packed, Layout::Packed, dst).check(sweep, launches);
    }
}

/// Lines of outputs that read elements of one magnitude each, from 1e-6 to 1e6, must each be exact.
fn magnitudes(sweep: &Sweep) {
    let convolution = Convolution::of_plane([4, 4, 3, 17], [32, 4 * 13, 3, 1], [axis(4, 0, 1); 2]);
    let [width, height, ..] = convolution.image;
    let magnitude = |i: usize| 10f32.powi((i / width % height / 4) as i32 - 6);
    let image: Vec<_> =
        normal(3, convolution.image.iter().product()).iter().enumerate().map(|(i, x)| x * magnitude(i)).collect();
    let what = "a convolution of magnitudes from 1e-6 to 1e6";
    let Some(results) = convolution.run(sweep, &image, what) else { return };
    let [width, height, ..] = convolution.outputs;
    for y in 0..height {
        let [want, got] = results.each_ref().map(|values| {
            let is_in_line = |&(i, _): &(usize, &f64)| i / width % height == y;
            values.iter().enumerate().filter(is_in_line).map(|(_, &value)| value).collect::<Vec<_>>()
        });
        sweep.tally.compare(nmse(&got, &want), BOUND, what);
    }
}

/// Infinities and NaN reach the outputs that read them, and no others.
fn special_values(sweep: &Sweep) {
    let convolution = Convolution::of_plane([3, 3, 8, 19], [12, 12, 8, 1], [axis(1, 1, 1); 2]);
    let mut image = normal(4, convolution.image.iter().product());
    for (x, y, c, value) in
        [(3, 4, 2, f32::INFINITY), (4, 6, 2, f32::NEG_INFINITY), (8, 8, 1, f32::NAN), (11, 0, 7, f32::INFINITY)]
    {
        image[(c * 12 + y) * 12 + x] = value;
    }
    let what = "a convolution of infinities and NaN";
    let Some([want, got]) = convolution.run(sweep, &image, what) else { return };
    let agree = |(&want, &got): (&f64, &f64)| {
        want == got || want.is_nan() && got.is_nan() || want.is_finite() && got.is_finite()
    };
    let is_same = want.iter().zip(&got).all(agree);
    sweep.tally.compare(if is_same { 0.0 } else { f64::INFINITY }, BOUND, what);
    let finite = |values: &[f64]| values.iter().copied().filter(|value| value.is_finite()).collect::<Vec<_>>();
    let [want, got] = [finite(&want), finite(&got)];
    assert!(want.len() > 100 * 19 && want.len() < 144 * 19, "{} finite outputs", want.len());
    if is_same {
        sweep.tally.compare(nmse(&got, &want), BOUND, what);
    }
}

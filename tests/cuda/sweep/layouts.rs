//! Layouts of operands for kernels that accept any strides, and random numbers of a case.

use fanout::graph::TensorId;
use fanout::ops::ConvAxis;
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::inputs::normal;
use fanout_testing::op_case::Case;

/// How the elements of a tensor lie in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Layout {
    /// Contiguous.
    Packed,
    /// Rows are dense, with gaps after them.
    Gaps,
    /// The dimensions in reverse order: the last one is adjacent in memory.
    Reversed,
    /// Dimension 2 is adjacent in memory, then 0, 1 and 3: channels last (NHWC), from the slowest to the fastest.
    ChannelsLast,
}

pub const LAYOUTS: [Layout; 4] = [Layout::Packed, Layout::Gaps, Layout::Reversed, Layout::ChannelsLast];

pub fn desc(dtype: DType, ne: [usize; 4], layout: Layout) -> TensorDesc {
    let order = match layout {
        Layout::Packed | Layout::Gaps => [0, 1, 2, 3],
        Layout::Reversed => [3, 2, 1, 0],
        Layout::ChannelsLast => [2, 0, 1, 3],
    };
    let (mut nb, mut next) = ([0; 4], dtype.block_bytes());
    for d in order {
        nb[d] = next;
        next *= ne[d].max(1);
        if layout == Layout::Gaps {
            next += 3 * dtype.block_bytes();
        }
    }
    TensorDesc::strided(dtype, ne, nb).unwrap()
}

/// A leaf of normal values.
pub fn leaf(case: &mut Case, dtype: DType, ne: [usize; 4], layout: Layout, seed: u64) -> TensorId {
    case.leaf_with_desc(desc(dtype, ne, layout), &normal(seed, ne.iter().product()))
}

/// Memory for a destination.
pub fn onto(case: &mut Case, dtype: DType, ne: [usize; 4], layout: Layout) -> TensorId {
    case.b.leaf_with_desc(desc(dtype, ne, layout)).unwrap()
}

/// A random window of up to 4 taps that has an output in an image of `n` elements; the number of its taps, and of its outputs.
pub fn window(rng: &mut fastrand::Rng, n: usize) -> (ConvAxis, usize, usize) {
    loop {
        let axis = ConvAxis { stride: rng.i32(1..4), padding: rng.i32(-1..4), dilation: rng.i32(-1..4) };
        let taps = rng.usize(1..5);
        if let Some(outputs @ 1..=64) = axis.output(n, taps) {
            return (axis, taps, outputs);
        }
    }
}

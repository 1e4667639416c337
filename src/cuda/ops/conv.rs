//! Launches of CONV_2D, CONV_2D_DW, CONV_3D, CONV_TRANSPOSE_1D and CONV_TRANSPOSE_2D: kernels/conv.cu. Kernels of F16
//! with many channels are multiplied on tensor cores (`gemm`).

mod gemm;

use super::elementwise::block_shape;
use super::{
    Access, Grid, KernelArguments, MAX_GRID_YZ, NodeLaunches, NodeOnGpu, Ptr, Unsupported, saturating_product, suffix,
};
use crate::ops::ConvAxis;
use crate::ops::conv::Conv;
use crate::tensor::DType::{F16, F32};
use bytemuck::{Pod, Zeroable};

/// Output channels per thread of the wide entries.
const CHANNELS: u32 = 8;

/// Threads from which on each computes [`CHANNELS`] outputs: with fewer, parallelism is worth more than shared loads.
const MIN_WIDE_THREADS: u64 = 1 << 15;

/// Instructions for a tap: 12 of one output, 32 of a group of channels, which are worth eight.
const TAP_INSTRUCTIONS: u64 = 18;

/// How windows move along x, y and z: three arrays of the kernels' arguments.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Windows {
    stride: [i32; 3],
    padding: [i32; 3],
    dilation: [i32; 3],
}

impl Windows {
    pub(super) fn new(axes: [ConvAxis; 3]) -> Windows {
        Windows {
            stride: axes.map(|axis| axis.stride),
            padding: axes.map(|axis| axis.padding),
            dilation: axes.map(|axis| axis.dilation),
        }
    }

    /// Checks that all positions of taps, also the one after the last, fit the kernels' 32-bit numbers.
    pub(super) fn check(&self, outputs: [u32; 3], taps: [u32; 3]) -> Result<(), &'static str> {
        let furthest = |d: usize| {
            let reach = |count: u32, step: i32| i64::from(count).saturating_mul(i64::from(step).abs());
            reach(outputs[d], self.stride[d])
                .saturating_add(reach(taps[d], self.dilation[d]))
                .saturating_add(i64::from(self.padding[d]).abs())
        };
        if (0..3).all(|d| furthest(d) <= i64::from(i32::MAX)) { Ok(()) } else { Err("positions of 2^31 or more") }
    }
}

/// Byte strides along x, y, z, of the channels and of the images, for images of `dims` dimensions: the strides of the tensor's dimensions
/// in order. Volumes have no dimension of their own for images; every `channels` planes are one.
pub(super) fn row_strides([n0, n1, n2, n3]: [u64; 4], dims: usize, channels: u32) -> [u64; 5] {
    match dims {
        1 => [n0, 0, 0, n1, n2],
        2 => [n0, n1, 0, n2, n3],
        _ => [n0, n1, n2, n3, n3.saturating_mul(channels.into())],
    }
}

/// `struct ConvArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ConvArgs {
    kernel: [u64; 5],
    x: [u64; 6],
    y: [u64; 5],
    taps: [u32; 3],
    extent: [u32; 3],
    outputs: [u32; 3],
    windows: Windows,
    step: [u32; 3],
    in_channels: u32,
    out_channels: u32,
    images: u32,
    positions: u32,
    channels_last: u32,
}

impl KernelArguments for ConvArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        self.windows.check(self.outputs, self.taps)?;
        let along = |pointer, counts: [u32; 3], strides: &[u64]| {
            (0..3).fold(Access::one(pointer), |access, d| access.along(counts[d], strides[d]))
        };
        let kernel = along(0, self.taps, &self.kernel).along(self.in_channels, self.kernel[3]);
        let image = along(1, self.extent, &self.x).along(self.in_channels, self.x[3]).along(self.images, self.x[4]);
        let outputs = along(2, self.outputs, &self.y).along(self.out_channels, self.y[3]);
        Ok(vec![
            kernel.along(self.out_channels, self.kernel[4]),
            image.along(self.out_channels, self.x[5]),
            outputs.along(self.images, self.y[4]),
        ])
    }
}

pub(super) fn select(op: Conv, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (kernel, image, dst) = (on.src(Conv::KERNEL)?, on.src(Conv::IMAGE)?, on.dst());
    if !matches!(kernel.dtype(), F16 | F32) || image.dtype() != F32 || dst.dtype() != F32 {
        return Err(on.unsupported_types());
    }
    let dtype = kernel.dtype();
    let [kernel, image, dst] = [on.shape(kernel)?, on.shape(image)?, on.shape(dst)?];
    let ([k0, k1, k2, k3], plain) = (kernel.nb, ConvAxis::PLAIN);
    // A transposed convolution; see the head of the file.
    let phase = ConvAxis { dilation: -1, ..plain };
    let (dims, axes, step, of_kernel) = match op {
        Conv::Conv2d { axes: [x, y] } => (2, [x, y, plain], 1, [k0, k1, 0, k2, k3]),
        Conv::Conv2dDw { axes: [x, y] } => (2, [x, y, plain], 1, [k0, k1, 0, 0, k3]),
        Conv::Conv3d { axes, channels, .. } => (3, axes, 1, row_strides(kernel.nb, 3, channels as u32)),
        Conv::Transpose1d { stride } => (1, [phase, plain, plain], stride as u32, [k0, 0, 0, k2, k1]),
        Conv::Transpose2d { stride } => (2, [phase, phase, plain], stride as u32, [k0, k1, 0, k3, k2]),
    };
    let (in_channels, out_channels, images) = match op {
        Conv::Conv3d { channels, outputs, batches, .. } => (channels as u32, outputs as u32, batches as u32),
        Conv::Conv2dDw { .. } => (1, dst.ne[2], dst.ne[3]),
        Conv::Transpose1d { .. } => (image.ne[1], dst.ne[1], 1),
        Conv::Conv2d { .. } | Conv::Transpose2d { .. } => (image.ne[2], dst.ne[2], dst.ne[3]),
    };
    // A sum over no taps is 0. Without channels, the kernel passes none of the loops, of which one that is empty could be within a long one.
    let in_channels = if kernel.ne.contains(&0) || image.ne.contains(&0) { 0 } else { in_channels };
    // The first `dims` counts, then 1.
    let leading = |ne: [u32; 4]| std::array::from_fn(|d| if d < dims { ne[d] } else { 1 });
    let [x, y, z, channel, batch] = row_strides(image.nb, dims, in_channels);
    let x =
        if matches!(op, Conv::Conv2dDw { .. }) { [x, y, z, 0, batch, channel] } else { [x, y, z, channel, batch, 0] };
    let (taps, outputs): ([u32; 3], [u32; 3]) = (leading(kernel.ne), leading(dst.ne));
    let step = std::array::from_fn(|d| if d < dims { step } else { 1 });
    let of_output = (0..3).map(|d| u64::from(taps[d].div_ceil(step[d]))).fold(in_channels.into(), u64::saturating_mul);
    let positions = saturating_product(&outputs);
    if positions > i32::MAX as u64 {
        return Err(on.unsupported("an image of 2^31 or more outputs"));
    }
    let windows = Windows::new(axes);
    windows.check(outputs, taps).map_err(|rule| on.unsupported(rule))?;
    let y = row_strides(dst.nb, dims, out_channels);
    let channels_last = out_channels > 1 && y[3] == 4 && y[0] != 4;
    let wide_groups = out_channels.div_ceil(CHANNELS);
    let is_wide = x[5] == 0
        && !channels_last
        && out_channels > 1
        && positions.saturating_mul(wide_groups.into()).saturating_mul(images.into()) >= MIN_WIDE_THREADS;
    let groups = if is_wide { wide_groups } else { out_channels };
    let args = ConvArgs {
        kernel: of_kernel,
        x,
        y,
        taps,
        extent: leading(image.ne),
        outputs,
        windows,
        step,
        in_channels,
        out_channels,
        images,
        positions: positions as u32,
        channels_last: channels_last.into(),
    };
    if let Some(launches) = gemm::select(op, &args, on)? {
        return Ok(launches);
    }
    let (along_x, along_y) = if channels_last { (groups.into(), positions) } else { (positions, u64::from(groups)) };
    let (threads, tiles) = block_shape(along_x, along_y);
    let rows = along_y.div_ceil(threads[1].into()).min(MAX_GRID_YZ);
    let grid = Grid { blocks: [tiles, rows, u64::from(images).min(MAX_GRID_YZ)], threads, shared: 0 };
    let name = format!("conv_{}{}", if is_wide { "wide_" } else { "" }, suffix(dtype));
    let loops = [positions.saturating_mul(u64::from(groups) * u64::from(images)), of_output, TAP_INSTRUCTIONS];
    on.looping_launch(("conv", &name), grid, (&[Ptr::Src(0), Ptr::Src(1), Ptr::Dst], &args), loops)
}

#[cfg(test)]
mod tests {
    use super::super::kernel_constants::assert_constants;
    use super::*;

    #[test]
    fn constants_are_those_of_the_kernels() {
        assert_constants(include_str!("../../../kernels/conv.cu"), &[("CHANNELS", u64::from(CHANNELS))]);
    }

    /// The position after the last tap counts, and a negative dilation as a positive one.
    #[test]
    fn positions_fit_32_bits() {
        let axis = |stride, padding, dilation| ConvAxis { stride, padding, dilation };
        let check = |axis, outputs, taps| {
            Windows::new([axis, ConvAxis::PLAIN, ConvAxis::PLAIN]).check([outputs, 1, 1], [taps, 1, 1])
        };
        assert_eq!(check(axis(1, 0, 1), 1 << 30, 1 << 30), Err("positions of 2^31 or more"));
        assert_eq!(check(axis(1, 0, -1), 1 << 30, (1 << 30) - 1), Ok(()));
        assert_eq!(check(axis(1, i32::MIN, 1), 1, 1), Err("positions of 2^31 or more"));
        assert_eq!(check(axis(i32::MAX, 0, 0), 1, 9), Ok(()));
        assert_eq!(check(axis(i32::MAX, 0, i32::MIN), u32::MAX, u32::MAX), Err("positions of 2^31 or more"));
    }
}

//! Launches of IM2COL, IM2COL_3D and COL2IM_1D: kernels/im2col.cu.

use super::conv::{Windows, row_strides};
use super::elementwise::block_shape;
use super::{
    Access, Grid, KernelArguments, NodeLaunches, NodeOnGpu, Ptr, THREADS, Unsupported, blocks, saturating_product,
};
use crate::ops::ConvAxis;
use crate::ops::im2col::Im2col;
use crate::tensor::DType::{F16, F32};
use bytemuck::{Pod, Zeroable};

/// Adjacent outputs per thread.
const OUTPUTS: u32 = 8;

/// Instructions for a column that has a sample of COL2IM_1D.
const COLUMN_INSTRUCTIONS: u64 = 32;

/// `struct Im2colArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Im2colArgs {
    x: [u64; 5],
    y: [u64; 4],
    kernel: [u32; 3],
    extent: [u32; 3],
    outputs: [u32; 3],
    windows: Windows,
    patch: u32,
    planes: u32,
    pieces: u32,
    groups: u32,
    x_type: u32,
    y_type: u32,
}

impl KernelArguments for Im2colArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let (channels, images) = (
            u64::from(self.patch) / saturating_product(&self.kernel).max(1),
            self.planes.checked_div(self.outputs[2]).unwrap_or(0),
        );
        self.windows.check(self.outputs, self.kernel)?;
        let image = (0..3).fold(Access::one(0), |access, d| access.along(self.extent[d], self.x[d]));
        let patches = Access::one(1).along(self.patch, self.y[0]).along(self.outputs[0], self.y[1]);
        Ok(vec![
            image.along(channels, self.x[3]).along(images, self.x[4]),
            patches.along(self.outputs[1], self.y[2]).along(self.planes, self.y[3]),
        ])
    }
}

/// `struct Col2imArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Col2imArgs {
    x: [u64; 2],
    y: [u64; 2],
    length: u32,
    channels: u32,
    samples: u32,
    columns: u32,
    stride: u32,
    padding: u32,
    dtype: u32,
    pieces: u32,
}

impl KernelArguments for Col2imArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let column = saturating_product(&[self.samples, self.channels]);
        Ok(vec![
            Access::one(0).along(column, self.x[0]).along(self.columns, self.x[1]),
            Access::one(1).along(self.length, self.y[0]).along(self.channels, self.y[1]),
        ])
    }
}

pub(super) fn select(op: Im2col, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    match op {
        Im2col::Im2col { axes: [x, y], two_d } => patches(on, [x, y, ConvAxis::PLAIN], if two_d { 2 } else { 1 }, 1),
        Im2col::Im2col3d { axes, channels } => patches(on, axes, 3, channels as u32),
        Im2col::Col2im1d { stride, channels, padding } => col2im(on, [stride, channels, padding].map(|n| n as u32)),
        Im2col::Im2colBack { .. } => Err(on.unsupported_types()),
    }
}

/// Patches of images of `dims` dimensions. In three, `channels` of the image's planes form an image.
fn patches(on: &NodeOnGpu<'_>, axes: [ConvAxis; 3], dims: usize, channels: u32) -> Result<NodeLaunches, Unsupported> {
    let (image, dst) = (on.src(1)?, on.dst());
    let types = (image.dtype(), dst.dtype());
    if !(matches!(types, (F32, F16 | F32)) || dims < 3 && types == (F16, F16)) {
        return Err(on.unsupported_types());
    }
    let [kernel, image, dst] = [on.shape(on.src(0)?)?, on.shape(image)?, on.shape(dst)?];
    // The first `dims` counts, then 1.
    let leading = |ne: [u32; 4]| std::array::from_fn(|d| if d < dims { ne[d] } else { 1 });
    let [patch, width, n2, n3] = dst.ne;
    let (outputs, planes) = match dims {
        1 => ([width, 1, 1], n2),
        2 => ([width, n2, 1], n3),
        _ => ([width, n2, n3 / (image.ne[3] / channels.max(1)).max(1)], n3),
    };
    let (windows, kernel) = (Windows::new(axes), leading(kernel.ne));
    windows.check(outputs, kernel).map_err(|rule| on.unsupported(rule))?;
    let y = if dims == 1 { [dst.nb[0], dst.nb[1], 0, dst.nb[2]] } else { dst.nb };
    let lines = saturating_product(&[outputs[1], planes]);
    if lines > i32::MAX as u64 {
        return Err(on.unsupported("2^31 or more rows"));
    }
    let (threads, pieces) = block_shape(patch.into(), lines);
    let groups = outputs[0].div_ceil(OUTPUTS);
    let args = Im2colArgs {
        x: row_strides(image.nb, dims, channels),
        y,
        kernel,
        extent: leading(image.ne),
        outputs,
        windows,
        patch,
        planes,
        pieces: pieces as u32,
        groups,
        x_type: types.0.to_wire(),
        y_type: types.1.to_wire(),
    };
    let blocks = lines.div_ceil(threads[1].into()).saturating_mul(pieces).saturating_mul(groups.into());
    let grid = Grid { blocks: [blocks, 1, 1], threads, shared: 0 };
    on.single_launch(("im2col", "im2col_patches"), grid, &[Ptr::Src(1), Ptr::Dst], &args)
}

fn col2im(on: &NodeOnGpu<'_>, [stride, channels, padding]: [u32; 3]) -> Result<NodeLaunches, Unsupported> {
    let (columns, dst) = (on.src(0)?, on.dst());
    if !columns.dtype().is_float() || columns.dtype() != dst.dtype() {
        return Err(on.unsupported_types());
    }
    let dtype = dst.dtype().to_wire();
    let (columns, dst) = (on.shape(columns)?, on.shape(dst)?);
    let samples = columns.ne[0] / channels.max(1);
    let passes = u64::from(samples.div_ceil(stride.max(1)).min(columns.ne[1]));
    let loops = [saturating_product(&dst.ne[..2]), passes, COLUMN_INSTRUCTIONS];
    let pieces = blocks(dst.ne[0] as usize, THREADS, 1);
    let args = Col2imArgs {
        x: [columns.nb[0], columns.nb[1]],
        y: [dst.nb[0], dst.nb[1]],
        length: dst.ne[0],
        channels: dst.ne[1],
        samples,
        columns: columns.ne[1],
        stride,
        padding,
        dtype,
        pieces: pieces as u32,
    };
    let grid = Grid::line(pieces.saturating_mul(dst.ne[1].into()), THREADS);
    on.looping_launch(("im2col", "col2im_1d"), grid, (&[Ptr::Src(0), Ptr::Dst], &args), loops)
}

#[cfg(test)]
mod tests {
    use super::super::kernel_constants::assert_constants;
    use super::*;

    #[test]
    fn constants_are_those_of_the_kernels() {
        assert_constants(include_str!("../../../kernels/im2col.cu"), &[("OUTPUTS", u64::from(OUTPUTS))]);
    }
}

//! Launches of UPSCALE: kernels/upscale.cu.

use super::{Access, Grid, KernelArguments, NodeLaunches, NodeOnGpu, Ptr, Shape, Unsupported, rows_grid};
use crate::ops::upscale::{ScaleMode, Upscale};
use crate::tensor::DIMS;
use crate::tensor::DType::F32;
use bytemuck::{Pod, Zeroable};

/// `struct UpscaleArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct UpscaleArgs {
    x: Shape,
    y: Shape,
    factor: [f32; DIMS],
    offset: f32,
    support: [f32; 2],
    pieces: u32,
}

impl KernelArguments for UpscaleArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        // Indices are clamped to the source, which so needs an element.
        if self.x.ne.contains(&0) { Err("an empty source") } else { Ok(vec![self.x.access(0), self.y.access(1)]) }
    }
}

pub(super) fn select(op: Upscale, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (x, y) = (on.src(0)?, on.dst());
    if x.dtype() != F32 || y.dtype() != F32 {
        return Err(on.unsupported_types());
    }
    let factor = std::array::from_fn(|d| {
        let (n, out) = (x.ne()[d], y.ne()[d]);
        if d < 2 { op.factor(n, out) } else { out as f32 / n as f32 }
    });
    let support = [0, 1].map(|d| Upscale::support(factor[d]));
    // Elements of a filter; the conversion saturates.
    let filtered = if op.antialias { support.iter().map(|support| 2.0 * support + 1.0).product::<f32>() } else { 1.0 };
    let loops = [y.elements() as u64, filtered as u64, 20];
    let name = match op.mode {
        _ if op.antialias => "upscale_antialias",
        ScaleMode::Nearest => "upscale_nearest",
        ScaleMode::Bilinear => "upscale_bilinear",
        ScaleMode::Bicubic => "upscale_bicubic",
    };
    let (grid, pieces) = rows_grid(on, y)?;
    let args = UpscaleArgs { x: on.shape(x)?, y: on.shape(y)?, factor, offset: op.offset(), support, pieces };
    on.looping_launch(("upscale", name), grid, (&[Ptr::Src(0), Ptr::Dst], &args), loops)
}

//! Launches of PAD, PAD_REFLECT_1D and ROLL: kernels/pad.cu.

use super::{Access, Grid, KernelArguments, NodeLaunches, NodeOnGpu, Ptr, Shape, Unsupported, rows_grid};
use crate::ops::pad::Pad;
use crate::tensor::DIMS;
use crate::tensor::DType::F32;
use bytemuck::{Pod, Zeroable};

/// `struct PadArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PadArgs {
    x: Shape,
    y: Shape,
    before: [i64; DIMS],
    outside: u32,
    pieces: u32,
}

impl KernelArguments for PadArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        Ok(vec![self.x.access(0), self.y.access(1)])
    }
}

pub(super) fn select(op: Pad, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (x, y) = (on.src(0)?, on.dst());
    if x.dtype() != F32 || y.dtype() != F32 {
        return Err(on.unsupported_types());
    }
    // As in `enum Outside` of the file.
    let (before, outside) = match op {
        Pad::Pad { before, circular, .. } => (before.map(i64::from), u32::from(circular)),
        Pad::Roll { shifts } => (shifts.map(i64::from), 1),
        Pad::Reflect { before, .. } => ([i64::from(before), 0, 0, 0], 2),
    };
    let (grid, pieces) = rows_grid(on, y)?;
    let args = PadArgs { x: on.shape(x)?, y: on.shape(y)?, before, outside, pieces };
    on.single_launch(("pad", "pad_any"), grid, &[Ptr::Src(0), Ptr::Dst], &args)
}

//! Launches of REPEAT_BACK: kernels/backward.cu.

use super::{
    Access, Grid, KernelArguments, NodeLaunches, NodeOnGpu, Ptr, Shape, Unsupported, rows_grid, saturating_product,
};
use crate::ops::backward::Backward;
use crate::tensor::DIMS;
use crate::tensor::DType::F32;
use bytemuck::{Pod, Zeroable};

/// `struct RepeatBackArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RepeatBackArgs {
    x: Shape,
    y: Shape,
    copies: [u32; DIMS],
    pieces: u32,
    padding: u32,
}

impl KernelArguments for RepeatBackArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let read = std::array::from_fn(|d| self.copies[d].saturating_mul(self.y.ne[d]));
        Ok(vec![Access::shape(0, read, self.x.nb), self.y.access(1)])
    }
}

pub(super) fn select(op: Backward, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (x, y) = (on.src(0)?, on.dst());
    if op != Backward::Repeat || x.dtype() != F32 || y.dtype() != F32 {
        return Err(on.unsupported_types());
    }
    let (grid, pieces) = rows_grid(on, y)?;
    let (x, y) = (on.shape(x)?, on.shape(y)?);
    let copies = std::array::from_fn(|d| x.ne[d] / y.ne[d].max(1));
    let args = RepeatBackArgs { x, y, copies, pieces, padding: 0 };
    let loops = [on.dst().elements() as u64, saturating_product(&copies), 8];
    on.looping_launch(("backward", "repeat_back_f32"), grid, (&[Ptr::Src(0), Ptr::Dst], &args), loops)
}

//! Launches of ACC and SET: kernels/concat.cu copies a, kernels/assign.cu writes b into its region.

use super::concat::repeat_launch;
use super::elementwise::block_counts;
use super::{Access, Grid, KernelArguments, NodeLaunches, NodeOnGpu, Ptr, Shape, Unsupported, rows_grid};
use crate::ops::assign::Assign;
use crate::tensor::DIMS;
use crate::tensor::DType::{F32, I32};
use bytemuck::{Pod, Zeroable};

/// `struct AssignArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct AssignArgs {
    b: Shape,
    offset: u64,
    region: [u64; DIMS],
    add: u32,
    pieces: u32,
}

impl KernelArguments for AssignArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let region = (0..DIMS).fold(Access::one(1).at(self.offset), |at, d| at.along(self.b.ne[d], self.region[d]));
        Ok(vec![self.b.access(0), region])
    }
}

pub(super) fn select(op: Assign, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (b, dst) = (on.src(1)?, on.dst());
    if !(dst.dtype() == F32 || dst.dtype() == I32 && !op.accumulate) {
        return Err(on.unsupported_types());
    }
    // In place, each thread writes the bytes that it has read.
    let mut launches: Vec<_> = repeat_launch(on, 0, block_counts(dst), 0)?.into_iter().collect();
    if !b.is_empty() {
        let region = op.region(b).ok_or_else(|| on.unsupported("a region with negative strides"))?;
        let (grid, pieces) = rows_grid(on, b)?;
        let args = AssignArgs {
            b: on.shape(b)?,
            offset: u64::from(op.offset.unsigned_abs()),
            region: region.nb().map(|stride| stride as u64),
            add: u32::from(op.accumulate),
            pieces,
        };
        launches.push(on.launch(("assign", "assign_region"), grid, &[Ptr::Src(1), Ptr::Dst], &args)?);
    }
    Ok(NodeLaunches::new(launches, 0))
}

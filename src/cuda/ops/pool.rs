//! Launches of POOL_1D and POOL_2D: kernels/pool.cu.

use super::{Access, Grid, KernelArguments, NodeLaunches, NodeOnGpu, Ptr, Shape, Unsupported, rows_grid};
use crate::ops::pool::{Pool, PoolAxis, PoolKind};
use crate::tensor::DType::{F16, F32};
use bytemuck::{Pod, Zeroable};

/// `enum Kind` of the file.
const MAXIMUM: u32 = 0;
const MEAN: u32 = 1;

/// `struct PoolArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PoolArgs {
    x: Shape,
    y: Shape,
    kernel: [i64; 2],
    stride: [i64; 2],
    padding: [i64; 2],
    kind: u32,
    dtype: u32,
    whole: u32,
    pieces: u32,
}

impl KernelArguments for PoolArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        Ok(vec![self.x.access(0), self.y.access(1)])
    }
}

pub(super) fn select(op: Pool, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    // POOL_1D does not pool along dimension 1: its window there is one element.
    let single = PoolAxis { kernel: 1, stride: 1, padding: 0 };
    let (kind, axes, whole) = match op {
        Pool::Pool1d { kind, axis } => (kind, [axis, single], false),
        Pool::Pool2d { kind, axes } => (kind, axes, true),
        Pool::Pool2dBack { .. } => return Err(on.unsupported_types()),
    };
    let (x, y) = (on.src(0)?, on.dst());
    if !matches!(x.dtype(), F16 | F32) || y.dtype() != F32 {
        return Err(on.unsupported_types());
    }
    let window = axes.iter().zip(x.ne()).map(|(axis, n)| (axis.kernel as u64).min(n as u64));
    let loops = [y.elements() as u64, window.fold(1, u64::saturating_mul), 12];
    let (grid, pieces) = rows_grid(on, y)?;
    let args = PoolArgs {
        x: on.shape(x)?,
        y: on.shape(y)?,
        kernel: axes.map(|axis| axis.kernel.into()),
        stride: axes.map(|axis| axis.stride.into()),
        padding: axes.map(|axis| axis.padding.into()),
        kind: if kind == PoolKind::Average { MEAN } else { MAXIMUM },
        dtype: x.dtype().to_wire(),
        whole: whole.into(),
        pieces,
    };
    on.looping_launch(("pool", "pool_any"), grid, (&[Ptr::Src(0), Ptr::Dst], &args), loops)
}

#[cfg(test)]
mod tests {
    use super::super::kernel_constants::assert_constants;
    use super::*;

    #[test]
    fn constants_are_those_of_the_kernel() {
        let expected = [("MAXIMUM", MAXIMUM.into()), ("MEAN", MEAN.into())];
        assert_constants(include_str!("../../../kernels/pool.cu"), &expected);
    }
}

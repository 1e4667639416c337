//! Launches of DIAG, DIAG_MASK_INF, DIAG_MASK_ZERO and TRI: kernels/diag.cu.

use super::{Access, Grid, KernelArguments, NodeLaunches, NodeOnGpu, Ptr, Shape, Unsupported, rows_grid};
use crate::ops::diag::{Diag, Triangle};
use crate::tensor::DType::F32;
use bytemuck::{Pod, Zeroable};

/// `struct DiagArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct DiagArgs {
    x: Shape,
    y: Shape,
    low: i64,
    high: i64,
    outside: f32,
    pieces: u32,
}

impl KernelArguments for DiagArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        Ok(vec![Access::shape(0, self.y.ne, self.x.nb), self.y.access(1)])
    }
}

pub(super) fn select(op: Diag, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (x, y) = (on.src(0)?, on.dst());
    if x.dtype() != F32 || y.dtype() != F32 {
        return Err(on.unsupported_types());
    }
    let mut from = on.shape(x)?;
    let (low, high, outside) = match op {
        Diag::Diag => {
            from.nb[1] = 0;
            (0, 0, 0.0)
        }
        Diag::MaskInf { n_past } => (i64::MIN, i64::from(n_past), f32::NEG_INFINITY),
        Diag::MaskZero { n_past } => (i64::MIN, i64::from(n_past), 0.0),
        Diag::Tri(Triangle::UpperWithDiagonal) => (0, i64::MAX, 0.0),
        Diag::Tri(Triangle::Upper) => (1, i64::MAX, 0.0),
        Diag::Tri(Triangle::LowerWithDiagonal) => (i64::MIN, 0, 0.0),
        Diag::Tri(Triangle::Lower) => (i64::MIN, -1, 0.0),
    };
    let (grid, pieces) = rows_grid(on, y)?;
    let args = DiagArgs { x: from, y: on.shape(y)?, low, high, outside, pieces };
    on.single_launch(("diag", "diag_band"), grid, &[Ptr::Src(0), Ptr::Dst], &args)
}

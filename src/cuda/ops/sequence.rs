//! Launches of ARANGE and TIMESTEP_EMBEDDING: kernels/sequence.cu.

use super::{Access, Grid, KernelArguments, NodeLaunches, NodeOnGpu, Ptr, THREADS, Unsupported, blocks};
use crate::ops::sequence::Sequence;
use crate::tensor::DType::F32;
use bytemuck::{Pod, Zeroable};

/// `struct ArangeArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ArangeArgs {
    n: u64,
    stride: u64,
    start: f32,
    step: f32,
}

impl KernelArguments for ArangeArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        Ok(vec![Access::one(0).along(self.n, self.stride)])
    }
}

/// `struct TimestepArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct TimestepArgs {
    x: u64,
    y: [u64; 2],
    ne: [u32; 2],
    half: u32,
    exponent: f32,
}

impl KernelArguments for TimestepArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let [dim, times] = self.ne;
        Ok(vec![Access::one(0).along(times, self.x), Access::one(1).along(dim, self.y[0]).along(times, self.y[1])])
    }
}

pub(super) fn select(op: Sequence, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let y = on.dst();
    if y.dtype() != F32 {
        return Err(on.unsupported_types());
    }
    let shape = on.shape(y)?;
    match op {
        Sequence::Arange { start, step, .. } => {
            let n = y.elements();
            let args = ArangeArgs { n: n as u64, stride: shape.nb[0], start, step };
            on.single_launch(("sequence", "arange_f32"), Grid::line(blocks(n, THREADS, 1), THREADS), &[Ptr::Dst], &args)
        }
        Sequence::TimestepEmbedding { max_period, .. } => {
            let x = on.src(0)?;
            if x.dtype() != F32 {
                return Err(on.unsupported_types());
            }
            let [dim, times, ..] = shape.ne;
            let exponent = -(max_period as f32).ln();
            let args = TimestepArgs {
                x: on.shape(x)?.nb[0],
                y: [shape.nb[0], shape.nb[1]],
                ne: [dim, times],
                half: dim / 2,
                exponent,
            };
            let pieces = blocks(y.ne()[0], THREADS, 1).saturating_mul(u64::from(times));
            on.single_launch(("sequence", "timestep_f32"), Grid::line(pieces, THREADS), &[Ptr::Src(0), Ptr::Dst], &args)
        }
    }
}

//! Launches of SOFT_MAX: kernels/softmax.cu.

use super::{Access, Grid, KernelArguments, NodeLaunches, NodeOnGpu, Ptr, Unsupported, saturating_product};
use crate::ops::softmax::SoftMax;
use crate::tensor::DType::{self, F32};
use bytemuck::{Pod, Zeroable};

/// Rows per block of softmax_warp, one warp each.
const WARP_ROWS_PER_BLOCK: u32 = 4;
/// Longest row of softmax_warp: 8 elements per lane.
const MAX_WARP_ROW: usize = 256;
/// Elements in the registers of a thread of softmax_block.
const KEPT_PER_THREAD: usize = 16;
/// Longest row of softmax_block; longer rows use softmax_long.
const MAX_BLOCK_ROW: usize = 1024 * KEPT_PER_THREAD;

/// `struct SoftMaxArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct SoftMaxArgs {
    n: u32,
    m: u32,
    heads: u32,
    rows: u32,
    mask: [u32; 3],
    mask_type: u32,
    sink_step: u64,
    scale: f32,
    max_bias: f32,
}

impl KernelArguments for SoftMaxArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let [mask_rows, mask_heads, mask_batches] = self.mask;
        if self.rows > 0 && mask_rows.min(mask_heads).min(mask_batches) == 0 {
            return Err("a mask without rows");
        }
        let size = DType::from_wire(self.mask_type).map_or(0, DType::block_bytes);
        let stride = saturating_product(&[self.n, mask_rows, size as u32]);
        let mask = Access::run(1, &[self.n, self.m]).along(saturating_product(&[mask_heads, mask_batches]), stride);
        let all = |pointer| Access::run(pointer, &[self.n, self.rows]);
        Ok(vec![all(0), mask, Access::one(2).along(self.heads, self.sink_step), all(3)])
    }
}

pub(super) fn select(op: SoftMax, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (x, y) = (on.src(0)?, on.dst());
    if x.dtype() != F32 || y.dtype() != F32 {
        return Err(on.unsupported_types());
    }
    let [n, m, heads, _] = on.shape(x)?.ne;
    let rows = i32::try_from(y.rows()).map_err(|_| on.unsupported("2^31 or more rows"))? as u32;
    let (mask, sinks) = (on.node.srcs.get(1), on.node.srcs.get(2));
    let (mask_ne, mask_type) = match mask {
        Some(mask) => (on.shape(mask)?.ne, mask.dtype().to_wire()),
        None => ([1; 4], 0),
    };
    let args = SoftMaxArgs {
        n,
        m,
        heads,
        rows,
        mask: [mask_ne[1], mask_ne[2], mask_ne[3]],
        mask_type,
        sink_step: sinks.map_or(0, |sinks| sinks.nb()[0] as u64),
        scale: op.scale,
        max_bias: op.max_bias,
    };
    let length = y.ne()[0];
    let (name, grid) = if length <= MAX_WARP_ROW {
        let grid = Grid {
            blocks: [u64::from(rows.div_ceil(WARP_ROWS_PER_BLOCK)), 1, 1],
            threads: [32, WARP_ROWS_PER_BLOCK, 1],
            shared: 0,
        };
        ("softmax_warp", grid)
    } else if length <= MAX_BLOCK_ROW {
        let threads = length.div_ceil(KEPT_PER_THREAD).next_multiple_of(32) as u32;
        ("softmax_block", Grid::line(u64::from(rows), threads))
    } else {
        ("softmax_long", Grid::line(u64::from(rows), 1024))
    };
    on.single_launch(("softmax", name), grid, &[Ptr::Src(0), Ptr::Src(1), Ptr::Src(2), Ptr::Dst], &args)
}

//! Launches of ROPE, alone or fused with a SET_ROWS of its result into the KV cache: kernels/rope.cu.

use super::{Grid, KernelLaunch, NodeLaunches, NodeOnGpu, Ptr, Shape, Unsupported, blocks, suffix};
use crate::ops::OpCode;
use crate::ops::rope::{Rope, RopeMode};
use crate::tensor::DType::{BF16, F16, F32};
use crate::tensor::TensorDesc;
use bytemuck::{Pod, Zeroable};

/// Pairs per block: `CHUNK` of kernels/rope.cu.
const PAIRS_PER_BLOCK: usize = 512;
/// Limit of threads per block.
const MAX_THREADS: usize = 128;
/// Number of blocks that fills a large GPU. The heads of a token are divided among blocks until the grid has as many.
const BLOCKS_TO_FILL_GPU: usize = 1024;

/// `struct RopeParams` of kernels/rope.cu.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RopeParams {
    x: Shape,
    y: Shape,
    position_step: u64,
    factor_step: u64,
    mode: u32,
    first: u32,
    pairs: u32,
    step: f32,
    sections: [u32; 4],
    freq_scale: f32,
    ext_factor: f32,
    ramp: [f32; 2],
    magnitude: f32,
    parts: u32,
    chunks: u32,
    vector: u32,
}

/// `struct RopeSetRowsArgs` of kernels/rope.cu.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RopeSetRowsArgs {
    params: RopeParams,
    id_step: u64,
    id_type: u32,
    y_type: u32,
    op: u32,
    padding: u32,
}

/// `struct RopeFactorsArgs` of kernels/rope.cu.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RopeFactorsArgs {
    step: u64,
    n: u32,
    padding: u32,
}

pub(super) fn select(op: Rope, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (x, y) = (on.src(0)?, on.dst());
    if !matches!(y.dtype(), F32 | F16) || x.dtype() != y.dtype() {
        return Err(on.unsupported_types());
    }
    let (mut params, grid) = rope_params(op, on)?;
    let mut node_launches = NodeLaunches::default();
    let mut factors = Ptr::Src(2);
    // Factors of y's shape and type may share y's memory (in-place reuse). Copy them first: another block could overwrite them
    // before they are read.
    if let Some(f) = on.node.srcs.get(2)
        && f.ne() == y.ne()
        && f.dtype() == y.dtype()
    {
        let n = op.pairs();
        let args = RopeFactorsArgs { step: params.factor_step, n: n as u32, padding: 0 };
        let line = Grid::line(blocks(n, super::THREADS, 1), super::THREADS);
        node_launches.launches.push(on.launch(("rope", "rope_factors"), line, &[factors, Ptr::Scratch(0)], &args)?);
        node_launches.scratch = f.dense_bytes() as u64;
        (factors, params.factor_step) = (Ptr::Scratch(0), 4);
    }
    let name = format!("rope_{}", suffix(y.dtype()));
    node_launches.launches.push(on.launch(
        ("rope", &name),
        grid,
        &[Ptr::Src(0), Ptr::Src(1), factors, Ptr::Dst],
        &params,
    )?);
    Ok(node_launches)
}

/// The launch for ROPE fused with SET_ROWS; see [`crate::graph::fuse::FusedOp::RopeSetRows`] for the operands and `row`.
pub(super) fn fused(op: Rope, row: usize, on: &NodeOnGpu<'_>) -> Option<NodeLaunches> {
    let (x, y) = (on.src(0).ok()?, on.dst());
    let types = x.dtype() == F32 && matches!(y.dtype(), F32 | F16 | BF16);
    if x.is_empty() || !(types && y.rows_dense() && y.ne()[0] == row) {
        return None;
    }
    let ids = on.src(3).ok()?;
    let (params, grid) = rope_params(op, on).ok()?;
    let args = RopeSetRowsArgs {
        params,
        id_step: ids.nb()[0] as u64,
        id_type: ids.dtype().to_wire(),
        y_type: y.dtype().to_wire(),
        op: OpCode::SetRows as u32,
        padding: 0,
    };
    let pointers = [Ptr::Src(0), Ptr::Src(1), Ptr::Src(2), Ptr::Src(3), Ptr::Dst, Ptr::ErrorWord];
    let launch: KernelLaunch = on.launch(("rope", "rope_set_rows"), grid, &pointers, &args).ok()?;
    Some(NodeLaunches::one(launch))
}

/// The parameters that all entries share, and the grid.
fn rope_params(op: Rope, on: &NodeOnGpu<'_>) -> Result<(RopeParams, Grid), Unsupported> {
    let (x, y, pairs) = (on.src(0)?, on.dst(), op.pairs());
    let pairs_per_vector = 16 / x.dtype().block_bytes();
    let vector = [x, y].into_iter().all(rows_aligned_to_16)
        && [x.ne()[0], op.n_offs as usize, pairs].into_iter().all(|n| n.is_multiple_of(pairs_per_vector));
    let [_, heads, tokens, batches] = x.ne();
    // Threads: x over the pairs of a head, y over heads. While angles are computed, all threads iterate over pairs.
    let pairs_per_chunk = pairs.min(PAIRS_PER_BLOCK);
    let threads_x = (if vector { pairs_per_chunk / pairs_per_vector } else { pairs_per_chunk }).min(MAX_THREADS);
    let threads_y = heads.max(pairs_per_chunk.div_ceil(threads_x)).min(MAX_THREADS / threads_x);
    let chunks = pairs.div_ceil(PAIRS_PER_BLOCK);
    let blocks_per_head_part = tokens.saturating_mul(batches).saturating_mul(chunks);
    let parts = (BLOCKS_TO_FILL_GPU / blocks_per_head_part).clamp(1, heads.div_ceil(threads_y));
    let mode = match op.mode {
        RopeMode::Normal => 0,
        RopeMode::Neox => 1,
        RopeMode::Mrope(_) => 2,
        RopeMode::Vision(_) => 3,
        RopeMode::Imrope(_) => 4,
    };
    let angles = op.angles();
    let params = RopeParams {
        x: on.shape(x)?,
        y: on.shape(y)?,
        position_step: on.src(1)?.nb()[0] as u64,
        factor_step: on.node.srcs.get(2).map_or(0, |f| f.nb()[0] as u64),
        mode,
        first: op.n_offs,
        pairs: pairs as u32,
        step: angles.theta_scale,
        sections: op.mode.sections().unwrap_or_default(),
        freq_scale: op.freq_scale,
        ext_factor: op.ext_factor,
        ramp: angles.corr_dims.into(),
        magnitude: angles.mscale,
        parts: parts as u32,
        chunks: chunks as u32,
        vector: u32::from(vector),
    };
    let grid = Grid {
        blocks: [blocks_per_head_part.saturating_mul(parts) as u64, 1, 1],
        threads: [threads_x as u32, threads_y as u32, 1],
        shared: 0,
    };
    Ok((params, grid))
}

/// Whether all rows start at multiples of 16 bytes if the first one does.
fn rows_aligned_to_16(t: &TensorDesc) -> bool {
    (1..4).all(|d| t.ne()[d] == 1 || t.nb()[d].is_multiple_of(16))
}

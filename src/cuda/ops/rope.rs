//! Launches of ROPE and ROPE_BACK, ROPE alone or fused with the SET_ROWS into the KV cache: kernels/rope.cu.

use super::{
    Access, Grid, KernelArguments, KernelLaunch, NodeLaunches, NodeOnGpu, Ptr, Shape, Unsupported, blocks,
    saturating_product, suffix,
};
use crate::ops::OpCode;
use crate::ops::rope::{Rope, RopeMode};
use crate::tensor::DType::{BF16, F16, F32};
use crate::tensor::TensorDesc;
use bytemuck::{Pod, Zeroable};

/// Pairs per block: `CHUNK` of kernels/rope.cu.
const PAIRS_PER_BLOCK: usize = 512;
/// Limit of threads per block.
const MAX_THREADS: usize = 128;
/// Most heads of queries or keys with a norm: that of kernels/rope.cu.
const MAX_NORM_HEADS: usize = 128;
/// Most ids of rows in a fused kernel, which compares each with all later ones to find the last of equal ids.
const MAX_SCANNED_IDS: usize = 2048;
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
    sine_magnitude: f32,
    parts: u32,
    chunks: u32,
    vector: u32,
    padding: u32,
}

impl RopeParams {
    /// The rotated pairs lie in a row, and each is in a section.
    fn check_pairs(&self) -> Result<(), &'static str> {
        let of_sections = self.mode < 2 || self.sections.iter().try_fold(0u32, |sum, &n| sum.checked_add(n)) > Some(0);
        let last = u64::from(self.first) + 2 * u64::from(self.pairs);
        if of_sections && last <= u64::from(self.x.ne[0]) { Ok(()) } else { Err("pairs outside of a row") }
    }

    fn source(&self, pointer: usize) -> Access {
        self.rows(pointer, &self.x)
    }

    /// The accesses of x or y, by 16 bytes. Rows are dense, so the stride of dimension 0 is the size of an element.
    fn rows(&self, pointer: usize, shape: &Shape) -> Access {
        shape.access(pointer).vectors(self.vector, 16 / shape.nb[0].clamp(1, 16))
    }

    /// The accesses of the positions, of which some modes have four for each token, and of the factors.
    fn angle_accesses(&self) -> [Access; 2] {
        let positions = saturating_product(&[self.x.ne[2], if self.mode < 2 { 1 } else { 4 }]);
        [
            Access::one(1).along(positions, self.position_step),
            Access::one(2).of(F32).along(self.pairs, self.factor_step),
        ]
    }
}

impl KernelArguments for RopeParams {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        self.check_pairs()?;
        let [positions, factors] = self.angle_accesses();
        Ok(vec![self.source(0), positions, factors, self.rows(3, &self.y)])
    }
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

impl KernelArguments for RopeSetRowsArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        self.params.check_pairs()?;
        let [n, heads, tokens, _] = self.params.x.ne;
        let [positions, factors] = self.params.angle_accesses();
        let ids = Access::one(3).of_type(self.id_type).along(tokens, self.id_step);
        let cache = Access::run(4, &[n, heads]).along(self.params.y.ne[1], self.params.y.nb[1]);
        let cache = cache.vectors(self.params.vector, 4);
        Ok(vec![self.params.source(0), positions, factors, ids, cache])
    }
}

/// `struct CacheRows` of kernels/rope.cu.
#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
struct CacheRows {
    x_step: u64,
    y_step: u64,
    id_step: u64,
    id_type: u32,
    y_type: u32,
    row: u32,
    rows: u32,
}

/// `struct RopeCacheArgs` of kernels/rope.cu.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RopeCacheArgs {
    params: RopeParams,
    keys: CacheRows,
    values: CacheRows,
    head_step: u64,
    heads: u32,
    parts: u32,
    q_blocks: u32,
    k_blocks: u32,
    v_vector: u32,
    op: u32,
    eps: [f32; 2],
}

impl KernelArguments for RopeCacheArgs {
    fn accesses(&self, grid: &Grid) -> Result<Vec<Access>, &'static str> {
        self.params.check_pairs()?;
        let Shape { ne: [n, _, tokens, _], nb } = self.params.x;
        let [positions, factors] = self.params.angle_accesses();
        let vector = self.params.vector;
        let keys = Shape { ne: [n, self.heads, tokens, 1], nb: [nb[0], self.head_step, self.keys.x_step, 0] };
        // Values: one block for each token.
        let others = u64::from(self.q_blocks) + u64::from(self.k_blocks);
        let value_tokens = grid.blocks[0].saturating_sub(others);
        let values = Access::run(7, &[self.values.row]).along(value_tokens, self.values.x_step);
        let mut accesses = vec![
            self.params.source(0),
            positions,
            factors,
            self.params.rows(3, &self.params.y),
            keys.access(4).vectors(vector, 4),
            values.vectors(self.v_vector, 4),
        ];
        let caches = [(5, &self.keys, u64::from(tokens), vector), (8, &self.values, value_tokens, self.v_vector)];
        for (first, rows, tokens, vector) in caches {
            accesses.push(Access::one(first).of_type(rows.id_type).along(tokens, rows.id_step));
            accesses.push(Access::run(first + 1, &[rows.row]).along(rows.rows, rows.y_step).vectors(vector, 4));
        }
        accesses.extend([Access::run(10, &[n]), Access::run(11, &[n])]);
        Ok(accesses)
    }
}

/// `struct RopeFactorsArgs` of kernels/rope.cu.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RopeFactorsArgs {
    step: u64,
    n: u32,
    padding: u32,
}

impl KernelArguments for RopeFactorsArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        Ok(vec![Access::one(0).along(self.n, self.step), Access::run(1, &[self.n]).of(F32)])
    }
}

pub(super) fn select(op: Rope, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (x, y) = (on.src(0)?, on.dst());
    if !matches!(y.dtype(), F32 | F16) || x.dtype() != y.dtype() {
        return Err(on.unsupported_types());
    }
    let (mut params, grid) = rope_params(op, on.src(1)?, on.node.srcs.get(2), (x, y), on)?;
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
    if ids.ne()[0] > MAX_SCANNED_IDS {
        return None;
    }
    let (params, grid) = rope_params(op, on.src(1).ok()?, on.node.srcs.get(2), (x, y), on).ok()?;
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

/// The launch for ROPE of queries and keys with the writes of the caches; see [`crate::graph::fuse::FusedOp::RopeCache`] for the
/// operands, `row`, `values` and `norms`.
pub(super) fn fused_cache(
    op: Rope,
    row: usize,
    (values, norms): (bool, Option<[f32; 2]>),
    on: &NodeOnGpu<'_>,
) -> Option<NodeLaunches> {
    let (q, y, k, k_cache) = (on.src(0).ok()?, on.dst(), on.src(3).ok()?, on.src(5).ok()?);
    let is_cache = |x: &TensorDesc, row: usize, cache: &TensorDesc| {
        let types = x.dtype() == F32 && matches!(cache.dtype(), F32 | F16 | BF16);
        types && !x.is_empty() && x.rows_dense() && cache.rows_dense() && cache.ne()[0] == row
    };
    if (q.dtype(), y.dtype()) != (F32, F32) || q.is_empty() || !is_cache(k, row, k_cache) {
        return None;
    }
    // As many ids as tokens, also of values.
    if q.ne()[2] > MAX_SCANNED_IDS {
        return None;
    }
    let rows_of = |x_step: usize, ids: &TensorDesc, row: usize, cache: &TensorDesc| {
        let [row, rows] = [row, cache.ne()[1]].map(|n| i32::try_from(n).ok());
        Some(CacheRows {
            x_step: x_step as u64,
            y_step: cache.nb()[1] as u64,
            id_step: ids.nb()[0] as u64,
            id_type: ids.dtype().to_wire(),
            y_type: cache.dtype().to_wire(),
            row: row? as u32,
            rows: rows? as u32,
        })
    };
    let factors = on.node.srcs.get(2).filter(|_| norms.is_none());
    let (params, grid) = rope_params(op, on.src(1).ok()?, factors, (q, y), on).ok()?;
    let (of_keys, key_grid) = rope_params(op, on.src(1).ok()?, factors, (k, k_cache), on).ok()?;
    let keys = rows_of(k.nb()[2], on.src(4).ok()?, row, k_cache)?;
    let (mut of_values, mut v_vector, mut v_blocks) = (CacheRows::default(), false, 0);
    if values {
        let (v, ids, cache) = (on.src(6).ok()?, on.src(7).ok()?, on.src(8).ok()?);
        if !is_cache(v, v.ne()[0], cache) {
            return None;
        }
        of_values = rows_of(v.nb()[1], ids, v.ne()[0], cache)?;
        v_vector = [v, cache].into_iter().all(rows_aligned_to_16) && v.ne()[0].is_multiple_of(4);
        v_blocks = v.ne()[1] as u64;
    }
    // A block has threads for both, and one flag says whether both use 16-byte accesses.
    if params.vector != of_keys.vector || grid.threads[0] != key_grid.threads[0] {
        return None;
    }
    // Norms: the threads of a head are neighbours in a warp, and all channels are rotated, in one chunk.
    let whole_heads = 2 * op.pairs() == q.ne()[0] && params.chunks == 1 && q.ne()[1].max(k.ne()[1]) <= MAX_NORM_HEADS;
    let in_warp = grid.threads[0].is_power_of_two() && grid.threads[0] <= 32;
    if norms.is_some() && !(whole_heads && in_warp) {
        return None;
    }
    let [q_blocks, k_blocks] = [&grid, &key_grid].map(|grid| grid.blocks[0]);
    let args = RopeCacheArgs {
        params,
        keys,
        values: of_values,
        head_step: k.nb()[1] as u64,
        heads: k.ne()[1] as u32,
        parts: of_keys.parts,
        q_blocks: u32::try_from(q_blocks).ok()?,
        k_blocks: u32::try_from(k_blocks).ok()?,
        v_vector: v_vector.into(),
        op: OpCode::SetRows as u32,
        eps: norms.unwrap_or_default(),
    };
    let with_norms = |i| if norms.is_some() { Ptr::Src(i) } else { Ptr::Null };
    let factors = if norms.is_some() { Ptr::Null } else { Ptr::Src(2) };
    let mut pointers = vec![Ptr::Src(0), Ptr::Src(1), factors, Ptr::Dst];
    pointers.extend((3..9).map(Ptr::Src));
    pointers.extend([with_norms(2), with_norms(9), Ptr::ErrorWord]);
    let threads = std::array::from_fn(|d| grid.threads[d].max(key_grid.threads[d]));
    let grid = Grid { blocks: [q_blocks + k_blocks + v_blocks, 1, 1], threads, shared: 0 };
    on.launch(("rope", "rope_cache"), grid, &pointers, &args).ok().map(NodeLaunches::one)
}

/// The parameters that all entries share for x and its destination y, and the grid.
fn rope_params(
    op: Rope,
    positions: &TensorDesc,
    factors: Option<&TensorDesc>,
    (x, y): (&TensorDesc, &TensorDesc),
    on: &NodeOnGpu<'_>,
) -> Result<(RopeParams, Grid), Unsupported> {
    let pairs = op.pairs();
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
        position_step: positions.nb()[0] as u64,
        factor_step: factors.map_or(0, |f| f.nb()[0] as u64),
        mode,
        first: op.n_offs,
        pairs: pairs as u32,
        step: angles.theta_scale,
        sections: op.mode.sections().unwrap_or_default(),
        freq_scale: op.freq_scale,
        ext_factor: op.ext_factor,
        ramp: angles.corr_dims.into(),
        magnitude: angles.mscale,
        sine_magnitude: if op.backward { -angles.mscale } else { angles.mscale },
        parts: parts as u32,
        chunks: chunks as u32,
        vector: u32::from(vector),
        padding: 0,
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

#[cfg(test)]
mod tests {
    use super::super::kernel_constants::assert_constants;
    use super::*;

    #[test]
    fn constants_are_those_of_the_kernels() {
        let expected = [("CHUNK", PAIRS_PER_BLOCK as u64), ("MAX_NORM_HEADS", MAX_NORM_HEADS as u64)];
        assert_constants(include_str!("../../../kernels/rope.cu"), &expected);
    }
}

//! Launches of the GEMM on tensor cores, for many columns: kernels/mul_mat_gemm.cu and kernels/mul_mat_gemm_blocks.cu.

use super::super::{
    Access, Grid, KernelArguments, KernelLaunch, MAX_GRID_YZ, MIN_MMA_CAPABILITY, NodeLaunches, NodeOnGpu, Ptr,
    Unsupported, can_pack,
};
use super::arguments::{ConvertColumnsArgs, RoundColumnsArgs};
use super::mma::TiledArgs;
use super::planes::{Planes, stride};
use super::{
    Columns, MAX_DOT_COLUMNS, MAX_HALF_COLUMNS, MAX_MMA_COLUMNS, MulMatArgs, WeightLayout, launch_typed, merged_rows,
    mul_mat_args, scratch_shape,
};
use crate::cuda::kernel::{COUNTER_BYTES, ColumnConversion};
use crate::ops::mul_mat::{MulMat, Precision};
use crate::tensor::{Capability, DType, TensorDesc};
use bytemuck::{Pod, Zeroable};

/// Rows of a tile, and threads of its block.
const GEMM_ROWS: u32 = 128;
const GEMM_THREADS: u32 = 128;

/// Threads of a block that converts a column.
const HALVES_THREADS: u32 = 256;

/// Elements of k per step, by whose multiples k is split.
pub(in super::super) const GEMM_DEPTH: u32 = 32;

/// Fewest elements of k of a block, if k is split: 16 steps, so that filling the stages of shared memory stays a small part.
const LEAST_SHARE: u32 = 512;

/// Blocks per multiprocessor up to which k is split. Two fit, by their registers and shared memory, on every GPU.
const BLOCKS_PER_MULTIPROCESSOR: u64 = 2;

/// Most tiles whose k is split: each has a counter.
const MAX_SPLIT_TILES: u64 = COUNTER_BYTES / 4;

/// Limit of the bytes between rows and between columns: the kernels address the rows of a tile by 32-bit offsets from the first one. A
/// single row has the stride 0 here; the limit of a converted column bounds its length.
const MAX_STRIDE: u64 = (1 << 32) / GEMM_ROWS as u64;

/// `struct GemmArgs` of kernels/mul_mat_gemm.cuh. `log2_lanes` of the product are the elements of k for each block.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct GemmArgs {
    pub(super) of: TiledArgs,
    /// With a table: slots, and rows of b, per token.
    pub(super) used: u32,
    pub(super) rows: u32,
}

impl KernelArguments for GemmArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        Ok(self.of.table_accesses().unwrap_or_else(|| self.of.product.aligned_accesses().into()))
    }
}

/// Where a launch finds its weights, its converted columns and its result, and the offset in scratch memory at which
/// blocks store partial sums.
#[derive(Clone, Copy)]
pub(in super::super) struct Operands {
    pub(in super::super) weights: Ptr,
    pub(in super::super) columns: Ptr,
    pub(in super::super) dst: Ptr,
    pub(in super::super) parts: u64,
}

/// The operands of MUL_MAT and MUL_MAT_ID.
const OPERANDS: Operands = Operands { weights: Ptr::Src(0), columns: Ptr::Columns, dst: Ptr::Dst, parts: 0 };

/// The type to which weights of this type are converted in shared memory, and columns in scratch memory. `None` without a kernel.
fn staged_type(weights: DType) -> Option<DType> {
    match weights {
        DType::F16 | DType::BF16 => Some(weights),
        _ => weights.is_block().then_some(DType::F16),
    }
}

/// Capabilities (times ten) whose tensor cores do 512 multiply-adds of F16 per clock and multiprocessor, and GeForce boards half of that; those
/// of 8.0, 9.0 and 10.0 do 1024 to 4096. Packed weights keep the kernels of 8-bit codes there: on an A40, Q4_K 4096 x 4096 by 512 takes
/// 125 us with them, and 178 us at the rate of F16 (modelled, scripts/roofline_model.py).
const CAPABILITIES_FOR_INT8: [u32; 4] = [86, 89, 120, 121];

/// Slots per expert, on average, up to which MUL_MAT_ID of block types in ggml's layout multiplies slot by slot: a tile of 128 columns takes
/// 14 instructions per weight for IQ2_XXS, however few columns it has, and the vector kernel 4.4 for each slot; where halves are slow, a tile
/// takes the time of 16 slots.
const MAX_SLOTS_BY_ID: u32 = 4;
const MAX_SLOTS_BY_ID_FOR_INT8: u32 = 16;

/// With more columns than this, products use the GEMM. `None`: with no number of columns.
fn gemm_threshold_of_type(weights: DType, layout: WeightLayout, capability: u32) -> Option<u32> {
    match layout {
        _ if weights == DType::F32 || capability < MIN_MMA_CAPABILITY => None,
        WeightLayout::Packed => (!CAPABILITIES_FOR_INT8.contains(&capability)).then_some(MAX_MMA_COLUMNS),
        // Packable weights that are not packed are the exception: there is no module for them.
        WeightLayout::Ggml => (!weights.can(Capability::Cuda) || weights.is_float()).then_some(MAX_HALF_COLUMNS),
    }
}

/// Whether weights of a type, packed if they can be, use the GEMM for many columns.
pub(in crate::cuda) fn uses_gemm(weights: DType, capability: u32) -> bool {
    let layout = if can_pack(weights) { WeightLayout::Packed } else { WeightLayout::Ggml };
    gemm_threshold_of_type(weights, layout, capability).is_some()
}

/// Whether columns with this precision may be rounded to the staged type.
fn may_round(round: Precision, staged: DType) -> bool {
    match round {
        Precision::F32 => false,
        Precision::F16 => staged == DType::F16,
        _ => true,
    }
}

/// The most columns for which products of weights `a` use other kernels. `None` if the GEMM computes no product of them.
fn gemm_threshold(
    round: Precision,
    a: &TensorDesc,
    layout: WeightLayout,
    on: &NodeOnGpu<'_>,
) -> Result<Option<u32>, Unsupported> {
    let Some(staged) = staged_type(a.dtype()) else { return Ok(None) };
    let short = |bytes: u64| bytes < MAX_STRIDE;
    let applies =
        on.node.aligned && may_round(round, staged) && short(stride(&on.shape(a)?, 1)) && has_short_columns(a.ne()[0]);
    Ok(gemm_threshold_of_type(a.dtype(), layout, on.gpu.capability).filter(|_| applies))
}

/// Whether the GEMM computes the product of weights `a` with these planes of columns.
pub(super) fn applies(
    op: MulMat,
    a: &TensorDesc,
    planes: &Planes,
    layout: WeightLayout,
    on: &NodeOnGpu<'_>,
) -> Result<bool, Unsupported> {
    let most_without = gemm_threshold(op.round, a, layout, on)?;
    Ok(most_without.is_some_and(|most| planes.n > most) && u64::from(planes.count(on)?) <= MAX_GRID_YZ)
}

/// Columns of a tile, if the GEMM computes the products of experts with `slots` slots in all.
pub(super) fn width_for_experts(
    round: Precision,
    a: &TensorDesc,
    layout: WeightLayout,
    slots: u64,
    on: &NodeOnGpu<'_>,
) -> Result<Option<u32>, Unsupported> {
    let Some(most_columns) = gemm_threshold(round, a, layout, on)? else { return Ok(None) };
    let most_slots = match (layout, a.dtype().is_block()) {
        (WeightLayout::Packed, _) => most_columns,
        (WeightLayout::Ggml, false) => MAX_DOT_COLUMNS,
        (WeightLayout::Ggml, true) if CAPABILITIES_FOR_INT8.contains(&on.gpu.capability) => MAX_SLOTS_BY_ID_FOR_INT8,
        (WeightLayout::Ggml, true) => MAX_SLOTS_BY_ID,
    };
    let experts = u64::from(on.shape(a)?.ne[2]);
    // The kernel addresses all columns by 32-bit offsets.
    let all_bytes = column_bytes(a.ne()[0]).saturating_mul(on.src(1)?.rows() as u64);
    let applies = slots > u64::from(most_slots) * experts && u32::try_from(all_bytes).is_ok();
    Ok(applies.then(|| tile_width(a.dtype(), slots.div_ceil(experts.max(1)))))
}

/// Columns of a tile for products with `n` columns.
fn tile_width(weights: DType, n: u64) -> u32 {
    if n <= 64 && !weights.is_block() { 64 } else { 128 }
}

/// Bytes of a converted column: halves, zeros up to a multiple of 16 bytes, and a power of two.
pub(in super::super) fn column_bytes(k: usize) -> u64 {
    2 * k.next_multiple_of(8) as u64 + 16
}

/// Whether the kernel can address columns of `k` elements.
pub(in super::super) fn has_short_columns(k: usize) -> bool {
    column_bytes(k) < MAX_STRIDE
}

/// The launches of the product of weights `a` with the columns of the node.
pub(super) fn select(a: &TensorDesc, layout: WeightLayout, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (conversion, columns) = convert_columns(a.dtype(), on)?;
    let (launch, scratch) = launch(a, layout, &columns, on)?;
    Ok(NodeLaunches { columns: Some(conversion), ..NodeLaunches::new(vec![launch], scratch) })
}

/// A launch that rounds the columns of the node to the staged type, and the result.
pub(super) fn convert_columns(weights: DType, on: &NodeOnGpu<'_>) -> Result<(ColumnConversion, Columns), Unsupported> {
    let b = on.src(1)?;
    let column = column_bytes(b.ne()[0]);
    let bytes = column.checked_mul(b.rows() as u64).ok_or_else(|| on.unsupported("b is too large"))?;
    let shape = on.shape(b)?;
    let to = staged_type(weights).unwrap_or(DType::F16).to_wire();
    let args = ConvertColumnsArgs { b: merged_rows(shape), stride: column, type_or_group: b.dtype().to_wire(), to };
    let grid = Grid::line(b.rows() as u64, HALVES_THREADS);
    let launch =
        on.launch(("mul_mat", "mul_mat_halves"), grid, &[Ptr::Src(1), Ptr::Columns], &RoundColumnsArgs(args))?;
    let conversion = ColumnConversion { launch, table: None, bytes, column, group: None };
    Ok((conversion, Columns { at: Ptr::Columns, shape: scratch_shape(&shape, column) }))
}

/// The launch that multiplies weights and converted columns, and its bytes of scratch memory, in which blocks store partial sums.
fn launch(
    a: &TensorDesc,
    layout: WeightLayout,
    columns: &Columns,
    on: &NodeOnGpu<'_>,
) -> Result<(KernelLaunch, u64), Unsupported> {
    let planes = Planes::of(a, &columns.shape, on)?;
    launch_tiles(a, mul_mat_args(a, &planes, layout, 0, on)?, OPERANDS, on)
}

/// A product of weights of source 0's type, F16 or BF16, whose rows are padded to multiples of 16 bytes, and columns that another launch of
/// the node has converted.
/// All planes of columns, which lie one after the other, share the weights.
pub(in super::super) struct ConvertedProduct {
    pub(in super::super) k: u32,
    pub(in super::super) m: u32,
    /// Columns of a plane.
    pub(in super::super) n: u32,
    pub(in super::super) planes: u32,
    /// Byte strides of the result's rows, columns and planes.
    pub(in super::super) dst: [u64; 3],
}

/// The launch of the product, and the bytes of scratch memory at `operands.parts`, in which blocks store partial sums.
pub(in super::super) fn launch_converted(
    product: &ConvertedProduct,
    operands: Operands,
    on: &NodeOnGpu<'_>,
) -> Result<(KernelLaunch, u64), Unsupported> {
    let &ConvertedProduct { k, m, n, planes, dst: [d0, d1, d2] } = product;
    let (a, column) = (on.src(0)?, column_bytes(k as usize));
    let bytes = column.saturating_mul(n.into());
    let args = MulMatArgs {
        k,
        m,
        n,
        log2_lanes: 0,
        planes,
        b2: planes,
        r2: planes,
        r3: 1,
        a: [2 * u64::from(k.next_multiple_of(8)), 0, 0],
        b: [column, bytes, 0],
        dst: [d0, d1, d2, 0],
    };
    let (launch, parts) = launch_tiles(a, args, operands, on)?;
    Ok((launch.with_accesses([Access::bytes(1, bytes.saturating_mul(planes.into()))]), parts))
}

/// The launch of a product without a table, and the bytes at `operands.parts`.
fn launch_tiles(
    a: &TensorDesc,
    product: MulMatArgs,
    operands: Operands,
    on: &NodeOnGpu<'_>,
) -> Result<(KernelLaunch, u64), Unsupported> {
    let MulMatArgs { k, m, n, planes, .. } = product;
    let tiles = |width: u32| u64::from(m.div_ceil(GEMM_ROWS)) * u64::from(n.div_ceil(width));
    let most_blocks = |width| tiles(width) * u64::from(planes) * u64::from((k / LEAST_SHARE).max(1));
    let width = tile_width(a.dtype(), n.into());
    // Smaller tiles cost more loads, but not as much as multiprocessors without a block.
    let is_small = !a.dtype().is_block() && most_blocks(width) < on.gpu.multiprocessors.into();
    let width = if is_small { 64 } else { width };
    let tiles = tiles(width);
    let share = share_of_block(k, tiles * u64::from(planes), on.gpu.multiprocessors);
    let args = GemmArgs { of: TiledArgs { product, table: 0 }, used: 0, rows: 0 };
    launch_split(a, args, (share, operands), [tiles, planes.into()], width, on)
}

/// The launch that multiplies groups of slots with their experts, by a table, and its bytes of scratch memory. About `likely` groups have
/// slots.
pub(super) fn launch_by_table(
    a: &TensorDesc,
    args: GemmArgs,
    likely: u64,
    on: &NodeOnGpu<'_>,
) -> Result<(KernelLaunch, u64), Unsupported> {
    let MulMatArgs { k, m, n: width, planes: groups, .. } = args.of.product;
    let rows = u64::from(m.div_ceil(GEMM_ROWS));
    let share = if rows * u64::from(groups) <= MAX_SPLIT_TILES {
        share_of_block(k, rows * likely, on.gpu.multiprocessors)
    } else {
        whole(k)
    };
    launch_split(a, args, (share, OPERANDS), [rows, groups.into()], width, on)
}

/// The launch with `share` elements of k per block, for so many tiles and planes.
fn launch_split(
    a: &TensorDesc,
    mut args: GemmArgs,
    (share, operands): (u32, Operands),
    [tiles, planes]: [u64; 2],
    width: u32,
    on: &NodeOnGpu<'_>,
) -> Result<(KernelLaunch, u64), Unsupported> {
    let product = &mut args.of.product;
    product.log2_lanes = share;
    let splits = u64::from(product.k.div_ceil(share));
    let (parts, counts, scratch) = if splits == 1 {
        (Ptr::Null, Ptr::Null, 0)
    } else {
        let tile_bytes = 4 * u64::from(GEMM_ROWS * width);
        (Ptr::Scratch(operands.parts), Ptr::Counters, tiles * splits * planes * tile_bytes)
    };
    let grid = Grid::of([tiles, splits, planes], GEMM_THREADS);
    let pointers = [operands.weights, operands.columns, operands.dst, parts, counts];
    let launch = launch_typed("gemm_", &format!("gemm{width}"), a, grid, &pointers, &args, on)?;
    Ok((launch.with_accesses([Access::bytes(3, scratch)]), scratch))
}

/// All of k in one block.
fn whole(k: u32) -> u32 {
    k.next_multiple_of(GEMM_DEPTH).max(GEMM_DEPTH)
}

/// Elements of k for each block of `tiles` tiles: split-K gives each multiprocessor two blocks, if k is long enough and the counters of the
/// tiles suffice.
fn share_of_block(k: u32, tiles: u64, multiprocessors: u32) -> u32 {
    let wanted = BLOCKS_PER_MULTIPROCESSOR * u64::from(multiprocessors) / tiles.max(1);
    let splits = wanted.min(u64::from(k / LEAST_SHARE));
    if splits < 2 || tiles > MAX_SPLIT_TILES {
        return whole(k);
    }
    k.div_ceil(splits as u32).next_multiple_of(GEMM_DEPTH)
}

#[cfg(test)]
mod tests {
    use super::super::super::kernel_constants::assert_constants;
    use super::*;

    #[test]
    fn constants_are_those_of_the_kernels() {
        let source = include_str!("../../../../kernels/mul_mat_gemm.cuh");
        let expected = [("GEMM_ROWS", GEMM_ROWS), ("GEMM_THREADS", GEMM_THREADS), ("GEMM_DEPTH", GEMM_DEPTH)];
        assert_constants(source, &expected.map(|(name, value)| (name, value.into())));
        let source = include_str!("../../../../kernels/mul_mat.cu");
        assert_constants(source, &[("HALVES_THREADS", HALVES_THREADS.into())]);
    }

    #[test]
    fn packed_weights_stay_on_int8_where_halves_are_slow() {
        for (dtype, layout, capability, want) in [
            (DType::F16, WeightLayout::Ggml, 90, Some(32)),
            (DType::F16, WeightLayout::Ggml, 86, Some(32)),
            (DType::F16, WeightLayout::Ggml, 75, None),
            (DType::F32, WeightLayout::Ggml, 90, None),
            (DType::Q4_K, WeightLayout::Packed, 80, Some(64)),
            (DType::Q4_K, WeightLayout::Packed, 89, None),
            (DType::Q4_K, WeightLayout::Ggml, 90, None),
            (DType::IQ4_XS, WeightLayout::Ggml, 89, Some(32)),
            (DType::IQ4_XS, WeightLayout::Ggml, 75, None),
        ] {
            assert_eq!(gemm_threshold_of_type(dtype, layout, capability), want, "{dtype} at {capability}");
        }
    }

    /// Two blocks for each of 132 multiprocessors, unless k is short.
    #[test]
    fn k_is_split_for_few_tiles() {
        for (k, tiles, want) in [
            (4096, 32, 512),
            (4096, 128, 2048),
            (4096, 133, 4096),
            (4100, 100, 2080),
            (1000, 1, 1024),
            (1024, 1, 512),
            (31, 1, 32),
            (1 << 20, 1, 4000),
        ] {
            assert_eq!(share_of_block(k, tiles, 132), want, "k = {k}, {tiles} tiles");
        }
    }
}

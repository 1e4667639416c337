//! Launches of MUL_MAT and MUL_MAT_ID: kernels/mul_mat.cu, or kernels/mul_mat_unpacked.cu for types that are never repacked; one
//! module per type of the weights a.
//!
//! Few columns of b (decoding) use the vector kernels; from compute capability 8.0 on, more columns use tensor cores without staging, and
//! more than 32 (64 of packed weights) the GEMM (`gemm`). For block types, the former two multiply 8-bit codes: a launch before them quantises b.
//! MUL_MAT_ID with many tokens multiplies all columns of an expert at a time (`experts`).

mod arguments;
mod experts;
pub(super) mod gemm;
mod mma;
pub(super) mod planes;
pub(super) mod products;

use super::repack::unit_len;
use super::{
    Grid, KernelArguments, KernelLaunch, MAX_GRID_YZ, MIN_MMA_CAPABILITY, NodeLaunches, NodeOnGpu, Ptr, Shape, THREADS,
    Unsupported, blocks, suffix,
};
use crate::cuda::kernel::{ColumnConversion, PackedLaunches};
use crate::cuda::layout::PackedSpan;
use crate::ops::mul_mat::MulMat;
use crate::tensor::{Capability, DType, TensorDesc};
use arguments::{ConvertColumnsArgs, MulMatArgs, MulMatIdArgs, RoundColumnsArgs};
pub(in crate::cuda) use gemm::uses_gemm;
use planes::{Planes, stride};
use products::{PackedIdArgs, Products};

/// Threads per block of the vector kernels.
const VEC_THREADS: u32 = 128;
/// Bytes of weights in flight on each multiprocessor that saturate the memory (Little's law: 0.7 us of the 4.8 TB/s of an H200 with 132
/// multiprocessors; a B200 would need 42 KiB, an A40 5). If a grid has less, more lanes share each row (split-K within a block).
const BYTES_IN_FLIGHT_PER_SM: u64 = 25 << 10;

/// Warps per multiprocessor that are enough for any type: decoding types with few bytes is limited by instructions.
const MAX_WARPS_FOR_LATENCY: u64 = 16;

/// Rows of a group of lanes: for packed weights, with one column of blocks of 32, and with eight columns of K types (`packed_rows` of
/// kernels/mul_mat_packed.cu); in ggml's layout (`ROWS_PER_GROUP` of kernels/mul_mat_common.cuh), and for types that are only read.
const PACKED_ROWS: usize = 4;
const PACKED_ROWS_ONE_COLUMN: usize = 8;
const PACKED_ROWS_K_EIGHT_COLUMNS: usize = 2;
const GGML_LAYOUT_ROWS: usize = 4;
const ONLY_READ_ROWS: usize = 2;

/// Most columns for the vector kernels, if there are tensor cores.
const MAX_VEC_COLUMNS: u32 = 8;

/// Columns per block of the vector kernels of block types over ggml's layout, if there is more than one. Weights in that layout are the
/// exception, so two widths keep their modules small.
const UNPACKED_VEC_COLUMNS: u32 = 4;

/// Rows of a of a warp (of a block for F16 and BF16) in the kernels for few columns on tensor cores.
const MMA_ROWS: u32 = 16;

/// Warps per multiprocessor that hide the latency of loads in the kernels for F16 and BF16, which load more at a time than the vector
/// kernels.
const HALF_WARPS_TO_HIDE_LATENCY: u64 = 8;

/// Most columns for which F16 and BF16 use the kernels without tiles in shared memory: they read the weights once per 8 columns, from
/// the level-2 cache but for the first time.
const MAX_HALF_COLUMNS: u32 = 32;

/// Most columns for which packed weights use the vector kernels, if there are tensor cores.
const MAX_DOT_COLUMNS: u32 = 2;

/// Columns of a tile of the tensor cores, and the most per block: of types with blocks of 32, and of K types, which need more registers.
const MMA_TILE_COLUMNS: u32 = 8;
const MAX_MMA_COLUMNS: u32 = 64;
const MAX_MMA_COLUMNS_K: u32 = 32;

/// The source of MUL_MAT_ID that selects the experts.
const IDS: u8 = 2;

pub(super) fn select(op: MulMat, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (a, b) = (on.src(0)?, on.src(1)?);
    if a.is_empty() {
        return Err(on.unsupported("rows without elements"));
    }
    let rounded = a.dtype().is_float() && b.dtype().is_float();
    if !a.dtype().can(Capability::CudaRead) || !(b.dtype() == DType::F32 || rounded) {
        return Err(on.unsupported_types());
    }
    // Loads of single bytes would double the kernels of types that are never packed.
    if !on.node.aligned && !a.dtype().can(Capability::Cuda) {
        return Err(on.unsupported("a tensor that is not aligned to its elements"));
    }
    let mut kernel = product(op, WeightLayout::Ggml, on)?;
    // The kernels for packed weights store results as words.
    if let Some(span) = PackedSpan::of(a).filter(|_| on.node.aligned) {
        let NodeLaunches { launches, columns, scratch, .. } = product(op, WeightLayout::Packed, on)?;
        kernel.scratch = kernel.scratch.max(scratch);
        kernel.packed = Some(PackedLaunches { launches, columns, weights: vec![(0, span)], packs: true });
    }
    Ok(kernel)
}

/// The layout of the weights a: ggml's, or packed (`layout`).
#[derive(Clone, Copy, PartialEq)]
pub(super) enum WeightLayout {
    Ggml,
    Packed,
}

/// The weights a of MUL_MAT.
pub(super) struct Weights<'a> {
    pub(super) desc: &'a TensorDesc,
    pub(super) at: Ptr,
    pub(super) layout: WeightLayout,
}

/// The launches for weights in a layout.
fn product(op: MulMat, layout: WeightLayout, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (a, b) = (on.src(0)?, on.src(1)?);
    if op.by_id {
        if let Some(groups) = experts::ExpertGroups::of(op.round, a, IDS, layout, on)? {
            return experts::select(a, layout, &groups, on);
        }
    } else {
        let planes = Planes::of_scratch(a, b, on)?;
        if gemm::applies(op, a, &planes, layout, on)? {
            return gemm::select(a, layout, on);
        }
        if let ProductKernel::Mma { tiles } = ProductKernel::of(a, planes.n, layout, on) {
            return mma::select(a, planes, tiles, on);
        }
    }
    let (columns, conversion) = columns_of(on)?;
    let launch = if op.by_id {
        mul_mat_id_launch(a, &columns, layout, (IDS, None, 0), on)?
    } else {
        mul_mat_launch(&Weights { desc: a, at: Ptr::Src(0), layout }, &columns, Ptr::Dst, on)?
    };
    Ok(NodeLaunches { columns: conversion, ..NodeLaunches::one(launch) })
}

/// The columns of the product of sources 0 and 1, and what converts them.
fn columns_of(on: &NodeOnGpu<'_>) -> Result<(Columns, Option<ColumnConversion>), Unsupported> {
    let (a, b) = (on.src(0)?, on.src(1)?);
    let form = match b.dtype() {
        _ if a.dtype().is_block() => ColumnForm::Quantized,
        DType::F32 => return Ok((Columns { at: Ptr::Src(1), shape: on.shape(b)? }, None)),
        _ => ColumnForm::Widened,
    };
    let (conversion, columns) = convert_columns(a, b, form, on)?;
    Ok((columns, Some(conversion)))
}

/// The kernels of a product.
#[derive(Clone, Copy)]
enum ProductKernel {
    /// Vector kernels: columns per block.
    Vec { width: u32 },
    /// Vector kernels of packed weights for few columns, which also compute fused products.
    PackedVec { width: u32 },
    /// F16 and BF16 on tensor cores, few columns: columns per block. Also compute fused products.
    Half { width: u32 },
    /// F32 on tensor cores.
    Tile,
    /// Packed weights on tensor cores: tiles of 8 columns per block.
    Mma { tiles: u32 },
}

impl ProductKernel {
    /// The kernel for `n` columns of each plane.
    fn of(a: &TensorDesc, n: u32, layout: WeightLayout, on: &NodeOnGpu<'_>) -> ProductKernel {
        let (dtype, mma) = (a.dtype(), on.gpu.capability >= MIN_MMA_CAPABILITY);
        let width = n.next_power_of_two();
        match (dtype.is_block(), layout) {
            (true, WeightLayout::Packed) if mma && n > MAX_DOT_COLUMNS => {
                let most = if dtype.block_len() == 256 { MAX_MMA_COLUMNS_K } else { MAX_MMA_COLUMNS };
                ProductKernel::Mma { tiles: width.clamp(MMA_TILE_COLUMNS, most) / MMA_TILE_COLUMNS }
            }
            (true, WeightLayout::Packed) if n <= MAX_DOT_COLUMNS => ProductKernel::PackedVec { width },
            (true, WeightLayout::Packed) => ProductKernel::Vec { width: width.min(MAX_VEC_COLUMNS) },
            (true, WeightLayout::Ggml) => ProductKernel::Vec { width: if n > 1 { UNPACKED_VEC_COLUMNS } else { 1 } },
            (false, _) if mma && dtype != DType::F32 && n <= MAX_HALF_COLUMNS => {
                ProductKernel::Half { width: width.clamp(4, 8) }
            }
            (false, _) if mma && dtype == DType::F32 && n > MAX_VEC_COLUMNS => ProductKernel::Tile,
            (false, _) => ProductKernel::Vec { width: width.min(MAX_VEC_COLUMNS) },
        }
    }
}

/// The columns of the product: rows of b, in F32 or quantised. Byte strides are in dimensions 1 to 3 of the shape.
pub(super) struct Columns {
    at: Ptr,
    shape: Shape,
}

/// What a launch before the product makes of b. The values for quantised weights are rounded to 8 bits, as llama.cpp
/// does on the CPU, so that a model generates the same tokens on both.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum ColumnForm {
    /// F32, from F16 or BF16.
    Widened,
    /// 8-bit codes, scales and sums.
    Quantized,
}

/// The possible values of [`group_len`].
pub(super) const QUANTIZED_GROUPS: [usize; 2] = [32, 256];

/// Bytes of a quantised column of `k` elements with `group` elements per scale.
pub(in crate::cuda) fn quantized_column_bytes(k: usize, group: usize) -> u64 {
    column_bytes(ColumnForm::Quantized, k, group)
}

/// Elements of b that share a scale, for weights of a block type.
fn group_len(a: &TensorDesc) -> usize {
    if a.dtype().block_len() == 256 { 256 } else { 32 }
}

/// Bytes of a column of `k` elements in scratch memory; columns start at multiples of 16 bytes. The layout of quantised columns
/// is documented in kernels/common/quantize.cuh.
fn column_bytes(form: ColumnForm, k: usize, group: usize) -> u64 {
    let bytes = match (form, group) {
        (ColumnForm::Widened, _) => 4 * k,
        (_, 256) => k + k / 8 + k / 64,
        _ => k + k / 4,
    };
    bytes.next_multiple_of(16) as u64
}

/// The shape of columns of `bytes` that lie one after the other in scratch memory.
fn scratch_shape(b: &Shape, bytes: u64) -> Shape {
    let [_, n, b2, _] = b.ne.map(u64::from);
    Shape { nb: [4, bytes, bytes * n, bytes * n * b2], ..*b }
}

/// A launch that writes b to scratch memory in another form, and the result.
pub(super) fn convert_columns(
    a: &TensorDesc,
    b: &TensorDesc,
    form: ColumnForm,
    on: &NodeOnGpu<'_>,
) -> Result<(ColumnConversion, Columns), Unsupported> {
    let k = b.ne()[0];
    let group = group_len(a);
    let column = column_bytes(form, k, group);
    let bytes = column.checked_mul(b.rows() as u64).ok_or_else(|| on.unsupported("b is too large in F32"))?;
    // The kernels count the bytes of the quantised columns of a block of threads by 32 bits.
    if form == ColumnForm::Quantized && column > u64::from(u32::MAX / MAX_VEC_COLUMNS) {
        return Err(on.unsupported("columns of 512 MiB or more"));
    }
    let shape = on.shape(b)?;
    let grid = |pieces: u64| Grid::of([b.rows() as u64, pieces.min(MAX_GRID_YZ), 1], THREADS);
    let (name, stride, type_or_group, grid) = match form {
        ColumnForm::Widened => ("mul_mat_widen", column / 4, b.dtype().to_wire(), grid(blocks(k, THREADS, 1))),
        ColumnForm::Quantized => ("mul_mat_quantize", column, group as u32, quantize_grid(b.rows() as u64, k, group)),
    };
    let args = ConvertColumnsArgs { b: merged_rows(shape), stride, type_or_group, to: 0 };
    let (entry, pointers) = (("mul_mat", name), [Ptr::Src(1), Ptr::Columns]);
    let launch = match form {
        ColumnForm::Quantized => on.launch(entry, grid, &pointers, &RoundColumnsArgs(args))?,
        ColumnForm::Widened => on.launch(entry, grid, &pointers, &args)?,
    };
    let conversion = ColumnConversion {
        launch,
        table: None,
        bytes,
        column,
        group: (form == ColumnForm::Quantized).then_some(group),
    };
    Ok((conversion, Columns { at: Ptr::Columns, shape: scratch_shape(&shape, column) }))
}

/// The rows of a shape. Products of the same rows in other shapes share the conversion.
fn merged_rows(shape: Shape) -> Shape {
    let mut rows = [shape];
    Shape::merge_rows(&mut rows);
    rows[0]
}

/// The grid of the kernels that quantise columns of `k` elements: a warp handles 128 elements in groups of 32, or a group of 256.
fn quantize_grid(columns: u64, k: usize, group: usize) -> Grid {
    let pieces = blocks(k, THREADS, if group == 256 { 8 } else { 4 });
    Grid::of([columns, pieces.min(MAX_GRID_YZ), 1], THREADS)
}

/// The arguments of a product.
fn mul_mat_args(
    a: &TensorDesc,
    planes: &Planes,
    layout: WeightLayout,
    log2_lanes: u32,
    on: &NodeOnGpu<'_>,
) -> Result<MulMatArgs, Unsupported> {
    let (shape, dst) = (on.shape(a)?, on.shape(on.dst())?);
    let [k, m, ..] = shape.ne;
    let Planes { n, counts: [b2, _], shared: [r2, r3], b, dst: [d1, d2, d3] } = *planes;
    let [_, a1, a2, a3] = weight_strides(a, &shape, layout);
    let dst = [stride(&dst, 0), d1, d2, d3];
    Ok(MulMatArgs { k, m, n, log2_lanes, planes: planes.count(on)?, b2, r2, r3, a: [a1, a2, a3], b, dst })
}

/// The launch that multiplies weights and columns into the rows from `to` on of the destination.
pub(super) fn mul_mat_launch(
    weights: &Weights<'_>,
    columns: &Columns,
    to: Ptr,
    on: &NodeOnGpu<'_>,
) -> Result<KernelLaunch, Unsupported> {
    let &Weights { desc: a, at, layout } = weights;
    let m = on.shape(a)?.ne[1];
    let planes = Planes::of(a, &columns.shape, on)?;
    let (n, count) = (planes.n, planes.count(on)?);
    let counted = |width: u32| (u64::from(n.div_ceil(width)), u64::from(count));
    let others = |width: u32| counted(width).0.saturating_mul(counted(width).1);
    let (module, entry, width, in_x, log2_lanes, threads) = match ProductKernel::of(a, n, layout, on) {
        ProductKernel::Half { .. } | ProductKernel::PackedVec { .. } => {
            return products::launch(weights, columns, to, &Products::default(), on);
        }
        ProductKernel::Vec { width } => {
            let groups = LaneGroups::of(a, layout, width, (a.ne()[1], others(width)), on);
            let (module, entry) = match layout {
                WeightLayout::Ggml => ("", format!("vec{width}")),
                WeightLayout::Packed => ("packed_wide_", format!("packed_vec{width}")),
            };
            (module, entry, width, groups.blocks(a.ne()[1]), groups.log2_lanes, VEC_THREADS)
        }
        ProductKernel::Tile => {
            let large = u64::from(m.div_ceil(128)).saturating_mul(others(64));
            let height = if m > 64 && large >= u64::from(on.gpu.multiprocessors) { 128 } else { 64 };
            ("", format!("tile{height}"), 64, u64::from(m.div_ceil(height)), 0, 2 * height)
        }
        // Its columns have another form: see `mma::select`.
        ProductKernel::Mma { .. } => return Err(on.unsupported("bug: a product of tiles among those of columns")),
    };
    let (in_y, in_z) = counted(width);
    let args = mul_mat_args(a, &planes, layout, log2_lanes, on)?;
    let grid = Grid::of([in_x, in_y.min(MAX_GRID_YZ), in_z.min(MAX_GRID_YZ)], threads);
    launch_typed(module, &entry, a, grid, &[at, columns.at, to], &args, on)
}

/// Warps per block of the kernels for F16 and BF16, which split k: enough to hide the latency of loads with this many blocks, but no
/// more than have work. A multiple of 4: a thread of kernels/mul_mat_half.cu stores one of 16 x 8 elements at most.
fn half_warps(k: u32, blocks: u64, on: &NodeOnGpu<'_>) -> u32 {
    let wanted = u64::from(on.gpu.multiprocessors) * HALF_WARPS_TO_HIDE_LATENCY;
    [4, 8].into_iter().find(|&warps| u64::from(warps) * blocks >= wanted || k <= 128 * warps).unwrap_or(16)
}

/// Strides of the weights. Kernels for packed weights derive the length of rows from that of dimension 1.
fn weight_strides(a: &TensorDesc, shape: &Shape, layout: WeightLayout) -> [u64; 4] {
    let row = match layout {
        WeightLayout::Packed => a.row_bytes() as u64,
        WeightLayout::Ggml => stride(shape, 1),
    };
    [stride(shape, 0), row, stride(shape, 2), stride(shape, 3)]
}

/// The launch of MUL_MAT_ID. Source `ids` selects the experts. For packed weights only: weights `up` of a second product, and the bytes
/// of a column of the quantised result, see [`Products`].
fn mul_mat_id_launch(
    a: &TensorDesc,
    columns: &Columns,
    layout: WeightLayout,
    (ids, up, quantized): (u8, Option<Ptr>, u64),
    on: &NodeOnGpu<'_>,
) -> Result<KernelLaunch, Unsupported> {
    let ids_at = Ptr::Src(ids);
    let (shape, b, ids, dst) = (on.shape(a)?, &columns.shape, on.shape(on.src(ids.into())?)?, on.shape(on.dst())?);
    let ([k, m, experts, _], [used, tokens, ..]) = (shape.ne, ids.ne);
    let [_, a1, a2, _] = weight_strides(a, &shape, layout);
    let groups = LaneGroups::of(a, layout, 1, (a.ne()[1], u64::from(used) * u64::from(tokens)), on);
    let args = MulMatIdArgs {
        k,
        m,
        experts,
        log2_lanes: groups.log2_lanes,
        used,
        tokens,
        nb: b.ne[1],
        padding: 0,
        a: [a1, a2],
        b: [1, 2].map(|dim| stride(b, dim)),
        dst: [0, 1, 2].map(|dim| stride(&dst, dim)),
        ids: [ids.nb[0], ids.nb[1]],
    };
    let in_x = groups.blocks(a.ne()[1]);
    let grid = Grid::of([in_x, u64::from(used).min(MAX_GRID_YZ), u64::from(tokens).min(MAX_GRID_YZ)], VEC_THREADS);
    let mut pointers = vec![Ptr::Src(0), columns.at, Ptr::Dst, ids_at, Ptr::ErrorWord];
    if layout == WeightLayout::Ggml {
        return launch_typed("", "id", a, grid, &pointers, &args, on);
    }
    pointers.push(up.unwrap_or(Ptr::Null));
    pointers.extend(products::quantized_result(quantized));
    let args = PackedIdArgs { stride: quantized, product: args };
    launch_typed("packed_", "packed_id", a, grid, &pointers, &args, on)
}

/// How a vector kernel shares weights among its threads: groups of lanes have some rows each.
#[derive(Clone, Copy)]
struct LaneGroups {
    rows: usize,
    log2_lanes: u32,
}

impl LaneGroups {
    /// The groups of the kernel for `width` columns per block, for `m` rows like those of a, if `others` blocks use each row. As few lanes
    /// as possible, so that each does several steps, but enough in total to hide the latency of loads.
    fn of(
        a: &TensorDesc,
        layout: WeightLayout,
        width: u32,
        (m, others): (usize, u64),
        on: &NodeOnGpu<'_>,
    ) -> LaneGroups {
        let (k, dtype) = (a.ne()[0], a.dtype());
        let rows = match layout {
            WeightLayout::Packed if dtype.block_len() == 32 && width == 1 => PACKED_ROWS_ONE_COLUMN,
            WeightLayout::Packed if dtype.block_len() == 256 && width == 8 => PACKED_ROWS_K_EIGHT_COLUMNS,
            WeightLayout::Packed => PACKED_ROWS,
            WeightLayout::Ggml if dtype.can(Capability::Cuda) => GGML_LAYOUT_ROWS,
            WeightLayout::Ggml => ONLY_READ_ROWS,
        };
        let least = if layout == WeightLayout::Packed || dtype.block_len() > 32 { 5 } else { 2 };
        let unit = unit_len(dtype);
        let step_bytes = (rows * unit * dtype.block_bytes() / dtype.block_len()) as u64;
        let lanes = (BYTES_IN_FLIGHT_PER_SM / step_bytes).min(32 * MAX_WARPS_FOR_LATENCY);
        let wanted = u64::from(on.gpu.multiprocessors) * lanes;
        let groups = m.div_ceil(rows) as u64;
        let mut log2_lanes = (k / 32).max(1).ilog2().clamp(least, 5);
        while log2_lanes < VEC_THREADS.ilog2()
            && (unit << log2_lanes) < k
            && groups.saturating_mul(others) << log2_lanes < wanted
        {
            log2_lanes += 1;
        }
        LaneGroups { rows, log2_lanes }
    }

    /// Blocks for `m` rows.
    fn blocks(self, m: usize) -> u64 {
        blocks(m, VEC_THREADS >> self.log2_lanes, self.rows)
    }
}

/// A launch of an entry of the module for the type of a.
fn launch_typed(
    module: &str,
    entry: &str,
    a: &TensorDesc,
    grid: Grid,
    pointers: &[Ptr],
    args: &impl KernelArguments,
    on: &NodeOnGpu<'_>,
) -> Result<KernelLaunch, Unsupported> {
    let suffix = suffix(a.dtype());
    let entry = format!("mul_mat_{entry}_{suffix}");
    let launch = on.launch((&format!("mul_mat_{module}{suffix}"), &entry), grid, pointers, args)?;
    Ok(launch.with_type(0, a.dtype()))
}

//! Launches of MUL_MAT and MUL_MAT_ID: kernels/mul_mat.cu, or kernels/mul_mat_unpacked.cu for types that are never repacked; one
//! module per type of the weights a.
//!
//! Few columns of b (decoding) use the vector kernels, more columns tensor cores, from compute capability 8.0 on. For block types, both
//! multiply 8-bit codes: a launch before them quantises b.

pub(super) mod planes;

use super::repack::unit_len;
use super::{
    Grid, KernelLaunch, MIN_MMA_CAPABILITY, NodeLaunches, NodeOnGpu, Ptr, Shape, THREADS, Unsupported, blocks,
    mul_mat_dequantized, suffix,
};
use crate::cuda::kernel::PackedLaunches;
use crate::cuda::layout::PackedSpan;
use crate::ops::mul_mat::MulMat;
use crate::tensor::{Capability, DType, TensorDesc};
use bytemuck::{NoUninit, Pod, Zeroable};
use planes::{Planes, stride};

/// Threads per block of the vector kernels.
const VEC_THREADS: u32 = 128;
/// Rows of a per group of lanes in the vector kernels: `ROWS_PER_GROUP` of kernels/mul_mat_common.cuh.
fn rows_per_group(a: &TensorDesc) -> usize {
    if a.dtype().can(Capability::Cuda) { 4 } else { 2 }
}

/// Limit of blocks in y and z; beyond it, the kernels loop.
const MAX_GRID_YZ: u64 = 65535;

/// Number of warps per multiprocessor that hides the latency of loads. With fewer, more lanes share each row (split-K within a
/// block).
const WARPS_TO_HIDE_LATENCY: u64 = 16;

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
/// the level-2 cache but for the first time, and take a fifth of the instructions.
const MAX_HALF_COLUMNS: u32 = 32;

/// Most columns for which packed weights use the vector kernels, if there are tensor cores.
const MAX_DOT_COLUMNS: u32 = 2;

/// Columns of a tile of the tensor cores, and the most per block: of types with blocks of 32, and of K types, which need more registers.
const MMA_TILE_COLUMNS: u32 = 8;
const MAX_MMA_COLUMNS: u32 = 64;
const MAX_MMA_COLUMNS_K: u32 = 32;

/// Warps per block of the kernels for packed weights on tensor cores.
const MMA_WARPS: u32 = 8;

/// Bytes of a tile of 64 and of 256 elements: kernels/common/tiles.cuh.
const TILE32_BYTES: u64 = 704;
const TILE256_BYTES: u64 = 2336;

/// `struct MulMatArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct MulMatArgs {
    k: u32,
    m: u32,
    n: u32,
    log2_lanes: u32,
    planes: u32,
    b2: u32,
    r2: u32,
    r3: u32,
    a: [u64; 3],
    b: [u64; 3],
    dst: [u64; 4],
}

/// `struct MulMatIdArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct MulMatIdArgs {
    k: u32,
    m: u32,
    experts: u32,
    log2_lanes: u32,
    used: u32,
    tokens: u32,
    nb: u32,
    padding: u32,
    a: [u64; 2],
    b: [u64; 2],
    dst: [u64; 3],
    ids: [u64; 2],
}

/// `struct WidenArgs` and `struct QuantizeArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ConvertColumnsArgs {
    b: Shape,
    /// From one packed row to the next: elements, or bytes of QuantizeArgs.
    stride: u64,
    /// WidenArgs: the type of b; QuantizeArgs: the elements per group.
    number: u32,
    padding: u32,
}

/// `struct QuantizeTilesArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct QuantizeTilesArgs {
    b: Shape,
    group: u32,
    pairs: u32,
    columns: u32,
    tiles: u32,
}

pub(super) fn select(op: MulMat, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (a, b) = (on.src(0)?, on.src(1)?);
    let rounded = a.dtype().is_float() && b.dtype().is_float();
    if !a.dtype().can(Capability::CudaRead) || !(b.dtype() == DType::F32 || rounded) {
        return Err(on.unsupported_types());
    }
    // Loads of single bytes would double the kernels of types that are never packed.
    if !on.node.aligned && !a.dtype().can(Capability::Cuda) {
        return Err(on.unsupported("a tensor that is not aligned to its elements"));
    }
    if !op.by_id && mul_mat_dequantized::applies(a, b, on)? {
        return mul_mat_dequantized::select(a, b, on);
    }
    let mut kernel = product(op, WeightLayout::Ggml, on)?;
    // The kernels for packed weights store results as words.
    if let Some(span) = PackedSpan::of(a).filter(|_| on.node.aligned) {
        let NodeLaunches { launches, scratch, .. } = product(op, WeightLayout::Packed, on)?;
        kernel.packed = Some(PackedLaunches { launches, span, packs: true });
        kernel.scratch = kernel.scratch.max(scratch);
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
    let shape = on.shape(b)?;
    if !op.by_id {
        let planes = Planes::of_scratch(a, b, on)?;
        if let ProductKernel::Mma { tiles } = ProductKernel::of(a, planes.n, layout, on) {
            let (launch, planes, bytes) = quantize_tiles(a, planes, tiles, on)?;
            return Ok(NodeLaunches::new(vec![launch, mma_launch(a, &planes, tiles, on)?], bytes));
        }
    }
    let form = match b.dtype() {
        _ if a.dtype().is_block() => Some(ColumnForm::Quantized),
        DType::F32 => None,
        _ => Some(ColumnForm::Widened),
    };
    let (mut launches, columns, scratch) = match form {
        None => (Vec::new(), Columns { at: Ptr::Src(1), shape }, 0),
        Some(form) => {
            let (launch, columns, bytes) = convert_columns(a, b, form, on)?;
            (vec![launch], columns, bytes)
        }
    };
    launches.push(if op.by_id {
        mul_mat_id_launch(a, &columns, layout, on)?
    } else {
        mul_mat_launch(&Weights { desc: a, at: Ptr::Src(0), layout }, &columns, Ptr::Dst, on)?
    });
    Ok(NodeLaunches::new(launches, scratch))
}

/// The kernels of a product.
#[derive(Clone, Copy)]
enum ProductKernel {
    /// Vector kernels: columns per block.
    Vec { width: u32 },
    /// F16 and BF16 on tensor cores, few columns: columns per block.
    Half { width: u32 },
    /// Plain types on tensor cores, many columns.
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
            (true, WeightLayout::Packed) => ProductKernel::Vec { width: width.min(MAX_VEC_COLUMNS) },
            (true, WeightLayout::Ggml) => ProductKernel::Vec { width: if n > 1 { UNPACKED_VEC_COLUMNS } else { 1 } },
            (false, _) if mma && dtype != DType::F32 && n <= MAX_HALF_COLUMNS => {
                ProductKernel::Half { width: width.clamp(4, 8) }
            }
            (false, _) if mma && n > MAX_VEC_COLUMNS => ProductKernel::Tile,
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
    /// Values rounded to 8 bits, as F32, for the tiled kernels.
    Rounded,
    /// 8-bit codes, scales and sums.
    Quantized,
}

/// Elements of b that share a scale, for weights of a block type.
fn group_len(a: &TensorDesc) -> usize {
    if a.dtype().block_len() == 256 { 256 } else { 32 }
}

/// Bytes of a column of `k` elements in scratch memory; columns start at multiples of 16 bytes. The layout of quantised columns
/// is documented at `struct QuantizeArgs`.
fn column_bytes(form: ColumnForm, k: usize, group: usize) -> u64 {
    let bytes = match (form, group) {
        (ColumnForm::Widened | ColumnForm::Rounded, _) => 4 * k,
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

/// A launch that writes b to scratch memory in another form, the result, and the bytes of scratch.
pub(super) fn convert_columns(
    a: &TensorDesc,
    b: &TensorDesc,
    form: ColumnForm,
    on: &NodeOnGpu<'_>,
) -> Result<(KernelLaunch, Columns, u64), Unsupported> {
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
    let (name, stride, number, grid) = match form {
        ColumnForm::Widened => ("mul_mat_widen", column / 4, b.dtype().to_wire(), grid(blocks(k, THREADS, 1))),
        ColumnForm::Rounded => ("mul_mat_round", column / 4, group as u32, quantize_grid(b.rows() as u64, k, group)),
        ColumnForm::Quantized => ("mul_mat_quantize", column, group as u32, quantize_grid(b.rows() as u64, k, group)),
    };
    let args = ConvertColumnsArgs { b: shape, stride, number, padding: 0 };
    let launch = on.launch(("mul_mat", name), grid, &[Ptr::Src(1), Ptr::Scratch(0)], &args)?;
    Ok((launch, Columns { at: Ptr::Scratch(0), shape: scratch_shape(&shape, column) }, bytes))
}

/// The grid of the kernels that quantise columns of `k` elements: a warp handles 128 elements in groups of 32, or a group of 256.
fn quantize_grid(columns: u64, k: usize, group: usize) -> Grid {
    let pieces = blocks(k, THREADS, if group == 256 { 8 } else { 4 });
    Grid::of([columns, pieces.min(MAX_GRID_YZ), 1], THREADS)
}

/// A launch that quantises b to tiles of columns in scratch memory, the planes with their strides there, and the bytes of scratch. The
/// layout is documented in kernels/mul_mat_mma.cuh.
fn quantize_tiles(
    a: &TensorDesc,
    planes: Planes,
    tiles: u32,
    on: &NodeOnGpu<'_>,
) -> Result<(KernelLaunch, Planes, u64), Unsupported> {
    let (b, group) = (on.src(1)?, group_len(a));
    let k = b.ne()[0];
    let (steps, tile_bytes) = if group == 256 { (k / 256, TILE256_BYTES) } else { (k.div_ceil(64), TILE32_BYTES) };
    // The product reads whole groups of tiles; missing columns are zeros.
    let per_plane = planes.n.div_ceil(MMA_TILE_COLUMNS).next_multiple_of(tiles);
    let plane = (steps as u64 * tile_bytes).checked_mul(u64::from(per_plane));
    let [b2, b3] = planes.counts.map(u64::from);
    let bytes = plane.and_then(|plane| plane.checked_mul(b2)?.checked_mul(b3));
    let (plane, bytes) = plane.zip(bytes).ok_or_else(|| on.unsupported("b is too large"))?;
    let args = QuantizeTilesArgs {
        b: on.shape(b)?,
        group: group as u32,
        pairs: u32::from(matches!(a.dtype(), DType::Q8_0 | DType::Q4_K | DType::Q5_K)),
        columns: planes.n,
        tiles: per_plane,
    };
    let pointers = [Ptr::Src(1), Ptr::Scratch(0)];
    let columns = (b2 * b3).saturating_mul(u64::from(per_plane * MMA_TILE_COLUMNS));
    let grid = quantize_grid(columns, k, group);
    let launch = on.launch(("mul_mat", "mul_mat_quantize_tiles"), grid, &pointers, &args)?;
    let b = [tile_bytes / u64::from(MMA_TILE_COLUMNS), plane, plane * b2];
    Ok((launch, Planes { b, ..planes }, bytes))
}

/// The product of packed weights with tiles of columns.
fn mma_launch(a: &TensorDesc, planes: &Planes, tiles: u32, on: &NodeOnGpu<'_>) -> Result<KernelLaunch, Unsupported> {
    let [k, m, ..] = on.shape(a)?.ne;
    let groups = u64::from(planes.n.div_ceil(tiles * MMA_TILE_COLUMNS));
    let in_z = planes.count(on)?;
    let rows = u64::from(m.div_ceil(MMA_ROWS));
    let others = groups.saturating_mul(u64::from(in_z));
    // As few parts of k as give each multiprocessor a block, but no more than k has steps.
    let in_x = |log2: u32| rows.div_ceil(u64::from(MMA_WARPS >> log2));
    let most = (k / 256).max(1).ilog2().min(MMA_WARPS.ilog2());
    let enough = |&log2: &u32| in_x(log2).saturating_mul(others) >= u64::from(on.gpu.multiprocessors);
    let log2_split = (0..most).find(enough).unwrap_or(most);
    let args = mul_mat_args(a, planes, WeightLayout::Packed, log2_split, on)?;
    let grid = Grid::of([in_x(log2_split), groups.min(MAX_GRID_YZ), u64::from(in_z).min(MAX_GRID_YZ)], 32 * MMA_WARPS);
    launch_typed("mma_", &format!("mma{tiles}"), a, grid, &[Ptr::Src(0), Ptr::Scratch(0), Ptr::Dst], &args, on)
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
    &Weights { desc: a, at, layout }: &Weights<'_>,
    columns: &Columns,
    to: Ptr,
    on: &NodeOnGpu<'_>,
) -> Result<KernelLaunch, Unsupported> {
    let [k, m, ..] = on.shape(a)?.ne;
    let planes = Planes::of(a, &columns.shape, on)?;
    let (n, count) = (planes.n, planes.count(on)?);
    let counted = |width: u32| (u64::from(n.div_ceil(width)), u64::from(count));
    let others = |width: u32| counted(width).0.saturating_mul(counted(width).1);
    let (module, entry, width, in_x, log2_lanes, threads) = match ProductKernel::of(a, n, layout, on) {
        ProductKernel::Half { width } => {
            let in_x = u64::from(m.div_ceil(MMA_ROWS));
            let threads = 32 * half_warps(k, in_x.saturating_mul(others(width)), on);
            ("half_", format!("half{width}"), width, in_x, 0, threads)
        }
        ProductKernel::Vec { width } => {
            let log2_lanes = log2_lanes(a, others(width), on);
            let in_x = blocks(a.ne()[1], VEC_THREADS >> log2_lanes, rows_per_group(a));
            let (module, entry) = match layout {
                WeightLayout::Ggml => ("", format!("vec{width}")),
                WeightLayout::Packed if width <= MAX_DOT_COLUMNS => ("packed_", format!("packed_vec{width}")),
                WeightLayout::Packed => ("packed_wide_", format!("packed_vec{width}")),
            };
            (module, entry, width, in_x, log2_lanes, VEC_THREADS)
        }
        ProductKernel::Tile | ProductKernel::Mma { .. } => {
            let large = u64::from(m.div_ceil(128)).saturating_mul(others(64));
            let height = if m > 64 && large >= u64::from(on.gpu.multiprocessors) { 128 } else { 64 };
            ("", format!("tile{height}"), 64, u64::from(m.div_ceil(height)), 0, 2 * height)
        }
    };
    let (in_y, in_z) = counted(width);
    let args = mul_mat_args(a, &planes, layout, log2_lanes, on)?;
    let grid = Grid::of([in_x, in_y.min(MAX_GRID_YZ), in_z.min(MAX_GRID_YZ)], threads);
    launch_typed(module, &entry, a, grid, &[at, columns.at, to], &args, on)
}

/// Warps per block of the kernels for F16 and BF16, which split k: enough to hide the latency of loads with this many blocks, but no
/// more than have work.
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

fn mul_mat_id_launch(
    a: &TensorDesc,
    columns: &Columns,
    layout: WeightLayout,
    on: &NodeOnGpu<'_>,
) -> Result<KernelLaunch, Unsupported> {
    let (shape, b, ids, dst) = (on.shape(a)?, &columns.shape, on.shape(on.src(2)?)?, on.shape(on.dst())?);
    let ([k, m, experts, _], [used, tokens, ..]) = (shape.ne, ids.ne);
    let [_, a1, a2, _] = weight_strides(a, &shape, layout);
    let log2_lanes = log2_lanes(a, u64::from(used) * u64::from(tokens), on);
    let args = MulMatIdArgs {
        k,
        m,
        experts,
        log2_lanes,
        used,
        tokens,
        nb: b.ne[1],
        padding: 0,
        a: [a1, a2],
        b: [1, 2].map(|dim| stride(b, dim)),
        dst: [0, 1, 2].map(|dim| stride(&dst, dim)),
        ids: [ids.nb[0], ids.nb[1]],
    };
    let in_x = blocks(a.ne()[1], VEC_THREADS >> log2_lanes, rows_per_group(a));
    let grid = Grid::of([in_x, u64::from(used).min(MAX_GRID_YZ), u64::from(tokens).min(MAX_GRID_YZ)], VEC_THREADS);
    let (module, entry) = if layout == WeightLayout::Packed { ("packed_", "packed_id") } else { ("", "id") };
    let pointers = [Ptr::Src(0), columns.at, Ptr::Dst, Ptr::Src(2), Ptr::ErrorWord];
    launch_typed(module, entry, a, grid, &pointers, &args, on)
}

/// Binary logarithm of the number of lanes that share a row of a, if `others` blocks use each row. As few lanes as possible, so
/// that each does several steps, but enough warps in total to hide the latency of loads.
fn log2_lanes(a: &TensorDesc, others: u64, on: &NodeOnGpu<'_>) -> u32 {
    let [k, m, ..] = a.ne();
    let least = if a.dtype().block_len() > 32 { 5 } else { 2 };
    let unit = unit_len(a.dtype());
    let mut log2 = (k / 32).max(1).ilog2().clamp(least, 5);
    let groups = m.div_ceil(rows_per_group(a)) as u64;
    let wanted = u64::from(on.gpu.multiprocessors) * WARPS_TO_HIDE_LATENCY * 32;
    while log2 < VEC_THREADS.ilog2() && (unit << log2) < k && groups.saturating_mul(others) << log2 < wanted {
        log2 += 1;
    }
    log2
}

/// A launch of an entry of the module for the type of a.
fn launch_typed(
    module: &str,
    entry: &str,
    a: &TensorDesc,
    grid: Grid,
    pointers: &[Ptr],
    args: &impl NoUninit,
    on: &NodeOnGpu<'_>,
) -> Result<KernelLaunch, Unsupported> {
    let suffix = suffix(a.dtype());
    on.launch((&format!("mul_mat_{module}{suffix}"), &format!("mul_mat_{entry}_{suffix}")), grid, pointers, args)
}

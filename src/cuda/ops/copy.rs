//! Launches of DUP, CPY and CONT. kernels/copy.cu copies between plain types and any type to itself; kernels/copy_to_blocks.cu
//! quantises and kernels/copy_from_blocks.cu dequantises.

use super::rows::Ids;
use super::{
    Access, Grid, KernelArguments, KernelLaunch, NodeLaunches, NodeOnGpu, Ptr, Shape, THREADS, Unsupported, blocks,
    suffix,
};
use crate::cuda::kernel::PackedLaunches;
use crate::cuda::layout::PackedSpan;
use crate::ops::copy::CopyOp;
use crate::tensor::DType::{F32, I32};
use crate::tensor::{Capability, CopyLoop, DIMS, DType, TensorDesc, common_loop_nest};
use bytemuck::{Pod, Zeroable};

pub(super) fn select(_: CopyOp, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (x, y) = (on.src(0)?, on.dst());
    let (from, to) = (x.dtype(), y.dtype());
    if from == to || can_convert(from, to) {
        between_plain(on, x, y)
    } else if from.is_float() && has_blocks(to) {
        let ys = if y.is_contiguous() { BlockTarget::Dense } else { BlockTarget::Strided(on.shape(y)?) };
        let launch = to_blocks(on, flattened_shape(on, x, to.block_len())?, ys, [Ptr::Src(0), Ptr::Null, Ptr::Null])?;
        Ok(NodeLaunches::new(vec![launch], 0))
    } else if reads_blocks(from) && to.is_float() {
        let block = from.block_len();
        from_blocks(on, flattened_shape(on, x, block)?, flattened_shape(on, y, block)?, None)
    } else {
        Err(on.unsupported_types())
    }
}

/// Whether kernels/common/copy.cuh can convert between two plain types.
fn can_convert(from: DType, to: DType) -> bool {
    from.is_float() && (to.is_float() || to == I32) || (from, to) == (I32, F32)
}

/// Whether kernels can dequantise this type.
pub(super) fn reads_blocks(dtype: DType) -> bool {
    dtype.is_block() && dtype.can(Capability::CudaRead)
}

/// Whether kernels can quantise to and dequantise from this type.
pub(super) fn has_blocks(dtype: DType) -> bool {
    dtype.is_block() && dtype.can(Capability::Cuda)
}

// ---- between plain types

/// `struct LoopNest` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct LoopNest {
    count: [u32; DIMS],
    x: [u64; DIMS],
    y: [u64; DIMS],
}

impl LoopNest {
    /// The accesses of the loops around runs of x and y.
    fn accesses(&self, [x, y]: [Access; 2]) -> Vec<Access> {
        let along = |access: Access, strides: &[u64; DIMS]| {
            self.count.iter().zip(strides).fold(access, |access, (&count, &stride)| access.along(count, stride))
        };
        vec![along(x, &self.x), along(y, &self.y)]
    }

    /// `None` if there are more than four loops or a count exceeds 31 bits.
    fn of(loops: &[CopyLoop]) -> Option<LoopNest> {
        let mut nest = LoopNest { count: [1; DIMS], x: [0; DIMS], y: [0; DIMS] };
        if loops.len() > DIMS {
            return None;
        }
        for (d, l) in loops.iter().enumerate() {
            nest.count[d] = i32::try_from(l.count).ok()? as u32;
            (nest.x[d], nest.y[d]) = (l.src_stride as u64, l.dst_stride as u64);
        }
        Some(nest)
    }
}

/// `struct RowPartition` of kernels/common/copy.cuh: how the threads of a block are divided among rows.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct RowPartition {
    lanes_log: u32,
    pieces: u32,
}

impl RowPartition {
    /// For rows of `n` accesses: about four accesses per thread, but at least eight neighbouring threads per row (if it has as
    /// many accesses), so that accesses are coalesced.
    pub(super) fn of(n: usize) -> RowPartition {
        let lanes = n.min(8).next_power_of_two().max(n.div_ceil(4).min(THREADS as usize).next_power_of_two());
        let pieces = if lanes == THREADS as usize { n.div_ceil(4 * lanes) } else { 1 };
        RowPartition { lanes_log: lanes.ilog2(), pieces: u32::try_from(pieces).unwrap_or(u32::MAX) }
    }

    /// The grid for `rows` rows.
    pub(super) fn grid(self, rows: usize) -> Grid {
        let groups = (rows as u64).div_ceil(u64::from(THREADS >> self.lanes_log));
        Grid::line(groups.saturating_mul(u64::from(self.pieces)), THREADS)
    }
}

/// `struct CopyRowsArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct CopyRowsArgs {
    nest: LoopNest,
    rows: u64,
    run: u64,
    partition: RowPartition,
    types: [u32; 2],
}

impl KernelArguments for CopyRowsArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let [from, to] = self.types;
        // Runs of equal types are counted in bytes.
        let run =
            |pointer| if from == to { Access::bytes(pointer, self.run) } else { Access::elements(pointer, self.run) };
        Ok(self.nest.accesses([run(0), run(1)]))
    }
}

/// `struct TransposeArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct TransposeArgs {
    nest: LoopNest,
    tiles: [u32; 2],
    types: [u32; 2],
    bytes: u32,
    padding: u32,
}

impl KernelArguments for TransposeArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        Ok(self.nest.accesses([Access::one(0), Access::one(1)]))
    }
}

/// `struct CopyAnyArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct CopyAnyArgs {
    x: Shape,
    y: Shape,
    n: u64,
    types: [u32; 2],
    bytes: u32,
    padding: u32,
}

impl KernelArguments for CopyAnyArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let blocks =
            |pointer, Shape { ne, nb }: Shape| (0..DIMS).fold(Access::one(pointer), |at, d| at.along(ne[d], nb[d]));
        Ok(vec![blocks(0, self.x), blocks(1, self.y)])
    }
}

/// Side of a tile of copy_transpose, in elements.
const SIDE: u32 = 32;
/// Minimum count of both loops of a transpose. Shorter loops would leave most of a tile unused.
const LEAST_SIDE: usize = 8;

const POINTERS: [Ptr; 2] = [Ptr::Src(0), Ptr::Dst];

fn between_plain(on: &NodeOnGpu<'_>, x: &TensorDesc, y: &TensorDesc) -> Result<NodeLaunches, Unsupported> {
    let (size_x, size_y) = (x.dtype().block_bytes(), y.dtype().block_bytes());
    let types = [x.dtype(), y.dtype()].map(DType::to_wire);
    let raw = x.dtype() == y.dtype();
    let bytes = if raw { size_x as u32 } else { 0 };
    if let Some(mut loops) = common_loop_nest(x, y) {
        sort_and_merge_loops(&mut loops, size_x, size_y);
        if let Some(nest) = transposed_nest(&mut loops, x, y) {
            let tiles = [nest.count[0].div_ceil(SIDE), nest.count[1].div_ceil(SIDE)];
            let planes = u64::from(nest.count[2]) * u64::from(nest.count[3]);
            let count = u64::from(tiles[0]) * u64::from(tiles[1]);
            let grid = Grid::line(count.saturating_mul(planes), THREADS);
            let tiles = TransposeArgs { nest, tiles, types, bytes, padding: 0 };
            return on.single_launch(("copy", "copy_transpose"), grid, &POINTERS, &tiles);
        }
        let dense = loops.first().filter(|l| (l.src_stride, l.dst_stride) == (size_x, size_y)).map(|l| l.count);
        if dense.is_some() {
            loops.remove(0);
        }
        if let Some(nest) = LoopNest::of(&loops) {
            let rows = loops.iter().map(|l| l.count).product::<usize>();
            let run = dense.unwrap_or(1) * if raw { size_x } else { 1 };
            // An access is 16 bytes, or four elements if types differ.
            let partition = RowPartition::of(run.div_ceil(if raw { 16 } else { 4 }));
            let name = if raw { "copy_rows" } else { "copy_convert" };
            let args = CopyRowsArgs { nest, rows: rows as u64, run: run as u64, partition, types };
            return on.single_launch(("copy", name), partition.grid(rows), &POINTERS, &args);
        }
    }
    let in_blocks = |t: &TensorDesc| {
        let mut shape = on.shape(t)?;
        shape.ne[0] /= t.dtype().block_len() as u32;
        Ok(shape)
    };
    let n = y.dtype().blocks(y.elements());
    let any = CopyAnyArgs { x: in_blocks(x)?, y: in_blocks(y)?, n: n as u64, types, bytes, padding: 0 };
    on.single_launch(("copy", "copy_any"), Grid::line(blocks(n, THREADS, 1), THREADS), &POINTERS, &any)
}

/// Sorts the loops by the destination's strides (then the source's) and merges loops that are contiguous in both tensors.
fn sort_and_merge_loops(loops: &mut Vec<CopyLoop>, size_x: usize, size_y: usize) {
    loops.sort_by_key(|l| (l.dst_stride, l.src_stride));
    let mut merged: Vec<CopyLoop> = Vec::with_capacity(loops.len());
    for next in loops.drain(..) {
        match merged.last_mut() {
            // Kernels count in 32 bits, except along a run that is dense in both tensors.
            Some(last)
                if next.src_stride == last.src_stride * last.count
                    && next.dst_stride == last.dst_stride * last.count
                    && ((last.src_stride, last.dst_stride) == (size_x, size_y)
                        || last.count * next.count <= i32::MAX as usize) =>
            {
                last.count *= next.count;
            }
            _ => merged.push(next),
        }
    }
    *loops = merged;
}

/// The loop nest of a transpose, if the copy is one: plain elements are dense along loop 0 in the destination and along another
/// loop, which is moved to the second place, in the source; both loops are long enough for tiles.
fn transposed_nest(loops: &mut [CopyLoop], x: &TensorDesc, y: &TensorDesc) -> Option<LoopNest> {
    let (size_x, size_y) = (x.dtype().block_bytes(), y.dtype().block_bytes());
    let first = loops.first()?;
    if x.dtype().is_block() || first.dst_stride != size_y || first.count < LEAST_SIDE || loops.len() > DIMS {
        return None;
    }
    let dense = loops.iter().position(|l| l.src_stride == size_x).filter(|&k| k > 0 && loops[k].count >= LEAST_SIDE)?;
    loops[1..=dense].rotate_right(1);
    LoopNest::of(loops)
}

// ---- between floats and blocks

/// `struct CopyToBlocksArgs` of kernels/copy_to_blocks.cu.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct CopyToBlocksArgs {
    x: Shape,
    y: Shape,
    list: Ids,
    blocks: u64,
    dtype: u32,
    mode: u32,
}

impl KernelArguments for CopyToBlocksArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let [n, _, n2, n3] = self.x.ne;
        let mut accesses = vec![self.x.access(0)];
        match self.mode {
            0 => accesses.push(Access::blocks(2, self.blocks)),
            1 => accesses.push(self.y.access(2)),
            _ => {
                let rows = Access::shape(2, [n, self.list.rows, n2, n3], self.y.nb);
                accesses.extend([self.list.access(1), self.list.claims_access(3), rows]);
            }
        }
        Ok(accesses)
    }
}

/// Destination of quantised blocks: `enum TargetMode` of the file.
pub(super) enum BlockTarget {
    /// Contiguous.
    Dense,
    /// At the strides of the destination's shape.
    Strided(Shape),
    /// In the rows that the ids select.
    Named(Shape, Ids),
}

/// The launch that quantises source 0, whose shape is `xs`. Each aligned group of four elements must lie in one row of `xs`.
/// Pointers: source 0, ids, claims.
pub(super) fn to_blocks(
    on: &NodeOnGpu<'_>,
    xs: Shape,
    target: BlockTarget,
    [x, ids, claims]: [Ptr; 3],
) -> Result<KernelLaunch, Unsupported> {
    let (src, dtype) = (on.src(0)?, on.dst().dtype());
    let (mode, y, list) = match target {
        BlockTarget::Dense => (0, Shape::zeroed(), Ids::zeroed()),
        BlockTarget::Strided(shape) => (1, shape, Ids::zeroed()),
        BlockTarget::Named(shape, list) => (2, shape, list),
    };
    let count = dtype.blocks(src.elements());
    let (threads, each) = (128, if dtype.block_len() == 32 { 128 } else { 32 });
    let args = CopyToBlocksArgs { x: xs, y, list, blocks: count as u64, dtype: src.dtype().to_wire(), mode };
    let name = format!("copy_to_{}", suffix(dtype));
    let pointers = [x, ids, Ptr::Dst, claims, Ptr::ErrorWord];
    on.launch((&name, &name), Grid::line(blocks(count, each, 1), threads), &pointers, &args)
}

/// `struct CopyFromBlocksArgs` of kernels/copy_from_blocks.cu.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct CopyFromBlocksArgs {
    x: Shape,
    y: Shape,
    list: Ids,
    n: u64,
    dtype: u32,
    named: u32,
}

impl KernelArguments for CopyFromBlocksArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let [n, _, n2, n3] = self.y.ne;
        let y = self.y.access(2).of_type(self.dtype);
        if self.named == 0 {
            return Ok(vec![self.x.access(0), y]);
        }
        let table = Access::shape(0, [n, self.list.rows, n2, n3], self.x.nb);
        Ok(vec![table, self.list.access(1), y])
    }
}

/// The launch that dequantises source 0, whose shape is `xs`, into the destination, whose shape is `ys`: all blocks in order,
/// or the rows that the ids of source 1 select. Each aligned group of eight elements must lie in one row of `ys`.
pub(super) fn from_blocks(
    on: &NodeOnGpu<'_>,
    xs: Shape,
    ys: Shape,
    list: Option<Ids>,
) -> Result<NodeLaunches, Unsupported> {
    let n = on.dst().elements() / 8;
    let name = format!("copy_from_{}", suffix(on.src(0)?.dtype()));
    let (ids, named) = if list.is_some() { (Ptr::Src(1), 1) } else { (Ptr::Null, 0) };
    let (list, dtype) = (list.unwrap_or(Ids::zeroed()), on.dst().dtype().to_wire());
    let args = CopyFromBlocksArgs { x: xs, y: ys, list, n: n as u64, dtype, named };
    let pointers = [Ptr::Src(0), ids, Ptr::Dst, Ptr::ErrorWord];
    let grid = Grid::line(blocks(n, THREADS, 1), THREADS);
    let mut kernel = on.single_launch((&name, &name), grid, &pointers, &args)?;
    // A table of embeddings may also be the weight of the last product, which packs it.
    if let Some(span) = PackedSpan::of(on.src(0)?).filter(|_| named == 1) {
        let suffix = suffix(on.src(0)?.dtype());
        let entry = (&*format!("mul_mat_packed_{suffix}"), &*format!("mul_mat_packed_rows_{suffix}"));
        let mut args = args;
        // The stride of a single row is arbitrary, and the kernel derives the length of rows from it.
        args.x.nb[1] = on.src(0)?.row_bytes() as u64;
        let launch = on.launch(entry, grid, &pointers, &args)?;
        kernel.packed =
            Some(PackedLaunches { launches: vec![launch], columns: None, weights: vec![(0, span)], packs: false });
    }
    Ok(kernel)
}

/// The shape of a contiguous tensor as one row, or as rows of `block` elements if one row would be too long. Other tensors keep
/// their shape.
fn flattened_shape(on: &NodeOnGpu<'_>, t: &TensorDesc, block: usize) -> Result<Shape, Unsupported> {
    if !t.is_contiguous() {
        return on.shape(t);
    }
    let n = t.elements();
    let ne = if i32::try_from(n).is_ok() { [n, 1, 1, 1] } else { [block, n / block, 1, 1] };
    let flattened_shape = TensorDesc::contiguous(t.dtype(), ne).map_err(|e| on.unsupported(e.to_string()))?;
    on.shape(&flattened_shape)
}

//! Launches of SUM, COUNT_EQUAL, SUM_ROWS, MEAN, ARGMAX and CUMSUM: kernels/reduce.cu.

use super::{Access, Grid, KernelArguments, NodeLaunches, NodeOnGpu, Ptr, Shape, THREADS, Unsupported};
use crate::ops::reduce::Reduce;
use crate::tensor::DType::{F32, I32, I64};
use bytemuck::{Pod, Zeroable};

/// Rows per block, if each row is processed by one warp.
const WARP_ROWS_PER_BLOCK: u32 = 8;
/// Longest row that is processed by one warp.
const MAX_WARP_ROW: usize = 1024;

/// Limit of blocks of a SUM. Few long rows are split into about as many pieces in total.
const MAX_BLOCKS: u64 = 1024;

/// Minimum number of elements per piece: four rounds of loads of a block.
const MIN_PIECE: usize = 16 * 1024;

/// `struct ReduceSumArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ReduceSumArgs {
    x: Shape,
    n: u64,
    dtype: u32,
    packed: u32,
}

impl KernelArguments for ReduceSumArgs {
    fn accesses(&self, grid: &Grid) -> Result<Vec<Access>, &'static str> {
        let x = if self.packed != 0 { Access::elements(0, self.n) } else { self.x.access(0) };
        Ok(vec![x, Access::bytes(1, 8 * grid.blocks[0])])
    }
}

/// `struct CountEqualArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct CountEqualArgs {
    x: Shape,
    y: Shape,
    n: u64,
}

impl KernelArguments for CountEqualArgs {
    fn accesses(&self, grid: &Grid) -> Result<Vec<Access>, &'static str> {
        let y = Access::shape(1, self.x.ne, self.y.nb);
        Ok(vec![self.x.access(0), y, Access::bytes(2, 8 * grid.blocks[0])])
    }
}

/// `struct ReduceRowsArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ReduceRowsArgs {
    x: Shape,
    y: Shape,
    kind: u32,
    vector: u32,
    pieces: u32,
    length: u32,
}

impl KernelArguments for ReduceRowsArgs {
    fn accesses(&self, grid: &Grid) -> Result<Vec<Access>, &'static str> {
        let [_, rows @ ..] = self.x.ne;
        let x = self.x.access(0).vectors(self.vector, 4);
        let y = Access::shape(1, [1, rows[0], rows[1], rows[2]], self.y.nb);
        let parts = if self.pieces > 1 { 8 * grid.blocks[0] } else { 0 };
        Ok(vec![x, y, Access::bytes(2, parts)])
    }
}

/// `struct ReduceMergeArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ReduceMergeArgs {
    y: Shape,
    kind: u32,
    dtype: u32,
    pieces: u32,
    n: u32,
}

impl KernelArguments for ReduceMergeArgs {
    fn accesses(&self, grid: &Grid) -> Result<Vec<Access>, &'static str> {
        let [_, rows @ ..] = self.y.ne;
        let parts = grid.blocks[0].saturating_mul(8 * u64::from(self.pieces));
        Ok(vec![Access::bytes(0, parts), Access::shape(1, [1, rows[0], rows[1], rows[2]], self.y.nb)])
    }
}

/// `struct CumsumArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct CumsumArgs {
    x: Shape,
    y: Shape,
    vector: u32,
    padding: u32,
}

impl KernelArguments for CumsumArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        Ok(vec![self.x.access(0).vectors(self.vector, 4), self.y.access(1).vectors(self.vector, 4)])
    }
}

pub(super) fn select(op: Reduce, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    match (op, on.src(0)?.dtype(), on.dst().dtype()) {
        (Reduce::Sum, from, to) if from.is_float() && to.is_float() => sum(on),
        (Reduce::SumRows, F32, F32) => rows_launches(on, 0),
        (Reduce::Mean, F32, F32) => rows_launches(on, 1),
        (Reduce::Argmax, F32, I32) => rows_launches(on, 2),
        (Reduce::Cumsum, F32, F32) => cumsum(on),
        (Reduce::CountEqual, I32, I64) if on.src(1)?.dtype() == I32 => count_equal(on),
        _ => Err(on.unsupported_types()),
    }
}

fn sum(on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let x = on.src(0)?;
    let n = x.elements() as u64;
    let packed = x.is_contiguous();
    if !packed && i32::try_from(x.rows()).is_err() {
        return Err(on.unsupported("2^31 or more rows"));
    }
    let blocks = n.div_ceil(MIN_PIECE as u64).min(MAX_BLOCKS);
    // For contiguous elements the kernel reads only the count, not the shape.
    let shape = if packed { Shape::zeroed() } else { on.shape(x)? };
    let sum = ReduceSumArgs { x: shape, n, dtype: x.dtype().to_wire(), packed: packed.into() };
    let grid = Grid::line(blocks, THREADS);
    let y = on.shape(on.dst())?;
    let merge = ReduceMergeArgs { y, kind: 0, dtype: on.dst().dtype().to_wire(), pieces: blocks as u32, n: 1 };
    Ok(NodeLaunches::new(
        vec![
            on.launch(("reduce", "reduce_sum"), grid, &[Ptr::Src(0), Ptr::Scratch(0)], &sum)?,
            merge_launch(on, 1, &merge)?,
        ],
        blocks * size_of::<f64>() as u64,
    ))
}

fn count_equal(on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let x = on.src(0)?;
    let n = x.elements() as u64;
    if i32::try_from(x.rows()).is_err() {
        return Err(on.unsupported("2^31 or more rows"));
    }
    let blocks = n.div_ceil(MIN_PIECE as u64).min(MAX_BLOCKS);
    let count = CountEqualArgs { x: on.shape(x)?, y: on.shape(on.src(1)?)?, n };
    let pointers = [Ptr::Src(0), Ptr::Src(1), Ptr::Scratch(0)];
    let y = on.shape(on.dst())?;
    let merge = ReduceMergeArgs { y, kind: 0, dtype: I64.to_wire(), pieces: blocks as u32, n: 1 };
    Ok(NodeLaunches::new(
        vec![
            on.launch(("reduce", "reduce_count_equal"), Grid::line(blocks, THREADS), &pointers, &count)?,
            merge_launch(on, 1, &merge)?,
        ],
        blocks * size_of::<f64>() as u64,
    ))
}

/// SUM_ROWS, MEAN or ARGMAX, by its number in the file.
fn rows_launches(on: &NodeOnGpu<'_>, kind: u32) -> Result<NodeLaunches, Unsupported> {
    let x = on.src(0)?;
    let (n, number) = (x.ne()[0], x.rows());
    let Shape { ne, nb } = on.shape(on.dst())?;
    // ARGMAX writes the indices of all rows of x to one row.
    let y = if kind == 2 { Shape { ne: [1, ne[0], 1, 1], nb: [4, nb[0], 0, 0] } } else { Shape { ne, nb } };
    let mut both = [on.shape(x)?, y];
    Shape::merge_rows(&mut both);
    let [x, y] = both;

    // An empty row counts as one piece, because its result must be written.
    let most = (MAX_BLOCKS as usize).div_ceil(number).min(n.div_ceil(MIN_PIECE)).max(1);
    let length = n.div_ceil(most).max(1).next_multiple_of(MAX_WARP_ROW);
    let pieces = n.div_ceil(length).max(1) as u32;
    let grid = team_grid(on, number * pieces as usize, if n <= MAX_WARP_ROW { 32 } else { THREADS })?;
    let vector = aligned_rows(&x).into();
    let args = ReduceRowsArgs { x, y, kind, vector, pieces, length: length as u32 };
    let launch = on.launch(("reduce", "reduce_rows"), grid, &[Ptr::Src(0), Ptr::Dst, Ptr::Scratch(0)], &args)?;
    if pieces == 1 {
        return Ok(NodeLaunches::one(launch));
    }
    let merge = ReduceMergeArgs { y, kind, dtype: F32.to_wire(), pieces, n: n as u32 };
    let scratch = number as u64 * u64::from(pieces) * size_of::<f64>() as u64;
    Ok(NodeLaunches::new(vec![launch, merge_launch(on, number as u64, &merge)?], scratch))
}

/// The launch that merges the pieces of each of `rows` rows, or of a SUM.
fn merge_launch(on: &NodeOnGpu<'_>, rows: u64, merge: &ReduceMergeArgs) -> Result<super::KernelLaunch, Unsupported> {
    on.launch(("reduce", "reduce_merge"), Grid::line(rows, THREADS), &[Ptr::Scratch(0), Ptr::Dst], merge)
}

fn cumsum(on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (x, y) = (on.src(0)?, on.dst());
    let (n, number) = (x.ne()[0], x.rows());
    let mut both = [on.shape(x)?, on.shape(y)?];
    Shape::merge_rows(&mut both);
    let [x, y] = both;
    let team = n.div_ceil(4).next_multiple_of(32).min(1024) as u32;
    let grid = team_grid(on, number, team)?;
    let vector = (aligned_rows(&x) && aligned_rows(&y)).into();
    let args = CumsumArgs { x, y, vector, padding: 0 };
    on.single_launch(("reduce", "reduce_cumsum"), grid, &[Ptr::Src(0), Ptr::Dst], &args)
}

/// A grid of `number` teams of threads. A team is a block, or a warp, of which several share a block.
fn team_grid(on: &NodeOnGpu<'_>, number: usize, threads: u32) -> Result<Grid, Unsupported> {
    if i32::try_from(number).is_err() {
        return Err(on.unsupported("2^31 or more rows"));
    }
    let in_block = if threads == 32 { WARP_ROWS_PER_BLOCK } else { 1 };
    let grid = Grid::line((number as u64).div_ceil(u64::from(in_block)), threads);
    Ok(Grid { threads: [threads, in_block, 1], ..grid })
}

/// Whether all rows can be read by 16-byte accesses if the first one can.
fn aligned_rows(s: &Shape) -> bool {
    s.nb[0] == 4 && s.ne[0].is_multiple_of(4) && s.keeps_alignment(1)
}

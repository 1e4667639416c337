//! SUM, SUM_ROWS, MEAN, ARGMAX, CUMSUM: kernels/reduce.cu.

use super::{Grid, Kernel, On, Ptr, Shape, THREADS, Unsupported};
use crate::ops::reduce::Reduce;
use crate::tensor::DType::{F32, I32};
use bytemuck::{Pod, Zeroable};

/// Rows of a warp each that share a block, and the longest that are given to a warp.
const TOGETHER: u32 = 8;
const SHORT: usize = 1024;

/// Most blocks of a SUM, and at most about as many pieces are made of rows that are too few.
const PARTS: u64 = 1024;

/// Least elements of a piece: what a block reads at once, four times.
const PIECE: usize = 16 * 1024;

/// `struct Sum` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Sum {
    x: Shape,
    n: u64,
    dtype: u32,
    packed: u32,
}

/// `struct Rows` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Rows {
    x: Shape,
    y: Shape,
    kind: u32,
    vector: u32,
    pieces: u32,
    length: u32,
}

/// `struct Merge` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Merge {
    y: Shape,
    kind: u32,
    dtype: u32,
    pieces: u32,
    n: u32,
}

/// `struct Cumsum` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Cumsum {
    x: Shape,
    y: Shape,
    vector: u32,
    padding: u32,
}

pub(super) fn select(op: Reduce, on: &On<'_>) -> Result<Kernel, Unsupported> {
    match (op, on.src(0)?.dtype(), on.dst().dtype()) {
        (Reduce::Sum, from, to) if from.is_float() && to.is_float() => sum(on),
        (Reduce::SumRows, F32, F32) => rows(on, 0),
        (Reduce::Mean, F32, F32) => rows(on, 1),
        (Reduce::Argmax, F32, I32) => rows(on, 2),
        (Reduce::Cumsum, F32, F32) => cumsum(on),
        _ => Err(on.types()),
    }
}

fn sum(on: &On<'_>) -> Result<Kernel, Unsupported> {
    let x = on.src(0)?;
    let n = x.elements() as u64;
    let packed = x.is_contiguous();
    if !packed && i32::try_from(x.rows()).is_err() {
        return Err(on.unsupported("2^31 or more rows"));
    }
    let blocks = n.div_ceil(PIECE as u64).min(PARTS);
    // Of packed elements, only the number counts.
    let shape = if packed { Shape::zeroed() } else { on.shape(x)? };
    let sum = Sum { x: shape, n, dtype: x.dtype().to_wire(), packed: packed.into() };
    let grid = Grid::line(blocks, THREADS);
    let y = on.shape(on.dst())?;
    let merge = Merge { y, kind: 0, dtype: on.dst().dtype().to_wire(), pieces: blocks as u32, n: 1 };
    Ok(Kernel {
        launches: vec![
            on.launch(("reduce", "reduce_sum"), grid, &[Ptr::Src(0), Ptr::Scratch(0)], &sum)?,
            merged(on, 1, &merge)?,
        ],
        scratch: blocks * size_of::<f64>() as u64,
    })
}

/// SUM_ROWS, MEAN, ARGMAX by their numbers in the file.
fn rows(on: &On<'_>, kind: u32) -> Result<Kernel, Unsupported> {
    let x = on.src(0)?;
    let (n, number) = (x.ne()[0], x.rows());
    let Shape { ne, nb } = on.shape(on.dst())?;
    // A row of ARGMAX's result has the indices of all rows of x.
    let y = if kind == 2 { Shape { ne: [1, ne[0], 1, 1], nb: [4, nb[0], 0, 0] } } else { Shape { ne, nb } };
    let mut both = [on.shape(x)?, y];
    Shape::merge_rows(&mut both);
    let [x, y] = both;

    // An empty row is a piece too.
    let most = (PARTS as usize).div_ceil(number).min(n.div_ceil(PIECE)).max(1);
    let length = n.div_ceil(most).max(1).next_multiple_of(SHORT);
    let pieces = n.div_ceil(length).max(1) as u32;
    let grid = teams(on, number * pieces as usize, if n <= SHORT { 32 } else { THREADS })?;
    let vector = aligned_rows(&x).into();
    let numbers = Rows { x, y, kind, vector, pieces, length: length as u32 };
    let launch = on.launch(("reduce", "reduce_rows"), grid, &[Ptr::Src(0), Ptr::Dst, Ptr::Scratch(0)], &numbers)?;
    if pieces == 1 {
        return Ok(Kernel::one(launch));
    }
    let merge = Merge { y, kind, dtype: F32.to_wire(), pieces, n: n as u32 };
    let scratch = number as u64 * u64::from(pieces) * size_of::<f64>() as u64;
    Ok(Kernel { launches: vec![launch, merged(on, number as u64, &merge)?], scratch })
}

/// The pieces of each of `rows` rows, or of a SUM, put together.
fn merged(on: &On<'_>, rows: u64, merge: &Merge) -> Result<super::Launch, Unsupported> {
    on.launch(("reduce", "reduce_merge"), Grid::line(rows, THREADS), &[Ptr::Scratch(0), Ptr::Dst], merge)
}

fn cumsum(on: &On<'_>) -> Result<Kernel, Unsupported> {
    let (x, y) = (on.src(0)?, on.dst());
    let (n, number) = (x.ne()[0], x.rows());
    let mut both = [on.shape(x)?, on.shape(y)?];
    Shape::merge_rows(&mut both);
    let [x, y] = both;
    let team = n.div_ceil(4).next_multiple_of(32).min(1024) as u32;
    let grid = teams(on, number, team)?;
    let vector = (aligned_rows(&x) && aligned_rows(&y)).into();
    let numbers = Cumsum { x, y, vector, padding: 0 };
    on.kernel(("reduce", "reduce_cumsum"), grid, &[Ptr::Src(0), Ptr::Dst], &numbers)
}

/// A grid of `number` teams: warps, several a block, or blocks.
fn teams(on: &On<'_>, number: usize, threads: u32) -> Result<Grid, Unsupported> {
    if i32::try_from(number).is_err() {
        return Err(on.unsupported("2^31 or more rows"));
    }
    let in_block = if threads == 32 { TOGETHER } else { 1 };
    let grid = Grid::line((number as u64).div_ceil(u64::from(in_block)), threads);
    Ok(Grid { threads: [threads, in_block, 1], ..grid })
}

/// Whether rows can be read in 16-byte accesses where the first of them can.
fn aligned_rows(s: &Shape) -> bool {
    s.nb[0] == 4 && s.ne[0].is_multiple_of(4) && s.keeps_alignment(1)
}

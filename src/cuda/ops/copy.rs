//! DUP, CPY, CONT: kernels/copy.cu between plain types and of any type onto itself, kernels/copy_to_blocks.cu and
//! kernels/copy_from_blocks.cu between floats and blocks.

use super::rows::Ids;
use super::{Grid, Kernel, On, Ptr, Shape, THREADS, Unsupported, blocks, suffix};
use crate::ops::copy::CopyOp;
use crate::tensor::DType::{F32, I32};
use crate::tensor::{Capability, CopyLoop, DIMS, DType, TensorDesc, common_loop_nest};
use bytemuck::{Pod, Zeroable};

pub(super) fn select(_: CopyOp, on: &On<'_>) -> Result<Kernel, Unsupported> {
    let (x, y) = (on.src(0)?, on.dst());
    let (from, to) = (x.dtype(), y.dtype());
    if from == to || converts(from, to) {
        between_plain(on, x, y)
    } else if from.is_float() && has_blocks(to) {
        let ys = if y.is_contiguous() { Target::Dense } else { Target::Strided(on.shape(y)?) };
        let launch = to_blocks(on, flat(on, x, to.block_len())?, ys, [Ptr::Src(0), Ptr::Null, Ptr::Null])?;
        Ok(Kernel { launches: vec![launch], scratch: 0 })
    } else if has_blocks(from) && to.is_float() {
        let block = from.block_len();
        from_blocks(on, flat(on, x, block)?, flat(on, y, block)?, None)
    } else {
        Err(on.types())
    }
}

/// Whether kernels/common/copy.cuh converts between two plain types.
fn converts(from: DType, to: DType) -> bool {
    from.is_float() && (to.is_float() || to == I32) || (from, to) == (I32, F32)
}

/// Whether a type has blocks that kernels make and read.
pub(super) fn has_blocks(dtype: DType) -> bool {
    dtype.is_block() && dtype.can(Capability::Cuda)
}

// ---- between plain types

/// `struct Nest` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Nest {
    count: [u32; DIMS],
    x: [u64; DIMS],
    y: [u64; DIMS],
}

impl Nest {
    /// `None` when there are more than four loops.
    fn of(loops: &[CopyLoop]) -> Option<Nest> {
        let mut nest = Nest { count: [1; DIMS], x: [0; DIMS], y: [0; DIMS] };
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

/// `struct Share` of kernels/common/copy.cuh: how a block's threads share rows.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Share {
    lanes_log: u32,
    pieces: u32,
}

impl Share {
    /// For rows of `n` accesses: about four of them for each thread, but eight threads side by side where there are as many.
    pub(super) fn of(n: usize) -> Share {
        let lanes = n.min(8).next_power_of_two().max(n.div_ceil(4).min(THREADS as usize).next_power_of_two());
        let pieces = if lanes == THREADS as usize { n.div_ceil(4 * lanes) } else { 1 };
        Share { lanes_log: lanes.ilog2(), pieces: u32::try_from(pieces).unwrap_or(u32::MAX) }
    }

    /// The blocks for that many rows.
    pub(super) fn grid(self, rows: usize) -> Grid {
        let groups = (rows as u64).div_ceil(u64::from(THREADS >> self.lanes_log));
        Grid::line(groups.saturating_mul(u64::from(self.pieces)), THREADS)
    }
}

/// `struct Rows` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Rows {
    nest: Nest,
    rows: u64,
    run: u64,
    share: Share,
    types: [u32; 2],
}

/// `struct Tiles` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Tiles {
    nest: Nest,
    tiles: [u32; 2],
    types: [u32; 2],
    bytes: u32,
    padding: u32,
}

/// `struct Any` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Any {
    x: Shape,
    y: Shape,
    n: u64,
    types: [u32; 2],
    bytes: u32,
    padding: u32,
}

/// Elements along each side of a tile.
const SIDE: u32 = 32;
/// A side shorter than this leaves most of a tile unused.
const LEAST_SIDE: usize = 8;

const POINTERS: [Ptr; 2] = [Ptr::Src(0), Ptr::Dst];

fn between_plain(on: &On<'_>, x: &TensorDesc, y: &TensorDesc) -> Result<Kernel, Unsupported> {
    let (size_x, size_y) = (x.dtype().block_bytes(), y.dtype().block_bytes());
    let types = [x.dtype(), y.dtype()].map(DType::to_wire);
    let raw = x.dtype() == y.dtype();
    let bytes = if raw { size_x as u32 } else { 0 };
    if let Some(mut loops) = common_loop_nest(x, y) {
        arrange(&mut loops, size_x, size_y);
        if let Some(nest) = crossed(&mut loops, x, y) {
            let tiles = [nest.count[0].div_ceil(SIDE), nest.count[1].div_ceil(SIDE)];
            let planes = u64::from(nest.count[2]) * u64::from(nest.count[3]);
            let count = u64::from(tiles[0]) * u64::from(tiles[1]);
            let grid = Grid::line(count.saturating_mul(planes), THREADS);
            let tiles = Tiles { nest, tiles, types, bytes, padding: 0 };
            return on.kernel(("copy", "copy_transpose"), grid, &POINTERS, &tiles);
        }
        let dense = loops.first().filter(|l| (l.src_stride, l.dst_stride) == (size_x, size_y)).map(|l| l.count);
        if dense.is_some() {
            loops.remove(0);
        }
        if let Some(nest) = Nest::of(&loops) {
            let rows = loops.iter().map(|l| l.count).product::<usize>();
            let run = dense.unwrap_or(1) * if raw { size_x } else { 1 };
            // 16 bytes, or four elements, an access.
            let share = Share::of(run.div_ceil(if raw { 16 } else { 4 }));
            let name = if raw { "copy_rows" } else { "copy_convert" };
            let numbers = Rows { nest, rows: rows as u64, run: run as u64, share, types };
            return on.kernel(("copy", name), share.grid(rows), &POINTERS, &numbers);
        }
    }
    let in_blocks = |t: &TensorDesc| {
        let mut shape = on.shape(t)?;
        shape.ne[0] /= t.dtype().block_len() as u32;
        Ok(shape)
    };
    let n = y.dtype().blocks(y.elements());
    let any = Any { x: in_blocks(x)?, y: in_blocks(y)?, n: n as u64, types, bytes, padding: 0 };
    on.kernel(("copy", "copy_any"), Grid::line(blocks(n, THREADS, 1), THREADS), &POINTERS, &any)
}

/// Orders loops by how dense they are in the destination, and joins those that are one in both tensors.
fn arrange(loops: &mut Vec<CopyLoop>, size_x: usize, size_y: usize) {
    loops.sort_by_key(|l| (l.dst_stride, l.src_stride));
    let mut merged: Vec<CopyLoop> = Vec::with_capacity(loops.len());
    for next in loops.drain(..) {
        match merged.last_mut() {
            // Kernels count in 32 bits, except along a run that is dense in both.
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

/// The loops with that along which the source is dense in second place, where plain elements are dense along another one in
/// the destination, and both are long enough for tiles.
fn crossed(loops: &mut [CopyLoop], x: &TensorDesc, y: &TensorDesc) -> Option<Nest> {
    let (size_x, size_y) = (x.dtype().block_bytes(), y.dtype().block_bytes());
    let first = loops.first()?;
    if x.dtype().is_block() || first.dst_stride != size_y || first.count < LEAST_SIDE || loops.len() > DIMS {
        return None;
    }
    let dense = loops.iter().position(|l| l.src_stride == size_x).filter(|&k| k > 0 && loops[k].count >= LEAST_SIDE)?;
    loops[1..=dense].rotate_right(1);
    Nest::of(loops)
}

// ---- between floats and blocks

/// `struct ToBlocks` of kernels/copy_to_blocks.cu.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ToBlocks {
    x: Shape,
    y: Shape,
    list: Ids,
    blocks: u64,
    dtype: u32,
    mode: u32,
}

/// Where blocks go: `enum Mode` of the file.
pub(super) enum Target {
    /// One after the other.
    Dense,
    /// As the destination's shape says.
    Strided(Shape),
    /// To the rows that ids name.
    Named(Shape, Ids),
}

/// The launch that makes blocks of source 0, whose shape is `xs`; four elements that follow each other lie in one row of it.
/// Pointers: source 0, ids, claims.
pub(super) fn to_blocks(
    on: &On<'_>,
    xs: Shape,
    target: Target,
    [x, ids, claims]: [Ptr; 3],
) -> Result<super::Launch, Unsupported> {
    let (src, dtype) = (on.src(0)?, on.dst().dtype());
    let (mode, y, list) = match target {
        Target::Dense => (0, Shape::zeroed(), Ids::zeroed()),
        Target::Strided(shape) => (1, shape, Ids::zeroed()),
        Target::Named(shape, list) => (2, shape, list),
    };
    let count = dtype.blocks(src.elements());
    let (threads, each) = (128, if dtype.block_len() == 32 { 128 } else { 32 });
    let numbers = ToBlocks { x: xs, y, list, blocks: count as u64, dtype: src.dtype().to_wire(), mode };
    let name = format!("copy_to_{}", suffix(dtype));
    let pointers = [x, ids, Ptr::Dst, claims, Ptr::Verdict];
    on.launch((&name, &name), Grid::line(blocks(count, each, 1), threads), &pointers, &numbers)
}

/// `struct FromBlocks` of kernels/copy_from_blocks.cu.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct FromBlocks {
    x: Shape,
    y: Shape,
    list: Ids,
    n: u64,
    dtype: u32,
    named: u32,
}

/// Reads blocks of source 0, whose shape is `xs`, into the destination, whose shape is `ys`: all in order, or the rows that
/// the ids of source 1 name. Eight elements that follow each other lie in one row of `ys`.
pub(super) fn from_blocks(on: &On<'_>, xs: Shape, ys: Shape, list: Option<Ids>) -> Result<Kernel, Unsupported> {
    let n = on.dst().elements() / 8;
    let name = format!("copy_from_{}", suffix(on.src(0)?.dtype()));
    let (ids, named) = if list.is_some() { (Ptr::Src(1), 1) } else { (Ptr::Null, 0) };
    let (list, dtype) = (list.unwrap_or(Ids::zeroed()), on.dst().dtype().to_wire());
    let numbers = FromBlocks { x: xs, y: ys, list, n: n as u64, dtype, named };
    let pointers = [Ptr::Src(0), ids, Ptr::Dst, Ptr::Verdict];
    on.kernel((&name, &name), Grid::line(blocks(n, THREADS, 1), THREADS), &pointers, &numbers)
}

/// A packed tensor as one row, or as rows of `block` elements where that would be too long; another one as it is.
fn flat(on: &On<'_>, t: &TensorDesc, block: usize) -> Result<Shape, Unsupported> {
    if !t.is_contiguous() {
        return on.shape(t);
    }
    let n = t.elements();
    let ne = if i32::try_from(n).is_ok() { [n, 1, 1, 1] } else { [block, n / block, 1, 1] };
    let flat = TensorDesc::contiguous(t.dtype(), ne).map_err(|e| on.unsupported(e.to_string()))?;
    on.shape(&flat)
}

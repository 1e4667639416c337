//! NORM, RMS_NORM, L2_NORM, GROUP_NORM, and norms of rows with what stands around them: kernels/norm.cu.

use super::{Grid, Kernel, On, Ptr, Shape, Unsupported, blocks};
use crate::graph::fuse::NormFusion;
use crate::ops::norm::Norm;
use crate::tensor::DType::F32;
use crate::tensor::{DIMS, TensorDesc};
use bytemuck::{Pod, Zeroable};

/// Most threads of a block, and threads of a warp.
const BLOCK: u32 = 1024;
const WARP: u32 = 32;

/// Elements in the registers of a thread, at most.
const EACH: usize = 16;

/// Longest row that stays in registers: `norm_kept_16` has at most 768 threads.
const KEPT: usize = EACH * 768;

/// Up to this many rows, they are spread over as many threads as a block can have: nothing else keeps the GPU busy.
const FEW_ROWS: usize = 512;

/// Rows of a warp each that share a block.
const TOGETHER: u32 = 8;

/// `struct Operand` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Operand {
    shape: Shape,
    wraps: u32,
    vector: u32,
}

/// `struct Kept` of the file: x, b, sum, w, plus, y.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Kept {
    operands: [Operand; 6],
    kind: u32,
    eps: f32,
}

/// `struct Long` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Long {
    x: Shape,
    y: Shape,
    kind: u32,
    eps: f32,
    together: u32,
    flat: u32,
    vector: u32,
    pieces: u32,
}

pub(super) fn select(op: Norm, on: &On<'_>) -> Result<Kernel, Unsupported> {
    let (x, y) = (on.src(0)?, on.dst());
    if (x.dtype(), y.dtype()) != (F32, F32) {
        return Err(on.types());
    }
    let (xs, ys) = (on.shape(x)?, on.shape(y)?);
    let Norm::GroupNorm { groups, .. } = op else {
        return if x.ne()[0] <= KEPT {
            kept(op, on, [Some(xs), None, None, None, None, Some(ys)])
        } else {
            let parts = Parts { together: 0, number: x.rows() as u64, longest: x.ne()[0] as u64 };
            long(op, on, parts, xs, ys)
        };
    };
    let [n0, n1, channels, batches] = x.ne().map(|n| n as u64);
    let together = channels.div_ceil(u64::from(groups.get()));
    // Empty groups are none.
    let number = channels.div_ceil(together);
    let parts = Parts { together: together as u32, number: number * batches, longest: n0 * n1 * together };
    let short = channels.is_multiple_of(together) && parts.longest <= KEPT as u64;
    if let (true, Some(dx), Some(dy)) = (short, step(x), step(y)) {
        let row = |s: Shape, step| {
            let ne = [parts.longest as u32, number as u32, s.ne[3], 1];
            Some(Shape { ne, nb: [step, s.nb[2] * together, s.nb[3], 0] })
        };
        return kept(op, on, [row(xs, dx), None, None, None, None, row(ys, dy)]);
    }
    long(op, on, parts, xs, ys)
}

/// The kernel for a norm with its neighbours: see [`crate::graph::fuse::FusedOp::Norm`] for the operands.
pub(super) fn fused(op: Norm, around: NormFusion, on: &On<'_>) -> Option<Kernel> {
    let shape = |i: usize, is: bool| if is { on.shape(on.src(i).ok()?).ok().map(Some) } else { Some(None) };
    let (x, y) = (shape(0, true)?, on.shape(on.dst()).ok()?);
    let (b, sum) = (shape(1, around.residual)?, shape(2, around.residual)?);
    let (w, plus) = (shape(3, around.weight)?, shape(4, around.bias)?);
    let fits = on.dst().ne()[0] <= KEPT;
    fits.then(|| kept(op, on, [x, b, sum, w, plus, Some(y)]).ok()).flatten()
}

/// Rows in registers. All operands have y's counts, or repeat to them.
fn kept(op: Norm, on: &On<'_>, shapes: [Option<Shape>; 6]) -> Result<Kernel, Unsupported> {
    let [x, b, sum, w, plus, Some(y)] = shapes else { return Err(on.unsupported("a norm without a destination")) };
    let all = [x, b, sum, w, plus, Some(y)].map(|shape| repeated(shape, y.ne));
    let mut merged = all.map(|(shape, _)| shape);
    if all.iter().all(|(_, wraps)| !wraps) {
        Shape::merge_rows(&mut merged);
    }
    let operands = [0, 1, 2, 3, 4, 5].map(|i| {
        let shape = merged[i];
        let vector = shape.ne[0].is_multiple_of(4) && shape.nb[0] == 4 && shape.keeps_alignment(1);
        Operand { shape, wraps: all[i].1.into(), vector: vector.into() }
    });
    let [n, rows @ ..] = y.ne.map(|n| n as usize);
    let rows: usize = rows.iter().product();
    // As few as the threads of a block allow, or of a warp.
    let threads = if rows <= FEW_ROWS { BLOCK } else { WARP } as usize;
    let (name, each) = match n.div_ceil(threads) {
        0..=4 => ("norm_kept_4", 4),
        5..=8 => ("norm_kept_8", 8),
        _ => ("norm_kept_16", EACH),
    };
    let team = (n.div_ceil(each) as u32).next_multiple_of(WARP);
    let in_block = if team == WARP { TOGETHER } else { 1 };
    let grid = Grid { threads: [team, in_block, 1], ..Grid::line(blocks(rows, in_block, 1), team) };
    if i32::try_from(rows).is_err() {
        return Err(on.unsupported("2^31 or more rows"));
    }
    let (kind, eps) = kind(op);
    // x, b, sum, w, plus, y: what is absent is null.
    let given = |i: usize, ptr| if shapes[i].is_some() { ptr } else { Ptr::Null };
    let pointers = [
        Ptr::Src(0),
        given(1, Ptr::Src(1)),
        given(2, Ptr::Src(2)),
        given(3, Ptr::Src(3)),
        given(4, Ptr::Src(4)),
        Ptr::Dst,
    ];
    on.kernel(("norm", name), grid, &pointers, &Kept { operands, kind, eps })
}

/// What has one statistic: rows, or groups of `together` channels.
struct Parts {
    together: u32,
    number: u64,
    /// Elements of the longest.
    longest: u64,
}

/// Statistics of pieces, then the pieces scaled.
fn long(op: Norm, on: &On<'_>, parts: Parts, mut x: Shape, mut y: Shape) -> Result<Kernel, Unsupported> {
    let (kind, eps) = kind(op);
    let threads = parts.longest.div_ceil(EACH as u64).next_multiple_of(u64::from(WARP)).min(u64::from(BLOCK)) as u32;
    let pieces = parts.longest.div_ceil(u64::from(threads) * EACH as u64);
    let (mut flat, mut vector) = (true, x.ne[0].is_multiple_of(4));
    if parts.together > 0 {
        match (step(on.src(0)?), step(on.dst())) {
            (Some(dx), Some(dy)) => (x.nb[0], y.nb[0]) = (dx, dy),
            _ => flat = false,
        }
        vector = (u64::from(x.ne[0]) * u64::from(x.ne[1])).is_multiple_of(4);
    }
    let from = if parts.together > 0 { 2 } else { 1 };
    vector &= flat && [&x, &y].iter().all(|s| s.nb[0] == 4 && s.keeps_alignment(from));
    let long = Long {
        x,
        y,
        kind,
        eps,
        together: parts.together,
        flat: flat.into(),
        vector: vector.into(),
        pieces: u32::try_from(pieces).map_err(|_| on.unsupported("too long a row"))?,
    };
    let grid = Grid::line(parts.number.saturating_mul(pieces), threads);
    let pointers = [Ptr::Src(0), Ptr::Dst, Ptr::Scratch(0)];
    let launch = |name| on.launch(("norm", name), grid, &pointers, &long);
    Ok(Kernel {
        launches: vec![launch("norm_stats")?, launch("norm_apply")?],
        scratch: parts.number * pieces * 2 * size_of::<f64>() as u64,
    })
}

fn kind(op: Norm) -> (u32, f32) {
    match op {
        Norm::Norm { eps } | Norm::GroupNorm { eps, .. } => (0, eps),
        Norm::RmsNorm { eps } => (1, eps),
        Norm::L2Norm { eps } => (2, eps),
    }
}

/// An operand for rows of a tensor with counts `ne`, and whether its rows repeat in another way than one for all. What is
/// absent may lie anywhere.
fn repeated(shape: Option<Shape>, ne: [u32; DIMS]) -> (Shape, bool) {
    let Some(mut shape) = shape else { return (Shape { ne, nb: [4, 0, 0, 0] }, false) };
    for d in 1..DIMS {
        if shape.ne[d] == 1 {
            (shape.ne[d], shape.nb[d]) = (ne[d], 0);
        }
    }
    (shape, shape.ne != ne)
}

/// Bytes from an element to the next, where all of the channels that follow each other are evenly spaced.
fn step(t: &TensorDesc) -> Option<u64> {
    let (ne, nb) = (t.ne(), t.nb());
    let (mut step, mut elements) = (None, 1);
    for d in 0..3 {
        if ne[d] > 1 {
            let first = *step.get_or_insert(nb[d]);
            if nb[d] != first * elements {
                return None;
            }
            elements *= ne[d];
        }
    }
    Some(step.unwrap_or(F32.block_bytes()) as u64)
}

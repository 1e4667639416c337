//! Launches of NORM, RMS_NORM, L2_NORM and GROUP_NORM, and of norms fused with a residual addition before them and a
//! multiplication and an addition behind them (epilogue fusion): kernels/norm.cu.

use super::mul_mat::{QUANTIZED_GROUPS, quantized_column_bytes};
use super::{
    Access, Grid, KernelArguments, NodeLaunches, NodeOnGpu, Ptr, Shape, Unsupported, blocks, saturating_product,
};
use crate::cuda::kernel::QuantizingLaunch;
use crate::graph::fuse::NormFusion;
use crate::ops::norm::Norm;
use crate::tensor::DType::F32;
use crate::tensor::{DIMS, TensorDesc};
use bytemuck::{Pod, Zeroable};

/// Limit of threads per block.
const MAX_THREADS: u32 = 1024;
/// Threads per warp.
const WARP: u32 = 32;

/// Limit of elements in the registers of a thread.
const MAX_PER_THREAD: usize = 16;

/// Longest row that is kept in registers: `norm_kept_16` has at most 768 threads.
const MAX_KEPT_ROW: usize = MAX_PER_THREAD * 768;

/// Up to this many rows, each row uses the threads of a whole block, because the rows alone do not fill the GPU.
const FEW_ROWS: usize = 512;

/// Threads for each of few rows. With 1024, one row of 4096 is modelled to take a fifth longer (`scripts/roofline.sh`, a layer's
/// norms): addresses and reductions cost each warp the same, whatever it holds, and one multiprocessor runs all warps of a row.
const FEW_ROWS_THREADS: u32 = 512;

/// Rows per block, if each row is processed by one warp.
const WARP_ROWS_PER_BLOCK: u32 = 8;

/// `struct Operand` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Operand {
    shape: Shape,
    wraps: u32,
    padding: u32,
}

/// `struct NormKeptArgs` of the file. Operands: x, b, sum, w, plus, y.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct NormKeptArgs {
    operands: [Operand; 6],
    kind: u32,
    eps: f32,
    stride: u64,
    group: u32,
    vector: u32,
}

impl KernelArguments for NormKeptArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let [.., y] = &self.operands;
        let rows = saturating_product(&y.shape.ne[1..]);
        let operands = self.operands.iter().enumerate();
        // The kernel reads as many elements of each row as a row of y has.
        let operands = operands.map(|(pointer, &Operand { shape: Shape { ne: [_, n1, n2, n3], nb }, .. })| {
            Access::shape(pointer, [y.shape.ne[0], n1, n2, n3], nb).vectors(self.vector, 4)
        });
        let quantized = Access::bytes(6, self.stride.saturating_mul(rows)).only_if(self.group != 0);
        Ok(operands.chain([quantized]).collect())
    }
}

/// `struct NormLongArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct NormLongArgs {
    x: Shape,
    y: Shape,
    kind: u32,
    eps: f32,
    together: u32,
    flat: u32,
    vector: u32,
    pieces: u32,
}

impl KernelArguments for NormLongArgs {
    fn accesses(&self, grid: &Grid) -> Result<Vec<Access>, &'static str> {
        let tensor =
            |pointer, shape: &Shape| shape.access(pointer).vectors(self.vector & u32::from(self.together == 0), 4);
        let statistics = Access::bytes(2, grid.blocks[0].saturating_mul(2 * size_of::<f64>() as u64));
        Ok(vec![tensor(0, &self.x), tensor(1, &self.y), statistics])
    }
}

pub(super) fn select(op: Norm, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (x, y) = (on.src(0)?, on.dst());
    if (x.dtype(), y.dtype()) != (F32, F32) {
        return Err(on.unsupported_types());
    }
    let (xs, ys) = (on.shape(x)?, on.shape(y)?);
    let Norm::GroupNorm { groups, .. } = op else {
        return if x.ne()[0] <= MAX_KEPT_ROW {
            kept_launch(op, on, [Some(xs), None, None, None, None, Some(ys)])
        } else {
            let parts = StatParts { together: 0, number: x.rows() as u64, longest: x.ne()[0] as u64 };
            long_launches(op, on, parts, xs, ys)
        };
    };
    let [n0, n1, channels, batches] = x.ne().map(|n| n as u64);
    let together = channels.div_ceil(u64::from(groups.get()));
    // Groups without channels do not count.
    let number = channels.div_ceil(together);
    let parts = StatParts { together: together as u32, number: number * batches, longest: n0 * n1 * together };
    let short = channels.is_multiple_of(together) && parts.longest <= MAX_KEPT_ROW as u64;
    if let (true, Some(dx), Some(dy)) = (short, uniform_stride(x), uniform_stride(y)) {
        let row = |s: Shape, step| {
            let ne = [parts.longest as u32, number as u32, s.ne[3], 1];
            Some(Shape { ne, nb: [step, s.nb[2] * together, s.nb[3], 0] })
        };
        return kept_launch(op, on, [row(xs, dx), None, None, None, None, row(ys, dy)]);
    }
    long_launches(op, on, parts, xs, ys)
}

/// The launch for a fused norm; see [`crate::graph::fuse::FusedOp::Norm`] for the operands.
pub(super) fn fused(op: Norm, fusion: NormFusion, on: &NodeOnGpu<'_>) -> Option<NodeLaunches> {
    let shape = |i: usize, is: bool| if is { on.shape(on.src(i).ok()?).ok().map(Some) } else { Some(None) };
    let (x, y) = (shape(0, true)?, on.shape(on.dst()).ok()?);
    let (b, sum) = (shape(1, fusion.residual)?, shape(2, fusion.residual)?);
    let (w, plus) = (shape(3, fusion.weight)?, shape(4, fusion.bias)?);
    let fits = on.dst().ne()[0] <= MAX_KEPT_ROW;
    fits.then(|| kept_launch(op, on, [x, b, sum, w, plus, Some(y)]).ok()).flatten()
}

/// The launch that keeps rows in registers. All operands have the counts of y or are broadcast to them.
fn kept_launch(op: Norm, on: &NodeOnGpu<'_>, shapes: [Option<Shape>; 6]) -> Result<NodeLaunches, Unsupported> {
    let [x, b, sum, w, plus, Some(y)] = shapes else { return Err(on.unsupported("a norm without a destination")) };
    let all = [x, b, sum, w, plus, Some(y)].map(|shape| broadcast_to(shape, y.ne));
    let mut merged = all.map(|(shape, _)| shape);
    if all.iter().all(|(_, wraps)| !wraps) {
        Shape::merge_rows(&mut merged);
    }
    let vector = merged.iter().all(|s| s.ne[0].is_multiple_of(4) && s.nb[0] == 4 && s.keeps_alignment(1));
    let operands = [0, 1, 2, 3, 4, 5].map(|i| Operand { shape: merged[i], wraps: all[i].1.into(), padding: 0 });
    let [n, rows @ ..] = y.ne.map(|n| n as usize);
    let rows: usize = rows.iter().product();
    // As few elements per thread as the threads of a row allow.
    let threads = if rows <= FEW_ROWS { FEW_ROWS_THREADS } else { WARP } as usize;
    let (name, each) = match n.div_ceil(threads) {
        0..=4 => ("norm_kept_4", 4),
        5..=8 => ("norm_kept_8", 8),
        _ => ("norm_kept_16", MAX_PER_THREAD),
    };
    let team = (n.div_ceil(each) as u32).next_multiple_of(WARP);
    let in_block = if team == WARP { WARP_ROWS_PER_BLOCK } else { 1 };
    let grid = Grid { threads: [team, in_block, 1], ..Grid::line(blocks(rows, in_block, 1), team) };
    if i32::try_from(rows).is_err() {
        return Err(on.unsupported("2^31 or more rows"));
    }
    let (kind, eps) = kind(op);
    // x, b, sum, w, plus, y; absent operands are null.
    let present_or_null = |i: usize, ptr| if shapes[i].is_some() { ptr } else { Ptr::Null };
    let pointers = |quantized| {
        [
            Ptr::Src(0),
            present_or_null(1, Ptr::Src(1)),
            present_or_null(2, Ptr::Src(2)),
            present_or_null(3, Ptr::Src(3)),
            present_or_null(4, Ptr::Src(4)),
            Ptr::Dst,
            quantized,
        ]
    };
    let launch = |quantized, group: usize| {
        let stride = if group == 0 { 0 } else { quantized_column_bytes(n, group) };
        let args = NormKeptArgs { operands, kind, eps, stride, group: group as u32, vector: vector.into() };
        on.launch(("norm", name), grid, &pointers(quantized), &args)
    };
    let mut kernel = NodeLaunches::one(launch(Ptr::Null, 0)?);
    if on.dst().is_contiguous() && on.dst().ne()[0] == n {
        for group in QUANTIZED_GROUPS.into_iter().filter(|&group| n.is_multiple_of(group)) {
            kernel.quantizing.push(QuantizingLaunch { launch: launch(Ptr::ResultColumns, group)?, k: n, group });
        }
    }
    Ok(kernel)
}

/// Parts of the tensor with common statistics: rows, or groups of `together` channels.
struct StatParts {
    together: u32,
    number: u64,
    /// Elements of the longest part.
    longest: u64,
}

/// Two launches for long rows and groups: statistics of pieces, then scaling of the pieces.
fn long_launches(
    op: Norm,
    on: &NodeOnGpu<'_>,
    parts: StatParts,
    mut x: Shape,
    mut y: Shape,
) -> Result<NodeLaunches, Unsupported> {
    let (kind, eps) = kind(op);
    let threads =
        parts.longest.div_ceil(MAX_PER_THREAD as u64).next_multiple_of(u64::from(WARP)).min(u64::from(MAX_THREADS))
            as u32;
    let pieces = parts.longest.div_ceil(u64::from(threads) * MAX_PER_THREAD as u64);
    let (mut flat, mut vector) = (true, x.ne[0].is_multiple_of(4));
    if parts.together > 0 {
        match (uniform_stride(on.src(0)?), uniform_stride(on.dst())) {
            (Some(dx), Some(dy)) => (x.nb[0], y.nb[0]) = (dx, dy),
            _ => flat = false,
        }
        vector = (u64::from(x.ne[0]) * u64::from(x.ne[1])).is_multiple_of(4);
    }
    let from = if parts.together > 0 { 2 } else { 1 };
    vector &= flat && [&x, &y].iter().all(|s| s.nb[0] == 4 && s.keeps_alignment(from));
    let long = NormLongArgs {
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
    Ok(NodeLaunches::new(
        vec![launch("norm_stats")?, launch("norm_apply")?],
        parts.number * pieces * 2 * size_of::<f64>() as u64,
    ))
}

fn kind(op: Norm) -> (u32, f32) {
    match op {
        Norm::Norm { eps } | Norm::GroupNorm { eps, .. } => (0, eps),
        Norm::RmsNorm { eps } => (1, eps),
        Norm::L2Norm { eps } => (2, eps),
    }
}

/// The shape of an operand broadcast to counts `ne`, and whether it needs index wrapping, that is, whether it repeats in a
/// dimension with a count other than 1. The shape of an absent operand is arbitrary.
fn broadcast_to(shape: Option<Shape>, ne: [u32; DIMS]) -> (Shape, bool) {
    let Some(mut shape) = shape else { return (Shape { ne, nb: [4, 0, 0, 0] }, false) };
    for d in 1..DIMS {
        if shape.ne[d] == 1 {
            (shape.ne[d], shape.nb[d]) = (ne[d], 0);
        }
    }
    (shape, shape.ne != ne)
}

/// Stride in bytes between consecutive elements of dimensions 0 to 2, if it is uniform.
fn uniform_stride(t: &TensorDesc) -> Option<u64> {
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

//! Launches of MUL_MAT and MUL_MAT_ID: kernels/mul_mat.cu, one module per type of the weights a.
//!
//! Few columns of b (decoding) use the vector kernels, many columns use tiles on tensor cores.

use super::{Grid, KernelLaunch, NodeLaunches, NodeOnGpu, Ptr, Shape, THREADS, Unsupported, blocks, suffix};
use crate::ops::mul_mat::MulMat;
use crate::tensor::{Capability, DType, TensorDesc};
use bytemuck::{Pod, Zeroable};

/// Threads per block of the vector kernels.
const VEC_THREADS: u32 = 128;
/// Rows of a per group of lanes in the vector kernels.
const ROWS_PER_GROUP: usize = 4;

/// Limit of blocks in y and z; beyond it, the kernels loop.
const MAX_GRID_YZ: u64 = 65535;

/// Number of warps per multiprocessor that hides the latency of loads. With fewer, more lanes share each row (split-K within a
/// block).
const WARPS_TO_HIDE_LATENCY: u64 = 16;

/// Limit of columns per block of the vector kernels.
const MAX_VEC_COLUMNS: u32 = 8;

/// Lowest compute capability with the tensor-core instructions (tf32) of the tiled kernels, times ten.
const MIN_TF32_CAPABILITY: u32 = 80;

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

/// `struct WidenArgs` and `struct RoundArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PackArgs {
    b: Shape,
    stride: u64,
    /// WidenArgs: the type of b; RoundArgs: the elements per group.
    number: u32,
    padding: u32,
}

pub(super) fn select(op: MulMat, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (a, b) = (on.src(0)?, on.src(1)?);
    let rounded = a.dtype().is_float() && b.dtype().is_float();
    if !a.dtype().can(Capability::Cuda) || !(b.dtype() == DType::F32 || rounded) {
        return Err(on.unsupported_types());
    }
    let mut kernel = NodeLaunches::default();
    let columns = if b.dtype() == DType::F32 && !a.dtype().is_block() {
        F32Columns { at: Ptr::Src(1), shape: on.shape(b)? }
    } else {
        let (launch, columns, bytes) = convert_columns(a, b, on)?;
        kernel.launches.push(launch);
        kernel.scratch = bytes;
        columns
    };
    kernel.launches.push(if op.by_id { mul_mat_id_launch(a, &columns, on)? } else { mul_mat_launch(a, &columns, on)? });
    Ok(kernel)
}

/// The columns of the product: rows of b in F32.
struct F32Columns {
    at: Ptr,
    shape: Shape,
}

/// A launch that writes b to scratch memory as F32, the result, and the bytes of scratch. Converts F16 and BF16. For quantised
/// weights it rounds b to 8 bits, as llama.cpp does on the CPU, so that a model generates the same tokens on both.
fn convert_columns(
    a: &TensorDesc,
    b: &TensorDesc,
    on: &NodeOnGpu<'_>,
) -> Result<(KernelLaunch, F32Columns, u64), Unsupported> {
    let [k, n, b2, b3] = b.ne();
    // Rows start at multiples of 16 bytes.
    let stride = k.next_multiple_of(4) as u64;
    let row = 4 * stride;
    let bytes = row.checked_mul(b.rows() as u64).ok_or_else(|| on.unsupported("b is too large in F32"))?;
    let nb = [4, row, row * n as u64, row * (n * b2) as u64];
    let shape = on.shape(b)?;
    let (name, number, pieces) = if a.dtype().is_block() {
        // One warp per group.
        let group = if a.dtype().block_len() == 256 { 256 } else { 32 };
        ("mul_mat_round", group, blocks(k / group as usize, THREADS / 32, 1))
    } else {
        ("mul_mat_widen", b.dtype().to_wire(), blocks(k, THREADS, 1))
    };
    let grid = Grid::of([(n * b2 * b3) as u64, pieces.min(MAX_GRID_YZ), 1], THREADS);
    let args = PackArgs { b: shape, stride, number, padding: 0 };
    let launch = on.launch(("mul_mat", name), grid, &[Ptr::Src(1), Ptr::Scratch(0)], &args)?;
    Ok((launch, F32Columns { at: Ptr::Scratch(0), shape: Shape { nb, ..shape } }, bytes))
}

fn mul_mat_launch(a: &TensorDesc, columns: &F32Columns, on: &NodeOnGpu<'_>) -> Result<KernelLaunch, Unsupported> {
    let (shape, b, dst) = (on.shape(a)?, &columns.shape, on.shape(on.dst())?);
    let [k, m, a2, a3] = shape.ne;
    let [_, n, b2, b3] = b.ne;
    let mut planes = Planes {
        n,
        counts: [b2, b3],
        shared: [b2 / a2, b3 / a3],
        b: [1, 2, 3].map(|dim| stride(b, dim)),
        dst: [1, 2, 3].map(|dim| stride(&dst, dim)),
    };
    planes.fold(0);
    if planes.counts[0] == 1 {
        planes.fold(1);
    }
    let Planes { n, counts: [b2, b3], shared: [r2, r3], .. } = planes;
    let count = b2.checked_mul(b3).ok_or_else(|| on.unsupported("2^32 or more planes"))?;
    let counted = |width: u32| (u64::from(n.div_ceil(width)), u64::from(count));
    let (entry, width, in_x, log2_lanes, threads) = if n > MAX_VEC_COLUMNS && on.gpu.capability >= MIN_TF32_CAPABILITY {
        let large = u64::from(m.div_ceil(128)) * counted(64).0;
        let large = large.saturating_mul(counted(64).1);
        let height = if m > 64 && large >= u64::from(on.gpu.multiprocessors) { 128 } else { 64 };
        (format!("tile{height}"), 64, u64::from(m.div_ceil(height)), 0, 2 * height)
    } else {
        let width = if n <= 2 { n } else { n.next_power_of_two().min(MAX_VEC_COLUMNS) };
        let log2_lanes = log2_lanes(a, counted(width).0 * counted(width).1, on);
        (
            format!("vec{width}"),
            width,
            blocks(a.ne()[1], VEC_THREADS >> log2_lanes, ROWS_PER_GROUP),
            log2_lanes,
            VEC_THREADS,
        )
    };
    let (in_y, in_z) = counted(width);
    let [d1, d2, d3] = planes.dst;
    let args = MulMatArgs {
        k,
        m,
        n,
        log2_lanes,
        planes: count,
        b2,
        r2,
        r3,
        a: [1, 2, 3].map(|dim| stride(&shape, dim)),
        b: planes.b,
        dst: [stride(&dst, 0), d1, d2, d3],
    };
    let grid = Grid::of([in_x, in_y.min(MAX_GRID_YZ), in_z.min(MAX_GRID_YZ)], threads);
    let (stem, name) = names(&entry, a);
    on.launch((&stem, &name), grid, &[Ptr::Src(0), columns.at, Ptr::Dst], &args)
}

/// Stride of a dimension in bytes; 0 if the dimension has one element, whose stride is arbitrary. The kernel derives the
/// alignment of rows from the strides.
fn stride(shape: &Shape, dim: usize) -> u64 {
    if shape.ne[dim] == 1 { 0 } else { shape.nb[dim] }
}

fn mul_mat_id_launch(a: &TensorDesc, columns: &F32Columns, on: &NodeOnGpu<'_>) -> Result<KernelLaunch, Unsupported> {
    let (shape, b, ids, dst) = (on.shape(a)?, &columns.shape, on.shape(on.src(2)?)?, on.shape(on.dst())?);
    let ([k, m, experts, _], [used, tokens, ..]) = (shape.ne, ids.ne);
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
        a: [1, 2].map(|dim| stride(&shape, dim)),
        b: [1, 2].map(|dim| stride(b, dim)),
        dst: [0, 1, 2].map(|dim| stride(&dst, dim)),
        ids: [ids.nb[0], ids.nb[1]],
    };
    let in_x = blocks(a.ne()[1], VEC_THREADS >> log2_lanes, ROWS_PER_GROUP);
    let grid = Grid::of([in_x, u64::from(used).min(MAX_GRID_YZ), u64::from(tokens).min(MAX_GRID_YZ)], VEC_THREADS);
    let (stem, name) = names("id", a);
    let pointers = [Ptr::Src(0), columns.at, Ptr::Dst, Ptr::Src(2), Ptr::ErrorWord];
    on.launch((&stem, &name), grid, &pointers, &args)
}

/// Columns and planes of b. `shared` consecutive planes use the same plane of a (grouped queries).
struct Planes {
    n: u32,
    counts: [u32; 2],
    shared: [u32; 2],
    /// Strides in bytes of columns, planes of dimension 2, and planes of dimension 3.
    b: [u64; 3],
    dst: [u64; 3],
}

impl Planes {
    /// Folds the planes that share a plane of a into more columns of one plane, if their strides are even. a is then read once
    /// for more columns.
    fn fold(&mut self, dim: usize) {
        let shared = self.shared[dim];
        let even = |nb: &[u64; 3]| nb[dim + 1] == u64::from(self.n) * nb[0];
        let folded = self.n.checked_mul(shared).filter(|&n| i32::try_from(n).is_ok());
        let (Some(n), true) = (folded, self.n == 1 || (even(&self.b) && even(&self.dst))) else { return };
        for nb in [&mut self.b, &mut self.dst] {
            if self.n == 1 {
                nb[0] = nb[dim + 1];
            }
            nb[dim + 1] *= u64::from(shared);
        }
        self.counts[dim] /= shared;
        self.shared[dim] = 1;
        self.n = n;
    }
}

/// Binary logarithm of the number of lanes that share a row of a, if `others` blocks use each row. As few lanes as possible, so
/// that each does several steps, but enough warps in total to hide the latency of loads.
fn log2_lanes(a: &TensorDesc, others: u64, on: &NodeOnGpu<'_>) -> u32 {
    let [k, m, ..] = a.ne();
    let least = if a.dtype().block_len() > 32 { 5 } else { 2 };
    let mut log2 = (k / 32).max(1).ilog2().clamp(least, 5);
    let groups = m.div_ceil(ROWS_PER_GROUP) as u64;
    let wanted = u64::from(on.gpu.multiprocessors) * WARPS_TO_HIDE_LATENCY * 32;
    while log2 < VEC_THREADS.ilog2() && (8 << log2) < k && groups.saturating_mul(others) << log2 < wanted {
        log2 += 1;
    }
    log2
}

/// Names of the module for the type of a and of one of its entries.
fn names(entry: &str, a: &TensorDesc) -> (String, String) {
    let suffix = suffix(a.dtype());
    (format!("mul_mat_{suffix}"), format!("mul_mat_{entry}_{suffix}"))
}

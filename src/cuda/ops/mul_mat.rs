//! MUL_MAT and MUL_MAT_ID: kernels/mul_mat.cu, a module for each type of a.

use super::{Grid, Kernel, Launch, On, Ptr, Shape, THREADS, Unsupported, blocks, suffix};
use crate::ops::mul_mat::MulMat;
use crate::tensor::{Capability, DType, TensorDesc};
use bytemuck::{Pod, Zeroable};

/// Threads of a block of products with few columns; rows of a that a group of lanes shares.
const BLOCK: u32 = 128;
const ROWS: usize = 4;

/// Most blocks in y and z; the kernels repeat themselves for more.
const MOST: u64 = 65535;

/// Warps for each multiprocessor from which on rows need not be shared by more lanes.
const ENOUGH_WARPS: u64 = 16;

/// Most columns of one block without tensor cores.
const FEW: u32 = 8;

/// The least compute capability with the tensor cores that the tiled product needs.
const TENSOR_CORES: u32 = 80;

/// `struct Product` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Product {
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

/// `struct Routed` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Routed {
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

/// `struct Widen` and `struct Round` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Packing {
    b: Shape,
    stride: u64,
    /// b's type, or the elements of a group.
    number: u32,
    padding: u32,
}

pub(super) fn select(op: MulMat, on: &On<'_>) -> Result<Kernel, Unsupported> {
    let (a, b) = (on.src(0)?, on.src(1)?);
    let rounded = a.dtype().is_float() && b.dtype().is_float();
    if !a.dtype().can(Capability::Cuda) || !(b.dtype() == DType::F32 || rounded) {
        return Err(on.types());
    }
    let mut kernel = Kernel::default();
    let columns = if b.dtype() == DType::F32 && !a.dtype().is_block() {
        Columns { at: Ptr::Src(1), shape: on.shape(b)? }
    } else {
        let (launch, columns, bytes) = packed(a, b, on)?;
        kernel.launches.push(launch);
        kernel.scratch = bytes;
        columns
    };
    kernel.launches.push(if op.by_id { routed(a, &columns, on)? } else { product(a, &columns, on)? });
    Ok(kernel)
}

/// Rows of b in F32.
struct Columns {
    at: Ptr,
    shape: Shape,
}

/// b in F32, in scratch memory of so many bytes, and the launch that puts it there: from another type, or rounded as
/// llama.cpp's products with blocks on the CPU round it, so that a model's tokens are the same here as there.
fn packed(a: &TensorDesc, b: &TensorDesc, on: &On<'_>) -> Result<(Launch, Columns, u64), Unsupported> {
    let [k, n, b2, b3] = b.ne();
    // Rows at multiples of 16 bytes.
    let stride = k.next_multiple_of(4) as u64;
    let row = 4 * stride;
    let bytes = row.checked_mul(b.rows() as u64).ok_or_else(|| on.unsupported("b is too large in F32"))?;
    let nb = [4, row, row * n as u64, row * (n * b2) as u64];
    let shape = on.shape(b)?;
    let (name, number, pieces) = if a.dtype().is_block() {
        // A warp for each group.
        let group = if a.dtype().block_len() == 256 { 256 } else { 32 };
        ("mul_mat_round", group, blocks(k / group as usize, THREADS / 32, 1))
    } else {
        ("mul_mat_widen", b.dtype().to_wire(), blocks(k, THREADS, 1))
    };
    let grid = Grid::of([(n * b2 * b3) as u64, pieces.min(MOST), 1], THREADS);
    let numbers = Packing { b: shape, stride, number, padding: 0 };
    let launch = on.launch(("mul_mat", name), grid, &[Ptr::Src(1), Ptr::Scratch(0)], &numbers)?;
    Ok((launch, Columns { at: Ptr::Scratch(0), shape: Shape { nb, ..shape } }, bytes))
}

fn product(a: &TensorDesc, columns: &Columns, on: &On<'_>) -> Result<Launch, Unsupported> {
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
    let (entry, width, in_x, log2_lanes, threads) = if n > FEW && on.gpu.capability >= TENSOR_CORES {
        let large = u64::from(m.div_ceil(128)) * counted(64).0;
        let large = large.saturating_mul(counted(64).1);
        let height = if m > 64 && large >= u64::from(on.gpu.multiprocessors) { 128 } else { 64 };
        (format!("tile{height}"), 64, u64::from(m.div_ceil(height)), 0, 2 * height)
    } else {
        let width = if n <= 2 { n } else { n.next_power_of_two().min(FEW) };
        let log2_lanes = log2_lanes(a, counted(width).0 * counted(width).1, on);
        (format!("vec{width}"), width, blocks(a.ne()[1], BLOCK >> log2_lanes, ROWS), log2_lanes, BLOCK)
    };
    let (in_y, in_z) = counted(width);
    let [d1, d2, d3] = planes.dst;
    let numbers = Product {
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
    let grid = Grid::of([in_x, in_y.min(MOST), in_z.min(MOST)], threads);
    let (stem, name) = names(&entry, a);
    on.launch((&stem, &name), grid, &[Ptr::Src(0), columns.at, Ptr::Dst], &numbers)
}

/// Bytes between neighbours in a dimension; none where it has one element, and a stride that says nothing. Strides decide
/// how rows may be read.
fn stride(shape: &Shape, dim: usize) -> u64 {
    if shape.ne[dim] == 1 { 0 } else { shape.nb[dim] }
}

fn routed(a: &TensorDesc, columns: &Columns, on: &On<'_>) -> Result<Launch, Unsupported> {
    let (shape, b, ids, dst) = (on.shape(a)?, &columns.shape, on.shape(on.src(2)?)?, on.shape(on.dst())?);
    let ([k, m, experts, _], [used, tokens, ..]) = (shape.ne, ids.ne);
    let log2_lanes = log2_lanes(a, u64::from(used) * u64::from(tokens), on);
    let numbers = Routed {
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
    let in_x = blocks(a.ne()[1], BLOCK >> log2_lanes, ROWS);
    let grid = Grid::of([in_x, u64::from(used).min(MOST), u64::from(tokens).min(MOST)], BLOCK);
    let (stem, name) = names("id", a);
    let pointers = [Ptr::Src(0), columns.at, Ptr::Dst, Ptr::Src(2), Ptr::Verdict];
    on.launch((&stem, &name), grid, &pointers, &numbers)
}

/// Columns of b and its planes; of those, `shared` next to each other meet the same plane of a.
struct Planes {
    n: u32,
    counts: [u32; 2],
    shared: [u32; 2],
    /// Bytes between columns, planes of dimension 2, and planes of dimension 3.
    b: [u64; 3],
    dst: [u64; 3],
}

impl Planes {
    /// Makes the columns of the planes that share one of a into columns of one plane, if they lie evenly: a is read once
    /// for more of them.
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

/// How many lanes share rows of a, when each row meets `others` blocks: few, that go on for several steps, but enough
/// warps to hide the time of loads.
fn log2_lanes(a: &TensorDesc, others: u64, on: &On<'_>) -> u32 {
    let [k, m, ..] = a.ne();
    let least = if a.dtype().block_len() > 32 { 5 } else { 2 };
    let mut log2 = (k / 32).max(1).ilog2().clamp(least, 5);
    let groups = m.div_ceil(ROWS) as u64;
    let wanted = u64::from(on.gpu.multiprocessors) * ENOUGH_WARPS * 32;
    while log2 < BLOCK.ilog2() && (8 << log2) < k && groups.saturating_mul(others) << log2 < wanted {
        log2 += 1;
    }
    log2
}

/// The module for a's type, and one of its entries.
fn names(entry: &str, a: &TensorDesc) -> (String, String) {
    let suffix = suffix(a.dtype());
    (format!("mul_mat_{suffix}"), format!("mul_mat_{entry}_{suffix}"))
}

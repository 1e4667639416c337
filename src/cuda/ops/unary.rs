//! SQR, SQRT, SCALE, CLAMP, FILL and the kinds of UNARY: kernels/unary.cu.

use super::zip::threads;
use super::{Grid, Kernel, On, Ptr, Shape, THREADS, Unsupported, blocks};
use crate::ops::unary::{Unary, UnaryKind};
use bytemuck::{Pod, Zeroable};

/// Elements of a thread of unary_packed.
const EACH: usize = 8;

/// `struct Dense` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Dense {
    n: u64,
    op: Params,
    dtype: u32,
}

/// `struct Strided` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Strided {
    x: Shape,
    y: Shape,
    types: [u32; 2],
    op: Params,
    pieces: u32,
}

/// `struct Op` of the file: which function, and its parameters.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    which: u32,
    p: [f32; 4],
}

pub(super) fn select(op: Unary, on: &On<'_>) -> Result<Kernel, Unsupported> {
    let (x, y) = (on.src(0)?, on.dst());
    if !(x.dtype().is_float() && y.dtype().is_float()) {
        return Err(on.types());
    }
    let (op, n) = (params(op), y.elements());
    if x.dtype() == y.dtype() && x.is_contiguous() && y.is_contiguous() {
        let grid = Grid::line(blocks(n, THREADS, EACH), THREADS);
        let dense = Dense { n: n as u64, op, dtype: x.dtype().to_wire() };
        return on.kernel(("unary", "unary_packed"), grid, &[Ptr::Src(0), Ptr::Dst], &dense);
    }
    let rows = y.rows() as u64;
    if rows > i32::MAX as u64 {
        return Err(on.unsupported("2^31 or more rows that do not lie dense"));
    }
    let types = [x.dtype(), y.dtype()].map(|t| t.to_wire());
    let (threads, pieces) = threads(y.ne()[0] as u64, rows);
    let strided = Strided { x: on.shape(x)?, y: on.shape(y)?, types, op, pieces: pieces as u32 };
    let blocks = rows.div_ceil(u64::from(threads[1])) * pieces;
    let grid = Grid { blocks: [blocks, 1, 1], threads, shared: 0 };
    on.kernel(("unary", "unary_any"), grid, &[Ptr::Src(0), Ptr::Dst], &strided)
}

/// Numbers of the functions: 0 to 21 are UNARY's kinds.
fn params(op: Unary) -> Params {
    let (which, p) = match op {
        Unary::Sqr => (32, [0.0; 4]),
        Unary::Sqrt => (33, [0.0; 4]),
        Unary::Scale { scale, bias } => (34, [scale, bias, 0.0, 0.0]),
        Unary::Clamp { min, max } => (35, [min, max, 0.0, 0.0]),
        Unary::Fill { value } => (36, [value, 0.0, 0.0, 0.0]),
        Unary::Kind(kind) => {
            let p = match kind {
                UnaryKind::Xielu { alpha_n, alpha_p, beta, eps } => [alpha_n, alpha_p, beta, eps],
                _ => [0.0; 4],
            };
            (kind.wire_number() as u32, p)
        }
    };
    Params { which, p }
}

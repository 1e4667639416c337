//! Launches of SQR, SQRT, LOG, SIN, COS, SCALE, CLAMP, LEAKY_RELU, FILL and all kinds of UNARY: kernels/unary.cu.

use super::elementwise::block_shape;
use super::{Access, Grid, KernelArguments, NodeLaunches, NodeOnGpu, Ptr, Shape, THREADS, Unsupported, blocks};
use crate::ops::unary::{Unary, UnaryKind};
use bytemuck::{Pod, Zeroable};

/// Elements per thread in unary_packed.
const ELEMENTS_PER_THREAD: usize = 8;

/// `struct UnaryPackedArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct UnaryPackedArgs {
    n: u64,
    op: UnaryParams,
    dtype: u32,
}

impl KernelArguments for UnaryPackedArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        Ok(vec![Access::elements(0, self.n), Access::elements(1, self.n)])
    }
}

/// `struct UnaryAnyArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct UnaryAnyArgs {
    x: Shape,
    y: Shape,
    types: [u32; 2],
    op: UnaryParams,
    pieces: u32,
}

impl KernelArguments for UnaryAnyArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        Ok(vec![Access::shape(0, self.y.ne, self.x.nb), self.y.access(1)])
    }
}

/// `struct UnaryParams` of the file: the number of the function, and its parameters.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct UnaryParams {
    which: u32,
    p: [f32; 4],
}

pub(super) fn select(op: Unary, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (x, y) = (on.src(0)?, on.dst());
    if !(x.dtype().is_float() && y.dtype().is_float()) {
        return Err(on.unsupported_types());
    }
    let (op, n) = (params(op), y.elements());
    if x.dtype() == y.dtype() && x.is_contiguous() && y.is_contiguous() {
        let grid = Grid::line(blocks(n, THREADS, ELEMENTS_PER_THREAD), THREADS);
        let dense = UnaryPackedArgs { n: n as u64, op, dtype: x.dtype().to_wire() };
        return on.single_launch(("unary", "unary_packed"), grid, &[Ptr::Src(0), Ptr::Dst], &dense);
    }
    let rows = y.rows() as u64;
    if rows > i32::MAX as u64 {
        return Err(on.unsupported("2^31 or more rows that are not contiguous"));
    }
    let types = [x.dtype(), y.dtype()].map(|t| t.to_wire());
    let (threads, pieces) = block_shape(y.ne()[0] as u64, rows);
    let strided = UnaryAnyArgs { x: on.shape(x)?, y: on.shape(y)?, types, op, pieces: pieces as u32 };
    let blocks = rows.div_ceil(u64::from(threads[1])) * pieces;
    let grid = Grid { blocks: [blocks, 1, 1], threads, shared: 0 };
    on.single_launch(("unary", "unary_any"), grid, &[Ptr::Src(0), Ptr::Dst], &strided)
}

/// The number of a function in the kernel and its parameters. Numbers 0 to 21 are the kinds of UNARY on the wire.
fn params(op: Unary) -> UnaryParams {
    let (which, p) = match op {
        Unary::Sqr => (32, [0.0; 4]),
        Unary::Sqrt => (33, [0.0; 4]),
        Unary::Scale { scale, bias } => (34, [scale, bias, 0.0, 0.0]),
        Unary::Clamp { min, max } => (35, [min, max, 0.0, 0.0]),
        Unary::Fill { value } => (36, [value, 0.0, 0.0, 0.0]),
        Unary::Log => (37, [0.0; 4]),
        Unary::Sin => (38, [0.0; 4]),
        Unary::Cos => (39, [0.0; 4]),
        Unary::LeakyRelu { slope } => (40, [slope, 0.0, 0.0, 0.0]),
        Unary::Kind(kind) => {
            let p = match kind {
                UnaryKind::Xielu { alpha_n, alpha_p, beta, eps } => [alpha_n, alpha_p, beta, eps],
                _ => [0.0; 4],
            };
            (kind.wire_number() as u32, p)
        }
    };
    UnaryParams { which, p }
}

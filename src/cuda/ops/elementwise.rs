//! Loop nests of element-wise ops and copies: merging of dimensions as far as the strides allow, block shapes, and the
//! arguments of `elementwise` and `elementwise_any` in kernels/common/elementwise.cuh.

use super::{Access, Grid, NodeOnGpu, Shape, THREADS, Unsupported};
use crate::tensor::{DIMS, TensorDesc};
use bytemuck::{Pod, Zeroable};

/// Elements per thread in `elementwise`.
const ELEMENTS_PER_THREAD: u64 = 8;

/// Number of blocks that an H100 or H200 runs at once, four per multiprocessor. A larger grid gains no parallelism; instead,
/// each thread processes more rows and reuses the elements of b in its registers.
const RESIDENT_BLOCKS: u64 = 528;

/// Limit of rows per such thread. b is then read again only once per 32 rows, which costs 1/32 of the traffic of a for equal
/// types.
const MAX_ROWS_PER_THREAD: u64 = 32;

/// A loop over `N` tensors: its count, and the stride of each tensor in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LoopDim<const N: usize> {
    pub(super) count: u64,
    pub(super) step: [u64; N],
}

impl<const N: usize> LoopDim<N> {
    /// Whether `next` continues this loop in all tensors, so that both can be merged.
    fn continues_in(&self, next: &LoopDim<N>) -> bool {
        (0..N).all(|i| self.step[i].checked_mul(self.count) == Some(next.step[i]))
    }
}

/// Removes loops of count 1 and merges adjacent loops (fastest first) whose strides are contiguous in all tensors. Counts of
/// all loops but the first stay below 2³².
pub(super) fn merge_dims<const N: usize>(dims: impl IntoIterator<Item = LoopDim<N>>) -> Vec<LoopDim<N>> {
    let mut merged: Vec<LoopDim<N>> = Vec::new();
    for dim in dims.into_iter().filter(|dim| dim.count != 1) {
        let first = merged.len() == 1;
        match merged.last_mut() {
            Some(last) if last.continues_in(&dim) && (first || last.count * dim.count <= u64::from(u32::MAX)) => {
                last.count *= dim.count;
            }
            _ => merged.push(dim),
        }
    }
    merged
}

/// Counts of a tensor's blocks in each dimension, in the order of `ne`.
pub(super) fn block_counts(t: &TensorDesc) -> [u64; DIMS] {
    let [n0, n1, n2, n3] = t.ne();
    [t.dtype().blocks(n0), n1, n2, n3].map(|n| n as u64)
}

/// Splits a dimension of `count` blocks in which tensor `i` has only `period` blocks and is broadcast into two loops.
pub(super) fn broadcast_dims<const N: usize>(count: u64, period: u64, step: [u64; N], i: usize) -> [LoopDim<N>; 2] {
    let period = period.clamp(1, count.max(1));
    let mut outer = LoopDim { count: count / period, step: step.map(|step| step.saturating_mul(period)) };
    outer.step[i] = 0;
    [LoopDim { count: period, step }, outer]
}

/// Block shape for `rows` rows that need `pieces` threads each: x within the row, y over rows. Also returns the number of tiles
/// (blocks) per row.
pub(super) fn block_shape(pieces: u64, rows: u64) -> ([u32; 3], u64) {
    let max_threads = u64::from(THREADS);
    let tiles = pieces.div_ceil(max_threads).max(1);
    // Use whole warps with equal load; several short rows share a warp.
    let x = match pieces.div_ceil(tiles) {
        few @ 0..=32 => few.max(1).next_power_of_two(),
        many => many.next_multiple_of(32),
    };
    let y = (max_threads / x).min(rows.next_power_of_two()).max(1);
    ([x as u32, y as u32, 1], tiles)
}

/// The arguments of entries that run one of the two loop nests below with further arguments.
macro_rules! elementwise_arguments {
    ($($(#[$doc:meta])* $name:ident: $nest:ident { $($field:ident: $type:ty),+ })+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Pod, Zeroable)]
        #[repr(C)]
        struct $name {
            elementwise: $nest,
            $($field: $type,)+
        }

        impl super::KernelArguments for $name {
            fn accesses(&self, _: &super::Grid) -> Result<Vec<super::Access>, &'static str> {
                Ok(self.elementwise.accesses())
            }
        }
    )+};
}
pub(super) use elementwise_arguments;

/// `struct ElementwiseArgs` of kernels/common/elementwise.cuh.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ElementwiseArgs {
    n: u64,
    at: [u64; 2],
    a: [u64; 3],
    b: [u64; 3],
    d: [u64; 3],
    count: [u32; 3],
    tiles: u32,
    chunks: u32,
    chunk: u32,
    dense_b: u32,
    wide: u32,
}

impl ElementwiseArgs {
    /// The accesses of a, b and d, which are pointers 0 to 2.
    pub(super) fn accesses(&self) -> Vec<Access> {
        let rows = |pointer, n: u64, strides: [u64; 3]| {
            let loops = self.count.into_iter().zip(strides);
            let rows = loops.fold(Access::elements(pointer, n), |rows, (count, stride)| rows.along(count, stride));
            rows.vectors(if n == 1 { 0 } else { self.wide }, 4)
        };
        let b = if self.dense_b != 0 { self.n } else { 1 };
        vec![rows(0, self.n, self.a).at(self.at[0]), rows(1, b, self.b).at(self.at[1]), rows(2, self.n, self.d)]
    }

    /// Arguments for the elements of d, with a and b starting `at` bytes behind their pointers. `None` if the rows are not
    /// dense as `elementwise` requires.
    pub(super) fn new(a: &TensorDesc, b: &TensorDesc, d: &TensorDesc, at: [u64; 2]) -> Option<(ElementwiseArgs, Grid)> {
        let (ne, bne) = (block_counts(d), block_counts(b));
        let dims = (0..DIMS).flat_map(|k| broadcast_dims(ne[k], bne[k], [a, b, d].map(|t| t.nb()[k] as u64), 1));
        let mut dims = merge_dims(dims);
        let sizes = [a, b, d].map(|t| t.dtype().block_bytes() as u64);
        if dims.is_empty() {
            dims.push(LoopDim { count: 1, step: sizes });
        }
        let row = dims.remove(0);
        let dense_b = row.step[1] == sizes[1];
        if row.step[0] != sizes[0] || row.step[2] != sizes[2] || !(dense_b || row.step[1] == 0) || dims.len() > 3 {
            return None;
        }
        // Let each thread iterate over a dimension in which b is broadcast, if there is one.
        let broadcast = dims.iter().position(|dim| dense_b && dim.step[1] == 0);
        if let Some(broadcast) = broadcast {
            dims.swap(0, broadcast);
        }
        dims.resize(3, LoopDim { count: 1, step: [0; 3] });
        let vector = if sizes == [2; 3] { 8 } else { 4 };
        let steps = |i: usize| dims.iter().all(|dim| dim.step[i].is_multiple_of(vector * sizes[i]));
        let wide = steps(0) && (steps(1) || !dense_b) && steps(2);
        let [along, second, third] = [dims[0].count, dims[1].count, dims[2].count];
        let (threads, tiles) = block_shape(row.count.div_ceil(ELEMENTS_PER_THREAD), along);
        let once = along.div_ceil(u64::from(threads[1]));
        let others = tiles.checked_mul(second)?.checked_mul(third)?;
        let rows = if broadcast.is_some() {
            once.saturating_mul(others).div_ceil(RESIDENT_BLOCKS).clamp(1, MAX_ROWS_PER_THREAD)
        } else {
            1
        };
        let chunk = rows * u64::from(threads[1]);
        let chunks = along.div_ceil(chunk);
        // The kernel also computes the rounded-up end of the last chunk in 32 bits.
        let to_u31 = |n: u64| i32::try_from(n).ok().map(|n| n as u32);
        let step = |i: usize| [dims[0].step[i], dims[1].step[i], dims[2].step[i]];
        let elementwise = ElementwiseArgs {
            n: row.count,
            at,
            a: step(0),
            b: step(1),
            d: step(2),
            count: [to_u31(along)?, to_u31(second)?, to_u31(third)?],
            tiles: to_u31(tiles)?,
            chunks: to_u31(chunks)?,
            chunk: to_u31(chunk)?,
            dense_b: u32::from(dense_b),
            wide: u32::from(wide),
        };
        Some((elementwise, Grid { blocks: [others.checked_mul(chunks)?, 1, 1], threads, shared: 0 }))
    }
}

/// `struct ElementwiseAnyArgs` of kernels/common/elementwise.cuh.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ElementwiseAnyArgs {
    a: Shape,
    b: Shape,
    d: Shape,
    at: [u64; 2],
    types: [u32; 3],
    pieces: u32,
}

impl ElementwiseAnyArgs {
    /// The accesses of a, b and d, which are pointers 0 to 2.
    pub(super) fn accesses(&self) -> Vec<Access> {
        let a = Access::shape(0, self.d.ne, self.a.nb).at(self.at[0]);
        // b is broadcast to d, or has all of its elements and more: the first half of rows.
        let b = std::array::from_fn(|d| self.b.ne[d].min(self.d.ne[d]));
        vec![a, Access::shape(1, b, self.b.nb).at(self.at[1]), self.d.access(2)]
    }

    /// Arguments for the elements of d, with a and b starting `at` bytes behind their pointers.
    pub(super) fn new(
        on: &NodeOnGpu<'_>,
        [a, b, d]: [&TensorDesc; 3],
        at: [u64; 2],
    ) -> Result<(ElementwiseAnyArgs, Grid), Unsupported> {
        let types = [a, b, d].map(|t| t.dtype().to_wire());
        let rows = d.rows() as u64;
        let (threads, pieces) = block_shape(d.ne()[0] as u64, rows);
        if rows > i32::MAX as u64 {
            return Err(on.unsupported("2^31 or more rows that are not contiguous"));
        }
        let elementwise =
            ElementwiseAnyArgs { a: on.shape(a)?, b: on.shape(b)?, d: on.shape(d)?, at, types, pieces: pieces as u32 };
        let blocks = rows.div_ceil(u64::from(threads[1])) * pieces;
        Ok((elementwise, Grid { blocks: [blocks, 1, 1], threads, shared: 0 }))
    }
}

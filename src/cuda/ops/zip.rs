//! What element-wise ops of two tensors and copies share: dimensions merged as far as strides allow, and the arguments of
//! `zip` and `zip_any` in kernels/common/zip.cuh.

use super::{Grid, On, Shape, THREADS, Unsupported};
use crate::tensor::{DIMS, TensorDesc};
use bytemuck::{Pod, Zeroable};

/// Elements of a thread in `zip`.
const EACH: u64 = 8;

/// Blocks that are on an H100 or H200 at once, four on each multiprocessor: where there would be more, threads that keep what
/// they have read of b do more each.
const BUSY: u64 = 528;

/// Most rows of such a thread. What of b is read more than once is then 1/32 of a, of equal types.
const MOST_ROWS: u64 = 32;

/// A dimension of a loop over `N` tensors: its count, and the step of each in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dim<const N: usize> {
    pub(super) count: u64,
    pub(super) step: [u64; N],
}

impl<const N: usize> Dim<N> {
    /// Whether `next` goes on where this ends, in all tensors.
    fn continues_in(&self, next: &Dim<N>) -> bool {
        (0..N).all(|i| self.step[i].checked_mul(self.count) == Some(next.step[i]))
    }
}

/// The dimensions, fastest first, without those of count 1, and with those together that one step reaches. Counts behind the
/// first stay below 2³².
pub(super) fn merge<const N: usize>(dims: impl IntoIterator<Item = Dim<N>>) -> Vec<Dim<N>> {
    let mut merged: Vec<Dim<N>> = Vec::new();
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

/// A tensor's blocks in each dimension.
pub(super) fn block_counts(t: &TensorDesc) -> [u64; DIMS] {
    let [n0, n1, n2, n3] = t.ne();
    [t.dtype().blocks(n0), n1, n2, n3].map(|n| n as u64)
}

/// A dimension of `count` blocks in which tensor `i` has only `period`, and repeats: as two.
pub(super) fn repeated<const N: usize>(count: u64, period: u64, step: [u64; N], i: usize) -> [Dim<N>; 2] {
    let period = period.clamp(1, count.max(1));
    let mut outer = Dim { count: count / period, step: step.map(|step| step.saturating_mul(period)) };
    outer.step[i] = 0;
    [Dim { count: period, step }, outer]
}

/// Threads of a block for rows of `pieces` threads: x in the row, y over `rows` rows; and the tiles of a row.
pub(super) fn threads(pieces: u64, rows: u64) -> ([u32; 3], u64) {
    let most = u64::from(THREADS);
    let tiles = pieces.div_ceil(most).max(1);
    // Whole warps, evenly loaded; short rows share a warp.
    let x = match pieces.div_ceil(tiles) {
        few @ 0..=32 => few.max(1).next_power_of_two(),
        many => many.next_multiple_of(32),
    };
    let y = (most / x).min(rows.next_power_of_two()).max(1);
    ([x as u32, y as u32, 1], tiles)
}

/// `struct Zip`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Zip {
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

impl Zip {
    /// The arguments for d's elements, `at` bytes into a and into b, where the rows are as `zip` needs them.
    pub(super) fn new(a: &TensorDesc, b: &TensorDesc, d: &TensorDesc, at: [u64; 2]) -> Option<(Zip, Grid)> {
        let (ne, bne) = (block_counts(d), block_counts(b));
        let dims = (0..DIMS).flat_map(|k| repeated(ne[k], bne[k], [a, b, d].map(|t| t.nb()[k] as u64), 1));
        let mut dims = merge(dims);
        let sizes = [a, b, d].map(|t| t.dtype().block_bytes() as u64);
        if dims.is_empty() {
            dims.push(Dim { count: 1, step: sizes });
        }
        let row = dims.remove(0);
        let dense_b = row.step[1] == sizes[1];
        if row.step[0] != sizes[0] || row.step[2] != sizes[2] || !(dense_b || row.step[1] == 0) || dims.len() > 3 {
            return None;
        }
        // Threads go along a dimension in which b repeats, if there is one.
        let kept = dims.iter().position(|dim| dense_b && dim.step[1] == 0);
        if let Some(kept) = kept {
            dims.swap(0, kept);
        }
        dims.resize(3, Dim { count: 1, step: [0; 3] });
        let vector = if sizes == [2; 3] { 8 } else { 4 };
        let steps = |i: usize| dims.iter().all(|dim| dim.step[i].is_multiple_of(vector * sizes[i]));
        let wide = steps(0) && (steps(1) || !dense_b) && steps(2);
        let [along, second, third] = [dims[0].count, dims[1].count, dims[2].count];
        let (threads, tiles) = threads(row.count.div_ceil(EACH), along);
        let once = along.div_ceil(u64::from(threads[1]));
        let others = tiles.checked_mul(second)?.checked_mul(third)?;
        let rows = if kept.is_some() { once.saturating_mul(others).div_ceil(BUSY).clamp(1, MOST_ROWS) } else { 1 };
        let chunk = rows * u64::from(threads[1]);
        let chunks = along.div_ceil(chunk);
        // The last part's end, rounded up, is counted in 32 bits too.
        let small = |n: u64| i32::try_from(n).ok().map(|n| n as u32);
        let step = |i: usize| [dims[0].step[i], dims[1].step[i], dims[2].step[i]];
        let zip = Zip {
            n: row.count,
            at,
            a: step(0),
            b: step(1),
            d: step(2),
            count: [small(along)?, small(second)?, small(third)?],
            tiles: small(tiles)?,
            chunks: small(chunks)?,
            chunk: small(chunk)?,
            dense_b: u32::from(dense_b),
            wide: u32::from(wide),
        };
        Some((zip, Grid { blocks: [others.checked_mul(chunks)?, 1, 1], threads, shared: 0 }))
    }
}

/// `struct ZipAny`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ZipAny {
    a: Shape,
    b: Shape,
    d: Shape,
    at: [u64; 2],
    types: [u32; 3],
    pieces: u32,
}

impl ZipAny {
    /// The arguments for d's elements, `at` bytes into a and into b.
    pub(super) fn new(on: &On<'_>, [a, b, d]: [&TensorDesc; 3], at: [u64; 2]) -> Result<(ZipAny, Grid), Unsupported> {
        let types = [a, b, d].map(|t| t.dtype().to_wire());
        let rows = d.rows() as u64;
        let (threads, pieces) = threads(d.ne()[0] as u64, rows);
        if rows > i32::MAX as u64 {
            return Err(on.unsupported("2^31 or more rows that do not lie dense"));
        }
        let zip = ZipAny { a: on.shape(a)?, b: on.shape(b)?, d: on.shape(d)?, at, types, pieces: pieces as u32 };
        let blocks = rows.div_ceil(u64::from(threads[1])) * pieces;
        Ok((zip, Grid { blocks: [blocks, 1, 1], threads, shared: 0 }))
    }
}

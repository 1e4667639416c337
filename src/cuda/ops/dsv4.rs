//! Launches of LIGHTNING_INDEXER, DSV4_HC_COMB, DSV4_HC_PRE and DSV4_HC_POST: kernels/dsv4.cu.

use super::{
    Access, Grid, KernelArguments, NodeLaunches, NodeOnGpu, Ptr, THREADS, Unsupported, blocks, saturating_product,
};
use crate::ops::dsv4::{Dsv4, STREAMS};
use crate::tensor::DType::{F16, F32};
use bytemuck::{Pod, Zeroable};

/// Cells per block of the indexer.
const KEYS: u32 = 32;
/// Warps per block of the indexer.
const WARPS: u32 = 8;
/// Most elements of a query.
const MAX_WIDTH: u32 = 256;
/// `struct HcCombArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct HcCombArgs {
    mixes: [u64; 2],
    scale: u64,
    base: u64,
    y: [u64; 3],
    tokens: u32,
    iterations: u32,
    eps: f32,
    padding: u32,
}

impl KernelArguments for HcCombArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let (n, mixes) = (STREAMS as u32, ((2 + STREAMS) * STREAMS) as u32);
        let y = Access::one(3).along(n, self.y[0]).along(n, self.y[1]);
        Ok(vec![
            Access::one(0).along(mixes, self.mixes[0]).along(self.tokens, self.mixes[1]),
            Access::one(1).along(3u32, self.scale),
            Access::one(2).along(mixes, self.base),
            y.along(self.tokens, self.y[2]),
        ])
    }
}

/// `struct HcPreArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct HcPreArgs {
    x: [u64; 3],
    weights: [u64; 3],
    y: [u64; 2],
    n: u32,
    streams: u32,
    scale: f32,
    gated: u32,
    pieces: u32,
    padding: u32,
}

impl KernelArguments for HcPreArgs {
    fn accesses(&self, grid: &Grid) -> Result<Vec<Access>, &'static str> {
        let tokens = grid.blocks[0] / u64::from(self.pieces.max(1));
        let source = |pointer, nb: [u64; 3]| {
            Access::one(pointer).along(self.n, nb[0]).along(self.streams, nb[1]).along(tokens, nb[2])
        };
        let y = Access::one(2).along(self.n, self.y[0]).along(tokens, self.y[1]);
        Ok(vec![source(0, self.x), source(1, self.weights), y])
    }
}

/// `struct HcPostArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct HcPostArgs {
    x: [u64; 2],
    residual: [u64; 3],
    post: [u64; 2],
    comb: [u64; 3],
    y: [u64; 3],
    n: u32,
    streams: u32,
    pieces: u32,
    padding: u32,
}

impl KernelArguments for HcPostArgs {
    fn accesses(&self, grid: &Grid) -> Result<Vec<Access>, &'static str> {
        let tokens = grid.blocks[0] / saturating_product(&[self.pieces, self.streams]).max(1);
        let streams = |pointer, n, nb: [u64; 3]| {
            Access::one(pointer).along(n, nb[0]).along(self.streams, nb[1]).along(tokens, nb[2])
        };
        Ok(vec![
            Access::one(0).along(self.n, self.x[0]).along(tokens, self.x[1]),
            streams(1, self.n, self.residual),
            Access::one(2).along(self.streams, self.post[0]).along(tokens, self.post[1]),
            streams(3, self.streams, self.comb),
            streams(4, self.n, self.y),
        ])
    }
}

/// `struct IndexerArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct IndexerArgs {
    q: [u64; 3],
    k: [u64; 2],
    weights: [u64; 2],
    mask: [u64; 2],
    y: [u64; 2],
    width: u32,
    heads: u32,
    tokens: u32,
    cells: u32,
    mask_batches: u32,
    k_type: u32,
    tiles: u32,
    padding: u32,
}

impl KernelArguments for IndexerArgs {
    fn accesses(&self, grid: &Grid) -> Result<Vec<Access>, &'static str> {
        let batches = grid.blocks[0] / saturating_product(&[self.tiles, self.tokens]).max(1);
        let rows = |pointer, n, rows, nb: [u64; 2], batches: u64| {
            Access::run(pointer, &[n]).along(rows, nb[0]).along(batches, nb[1])
        };
        let q = Access::run(0, &[self.width]).along(self.heads, self.q[0]).along(self.tokens, self.q[1]);
        Ok(vec![
            q.along(batches, self.q[2]),
            rows(1, self.width, self.cells, self.k, batches),
            rows(2, self.heads, self.tokens, self.weights, batches),
            rows(3, self.cells, self.tokens, self.mask, batches.min(self.mask_batches.into())),
            rows(4, self.cells, self.tokens, self.y, batches),
        ])
    }
}

pub(super) fn select(op: Dsv4, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    match op {
        Dsv4::LightningIndexer => indexer(on),
        Dsv4::HcComb { eps, iterations } => comb(on, eps, iterations),
        Dsv4::HcPre { scale, gated } => pre(on, scale, gated),
        Dsv4::HcPost => post(on),
    }
}

fn comb(on: &NodeOnGpu<'_>, eps: f32, iterations: u32) -> Result<NodeLaunches, Unsupported> {
    let [mixes, scale, base, y] =
        [on.shape(on.src(0)?)?, on.shape(on.src(1)?)?, on.shape(on.src(2)?)?, on.shape(on.dst())?];
    let args = HcCombArgs {
        mixes: [mixes.nb[0], mixes.nb[1]],
        scale: scale.nb[0],
        base: base.nb[0],
        y: [y.nb[0], y.nb[1], y.nb[2]],
        tokens: y.ne[2],
        iterations,
        eps,
        padding: 0,
    };
    // Blocks of one warp: each thread works for long, and there are few tokens.
    let grid = Grid::line(u64::from(y.ne[2]).div_ceil(32), 32);
    let loops = [y.ne[2].into(), iterations.into(), 100];
    on.looping_launch(
        ("dsv4", "dsv4_hc_comb"),
        grid,
        (&[Ptr::Src(0), Ptr::Src(1), Ptr::Src(2), Ptr::Dst], &args),
        loops,
    )
}

fn pre(on: &NodeOnGpu<'_>, scale: f32, gated: bool) -> Result<NodeLaunches, Unsupported> {
    let [x, weights, y] = [on.shape(on.src(0)?)?, on.shape(on.src(1)?)?, on.shape(on.dst())?];
    let [w0, w1, w2, _] = weights.nb;
    let pieces = blocks(y.ne[0] as usize, THREADS, 1);
    let args = HcPreArgs {
        x: [x.nb[0], x.nb[1], x.nb[2]],
        weights: if gated { [w0, w1, w2] } else { [0, w0, w1] },
        y: [y.nb[0], y.nb[1]],
        n: y.ne[0],
        streams: x.ne[1],
        scale,
        gated: gated.into(),
        pieces: pieces as u32,
        padding: 0,
    };
    let grid = Grid::line(pieces.saturating_mul(y.ne[1].into()), THREADS);
    let loops = [on.dst().elements() as u64, x.ne[1].into(), 8];
    on.looping_launch(("dsv4", "dsv4_hc_pre"), grid, (&[Ptr::Src(0), Ptr::Src(1), Ptr::Dst], &args), loops)
}

fn post(on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let [x, residual, post, y] =
        [on.shape(on.src(0)?)?, on.shape(on.src(1)?)?, on.shape(on.src(2)?)?, on.shape(on.dst())?];
    let comb = on.node.srcs.get(3).map(|comb| on.shape(comb)).transpose()?;
    let three = |nb: [u64; 4]| [nb[0], nb[1], nb[2]];
    let pieces = blocks(y.ne[0] as usize, THREADS, 1);
    let args = HcPostArgs {
        x: [x.nb[0], x.nb[1]],
        residual: three(residual.nb),
        post: [post.nb[0], post.nb[1]],
        comb: comb.map_or([0; 3], |comb| three(comb.nb)),
        y: three(y.nb),
        n: y.ne[0],
        streams: y.ne[1],
        pieces: pieces as u32,
        padding: 0,
    };
    let grid = Grid::line(pieces.saturating_mul(saturating_product(&y.ne[1..3])), THREADS);
    let comb = if comb.is_some() { Ptr::Src(3) } else { Ptr::Null };
    let pointers = [Ptr::Src(0), Ptr::Src(1), Ptr::Src(2), comb, Ptr::Dst];
    let loops = [on.dst().elements() as u64, residual.ne[1].into(), 8];
    on.looping_launch(("dsv4", "dsv4_hc_post"), grid, (&pointers, &args), loops)
}

fn indexer(on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (k, mask) = (on.src(1)?, on.src(3)?);
    if !k.dtype().is_float() || mask.dtype() != F16 || on.dst().dtype() != F32 {
        return Err(on.unsupported_types());
    }
    let k_type = k.dtype().to_wire();
    let [q, k, weights, mask, y] =
        [on.shape(on.src(0)?)?, on.shape(k)?, on.shape(on.src(2)?)?, on.shape(mask)?, on.shape(on.dst())?];
    let [width, heads, tokens, batches] = q.ne;
    if width > MAX_WIDTH {
        return Err(on.unsupported("queries of more than 256 elements"));
    }
    let (cells, outer) = (k.ne[2], |nb: [u64; 4]| [nb[1], nb[3]]);
    let tiles = cells.div_ceil(KEYS);
    let args = IndexerArgs {
        q: [q.nb[1], q.nb[2], q.nb[3]],
        k: [k.nb[2], k.nb[3]],
        weights: outer(weights.nb),
        mask: outer(mask.nb),
        y: outer(y.nb),
        width,
        heads,
        tokens,
        cells,
        mask_batches: mask.ne[3].max(1),
        k_type,
        tiles,
        padding: 0,
    };
    let blocks = saturating_product(&[tiles, tokens, batches]);
    let grid = Grid { blocks: [blocks, 1, 1], threads: [KEYS, WARPS, 1], shared: 0 };
    let pointers = [Ptr::Src(0), Ptr::Src(1), Ptr::Src(2), Ptr::Src(3), Ptr::Dst];
    // A thread has a key and a part of the heads.
    let passes = u64::from(heads.div_ceil(WARPS)) * u64::from(width);
    let loops = [on.dst().elements() as u64 * u64::from(WARPS), passes, 2];
    on.looping_launch(("dsv4", "dsv4_indexer"), grid, (&pointers, &args), loops)
}

#[cfg(test)]
mod tests {
    use super::super::kernel_constants::assert_constants;
    use super::*;

    #[test]
    fn constants_are_those_of_the_kernels() {
        let expected = [
            ("KEYS", u64::from(KEYS)),
            ("WARPS", u64::from(WARPS)),
            ("MAX_WIDTH", u64::from(MAX_WIDTH)),
            ("STREAMS", STREAMS as u64),
        ];
        assert_constants(include_str!("../../../kernels/dsv4.cu"), &expected);
    }
}

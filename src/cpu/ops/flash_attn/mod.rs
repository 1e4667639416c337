//! FLASH_ATTN_EXT: online softmax over blocks of positions, all in f32.
//!
//! A tile is a set of queries (tokens by heads) that share one head of K and one of V, so that each block of both is read once
//! for all of them. A tile of few queries, as in decoding, reads K and V in place ([`few_queries`]). A tile of many queries
//! converts each block and runs its vectors along the queries ([`many_queries`]). If there are few tiles, the positions are
//! split as well (flash decoding); the partial results are merged in shared scratch by their maxima. A tile is split between tokens
//! whose masks hide different blocks ([`mask`]).

mod few_queries;
mod many_queries;
mod mask;

use super::{Kernel, bounded, empty_sum, math, unsupported_types};
use crate::cpu::memory::View;
use crate::cpu::pool::KernelContext;
use crate::cpu::simd::attention_gemm::{AttentionGemm, COLUMN_MULTIPLE};
use crate::cpu::simd::multiversion;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::flash_attn::FlashAttn;
use crate::tensor::DType::{F16, F32};
use crate::tensor::quant::{Dequantise, dequantiser};
use mask::{Masks, TilePieces};
use std::ops::Range;

/// Positions that are converted and scored at a time. `KvCells::BLOCK` of the batching of sequences is the same: attention skips blocks
/// of other sequences if each sequence has whole ones.
const BLOCK: usize = 64;

/// Most queries, and so tokens, of a tile (a bit each in [`TilePieces`]): their data and one block of K or V fit the L2
/// cache.
const MAX_TILE_QUERIES: usize = 64;

/// Most queries with which a tile reads K and V in place.
const FEW_QUERIES: usize = 8;

/// Number of tiles below which positions are split.
const SPLIT_BELOW_TILES: usize = 64;

/// Fewest positions of a part.
const MIN_PART_POSITIONS: usize = 256;

/// Most products of a part with all queries of a tile: some tenths of a second. Contexts of models are one part, because parts
/// need memory for their results.
const MAX_PRODUCTS: usize = 1 << 34;

/// Cost of the exponential, the mask and the maximum of one score, in products.
const SCORE_COST: usize = 64;

/// Most elements of a head of K or V.
const MAX_WIDTH: usize = 1 << 14;

/// The mask value, and the score, of a masked position.
const MASKED: f32 = f32::NEG_INFINITY;

pub(super) fn select(op: FlashAttn, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let src = |i| node.srcs.get(i);
    let (Some(q), Some(k), Some(v)) = (src(0), src(1), src(2)) else { return Err(unsupported_types(node)) };
    let (Some(from_k), Some(from_v)) = (dequantiser(k.dtype()), dequantiser(v.dtype())) else {
        return Err(unsupported_types(node));
    };
    if q.dtype() != F32 || node.dst.dtype() != F32 || src(3).is_some_and(|mask| mask.dtype() != F16) {
        return Err(unsupported_types(node));
    }
    if k.is_empty() {
        return Ok(empty_sum(node));
    }
    bounded(node.op.code(), "elements of a head", k.ne()[0].max(v.ne()[0]), MAX_WIDTH)?;
    let plan = AttentionPlan::new(op, q.ne(), k.ne(), v.ne(), from_k, from_v);
    let cost = q.elements().saturating_mul(plan.positions).saturating_mul(2);
    let (local, shared, syncs) = (plan.local(), plan.shared(), usize::from(plan.parts > 1));
    Ok(Kernel::new(cost, move |w| plan.run(w)).with_local(local).with_shared(shared).with_syncs(syncs))
}

/// Shapes, and the division of the work into tiles and parts.
struct AttentionPlan {
    op: FlashAttn,
    from_k: Dequantise,
    from_v: Dequantise,
    dk: usize,
    dv: usize,
    tokens: usize,
    heads: usize,
    batches: usize,
    positions: usize,
    /// Heads of Q per head of K.
    per_k: usize,
    /// Heads of Q per head of V.
    per_v: usize,
    /// Consecutive heads of Q that share a head of K and a head of V.
    group: usize,
    /// Heads of Q in a tile.
    tile_heads: usize,
    /// Tokens of a tile.
    tile_tokens: usize,
    /// Number of parts into which the positions are split.
    parts: usize,
    /// Positions of each part but the last.
    part: usize,
}

/// The queries of one tile: `heads` by `tokens`, heads fastest.
struct QueryTile {
    batch: usize,
    heads: Range<usize>,
    tokens: Range<usize>,
}

impl QueryTile {
    fn queries(&self) -> usize {
        self.heads.len() * self.tokens.len()
    }

    /// Token and head of query `r`.
    fn query(&self, r: usize) -> (usize, usize) {
        (self.tokens.start + r / self.heads.len(), self.heads.start + r % self.heads.len())
    }
}

/// Progress of one query's online softmax.
#[derive(Clone, Copy)]
struct OnlineSoftmax {
    /// Largest score so far; all weights are relative to it.
    top: f32,
    /// Sum of the weights.
    total: f64,
}

impl OnlineSoftmax {
    const NONE: OnlineSoftmax = OnlineSoftmax { top: MASKED, total: 0.0 };
}

/// A worker's scratch.
struct AttentionScratch<'a> {
    /// The scaled queries of the tile.
    q: &'a mut [f32],
    /// A block of K, later of V.
    block: &'a mut [f32],
    /// Scores of a block, later the weights.
    scores: &'a mut [f32],
    /// Weighted sums of V.
    acc: &'a mut [f32],
    /// Mask values of a block.
    mask: &'a mut [f32],
    sums: [OnlineSoftmax; MAX_TILE_QUERIES],
}

impl AttentionPlan {
    fn new(
        op: FlashAttn,
        q: [usize; 4],
        k: [usize; 4],
        v: [usize; 4],
        from_k: Dequantise,
        from_v: Dequantise,
    ) -> AttentionPlan {
        let [dk, tokens, heads, batches] = q;
        let per = |n: usize| (heads / n.max(1)).max(1);
        let (per_k, per_v) = (per(k[2]), per(v[2]));
        let group = common_divisor(per_k, per_v);
        let tile_heads = group.div_ceil(group.div_ceil(MAX_TILE_QUERIES));
        let tile_tokens = (MAX_TILE_QUERIES / tile_heads).min(tokens).max(1);
        let mut plan = AttentionPlan {
            op,
            from_k,
            from_v,
            dk,
            dv: v[0],
            tokens,
            heads,
            batches,
            positions: k[1],
            per_k,
            per_v,
            group,
            tile_heads,
            tile_tokens,
            parts: 1,
            part: k[1].max(1),
        };
        if plan.tiles() < SPLIT_BELOW_TILES {
            let parts = SPLIT_BELOW_TILES.div_ceil(plan.tiles().max(1)).min(k[1] / MIN_PART_POSITIONS).max(1);
            plan.part = k[1].div_ceil(parts).next_multiple_of(BLOCK).max(BLOCK);
        }
        // Of a context of millions of positions, a part with all queries of a tile would take seconds.
        let products = plan.tile_heads * plan.tile_tokens * (dk + v[0] + SCORE_COST);
        plan.part = plan.part.min((MAX_PRODUCTS / products / BLOCK).max(1) * BLOCK);
        plan.parts = k[1].div_ceil(plan.part).max(1);
        plan
    }

    fn tiles(&self) -> usize {
        self.batches * (self.heads / self.group) * self.tiles_per_group() * self.tokens.div_ceil(self.tile_tokens)
    }

    fn tiles_per_group(&self) -> usize {
        self.group.div_ceil(self.tile_heads)
    }

    /// Tile `i`; tokens vary fastest, so that neighbouring tiles read the same heads of K and V.
    fn tile(&self, i: usize) -> QueryTile {
        let (columns, per_group) = (self.tokens.div_ceil(self.tile_tokens), self.tiles_per_group());
        let (token, rest) = (i % columns * self.tile_tokens, i / columns);
        let (piece, rest) = (rest % per_group * self.tile_heads, rest / per_group);
        let groups = self.heads / self.group;
        let (start, batch) = (rest % groups * self.group, rest / groups);
        QueryTile {
            batch,
            heads: start + piece..start + (piece + self.tile_heads).min(self.group),
            tokens: token..(token + self.tile_tokens).min(self.tokens),
        }
    }

    /// Floats of a worker's scratch. Saturates for shapes that fit no memory.
    fn local(&self) -> usize {
        let (queries, widest) = (self.tile_heads * self.tile_tokens, self.dk.max(self.dv));
        let queries = if queries <= FEW_QUERIES { queries } else { queries.next_multiple_of(COLUMN_MULTIPLE) };
        let rows = [(queries, self.dk), (BLOCK, widest), (queries, BLOCK), (queries, self.dv), (queries, BLOCK)];
        rows.iter().fold(0usize, |sum, &(n, width)| sum.saturating_add(n.saturating_mul(width)))
    }

    /// Bytes of shared scratch for the partial results: the weighted sum, the maximum and the sum of the weights of each query
    /// and part.
    fn shared(&self) -> usize {
        if self.parts == 1 {
            return 0;
        }
        let rows = self.batches * self.tokens * self.heads;
        rows.saturating_mul(self.parts).saturating_mul((self.dv + 2) * 4)
    }

    fn run(&self, ctx: &mut KernelContext<'_>) {
        let queries = self.tile_heads * self.tile_tokens;
        let queries = if queries <= FEW_QUERIES { queries } else { queries.next_multiple_of(COLUMN_MULTIPLE) };
        let (q, rest) = ctx.take_local_scratch().split_at_mut(queries * self.dk);
        let (block, rest) = rest.split_at_mut(BLOCK * self.dk.max(self.dv));
        let (scores, rest) = rest.split_at_mut(queries * BLOCK);
        let (acc, mask) = rest.split_at_mut(queries * self.dv);
        let mut scratch =
            AttentionScratch { q, block, scores, acc, mask, sums: [OnlineSoftmax::NONE; MAX_TILE_QUERIES] };
        for items in ctx.chunks(self.tiles() * self.parts, 1) {
            for item in items {
                let (mut tile, part) = (self.tile(item / self.parts), item % self.parts);
                let positions = part * self.part..((part + 1) * self.part).min(self.positions);
                let tokens = tile.tokens.clone();
                let TilePieces { mut starts, seeing } = Masks::new(self, ctx.optional_src(3)).pieces(&tile, &positions);
                while starts != 0 {
                    let first = starts.trailing_zeros();
                    tile.tokens.start = tokens.start + first as usize;
                    starts &= starts - 1;
                    tile.tokens.end = (tokens.start + starts.trailing_zeros() as usize).min(tokens.end);
                    if self.parts > 1 && seeing >> first << (64 - tile.tokens.len()) == 0 {
                        self.see_nothing(ctx, &tile, part);
                    } else {
                        self.attend(ctx, &tile, part, &positions, &mut scratch);
                    }
                }
            }
        }
        if self.parts > 1 {
            ctx.sync();
            self.merge(ctx, &mut scratch.acc[..self.dv]);
        }
    }

    /// Attention of the queries of a tile to `positions`, the positions of a part: writes their results, or partial results if
    /// there are several parts.
    fn attend(
        &self,
        ctx: &KernelContext<'_>,
        tile: &QueryTile,
        part: usize,
        positions: &Range<usize>,
        scratch: &mut AttentionScratch<'_>,
    ) {
        let queries = tile.queries();
        if queries <= FEW_QUERIES {
            self.attend_few_queries(ctx, tile, positions, scratch);
        } else {
            self.attend_many_queries(ctx, tile, positions, scratch);
        }
        for r in 0..queries {
            let ((token, head), sums) = (tile.query(r), scratch.sums[r]);
            let acc = if queries <= FEW_QUERIES {
                &mut scratch.acc[r * self.dv..(r + 1) * self.dv]
            } else {
                // Queries are columns: the row of the query is gathered in the block's buffer.
                let row = &mut scratch.block[..self.dv];
                let lines = scratch.acc.chunks_exact(queries.next_multiple_of(COLUMN_MULTIPLE));
                for (x, line) in row.iter_mut().zip(lines) {
                    *x = line[r];
                }
                row
            };
            if self.parts == 1 {
                self.finish(ctx, [head, token, tile.batch], acc, sums);
            } else {
                let at = self.shared_at((tile.batch * self.tokens + token) * self.heads + head, part);
                ctx.shared().write(at, acc);
                ctx.shared().write(at + self.dv * 4, &[sums.top, sums.total as f32]);
            }
        }
    }

    /// The partial results of a tile whose queries see none of the positions of a part, as positions of other sequences: maxima and sums of
    /// the weights alone, since [`AttentionPlan::merge`] reads no values where the sum is 0.
    fn see_nothing(&self, ctx: &KernelContext<'_>, tile: &QueryTile, part: usize) {
        for (token, head) in (0..tile.queries()).map(|r| tile.query(r)) {
            let at = self.shared_at((tile.batch * self.tokens + token) * self.heads + head, part);
            ctx.shared().write(at + self.dv * 4, &[OnlineSoftmax::NONE.top, 0.0]);
        }
    }

    /// Byte offset in shared scratch of the partial result of a row and a part.
    fn shared_at(&self, row: usize, part: usize) -> usize {
        (row * self.parts + part) * (self.dv + 2) * 4
    }

    /// The factor on Q. With a softcap, scores are divided by the softcap first.
    fn scale(&self) -> f32 {
        if self.op.softcap == 0.0 { self.op.scale } else { self.op.scale / self.op.softcap }
    }

    /// Applies the softcap to the scores.
    fn cap(&self, scores: &mut [f32]) {
        if self.op.softcap != 0.0 {
            cap_scores(scores, self.op.softcap);
        }
    }

    /// Merges the partial results of each query.
    fn merge(&self, ctx: &KernelContext<'_>, acc: &mut [f32]) {
        for rows in ctx.chunks(self.batches * self.tokens * self.heads, 4) {
            for row in rows {
                let part = |p| ctx.shared().read::<f32>(self.shared_at(row, p), self.dv + 2).split_at(self.dv);
                let mut sums = OnlineSoftmax::NONE;
                for p in 0..self.parts {
                    sums.top = sums.top.max(part(p).1[0]);
                }
                acc.fill(0.0);
                for p in 0..self.parts {
                    let (values, [top, total]) = part(p) else { continue };
                    if *total == 0.0 {
                        continue;
                    }
                    let weight = if *top == MASKED { 1.0 } else { math::exp(top - sums.top) };
                    sums.total += f64::from(weight * total);
                    for (acc, value) in acc.iter_mut().zip(values) {
                        *acc += weight * value;
                    }
                }
                let (head, rest) = (row % self.heads, row / self.heads);
                self.finish(ctx, [head, rest % self.tokens, rest / self.tokens], acc, sums);
            }
        }
    }

    /// Divides by the sum of the weights, including the attention sink, and writes the row.
    fn finish(&self, ctx: &KernelContext<'_>, [head, token, batch]: [usize; 3], acc: &mut [f32], sums: OnlineSoftmax) {
        let (mut factor, mut total) = (1.0, sums.total);
        if let Some(sinks) = ctx.optional_src(4) {
            let mut sink = [0.0];
            sinks.load([head, 0, 0, 0], &mut sink);
            let top = sums.top.max(sink[0]);
            factor = if sums.top == MASKED { 1.0 } else { math::exp(sums.top - top) };
            total = total * f64::from(factor) + f64::from(math::exp(sink[0] - top));
        }
        if sums.total == 0.0 {
            acc.fill(0.0);
        } else {
            let factor = (f64::from(factor) / total) as f32;
            for x in acc.iter_mut() {
                *x *= factor;
            }
        }
        ctx.dst().store([0, head, token, batch], acc);
    }
}

multiversion! {
    /// `cap * tanh(s)` of each score.
    fn cap_scores<'a>(scores: &'a mut [f32], cap: f32) {
        math::update(scores, |s| cap * math::tanh(s));
    }
}

/// `positions` of a plane of K or V as f32: vectorised for F16 and F32, otherwise dequantised row by row.
fn convert(t: &View<'_>, from: Dequantise, positions: &Range<usize>, plane: [usize; 2], block: &mut [f32]) {
    if let Some(rows) = t.rows([positions.start, plane[0], plane[1]], positions.len()) {
        return AttentionGemm::get().to_f32(block, &rows);
    }
    for (position, row) in positions.clone().zip(block.chunks_exact_mut(t.ne()[0])) {
        from(t.row([position, plane[0], plane[1]]), row);
    }
}

/// Whether no value is infinite or NaN.
fn all_finite(x: &[f32]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    x.chunks(256).all(|x| !x.iter().fold(false, |bad, x| bad | (x.to_bits() & EXPONENT == EXPONENT)))
}

fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_many_queries_are_short() {
        let op = FlashAttn { scale: 1.0, max_bias: 0.0, softcap: 0.0, f32_accumulation: true, n_kv_max: 0 };
        let convert = dequantiser(F16).unwrap();
        for (positions, width, want) in [(4096, 128, 1), (1 << 19, 128, 1), (1 << 23, 128, 11), (1 << 15, MAX_WIDTH, 5)]
        {
            let (q, kv) = ([width, 512, 32, 1], [width, positions, 8, 1]);
            let plan = AttentionPlan::new(op, q, kv, kv, convert, convert);
            assert_eq!(plan.parts, want, "{positions} positions of {width} elements");
            assert!(plan.tile_heads * plan.tile_tokens * plan.part * (2 * width + SCORE_COST) <= MAX_PRODUCTS);
        }
    }
}

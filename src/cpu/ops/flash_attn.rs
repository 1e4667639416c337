//! FLASH_ATTN_EXT: online softmax over blocks of positions, everything in f32.
//!
//! A tile is a few queries (tokens by heads) that share one head of k and one of v, so that each block of both is
//! converted to f32 once for all of them. Where tiles are few, as in decoding, the positions are split as well; the
//! parts meet in shared scratch and are merged with their maxima.

use super::{Kernel, alibi_slope, math, types};
use crate::cpu::memory::View;
use crate::cpu::pool::Work;
use crate::cpu::simd::vec::Products;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::flash_attn::FlashAttn;
use crate::tensor::DType::{F16, F32};
use crate::tensor::quant::{Dequantise, dequantiser};
use std::ops::Range;

/// Positions that are converted and scored at a time.
const BLOCK: usize = 64;

/// Most queries of a tile: with the blocks of k and v, their rows stay in the second cache level.
const QUERIES: usize = 32;

/// Tiles below which positions are split, and the fewest positions that are worth a part.
const ENOUGH_TILES: usize = 64;
const LEAST_PART: usize = 256;

const MASKED: f32 = f32::NEG_INFINITY;

pub(super) fn select(op: FlashAttn, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let src = |i| node.srcs.get(i);
    let (Some(q), Some(k), Some(v)) = (src(0), src(1), src(2)) else { return Err(types(node)) };
    let (Some(from_k), Some(from_v)) = (dequantiser(k.dtype()), dequantiser(v.dtype())) else {
        return Err(types(node));
    };
    if q.dtype() != F32 || node.dst.dtype() != F32 || src(3).is_some_and(|mask| mask.dtype() != F16) {
        return Err(types(node));
    }
    let plan = Plan::new(op, q.ne(), k.ne(), v.ne(), from_k, from_v);
    let cost = q.elements().saturating_mul(plan.positions).saturating_mul(2);
    let (local, shared, syncs) = (plan.local(), plan.shared(), usize::from(plan.parts > 1));
    Ok(Kernel::new(cost, move |w| plan.run(w)).with_local(local).with_shared(shared).with_syncs(syncs))
}

/// Shapes, and how the work is divided.
struct Plan {
    op: FlashAttn,
    from_k: Dequantise,
    from_v: Dequantise,
    dk: usize,
    dv: usize,
    tokens: usize,
    heads: usize,
    batches: usize,
    positions: usize,
    /// Heads of q per head of k, and per head of v.
    per_k: usize,
    per_v: usize,
    /// Consecutive heads that share both.
    group: usize,
    /// Heads and tokens of a tile.
    tile_heads: usize,
    tile_tokens: usize,
    /// Parts that the positions are split into, and positions of each but the last.
    parts: usize,
    part: usize,
}

/// The queries of one tile: `heads` by `tokens`, heads fastest.
struct Tile {
    batch: usize,
    heads: Range<usize>,
    tokens: Range<usize>,
}

impl Tile {
    fn queries(&self) -> usize {
        self.heads.len() * self.tokens.len()
    }

    /// Token and head of query `r`.
    fn query(&self, r: usize) -> (usize, usize) {
        (self.tokens.start + r / self.heads.len(), self.heads.start + r % self.heads.len())
    }
}

/// How much of a row's softmax is done.
#[derive(Clone, Copy)]
struct Sums {
    /// Largest score so far, which all weights are relative to.
    top: f32,
    /// Sum of the weights.
    total: f64,
}

impl Sums {
    const NONE: Sums = Sums { top: MASKED, total: 0.0 };
}

/// A worker's scratch.
struct Scratch<'a> {
    q: &'a mut [f32],
    /// A block of k, then of v.
    block: &'a mut [f32],
    scores: &'a mut [f32],
    acc: &'a mut [f32],
    sums: [Sums; QUERIES],
}

impl Plan {
    fn new(op: FlashAttn, q: [usize; 4], k: [usize; 4], v: [usize; 4], from_k: Dequantise, from_v: Dequantise) -> Plan {
        let [dk, tokens, heads, batches] = q;
        let per = |n: usize| (heads / n.max(1)).max(1);
        let (per_k, per_v) = (per(k[2]), per(v[2]));
        let group = common_divisor(per_k, per_v);
        let tile_heads = group.div_ceil(group.div_ceil(QUERIES));
        let tile_tokens = (QUERIES / tile_heads).min(tokens).max(1);
        let mut plan = Plan {
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
        if plan.tiles() < ENOUGH_TILES {
            let parts = ENOUGH_TILES.div_ceil(plan.tiles().max(1)).min(k[1] / LEAST_PART).max(1);
            plan.part = k[1].div_ceil(parts).next_multiple_of(BLOCK).max(BLOCK);
            plan.parts = k[1].div_ceil(plan.part).max(1);
        }
        plan
    }

    fn tiles(&self) -> usize {
        self.batches * (self.heads / self.group) * self.tiles_per_group() * self.tokens.div_ceil(self.tile_tokens)
    }

    fn tiles_per_group(&self) -> usize {
        self.group.div_ceil(self.tile_heads)
    }

    /// Tile `i`; tokens fastest, so that neighbours read the same heads of k and v.
    fn tile(&self, i: usize) -> Tile {
        let (columns, per_group) = (self.tokens.div_ceil(self.tile_tokens), self.tiles_per_group());
        let (token, rest) = (i % columns * self.tile_tokens, i / columns);
        let (piece, rest) = (rest % per_group * self.tile_heads, rest / per_group);
        let groups = self.heads / self.group;
        let (start, batch) = (rest % groups * self.group, rest / groups);
        Tile {
            batch,
            heads: start + piece..start + (piece + self.tile_heads).min(self.group),
            tokens: token..(token + self.tile_tokens).min(self.tokens),
        }
    }

    /// Floats of a worker's scratch. Saturates for shapes that no memory holds.
    fn local(&self) -> usize {
        let (queries, widest) = (self.tile_heads * self.tile_tokens, self.dk.max(self.dv));
        let rows = [(queries, self.dk), (BLOCK, widest), (queries, BLOCK), (queries, self.dv)];
        rows.iter().fold(0usize, |sum, &(n, width)| sum.saturating_add(n.saturating_mul(width)))
    }

    /// Bytes of scratch where parts meet: for each query and part the weighted sum, the maximum, the weights' sum.
    fn shared(&self) -> usize {
        if self.parts == 1 {
            return 0;
        }
        let rows = self.batches * self.tokens * self.heads;
        rows.saturating_mul(self.parts).saturating_mul((self.dv + 2) * 4)
    }

    fn run(&self, work: &mut Work<'_>) {
        let queries = self.tile_heads * self.tile_tokens;
        let (q, rest) = work.take_local().split_at_mut(queries * self.dk);
        let (block, rest) = rest.split_at_mut(BLOCK * self.dk.max(self.dv));
        let (scores, acc) = rest.split_at_mut(queries * BLOCK);
        let mut scratch = Scratch { q, block, scores, acc, sums: [Sums::NONE; QUERIES] };
        for items in work.chunks(self.tiles() * self.parts, 1) {
            for item in items {
                let (tile, part) = (self.tile(item / self.parts), item % self.parts);
                let positions = part * self.part..((part + 1) * self.part).min(self.positions);
                self.attend(work, &tile, positions, &mut scratch);
                let rows = scratch.acc.chunks_exact_mut(self.dv).zip(&scratch.sums).take(tile.queries());
                for (r, (acc, sums)) in rows.enumerate() {
                    let (token, head) = tile.query(r);
                    if self.parts == 1 {
                        self.finish(work, [head, token, tile.batch], acc, *sums);
                    } else {
                        let at = self.shared_at((tile.batch * self.tokens + token) * self.heads + head, part);
                        work.shared().write(at, acc);
                        work.shared().write(at + self.dv * 4, &[sums.top, sums.total as f32]);
                    }
                }
            }
        }
        if self.parts > 1 {
            work.sync();
            self.merge(work, &mut scratch.acc[..self.dv]);
        }
    }

    fn shared_at(&self, row: usize, part: usize) -> usize {
        (row * self.parts + part) * (self.dv + 2) * 4
    }

    /// Weighted sums of v over `positions` for the queries of a tile, with their maxima and totals, into `scratch`.
    fn attend(&self, work: &Work<'_>, tile: &Tile, positions: Range<usize>, scratch: &mut Scratch<'_>) {
        let (q, k, v) = (work.src(0), work.src(1), work.src(2));
        let (queries, head, softcap) = (tile.queries(), tile.heads.start, self.op.softcap);
        let (products, masks) = (Products::get(), Masks::new(self, work.optional(3)));
        let scale = if softcap == 0.0 { self.op.scale } else { self.op.scale / softcap };
        let rows = &mut scratch.q[..queries * self.dk];
        for (r, row) in rows.chunks_exact_mut(self.dk).enumerate() {
            let (token, head) = tile.query(r);
            q.load([0, token, head, tile.batch], row);
            for x in row {
                *x *= scale;
            }
        }
        let acc = &mut scratch.acc[..queries * self.dv];
        acc.fill(0.0);
        scratch.sums = [Sums::NONE; QUERIES];
        for start in positions.clone().step_by(BLOCK) {
            let at = start..(start + BLOCK).min(positions.end);
            if masks.hide(tile, &at) {
                continue;
            }
            let keys = &mut scratch.block[..at.len() * self.dk];
            for (position, row) in at.clone().zip(keys.chunks_exact_mut(self.dk)) {
                (self.from_k)(k.row([position, head / self.per_k, tile.batch]), row);
            }
            let scores = &mut scratch.scores[..queries * at.len()];
            products.rows_by_rows(scores, rows, keys, self.dk);
            if softcap != 0.0 {
                for s in scores.iter_mut() {
                    *s = softcap * math::tanh(*s);
                }
            }
            let some_hidden = masks.apply(tile, &at, scores);
            let each = scores.chunks_exact_mut(at.len()).zip(acc.chunks_exact_mut(self.dv));
            for ((scores, acc), sums) in each.zip(&mut scratch.sums) {
                sums.add(scores, acc);
            }
            let values = &mut scratch.block[..at.len() * self.dv];
            for (position, row) in at.clone().zip(values.chunks_exact_mut(self.dv)) {
                (self.from_v)(v.row([position, head / self.per_v, tile.batch]), row);
            }
            // A hidden position counts for nothing, whatever lies there, while 0 times infinity is NaN.
            if some_hidden && !all_finite(values) {
                add_what_counts(acc, scores, values, self.dv);
            } else {
                products.add_rows_by_columns(acc, scores, values, self.dv);
            }
        }
    }

    /// Adds up the parts of each query.
    fn merge(&self, work: &Work<'_>, acc: &mut [f32]) {
        for rows in work.chunks(self.batches * self.tokens * self.heads, 4) {
            for row in rows {
                let part = |p| work.shared().read::<f32>(self.shared_at(row, p), self.dv + 2).split_at(self.dv);
                let mut sums = Sums::NONE;
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
                self.finish(work, [head, rest % self.tokens, rest / self.tokens], acc, sums);
            }
        }
    }

    /// Divides by the sum of the weights, the sink's included, and writes the row.
    fn finish(&self, work: &Work<'_>, [head, token, batch]: [usize; 3], acc: &mut [f32], sums: Sums) {
        let (mut factor, mut total) = (1.0, sums.total);
        if let Some(sinks) = work.optional(4) {
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
        work.dst().store([0, head, token, batch], acc);
    }
}

impl Sums {
    /// Turns a block of scores into weights and brings what was summed before to the new maximum.
    fn add(&mut self, scores: &mut [f32], acc: &mut [f32]) {
        let top = self.top.max(math::max(scores));
        // With nothing but masked scores so far, weights relative to 0 are 0; a NaN among them stays one.
        let base = if top == MASKED { 0.0 } else { top };
        let sum = math::exp_sum(scores, base);
        if self.top != MASKED && self.top != top {
            let factor = math::exp(self.top - top);
            self.total *= f64::from(factor);
            for x in acc {
                *x *= factor;
            }
        }
        self.total += sum;
        self.top = top;
    }
}

/// The mask and its slopes.
struct Masks<'a> {
    mask: Option<View<'a>>,
    max_bias: f32,
    heads: usize,
}

impl<'a> Masks<'a> {
    fn new(plan: &Plan, mask: Option<View<'a>>) -> Masks<'a> {
        Masks { mask, max_bias: plan.op.max_bias, heads: plan.heads }
    }

    /// The mask's bytes for the positions `at` of a query.
    fn bytes(mask: &View<'a>, tile: &Tile, (token, head): (usize, usize), at: &Range<usize>) -> &'a [u8] {
        let ne = mask.ne();
        &mask.row([token, head % ne[2], tile.batch % ne[3]])[2 * at.start..2 * at.end]
    }

    /// Whether no query of the tile sees any of these positions: half of all blocks, for a causal mask.
    fn hide(&self, tile: &Tile, at: &Range<usize>) -> bool {
        let Some(mask) = &self.mask else { return false };
        let hidden = half::f16::NEG_INFINITY.to_le_bytes();
        let step = if mask.ne()[2] == 1 { tile.heads.len() } else { 1 };
        (0..tile.queries()).step_by(step).all(|r| {
            let bytes = Self::bytes(mask, tile, tile.query(r), at);
            bytes.as_chunks().0.iter().all(|b| *b == hidden)
        })
    }

    /// Adds the mask to a block of scores; whether it hides any of them.
    fn apply(&self, tile: &Tile, at: &Range<usize>, scores: &mut [f32]) -> bool {
        let (Some(mask), Some(convert)) = (&self.mask, dequantiser(F16)) else { return false };
        let (mut buffer, mut some_hidden) = ([0.0; BLOCK], false);
        let values = &mut buffer[..at.len()];
        let step = if mask.ne()[2] == 1 { tile.heads.len() } else { 1 };
        for (r, scores) in scores.chunks_exact_mut(at.len()).enumerate() {
            let (token, head) = tile.query(r);
            if r.is_multiple_of(step) {
                convert(Self::bytes(mask, tile, (token, head), at), values);
                some_hidden |= values.contains(&MASKED);
            }
            let slope = alibi_slope(self.max_bias, self.heads, head);
            for (s, m) in scores.iter_mut().zip(&*values) {
                *s = if *m == MASKED { MASKED } else { *s + slope * m };
            }
        }
        some_hidden
    }
}

/// As [`Products::add_rows_by_columns`], passing over positions of weight 0.
fn add_what_counts(acc: &mut [f32], weights: &[f32], values: &[f32], width: usize) {
    let positions = values.len() / width;
    for (acc, weights) in acc.chunks_exact_mut(width).zip(weights.chunks_exact(positions)) {
        for (weight, values) in weights.iter().zip(values.chunks_exact(width)).filter(|(weight, _)| **weight != 0.0) {
            for (acc, value) in acc.iter_mut().zip(values) {
                *acc += weight * value;
            }
        }
    }
}

fn all_finite(x: &[f32]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    x.chunks(256).all(|x| !x.iter().fold(false, |bad, x| bad | (x.to_bits() & EXPONENT == EXPONENT)))
}

fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

//! FLASH_ATTN_EXT: online softmax over blocks of positions, everything in f32.
//!
//! A tile is some queries (tokens by heads) that share one head of k and one of v, so that each block of both is read once
//! for all of them. A tile of few queries, as in decoding, reads k and v where they lie ([`few`]); one of many converts a
//! block and runs its vectors along the queries ([`many`]). Where tiles are few, the positions are split as well; the
//! parts meet in shared scratch and are merged with their maxima.

mod few;
mod many;
mod mask;

use super::{Kernel, math, types};
use crate::cpu::memory::View;
use crate::cpu::pool::Work;
use crate::cpu::simd::vec::{COLUMNS, Products};
use crate::cpu::simd::{Level, Wide, widest};
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::flash_attn::FlashAttn;
use crate::tensor::DType::{F16, F32};
use crate::tensor::quant::{Dequantise, dequantiser};
use std::ops::Range;

/// Positions that are converted and scored at a time.
const BLOCK: usize = 64;

/// Most queries of a tile: with a block of k or v, what belongs to them stays in the second cache level.
const QUERIES: usize = 64;

/// Queries up to which a tile reads k and v where they lie.
const FEW: usize = 8;

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
    mask: &'a mut [f32],
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
        let queries = if queries <= FEW { queries } else { queries.next_multiple_of(COLUMNS) };
        let rows = [(queries, self.dk), (BLOCK, widest), (queries, BLOCK), (queries, self.dv), (queries, BLOCK)];
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
        let queries = if queries <= FEW { queries } else { queries.next_multiple_of(COLUMNS) };
        let (q, rest) = work.take_local().split_at_mut(queries * self.dk);
        let (block, rest) = rest.split_at_mut(BLOCK * self.dk.max(self.dv));
        let (scores, rest) = rest.split_at_mut(queries * BLOCK);
        let (acc, mask) = rest.split_at_mut(queries * self.dv);
        let mut scratch = Scratch { q, block, scores, acc, mask, sums: [Sums::NONE; QUERIES] };
        for items in work.chunks(self.tiles() * self.parts, 1) {
            for item in items {
                let (tile, part) = (self.tile(item / self.parts), item % self.parts);
                let positions = part * self.part..((part + 1) * self.part).min(self.positions);
                let queries = tile.queries();
                if queries <= FEW {
                    self.attend_few(work, &tile, positions, &mut scratch);
                } else {
                    self.attend_many(work, &tile, positions, &mut scratch);
                }
                for r in 0..queries {
                    let ((token, head), sums) = (tile.query(r), scratch.sums[r]);
                    let acc = if queries <= FEW {
                        &mut scratch.acc[r * self.dv..(r + 1) * self.dv]
                    } else {
                        // Queries are columns: their row is put together where the block was.
                        let row = &mut scratch.block[..self.dv];
                        for (x, line) in row.iter_mut().zip(scratch.acc.chunks_exact(queries.next_multiple_of(COLUMNS)))
                        {
                            *x = line[r];
                        }
                        row
                    };
                    if self.parts == 1 {
                        self.finish(work, [head, token, tile.batch], acc, sums);
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

    /// The factor on q: with a softcap, scores are divided by it first.
    fn scale(&self) -> f32 {
        if self.op.softcap == 0.0 { self.op.scale } else { self.op.scale / self.op.softcap }
    }

    /// Scores through the softcap.
    fn cap(&self, scores: &mut [f32]) {
        if self.op.softcap != 0.0 {
            widest(Cap { scores, cap: self.op.softcap });
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

/// `c tanh(s)` of each score.
struct Cap<'a> {
    scores: &'a mut [f32],
    cap: f32,
}

impl Wide for Cap<'_> {
    type Out = ();

    #[inline(always)]
    fn run<L: Level>(self) {
        math::update(self.scores, |s| self.cap * math::tanh(s));
    }
}

/// `positions` of a plane of k or v as f32: widened where that is quick, else converted row by row.
fn convert(t: &View<'_>, from: Dequantise, positions: &Range<usize>, plane: [usize; 2], block: &mut [f32]) {
    if let Some(rows) = t.rows([positions.start, plane[0], plane[1]], positions.len()) {
        return Products::get().widen(block, &rows);
    }
    for (position, row) in positions.clone().zip(block.chunks_exact_mut(t.ne()[0])) {
        from(t.row([position, plane[0], plane[1]]), row);
    }
}

fn all_finite(x: &[f32]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    x.chunks(256).all(|x| !x.iter().fold(false, |bad, x| bad | (x.to_bits() & EXPONENT == EXPONENT)))
}

fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

//! Few queries: rows of K and V are read in place, once for all queries of the tile.

use super::mask::{MaskEffect, Masks};
use super::{AttentionPlan, AttentionScratch, BLOCK, MASKED, OnlineSoftmax, QueryTile, all_finite, convert, math};
use crate::cpu::pool::KernelContext;
use crate::cpu::simd::attention_gemm::{AttentionGemm, FloatRows};
use std::ops::Range;

impl AttentionPlan {
    /// Online softmax over `positions` for the queries of a tile: leaves the weighted sums of V in the rows of `acc`, and
    /// maxima and totals in `sums`.
    pub(super) fn attend_few_queries(
        &self,
        ctx: &KernelContext<'_>,
        tile: &QueryTile,
        positions: &Range<usize>,
        scratch: &mut AttentionScratch<'_>,
    ) {
        let (q, k, v) = (ctx.src(0), ctx.src(1), ctx.src(2));
        let (queries, head) = (tile.queries(), tile.heads.start);
        let (k_plane, v_plane) = ([head / self.per_k, tile.batch], [head / self.per_v, tile.batch]);
        let (gemm, masks, scale) = (AttentionGemm::get(), Masks::new(self, ctx.optional_src(3)), self.scale());
        let rows = &mut scratch.q[..queries * self.dk];
        for (r, row) in rows.chunks_exact_mut(self.dk).enumerate() {
            let (token, head) = tile.query(r);
            q.load([0, token, head, tile.batch], row);
            math::scale(row, scale);
        }
        let acc = &mut scratch.acc[..queries * self.dv];
        acc.fill(0.0);
        scratch.sums = [OnlineSoftmax::NONE; super::MAX_TILE_QUERIES];
        for start in positions.clone().step_by(BLOCK) {
            let at = start..(start + BLOCK).min(positions.end);
            let effect = masks.classify(tile, &at, scratch.mask);
            if effect == MaskEffect::HidesAll {
                continue;
            }
            let scores = &mut scratch.scores[..queries * at.len()];
            if let Some(keys) = k.rows([at.start, k_plane[0], k_plane[1]], at.len()) {
                gemm.mul_transposed(scores, rows, &keys);
            } else {
                let keys = &mut scratch.block[..at.len() * self.dk];
                convert(&k, self.from_k, &at, k_plane, keys);
                gemm.mul_transposed(scores, rows, &FloatRows::contiguous(keys, self.dk));
            }
            self.cap(scores);
            if effect != MaskEffect::Zero {
                for (r, scores) in scores.chunks_exact_mut(at.len()).enumerate() {
                    let (slope, mask) = masks.of_query(tile, r, at.len(), scratch.mask);
                    for (s, m) in scores.iter_mut().zip(mask) {
                        *s = if *m == MASKED { MASKED } else { *s + slope * m };
                    }
                }
            }
            let each = scores.chunks_exact_mut(at.len()).zip(acc.chunks_exact_mut(self.dv));
            for ((scores, acc), sums) in each.zip(&mut scratch.sums) {
                sums.add(scores, acc);
            }
            // A masked position must not contribute, but 0 times infinity is NaN: V is checked before weights of 0 are
            // multiplied.
            let direct =
                v.rows([at.start, v_plane[0], v_plane[1]], at.len()).filter(|_| effect != MaskEffect::HidesSome);
            if let Some(values) = direct {
                gemm.mul_add(acc, scores, &values);
                continue;
            }
            let values = &mut scratch.block[..at.len() * self.dv];
            convert(&v, self.from_v, &at, v_plane, values);
            if effect == MaskEffect::HidesSome && !all_finite(values) {
                add_nonzero_weights(acc, scores, values, self.dv);
            } else {
                gemm.mul_add(acc, scores, &FloatRows::contiguous(values, self.dv));
            }
        }
    }
}

impl OnlineSoftmax {
    /// Turns a block of scores into weights relative to the new maximum, and rescales the earlier sums to it.
    fn add(&mut self, scores: &mut [f32], acc: &mut [f32]) {
        let top = self.top.max(math::max(scores));
        // With only masked scores so far, weights relative to 0 are 0; a NaN among the scores stays NaN.
        let base = if top == MASKED { 0.0 } else { top };
        let sum = math::exp_sum(scores, base);
        if self.top != MASKED && self.top != top {
            let factor = math::exp(self.top - top);
            self.total *= f64::from(factor);
            math::scale(acc, factor);
        }
        self.total += sum;
        self.top = top;
    }
}

/// As [`AttentionGemm::mul_add`], skipping positions of weight 0.
fn add_nonzero_weights(acc: &mut [f32], weights: &[f32], values: &[f32], width: usize) {
    let positions = values.len() / width;
    for (acc, weights) in acc.chunks_exact_mut(width).zip(weights.chunks_exact(positions)) {
        for (weight, values) in weights.iter().zip(values.chunks_exact(width)).filter(|(weight, _)| **weight != 0.0) {
            for (acc, value) in acc.iter_mut().zip(values) {
                *acc += weight * value;
            }
        }
    }
}

//! Many queries: blocks of K and V are converted once. Queries are columns of every matrix, so that vectors run along the
//! queries and no sum or maximum crosses vector lanes.

use super::mask::{MaskEffect, Masks};
use super::{
    AttentionPlan, AttentionScratch, BLOCK, MASKED, MAX_TILE_QUERIES, OnlineSoftmax, QueryTile, all_finite, convert,
    math,
};
use crate::cpu::pool::KernelContext;
use crate::cpu::simd::attention_gemm::{AttentionGemm, COLUMN_MULTIPLE, GemmShape};
use crate::cpu::simd::multiversion;
use std::ops::Range;

impl AttentionPlan {
    /// As [`AttentionPlan::attend_few_queries`]; queries are columns of `acc`, padded to whole vectors.
    pub(super) fn attend_many_queries(
        &self,
        ctx: &KernelContext<'_>,
        tile: &QueryTile,
        positions: &Range<usize>,
        scratch: &mut AttentionScratch<'_>,
    ) {
        let (q, k, v) = (ctx.src(0), ctx.src(1), ctx.src(2));
        let (queries, head, n) = (tile.queries(), tile.heads.start, tile.queries().next_multiple_of(COLUMN_MULTIPLE));
        let (k_plane, v_plane) = ([head / self.per_k, tile.batch], [head / self.per_v, tile.batch]);
        let (gemm, masks, scale) = (AttentionGemm::get(), Masks::new(self, ctx.optional_src(3)), self.scale());
        let columns = &mut scratch.q[..self.dk * n];
        columns.fill(0.0);
        for r in 0..queries {
            let (token, head) = tile.query(r);
            let row = q.fetch([0, token, head, tile.batch], &mut scratch.block[..self.dk]);
            for (line, x) in columns.chunks_exact_mut(n).zip(row) {
                line[r] = x * scale;
            }
        }
        let acc = &mut scratch.acc[..self.dv * n];
        acc.fill(0.0);
        let (mut top, mut total, mut factor) =
            ([MASKED; MAX_TILE_QUERIES], [0.0; MAX_TILE_QUERIES], [1.0; MAX_TILE_QUERIES]);
        for start in positions.clone().step_by(BLOCK) {
            let at = start..(start + BLOCK).min(positions.end);
            let effect = masks.classify(tile, &at, scratch.mask);
            if effect == MaskEffect::HidesAll {
                continue;
            }
            let keys = &mut scratch.block[..at.len() * self.dk];
            convert(&k, self.from_k, &at, k_plane, keys);
            let scores = &mut scratch.scores[..at.len() * n];
            let shape = GemmShape { m: at.len(), n, k: self.dk, row_stride: self.dk, column_stride: 1, add: false };
            gemm.mul_columns(scores, keys, columns, &shape);
            self.cap(scores);
            if effect != MaskEffect::Zero {
                for r in 0..queries {
                    let (slope, mask) = masks.of_query(tile, r, at.len(), scratch.mask);
                    for (line, m) in scores.chunks_exact_mut(n).zip(mask) {
                        line[r] = if *m == MASKED { MASKED } else { line[r] + slope * m };
                    }
                }
            }
            let (top, total, factor) = (&mut top[..n], &mut total[..n], &mut factor[..n]);
            if weigh_scores(scores, top, total, factor) {
                rescale(acc, factor);
            }
            let values = &mut scratch.block[..at.len() * self.dv];
            convert(&v, self.from_v, &at, v_plane, values);
            // A masked position must not contribute, but 0 times infinity is NaN: V is checked before weights of 0 are
            // multiplied.
            if effect == MaskEffect::HidesSome && !all_finite(values) {
                add_nonzero_weights(acc, scores, values, self.dv);
            } else {
                let shape = GemmShape { m: self.dv, n, k: at.len(), row_stride: 1, column_stride: self.dv, add: true };
                gemm.mul_columns(acc, values, scores, &shape);
            }
        }
        for ((sums, &top), &total) in scratch.sums.iter_mut().zip(&top).zip(&total) {
            *sums = OnlineSoftmax { top, total };
        }
    }
}

multiversion! {
    /// Turns a block of scores (one line per position) into weights relative to the new maxima. `factor` receives the factors by
    /// which earlier sums shrink; returns whether any shrinks.
    fn weigh_scores<'a>(
        scores: &'a mut [f32],
        top: &'a mut [f32],
        total: &'a mut [f64],
        factor: &'a mut [f32],
    ) -> bool {
        let n = top.len();
        let (mut new, mut base, mut sum) =
            ([MASKED; MAX_TILE_QUERIES], [0.0; MAX_TILE_QUERIES], [0.0; MAX_TILE_QUERIES]);
        let (new, base, sum) = (&mut new[..n], &mut base[..n], &mut sum[..n]);
        new.copy_from_slice(top);
        for line in scores.chunks_exact(n) {
            for (new, s) in new.iter_mut().zip(line) {
                *new = if *s > *new { *s } else { *new };
            }
        }
        let mut changed = false;
        for r in 0..n {
            // With only masked scores so far, weights relative to 0 are 0; a NaN among the scores stays NaN.
            base[r] = if new[r] == MASKED { 0.0 } else { new[r] };
            factor[r] = if top[r] == MASKED { 1.0 } else { math::exp(top[r] - base[r]) };
            changed |= factor[r] != 1.0;
        }
        for line in scores.chunks_exact_mut(n) {
            for ((s, base), sum) in line.iter_mut().zip(&*base).zip(&mut *sum) {
                *s = math::exp(*s - base);
                *sum += *s;
            }
        }
        for r in 0..n {
            total[r] = total[r] * f64::from(factor[r]) + f64::from(sum[r]);
            top[r] = new[r];
        }
        changed
    }
}

multiversion! {
    /// Multiplies each line of `acc` by the factors of the queries.
    fn rescale<'a>(acc: &'a mut [f32], factor: &'a [f32]) {
        for line in acc.chunks_exact_mut(factor.len()) {
            for (x, factor) in line.iter_mut().zip(factor) {
                *x *= factor;
            }
        }
    }
}

/// As [`AttentionGemm::mul_columns`] of values and weights, skipping weights of 0.
fn add_nonzero_weights(acc: &mut [f32], weights: &[f32], values: &[f32], width: usize) {
    let n = acc.len() / width;
    for (weights, values) in weights.chunks_exact(n).zip(values.chunks_exact(width)) {
        for (acc, value) in acc.chunks_exact_mut(n).zip(values) {
            for (acc, weight) in acc.iter_mut().zip(weights).filter(|(_, weight)| **weight != 0.0) {
                *acc += weight * value;
            }
        }
    }
}

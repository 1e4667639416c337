//! Few queries: rows of k and v are read where they lie, once for all queries.

use super::mask::{Hidden, Masks};
use super::{BLOCK, MASKED, Plan, Scratch, Sums, Tile, all_finite, convert, math};
use crate::cpu::pool::Work;
use crate::cpu::simd::vec::{Products, Rows};
use std::ops::Range;

impl Plan {
    /// Weighted sums of v over `positions` for the queries of a tile, with their maxima and totals, into `scratch`: rows of
    /// `acc`.
    pub(super) fn attend_few(&self, work: &Work<'_>, tile: &Tile, positions: Range<usize>, scratch: &mut Scratch<'_>) {
        let (q, k, v) = (work.src(0), work.src(1), work.src(2));
        let (queries, head) = (tile.queries(), tile.heads.start);
        let (k_plane, v_plane) = ([head / self.per_k, tile.batch], [head / self.per_v, tile.batch]);
        let (products, masks, scale) = (Products::get(), Masks::new(self, work.optional(3)), self.scale());
        let rows = &mut scratch.q[..queries * self.dk];
        for (r, row) in rows.chunks_exact_mut(self.dk).enumerate() {
            let (token, head) = tile.query(r);
            q.load([0, token, head, tile.batch], row);
            math::scale(row, scale);
        }
        let acc = &mut scratch.acc[..queries * self.dv];
        acc.fill(0.0);
        scratch.sums = [Sums::NONE; super::QUERIES];
        for start in positions.clone().step_by(BLOCK) {
            let at = start..(start + BLOCK).min(positions.end);
            let hidden = masks.look(tile, &at, scratch.mask);
            if hidden == Hidden::All {
                continue;
            }
            let scores = &mut scratch.scores[..queries * at.len()];
            if let Some(keys) = k.rows([at.start, k_plane[0], k_plane[1]], at.len()) {
                products.rows_by_rows(scores, rows, &keys);
            } else {
                let keys = &mut scratch.block[..at.len() * self.dk];
                convert(&k, self.from_k, &at, k_plane, keys);
                products.rows_by_rows(scores, rows, &Rows::packed(keys, self.dk));
            }
            self.cap(scores);
            if hidden != Hidden::Nothing {
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
            // A hidden position counts for nothing, whatever lies there, while 0 times infinity is NaN.
            let direct = v.rows([at.start, v_plane[0], v_plane[1]], at.len()).filter(|_| hidden != Hidden::Some);
            if let Some(values) = direct {
                products.add_rows_by_columns(acc, scores, &values);
                continue;
            }
            let values = &mut scratch.block[..at.len() * self.dv];
            convert(&v, self.from_v, &at, v_plane, values);
            if hidden == Hidden::Some && !all_finite(values) {
                add_what_counts(acc, scores, values, self.dv);
            } else {
                products.add_rows_by_columns(acc, scores, &Rows::packed(values, self.dv));
            }
        }
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
            math::scale(acc, factor);
        }
        self.total += sum;
        self.top = top;
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

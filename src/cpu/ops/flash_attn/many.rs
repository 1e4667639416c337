//! Many queries: blocks of k and v are converted once, and everything about a query is a column, so that vectors run along
//! the queries and nothing is summed or compared across a vector.

use super::mask::{Hidden, Masks};
use super::{BLOCK, MASKED, Plan, QUERIES, Scratch, Sums, Tile, all_finite, convert, math};
use crate::cpu::pool::Work;
use crate::cpu::simd::vec::{COLUMNS, Outer, Products};
use crate::cpu::simd::{Level, Wide, widest};
use std::ops::Range;

impl Plan {
    /// As [`Plan::attend_few`]; queries are columns of `acc`, padded to whole vectors.
    pub(super) fn attend_many(&self, work: &Work<'_>, tile: &Tile, positions: Range<usize>, scratch: &mut Scratch<'_>) {
        let (q, k, v) = (work.src(0), work.src(1), work.src(2));
        let (queries, head, n) = (tile.queries(), tile.heads.start, tile.queries().next_multiple_of(COLUMNS));
        let (k_plane, v_plane) = ([head / self.per_k, tile.batch], [head / self.per_v, tile.batch]);
        let (products, masks, scale) = (Products::get(), Masks::new(self, work.optional(3)), self.scale());
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
        let (mut top, mut total, mut factor) = ([MASKED; QUERIES], [0.0; QUERIES], [1.0; QUERIES]);
        for start in positions.clone().step_by(BLOCK) {
            let at = start..(start + BLOCK).min(positions.end);
            let hidden = masks.look(tile, &at, scratch.mask);
            if hidden == Hidden::All {
                continue;
            }
            let keys = &mut scratch.block[..at.len() * self.dk];
            convert(&k, self.from_k, &at, k_plane, keys);
            let scores = &mut scratch.scores[..at.len() * n];
            let shape = Outer { m: at.len(), n, k: self.dk, row: self.dk, column: 1, add: false };
            products.outer(scores, keys, columns, &shape);
            self.cap(scores);
            if hidden != Hidden::Nothing {
                for r in 0..queries {
                    let (slope, mask) = masks.of_query(tile, r, at.len(), scratch.mask);
                    for (line, m) in scores.chunks_exact_mut(n).zip(mask) {
                        line[r] = if *m == MASKED { MASKED } else { line[r] + slope * m };
                    }
                }
            }
            let (top, total, factor) = (&mut top[..n], &mut total[..n], &mut factor[..n]);
            if widest(Weights { scores, top, total, factor }) {
                widest(Rescale { acc, factor });
            }
            let values = &mut scratch.block[..at.len() * self.dv];
            convert(&v, self.from_v, &at, v_plane, values);
            // A hidden position counts for nothing, whatever lies there, while 0 times infinity is NaN.
            if hidden == Hidden::Some && !all_finite(values) {
                add_what_counts(acc, scores, values, self.dv);
            } else {
                let shape = Outer { m: self.dv, n, k: at.len(), row: 1, column: self.dv, add: true };
                products.outer(acc, values, scores, &shape);
            }
        }
        for ((sums, &top), &total) in scratch.sums.iter_mut().zip(&top).zip(&total) {
            *sums = Sums { top, total };
        }
    }
}

/// Turns a block of scores, a line of them for each position, into weights relative to the new maxima. `factor` becomes
/// what earlier sums shrink by; whether any does.
struct Weights<'a> {
    scores: &'a mut [f32],
    top: &'a mut [f32],
    total: &'a mut [f64],
    factor: &'a mut [f32],
}

impl Wide for Weights<'_> {
    type Out = bool;

    #[inline(always)]
    fn run<L: Level>(self) -> bool {
        let Weights { scores, top, total, factor } = self;
        let n = top.len();
        let (mut new, mut base, mut sum) = ([MASKED; QUERIES], [0.0; QUERIES], [0.0; QUERIES]);
        let (new, base, sum) = (&mut new[..n], &mut base[..n], &mut sum[..n]);
        new.copy_from_slice(top);
        for line in scores.chunks_exact(n) {
            for (new, s) in new.iter_mut().zip(line) {
                *new = if *s > *new { *s } else { *new };
            }
        }
        let mut changed = false;
        for r in 0..n {
            // With nothing but masked scores so far, weights relative to 0 are 0; a NaN among them stays one.
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

/// Multiplies each line of `acc` by the queries' factors.
struct Rescale<'a> {
    acc: &'a mut [f32],
    factor: &'a [f32],
}

impl Wide for Rescale<'_> {
    type Out = ();

    #[inline(always)]
    fn run<L: Level>(self) {
        for line in self.acc.chunks_exact_mut(self.factor.len()) {
            for (x, factor) in line.iter_mut().zip(self.factor) {
                *x *= factor;
            }
        }
    }
}

/// As [`Products::outer`] of values and weights, passing over weights of 0.
fn add_what_counts(acc: &mut [f32], weights: &[f32], values: &[f32], width: usize) {
    let n = acc.len() / width;
    for (weights, values) in weights.chunks_exact(n).zip(values.chunks_exact(width)) {
        for (acc, value) in acc.chunks_exact_mut(n).zip(values) {
            for (acc, weight) in acc.iter_mut().zip(weights).filter(|(_, weight)| **weight != 0.0) {
                *acc += weight * value;
            }
        }
    }
}

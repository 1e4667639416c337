//! The mask, looked at once for all queries of a tile that share it.

use super::super::alibi_slope;
use super::{MASKED, Plan, Tile};
use crate::cpu::memory::View;
use crate::tensor::DType::F16;
use crate::tensor::quant::dequantiser;
use std::ops::Range;

/// What a mask does to a block of positions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Hidden {
    /// Nothing at all: every entry is 0, or there is no mask.
    Nothing,
    /// Hides no position, but has something to add.
    None,
    /// Hides some positions from some queries.
    Some,
    /// Hides all from all: half of all blocks, for a causal mask.
    All,
}

/// The mask and its slopes.
pub(super) struct Masks<'a> {
    mask: Option<View<'a>>,
    max_bias: f32,
    heads: usize,
}

impl<'a> Masks<'a> {
    pub(super) fn new(plan: &Plan, mask: Option<View<'a>>) -> Masks<'a> {
        Masks { mask, max_bias: plan.op.max_bias, heads: plan.heads }
    }

    /// Queries of a tile that share a row of the mask: those of one token, unless each head has its own.
    fn step(&self, tile: &Tile) -> usize {
        if self.mask.is_some_and(|mask| mask.ne()[2] != 1) { 1 } else { tile.heads.len() }
    }

    /// What the mask does to the positions `at`; its values, unless they are all alike, into `values`: a row of them for
    /// each [`Masks::step`] queries.
    pub(super) fn look(&self, tile: &Tile, at: &Range<usize>, values: &mut [f32]) -> Hidden {
        let (Some(mask), Some(convert)) = (&self.mask, dequantiser(F16)) else { return Hidden::Nothing };
        let ne = mask.ne();
        let row = |r| {
            let (token, head) = tile.query(r);
            &mask.row([token, head % ne[2], tile.batch % ne[3]])[2 * at.start..2 * at.end]
        };
        let queries = || (0..tile.queries()).step_by(self.step(tile));
        let are =
            |bytes: [u8; 2]| queries().all(|r| row(r).as_chunks().0.iter().fold(true, |all, b| all & (*b == bytes)));
        if are([0, 0]) {
            return Hidden::Nothing;
        }
        if are(half::f16::NEG_INFINITY.to_le_bytes()) {
            return Hidden::All;
        }
        let mut hidden = Hidden::None;
        for (r, values) in queries().zip(values.chunks_exact_mut(at.len())) {
            convert(row(r), values);
            if values.contains(&MASKED) {
                hidden = Hidden::Some;
            }
        }
        hidden
    }

    /// The slope of query `r`, and its row of the `n` values that [`Masks::look`] has left.
    pub(super) fn of_query<'b>(&self, tile: &Tile, r: usize, n: usize, values: &'b [f32]) -> (f32, &'b [f32]) {
        let slope = alibi_slope(self.max_bias, self.heads, tile.query(r).1);
        (slope, &values[r / self.step(tile) * n..][..n])
    }
}

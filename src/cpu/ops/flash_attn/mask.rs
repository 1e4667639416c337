//! The mask of a tile, classified per block of positions, once for all queries that share it.

use super::super::alibi_slope;
use super::{AttentionPlan, BLOCK, MASKED, QueryTile};
use crate::cpu::memory::View;
use crate::tensor::DType::F16;
use crate::tensor::quant::dequantiser;
use std::ops::Range;

/// Effect of the mask on a block of positions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum MaskEffect {
    /// No effect: every entry is 0, or there is no mask.
    Zero,
    /// Masks no position, but adds a bias.
    Bias,
    /// Masks some positions for some queries.
    HidesSome,
    /// Masks all positions for all queries. With a causal mask, half of all blocks are of this kind.
    HidesAll,
}

/// Whether F16 entries mask every position. Mostly, the first entry tells.
fn hides_all(entries: &[u8]) -> bool {
    let (entries, masked) = (entries.as_chunks().0, half::f16::NEG_INFINITY.to_le_bytes());
    entries.first().is_none_or(|first| *first == masked) && entries.iter().fold(true, |all, b| all & (*b == masked))
}

/// The mask and its ALiBi slopes.
pub(super) struct Masks<'a> {
    mask: Option<View<'a>>,
    max_bias: f32,
    heads: usize,
}

impl<'a> Masks<'a> {
    pub(super) fn new(plan: &AttentionPlan, mask: Option<View<'a>>) -> Masks<'a> {
        Masks { mask, max_bias: plan.op.max_bias, heads: plan.heads }
    }

    /// Number of consecutive queries of a tile that share a row of the mask: those of one token, unless each head has its own
    /// mask.
    fn queries_per_mask_row(&self, tile: &QueryTile) -> usize {
        if self.mask.is_some_and(|mask| mask.ne()[2] != 1) { 1 } else { tile.heads.len() }
    }

    /// The tokens of a tile up to the first one whose positions are mostly other ones than those of its predecessor. Such a token
    /// begins a tile of its own, because the blocks that only one of them sees would be computed for both. In a batch of several
    /// sequences, each token sees the blocks of its own sequence.
    pub(super) fn alike_tokens(&self, tile: &QueryTile, positions: &Range<usize>) -> usize {
        let Some(mask) = &self.mask else { return tile.tokens.len() };
        let ne = mask.ne();
        let row = |token| mask.row([token, tile.heads.start % ne[2], tile.batch % ne[3]]);
        let differs = |&token: &usize| {
            let (mut either, mut both) = (0, 0);
            for start in positions.clone().step_by(BLOCK) {
                let at = 2 * start..2 * (start + BLOCK).min(positions.end);
                let (one, other) = (hides_all(&row(token - 1)[at.clone()]), hides_all(&row(token)[at]));
                either += usize::from(!one || !other);
                both += usize::from(!one && !other);
            }
            2 * both < either
        };
        let next = tile.tokens.clone().skip(1).find(differs);
        next.unwrap_or(tile.tokens.end) - tile.tokens.start
    }

    /// The effect of the mask on the positions `at`. Unless all entries are alike, writes its values to `values`: a row for
    /// each [`Masks::queries_per_mask_row`] queries.
    pub(super) fn classify(&self, tile: &QueryTile, at: &Range<usize>, values: &mut [f32]) -> MaskEffect {
        let (Some(mask), Some(convert)) = (&self.mask, dequantiser(F16)) else { return MaskEffect::Zero };
        let ne = mask.ne();
        let row = |r| {
            let (token, head) = tile.query(r);
            &mask.row([token, head % ne[2], tile.batch % ne[3]])[2 * at.start..2 * at.end]
        };
        let queries = || (0..tile.queries()).step_by(self.queries_per_mask_row(tile));
        if queries().all(|r| hides_all(row(r))) {
            return MaskEffect::HidesAll;
        }
        if queries().all(|r| row(r).iter().fold(0, |any, byte| any | byte) == 0) {
            return MaskEffect::Zero;
        }
        let mut effect = MaskEffect::Bias;
        for (r, values) in queries().zip(values.chunks_exact_mut(at.len())) {
            convert(row(r), values);
            if values.contains(&MASKED) {
                effect = MaskEffect::HidesSome;
            }
        }
        effect
    }

    /// The slope of query `r`, and its row of the `n` values that [`Masks::classify`] has written.
    pub(super) fn of_query<'b>(&self, tile: &QueryTile, r: usize, n: usize, values: &'b [f32]) -> (f32, &'b [f32]) {
        let slope = alibi_slope(self.max_bias, self.heads, tile.query(r).1);
        (slope, &values[r / self.queries_per_mask_row(tile) * n..][..n])
    }
}

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

/// Splits a tile between tokens of which each sees mostly other blocks than its predecessor, as tokens of several sequences do: a tile
/// computes the scores of all its tokens in each block that any of them sees. Not if the pieces would read more than twice as many
/// blocks as the tile, because each piece converts its blocks again.
fn piece_starts(tokens: usize, blocks: usize, sees: impl Fn(usize, usize) -> bool) -> u64 {
    let (mut starts, mut separate) = (1, 0);
    for token in 1..tokens {
        let (mut either, mut both, mut before) = (0, 0, 0);
        for block in 0..blocks {
            let (one, other) = (sees(token - 1, block), sees(token, block));
            either += usize::from(one | other);
            both += usize::from(one & other);
            before += usize::from(one);
        }
        if 2 * both < either {
            starts |= 1 << token;
            // The last token of a piece mostly sees the blocks of the others, too.
            separate += before;
        }
    }
    if starts == 1 {
        return starts;
    }
    separate += (0..blocks).filter(|&block| sees(tokens - 1, block)).count();
    let together = (0..blocks).filter(|&block| (0..tokens).any(|token| sees(token, block))).count();
    if separate <= 2 * together { starts } else { 1 }
}

/// Whether F16 entries mask every position. Looks at the first entry alone before: it is visible in most blocks that are.
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

    /// The tokens of a tile, by bit from its first one, with which a tile of its own begins; see [`piece_starts`]. Of a mask with a row
    /// for each head, the tile's first head decides: results do not depend on the split.
    pub(super) fn piece_starts(&self, tile: &QueryTile, positions: &Range<usize>) -> u64 {
        let Some(mask) = &self.mask else { return 1 };
        let ne = mask.ne();
        piece_starts(tile.tokens.len(), positions.len().div_ceil(BLOCK), |token, block| {
            let row = mask.row([tile.tokens.start + token, tile.heads.start % ne[2], tile.batch % ne[3]]);
            let start = positions.start + block * BLOCK;
            !hides_all(&row[2 * start..2 * (start + BLOCK).min(positions.end)])
        })
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

#[cfg(test)]
mod tests {
    use super::piece_starts;

    #[test]
    fn tiles_are_split_between_tokens_that_see_other_blocks() {
        // By token: the numbers of the blocks that it sees.
        let cases: [(&str, &[&[usize]], u64); 7] = [
            ("one token", &[&[0, 1]], 0b1),
            ("a causal mask", &[&[0], &[0], &[0, 1], &[0, 1], &[0, 1, 2]], 0b1),
            ("decoding sequences", &[&[0, 3], &[1], &[2, 4]], 0b111),
            ("one of them and a prompt", &[&[0, 1], &[2, 3], &[2, 3], &[2, 3]], 0b11),
            ("a shared block", &[&[0, 1, 2], &[0, 3, 4]], 0b11),
            ("tokens of two sequences in turn", &[&[0], &[1], &[0], &[1], &[0], &[1]], 0b1),
            ("nothing is visible", &[&[], &[], &[]], 0b1),
        ];
        for (name, tokens, starts) in cases {
            let got = piece_starts(tokens.len(), 5, |token, block| tokens[token].contains(&block));
            assert_eq!(got, starts, "{name}");
        }
    }
}

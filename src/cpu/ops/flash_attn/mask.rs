//! The mask of a tile, classified per block of positions, once for all queries that share it.

use super::super::alibi_slope;
use super::{AttentionPlan, BLOCK, MASKED, MAX_TILE_QUERIES, QueryTile};
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

/// Sets of tokens of a tile, by bit from its first one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TilePieces {
    /// The tokens with which a piece, a tile of its own, begins.
    pub(super) starts: u64,
    /// The tokens that see a position.
    pub(super) seeing: u64,
}

impl TilePieces {
    /// Without a mask.
    const ALL: TilePieces = TilePieces { starts: 1, seeing: u64::MAX };
}

/// Splits a tile between tokens that see mostly other blocks than their predecessors, as tokens of several sequences do: a tile
/// computes the scores of all its tokens in each block that any of them sees. Not if the pieces would read more than twice as many
/// blocks as the tile, because each piece converts its blocks again. `sees` is asked once for each token and block.
fn pieces(tokens: usize, blocks: usize, sees: impl Fn(usize, usize) -> bool) -> TilePieces {
    // By token, in blocks: seen by it, by it or its predecessor, and by both. And those that any token sees.
    let [mut seen, mut either, mut both] = [[0; MAX_TILE_QUERIES]; 3];
    let mut together = 0;
    for first in (0..blocks).step_by(64) {
        let (mut before, mut any) = (0u64, 0u64);
        for token in 0..tokens {
            let bit = |block: usize| u64::from(sees(token, block)) << (block - first);
            let bits = (first..blocks.min(first + 64)).fold(0, |bits, block| bits | bit(block));
            seen[token] += bits.count_ones();
            either[token] += (bits | before).count_ones();
            both[token] += (bits & before).count_ones();
            (before, any) = (bits, any | bits);
        }
        together += any.count_ones();
    }
    let (mut starts, mut separate) = (1, 0);
    let seeing = (0..tokens).fold(0, |set, token| set | u64::from(seen[token] > 0) << token);
    for token in 1..tokens {
        if 2 * both[token] < either[token] {
            starts |= 1 << token;
            // The last token of a piece mostly sees the blocks of the others, too.
            separate += seen[token - 1];
        }
    }
    separate += seen[tokens - 1];
    TilePieces { starts: if separate <= 2 * together { starts } else { 1 }, seeing }
}

/// Whether F16 entries mask every position. Looks at the first entry alone before: it is visible in most blocks that are.
fn hides_all(entries: &[u8]) -> bool {
    const MASKED: u16 = half::f16::NEG_INFINITY.to_bits();
    const FOUR_MASKED: u64 = MASKED as u64 * 0x0001_0001_0001_0001;
    let is_masked = |entry: &[u8; 2]| u16::from_le_bytes(*entry) == MASKED;
    if entries.first_chunk().is_some_and(|first| !is_masked(first)) {
        return false;
    }
    // The differences of words are or-ed: fewer instructions than a comparison of each entry.
    let (fours, rest) = entries.as_chunks();
    let differ = fours.iter().fold(0, |any, four| any | (u64::from_le_bytes(*four) ^ FOUR_MASKED));
    differ == 0 && rest.as_chunks().0.iter().all(is_masked)
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

    /// Number of consecutive queries of a tile that share a row of the mask: the queries of one token, unless each head has its own
    /// mask.
    fn queries_per_mask_row(&self, tile: &QueryTile) -> usize {
        if self.mask.is_some_and(|mask| mask.ne()[2] != 1) { 1 } else { tile.heads.len() }
    }

    /// The pieces of a tile; see [`pieces`]. Of a mask with a row for each head, the tile's first head decides where they begin, because
    /// results do not depend on it, and all tokens count as seeing.
    pub(super) fn pieces(&self, tile: &QueryTile, positions: &Range<usize>) -> TilePieces {
        let Some(mask) = &self.mask else { return TilePieces::ALL };
        let ne = mask.ne();
        let found = pieces(tile.tokens.len(), positions.len().div_ceil(BLOCK), |token, block| {
            let row = mask.row([tile.tokens.start + token, tile.heads.start % ne[2], tile.batch % ne[3]]);
            let start = positions.start + block * BLOCK;
            !hides_all(&row[2 * start..2 * (start + BLOCK).min(positions.end)])
        });
        if ne[2] == 1 { found } else { TilePieces { seeing: TilePieces::ALL.seeing, ..found } }
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
    use super::{TilePieces, pieces};

    #[test]
    fn tiles_are_split_between_tokens_that_see_other_blocks() {
        // By token: the numbers of the blocks that it sees.
        let cases: [(&str, &[&[usize]], u64, u64); 9] = [
            ("one token", &[&[0, 1]], 0b1, 0b1),
            ("a causal mask", &[&[0], &[0], &[0, 1], &[0, 1], &[0, 1, 2]], 0b1, 0b1_1111),
            ("decoding sequences", &[&[0, 3], &[1], &[2, 4]], 0b111, 0b111),
            ("one of them and a prompt", &[&[0, 1], &[2, 3], &[2, 3], &[2, 3]], 0b11, 0b1111),
            ("a shared block", &[&[0, 1, 2], &[0, 3, 4]], 0b11, 0b11),
            ("tokens of two sequences in turn", &[&[0], &[1], &[0], &[1], &[0], &[1]], 0b1, 0b11_1111),
            ("nothing is visible", &[&[], &[], &[]], 0b1, 0),
            ("only one token sees a part of the positions", &[&[], &[], &[4], &[], &[]], 0b1101, 0b100),
            ("blocks of several words", &[&[3, 70], &[3, 70, 130], &[140]], 0b101, 0b111),
        ];
        for (name, tokens, starts, seeing) in cases {
            let got = pieces(tokens.len(), 150, |token, block| tokens[token].contains(&block));
            assert_eq!(got, TilePieces { starts, seeing }, "{name}");
        }
    }
}

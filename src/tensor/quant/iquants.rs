//! The i-quants IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS and IQ3_S: codes are indices of entries of a grid, with signs. They
//! only convert to f32. A quantiser searches the grid for the neighbours of each eight elements, which takes ggml minutes for a
//! model and a matrix of importances, so ggml's CPU backend has none either.
//!
//! Eight codes are computed at a time, as the bytes of a u64.

use super::expand::Expand;
use super::grids::{self, EVEN_SIGNS, SIGNS};
use crate::tensor::blocks::{BlockIq1M, BlockIq1S, BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3S, BlockIq3Xxs};

/// A byte of 1 in each lane.
const ONES: u64 = 0x0101_0101_0101_0101;

/// Negates the magnitudes, which are not 0, whose bytes in `signs` are 0xFF; the other bytes of `signs` are 0.
#[inline(always)]
fn signed(magnitudes: [u8; 8], signs: u64) -> [i8; 8] {
    // The complement plus one. No sum carries into the next byte, because no complement is 0xFF.
    bytemuck::cast(((u64::from_le_bytes(magnitudes) ^ signs) + (signs & ONES)).to_le_bytes())
}

/// Two entries of four magnitudes.
#[inline(always)]
fn pair([a, b, c, d]: [u8; 4], [e, f, g, h]: [u8; 4]) -> [u8; 8] {
    [a, b, c, d, e, f, g, h]
}

/// Eight times the numbers of an entry of [`grids::IQ1`], plus or minus 1: the shift is an eighth.
#[inline(always)]
fn shifted(entry: [u8; 8], negative: bool) -> [i8; 8] {
    // Entries are 8 more. With the top bit of each byte set, no difference borrows from the next byte.
    let less = if negative { 9 * ONES } else { 7 * ONES };
    bytemuck::cast((((u64::from_le_bytes(entry) | (0x80 * ONES)) - less) ^ (0x80 * ONES)).to_le_bytes())
}

/// Eight codes of each of 32 groups, and a scale per 16 or 32 elements as `scale(sub-block of 16)`.
#[inline(always)]
fn groups(codes: &mut [i8; 256]) -> impl Iterator<Item = (usize, &mut [i8; 8])> {
    codes.as_chunks_mut::<8>().0.iter_mut().enumerate()
}

/// Sixteen scales, from [`BlockIq2Xs::scales`] or [`BlockIq2S::scales`].
#[inline(always)]
fn nibble_scales(d: f32, packed: &[u8; 8], scales: &mut [f32]) {
    for (pair, packed) in scales.as_chunks_mut::<2>().0.iter_mut().zip(packed) {
        *pair = [packed & 15, packed >> 4].map(|scale| d * (f32::from(scale) + 0.5) * 0.25);
    }
}

impl Expand<256> for BlockIq2Xxs {
    #[inline(always)]
    fn expand(&self, codes: &mut [i8; 256], scales: &mut [f32]) {
        let d = self.d.to_f32();
        let subs = codes.as_chunks_mut::<32>().0.iter_mut().zip(scales.as_chunks_mut::<2>().0);
        for (b, (codes, scales)) in subs.enumerate() {
            let (indices, word) = self.indices_and_word(b);
            *scales = [d * ((word >> 28) as f32 + 0.5) * 0.25; 2];
            for (l, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                let signs = EVEN_SIGNS[(word >> (7 * l)) as usize & 127];
                *codes = signed(grids::IQ2_XXS[usize::from(indices[l])], signs);
            }
        }
    }
}

impl Expand<256> for BlockIq2Xs {
    #[inline(always)]
    fn expand(&self, codes: &mut [i8; 256], scales: &mut [f32]) {
        nibble_scales(self.d.to_f32(), &self.scales, scales);
        for ((_, codes), word) in groups(codes).zip(self.qs) {
            let word = usize::from(u16::from_le_bytes(word));
            *codes = signed(grids::IQ2_XS[word & 511], EVEN_SIGNS[word >> 9]);
        }
    }
}

impl Expand<256> for BlockIq2S {
    #[inline(always)]
    fn expand(&self, codes: &mut [i8; 256], scales: &mut [f32]) {
        nibble_scales(self.d.to_f32(), &self.scales, scales);
        for (g, codes) in groups(codes) {
            let high = usize::from(self.qh[g / 4] >> (g % 4 * 2) & 3);
            *codes = signed(grids::IQ2_S[usize::from(self.qs[g]) | high << 8], SIGNS[usize::from(self.signs[g])]);
        }
    }
}

impl Expand<256> for BlockIq3Xxs {
    #[inline(always)]
    fn expand(&self, codes: &mut [i8; 256], scales: &mut [f32]) {
        let d = self.d.to_f32();
        let subs = codes.as_chunks_mut::<32>().0.iter_mut().zip(scales.as_chunks_mut::<2>().0);
        for (b, (codes, scales)) in subs.enumerate() {
            let word = u32::from_le_bytes(self.scales_and_signs[b]);
            *scales = [d * ((word >> 28) as f32 + 0.5) * 0.5; 2];
            for (l, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                let entry = |i: usize| grids::IQ3_XXS[usize::from(self.qs[8 * b + 2 * l + i])];
                *codes = signed(pair(entry(0), entry(1)), EVEN_SIGNS[(word >> (7 * l)) as usize & 127]);
            }
        }
    }
}

impl Expand<256> for BlockIq3S {
    #[inline(always)]
    fn expand(&self, codes: &mut [i8; 256], scales: &mut [f32]) {
        let d = self.d.to_f32();
        let subs = codes.as_chunks_mut::<32>().0.iter_mut().zip(scales.as_chunks_mut::<2>().0);
        for (b, (codes, scales)) in subs.enumerate() {
            let scale = self.scales[b / 2] >> (b % 2 * 4) & 15;
            *scales = [d * f32::from(1 + 2 * scale); 2];
            let high = usize::from(self.qh[b]) << 8;
            for (l, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                let entry =
                    |i: usize| grids::IQ3_S[usize::from(self.qs[8 * b + 2 * l + i]) | high >> (2 * l + i) & 256];
                *codes = signed(pair(entry(0), entry(1)), SIGNS[usize::from(self.signs[4 * b + l])]);
            }
        }
    }
}

impl Expand<256> for BlockIq1S {
    #[inline(always)]
    fn expand(&self, codes: &mut [i8; 256], scales: &mut [f32]) {
        let d = self.d.to_f32() * 0.125;
        let subs = codes.as_chunks_mut::<32>().0.iter_mut().zip(scales.as_chunks_mut::<2>().0);
        for (b, (codes, scales)) in subs.enumerate() {
            let word = u16::from_le_bytes(self.qh[b]);
            *scales = [d * f32::from(2 * (word >> 12 & 7) + 1); 2];
            for (l, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                let high = usize::from(word >> (3 * l) & 7);
                *codes = shifted(grids::IQ1[usize::from(self.qs[4 * b + l]) | high << 8], word >> 15 == 1);
            }
        }
    }
}

impl Expand<256> for BlockIq1M {
    #[inline(always)]
    fn expand(&self, codes: &mut [i8; 256], scales: &mut [f32]) {
        let d = self.d().to_f32() * 0.125;
        for (s, scale) in scales.iter_mut().enumerate() {
            *scale = d * f32::from(2 * self.scale(s) + 1);
        }
        for (g, codes) in groups(codes) {
            let nibble = self.qh[g / 2] >> (g % 2 * 4);
            let index = usize::from(self.qs[g]) | usize::from(nibble & 7) << 8;
            *codes = shifted(grids::IQ1[index], nibble >> 3 & 1 == 1);
        }
    }
}

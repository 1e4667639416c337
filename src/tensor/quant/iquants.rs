//! The i-quants IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS and IQ3_S: codes are indices of entries of a grid, with signs. They
//! only convert to f32. A quantiser searches the grid for the neighbours of each eight elements, which takes ggml minutes for a
//! model and a matrix of importances, so ggml's CPU backend has none either.

use super::{Decoder, grids};
use crate::tensor::blocks::{
    BlockIq1M, BlockIq1S, BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3S, BlockIq3Xxs, signs_of_index,
};

/// Writes eight magnitudes with the signs of bits 0 to 7, each multiplied by `unit`.
#[inline]
fn put_signed(magnitudes: [u8; 8], signs: u8, unit: f32, to: &mut [f32; 8]) {
    for (k, (to, magnitude)) in to.iter_mut().zip(magnitudes).enumerate() {
        let value = f32::from(magnitude) * unit;
        *to = if signs >> k & 1 == 1 { -value } else { value };
    }
}

/// Two entries of four magnitudes.
#[inline]
fn pair([a, b, c, d]: [u8; 4], [e, f, g, h]: [u8; 4]) -> [u8; 8] {
    [a, b, c, d, e, f, g, h]
}

/// Writes eight numbers of IQ1, each moved by `delta` and multiplied by `unit`.
#[inline]
fn put_shifted(numbers: [u8; 8], delta: f32, unit: f32, to: &mut [f32; 8]) {
    for (to, number) in to.iter_mut().zip(numbers) {
        *to = (f32::from(number as i8) + delta) * unit;
    }
}

/// The shift of IQ1 by its sign bit.
#[inline]
fn delta(negative: bool) -> f32 {
    if negative { -0.125 } else { 0.125 }
}

impl Decoder<256> for BlockIq2Xxs {
    fn decode(&self, values: &mut [f32; 256]) {
        let d = self.d.to_f32();
        for (b, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (indices, word) = self.indices_and_word(b);
            let unit = d * ((word >> 28) as f32 + 0.5) * 0.25;
            for (l, to) in values.as_chunks_mut().0.iter_mut().enumerate() {
                let signs = signs_of_index((word >> (7 * l)) as u8 & 127);
                put_signed(grids::IQ2_XXS[usize::from(indices[l])], signs, unit, to);
            }
        }
    }
}

impl Decoder<256> for BlockIq2Xs {
    fn decode(&self, values: &mut [f32; 256]) {
        let d = self.d.to_f32();
        for (g, to) in values.as_chunks_mut().0.iter_mut().enumerate() {
            let scale = self.scales[g / 4] >> (g / 2 % 2 * 4) & 15;
            let unit = d * (f32::from(scale) + 0.5) * 0.25;
            let word = u16::from_le_bytes(self.qs[g]);
            put_signed(grids::IQ2_XS[usize::from(word & 511)], signs_of_index((word >> 9) as u8), unit, to);
        }
    }
}

impl Decoder<256> for BlockIq2S {
    fn decode(&self, values: &mut [f32; 256]) {
        let d = self.d.to_f32();
        for (g, to) in values.as_chunks_mut().0.iter_mut().enumerate() {
            let scale = self.scales[g / 4] >> (g / 2 % 2 * 4) & 15;
            let unit = d * (f32::from(scale) + 0.5) * 0.25;
            let high = usize::from(self.qh[g / 4] >> (g % 4 * 2) & 3);
            put_signed(grids::IQ2_S[usize::from(self.qs[g]) | high << 8], self.signs[g], unit, to);
        }
    }
}

impl Decoder<256> for BlockIq3Xxs {
    fn decode(&self, values: &mut [f32; 256]) {
        let d = self.d.to_f32();
        for (b, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let word = u32::from_le_bytes(self.scales_and_signs[b]);
            let unit = d * ((word >> 28) as f32 + 0.5) * 0.5;
            for (l, to) in values.as_chunks_mut().0.iter_mut().enumerate() {
                let entry = |i: usize| grids::IQ3_XXS[usize::from(self.qs[8 * b + 2 * l + i])];
                put_signed(pair(entry(0), entry(1)), signs_of_index((word >> (7 * l)) as u8 & 127), unit, to);
            }
        }
    }
}

impl Decoder<256> for BlockIq3S {
    fn decode(&self, values: &mut [f32; 256]) {
        let d = self.d.to_f32();
        for (b, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let scale = self.scales[b / 2] >> (b % 2 * 4) & 15;
            let unit = d * f32::from(1 + 2 * scale);
            for (l, to) in values.as_chunks_mut().0.iter_mut().enumerate() {
                let entry = |i: usize| {
                    let high = usize::from(self.qh[b] >> (2 * l + i) & 1);
                    grids::IQ3_S[usize::from(self.qs[8 * b + 2 * l + i]) | high << 8]
                };
                put_signed(pair(entry(0), entry(1)), self.signs[4 * b + l], unit, to);
            }
        }
    }
}

impl Decoder<256> for BlockIq1S {
    fn decode(&self, values: &mut [f32; 256]) {
        let d = self.d.to_f32();
        for (b, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let word = u16::from_le_bytes(self.qh[b]);
            let (unit, delta) = (d * f32::from(2 * (word >> 12 & 7) + 1), delta(word >> 15 == 1));
            for (l, to) in values.as_chunks_mut().0.iter_mut().enumerate() {
                let high = usize::from(word >> (3 * l) & 7);
                put_shifted(grids::IQ1[usize::from(self.qs[4 * b + l]) | high << 8], delta, unit, to);
            }
        }
    }
}

impl Decoder<256> for BlockIq1M {
    fn decode(&self, values: &mut [f32; 256]) {
        let d = self.d().to_f32();
        for (g, to) in values.as_chunks_mut().0.iter_mut().enumerate() {
            let unit = d * f32::from(2 * self.scale(g / 2) + 1);
            let nibble = self.qh[g / 2] >> (g % 2 * 4) & 15;
            let index = usize::from(self.qs[g]) | usize::from(nibble & 7) << 8;
            put_shifted(grids::IQ1[index], delta(nibble >> 3 == 1), unit, to);
        }
    }
}

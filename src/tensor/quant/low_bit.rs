//! Types of one scale and one or two bits per element: Q1_0 (signs), TQ1_0 and TQ2_0 (ternary), Q2_0 (ternary, and 2).

use super::Codec;
use super::expand::Expand;
use super::grids::SIGNS;
use crate::tensor::blocks::{BlockQ1_0, BlockQ2_0, BlockTq1_0, BlockTq2_0, F16Bits};

/// The largest magnitude.
fn max_abs(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |max, x| if x.abs() > max { x.abs() } else { max })
}

/// Scale and codes 0, 1, 2 of values rounded to -1, 0 or 1 times the largest magnitude; halves away from zero.
fn ternary<const N: usize>(values: &[f32; N]) -> (F16Bits, [u8; N]) {
    let d = max_abs(values);
    let id = if d > 0.0 { 1.0 / d } else { 0.0 };
    (F16Bits::from_f32(d), values.map(|x| 1 + u8::from(x * id >= 0.5) - u8::from(x * id <= -0.5)))
}

impl Expand<128> for BlockQ1_0 {
    #[inline(always)]
    fn expand(&self, codes: &mut [i8; 128], scales: &mut [f32]) {
        scales.fill(self.d.to_f32());
        for (codes, &bits) in codes.as_chunks_mut::<8>().0.iter_mut().zip(&self.qs) {
            // 1 for a set bit, else -1.
            *codes = bytemuck::cast((!SIGNS[usize::from(bits)] | 0x0101_0101_0101_0101).to_le_bytes());
        }
    }
}

impl Codec<128> for BlockQ1_0 {
    fn unpack(&self, values: &mut [f32; 128]) {
        self.unpack_expanded(values);
    }

    /// The scale is the mean magnitude, summed in order of the elements as ggml does.
    fn pack(values: &[f32; 128]) -> Self {
        let d = values.iter().fold(0f32, |sum, x| sum + x.abs()) / 128.0;
        let mut qs = [0; 16];
        for (bits, values) in qs.iter_mut().zip(values.as_chunks::<8>().0) {
            *bits = values.iter().enumerate().map(|(j, &x)| u8::from(x >= 0.0) << j).sum();
        }
        BlockQ1_0 { d: F16Bits::from_f32(d), qs }
    }
}

impl Expand<64> for BlockQ2_0 {
    #[inline(always)]
    fn expand(&self, codes: &mut [i8; 64], scales: &mut [f32]) {
        scales.fill(self.d.to_f32());
        for (codes, &byte) in codes.as_chunks_mut::<4>().0.iter_mut().zip(&self.qs) {
            *codes = std::array::from_fn(|j| (byte >> (2 * j) & 3) as i8 - 1);
        }
    }
}

impl Codec<64> for BlockQ2_0 {
    fn unpack(&self, values: &mut [f32; 64]) {
        self.unpack_expanded(values);
    }

    /// The scale is the largest magnitude, so that no value gets the code 3, which stands for 2: ggml's quantiser leaves it to
    /// programs that make models.
    fn pack(values: &[f32; 64]) -> Self {
        let (d, codes) = ternary(values);
        let four = codes.as_chunks::<4>().0;
        BlockQ2_0 { d, qs: std::array::from_fn(|i| four[i][0] | four[i][1] << 2 | four[i][2] << 4 | four[i][3] << 6) }
    }
}

/// The first element of a TQ1_0 byte, and the distance to the byte's next: byte 0 to 47 of `qs`, then the bytes of `qh`. Each group
/// of 32, 16 or 4 bytes holds the first digits of all its bytes, then the second ones, and so on.
const fn tq1_elements(byte: usize) -> (usize, usize) {
    match byte {
        0..32 => (byte, 32),
        32..48 => (160 + byte - 32, 16),
        _ => (240 + byte - 48, 4),
    }
}

impl Expand<256> for BlockTq1_0 {
    #[inline(always)]
    fn expand(&self, codes: &mut [i8; 256], scales: &mut [f32]) {
        scales.fill(self.d.to_f32());
        // A byte is a fraction of 256, its first digit the integer part of three times that. Three times the byte, modulo 256,
        // has the next digit first.
        let code = |byte: u8| i8::from(byte > 85) + i8::from(byte > 170) - 1;
        let next = |byte: u8| byte.wrapping_mul(3);
        let (qs, rest) = codes.split_at_mut(240);
        let (long, short) = qs.split_at_mut(160);
        let mut bytes: [u8; 32] = std::array::from_fn(|m| self.qs[m]);
        for codes in long.as_chunks_mut::<32>().0 {
            *codes = bytes.map(code);
            bytes = bytes.map(next);
        }
        let mut bytes: [u8; 16] = std::array::from_fn(|m| self.qs[32 + m]);
        for codes in short.as_chunks_mut::<16>().0 {
            *codes = bytes.map(code);
            bytes = bytes.map(next);
        }
        let mut bytes = self.qh;
        for codes in rest.as_chunks_mut::<4>().0 {
            *codes = bytes.map(code);
            bytes = bytes.map(next);
        }
    }
}

impl Codec<256> for BlockTq1_0 {
    fn unpack(&self, values: &mut [f32; 256]) {
        self.unpack_expanded(values);
    }

    fn pack(values: &[f32; 256]) -> Self {
        let (d, codes) = ternary(values);
        // A byte is a fraction of five base-3 digits, scaled to 256 and rounded up, so that a digit is the integer part after a
        // product with a power of three.
        let pack = |byte: usize| {
            let (first, step) = tq1_elements(byte);
            let digits = if byte < 48 { 5 } else { 4 };
            let number = (0..digits).fold(0, |number, n| 3 * number + u16::from(codes[first + n * step]));
            let number = if digits == 5 { number } else { 3 * number };
            (number * 256).div_ceil(243) as u8
        };
        BlockTq1_0 { qs: std::array::from_fn(pack), qh: std::array::from_fn(|i| pack(48 + i)), d }
    }
}

impl Expand<256> for BlockTq2_0 {
    #[inline(always)]
    fn expand(&self, codes: &mut [i8; 256], scales: &mut [f32]) {
        scales.fill(self.d.to_f32());
        for (i, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let shift = i % 4 * 2;
            *codes = self.qs.as_chunks::<32>().0[i / 4].map(|byte| (byte >> shift & 3) as i8 - 1);
        }
    }
}

impl Codec<256> for BlockTq2_0 {
    fn unpack(&self, values: &mut [f32; 256]) {
        self.unpack_expanded(values);
    }

    fn pack(values: &[f32; 256]) -> Self {
        let (d, codes) = ternary(values);
        let code = |i: usize, n: usize| codes[i / 32 * 128 + i % 32 + 32 * n] << (2 * n);
        BlockTq2_0 { qs: std::array::from_fn(|i| code(i, 0) | code(i, 1) | code(i, 2) | code(i, 3)), d }
    }
}

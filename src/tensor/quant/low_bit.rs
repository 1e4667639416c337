//! Types of one scale and one or two bits per element: Q1_0 (signs), TQ1_0 and TQ2_0 (ternary), Q2_0 (ternary, and 2).

use super::Codec;
use crate::tensor::blocks::{BlockQ1_0, BlockQ2_0, BlockTq1_0, BlockTq2_0, F16Bits};

/// Powers of three up to 3^4: a product modulo 256 moves a digit of a TQ1_0 byte to its top.
const POWERS: [u8; 5] = [1, 3, 9, 27, 81];

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

impl Codec<128> for BlockQ1_0 {
    fn unpack(&self, values: &mut [f32; 128]) {
        let d = self.d.to_f32();
        for (values, &bits) in values.as_chunks_mut::<8>().0.iter_mut().zip(&self.qs) {
            *values = std::array::from_fn(|j| if bits >> j & 1 == 1 { d } else { -d });
        }
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

impl Codec<64> for BlockQ2_0 {
    fn unpack(&self, values: &mut [f32; 64]) {
        let d = self.d.to_f32();
        for (values, &codes) in values.as_chunks_mut::<4>().0.iter_mut().zip(&self.qs) {
            *values = std::array::from_fn(|j| (f32::from(codes >> (2 * j) & 3) - 1.0) * d);
        }
    }

    /// The scale is the largest magnitude, so that no value gets the code 3, which stands for 2: ggml's quantiser leaves it to
    /// programs that make models.
    fn pack(values: &[f32; 64]) -> Self {
        let (d, codes) = ternary(values);
        let four = codes.as_chunks::<4>().0;
        BlockQ2_0 { d, qs: std::array::from_fn(|i| four[i][0] | four[i][1] << 2 | four[i][2] << 4 | four[i][3] << 6) }
    }
}

/// The first element of a TQ1_0 byte, and the distance to the byte's next: byte 0 to 47 of `qs`, then those of `qh`. Each group
/// of 32, 16 or 4 bytes holds the first digits of all its bytes, then the second ones, and so on.
const fn tq1_elements(byte: usize) -> (usize, usize) {
    match byte {
        0..32 => (byte, 32),
        32..48 => (160 + byte - 32, 16),
        _ => (240 + byte - 48, 4),
    }
}

impl Codec<256> for BlockTq1_0 {
    fn unpack(&self, values: &mut [f32; 256]) {
        let d = self.d.to_f32();
        let value = |byte: u8, digit: usize| {
            let digit = u16::from(byte.wrapping_mul(POWERS[digit])) * 3 >> 8;
            (f32::from(digit) - 1.0) * d
        };
        let (qs, qh) = values.split_at_mut(240);
        let (long, short) = qs.split_at_mut(160);
        for (n, values) in long.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            *values = std::array::from_fn(|m| value(self.qs[m], n));
        }
        for (n, values) in short.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            *values = std::array::from_fn(|m| value(self.qs[32 + m], n));
        }
        for (n, values) in qh.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *values = self.qh.map(|byte| value(byte, n));
        }
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

impl Codec<256> for BlockTq2_0 {
    fn unpack(&self, values: &mut [f32; 256]) {
        let d = self.d.to_f32();
        for (i, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (from, shift) = (i / 4 * 32, i % 4 * 2);
            *values = std::array::from_fn(|m| (f32::from(self.qs[from + m] >> shift & 3) - 1.0) * d);
        }
    }

    fn pack(values: &[f32; 256]) -> Self {
        let (d, codes) = ternary(values);
        let code = |i: usize, n: usize| codes[i / 32 * 128 + i % 32 + 32 * n] << (2 * n);
        BlockTq2_0 { qs: std::array::from_fn(|i| code(i, 0) | code(i, 1) | code(i, 2) | code(i, 3)), d }
    }
}

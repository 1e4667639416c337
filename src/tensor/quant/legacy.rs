//! Types with blocks of 32: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_1, IQ4_NL, MXFP4.
//!
//! Codes are computed with the scale before its rounding to f16, as in ggml's reference quantisers (ggml-quants.c). Casts
//! saturate, so codes are in range even if the inverse of a scale overflows.

use super::Codec;
use super::nvfp4::{FP4_MIDPOINTS, nearest_fp4};
use crate::tensor::blocks::{BlockIq4Nl, BlockMxfp4, BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0, BlockQ8_1};
use crate::tensor::blocks::{F16Bits, FP4_VALUES, IQ4_VALUES};

const N: usize = 32;
type Values = [f32; N];

/// Magnitudes below this make IQ4_NL blocks of zeros: their squares, the weights of the fit, would vanish.
const IQ4_ZERO: f32 = 1e-15;

/// Splits bytes into 32 codes: low nibbles first, then high ones.
fn nibbles(qs: &[u8; 16]) -> [u8; N] {
    let mut codes = [0; N];
    for j in 0..16 {
        codes[j] = qs[j] & 15;
        codes[j + 16] = qs[j] >> 4;
    }
    codes
}

/// Inverse of [`nibbles`], of the low four bits of each code.
fn pack_nibbles(codes: &[u8; N]) -> [u8; 16] {
    std::array::from_fn(|j| codes[j] & 15 | codes[j + 16] << 4)
}

/// 32 codes of five bits: nibbles and, in `qh`, their fifth bits.
fn five_bits(qs: &[u8; 16], qh: [u8; 4]) -> [u8; N] {
    let mut codes = nibbles(qs);
    for j in 0..N {
        codes[j] |= (qh[j / 8] >> (j % 8) & 1) << 4;
    }
    codes
}

/// The fifth bits of 32 codes.
fn pack_fifth_bits(codes: &[u8; N]) -> [u8; 4] {
    let mut qh = [0; 4];
    for j in 0..N {
        qh[j / 8] |= (codes[j] >> 4 & 1) << (j % 8);
    }
    qh
}

/// The element of largest magnitude, with its sign; the first of several.
fn peak(values: &Values) -> f32 {
    let mut peak = 0f32;
    for &x in values {
        if x.abs() > peak.abs() {
            peak = x;
        }
    }
    peak
}

/// The largest magnitude, found in lanes so that it vectorises.
fn max_abs(values: &Values) -> f32 {
    let mut lanes = [0f32; 8];
    for chunk in values.as_chunks::<8>().0 {
        for l in 0..8 {
            lanes[l] = if chunk[l].abs() > lanes[l] { chunk[l].abs() } else { lanes[l] };
        }
    }
    lanes.iter().fold(0.0, |max, &x| if x > max { x } else { max })
}

fn min_max(values: &Values) -> (f32, f32) {
    values.iter().fold((f32::MAX, f32::MIN), |(min, max), &x| (x.min(min), x.max(max)))
}

/// `1 / d`; 0 for 0.
fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// Codes of the symmetric types: scale `peak / -zero`, the code `zero` for 0.
fn symmetric(values: &Values, zero: u8) -> (F16Bits, [u8; N]) {
    let d = peak(values) / -f32::from(zero);
    let (id, top) = (inverse(d), 2 * zero - 1);
    (F16Bits::from_f32(d), values.map(|x| ((x * id + (f32::from(zero) + 0.5)) as u8).min(top)))
}

/// Codes of the affine types: the minimum is code 0, the maximum is `top`. Returns scale, minimum and codes.
fn affine(values: &Values, top: u8) -> (F16Bits, F16Bits, [u8; N]) {
    let (min, max) = min_max(values);
    let d = (max - min) / f32::from(top);
    let id = inverse(d);
    (F16Bits::from_f32(d), F16Bits::from_f32(min), values.map(|x| (((x - min) * id + 0.5) as u8).min(top)))
}

impl Codec<N> for BlockQ4_0 {
    fn unpack(&self, values: &mut Values) {
        let d = self.d.to_f32();
        *values = nibbles(&self.qs).map(|q| f32::from(q as i8 - 8) * d);
    }

    fn pack(values: &Values) -> Self {
        let (d, codes) = symmetric(values, 8);
        BlockQ4_0 { d, qs: pack_nibbles(&codes) }
    }
}

impl Codec<N> for BlockQ4_1 {
    fn unpack(&self, values: &mut Values) {
        let (d, m) = (self.d.to_f32(), self.m.to_f32());
        *values = nibbles(&self.qs).map(|q| f32::from(q) * d + m);
    }

    fn pack(values: &Values) -> Self {
        let (d, m, codes) = affine(values, 15);
        BlockQ4_1 { d, m, qs: pack_nibbles(&codes) }
    }
}

impl Codec<N> for BlockQ5_0 {
    fn unpack(&self, values: &mut Values) {
        let d = self.d.to_f32();
        *values = five_bits(&self.qs, self.qh).map(|q| f32::from(q as i8 - 16) * d);
    }

    fn pack(values: &Values) -> Self {
        let (d, codes) = symmetric(values, 16);
        BlockQ5_0 { d, qh: pack_fifth_bits(&codes), qs: pack_nibbles(&codes) }
    }
}

impl Codec<N> for BlockQ5_1 {
    fn unpack(&self, values: &mut Values) {
        let (d, m) = (self.d.to_f32(), self.m.to_f32());
        *values = five_bits(&self.qs, self.qh).map(|q| f32::from(q) * d + m);
    }

    fn pack(values: &Values) -> Self {
        let (d, m, codes) = affine(values, 31);
        BlockQ5_1 { d, m, qh: pack_fifth_bits(&codes), qs: pack_nibbles(&codes) }
    }
}

impl Codec<N> for BlockQ8_0 {
    fn unpack(&self, values: &mut Values) {
        let d = self.d.to_f32();
        *values = self.qs.map(|q| f32::from(q) * d);
    }

    fn pack(values: &Values) -> Self {
        let d = max_abs(values) / 127.0;
        let id = inverse(d);
        BlockQ8_0 { d: F16Bits::from_f32(d), qs: values.map(|x| round_code(x * id)) }
    }
}

impl Codec<N> for BlockQ8_1 {
    fn unpack(&self, values: &mut Values) {
        let d = self.d.to_f32();
        *values = self.qs.map(|q| f32::from(q) * d);
    }

    fn pack(values: &Values) -> Self {
        let d = max_abs(values) / 127.0;
        let id = inverse(d);
        let qs = values.map(|x| round_code(x * id));
        let sum: i32 = qs.iter().map(|&q| i32::from(q)).sum();
        BlockQ8_1 { d: F16Bits::from_f32(d), s: F16Bits::from_f32(sum as f32 * d), qs }
    }
}

/// Rounds to the nearest of -127 to 127, halves away from zero: `f32::round`, but without its call per element.
fn round_code(x: f32) -> i8 {
    let x = x.clamp(-127.0, 127.0);
    let whole = x as i32;
    let rest = x - whole as f32;
    (whole + i32::from(rest >= 0.5) - i32::from(rest <= -0.5)) as i8
}

impl Codec<N> for BlockMxfp4 {
    fn unpack(&self, values: &mut Values) {
        let unit = self.unit();
        *values = nibbles(&self.qs).map(|q| f32::from(FP4_VALUES[usize::from(q)]) * unit);
    }

    fn pack(values: &Values) -> Self {
        // The exponent field is floor(log2) + 127. Magnitudes below the smallest scale get the smallest scale.
        let e = (max_abs(values).to_bits() >> 23).saturating_sub(2) as u8;
        let block = BlockMxfp4 { e, qs: [0; 16] };
        // Products with a power of two are exact, so each comparison is that of the true distances.
        let midpoints = FP4_MIDPOINTS.map(|m| m * block.unit());
        let codes = values.map(|x| nearest_fp4(x, &midpoints));
        BlockMxfp4 { e, qs: pack_nibbles(&codes) }
    }
}

impl Codec<N> for BlockIq4Nl {
    fn unpack(&self, values: &mut Values) {
        let d = self.d.to_f32();
        *values = nibbles(&self.qs).map(|q| f32::from(IQ4_VALUES[usize::from(q)]) * d);
    }

    fn pack(values: &Values) -> Self {
        let peak = peak(values);
        if peak.abs() < IQ4_ZERO {
            return BlockIq4Nl { d: F16Bits::default(), qs: [0x88; 16] };
        }
        let id = 1.0 / (peak / -127.0);
        let codes = values.map(|x| {
            let x = x * id;
            IQ4_VALUES.windows(2).map(|pair| u8::from(x >= (f32::from(pair[0]) + f32::from(pair[1])) * 0.5)).sum::<u8>()
        });
        // The least-squares scale for these codes, weighted by the squared elements.
        let (mut product, mut square) = (0f32, 0f32);
        for (&x, &code) in values.iter().zip(&codes) {
            let t = f32::from(IQ4_VALUES[usize::from(code)]);
            product += x * x * t * x;
            square += x * x * t * t;
        }
        BlockIq4Nl { d: F16Bits::from_f32(product * inverse(square)), qs: pack_nibbles(&codes) }
    }
}

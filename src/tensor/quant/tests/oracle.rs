//! The formulas of ggml's dequantisers (ggml-quants.c), element by element, in f64 on raw bytes.

use super::super::grids;
use crate::tensor::DType;

const FP4: [f64; 16] = [0., 1., 2., 3., 4., 6., 8., 12., 0., -1., -2., -3., -4., -6., -8., -12.];
const IQ4: [f64; 16] = [-127., -104., -83., -65., -49., -35., -22., -10., 1., 13., 25., 38., 53., 69., 89., 113.];

/// The definition of an IEEE half.
pub(super) fn half(bits: u16) -> f64 {
    let (sign, exponent, mantissa) = (bits >> 15, i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    let magnitude = match exponent {
        0 => mantissa * 2f64.powi(-24),
        31 if mantissa == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1.0 + mantissa / 1024.0) * 2f64.powi(exponent - 15),
    };
    if sign == 1 { -magnitude } else { magnitude }
}

/// The definition of E4M3 (OCP FP8, section 5.1).
pub(super) fn e4m3(bits: u8) -> f64 {
    let magnitude = if bits & 0x7f == 0x7f { f64::NAN } else { e4m3_magnitude(bits & 0x7f) };
    if bits >> 7 == 1 { -magnitude } else { magnitude }
}

/// As [`e4m3`], without a sign and without NaN: 0x7F is the number 480.
fn e4m3_magnitude(bits: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(bits >> 3), f64::from(bits & 7));
    if exponent == 0 { mantissa * 2f64.powi(-9) } else { (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7) }
}

/// Byte offsets of a block's f16 fields.
pub(crate) fn half_offsets(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::F16 | DType::Q4_0 | DType::Q5_0 | DType::Q8_0 | DType::IQ4_NL => &[0],
        DType::Q1_0 | DType::Q2_0 | DType::IQ4_XS | DType::IQ1_S => &[0],
        DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S | DType::IQ3_XXS | DType::IQ3_S => &[0],
        DType::Q4_1 | DType::Q5_1 | DType::Q8_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
        DType::Q2_K => &[80, 82],
        DType::Q3_K => &[108],
        DType::Q6_K => &[208],
        DType::TQ1_0 => &[52],
        DType::TQ2_0 => &[64],
        _ => &[],
    }
}

/// The value of element `j` of a block.
pub(super) fn element(dtype: DType, b: &[u8], j: usize) -> f64 {
    let f16 = |at: usize| half(u16::from_le_bytes([b[at], b[at + 1]]));
    let i8 = |at: usize| f64::from(b[at] as i8);
    let nibble = |at: usize| f64::from(if j < 16 { b[at + j] % 16 } else { b[at + j - 16] / 16 });
    let fifth = |at: usize| f64::from(16 * (b[at + j / 8] >> (j % 8) & 1));
    // Position within K blocks: half of 128, shift, byte.
    let (h, c, l) = (j / 128, j % 128 / 32, j % 32);
    let pair = |at: usize| f64::from(b[at + 32 * h + l] >> (2 * c) & 3);
    let k_nibble = |at: usize| f64::from(b[at + j / 64 * 32 + l] >> (4 * (j / 32 % 2)) & 15);
    let scale_min = || {
        let (s, b) = (j / 32, &b[4..16]);
        if s < 4 {
            (f64::from(b[s] & 63), f64::from(b[s + 4] & 63))
        } else {
            (f64::from((b[s + 4] & 15) + (b[s - 4] >> 6) * 16), f64::from((b[s + 4] >> 4) + (b[s] >> 6) * 16))
        }
    };
    match dtype {
        DType::F32 => f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        DType::F16 => f16(0),
        DType::BF16 => f64::from(f32::from_le_bytes([0, 0, b[0], b[1]])),
        DType::F8_E4M3 => e4m3(b[0]),
        DType::Q4_0 => (nibble(2) - 8.0) * f16(0),
        DType::Q4_1 => nibble(4) * f16(0) + f16(2),
        DType::Q5_0 => (nibble(6) + fifth(2) - 16.0) * f16(0),
        DType::Q5_1 => (nibble(8) + fifth(4)) * f16(0) + f16(2),
        DType::Q8_0 => i8(2 + j) * f16(0),
        DType::Q8_1 => i8(4 + j) * f16(0),
        DType::Q8_K => i8(4 + j) * f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        DType::MXFP4 => FP4[nibble(1) as usize] * 2f64.powi(i32::from(b[0]) - 128),
        DType::IQ4_NL => IQ4[nibble(2) as usize] * f16(0),
        DType::Q2_K => f16(80) * f64::from(b[j / 16] % 16) * pair(16) - f16(82) * f64::from(b[j / 16] / 16),
        DType::Q3_K => {
            let s = j / 16;
            let low = if s < 8 { b[96 + s] % 16 } else { b[96 + s - 8] / 16 };
            let scale = low + 16 * (b[104 + s % 4] >> (2 * (s / 4)) & 3);
            let q = pair(32) - if b[l] >> (4 * h + c) & 1 == 1 { 0.0 } else { 4.0 };
            f16(108) * (f64::from(scale) - 32.0) * q
        }
        DType::Q4_K => f16(0) * scale_min().0 * k_nibble(16) - f16(2) * scale_min().1,
        DType::Q5_K => {
            let q = k_nibble(48) + f64::from(16 * (b[16 + l] >> (j / 32) & 1));
            f16(0) * scale_min().0 * q - f16(2) * scale_min().1
        }
        DType::Q6_K => {
            let low = b[64 * h + l + 32 * (c % 2)] >> (4 * (c / 2)) & 15;
            f16(208) * i8(192 + j / 16) * (f64::from(low) + 16.0 * pair(128) - 32.0)
        }
        DType::Q1_0 => (2.0 * f64::from(b[2 + j / 8] >> (j % 8) & 1) - 1.0) * f16(0),
        DType::Q2_0 => (f64::from(b[2 + j / 4] >> (2 * (j % 4)) & 3) - 1.0) * f16(0),
        DType::NVFP4 => {
            let pair = b[4 + j / 16 * 8 + j % 8];
            let code = if j % 16 < 8 { pair % 16 } else { pair / 16 };
            let scale = if b[j / 16] == 0x7f { 0.0 } else { e4m3_magnitude(b[j / 16] & 0x7f) };
            FP4[usize::from(code)] * scale / 2.0
        }
        DType::TQ1_0 => {
            let (byte, digit) = match j {
                0..160 => (j % 32, j / 32),
                160..240 => (32 + j % 16, (j - 160) / 16),
                _ => (48 + j % 4, (j - 240) / 4),
            };
            let fraction = u32::from(b[byte]) * 3u32.pow(digit as u32) % 256;
            (f64::from(fraction * 3 / 256) - 1.0) * f16(52)
        }
        DType::TQ2_0 => (pair(0) - 1.0) * f16(64),
        DType::IQ4_XS => {
            let s = j / 32;
            let low = b[4 + s / 2] >> (4 * (s % 2)) & 15;
            let scale = low + 16 * (b[2 + s / 4] >> (2 * (s % 4)) & 3);
            let code = b[8 + 16 * s + j % 16] >> (4 * (l / 16)) & 15;
            f16(0) * (f64::from(scale) - 32.0) * IQ4[usize::from(code)]
        }
        _ => grid_element(dtype, b, j),
    }
}

/// The value of element `j` of an i-quant: `d * factor * (grid number)`, with group `g` of eight elements in sub-block `s` of 32.
fn grid_element(dtype: DType, b: &[u8], j: usize) -> f64 {
    let (s, g, k) = (j / 32, j / 8, j % 8);
    let d = half(u16::from_le_bytes([b[0], b[1]]));
    let byte = |at: usize| usize::from(b[at]);
    let word = |at: usize| u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
    let nibble = |at: usize, high: bool| f64::from(b[at] >> if high { 4 } else { 0 } & 15);
    // The eighth of seven bits of signs makes their number even.
    let even = |bits: u32| if k < 7 { bits >> k & 1 == 1 } else { (bits & 127).count_ones() % 2 == 1 };
    let signed = |negative: bool, magnitude: u8| if negative { -f64::from(magnitude) } else { f64::from(magnitude) };
    let shifted = |index: usize, negative: bool| {
        (f64::from(grids::IQ1[index][k]) - 8.0) / 8.0 + if negative { -0.125 } else { 0.125 }
    };
    match dtype {
        DType::IQ2_XXS => {
            let high = word(2 + 8 * s + 4);
            let magnitude = grids::IQ2_XXS[byte(2 + 8 * s + g % 4)][k];
            d * (f64::from(high >> 28) + 0.5) / 4.0 * signed(even(high >> (7 * (g % 4))), magnitude)
        }
        DType::IQ2_XS => {
            let code = u32::from(b[2 + 2 * g]) + 256 * u32::from(b[3 + 2 * g]);
            let scale = nibble(66 + s, g % 4 > 1) + 0.5;
            d * scale / 4.0 * signed(even(code >> 9), grids::IQ2_XS[code as usize % 512][k])
        }
        DType::IQ2_S => {
            let index = byte(2 + g) + 256 * (byte(66 + s) >> (2 * (g % 4)) & 3);
            let scale = nibble(74 + s, g % 4 > 1) + 0.5;
            d * scale / 4.0 * signed(b[34 + g] >> k & 1 == 1, grids::IQ2_S[index][k])
        }
        DType::IQ3_XXS => {
            let high = word(66 + 4 * s);
            let magnitude = grids::IQ3_XXS[byte(2 + j / 4)][j % 4];
            d * (f64::from(high >> 28) + 0.5) / 2.0 * signed(even(high >> (7 * (g % 4))), magnitude)
        }
        DType::IQ3_S => {
            let index = byte(2 + j / 4) + 256 * (byte(66 + s) >> (j / 4 % 8) & 1);
            let scale = 1.0 + 2.0 * nibble(106 + s / 2, s % 2 == 1);
            d * scale * signed(b[74 + g] >> k & 1 == 1, grids::IQ3_S[index][j % 4])
        }
        DType::IQ1_S => {
            let high = usize::from(u16::from_le_bytes([b[34 + 2 * s], b[35 + 2 * s]]));
            let index = byte(2 + g) + 256 * (high >> (3 * (g % 4)) & 7);
            d * (2.0 * (high >> 12 & 7) as f64 + 1.0) * shifted(index, high >> 15 == 1)
        }
        DType::IQ1_M => {
            let scales = u64::from_le_bytes(std::array::from_fn(|i| b[48 + i]));
            let d = half((0..4).map(|w| (scales >> (16 * w + 12) & 15) << (4 * w)).sum::<u64>() as u16);
            let scale = 2.0 * (scales >> (16 * (j / 64) + 3 * (j / 16 % 4)) & 7) as f64 + 1.0;
            let nibble = byte(32 + g / 2) >> (4 * (g % 2)) & 15;
            d * scale * shifted(byte(g) + 256 * (nibble & 7), nibble > 7)
        }
        other => panic!("no formula for {other}"),
    }
}

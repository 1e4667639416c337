//! The formulas of ggml's dequantisers (ggml-quants.c), element by element, in f64 on raw bytes.

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
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f64::from(bits & 7));
    let magnitude = match exponent {
        _ if bits & 0x7f == 0x7f => f64::NAN,
        0 => mantissa * 2f64.powi(-9),
        _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    };
    if bits >> 7 == 1 { -magnitude } else { magnitude }
}

/// Byte offsets of a block's f16 fields.
pub(crate) fn half_offsets(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::F16 | DType::Q4_0 | DType::Q5_0 | DType::Q8_0 | DType::IQ4_NL => &[0],
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
        DType::Q2_K => &[80, 82],
        DType::Q3_K => &[108],
        DType::Q6_K => &[208],
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
        other => panic!("no formula for {other}"),
    }
}

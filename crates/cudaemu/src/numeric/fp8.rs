//! The 8-bit formats of `cvt`: `.e4m3` (no infinity, largest 448, NaN 0x7f and 0xff) and `.e5m2` (the upper byte of a
//! binary16, largest 57344). In packed operands element 0 is the lower byte.

use super::half::{F16, f16_to_f32, f32_to_f16, relu as relu_f16};
use super::round::{E4M3, E5M2};
use super::types::Rounding;

/// An 8-bit floating-point format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8 {
    /// `.e4m3`
    E4m3,
    /// `.e5m2`
    E5m2,
}

/// Exact value as `.f16` (both formats fit); NaN becomes 0x7fff.
#[inline]
pub fn fp8_to_f16(format: Fp8, bits: u8) -> u16 {
    f32_to_f16(fp8_to_f32(format, bits))
}

/// Exact value; NaN becomes 0x7fffffff.
#[inline]
pub fn fp8_to_f32(format: Fp8, bits: u8) -> f32 {
    match format {
        Fp8::E5m2 => f16_to_f32(u16::from(bits) << 8),
        Fp8::E4m3 if bits & 0x7f == 0x7f => f32::from_bits(0x7fff_ffff),
        // The fields at the position of binary16's, whose exponent bias is 15 instead of 7: multiply by 2^8.
        Fp8::E4m3 => f16_to_f32(u16::from(bits & 0x80) << 8 | u16::from(bits & 0x7f) << 7) * 256.0,
    }
}

/// `cvt.rn.satfinite{.relu}`: nearest, ties to even; values beyond the largest finite one and infinity become that one; NaN
/// becomes 0x7f.
#[inline]
pub fn f32_to_fp8(format: Fp8, value: f32, relu: bool) -> u8 {
    if value.is_nan() {
        return 0x7f;
    }
    if relu && value.is_sign_negative() {
        return 0;
    }
    let target = match format {
        Fp8::E4m3 => E4M3,
        Fp8::E5m2 => E5M2,
    };
    target.encode_f64(f64::from(value), Rounding::Rn) as u8
}

/// As [`f32_to_fp8`], from `.f16`.
#[inline]
pub fn f16_to_fp8(format: Fp8, bits: u16, relu: bool) -> u8 {
    f32_to_fp8(format, f16_to_f32(bits), relu)
}

/// `cvt.rn.satfinite{.relu}.e4m3x2.f32 d, a, b` (and `.e5m2x2`): `a` goes to the upper byte.
#[inline]
pub fn cvt_fp8x2_f32(format: Fp8, a: f32, b: f32, relu: bool) -> u16 {
    u16::from(f32_to_fp8(format, a, relu)) << 8 | u16::from(f32_to_fp8(format, b, relu))
}

/// `cvt.rn.satfinite{.relu}.e4m3x2.f16x2` (and `.e5m2x2`), element by element.
#[inline]
pub fn cvt_fp8x2_f16x2(format: Fp8, a: u32, relu: bool) -> u16 {
    u16::from(f16_to_fp8(format, (a >> 16) as u16, relu)) << 8 | u16::from(f16_to_fp8(format, a as u16, relu))
}

/// `cvt.rn{.relu}.f16x2.e4m3x2` (and `.e5m2x2`), element by element; exact.
#[inline]
pub fn cvt_f16x2_fp8x2(format: Fp8, a: u16, relu: bool) -> u32 {
    let element = |bits: u8| {
        let value = fp8_to_f16(format, bits);
        u32::from(if relu { relu_f16::<F16>(value) } else { value })
    };
    element((a >> 8) as u8) << 16 | element(a as u8)
}

//! `.f16` and `.bf16` arithmetic on the bits, with a single rounding to nearest even.
//!
//! Operations compute an `f32` (or `f64`) that is exact, or rounded to odd, or rounded with at least 2p+2 bits (p: bits of the
//! target). After each of these a second rounding is harmless, and they round once to the target.

use super::round::{add_odd_f32, add_odd_f64, to_f32_odd};

/// A 16-bit floating-point format.
pub trait Half {
    /// Positive infinity, which is also the exponent mask.
    const INFINITY: u16;
    /// Exact value; see [`f16_to_f32`] and [`bf16_to_f32`] for NaN.
    fn to_f32(bits: u16) -> f32;
    /// Rounded to nearest even; any NaN becomes 0x7fff.
    fn from_f32(value: f32) -> u16;
    /// `fma.rn`: `a * b + c`, rounded once.
    fn multiply_add(a: u16, b: u16, c: u16) -> u16;
}

/// `.f16`: IEEE binary16.
pub struct F16;
/// `.bf16`: the upper half of a binary32.
pub struct Bf16;

impl Half for F16 {
    const INFINITY: u16 = 0x7c00;

    #[inline(always)]
    fn to_f32(bits: u16) -> f32 {
        f16_to_f32(bits)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> u16 {
        f32_to_f16(value)
    }

    #[inline(always)]
    fn multiply_add(a: u16, b: u16, c: u16) -> u16 {
        // The product has 22 bits and is far from the limits of f32.
        f32_to_f16(add_odd_f32(f16_to_f32(a) * f16_to_f32(b), f16_to_f32(c)))
    }
}

impl Half for Bf16 {
    const INFINITY: u16 = 0x7f80;

    #[inline(always)]
    fn to_f32(bits: u16) -> f32 {
        bf16_to_f32(bits)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> u16 {
        f32_to_bf16(value)
    }

    #[inline(always)]
    fn multiply_add(a: u16, b: u16, c: u16) -> u16 {
        // The product, and even more the sum, can exceed the range of f32.
        let product = f64::from(bf16_to_f32(a)) * f64::from(bf16_to_f32(b));
        f32_to_bf16(to_f32_odd(add_odd_f64(product, f64::from(bf16_to_f32(c)))))
    }
}

/// `cvt.f32.f16`: exact; NaN becomes 0x7fffffff.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff);
    // Multiplied by 2^112, the fields have the same meaning in f32 as in f16, subnormals included.
    let finite = (f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23)).to_bits();
    let special = if magnitude >= 0x7c00 { 0x7f80_0000 } else { 0 };
    let signed = u32::from(bits & 0x8000) << 16 | finite | special;
    f32::from_bits(if magnitude > 0x7c00 { 0x7fff_ffff } else { signed })
}

/// `cvt.rn.f16.f32`; NaN becomes 0x7fff.
#[inline(always)]
pub fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    // Clamped to 2^16, so that larger values become infinity. Adds half a unit minus one, plus the bit that makes ties go to
    // even; a carry correctly moves into the exponent.
    let clamped = if magnitude < 0x4780_0000 { magnitude } else { 0x4780_0000 };
    let normal = clamped.wrapping_add(0xfff + (clamped >> 13 & 1)).wrapping_sub(112 << 23) >> 13;
    // Near 0.5, f32 has the spacing of f16's subnormals, so the addition rounds.
    let subnormal = (f32::from_bits(clamped) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let finite = if magnitude < 0x3880_0000 { subnormal } else { normal };
    let signed = (bits >> 16 & 0x8000) | finite;
    if magnitude > 0x7f80_0000 { 0x7fff } else { signed as u16 }
}

/// Rounded once, to nearest even; NaN becomes 0x7fff.
#[inline(always)]
pub fn f64_to_f16(value: f64) -> u16 {
    f32_to_f16(to_f32_odd(value))
}

/// `cvt.f32.bf16`: the bits shifted up, of a NaN too.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// `cvt.rn.bf16.f32`; NaN becomes 0x7fff.
#[inline(always)]
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if value.is_nan() { 0x7fff } else { rounded as u16 }
}

/// Whether the bits are a NaN.
#[inline(always)]
pub fn is_nan<H: Half>(a: u16) -> bool {
    a & 0x7fff > H::INFINITY
}

/// `add{.rn}` of `.f16` and `.bf16`.
#[inline(always)]
pub fn add<H: Half>(a: u16, b: u16) -> u16 {
    H::from_f32(H::to_f32(a) + H::to_f32(b))
}

/// `mul{.rn}` of `.f16` and `.bf16`.
#[inline(always)]
pub fn mul<H: Half>(a: u16, b: u16) -> u16 {
    // Exact in f32, except bits of .bf16 products that are so far below half the smallest subnormal that they cannot affect the
    // result.
    H::from_f32(H::to_f32(a) * H::to_f32(b))
}

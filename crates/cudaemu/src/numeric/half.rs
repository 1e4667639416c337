//! `.f16` and `.bf16` arithmetic on the bits, with a single rounding to nearest even.
//!
//! Operations compute an `f32` (or `f64`) that is exact, or rounded to odd, or rounded with at least 2p+2 bits (p: bits of the
//! target). After each of these a second rounding is harmless, and they round once to the target.

use super::round::{add_odd_f32, add_odd_f64, to_f32_odd};
use super::single;
use super::types::{HalfMode, MinMax};

/// A 16-bit floating-point format.
pub trait Half {
    /// Canonical NaN: 0x7fff in both formats.
    const NAN: u16 = 0x7fff;
    /// Positive infinity, which is also the exponent mask.
    const INFINITY: u16;
    /// 1.0
    const ONE: u16;
    /// Exact value; see [`f16_to_f32`] and [`bf16_to_f32`] for NaN.
    fn to_f32(bits: u16) -> f32;
    /// Rounded to nearest even; any NaN becomes [`Half::NAN`].
    fn from_f32(value: f32) -> u16;
    /// `a * b + c`, rounded once.
    fn multiply_add(a: u16, b: u16, c: u16) -> u16;
}

/// `.f16`: IEEE binary16.
pub struct F16;
/// `.bf16`: the upper half of a binary32.
pub struct Bf16;

impl Half for F16 {
    const INFINITY: u16 = 0x7c00;
    const ONE: u16 = 0x3c00;

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
    const ONE: u16 = 0x3f80;

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

/// A subnormal becomes zero of the same sign.
#[inline(always)]
pub fn flush<H: Half>(a: u16) -> u16 {
    if a & H::INFINITY == 0 { a & 0x8000 } else { a }
}

/// Whether the bits are a NaN.
#[inline(always)]
pub fn is_nan<H: Half>(a: u16) -> bool {
    a & 0x7fff > H::INFINITY
}

#[inline(always)]
fn input<H: Half>(a: u16, mode: HalfMode) -> u16 {
    if mode.ftz { flush::<H>(a) } else { a }
}

#[inline(always)]
fn output<H: Half>(a: u16, mode: HalfMode) -> u16 {
    let a = if mode.ftz { flush::<H>(a) } else { a };
    let a = if mode.relu { relu::<H>(a) } else { a };
    if mode.sat { saturate::<H>(a) } else { a }
}

/// `.relu`: anything negative, -0.0 too, becomes +0.0; NaN becomes canonical.
#[inline(always)]
pub fn relu<H: Half>(a: u16) -> u16 {
    let clamped = if a & 0x8000 != 0 { 0 } else { a };
    if is_nan::<H>(a) { H::NAN } else { clamped }
}

/// `.sat`: clamped to [0.0, 1.0]; NaN and -0.0 become +0.0.
#[inline(always)]
pub fn saturate<H: Half>(a: u16) -> u16 {
    // For positive floats, the bits have the same order as the values.
    let clamped = if a < H::ONE { a } else { H::ONE };
    if a & 0x8000 != 0 || is_nan::<H>(a) { 0 } else { clamped }
}

/// `add{.rnd}{.ftz}{.sat}` of `.f16` and `.bf16`.
#[inline(always)]
pub fn add<H: Half>(a: u16, b: u16, mode: HalfMode) -> u16 {
    let (a, b) = (input::<H>(a, mode), input::<H>(b, mode));
    output::<H>(H::from_f32(H::to_f32(a) + H::to_f32(b)), mode)
}

/// `sub{.rnd}{.ftz}{.sat}` of `.f16` and `.bf16`.
#[inline(always)]
pub fn sub<H: Half>(a: u16, b: u16, mode: HalfMode) -> u16 {
    add::<H>(a, b ^ 0x8000, mode)
}

/// `mul{.rnd}{.ftz}{.sat}` of `.f16` and `.bf16`.
#[inline(always)]
pub fn mul<H: Half>(a: u16, b: u16, mode: HalfMode) -> u16 {
    let (a, b) = (input::<H>(a, mode), input::<H>(b, mode));
    // Exact in f32, except bits of .bf16 products that are so far below half the smallest subnormal that they cannot affect the
    // result.
    output::<H>(H::from_f32(H::to_f32(a) * H::to_f32(b)), mode)
}

/// `fma.rn{.ftz}{.sat}{.relu}` of `.f16` and `.bf16`: `a * b + c`, rounded once.
#[inline(always)]
pub fn fma<H: Half>(a: u16, b: u16, c: u16, mode: HalfMode) -> u16 {
    let (a, b, c) = (input::<H>(a, mode), input::<H>(b, mode), input::<H>(c, mode));
    output::<H>(H::multiply_add(a, b, c), mode)
}

/// `neg{.ftz}` of `.f16` and `.bf16`: flips the sign bit, of a NaN too (PTX leaves that open).
#[inline(always)]
pub fn neg<H: Half>(a: u16, ftz: bool) -> u16 {
    0x8000 ^ if ftz { flush::<H>(a) } else { a }
}

/// `abs{.ftz}` of `.f16` and `.bf16`: clears the sign bit, of a NaN too (PTX leaves that open).
#[inline(always)]
pub fn abs<H: Half>(a: u16, ftz: bool) -> u16 {
    0x7fff & if ftz { flush::<H>(a) } else { a }
}

/// The bits as an integer with the order of the values, -0.0 before +0.0.
#[inline(always)]
fn order(a: u16) -> i16 {
    let sign = a as i16 >> 15;
    (a as i16) ^ (sign & 0x7fff)
}

#[inline(always)]
fn select<H: Half>(a: u16, b: u16, mode: MinMax, first: impl Fn(i16, i16) -> bool) -> u16 {
    let (a, b) = if mode.ftz { (flush::<H>(a), flush::<H>(b)) } else { (a, b) };
    let sign = (a ^ b) & 0x8000;
    let (a, b) = if mode.xorsign_abs { (a & 0x7fff, b & 0x7fff) } else { (a, b) };
    let (nan_a, nan_b) = (is_nan::<H>(a), is_nan::<H>(b));
    let number = if nan_b || (!nan_a && first(order(a), order(b))) { a } else { b };
    let number = if mode.xorsign_abs { number | sign } else { number };
    if (nan_a && nan_b) || (mode.nan && (nan_a || nan_b)) { H::NAN } else { number }
}

/// `min{.ftz}{.NaN}{.xorsign.abs}` of `.f16` and `.bf16`: -0.0 is less than +0.0.
#[inline(always)]
pub fn min<H: Half>(a: u16, b: u16, mode: MinMax) -> u16 {
    select::<H>(a, b, mode, |a, b| a <= b)
}

/// `max{.ftz}{.NaN}{.xorsign.abs}` of `.f16` and `.bf16`: +0.0 is greater than -0.0.
#[inline(always)]
pub fn max<H: Half>(a: u16, b: u16, mode: MinMax) -> u16 {
    select::<H>(a, b, mode, |a, b| a >= b)
}

/// `tanh.approx` of `.f16` and `.bf16`: the exact value rounded, which is well within PTX's bounds of 2^-10.987 and 2^-8.
#[inline]
pub fn tanh<H: Half>(a: u16) -> u16 {
    H::from_f32(single::canonical(f64::from(H::to_f32(a)).tanh() as f32))
}

/// `ex2.approx` of `.f16` (with `ftz` only if written) and `.bf16` (always `.ftz`): the exact value rounded.
#[inline]
pub fn ex2<H: Half>(a: u16, ftz: bool) -> u16 {
    let mode = HalfMode { ftz, ..HalfMode::PLAIN };
    output::<H>(H::from_f32(f64::from(H::to_f32(input::<H>(a, mode))).exp2() as f32), mode)
}

/// Applies a unary operation to both halves of a packed pair.
#[inline(always)]
pub fn x2(a: u32, op: impl Fn(u16) -> u16) -> u32 {
    pack(op(low(a)), op(high(a)))
}

// The packed forms are separate functions without closures: closures are inlined by a cost estimate only, for which these are
// too large, and a call per lane prevents vectorisation of the loop.

#[inline(always)]
const fn low(a: u32) -> u16 {
    a as u16
}

#[inline(always)]
const fn high(a: u32) -> u16 {
    (a >> 16) as u16
}

#[inline(always)]
const fn pack(low: u16, high: u16) -> u32 {
    low as u32 | (high as u32) << 16
}

/// `add` of `.f16x2` and `.bf16x2`: [`add`] on each half.
#[inline(always)]
pub fn add_x2<H: Half>(a: u32, b: u32, mode: HalfMode) -> u32 {
    pack(add::<H>(low(a), low(b), mode), add::<H>(high(a), high(b), mode))
}

/// `sub` of `.f16x2` and `.bf16x2`: [`sub`] on each half.
#[inline(always)]
pub fn sub_x2<H: Half>(a: u32, b: u32, mode: HalfMode) -> u32 {
    pack(sub::<H>(low(a), low(b), mode), sub::<H>(high(a), high(b), mode))
}

/// `mul` of `.f16x2` and `.bf16x2`: [`mul`] on each half.
#[inline(always)]
pub fn mul_x2<H: Half>(a: u32, b: u32, mode: HalfMode) -> u32 {
    pack(mul::<H>(low(a), low(b), mode), mul::<H>(high(a), high(b), mode))
}

/// `fma` of `.f16x2` and `.bf16x2`: [`fma`] on each half.
#[inline(always)]
pub fn fma_x2<H: Half>(a: u32, b: u32, c: u32, mode: HalfMode) -> u32 {
    pack(fma::<H>(low(a), low(b), low(c), mode), fma::<H>(high(a), high(b), high(c), mode))
}

/// `min` of `.f16x2` and `.bf16x2`: [`min`] on each half.
#[inline(always)]
pub fn min_x2<H: Half>(a: u32, b: u32, mode: MinMax) -> u32 {
    pack(min::<H>(low(a), low(b), mode), min::<H>(high(a), high(b), mode))
}

/// `max` of `.f16x2` and `.bf16x2`: [`max`] on each half.
#[inline(always)]
pub fn max_x2<H: Half>(a: u32, b: u32, mode: MinMax) -> u32 {
    pack(max::<H>(low(a), low(b), mode), max::<H>(high(a), high(b), mode))
}

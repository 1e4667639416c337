//! `.f32` arithmetic (PTX ISA, "Floating-Point Instructions").
//!
//! Round to nearest uses the host's operations. If the caller is compiled for a target with FMA, [`fma`] becomes one
//! instruction; otherwise it is a call into the C library. The directed modes round once from an `f64`.

use super::round::{add_odd_f64, div_odd_f64, sqrt_odd_f64, to_f32};
use super::types::{MinMax, Mode, Rounding, Testp};

/// The NaN that `.f32` arithmetic gives.
pub const NAN: f32 = f32::from_bits(0x7fff_ffff);

/// `.ftz`: a subnormal becomes zero of the same sign.
#[inline(always)]
pub fn flush(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits(if bits & 0x7f80_0000 == 0 { bits & 0x8000_0000 } else { bits })
}

/// Any NaN becomes 0x7fffffff. Uses integers, because the compiler treats all NaNs as equivalent.
#[inline(always)]
pub fn canonical(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 { 0x7fff_ffff } else { bits })
}

/// `.sat`: clamped to [0.0, 1.0]; NaN and -0.0 become +0.0.
#[inline(always)]
pub fn saturate(x: f32) -> f32 {
    let low = if x > 0.0 { x } else { 0.0 };
    if low < 1.0 { low } else { 1.0 }
}

#[inline(always)]
fn input(x: f32, mode: Mode) -> f32 {
    if mode.ftz { flush(x) } else { x }
}

#[inline(always)]
fn output(x: f32, mode: Mode) -> f32 {
    let x = if mode.ftz { flush(x) } else { x };
    if mode.sat { saturate(x) } else { canonical(x) }
}

/// An exact sum of zero from addends of different signs is -0.0 under `.rm` and +0.0 otherwise (IEEE 754, 6.3).
#[inline(always)]
fn directed_sum(a: f64, b: f64, round: Rounding) -> f32 {
    let sum = add_odd_f64(a, b);
    if sum == 0.0 && round == Rounding::Rm && a.is_sign_negative() != b.is_sign_negative() {
        return -0.0;
    }
    to_f32(sum, round)
}

/// `add{.rnd}{.ftz}{.sat}.f32`
#[inline(always)]
pub fn add(a: f32, b: f32, mode: Mode) -> f32 {
    let (a, b) = (input(a, mode), input(b, mode));
    let sum = match mode.round {
        Rounding::Rn => a + b,
        round => directed_sum(f64::from(a), f64::from(b), round),
    };
    output(sum, mode)
}

/// `sub{.rnd}{.ftz}{.sat}.f32`
#[inline(always)]
pub fn sub(a: f32, b: f32, mode: Mode) -> f32 {
    add(a, -b, mode)
}

/// `mul{.rnd}{.ftz}{.sat}.f32`
#[inline(always)]
pub fn mul(a: f32, b: f32, mode: Mode) -> f32 {
    let (a, b) = (input(a, mode), input(b, mode));
    let product = match mode.round {
        Rounding::Rn => a * b,
        round => to_f32(f64::from(a) * f64::from(b), round),
    };
    output(product, mode)
}

/// `fma.rnd{.ftz}{.sat}.f32` and, from sm_20, `mad.rnd.f32`: `a * b + c`, rounded once.
#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32, mode: Mode) -> f32 {
    let (a, b, c) = (input(a, mode), input(b, mode), input(c, mode));
    let result = match mode.round {
        Rounding::Rn => a.mul_add(b, c),
        round => directed_sum(f64::from(a) * f64::from(b), f64::from(c), round),
    };
    output(result, mode)
}

/// `div.rnd{.ftz}.f32`
#[inline]
pub fn div(a: f32, b: f32, mode: Mode) -> f32 {
    let (a, b) = (input(a, mode), input(b, mode));
    let quotient = match mode.round {
        Rounding::Rn => a / b,
        round => to_f32(div_odd_f64(f64::from(a), f64::from(b)), round),
    };
    output(quotient, mode)
}

/// `rcp.rnd{.ftz}.f32`
#[inline]
pub fn rcp(a: f32, mode: Mode) -> f32 {
    div(1.0, a, mode)
}

/// `sqrt.rnd{.ftz}.f32`: -0.0 stays, negative values give NaN.
#[inline]
pub fn sqrt(a: f32, mode: Mode) -> f32 {
    let a = input(a, mode);
    let root = match mode.round {
        Rounding::Rn => a.sqrt(),
        round => to_f32(sqrt_odd_f64(f64::from(a)), round),
    };
    output(root, mode)
}

/// `neg{.ftz}.f32`: flips the sign bit, of a NaN too (PTX leaves that open).
#[inline(always)]
pub fn neg(a: f32, ftz: bool) -> f32 {
    -if ftz { flush(a) } else { a }
}

/// `abs{.ftz}.f32`: clears the sign bit, of a NaN too (PTX leaves that open).
#[inline(always)]
pub fn abs(a: f32, ftz: bool) -> f32 {
    if ftz { flush(a).abs() } else { a.abs() }
}

/// `copysign.f32 d, a, b`: the magnitude of `b` with the sign of `a`.
#[inline(always)]
pub fn copysign(a: f32, b: f32) -> f32 {
    b.copysign(a)
}

/// `min{.ftz}{.NaN}{.xorsign.abs}.f32`: -0.0 is less than +0.0.
#[inline(always)]
pub fn min(a: f32, b: f32, mode: MinMax) -> f32 {
    // Equal operands differ at most in the sign of zero; the OR of the bits is then the negative one.
    select(a, b, mode, |a, b| {
        let equal = f32::from_bits(a.to_bits() | b.to_bits());
        if a < b {
            a
        } else if b < a {
            b
        } else {
            equal
        }
    })
}

/// `max{.ftz}{.NaN}{.xorsign.abs}.f32`: +0.0 is greater than -0.0.
#[inline(always)]
pub fn max(a: f32, b: f32, mode: MinMax) -> f32 {
    select(a, b, mode, |a, b| {
        let equal = f32::from_bits(a.to_bits() & b.to_bits());
        if a > b {
            a
        } else if b > a {
            b
        } else {
            equal
        }
    })
}

/// The common part of `min` and `max`: modifiers and NaN rules around `pick`, which gets two numbers (or its result is unused).
#[inline(always)]
fn select(a: f32, b: f32, mode: MinMax, pick: impl Fn(f32, f32) -> f32) -> f32 {
    let (a, b) = if mode.ftz { (flush(a), flush(b)) } else { (a, b) };
    let sign = (a.to_bits() ^ b.to_bits()) & 0x8000_0000;
    let (a, b) = if mode.xorsign_abs { (a.abs(), b.abs()) } else { (a, b) };
    let picked = pick(a, b);
    let number = if a.is_nan() {
        b
    } else if b.is_nan() {
        a
    } else {
        picked
    };
    let number = if mode.xorsign_abs { f32::from_bits(number.to_bits() | sign) } else { number };
    if mode.nan && (a.is_nan() || b.is_nan()) { NAN } else { canonical(number) }
}

/// `testp.op.f32`
#[inline]
pub fn testp(test: Testp, a: f32) -> bool {
    match test {
        Testp::Finite => a.is_finite(),
        Testp::Infinite => a.is_infinite(),
        Testp::Number => !a.is_nan(),
        Testp::NotANumber => a.is_nan(),
        Testp::Normal => a.is_normal() || a == 0.0,
        Testp::Subnormal => a.is_subnormal(),
    }
}

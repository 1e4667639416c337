//! `.f64` arithmetic (PTX ISA, "Floating-Point Instructions"). `.f64` has neither `.ftz` nor, in arithmetic, `.sat`.
//!
//! Round to nearest uses the host's operations; the directed modes are rare and use a software float.

use super::types::{Rounding, Testp};
use rustc_apfloat::{Float, Round, ieee::Double};

/// The NaN of an invalid operation on numbers.
pub const NAN: f64 = f64::from_bits(0xfff8_0000_0000_0000);

/// `x`, a NaN, with the quiet bit set.
#[inline(always)]
pub fn quiet(x: f64) -> f64 {
    f64::from_bits(x.to_bits() | 1 << 51)
}

/// `result`, or if that is NaN, the first NaN operand quieted, or [`NAN`] if there is none.
#[inline(always)]
fn with_nan<const N: usize>(result: f64, operands: [f64; N]) -> f64 {
    if !result.is_nan() {
        return result;
    }
    operands.into_iter().find(|x| x.is_nan()).map_or(NAN, quiet)
}

fn soft(x: f64) -> Double {
    Double::from_bits(u128::from(x.to_bits()))
}

fn hard(x: Double) -> f64 {
    f64::from_bits(x.to_bits() as u64)
}

fn soft_round(round: Rounding) -> Round {
    match round {
        Rounding::Rn => Round::NearestTiesToEven,
        Rounding::Rna => Round::NearestTiesToAway,
        Rounding::Rz => Round::TowardZero,
        Rounding::Rm => Round::TowardNegative,
        Rounding::Rp => Round::TowardPositive,
    }
}

/// `add{.rnd}.f64`
#[inline]
pub fn add(a: f64, b: f64, round: Rounding) -> f64 {
    let sum = match round {
        Rounding::Rn => a + b,
        _ => hard(soft(a).add_r(soft(b), soft_round(round)).value),
    };
    with_nan(sum, [a, b])
}

/// `sub{.rnd}.f64`. A NaN in `b` keeps its sign.
#[inline]
pub fn sub(a: f64, b: f64, round: Rounding) -> f64 {
    let difference = match round {
        Rounding::Rn => a - b,
        _ => hard(soft(a).sub_r(soft(b), soft_round(round)).value),
    };
    with_nan(difference, [a, b])
}

/// `mul{.rnd}.f64`
#[inline]
pub fn mul(a: f64, b: f64, round: Rounding) -> f64 {
    let product = match round {
        Rounding::Rn => a * b,
        _ => hard(soft(a).mul_r(soft(b), soft_round(round)).value),
    };
    with_nan(product, [a, b])
}

/// `fma.rnd.f64` and `mad.rnd.f64`: `a * b + c`, rounded once.
#[inline]
pub fn fma(a: f64, b: f64, c: f64, round: Rounding) -> f64 {
    let result = match round {
        Rounding::Rn => a.mul_add(b, c),
        _ => hard(soft(a).mul_add_r(soft(b), soft(c), soft_round(round)).value),
    };
    with_nan(result, [a, b, c])
}

/// `div.rnd.f64`
#[inline]
pub fn div(a: f64, b: f64, round: Rounding) -> f64 {
    let quotient = match round {
        Rounding::Rn => a / b,
        _ => hard(soft(a).div_r(soft(b), soft_round(round)).value),
    };
    with_nan(quotient, [a, b])
}

/// `rcp.rnd.f64`
#[inline]
pub fn rcp(a: f64, round: Rounding) -> f64 {
    div(1.0, a, round)
}

/// `sqrt.rnd.f64`: -0.0 stays, negative values give NaN.
#[inline]
pub fn sqrt(a: f64, round: Rounding) -> f64 {
    let root = match round {
        Rounding::Rn => a.sqrt(),
        _ => directed_sqrt(a, round),
    };
    with_nan(root, [a])
}

fn directed_sqrt(a: f64, round: Rounding) -> f64 {
    // Scaling small operands by a power of four makes the remainder below exact.
    let small = a < f64::from_bits(0x1000_0000_0000_0000);
    let up = f64::from_bits((1023 + 512) << 52);
    let a = if small { a * up } else { a };
    let root = a.sqrt();
    let remainder = root.mul_add(-root, a);
    let root = match round {
        Rounding::Rz | Rounding::Rm if remainder < 0.0 => root.next_down(),
        Rounding::Rp if remainder > 0.0 => root.next_up(),
        // A square root never lies half-way between two floats, so ties do not occur.
        _ => root,
    };
    if small { root * f64::from_bits((1023 - 256) << 52) } else { root }
}

/// `neg.f64`: flips the sign bit, of a NaN too.
#[inline(always)]
pub fn neg(a: f64) -> f64 {
    -a
}

/// `abs.f64`: clears the sign bit, of a NaN too.
#[inline(always)]
pub fn abs(a: f64) -> f64 {
    a.abs()
}

/// `copysign.f64 d, a, b`: the magnitude of `b` with the sign of `a`.
#[inline(always)]
pub fn copysign(a: f64, b: f64) -> f64 {
    b.copysign(a)
}

/// `min.f64`: if one operand is NaN, the result is the other one; -0.0 is less than +0.0.
#[inline]
pub fn min(a: f64, b: f64) -> f64 {
    let picked = if a < b {
        a
    } else if b < a {
        b
    } else {
        f64::from_bits(a.to_bits() | b.to_bits())
    };
    number(a, b, picked)
}

/// `max.f64`: if one operand is NaN, the result is the other one; +0.0 is greater than -0.0.
#[inline]
pub fn max(a: f64, b: f64) -> f64 {
    let picked = if a > b {
        a
    } else if b > a {
        b
    } else {
        f64::from_bits(a.to_bits() & b.to_bits())
    };
    number(a, b, picked)
}

#[inline(always)]
fn number(a: f64, b: f64, picked: f64) -> f64 {
    match (a.is_nan(), b.is_nan()) {
        (false, false) => picked,
        (false, true) => a,
        (true, false) => b,
        (true, true) => quiet(a),
    }
}

/// `testp.op.f64`
#[inline]
pub fn testp(test: Testp, a: f64) -> bool {
    match test {
        Testp::Finite => a.is_finite(),
        Testp::Infinite => a.is_infinite(),
        Testp::Number => !a.is_nan(),
        Testp::NotANumber => a.is_nan(),
        Testp::Normal => a.is_normal() || a == 0.0,
        Testp::Subnormal => a.is_subnormal(),
    }
}

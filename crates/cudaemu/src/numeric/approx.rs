//! `.approx` and `.full` instructions: the exact value (through `f64`) rounded once, which is within every error bound of PTX.
//! The last bits therefore differ from hardware's, which differ between generations too.

use super::single::{NAN, canonical, flush};

#[inline(always)]
fn unary(a: f32, ftz: bool, function: impl Fn(f64) -> f64) -> f32 {
    let a = if ftz { flush(a) } else { a };
    let result = canonical(function(f64::from(a)) as f32);
    if ftz { flush(result) } else { result }
}

/// `ex2.approx{.ftz}.f32`: 2^a. -Inf gives +0, ±0 gives 1.
#[inline]
pub fn ex2(a: f32, ftz: bool) -> f32 {
    unary(a, ftz, f64::exp2)
}

/// `lg2.approx{.ftz}.f32`: ±0 gives -Inf, negative values NaN; with `.ftz` subnormals count as zero.
#[inline]
pub fn lg2(a: f32, ftz: bool) -> f32 {
    unary(a, ftz, f64::log2)
}

/// `sin.approx{.ftz}.f32`, in radians: ±0 stays, ±Inf gives NaN.
#[inline]
pub fn sin(a: f32, ftz: bool) -> f32 {
    unary(a, ftz, f64::sin)
}

/// `cos.approx{.ftz}.f32`, in radians: ±Inf gives NaN.
#[inline]
pub fn cos(a: f32, ftz: bool) -> f32 {
    unary(a, ftz, f64::cos)
}

/// `tanh.approx.f32`: ±0 and subnormals stay, ±Inf gives ±1.
#[inline]
pub fn tanh(a: f32) -> f32 {
    unary(a, false, f64::tanh)
}

/// `rcp.approx{.ftz}.f32`: ±0 gives ±Inf, ±Inf gives ±0.
#[inline]
pub fn rcp(a: f32, ftz: bool) -> f32 {
    unary(a, ftz, |a| 1.0 / a)
}

/// `sqrt.approx{.ftz}.f32`: -0 stays, negative values give NaN.
#[inline]
pub fn sqrt(a: f32, ftz: bool) -> f32 {
    unary(a, ftz, f64::sqrt)
}

/// `rsqrt.approx{.ftz}.f32`: ±0 gives ±Inf, negative values NaN.
#[inline]
pub fn rsqrt(a: f32, ftz: bool) -> f32 {
    unary(a, ftz, |a| 1.0 / a.sqrt())
}

/// `div.approx{.ftz}.f32`: a · (1/b). For |b| above 2^126 the reciprocal counts as zero: the quotient is a zero with
/// the quotient's sign, or NaN if `a` is infinite.
#[inline]
pub fn div_approx(a: f32, b: f32, ftz: bool) -> f32 {
    const LARGE: f32 = f32::from_bits((126 + 127) << 23);
    if b.abs() > LARGE && b.is_finite() {
        if a.is_nan() || a.is_infinite() {
            return NAN;
        }
        return f32::from_bits((a.to_bits() ^ b.to_bits()) & 0x8000_0000);
    }
    div_full(a, b, ftz)
}

/// `div.full{.ftz}.f32`: PTX allows 2 ulp; this is the quotient rounded to nearest.
#[inline]
pub fn div_full(a: f32, b: f32, ftz: bool) -> f32 {
    let (a, b) = if ftz { (flush(a), flush(b)) } else { (a, b) };
    let quotient = canonical(a / b);
    if ftz { flush(quotient) } else { quotient }
}

/// `rcp.approx.ftz.f64`: reads the upper 32 bits of `a` and returns the upper 32 bits of the reciprocal (20 bits of fraction);
/// the lower 32 are zero. Subnormal inputs and results count as zero.
#[inline]
pub fn rcp_f64(a: f64) -> f64 {
    upper(a, |a| 1.0 / a)
}

/// `rsqrt.approx.ftz.f64`: as [`rcp_f64`]; ±0 gives ±Inf, negative values NaN.
#[inline]
pub fn rsqrt_f64(a: f64) -> f64 {
    upper(a, |a| 1.0 / a.sqrt())
}

fn upper(a: f64, function: impl Fn(f64) -> f64) -> f64 {
    const LOWER: u64 = 0xffff_ffff;
    let flushed = |x: f64| if x.is_subnormal() { 0.0f64.copysign(x) } else { x };
    if a.is_nan() {
        return f64::from_bits(super::double::quiet(a).to_bits() & !LOWER);
    }
    let result = function(flushed(f64::from_bits(a.to_bits() & !LOWER)));
    if result.is_nan() {
        return super::double::NAN;
    }
    // Rounds to nearest. Infinity has no lower bits, and a carry correctly moves into the exponent.
    flushed(f64::from_bits(result.to_bits().wrapping_add(1 << 31) & !LOWER))
}

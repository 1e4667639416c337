//! Elementary functions of f32 without branches, calls or tables, so that loops over slices vectorise.
//!
//! Polynomials that are not Taylor series were interpolated at Chebyshev nodes in f64.

use crate::cpu::simd::multiversion;

/// `1.5 * 2^23`: adding it to a small float rounds that to an integer in the low mantissa bits.
const ROUND: f32 = 12_582_912.0;

/// ln 2 in two parts; the high part has so few bits that its products with exponents are exact.
const LN2_HI: f32 = 355.0 / 512.0;
const LN2_LO: f32 = -2.121_944_4e-4;

/// Below this argument `e^x`, less than 2^-124, is flushed to 0.
const EXP_UNDERFLOW: f32 = -86.6;

/// `e^x` within 2 ulp; 0 below [`EXP_UNDERFLOW`] and for -inf, inf for +inf, NaN for NaN. No intermediate result is subnormal:
/// processors take up to a hundred cycles for a subnormal, so masked attention scores would cost more than the others.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // Comparisons rather than `max`: a NaN passes through.
    let underflows = x < EXP_UNDERFLOW;
    let x = if underflows { EXP_UNDERFLOW } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    // x = n ln 2 + r with |r| ≤ ln 2 / 2.
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2_HI - n * LN2_LO;
    // In pairs (Estrin's scheme): a shorter dependency chain than Horner's.
    let r2 = r * r;
    let low = 0.5 + r * (1.0 / 6.0);
    let middle = 1.0 / 24.0 + r * (1.0 / 120.0);
    let high = 1.0 / 720.0 + r * (1.0 / 5040.0);
    let p = 1.0 + (r + r2 * (low + r2 * middle + r2 * r2 * high));
    // 2^n in two factors: n is at most 128, one more than float exponents reach, and at least -125.
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let y = (p + p) * power_of_two(n.wrapping_sub(1));
    if underflows { 0.0 } else { y }
}

/// `2^n` for -126 ≤ n ≤ 127; any number for other n (which only a NaN's bits can give).
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) << 23) as u32)
}

/// `ln(x)` within 3 ulp; -inf for 0, NaN for negative numbers.
#[inline(always)]
pub(super) fn ln(x: f32) -> f32 {
    /// The bits of sqrt(1/2).
    const SQRT_HALF: i32 = 0x3f35_04f3;
    // Subnormals have fewer bits; scaled by 2^23 they are normal.
    let subnormal = x < f32::MIN_POSITIVE;
    let scaled = if subnormal { x * 8_388_608.0 } else { x };
    // x = 2^n m with sqrt(1/2) ≤ m < sqrt(2).
    let n = scaled.to_bits().cast_signed().wrapping_sub(SQRT_HALF) >> 23;
    let m = f32::from_bits(scaled.to_bits().wrapping_sub((n << 23).cast_unsigned()));
    let n = n as f32 - if subnormal { 23.0 } else { 0.0 };
    // ln m = 2 artanh(s), by its Taylor series.
    let s = (m - 1.0) / (m + 1.0);
    let s2 = s * s;
    let mut p = 1.0 / 11.0;
    for c in [1.0 / 9.0, 1.0 / 7.0, 0.2, 1.0 / 3.0] {
        p = p * s2 + c;
    }
    let y = n * LN2_HI + (2.0 * s + (2.0 * s * s2 * p + n * LN2_LO));
    let y = if x < f32::INFINITY { y } else { x };
    let y = if x == 0.0 { f32::NEG_INFINITY } else { y };
    if x < 0.0 { f32::NAN } else { y }
}

/// Replaces each `x` by `f(x)`.
#[inline(always)]
pub(super) fn update(x: &mut [f32], f: impl Fn(f32) -> f32) {
    for x in x {
        *x = f(*x);
    }
}

/// `out = f(x, y)`, element by element.
#[inline(always)]
pub(super) fn zip(out: &mut [f32], x: &[f32], y: &[f32], f: impl Fn(f32, f32) -> f32) {
    for ((out, x), y) in out.iter_mut().zip(x).zip(y) {
        *out = f(*x, *y);
    }
}

multiversion! {
    /// Replaces each `x` by `e^(x - shift)` and returns the sum, accumulated in f64: the second pass of a softmax.
    pub(super) fn exp_sum<'a>(x: &'a mut [f32], shift: f32) -> f64 {
        let mut total = 0.0;
        // In chunks, so that the sum reads its values from the L1 cache.
        for part in x.chunks_mut(super::CHUNK) {
            update(part, |x| exp(x - shift));
            total += total_of(part);
        }
        total
    }
}

multiversion! {
    /// Number of elements up to the last that is not -inf.
    pub(super) fn unmasked<'a>(x: &'a [f32]) -> usize {
        let shown = |x: f32| x != f32::NEG_INFINITY;
        let (blocks, rest) = x.as_chunks::<32>();
        if let Some(last) = rest.iter().rposition(|&x| shown(x)) {
            return 32 * blocks.len() + last + 1;
        }
        // Without a branch per element, so that it vectorises.
        let any = |block: &[f32; 32]| block.iter().fold(false, |any, &x| any | shown(x));
        let last = |b: usize| 32 * b + blocks[b].iter().rposition(|&x| shown(x)).map_or(0, |last| last + 1);
        blocks.iter().rposition(any).map_or(0, last)
    }
}

multiversion! {
    /// Multiplies each `x` by `factor`.
    pub(super) fn scale<'a>(x: &'a mut [f32], factor: f32) {
        update(x, |x| x * factor);
    }
}

multiversion! {
    /// `sums += x * factor`.
    pub(super) fn add_scaled<'a>(sums: &'a mut [f32], x: &'a [f32], factor: f32) {
        for (sum, x) in sums.iter_mut().zip(x) {
            *sum += x * factor;
        }
    }
}

multiversion! {
    /// `out = x + y`.
    pub(super) fn add<'a>(out: &'a mut [f32], x: &'a [f32], y: &'a [f32]) {
        zip(out, x, y, |x, y| x + y);
    }
}

multiversion! {
    /// Sum in f64.
    pub(super) fn sum<'a>(x: &'a [f32]) -> f64 {
        total_of(x)
    }
}

multiversion! {
    /// Sum of the squares of `x - shift`: products in f32, sum in f64.
    pub(super) fn sum_of_squares<'a>(x: &'a [f32], shift: f32) -> f64 {
        let (mut total, mut squares) = (0.0, [0.0; super::CHUNK]);
        for x in x.chunks(super::CHUNK) {
            let squares = &mut squares[..x.len()];
            zip(squares, x, x, |x, _| (x - shift) * (x - shift));
            total += total_of(squares);
        }
        total
    }
}

/// Sum in f64 with many independent accumulators: with one, each addition would wait for the previous one. The loop only
/// converts and adds: the compiler does not vectorise more than that.
#[inline(always)]
pub(super) fn total_of(x: &[f32]) -> f64 {
    let mut lanes = [0.0; 32];
    let (blocks, rest) = x.as_chunks::<32>();
    for block in blocks {
        for (lane, &x) in lanes.iter_mut().zip(block) {
            *lane += f64::from(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane += f64::from(x);
    }
    // Pairwise: in sequence each addition would wait for the previous one.
    for half in [16, 8, 4, 2, 1] {
        let (low, high) = lanes.split_at_mut(half);
        for (low, high) in low.iter_mut().zip(high) {
            *low += *high;
        }
    }
    lanes[0]
}

multiversion! {
    /// The largest value, -inf if there is none; NaNs are ignored.
    pub(super) fn max<'a>(x: &'a [f32]) -> f32 {
        largest(x)
    }
}

#[inline(always)]
pub(super) fn largest(x: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (blocks, rest) = x.as_chunks::<32>();
    let mut lanes = [f32::NEG_INFINITY; 32];
    for block in blocks {
        // A new array: the compiler would update the old one with masked stores.
        let mut next = [0.0; 32];
        for l in 0..32 {
            next[l] = larger(lanes[l], block[l]);
        }
        lanes = next;
    }
    let mut eight = [0.0; 8];
    for l in 0..8 {
        eight[l] = larger(larger(lanes[l], lanes[l + 8]), larger(lanes[l + 16], lanes[l + 24]));
    }
    eight.iter().chain(rest).copied().fold(f32::NEG_INFINITY, larger)
}

/// Above this angle the f64 reduction of [`cos_sin_of`] loses bits that f32 shows; positions of models are far smaller.
const MAX_REDUCED_ANGLE: f32 = 1e8;

/// Replaces each angle by its sine.
#[inline(always)]
pub(super) fn sin(x: &mut [f32]) {
    if x.iter().any(|x| x.abs() > MAX_REDUCED_ANGLE) {
        return update(x, f32::sin);
    }
    update(x, |x| cos_sin_of(x).1);
}

/// Replaces each angle by its cosine.
#[inline(always)]
pub(super) fn cos(x: &mut [f32]) {
    if x.iter().any(|x| x.abs() > MAX_REDUCED_ANGLE) {
        return update(x, f32::cos);
    }
    update(x, |x| cos_sin_of(x).0);
}

multiversion! {
    /// As [`cos_sin`], for angles up to [`MAX_REDUCED_ANGLE`].
    fn reduced_cos_sin<'a>(angles: &'a [f32], magnitude: f32, cos: &'a mut [f32], sin: &'a mut [f32]) {
        for ((angle, cos), sin) in angles.iter().zip(cos).zip(sin) {
            let (c, s) = cos_sin_of(*angle);
            (*cos, *sin) = (c * magnitude, s * magnitude);
        }
    }
}

/// Cosines and sines of angles times `magnitude`, within an ulp or two: the reduction and the polynomials are in f64.
pub(super) fn cos_sin(angles: &[f32], magnitude: f32, cos: &mut [f32], sin: &mut [f32]) {
    reduced_cos_sin(angles, magnitude, cos, sin);
    for ((angle, cos), sin) in angles.iter().zip(cos).zip(sin) {
        if angle.abs() > MAX_REDUCED_ANGLE {
            (*cos, *sin) = (angle.cos() * magnitude, angle.sin() * magnitude);
        }
    }
}

#[inline(always)]
fn cos_sin_of(x: f32) -> (f32, f32) {
    use std::f64::consts::{FRAC_2_PI, FRAC_PI_2};
    /// As [`super::ROUND`], for f64.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    /// π/2 less its f64 value.
    const REST: f64 = 6.123_233_995_736_766e-17;
    let x = f64::from(x);
    let shifted = x * FRAC_2_PI + ROUND;
    let n = shifted - ROUND;
    let r = x - n * FRAC_PI_2 - n * REST;
    let s = r * r;
    let (mut p, mut q) = (1.0 / 362_880.0, -1.0 / 3_628_800.0);
    for c in [-1.0 / 5040.0, 1.0 / 120.0, -1.0 / 6.0] {
        p = p * s + c;
    }
    for c in [1.0 / 40_320.0, -1.0 / 720.0, 1.0 / 24.0, -0.5] {
        q = q * s + c;
    }
    let (sin, cos) = ((r + r * s * p) as f32, (1.0 + s * q) as f32);
    // The number of quarter turns, in the low bits.
    let quarters = shifted.to_bits() as u32;
    let (cos, sin) = if quarters & 1 == 0 { (cos, sin) } else { (sin, cos) };
    let flip = |x: f32, when: u32| f32::from_bits(x.to_bits() ^ (when & 2) << 30);
    (flip(cos, quarters.wrapping_add(1)), flip(sin, quarters))
}

/// Hyperbolic tangent within 4 ulp.
#[inline(always)]
pub(super) fn tanh(x: f32) -> f32 {
    let (a, s) = (x.abs(), x * x);
    let mut p = -0.006_096_714;
    for c in [0.020_997_178, -0.053_850_91, 0.133_327_7, -0.333_333_3] {
        p = p * s + c;
    }
    let near = x * (1.0 + s * p);
    let far = (1.0 - 2.0 / (exp(2.0 * a) + 1.0)).copysign(x);
    if a < 0.625 { near } else { far }
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x / (1 + e^-x)`.
#[inline(always)]
pub(super) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// GELU by its tanh approximation, `x/2 (1 + tanh(sqrt(2/π) x (1 + 0.044715 x²)))`, computed as the equal `x sigmoid(2 ...)`,
/// which does not cancel for negative x; 0 up to -10.
///
/// ggml's CPU backend looks f32 and f16 up in a table over f16 (relative error up to 1e-3, the same cut at -10). Its other
/// backends and this device evaluate the formula.
#[inline(always)]
pub(super) fn gelu(x: f32) -> f32 {
    let y = x / (1.0 + exp(-1.595_769_2 * x * (1.0 + 0.044_715 * x * x)));
    if x <= -10.0 { 0.0 } else { y }
}

/// `x / (1 + e^(-1.702 x))`; as [`gelu`], without ggml's table.
#[inline(always)]
pub(super) fn gelu_quick(x: f32) -> f32 {
    x / (1.0 + exp(-1.702 * x))
}

/// GELU by the error function, `x/2 (1 + erf(x / sqrt 2))`.
#[inline(always)]
pub(super) fn gelu_erf(x: f32) -> f32 {
    // The bound keeps the product with 0 from becoming NaN at +infinity.
    let tail = 0.5 * x.min(64.0) * erfc(x.abs() * std::f32::consts::FRAC_1_SQRT_2);
    if x > 0.0 { x - tail } else { tail }
}

/// `1 - erf(z)` for z ≥ 0 as `t e^(P(t) - z²)` with `t = 1 / (1 + z/2)`. The polynomial's relative error is 1e-7; rounding
/// adds a few ulp, for large z about z² ulp.
#[inline(always)]
fn erfc(z: f32) -> f32 {
    let t = 1.0 / (1.0 + 0.5 * z);
    let mut p = 0.149_805_03;
    for c in [
        -0.707_060_73,
        1.217_593,
        -0.775_881_5,
        -0.015_748_953,
        -0.032_196_07,
        0.045_663_726,
        0.384_401_65,
        0.998_883_8,
        -1.265_459_8,
    ] {
        p = p * t + c;
    }
    t * exp(p - z * z)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Error in ulp of the expected value.
    fn ulps(got: f32, want: f64) -> f64 {
        let w = want as f32;
        let ulp = f64::from(w.abs().next_up() - w.abs());
        (f64::from(got) - want).abs() / ulp
    }

    /// Every `step`-th float below `below`, both signs.
    fn floats(below: f32, step: usize) -> impl Iterator<Item = f32> {
        (0..below.to_bits()).step_by(step).map(f32::from_bits).flat_map(|x| [x, -x])
    }

    #[test]
    fn exp_is_within_two_ulp_everywhere() {
        for x in floats(88.722_84, 2003).filter(|x| *x >= EXP_UNDERFLOW) {
            let error = ulps(exp(x), f64::from(x).exp());
            assert!(error <= 2.0, "exp({x:e}) is off by {error} ulp");
        }
    }

    #[test]
    fn ln_is_within_three_ulp_everywhere() {
        let near_one = (0..4000).map(|i| 1.0 + (i - 2000) as f32 * f32::EPSILON);
        for x in floats(f32::INFINITY, 20_011).filter(|&x| x > 0.0).chain(near_one) {
            let (error, got) = (ulps(ln(x), f64::from(x).ln()), ln(x));
            assert!(error <= 3.0 || got == 0.0 && x == 1.0, "ln({x:e}) is {got}, off by {error} ulp");
        }
        assert_eq!([0.0, -0.0, f32::INFINITY].map(ln), [f32::NEG_INFINITY, f32::NEG_INFINITY, f32::INFINITY]);
        assert!([f32::NAN, -1.0, -1e-42, f32::NEG_INFINITY].iter().all(|&x| ln(x).is_nan()));
    }

    #[test]
    fn exp_of_the_extremes() {
        let big = f32::MAX;
        for (x, want) in
            [(f32::NEG_INFINITY, 0.0), (-big, 0.0), (EXP_UNDERFLOW.next_down(), 0.0), (0.0, 1.0), (-0.0, 1.0)]
        {
            assert_eq!(exp(x).to_bits(), f32::to_bits(want), "exp({x})");
        }
        for x in [f32::INFINITY, big, 88.723, 89.5, 200.0] {
            assert_eq!(exp(x), f32::INFINITY, "exp({x})");
        }
        for bits in [0x7fc0_0000, 0xffc0_0000, 0x7f80_0001, 0xffff_ffff] {
            assert!(exp(f32::from_bits(bits)).is_nan(), "{bits:#x}");
        }
    }

    #[test]
    fn sums_and_maxima_match_for_any_length() {
        for n in [0, 1, 7, 8, 9, 63, 64, 65, 1000] {
            let x: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin() * 5.0).collect();
            let want: f64 = x.iter().map(|&x| f64::from(x)).sum();
            assert!((sum(&x) - want).abs() < 1e-9, "sum of {n}");
            let want: f64 = x.iter().map(|&x| f64::from(x * x)).sum();
            assert!((sum_of_squares(&x, 0.0) - want).abs() < 1e-9, "squares of {n}");
            let want = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(max(&x), want, "largest of {n}");
            let want: f64 = x.iter().map(|&x| f64::from(x - 2.0).exp()).sum();
            let (mut y, mut z) = (x.clone(), x);
            assert!((exp_sum(&mut y, 2.0) - want).abs() <= 1e-6 * want, "exponentials of {n}");
            z.iter_mut().for_each(|z| *z -= 2.0);
            z.iter_mut().for_each(|z| *z = exp(*z));
            assert_eq!(y, z);
        }
        assert_eq!(max(&[f32::NAN, -3.0, f32::NAN]), -3.0);
    }

    #[test]
    fn unmasked_ignores_a_masked_tail() {
        for n in [0, 1, 31, 32, 33, 200] {
            for shown in 0..=n {
                let mut x = vec![f32::NEG_INFINITY; n];
                x[..shown].iter_mut().step_by(7).for_each(|x| *x = 0.0);
                if let Some(last) = shown.checked_sub(1) {
                    x[last] = [0.0, f32::NAN, -1e9][last % 3];
                }
                assert_eq!(unmasked(&x), shown, "of {n}");
            }
        }
    }

    #[test]
    fn cosines_and_sines_are_within_two_ulp() {
        let angles: Vec<f32> =
            floats(2e8, 5003).chain((0..4000).map(|i| i as f32 * std::f32::consts::FRAC_PI_4)).collect();
        let (mut cos, mut sin) = (vec![0.0; angles.len()], vec![0.0; angles.len()]);
        cos_sin(&angles, 1.0, &mut cos, &mut sin);
        for ((&x, &c), &s) in angles.iter().zip(&cos).zip(&sin) {
            // Near a zero the expected value has more bits than the reduced angle.
            let close = |got: f32, want: f64| ulps(got, want) <= 2.0 || (f64::from(got) - want).abs() < 2e-8;
            assert!(close(c, f64::from(x).cos()) && close(s, f64::from(x).sin()), "{x:e}: {c} {s}");
        }
        cos_sin(&[f32::INFINITY, f32::NAN], 1.0, &mut cos[..2], &mut sin[..2]);
        assert!(cos[..2].iter().chain(&sin[..2]).all(|x| x.is_nan()));
    }

    #[test]
    fn tanh_is_within_four_ulp() {
        for x in floats(20.0, 2003) {
            let error = ulps(tanh(x), f64::from(x).tanh());
            assert!(error <= 4.0, "tanh({x:e}) is off by {error} ulp");
        }
        assert_eq!((tanh(f32::INFINITY), tanh(f32::NEG_INFINITY)), (1.0, -1.0));
        assert!(tanh(f32::NAN).is_nan() && tanh(-0.0).is_sign_negative());
    }

    /// erf by its series of positive terms `2/sqrt(π) e^(-x²) Σ 2^n x^(2n+1) / (2n+1)!!`.
    fn erf(x: f64) -> f64 {
        let (mut term, mut total, mut n) = (x, x, 1.0);
        while term.abs() > total.abs() * 1e-17 {
            term *= 2.0 * x * x / (2.0 * n + 1.0);
            total += term;
            n += 1.0;
        }
        std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * total
    }

    #[test]
    fn gelu_erf_of_infinity_is_infinity() {
        assert_eq!(gelu_erf(f32::INFINITY), f32::INFINITY);
        assert_eq!(gelu_erf(-1e30), 0.0);
    }

    #[test]
    fn activations_match_their_formulas() {
        type Case = (&'static str, fn(f32) -> f32, fn(f64) -> f64);
        let cases: [Case; 5] = [
            ("sigmoid", sigmoid, |x| 1.0 / (1.0 + (-x).exp())),
            ("silu", silu, |x| x / (1.0 + (-x).exp())),
            ("gelu", gelu, |x| {
                0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * x * (1.0 + 0.044715 * x * x)).tanh())
            }),
            ("gelu_quick", gelu_quick, |x| x / (1.0 + (-1.702 * x).exp())),
            ("gelu_erf", gelu_erf, |x| 0.5 * x * (1.0 + erf(x / 2f64.sqrt()))),
        ];
        for (name, f, oracle) in cases {
            for x in floats(12.0, 20_011) {
                let (got, want) = (f64::from(f(x)), oracle(f64::from(x)));
                assert!((got - want).abs() <= 1e-6 * want.abs() + 1e-7, "{name}({x:e}) is {got}, wanted {want}");
            }
            assert!(f(f32::NAN).is_nan(), "{name} of NaN");
            assert!(f(f32::MAX) == f32::MAX || name == "sigmoid", "{name} of the largest");
            assert!(f(f32::MIN) == 0.0, "{name} of the least");
        }
    }
}

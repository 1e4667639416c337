//! Rounding of exact values to any format of PTX, and round-to-odd, which makes double rounding safe.
//!
//! Round to odd (an inexact result becomes the neighbour whose last bit is 1), in a format with at least two bits more than the
//! target, keeps all information that a later rounding in any mode needs. So `.f32` results are computed in `f64`, and `.f16`
//! results in `f32`, and then rounded once.

use super::types::Rounding;

/// A binary format of at most 64 bits with gradual underflow.
pub(super) struct Format {
    /// Bits of the encoding, sign included.
    width: u32,
    /// Stored bits of the significand.
    fraction: u32,
    /// Exponent of the least normal number.
    min_exponent: i32,
    /// Encoding of the largest finite magnitude.
    max: u64,
    /// Encoding of infinity.
    overflow: u64,
}

pub(super) const F16: Format = Format { width: 16, fraction: 10, min_exponent: -14, max: 0x7bff, overflow: 0x7c00 };
pub(super) const BF16: Format = Format { width: 16, fraction: 7, min_exponent: -126, max: 0x7f7f, overflow: 0x7f80 };
/// The upper 19 bits of the `.b32` that holds a `.tf32`.
pub(super) const TF32: Format = Format { width: 19, fraction: 10, min_exponent: -126, max: 0x3fbff, overflow: 0x3fc00 };
pub(super) const F32: Format =
    Format { width: 32, fraction: 23, min_exponent: -126, max: 0x7f7f_ffff, overflow: 0x7f80_0000 };
pub(super) const F64: Format = Format {
    width: 64,
    fraction: 52,
    min_exponent: -1022,
    max: 0x7fef_ffff_ffff_ffff,
    overflow: 0x7ff0_0000_0000_0000,
};

impl Format {
    /// Encoding of ±`significand`·2^`exponent`, rounded once.
    pub(super) fn encode(&self, negative: bool, significand: u64, exponent: i32, round: Rounding) -> u64 {
        let sign = u64::from(negative) << (self.width - 1);
        if significand == 0 {
            return sign;
        }
        let top = 63 - significand.leading_zeros() as i32 + exponent;
        let scale = top.max(self.min_exponent);
        let shift = scale - self.fraction as i32 - exponent;
        let (kept, up) = if shift <= 0 {
            (significand << -shift, false)
        } else {
            let kept = if shift < 64 { significand >> shift } else { 0 };
            let rest = if shift < 64 { significand & ((1 << shift) - 1) } else { significand };
            // Shifted by more than 64 bits, any significand is below one half.
            let half = if shift <= 64 { 1u64 << (shift - 1) } else { u64::MAX };
            let up = match round {
                Rounding::Rn => rest > half || (rest == half && shift <= 64 && kept & 1 == 1),
                Rounding::Rna => rest >= half && shift <= 64,
                Rounding::Rz => false,
                Rounding::Rm => negative && rest != 0,
                Rounding::Rp => !negative && rest != 0,
            };
            (kept, up)
        };
        // The hidden bit adds one to the exponent field, and so does a carry out of the significand.
        let magnitude = (((scale - self.min_exponent) as u64) << self.fraction) + kept + u64::from(up);
        if magnitude <= self.max {
            return sign | magnitude;
        }
        let to_max = match round {
            Rounding::Rn | Rounding::Rna => false,
            Rounding::Rz => true,
            Rounding::Rm => !negative,
            Rounding::Rp => negative,
        };
        sign | if to_max { self.max } else { self.overflow }
    }

    /// Encoding of `x`, which is not NaN, rounded once.
    pub(super) fn encode_f64(&self, x: f64, round: Rounding) -> u64 {
        if x.is_infinite() {
            return u64::from(x < 0.0) << (self.width - 1) | self.overflow;
        }
        let bits = x.to_bits();
        let fraction = bits & ((1 << 52) - 1);
        let (significand, exponent) = match (bits >> 52 & 0x7ff) as i32 {
            0 => (fraction, -1074),
            biased => (fraction | 1 << 52, biased - 1075),
        };
        self.encode(x.is_sign_negative(), significand, exponent, round)
    }
}

/// Turns `nearest`, a value rounded to nearest, into the value rounded to odd, given the sign of (exact − nearest). A NaN error
/// (from infinities) leaves it unchanged.
#[inline(always)]
fn odd_f64(nearest: f64, error: f64) -> f64 {
    let bits = nearest.to_bits();
    let outwards = error.is_sign_negative() == nearest.is_sign_negative();
    let neighbour = if outwards { bits.wrapping_add(1) } else { bits.wrapping_sub(1) };
    f64::from_bits(if error.abs() > 0.0 && bits & 1 == 0 { neighbour } else { bits })
}

/// As [`odd_f64`], for `f32`.
#[inline(always)]
fn odd_f32(nearest: f32, error_negative: bool, inexact: bool) -> f32 {
    let bits = nearest.to_bits();
    let outwards = error_negative == nearest.is_sign_negative();
    let neighbour = if outwards { bits.wrapping_add(1) } else { bits.wrapping_sub(1) };
    f32::from_bits(if inexact && bits & 1 == 0 { neighbour } else { bits })
}

/// `a + b` rounded to odd. Computes the exact error by Knuth's TwoSum, so nothing may overflow: operands must be in the range
/// of `.f32`.
#[inline(always)]
pub(super) fn add_odd_f64(a: f64, b: f64) -> f64 {
    let sum = a + b;
    let b_part = sum - a;
    odd_f64(sum, (a - (sum - b_part)) + (b - b_part))
}

/// `a + b` rounded to odd, for operands in the range of products of `.f16`.
#[inline(always)]
pub(super) fn add_odd_f32(a: f32, b: f32) -> f32 {
    let sum = a + b;
    let b_part = sum - a;
    let error = (a - (sum - b_part)) + (b - b_part);
    odd_f32(sum, error.is_sign_negative(), error.abs() > 0.0)
}

/// `a / b` rounded to odd, for operands in the range of `.f32`, so that the remainder is exact.
#[inline]
pub(super) fn div_odd_f64(a: f64, b: f64) -> f64 {
    let quotient = a / b;
    let remainder = quotient.mul_add(-b, a);
    odd_f64(quotient, if b < 0.0 { -remainder } else { remainder })
}

/// Square root rounded to odd, for an operand in the range of `.f32`.
#[inline]
pub(super) fn sqrt_odd_f64(a: f64) -> f64 {
    let root = a.sqrt();
    odd_f64(root, root.mul_add(-root, a))
}

/// `x` as `f32`, rounded to odd.
#[inline(always)]
pub(super) fn to_f32_odd(x: f64) -> f32 {
    let nearest = x as f32;
    let error = x - f64::from(nearest);
    odd_f32(nearest, error.is_sign_negative(), error.abs() > 0.0)
}

/// `x`, exact or rounded to odd, as `f32` in any mode. A NaN stays a NaN of any payload.
#[inline(always)]
pub(super) fn to_f32(x: f64, round: Rounding) -> f32 {
    let nearest = x as f32;
    let back = f64::from(nearest);
    match round {
        Rounding::Rn => nearest,
        Rounding::Rz if back.abs() > x.abs() => f32::from_bits(nearest.to_bits() - 1),
        Rounding::Rm if back > x => nearest.next_down(),
        Rounding::Rp if back < x => nearest.next_up(),
        Rounding::Rz | Rounding::Rm | Rounding::Rp => nearest,
        Rounding::Rna if x.is_nan() => nearest,
        Rounding::Rna => f32::from_bits(F32.encode_f64(x, round) as u32),
    }
}

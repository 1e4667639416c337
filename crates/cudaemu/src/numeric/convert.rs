//! `cvt` between integers and floats of every width (PTX ISA, "Data Movement and Conversion").
//!
//! The general functions take and return register bits; with constant types and modes they inline to a short path. `f64`
//! represents every other float type exactly, so rounding an `f64` once is the only rounding.

use super::half::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use super::round::{self, BF16, F16, F32, F64, TF32, to_f32, to_f32_odd};
use super::single;
use super::types::{FloatType, IntRounding, IntType, Rounding};

/// Modifiers of a `cvt` from float to float.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FloatCvt {
    /// Rounding of the result.
    pub round: Rounding,
    /// `.ftz`: flushes subnormals of `.f32`, as source or destination.
    pub ftz: bool,
    /// `.sat`: clamped to [0.0, 1.0]; NaN becomes +0.0.
    pub sat: bool,
}

impl FloatCvt {
    /// `.rn` without other modifiers.
    pub const RN: Self = Self { round: Rounding::Rn, ftz: false, sat: false };
}

/// `cvt{.sat}` from integer to integer. Uses the low bits of `value` as type `from`; without `.sat`, keeps the low bits of type
/// `to`. The result is sign- or zero-extended to 64 bits, as PTX extends it to a wider destination register.
#[inline(always)]
pub fn int_to_int(value: u64, from: IntType, to: IntType, sat: bool) -> u64 {
    let value = from.extend(value);
    if !sat {
        return to.extend(value);
    }
    let wide = if from.signed() { i128::from(value as i64) } else { i128::from(value) };
    wide.clamp(to.min(), to.max()) as u64
}

/// `cvt.rnd{.sat}` from integer to float, rounded once for all widths.
#[inline(always)]
pub fn int_to_float(value: u64, from: IntType, to: FloatType, round: Rounding, sat: bool) -> u64 {
    let value = from.extend(value);
    if sat {
        let positive = value != 0 && !(from.signed() && (value as i64) < 0);
        return if positive { encode_f64(1.0, to, Rounding::Rn) } else { 0 };
    }
    match (to, round, from.signed()) {
        (FloatType::F32, Rounding::Rn, true) => u64::from((value as i64 as f32).to_bits()),
        (FloatType::F32, Rounding::Rn, false) => u64::from((value as f32).to_bits()),
        (FloatType::F64, Rounding::Rn, true) => (value as i64 as f64).to_bits(),
        (FloatType::F64, Rounding::Rn, false) => (value as f64).to_bits(),
        (_, _, signed) => {
            let negative = signed && (value as i64) < 0;
            let magnitude = if negative { value.wrapping_neg() } else { value };
            encode(to, |format| format.encode(negative, magnitude, 0, round))
        }
    }
}

/// `cvt.irnd{.ftz}` from float to integer. Out-of-range values saturate (with or without `.sat`). NaN gives 0, or if
/// the source is `.f64` or the destination has 64 bits, the destination's top bit. The result is extended to 64 bits.
#[inline(always)]
pub fn float_to_int(bits: u64, from: FloatType, to: IntType, round: IntRounding, ftz: bool) -> u64 {
    let value = decode(bits, from, ftz);
    if value.is_nan() {
        let top = from == FloatType::F64 || to.bits() == 64;
        return if top { to.extend(1 << (to.bits() - 1)) } else { 0 };
    }
    let rounded = match round {
        // Rust's `as` truncates and saturates itself.
        IntRounding::Rzi => value,
        IntRounding::Rni if from != FloatType::F64 => nearest_integer(value),
        _ => round.apply(value),
    };
    match to {
        IntType::U8 => u64::from(rounded as u8),
        IntType::U16 => u64::from(rounded as u16),
        IntType::U32 => u64::from(rounded as u32),
        IntType::U64 => rounded as u64,
        IntType::S8 => rounded as i8 as i64 as u64,
        IntType::S16 => rounded as i16 as i64 as u64,
        IntType::S32 => rounded as i32 as i64 as u64,
        IntType::S64 => rounded as i64 as u64,
    }
}

/// Rounds to nearest, ties to even, for a value in the range of `.f32`: added to 1.5·2^52, the unit is one. Larger values have
/// no fraction. The standard library's function is a call unless the compiler may assume SSE4.1.
#[inline(always)]
fn nearest_integer(value: f64) -> f64 {
    const UNIT: f64 = 6_755_399_441_055_744.0;
    if value.abs() < 16_777_216.0 { (value + UNIT) - UNIT } else { value }
}

/// `cvt{.frnd}` from float to float. NaN gives the destination's canonical NaN, with two exceptions: `.f64` keeps payloads
/// (quieted), and `.bf16` to `.f32` shifts the bits.
#[inline(always)]
pub fn float_to_float(bits: u64, from: FloatType, to: FloatType, cvt: FloatCvt) -> u64 {
    let value = decode(bits, from, cvt.ftz);
    let value = if cvt.sat { saturate(value) } else { value };
    if value.is_nan() {
        return match (from, to) {
            (FloatType::Bf16, FloatType::F32) => (bits & 0xffff) << 16,
            (_, FloatType::F64) => widen_nan(bits, from),
            _ => nan(to),
        };
    }
    // Fast path of inner loops: half-precision results of values that fit f32 need no round-to-odd step.
    let encoded = match (to, cvt.round) {
        (FloatType::F16, Rounding::Rn) if from != FloatType::F64 => u64::from(f32_to_f16(value as f32)),
        (FloatType::Bf16, Rounding::Rn) if from != FloatType::F64 => u64::from(f32_to_bf16(value as f32)),
        _ => encode_f64(value, to, cvt.round),
    };
    if cvt.ftz && to == FloatType::F32 {
        u64::from(single::flush(f32::from_bits(encoded as u32)).to_bits())
    } else {
        encoded
    }
}

/// `cvt.irnd{.ftz}{.sat}` between equal float types: rounded to an integral value, which is exact. Zeros keep the sign.
#[inline(always)]
pub fn float_to_integral(bits: u64, ty: FloatType, round: IntRounding, ftz: bool, sat: bool) -> u64 {
    let value = round.apply(decode(bits, ty, ftz));
    let value = if sat { saturate(value) } else { value };
    if value.is_nan() {
        return if ty == FloatType::F64 { bits | 1 << 51 } else { nan(ty) };
    }
    encode_f64(value, ty, Rounding::Rn)
}

/// `cvt.rna.tf32.f32`. The lower 13 bits, which PTX leaves open, are zero; NaN is 0x7fffffff.
#[inline]
pub fn cvt_tf32_f32(a: f32) -> u32 {
    let cvt = FloatCvt { round: Rounding::Rna, ..FloatCvt::RN };
    float_to_float(u64::from(a.to_bits()), FloatType::F32, FloatType::Tf32, cvt) as u32
}

/// The exact value of `bits`; subnormals of `.f32` are flushed on request.
#[inline(always)]
fn decode(bits: u64, ty: FloatType, ftz: bool) -> f64 {
    match ty {
        FloatType::F16 => f64::from(f16_to_f32(bits as u16)),
        FloatType::Bf16 => f64::from(bf16_to_f32(bits as u16)),
        FloatType::F32 | FloatType::Tf32 => {
            let value = f32::from_bits(bits as u32);
            f64::from(if ftz { single::flush(value) } else { value })
        }
        FloatType::F64 => f64::from_bits(bits),
    }
}

/// Rounds `value`, which is not NaN, to `to`.
#[inline(always)]
fn encode_f64(value: f64, to: FloatType, round: Rounding) -> u64 {
    match (to, round) {
        (FloatType::F16, Rounding::Rn) => u64::from(f32_to_f16(to_f32_odd(value))),
        (FloatType::Bf16, Rounding::Rn) => u64::from(f32_to_bf16(to_f32_odd(value))),
        (FloatType::F32, _) => u64::from(to_f32(value, round).to_bits()),
        (FloatType::F64, _) => value.to_bits(),
        _ => encode(to, |format| format.encode_f64(value, round)),
    }
}

fn encode(to: FloatType, with: impl Fn(&round::Format) -> u64) -> u64 {
    match to {
        FloatType::F16 => with(&F16),
        FloatType::Bf16 => with(&BF16),
        FloatType::Tf32 => with(&TF32) << 13,
        FloatType::F32 => with(&F32),
        FloatType::F64 => with(&F64),
    }
}

fn nan(ty: FloatType) -> u64 {
    match ty {
        FloatType::F16 | FloatType::Bf16 => 0x7fff,
        FloatType::F32 | FloatType::Tf32 => 0x7fff_ffff,
        FloatType::F64 => super::double::NAN.to_bits(),
    }
}

/// The quiet `.f64` NaN with the sign and payload of a narrower one; for `.f16` the canonical NaN, as from [`f16_to_f32`]. Uses
/// integers, because the host's conversions guarantee nothing about payloads.
fn widen_nan(bits: u64, from: FloatType) -> u64 {
    let single = match from {
        FloatType::F64 => return bits | 1 << 51,
        FloatType::F16 => 0x7fff_ffff,
        FloatType::Bf16 => (bits & 0xffff) << 16,
        FloatType::F32 | FloatType::Tf32 => bits & 0xffff_ffff,
    };
    (single >> 31) << 63 | 0x7ff8 << 48 | (single & 0x7f_ffff) << 29
}

#[inline(always)]
fn saturate(x: f64) -> f64 {
    let low = if x > 0.0 { x } else { 0.0 };
    if low < 1.0 { low } else { 1.0 }
}

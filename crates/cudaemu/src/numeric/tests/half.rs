//! `.f16`, `.bf16` and the 8-bit formats against the software float, exhaustively where the number of inputs allows it.

use super::super::half::{self, Bf16, F16, Half};
use super::super::{HalfMode, MinMax, fp8};
use rustc_apfloat::ieee::{BFloat, Float8E4M3FN, Float8E5M2, Half as SoftHalf, Single};
use rustc_apfloat::{Float, FloatConvert};

fn to_single<S: Float + FloatConvert<Single>>(bits: u128) -> f32 {
    let value: Single = S::from_bits(bits).convert(&mut false).value;
    f32::from_bits(value.to_bits() as u32)
}

fn from_single<S: Float>(x: f32) -> S
where
    Single: FloatConvert<S>,
{
    Single::from_bits(u128::from(x.to_bits())).convert(&mut false).value
}

fn expected<S: Float>(x: S) -> u16 {
    if x.is_nan() { 0x7fff } else { x.to_bits() as u16 }
}

#[test]
fn every_value_widens_exactly() {
    for bits in 0..=u16::MAX {
        let (got, want) = (half::f16_to_f32(bits), to_single::<SoftHalf>(bits.into()));
        let want = if want.is_nan() { 0x7fff_ffff } else { want.to_bits() };
        assert_eq!(got.to_bits(), want, "{bits:#x}");
        let back = half::f32_to_f16(got);
        assert_eq!(back, if half::is_nan::<F16>(bits) { 0x7fff } else { bits });
        assert_eq!(half::bf16_to_f32(bits).to_bits(), u32::from(bits) << 16);
    }
}

#[test]
fn narrowing_rounds_to_nearest_even() {
    let check = |x: f32| {
        assert_eq!(half::f32_to_f16(x), expected(from_single::<SoftHalf>(x)), "f16 of {:#x}", x.to_bits());
        assert_eq!(half::f32_to_bf16(x), expected(from_single::<BFloat>(x)), "bf16 of {:#x}", x.to_bits());
    };
    // Around every value of .f16 and every tie between neighbours, at distances of one .f32 unit.
    for bits in (0..=u16::MAX).step_by(3) {
        let value = half::f16_to_f32(bits).to_bits();
        for offset in [-1, 0, 1] {
            check(f32::from_bits(value.wrapping_add_signed(offset)));
            check(f32::from_bits((value + 0x1000).wrapping_add_signed(offset)));
            check(f32::from_bits((u32::from(bits) << 16 | 0x8000).wrapping_add_signed(offset)));
        }
    }
    // Below the normals of .f16 the ties are odd multiples of 2^-25.
    for tie in 0..3000u32 {
        let value = (tie as f32 * 2f32.powi(-25)).to_bits();
        for offset in [-1, 0, 1] {
            check(f32::from_bits(value.saturating_add_signed(offset)));
        }
    }
    for bits in super::EDGES {
        check(f32::from_bits(bits));
    }
}

/// Edges of the format, and random values with exponents close enough to interact.
fn operand<H: Half>(rng: &mut fastrand::Rng) -> u16 {
    let edges = [0, 1, 2, 0x3ff, 0x400, 0x7f, 0x80, H::ONE, H::ONE + 1, H::INFINITY - 1, H::INFINITY, 0x7fff];
    let magnitude = match rng.u8(..4) {
        0 => edges[rng.usize(..edges.len())],
        1 => rng.u16(..0x8000),
        _ => H::ONE - 0x800 + rng.u16(..0x1000),
    };
    magnitude | rng.u16(..2) << 15
}

fn check_arithmetic<H: Half, S: Float>(seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let soft = |bits: u16| S::from_bits(bits.into());
    let plain = HalfMode::PLAIN;
    for _ in 0..40_000 {
        let [a, b, c] = [(); 3].map(|()| operand::<H>(&mut rng));
        let rows = [
            ("add", half::add::<H>(a, b, plain), (soft(a) + soft(b)).value),
            ("sub", half::sub::<H>(a, b, plain), (soft(a) - soft(b)).value),
            ("mul", half::mul::<H>(a, b, plain), (soft(a) * soft(b)).value),
            ("fma", half::fma::<H>(a, b, c, plain), soft(a).mul_add(soft(b), soft(c)).value),
        ];
        for (name, got, want) in rows {
            assert_eq!(got, expected(want), "{name} {a:#x} {b:#x} {c:#x}");
        }
    }
}

#[test]
fn f16_arithmetic_is_rounded_once() {
    check_arithmetic::<F16, SoftHalf>(1);
    // 1.0009765625 * 0.99951171875 + 2^-24: a sum in f32 would first be rounded to a tie of f16.
    let want = SoftHalf::from_bits(0x3c01).mul_add(SoftHalf::from_bits(0x3bff), SoftHalf::from_bits(1)).value;
    assert_eq!(half::fma::<F16>(0x3c01, 0x3bff, 1, HalfMode::PLAIN), want.to_bits() as u16);
}

#[test]
fn bf16_arithmetic_is_rounded_once() {
    check_arithmetic::<Bf16, BFloat>(2);
    // Products in the range of subnormals, where f32 may already have rounded.
    let mut rng = fastrand::Rng::with_seed(5);
    for _ in 0..20_000 {
        let (a, b) = (rng.u16(0x1c00..0x2400), rng.u16(0x1c00..0x2400));
        let want = (BFloat::from_bits(a.into()) * BFloat::from_bits(b.into())).value;
        assert_eq!(half::mul::<Bf16>(a, b, HalfMode::PLAIN), expected(want), "{a:#x} {b:#x}");
    }
}

#[test]
fn ftz_sat_and_relu_change_results() {
    let ftz = HalfMode { ftz: true, ..HalfMode::PLAIN };
    let sat = HalfMode { sat: true, ..HalfMode::PLAIN };
    let relu = HalfMode { relu: true, ..HalfMode::PLAIN };
    assert_eq!(half::add::<F16>(0x8001, 0x8001, ftz), 0x8000);
    assert_eq!(half::mul::<F16>(0x0400, 0x3800, ftz), 0);
    assert_eq!(half::mul::<F16>(0x0400, 0x3800, HalfMode::PLAIN), 0x0200);
    assert_eq!(half::add::<F16>(0x3c00, 0x3c00, sat), 0x3c00);
    assert_eq!(half::fma::<F16>(0xbc00, 0x3c00, 0, sat), 0);
    assert_eq!(half::add::<F16>(0x7e00, 0x3c00, sat), 0);
    assert_eq!(half::fma::<F16>(0xbc00, 0x3c00, 0x3800, relu), 0);
    assert_eq!(half::fma::<Bf16>(0xffc1, 0x3f80, 0, relu), 0x7fff);
    assert_eq!(half::fma::<Bf16>(0x4000, 0x4000, 0x3f80, relu), 0x40a0);
    assert_eq!(half::neg::<F16>(0x8001, true), 0);
    assert_eq!(half::abs::<Bf16>(0x8001, false), 1);
    assert_eq!(half::ex2::<F16>(0x3c00, false), 0x4000);
    assert_eq!(half::ex2::<Bf16>(0xff80, true), 0);
    assert_eq!(half::tanh::<F16>(0xfc00), 0xbc00);
    assert_eq!(half::tanh::<Bf16>(0x7fc0), 0x7fff);
    let (plain, order) = (HalfMode::PLAIN, MinMax::PLAIN);
    assert_eq!(half::add_x2::<F16>(0x3c00_4000, 0x3c00_3c00, plain), 0x4000_4200);
    assert_eq!(half::sub_x2::<F16>(0x3c00_4000, 0x3c00_3c00, plain), 0x0000_3c00);
    assert_eq!(half::mul_x2::<Bf16>(0x3f80_4000, 0x4000_4000, plain), 0x4000_4080);
    assert_eq!(half::fma_x2::<F16>(0x3c00_4000, 0x4000_4000, 0x0000_3c00, plain), 0x4000_4500);
    assert_eq!(half::min_x2::<F16>(0x3c00_bc00, 0x4000_8000, order), 0x3c00_bc00);
    assert_eq!(half::max_x2::<F16>(0x3c00_bc00, 0x4000_8000, order), 0x4000_8000);
    assert_eq!(half::x2(0x0000_bc00, |a| half::neg::<F16>(a, false)), 0x8000_3c00);
}

#[test]
fn min_and_max_follow_those_of_f32() {
    use super::super::single;
    let mut rng = fastrand::Rng::with_seed(3);
    for _ in 0..20_000 {
        let [a, b] = [(); 2].map(|()| operand::<F16>(&mut rng));
        for bits in 0..4 {
            let mode = MinMax { nan: bits & 1 != 0, xorsign_abs: bits & 2 != 0, ftz: false };
            // .xorsign uses the sign of a NaN, which to_f32 drops.
            let signed = |x: u16| half::f16_to_f32(x & 0x7fff).copysign(if x >= 0x8000 { -1.0 } else { 1.0 });
            let wide = |op: fn(f32, f32, MinMax) -> f32| half::f32_to_f16(op(signed(a), signed(b), mode));
            assert_eq!(half::min::<F16>(a, b, mode), wide(single::min), "min {a:#x} {b:#x} {mode:?}");
            assert_eq!(half::max::<F16>(a, b, mode), wide(single::max), "max {a:#x} {b:#x} {mode:?}");
        }
    }
}

fn check_fp8_format<S: Float + FloatConvert<Single>>(format: fp8::Fp8, max: u8)
where
    SoftHalf: FloatConvert<S>,
{
    for bits in 0..=u8::MAX {
        let (got, want) = (fp8::fp8_to_f32(format, bits), to_single::<S>(bits.into()));
        assert!(got == want && got.is_sign_negative() == want.is_sign_negative() || got.is_nan() && want.is_nan());
        assert_eq!(half::f16_to_f32(fp8::fp8_to_f16(format, bits)).to_bits(), got.to_bits());
    }
    for bits in 0..=u16::MAX {
        let exact = SoftHalf::from_bits(bits.into());
        let soft: S = exact.convert(&mut false).value;
        let sign = (bits >> 8) as u8 & 0x80;
        let want = if exact.is_nan() {
            0x7f
        } else if soft.is_finite() {
            soft.to_bits() as u8
        } else {
            sign | max
        };
        assert_eq!(fp8::f16_to_fp8(format, bits, false), want, "{format:?} {bits:#x}");
        let clamped = if sign != 0 && want != 0x7f { 0 } else { want };
        assert_eq!(fp8::f16_to_fp8(format, bits, true), clamped, "{format:?} relu {bits:#x}");
    }
}

#[test]
fn fp8_conversions_agree_with_the_oracle_for_every_input() {
    check_fp8_format::<Float8E4M3FN>(fp8::Fp8::E4m3, 0x7e);
    check_fp8_format::<Float8E5M2>(fp8::Fp8::E5m2, 0x7b);
    let e4m3 = fp8::Fp8::E4m3;
    assert_eq!(fp8::cvt_fp8x2_f32(e4m3, 1.0, -500.0, false), 0x38fe);
    assert_eq!(fp8::cvt_fp8x2_f32(e4m3, 1.0, -500.0, true), 0x3800);
    assert_eq!(fp8::cvt_fp8x2_f16x2(e4m3, 0x3c00_c000, false), 0x38c0);
    assert_eq!(fp8::cvt_f16x2_fp8x2(e4m3, 0x38c0, false), 0x3c00_c000);
    assert_eq!(fp8::cvt_f16x2_fp8x2(e4m3, 0xffc0, true), 0x7fff_0000);
}

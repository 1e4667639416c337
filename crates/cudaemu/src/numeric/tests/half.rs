//! `.f16` and `.bf16` against the software float, exhaustively where the number of inputs allows it.

use super::super::half::{self, Bf16, F16, Half};
use rustc_apfloat::ieee::{BFloat, Half as SoftHalf, Single};
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
fn operand<H: Half>(one: u16, rng: &mut fastrand::Rng) -> u16 {
    let edges = [0, 1, 2, 0x3ff, 0x400, 0x7f, 0x80, one, one + 1, H::INFINITY - 1, H::INFINITY, 0x7fff];
    let magnitude = match rng.u8(..4) {
        0 => edges[rng.usize(..edges.len())],
        1 => rng.u16(..0x8000),
        _ => one - 0x800 + rng.u16(..0x1000),
    };
    magnitude | rng.u16(..2) << 15
}

fn check_arithmetic<H: Half, S: Float>(one: u16, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let soft = |bits: u16| S::from_bits(bits.into());
    for _ in 0..40_000 {
        let [a, b, c] = [(); 3].map(|()| operand::<H>(one, &mut rng));
        let rows = [
            ("add", half::add::<H>(a, b), (soft(a) + soft(b)).value),
            ("mul", half::mul::<H>(a, b), (soft(a) * soft(b)).value),
            ("fma", H::multiply_add(a, b, c), soft(a).mul_add(soft(b), soft(c)).value),
        ];
        for (name, got, want) in rows {
            assert_eq!(got, expected(want), "{name} {a:#x} {b:#x} {c:#x}");
        }
    }
}

#[test]
fn f16_arithmetic_is_rounded_once() {
    check_arithmetic::<F16, SoftHalf>(0x3c00, 1);
    // 1.0009765625 * 0.99951171875 + 2^-24: a sum in f32 would first be rounded to a tie of f16.
    let want = SoftHalf::from_bits(0x3c01).mul_add(SoftHalf::from_bits(0x3bff), SoftHalf::from_bits(1)).value;
    assert_eq!(F16::multiply_add(0x3c01, 0x3bff, 1), want.to_bits() as u16);
}

#[test]
fn bf16_arithmetic_is_rounded_once() {
    check_arithmetic::<Bf16, BFloat>(0x3f80, 2);
    // Products in the range of subnormals, where f32 may already have rounded.
    let mut rng = fastrand::Rng::with_seed(5);
    for _ in 0..20_000 {
        let (a, b) = (rng.u16(0x1c00..0x2400), rng.u16(0x1c00..0x2400));
        let want = (BFloat::from_bits(a.into()) * BFloat::from_bits(b.into())).value;
        assert_eq!(half::mul::<Bf16>(a, b), expected(want), "{a:#x} {b:#x}");
    }
}

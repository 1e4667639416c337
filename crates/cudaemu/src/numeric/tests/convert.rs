//! `cvt` for every pair of types against the software float.

use super::super::convert::{self, FloatCvt};
use super::super::{FloatType, IntRounding, IntType, Rounding};
use super::{EDGES, ROUNDINGS, random_f32};
use rustc_apfloat::ieee::{BFloat, Double, Half, Single};
use rustc_apfloat::{Float, FloatConvert, Round};

const INTS: [IntType; 8] =
    [IntType::U8, IntType::S8, IntType::U16, IntType::S16, IntType::U32, IntType::S32, IntType::U64, IntType::S64];
const FLOATS: [FloatType; 4] = [FloatType::F16, FloatType::Bf16, FloatType::F32, FloatType::F64];

/// Values at the limits of every integer type, and random values of every length.
fn sample_integers() -> Vec<u64> {
    let mut rng = fastrand::Rng::with_seed(1);
    let edges = [7, 8, 11, 15, 16, 24, 25, 31, 32, 53, 63].into_iter().flat_map(|bit| {
        let power = 1u64 << bit;
        [power - 1, power, power + 1, power.wrapping_neg(), power.wrapping_neg() - 1]
    });
    let random = (0..600).map(|i| rng.u64(..) >> (i % 64));
    edges.chain([0, 65519, 65520, 65535, u64::MAX]).chain(random).collect()
}

/// Bits of every float type: edges of `.f32` converted to the type, and random bits.
fn sample_floats(ty: FloatType) -> Vec<u64> {
    let mut rng = fastrand::Rng::with_seed(2);
    let singles: Vec<f32> =
        EDGES.iter().map(|&bits| f32::from_bits(bits)).chain((0..800).map(|_| random_f32(&mut rng))).collect();
    let near_integers = (0..400).map(|i| f64::from(i - 200) * 0.25 * [1.0, 1.0, 163.0, 1e7, 4.5e16][i as usize % 5]);
    match ty {
        FloatType::F16 | FloatType::Bf16 => {
            let high = singles.iter().map(|x| u64::from(x.to_bits() >> 16));
            high.chain((0..0x1_0000).step_by(97)).collect()
        }
        FloatType::F32 | FloatType::Tf32 => {
            let near = near_integers.map(|x| u64::from((x as f32).to_bits()));
            singles.iter().map(|x| u64::from(x.to_bits())).chain(near).collect()
        }
        FloatType::F64 => {
            let wide = singles.iter().map(|&x| f64::from(x).to_bits());
            // Close to the ties of narrower types, at a distance of one unit of f64.
            let ties: Vec<u64> = wide.clone().flat_map(|x| [x + (1 << 28), x + (1 << 28) - 1, x + (1 << 41)]).collect();
            wide.chain(ties).chain(near_integers.map(f64::to_bits)).collect()
        }
    }
}

fn to_soft_double(bits: u64, ty: FloatType) -> Double {
    let bits = u128::from(bits);
    match ty {
        FloatType::F16 => Half::from_bits(bits).convert(&mut false).value,
        FloatType::Bf16 => BFloat::from_bits(bits).convert(&mut false).value,
        FloatType::F32 | FloatType::Tf32 => Single::from_bits(bits).convert(&mut false).value,
        FloatType::F64 => Double::from_bits(bits),
    }
}

fn bits_of<S: Float>(value: S) -> u64 {
    value.to_bits() as u64
}

#[test]
fn integer_conversions_wrap_or_saturate() {
    for value in sample_integers() {
        for from in INTS {
            let wide = if from.signed() { i128::from(from.extend(value) as i64) } else { from.extend(value).into() };
            for to in INTS {
                let low = wide as u64 & (u64::MAX >> (64 - to.bits()));
                let got = convert::int_to_int(value, from, to, false);
                assert_eq!(got & (u64::MAX >> (64 - to.bits())), low, "{value:#x} {from:?} {to:?}");
                assert_eq!(got, to.extend(got));
                let clamped = wide.clamp(to.min(), to.max()) as u64;
                assert_eq!(convert::int_to_int(value, from, to, true), clamped, "sat {value:#x} {from:?} {to:?}");
            }
        }
    }
    assert_eq!(convert::int_to_int(0xffff_ff80, IntType::S32, IntType::U8, true), 0);
    assert_eq!(convert::int_to_int(300, IntType::U16, IntType::S8, true), 127);
}

#[test]
fn integer_to_float_rounds_once() {
    for value in sample_integers() {
        for from in INTS {
            let wide = if from.signed() { i128::from(from.extend(value) as i64) } else { from.extend(value).into() };
            for (round, oracle) in ROUNDINGS {
                let want = [
                    bits_of(Half::from_i128_r(wide, oracle).value),
                    bits_of(BFloat::from_i128_r(wide, oracle).value),
                    bits_of(Single::from_i128_r(wide, oracle).value),
                    bits_of(Double::from_i128_r(wide, oracle).value),
                ];
                let got = FLOATS.map(|to| convert::int_to_float(value, from, to, round, false));
                assert_eq!(got, want, "{wide} {from:?} {round:?}");
            }
        }
    }
    assert_eq!(convert::int_to_float(7, IntType::U32, FloatType::F32, Rounding::Rn, true), 0x3f80_0000);
    assert_eq!(convert::int_to_float(u64::MAX, IntType::S32, FloatType::F16, Rounding::Rn, true), 0);
}

#[test]
fn float_to_integer_saturates() {
    let roundings = [
        (IntRounding::Rni, Round::NearestTiesToEven),
        (IntRounding::Rzi, Round::TowardZero),
        (IntRounding::Rmi, Round::TowardNegative),
        (IntRounding::Rpi, Round::TowardPositive),
    ];
    for from in FLOATS {
        for bits in sample_floats(from) {
            let value = to_soft_double(bits, from);
            for to in INTS {
                for (round, oracle) in roundings {
                    let got = convert::float_to_int(bits, from, to, round, false);
                    let want = if value.is_nan() {
                        let top = from == FloatType::F64 || to.bits() == 64;
                        if top { to.min().min(0) as u64 | to.extend(1 << (to.bits() - 1)) } else { 0 }
                    } else if to.signed() {
                        value.to_i128_r(to.bits() as usize, oracle, &mut false).value as u64
                    } else {
                        value.to_u128_r(to.bits() as usize, oracle, &mut false).value as u64
                    };
                    assert_eq!(got, want, "{bits:#x} {from:?} {to:?} {round:?}");
                }
            }
        }
    }
    let cvt = |x: f32, to, ftz| convert::float_to_int(x.to_bits().into(), FloatType::F32, to, IntRounding::Rpi, ftz);
    assert_eq!(cvt(1e-40, IntType::S32, false), 1);
    assert_eq!(cvt(1e-40, IntType::S32, true), 0);
    assert_eq!(cvt(f32::NAN, IntType::S32, false), 0);
    assert_eq!(cvt(f32::NAN, IntType::U64, false), 1 << 63);
    let nan = f64::NAN.to_bits();
    assert_eq!(convert::float_to_int(nan, FloatType::F64, IntType::U32, IntRounding::Rzi, false), 1 << 31);
}

#[test]
fn float_conversions_round_once() {
    for from in FLOATS {
        for bits in sample_floats(from) {
            let value = to_soft_double(bits, from);
            if value.is_nan() {
                continue;
            }
            for (round, oracle) in ROUNDINGS {
                let want = [
                    bits_of::<Half>(value.convert_r(oracle, &mut false).value),
                    bits_of::<BFloat>(value.convert_r(oracle, &mut false).value),
                    bits_of::<Single>(value.convert_r(oracle, &mut false).value),
                    bits_of(value),
                ];
                let cvt = FloatCvt { round, ..FloatCvt::RN };
                let got = FLOATS.map(|to| convert::float_to_float(bits, from, to, cvt));
                assert_eq!(got, want, "{bits:#x} {from:?} {round:?}");
            }
        }
    }
}

#[test]
fn float_conversions_give_the_nan_of_the_destination() {
    let cvt = |bits, from, to| convert::float_to_float(bits, from, to, FloatCvt::RN);
    for (bits, from, to, want) in [
        (0xffc0_0001, FloatType::F32, FloatType::F16, 0x7fff),
        (0xffc0_0001, FloatType::F32, FloatType::Bf16, 0x7fff),
        (0xffc0_0001, FloatType::F32, FloatType::F32, 0x7fff_ffff),
        (0xff80_0001, FloatType::F32, FloatType::F64, 0xfff8_0000_2000_0000),
        (0x7fff_ffff, FloatType::F32, FloatType::F64, 0x7fff_ffff_e000_0000),
        (0xfff0_0000_0000_0001, FloatType::F64, FloatType::F64, 0xfff8_0000_0000_0001),
        (0xfff0_0000_0000_0001, FloatType::F64, FloatType::F32, 0x7fff_ffff),
        (0xfe00, FloatType::F16, FloatType::F32, 0x7fff_ffff),
        (0xffc1, FloatType::Bf16, FloatType::F32, 0xffc1_0000),
    ] {
        assert_eq!(cvt(bits, from, to), want, "{bits:#x} {from:?} {to:?}");
    }
}

#[test]
fn ftz_and_sat_change_float_conversions() {
    let (f16, bf16, f32, f64) = (FloatType::F16, FloatType::Bf16, FloatType::F32, FloatType::F64);
    let plain = FloatCvt::RN;
    let (ftz, sat) = (FloatCvt { ftz: true, ..plain }, FloatCvt { sat: true, ..plain });
    for (bits, from, to, cvt, want) in [
        (0x8000_0001, f32, f64, ftz, 1 << 63),
        (1e-40f64.to_bits(), f64, f32, ftz, 0),
        (0x0001, f16, f32, ftz, 0x3380_0000),
        ((-2.0f64).to_bits(), f64, f32, sat, 0),
        (2.0f64.to_bits(), f64, f16, sat, 0x3c00),
        (0x7fc0_0000, f32, f16, sat, 0),
        (0xff7f_ffff, f32, bf16, plain, 0xff80),
    ] {
        assert_eq!(convert::float_to_float(bits, from, to, cvt), want, "{bits:#x} {from:?} {to:?} {cvt:?}");
    }
    let integral = |x: f32, round, sat| {
        f32::from_bits(convert::float_to_integral(x.to_bits().into(), f32, round, false, sat) as u32)
    };
    assert_eq!(integral(2.5, IntRounding::Rni, false), 2.0);
    assert_eq!(integral(-0.25, IntRounding::Rpi, false).to_bits(), 0x8000_0000);
    assert_eq!(integral(-0.25, IntRounding::Rmi, false), -1.0);
    assert_eq!(integral(7.9, IntRounding::Rzi, true), 1.0);
    assert_eq!(integral(-f32::NAN, IntRounding::Rzi, false).to_bits(), 0x7fff_ffff);
    assert_eq!(convert::float_to_integral(0x3e00, f16, IntRounding::Rni, false, false), 0x4000);
}

#[test]
fn tf32_conversions_round_to_ten_fraction_bits() {
    for (a, want) in [
        (0x3f80_0fff, 0x3f80_0000),
        (0x3f80_1000, 0x3f80_2000),
        (0x7f7f_ffff, 0x7f80_0000),
        (0xff80_0000, 0xff80_0000),
        (0x0000_1000, 0x0000_2000),
        (0xffc0_0000, 0x7fff_ffff),
    ] {
        assert_eq!(convert::cvt_tf32_f32(f32::from_bits(a)), want, "{a:#x}");
    }
}

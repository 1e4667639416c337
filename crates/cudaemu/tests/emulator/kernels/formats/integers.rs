//! Conversions between integers and floats, and from double to float.

use super::{FILE, assert_columns, run_unary, same_f32, same_f64, sample_floats, sample_integers};
use crate::gpu::Gpu;
use crate::reference::{Exact, F32, ROUNDINGS, Round, round_to_integer};

/// Smallest and largest value of int, unsigned, long long and unsigned long long.
const TYPES: [[f64; 2]; 4] = [
    [i32::MIN as f64, i32::MAX as f64],
    [0.0, u32::MAX as f64],
    [i64::MIN as f64, i64::MAX as f64],
    [0.0, u64::MAX as f64],
];

/// A value as each 32-bit and 64-bit type, with each rounding, in the bits of a `long long`.
/// NaN becomes 0 from a single to 32 bits, else the highest bit (PTX ISA, "cvt").
fn expected_integers(value: f64, single: bool) -> Vec<Option<i64>> {
    let mut all = Vec::new();
    for (ty, range) in TYPES.into_iter().enumerate() {
        // Order of the roundings: rn, rz, ru, rd.
        for round in ROUNDINGS {
            let number = round_to_integer(value, round, range);
            all.push(Some(match ty {
                0 => i64::from(number as i32),
                1 => i64::from(number as u32),
                2 => number as i64,
                _ => number as u64 as i64,
            }));
        }
    }
    if value.is_nan() {
        let narrow = if single { [0, 0] } else { [i64::from(i32::MIN), 1 << 31] };
        for (ty, number) in [narrow[0], narrow[1], i64::MIN, i64::MIN].into_iter().enumerate() {
            all[4 * ty..][..4].fill(Some(number));
        }
    }
    all
}

#[test]
fn floats_are_rounded_and_clamped_to_integers() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let values = sample_floats(600, 1);
    let got = run_unary::<_, i64>(&gpu, &module, "float_to_integers", &values, 24);
    for (&x, got) in values.iter().zip(&got) {
        let mut want = expected_integers(x.into(), true);
        // A cast is undefined if the type cannot represent the value.
        let fits = |low: f64, high: f64| f64::from(x) > low - 1.0 && f64::from(x) < high + 1.0;
        want.push(fits(-128.0, 127.0).then_some(x as i64));
        want.push(fits(0.0, 255.0).then_some(x as i64));
        want.push(fits(-32768.0, 32767.0).then_some(x as i64));
        want.push(fits(0.0, 65535.0).then_some(x as i64));
        want.push(fits(-2147483648.0, 2147483647.0).then_some(x as i64));
        want.push(fits(0.0, 4294967295.0).then_some(x as i64));
        want.push((x.abs() < 9e18).then_some(x as i64));
        want.push((x > -1.0 && x < 1.8e19).then_some(x as u64 as i64));
        assert_columns("float_to_integers", x, got, &want, |a, b| a == b);
    }
    let values: Vec<f64> = sample_floats(600, 2).into_iter().map(|x| f64::from(x) * 1.000000119).collect();
    let got = run_unary::<_, i64>(&gpu, &module, "double_to_integers", &values, 19);
    for (&x, got) in values.iter().zip(&got) {
        let mut want = expected_integers(x, false);
        let bits = x.to_bits() as i64;
        want.extend([(bits >> 32) as i32, bits as i32].map(|half| Some(i64::from(half))));
        want.push(Some(bits));
        assert_columns("double_to_integers", x, got, &want, |a, b| a == b);
    }
}

/// A whole number of up to 64 bits as an exact sum.
fn exact(value: i128) -> Exact {
    let high = value as f64;
    Exact(high, (value - high as i128) as f64)
}

#[test]
fn integers_are_exactly_rounded_to_floats() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let values = sample_integers(500, 3);
    let got = run_unary::<_, f32>(&gpu, &module, "integers_to_float", &values, 22);
    for (&x, got) in values.iter().zip(&got) {
        let all = [i128::from(x as i32), i128::from(x as u32), i128::from(x as i64), i128::from(x)];
        let mut want: Vec<f32> =
            all.iter().flat_map(|&value| ROUNDINGS.map(|round| exact(value).round(F32, round) as f32)).collect();
        want.extend([f32::from(x as i8), f32::from(x as u8), f32::from(x as i16), f32::from(x as u16)]);
        want.extend([f32::from_bits(x as u32); 2]);
        let want: Vec<_> = want.into_iter().map(Some).collect();
        assert_columns("integers_to_float", x, got, &want, same_f32);
    }
    let got = run_unary::<_, f64>(&gpu, &module, "integers_to_double", &values, 12);
    for (&x, got) in values.iter().zip(&got) {
        let mut want = vec![f64::from(x as i32), f64::from(x as u32)];
        for value in [i128::from(x as i64), i128::from(x)] {
            want.extend(ROUNDINGS.map(|round| exact(value).round_double(round)));
        }
        want.extend([f64::from_bits(x); 2]);
        let want: Vec<_> = want.into_iter().map(Some).collect();
        assert_columns("integers_to_double", x, got, &want, same_f64);
    }
}

#[test]
fn f64_is_exactly_rounded_to_f32() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let mut values: Vec<f64> = sample_floats(300, 4).into_iter().map(f64::from).collect();
    values.extend(values.clone().iter().map(|x| x * (1.0 + 1e-9)));
    values.extend([
        1e300,
        -1e300,
        1e-300,
        3.4028235677973366e38,
        3.4028235677973362e38,
        1.0 + 2f64.powi(-24),
        1.0 + 3.0 * 2f64.powi(-24),
    ]);
    let got = run_unary::<_, f32>(&gpu, &module, "double_to_float", &values, 4);
    for (&x, got) in values.iter().zip(&got) {
        let want = ROUNDINGS.map(|round| Exact(x, 0.0).round(F32, round) as f32);
        assert_columns("double_to_float", x, got, &want.map(Some), same_f32);
    }
    assert_eq!(Exact(1.0, -1e-20).round(F32, Round::Zero), f64::from(1f32.next_down()));
}

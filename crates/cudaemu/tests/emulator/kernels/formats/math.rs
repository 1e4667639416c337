//! Math functions against double precision, with error bounds, and the approximate instructions.

use super::{FILE, run_binary};
use crate::gpu::{Gpu, random};

/// The error function: 2/√π e^(-x²) Σ 2ⁿ x^(2n+1) / (2n+1)!!; all terms have the same sign.
fn erf(x: f64) -> f64 {
    let (mut term, mut sum, mut n) = (x, x, 1.0);
    while term.abs() > sum.abs() * 1e-17 {
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
        n += 1.0;
    }
    sum * (-x * x).exp() * std::f64::consts::FRAC_2_SQRT_PI
}

/// The complementary error function. From 2 on, where 1 - erf(x) would lose digits, it uses the continued fraction.
fn erfc(x: f64) -> f64 {
    if x < 2.0 {
        return 1.0 - erf(x.max(-6.0));
    }
    let fraction = (1..200).rev().fold(0.0, |rest, n| f64::from(n) / 2.0 / (x + rest));
    (-x * x).exp() / (x + fraction) * std::f64::consts::FRAC_2_SQRT_PI / 2.0
}

/// The logarithm of the gamma function: Stirling's series at x + 10, minus the logarithms of the ten factors.
fn ln_gamma(x: f64) -> f64 {
    let z = x + 10.0;
    let series = 1.0 / (12.0 * z) - 1.0 / (360.0 * z.powi(3)) + 1.0 / (1260.0 * z.powi(5));
    let stirling = (z - 0.5) * z.ln() - z + 0.5 * std::f64::consts::TAU.ln() + series;
    stirling - (0..10).map(|k| (x + f64::from(k)).ln()).sum::<f64>()
}

/// Expected value with its relative and absolute error bounds.
type Row = (f64, f64, f64);

#[track_caller]
fn assert_within_bounds(what: &str, inputs: (f64, f64), got: impl Iterator<Item = f64>, want: &[Row]) {
    for (column, (got, &(value, relative, absolute))) in got.zip(want).enumerate() {
        let fine = absolute.is_infinite()
            || got == value
            || got.is_nan() && value.is_nan()
            || (got - value).abs() <= (value.abs() * relative).max(absolute);
        assert!(fine, "{what}: column {column} of {inputs:?} is {got:e}, expected {value:e}");
    }
}

fn pairs(count: usize, seed: u64) -> Vec<(f32, f32)> {
    let mut random = random(seed);
    let mut all = vec![(0.5, 0.5), (1.0, 2.0), (-1.0, 3.0), (2.5, -1.5), (-0.25, 0.75), (3.0, 0.5), (-4.5, 1.0)];
    all.extend((0..count).map(|_| (random.f32() * 10.0 - 5.0, random.f32() * 6.0 - 3.0)));
    all
}

#[test]
fn f32_functions_stay_within_their_error_bounds() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let mut values = pairs(300, 1);
    // Far from zero, sine uses another argument reduction.
    values.extend([(100_000.0, 1.0), (-3e6, 2.0), (1e15, 0.1), (700_000.5, -1.0)]);
    let (a, b): (Vec<f32>, Vec<f32>) = values.iter().copied().unzip();
    let got = run_binary::<_, f32>(&gpu, &module, "float_math", &a, &b, 44);
    for (&(x, y), got) in values.iter().zip(&got) {
        let (u, v, p) = (f64::from(x), f64::from(y), f64::from(x.abs()));
        let quotient = (u / v).round_ties_even();
        let exponent = p.log2().floor() + 1.0;
        let (next, whole) = (
            if x == y {
                y
            } else if x < y {
                x.next_up()
            } else {
                x.next_down()
            },
            u.trunc(),
        );
        let loose = |value: f64| (value, 1e-6, 2e-7);
        let tight = |value: f64| (value, 5e-7, 1e-37);
        let same = |value: f64| (value, 0.0, 0.0);
        let any = (0.0, 0.0, f64::INFINITY);
        let large = p > 1000.0;
        let want = [
            loose(u.sin()),
            loose(u.cos()),
            (u.tan(), 1e-6, 2e-7),
            tight(u.exp()),
            tight(u.exp2()),
            tight(10f64.powf(u)),
            loose(u.exp_m1()),
            loose(p.ln()),
            loose(p.log2()),
            loose(p.log10()),
            loose(p.ln_1p()),
            if large { any } else { tight(p.powf(v)) },
            loose(u.tanh()),
            loose(erf(u.clamp(-6.0, 6.0))),
            if u > 6.0 { any } else { tight(erfc(u)) },
            tight(1.0 / p.sqrt()),
            tight(p.sqrt()),
            tight(u.cbrt()),
            tight(u.hypot(v)),
            same(u.floor()),
            same(u.ceil()),
            same(u.trunc()),
            same(u.round_ties_even()),
            same(u.round()),
            same(u % v),
            same(u.copysign(v)),
            loose(u.atan2(v)),
            if p > 1.0 { same(f64::NAN) } else { loose(u.asin()) },
            loose(u.sinh()),
            if large { any } else { (ln_gamma(p), 1e-5, 1e-5) },
            (if u > v { u - v } else { 0.0 }, 1e-7, 0.0),
            same(next.into()),
            same(u * 32.0),
            same(u / exponent.exp2()),
            same(exponent),
            same(u - whole),
            same(whole),
            if large { any } else { (u - quotient * v, 0.0, 1e-7) },
            if large { any } else { same(f64::from(quotient as i64 as i32 & 7)) },
            loose(u.sin()),
            loose(u.cos()),
            same((u.round_ties_even() as f32).into()),
            same(exponent - 1.0),
            if u < -5.5 || large { any } else { (erfc(-u / 2f64.sqrt()) / 2.0, 1e-5, 1e-7) },
        ];
        let finite = |row: Row| if row.0.is_finite() && row.0.abs() > 3.4e38 { any } else { row };
        assert_within_bounds("float_math", (u, v), got.iter().map(|&x| x.into()), &want.map(finite));
    }
}

#[test]
fn approximate_instructions_stay_within_their_error_bounds() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let values: Vec<(f32, f32)> = pairs(300, 2).into_iter().map(|(x, y)| (x * 0.6, y)).collect();
    let (a, b): (Vec<f32>, Vec<f32>) = values.iter().copied().unzip();
    let got = run_binary::<_, f32>(&gpu, &module, "float_intrinsics", &a, &b, 26);
    for (&(x, y), got) in values.iter().zip(&got) {
        let (u, v, p) = (f64::from(x), f64::from(y), f64::from(x.abs()));
        // Bounds from PTX ISA: 2^-20.9 for sines, 2^-22 for logarithms (absolute near 1), 2^-22.5 and better for the rest.
        let sine = |value: f64| (value, 0.0, 5.1e-7);
        let log = |value: f64| (value, 3e-7, 3e-7);
        let tight = |value: f64| (value, 3.6e-7, 0.0);
        let power = |value: f64| (value, 2e-6, 0.0);
        let want = [
            sine(u.sin()),
            sine(u.cos()),
            (u.tan(), 1e-6 * (1.0 + 1.0 / u.cos().abs()), 1e-6),
            power(u.exp()),
            power(10f64.powf(u)),
            log(p.ln()),
            log(p.log2()),
            log(p.log10()),
            (p.powf(v), 4e-6 * (1.0 + v.abs()), 0.0),
            tight(u / v),
            tight(1.0 / p.sqrt()),
            tight(u.exp2()),
            tight(u.exp2()),
            log(p.log2()),
            log(p.log2()),
            tight(1.0 / u),
            tight(1.0 / u),
            tight(p.sqrt()),
            tight(p.sqrt()),
            tight(1.0 / p.sqrt()),
            tight(1.0 / p.sqrt()),
            sine(u.sin()),
            sine(u.cos()),
            (u.tanh(), 5e-4, 0.0),
            tight(u / v),
            tight(u / v),
        ];
        assert_within_bounds("float_intrinsics", (u, v), got.iter().map(|&x| x.into()), &want);
    }
}

#[test]
fn f64_functions_stay_within_their_error_bounds() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let values: Vec<(f64, f64)> =
        pairs(300, 3).into_iter().map(|(x, y)| (f64::from(x) / 1.1, f64::from(y) / 1.3)).collect();
    let (a, b): (Vec<f64>, Vec<f64>) = values.iter().copied().unzip();
    let got = run_binary::<_, f64>(&gpu, &module, "double_math", &a, &b, 21);
    for (&(x, y), got) in values.iter().zip(&got) {
        let p = x.abs();
        let near_by = |value: f64| (value, 2e-14, 2e-15);
        let same = |value: f64| (value, 0.0, 0.0);
        let want = [
            same(p.sqrt()),
            same(x / y),
            near_by(x.exp()),
            near_by(p.ln()),
            near_by(p.powf(y)),
            near_by(x.tanh()),
            near_by(erf(x)),
            near_by(1.0 / p.sqrt()),
            same(x.floor()),
            same(x.ceil()),
            same(x.trunc()),
            same(x.round_ties_even()),
            same(x.round()),
            same(x % y),
            same(x.copysign(y)),
            near_by(x.cbrt()),
            near_by(x.exp2()),
            near_by(p.log2()),
            near_by(x.atan()),
            same(x.mul_add(y, x)),
            same(f64::from_bits(x.to_bits() ^ 1)),
        ];
        assert_within_bounds("double_math", (x, y), got.iter().copied(), &want);
    }
}

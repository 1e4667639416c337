//! Arithmetic of `float` and `double` in each rounding mode.

use super::{FILE, assert_columns, run_binary, same_f32, same_f64, sample_floats};
use crate::gpu::{Gpu, random};
use crate::reference::{Exact, F32, ROUNDINGS, Round, rounded_sum};

#[test]
fn f32_arithmetic_is_exactly_rounded_in_each_mode() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let (mut a, mut b) = (sample_floats(900, 1), sample_floats(900, 2));
    a.reverse();
    b[..40].rotate_left(7);
    let got = run_binary::<_, f32>(&gpu, &module, "float_rounding", &a, &b, 31);
    for ((&x, &y), got) in a.iter().zip(&b).zip(&got) {
        let (u, v, p) = (f64::from(x), f64::from(y), f64::from(x.abs()));
        let mut want: Vec<f64> = Vec::new();
        want.extend(ROUNDINGS.map(|round| rounded_sum(u, v, F32, round)));
        want.extend(ROUNDINGS.map(|round| Exact(u * v, 0.0).round(F32, round)));
        want.extend(ROUNDINGS.map(|round| rounded_sum(u * v, u, F32, round)));
        want.extend(ROUNDINGS.map(|round| Exact::quotient(u, v).round(F32, round)));
        want.extend(ROUNDINGS.map(|round| Exact::quotient(1.0, u).round(F32, round)));
        want.extend(ROUNDINGS.map(|round| Exact::root(p).round(F32, round)));
        want.extend([Round::Near, Round::Zero].map(|round| rounded_sum(u, -v, F32, round)));
        want.push(Exact(1.0 / p.sqrt(), 0.0).round(F32, Round::Near));
        let saturated = |value: f64| if value > 0.0 { value.min(1.0) } else { 0.0 };
        want.extend([u, rounded_sum(u, v, F32, Round::Near), want[4], want[8]].map(saturated));
        let want: Vec<_> = want.into_iter().map(|value| Some(value as f32)).collect();
        assert_columns("float_rounding", (x, y), got, &want, same_f32);
    }
}

#[test]
fn f64_arithmetic_is_exactly_rounded_in_each_mode() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let mut random = random(3);
    let special = [0.0, -0.0, 1.0, -1.0, 3.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
    let mut sample = || match random.u8(..4) {
        0 => special[random.usize(..special.len())],
        1 => f64::from(random.i32(-100..100)),
        _ => (random.f64() - 0.5) * 2f64.powi(random.i32(-40..40)),
    };
    let (a, b): (Vec<f64>, Vec<f64>) = (0..600).map(|_| (sample(), sample())).unzip();
    let got = run_binary::<_, f64>(&gpu, &module, "double_rounding", &a, &b, 24);
    for ((&x, &y), got) in a.iter().zip(&b).zip(&got) {
        let sum = |a: f64, b: f64, round| {
            let exact = Exact::two_sum(a, b);
            let cancelled = exact.0 == 0.0 && (a != 0.0 || a.is_sign_positive() != b.is_sign_positive());
            if cancelled { if round == Round::Down { -0.0 } else { 0.0 } } else { exact.round_double(round) }
        };
        // A fused product and sum: rounds the exact remainder after the nearest result.
        let fused = |round| {
            let Exact(high, low) = Exact::two_product(x, y);
            let nearest = x.mul_add(y, x);
            if !nearest.is_finite() || nearest == 0.0 || low == 0.0 {
                return sum(high, x, round);
            }
            let Exact(top, rest) = Exact::two_sum(high, x);
            let Exact(a, b) = Exact::two_sum(top, rest + low);
            Exact(nearest, a - nearest + b).round_double(round)
        };
        let mut want = Vec::new();
        want.extend(ROUNDINGS.map(|round| sum(x, y, round)));
        want.extend(ROUNDINGS.map(|round| Exact::two_product(x, y).round_double(round)));
        want.extend(ROUNDINGS.map(fused));
        want.extend(ROUNDINGS.map(|round| Exact::quotient(x, y).round_double(round)));
        want.extend(ROUNDINGS.map(|round| Exact::root(x.abs()).round_double(round)));
        want.extend(ROUNDINGS.map(|round| Exact::quotient(1.0, x).round_double(round)));
        let want: Vec<_> = want.into_iter().map(Some).collect();
        assert_columns("double_rounding", (x, y), got, &want, same_f64);
    }
}

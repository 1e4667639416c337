//! `.f64` arithmetic: nearest against the software float, directed modes as neighbours of the exact value.

use super::super::{IntRounding, Rounding, Testp, approx, double};
use super::{ROUNDINGS, pairs};
use rustc_apfloat::{Float, ieee::Double};

/// Pairs that cover the range of `.f64`, made from `.f32` pairs by moving exponents and filling low bits.
fn wide_pairs() -> impl Iterator<Item = (f64, f64)> {
    let mut rng = fastrand::Rng::with_seed(7);
    pairs(6, 3000).map(move |(a, b)| {
        let mut widen = |x: f32| {
            let x = f64::from(x) * f64::powi(2.0, rng.i32(-900..890));
            if x.is_finite() { f64::from_bits(x.to_bits() ^ rng.u64(..1 << 20)) } else { x }
        };
        (widen(a), widen(b))
    })
}

#[test]
fn arithmetic_is_rounded_as_the_oracle_rounds() {
    let soft = |x: f64| Double::from_bits(u128::from(x.to_bits()));
    for (a, b) in wide_pairs().filter(|(a, b)| !a.is_nan() && !b.is_nan()) {
        for (round, oracle) in ROUNDINGS {
            let rows = [
                ("add", double::add(a, b, round), soft(a).add_r(soft(b), oracle).value),
                ("sub", double::sub(a, b, round), soft(a).sub_r(soft(b), oracle).value),
                ("mul", double::mul(a, b, round), soft(a).mul_r(soft(b), oracle).value),
                ("div", double::div(a, b, round), soft(a).div_r(soft(b), oracle).value),
                ("fma", double::fma(a, b, a, round), soft(a).mul_add_r(soft(b), soft(a), oracle).value),
            ];
            for (name, got, want) in rows {
                let want = if want.is_nan() { double::NAN.to_bits() } else { want.to_bits() as u64 };
                assert_eq!(got.to_bits(), want, "{name} {round:?} {a:e} {b:e}");
            }
        }
    }
}

#[test]
fn directed_square_roots_bracket_the_operand() {
    for a in wide_pairs().map(|(a, _)| a.abs()).filter(|a| a.is_finite()) {
        let (down, up) = (double::sqrt(a, Rounding::Rm), double::sqrt(a, Rounding::Rp));
        let nearest = double::sqrt(a, Rounding::Rn);
        assert!(down == up || down.next_up() == up, "{a:e}");
        assert!(nearest == down || nearest == up, "{a:e}");
        assert_eq!(double::sqrt(a, Rounding::Rz), down);
        // The sign of (root² - a), from a product rounded outwards and inwards, away from underflow.
        if a > 1e-290 {
            assert!(double::mul(down, down, Rounding::Rm) <= a && a <= double::mul(up, up, Rounding::Rp), "{a:e}");
        }
    }
    assert_eq!(double::sqrt(2.0, Rounding::Rp), 2f64.sqrt());
    assert_eq!(double::sqrt(2.0, Rounding::Rm), 2f64.sqrt().next_down());
    assert_eq!(double::sqrt(f64::from_bits(4), Rounding::Rm), double::sqrt(f64::from_bits(1), Rounding::Rm) * 2.0);
}

#[test]
fn nan_payloads_pass_and_new_ones_are_negative() {
    let (quiet, signalling) = (f64::from_bits(0x7ff8_0000_0000_0007), f64::from_bits(0xfff0_0000_0000_0009));
    for (round, _) in ROUNDINGS {
        assert_eq!(double::add(1.0, quiet, round).to_bits(), quiet.to_bits());
        assert_eq!(double::mul(signalling, quiet, round).to_bits(), 0xfff8_0000_0000_0009);
        assert_eq!(double::sub(1.0, signalling, round).to_bits(), 0xfff8_0000_0000_0009);
        assert_eq!(double::fma(1.0, 1.0, quiet, round).to_bits(), quiet.to_bits());
        assert_eq!(double::add(f64::INFINITY, f64::NEG_INFINITY, round).to_bits(), 0xfff8_0000_0000_0000);
        assert_eq!(double::sqrt(-1.0, round).to_bits(), 0xfff8_0000_0000_0000);
        assert_eq!(double::rcp(-0.0, round), f64::NEG_INFINITY);
    }
    assert_eq!(double::min(quiet, 1.0), 1.0);
    assert_eq!(double::max(-1.0, quiet), -1.0);
    assert_eq!(double::max(signalling, quiet).to_bits(), 0xfff8_0000_0000_0009);
    assert_eq!(double::min(0.0, -0.0).to_bits(), 1 << 63);
    assert_eq!(double::max(-0.0, 0.0).to_bits(), 0);
    assert!(double::testp(Testp::Normal, 0.0) && double::testp(Testp::Subnormal, f64::from_bits(1)));
}

#[test]
fn f64_approximations_use_only_the_upper_word() {
    assert_eq!(approx::rcp_f64(4.0), 0.25);
    assert_eq!(approx::rcp_f64(f64::from_bits(0x4010_0000_ffff_ffff)), 0.25);
    assert_eq!(approx::rcp_f64(-f64::from_bits(1)), f64::NEG_INFINITY);
    assert_eq!(approx::rcp_f64(f64::NEG_INFINITY).to_bits(), 1 << 63);
    assert_eq!(approx::rcp_f64(f64::MAX), 0.0);
    assert_eq!(approx::rsqrt_f64(16.0), 0.25);
    assert_eq!(approx::rsqrt_f64(-0.0), f64::NEG_INFINITY);
    assert!(approx::rsqrt_f64(-1.0).is_nan());
    let third = approx::rcp_f64(3.0);
    assert!(third.to_bits() as u32 == 0 && (third * 3.0 - 1.0).abs() < 2f64.powi(-20), "{third}");
    assert_eq!(IntRounding::Rni.apply(2.5), 2.0);
}

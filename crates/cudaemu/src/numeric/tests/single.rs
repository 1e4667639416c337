//! `.f32` arithmetic in every rounding mode against the software float; modifiers and special values.

use super::super::{Comparison, MinMax, Mode, Rounding, Testp, approx, compare, single};
use super::{EDGES, ROUNDINGS, pairs, random_f32};
use rustc_apfloat::{Float, Round, ieee::Single};

fn soft(x: f32) -> Single {
    Single::from_bits(u128::from(x.to_bits()))
}

/// The bits of a result, with every NaN as the canonical NaN of PTX.
fn bits_with_canonical_nan(x: Single) -> u32 {
    if x.is_nan() { 0x7fff_ffff } else { x.to_bits() as u32 }
}

#[test]
fn arithmetic_is_rounded_as_the_oracle_rounds() {
    type Op = fn(f32, f32, Mode) -> f32;
    type Oracle = fn(Single, Single, Round) -> Single;
    let ops: [(&str, Op, Oracle); 4] = [
        ("add", single::add, |a, b, r| a.add_r(b, r).value),
        ("sub", single::sub, |a, b, r| a.sub_r(b, r).value),
        ("mul", single::mul, |a, b, r| a.mul_r(b, r).value),
        ("div", single::div, |a, b, r| a.div_r(b, r).value),
    ];
    for (name, op, oracle) in ops {
        for (round, oracle_round) in ROUNDINGS {
            for (a, b) in pairs(1, 6000) {
                let got = op(a, b, Mode { round, ..Mode::RN }).to_bits();
                let want = bits_with_canonical_nan(oracle(soft(a), soft(b), oracle_round));
                assert_eq!(got, want, "{name} {round:?} {:#x} {:#x}", a.to_bits(), b.to_bits());
            }
        }
    }
}

#[test]
fn fma_is_rounded_once() {
    let mut rng = fastrand::Rng::with_seed(2);
    let check = |a: f32, b: f32, c: f32| {
        for (round, oracle_round) in ROUNDINGS {
            let got = single::fma(a, b, c, Mode { round, ..Mode::RN }).to_bits();
            let want = bits_with_canonical_nan(soft(a).mul_add_r(soft(b), soft(c), oracle_round).value);
            assert_eq!(got, want, "{round:?} {:#x} {:#x} {:#x}", a.to_bits(), b.to_bits(), c.to_bits());
        }
    };
    for (a, b) in pairs(3, 3000) {
        check(a, b, random_f32(&mut rng));
        check(a, b, f32::from_bits(EDGES[rng.usize(..EDGES.len())]));
        // Cancellation down to the last bits of the product.
        check(a, b, -(a * b));
    }
}

#[test]
fn square_roots_are_rounded_in_every_mode() {
    let mut rng = fastrand::Rng::with_seed(4);
    let mode = |round| Mode { round, ..Mode::RN };
    let values = EDGES.iter().map(|&bits| f32::from_bits(bits)).chain((0..4000).map(|_| random_f32(&mut rng)));
    for a in values.map(f32::abs).filter(|a| a.is_finite()).collect::<Vec<_>>() {
        let exact = f64::from(a);
        let (down, up) = (single::sqrt(a, mode(Rounding::Rm)), single::sqrt(a, mode(Rounding::Rp)));
        let square = |x: f32| f64::from(x) * f64::from(x);
        assert!(square(down) <= exact && exact <= square(up), "{a:e}");
        assert!(down == up && square(down) == exact || down.next_up() == up, "{a:e}");
        assert_eq!(single::sqrt(a, mode(Rounding::Rz)), down);
        assert_eq!(single::sqrt(a, mode(Rounding::Rn)), a.sqrt());
    }
    for (round, _) in ROUNDINGS {
        assert_eq!(single::sqrt(-0.0, mode(round)).to_bits(), 0x8000_0000);
        assert_eq!(single::sqrt(-1.0, mode(round)).to_bits(), 0x7fff_ffff);
        assert_eq!(single::sqrt(f32::INFINITY, mode(round)), f32::INFINITY);
        assert_eq!(single::rcp(-0.0, mode(round)), f32::NEG_INFINITY);
    }
}

#[test]
fn ftz_sat_and_sign_operations_give_known_results() {
    let tiny = f32::from_bits(1);
    let ftz = Mode::RN_FTZ;
    let sat = Mode { sat: true, ..Mode::RN };
    let bits = |x: f32| x.to_bits();
    assert_eq!(bits(single::add(tiny, tiny, Mode::RN)), 2);
    assert_eq!(bits(single::add(tiny, tiny, ftz)), 0);
    assert_eq!(bits(single::add(-tiny, -tiny, ftz)), 0x8000_0000);
    assert_eq!(bits(single::mul(1e-30, -1e-10, ftz)), 0x8000_0000);
    assert_eq!(single::fma(tiny, 1e30, 1.0, ftz), 1.0);
    assert_eq!(single::div(1.0, tiny, ftz), f32::INFINITY);
    assert_eq!(single::rcp(f32::MAX, ftz), 0.0);
    assert_eq!(bits(single::add(f32::NAN, 1.0, sat)), 0);
    assert_eq!(bits(single::mul(-0.0, 1.0, sat)), 0);
    assert_eq!(single::add(3.0, 1.0, sat), 1.0);
    assert_eq!(single::add(-3.0, 1.0, sat), 0.0);
    assert_eq!(single::add(0.5, 0.25, sat), 0.75);
    assert_eq!(bits(single::neg(-tiny, true)), 0);
    assert_eq!(bits(single::abs(-tiny, false)), 1);
    // The operand order of PTX: the sign of the first, the magnitude of the second.
    assert_eq!(single::copysign(-1.0, 2.0), -2.0);
}

#[test]
fn min_and_max_follow_the_nan_and_xorsign_rules() {
    let nan = f32::from_bits(0xffc0_1234);
    let plain = MinMax::PLAIN;
    let strict = MinMax { nan: true, ..plain };
    let xor = MinMax { xorsign_abs: true, ..plain };
    let rows: [(f32, f32, MinMax, u32, u32); 12] = [
        (1.0, 2.0, plain, 0x3f80_0000, 0x4000_0000),
        (0.0, -0.0, plain, 0x8000_0000, 0),
        (-0.0, 0.0, plain, 0x8000_0000, 0),
        (nan, 1.0, plain, 0x3f80_0000, 0x3f80_0000),
        (1.0, nan, plain, 0x3f80_0000, 0x3f80_0000),
        (nan, nan, plain, 0x7fff_ffff, 0x7fff_ffff),
        (nan, 1.0, strict, 0x7fff_ffff, 0x7fff_ffff),
        (1.0, nan, strict, 0x7fff_ffff, 0x7fff_ffff),
        (-1.0, 2.0, xor, 0xbf80_0000, 0xc000_0000),
        (-1.0, -2.0, xor, 0x3f80_0000, 0x4000_0000),
        (-1.0, f32::INFINITY, plain, 0xbf80_0000, 0x7f80_0000),
        (f32::from_bits(1), -f32::from_bits(1), MinMax { ftz: true, ..plain }, 0x8000_0000, 0),
    ];
    for (a, b, mode, min, max) in rows {
        assert_eq!(single::min(a, b, mode).to_bits(), min, "min {a} {b} {mode:?}");
        assert_eq!(single::max(a, b, mode).to_bits(), max, "max {a} {b} {mode:?}");
    }
    for (a, b) in pairs(5, 1000).filter(|(a, b)| !a.is_nan() && !b.is_nan()) {
        let (low, high) = if a.total_cmp(&b).is_le() { (a, b) } else { (b, a) };
        assert_eq!(single::min(a, b, plain).to_bits(), low.to_bits());
        assert_eq!(single::max(a, b, plain).to_bits(), high.to_bits());
    }
}

#[test]
fn testp_and_comparisons_follow_their_truth_tables() {
    let classes = [Testp::Finite, Testp::Infinite, Testp::Number, Testp::NotANumber, Testp::Normal, Testp::Subnormal];
    let rows: [(f32, [bool; 6]); 5] = [
        (1.0, [true, false, true, false, true, false]),
        (-0.0, [true, false, true, false, true, false]),
        (f32::from_bits(1), [true, false, true, false, false, true]),
        (f32::NEG_INFINITY, [false, true, true, false, false, false]),
        (f32::NAN, [false, false, false, true, false, false]),
    ];
    for (a, want) in rows {
        assert_eq!(classes.map(|class| single::testp(class, a)), want, "{a}");
    }
    use Comparison::*;
    let ops = [Eq, Ne, Lt, Le, Gt, Ge, Equ, Neu, Ltu, Leu, Gtu, Geu, Num, Nan];
    let table = |row: &str| row.bytes().map(|b| b == b'1').collect::<Vec<_>>();
    for (a, b, want) in [
        (1.0, 2.0, "01110001110010"),
        (2.0, 1.0, "01001101001110"),
        (0.0, -0.0, "10010110010110"),
        (f32::NAN, 1.0, "00000011111101"),
    ] {
        assert_eq!(ops.map(|op| compare(op, a, b)).to_vec(), table(want), "{a} {b}");
    }
    assert!(compare(Lt, -1i32, 0) && !compare(Lt, u32::MAX, 0));
}

#[test]
fn approximations_give_the_documented_special_values() {
    let (inf, tiny) = (f32::INFINITY, f32::from_bits(1));
    let nan = 0x7fff_ffff;
    let rows: [(&str, f32, u32); 28] = [
        ("ex2 -inf", approx::ex2(-inf, false), 0),
        ("ex2 inf", approx::ex2(inf, false), 0x7f80_0000),
        ("ex2 -0", approx::ex2(-0.0, false), 0x3f80_0000),
        ("ex2 -130", approx::ex2(-130.0, false), 1 << 19),
        ("ex2 -130 ftz", approx::ex2(-130.0, true), 0),
        ("lg2 -0", approx::lg2(-0.0, false), 0xff80_0000),
        ("lg2 -1", approx::lg2(-1.0, false), nan),
        ("lg2 tiny", approx::lg2(tiny, false), (-149f32).to_bits()),
        ("lg2 tiny ftz", approx::lg2(tiny, true), 0xff80_0000),
        ("sin -0", approx::sin(-0.0, false), 0x8000_0000),
        ("sin inf", approx::sin(inf, false), nan),
        ("cos -inf", approx::cos(-inf, false), nan),
        ("cos 0", approx::cos(0.0, true), 0x3f80_0000),
        ("tanh -inf", approx::tanh(-inf), 0xbf80_0000),
        ("tanh -tiny", approx::tanh(-tiny), 0x8000_0001),
        ("rcp -0", approx::rcp(-0.0, false), 0xff80_0000),
        ("rcp -inf", approx::rcp(-inf, false), 0x8000_0000),
        ("rcp -tiny ftz", approx::rcp(-tiny, true), 0xff80_0000),
        ("sqrt -0", approx::sqrt(-0.0, false), 0x8000_0000),
        ("sqrt -tiny ftz", approx::sqrt(-tiny, true), 0x8000_0000),
        ("rsqrt -0", approx::rsqrt(-0.0, false), 0xff80_0000),
        ("rsqrt -1", approx::rsqrt(-1.0, false), nan),
        ("rsqrt inf", approx::rsqrt(inf, false), 0),
        ("div -1/2^127", approx::div_approx(-1.0, 2f32.powi(127), false), 0x8000_0000),
        ("div inf/2^127", approx::div_approx(inf, 2f32.powi(127), false), nan),
        ("div 1/2^126", approx::div_approx(1.0, 2f32.powi(126), false), 1 << 23),
        ("div 2^127/2^127 full", approx::div_full(2f32.powi(127), 2f32.powi(127), true), 0x3f80_0000),
        ("div 0/0", approx::div_full(0.0, 0.0, false), nan),
    ];
    for (name, got, want) in rows {
        assert_eq!(got.to_bits(), want, "{name}: {got:e}");
    }
}

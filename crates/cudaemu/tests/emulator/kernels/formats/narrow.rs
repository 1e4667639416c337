//! f16 and bf16.

use half::{bf16, f16};

use super::{FILE, assert_columns, run_binary, run_unary, sample_floats};
use crate::gpu::{Gpu, random};
use crate::reference::{BF16, Exact, F16, Format, ROUNDINGS, Round, round_to_integer, rounded_sum};

fn f16_of(bits: u16) -> f64 {
    f16::from_bits(bits).to_f64()
}

fn bf16_of(bits: u16) -> f64 {
    bf16::from_bits(bits).to_f64()
}

/// Equality of values of a format; all NaNs are equal.
fn same_values(a: f64, b: f64) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

/// (kernel, destination format, decoder of its results)
type Case = (&'static str, Format, fn(u16) -> f64);

#[test]
fn f32_is_exactly_rounded_to_f16_and_bf16() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let values = sample_floats(800, 1);
    let cases: [Case; 2] = [("float_to_half", F16, f16_of), ("float_to_bfloat16", BF16, bf16_of)];
    for (kernel, format, number) in cases {
        let got = run_unary::<_, u16>(&gpu, &module, kernel, &values, 7);
        for (&x, got) in values.iter().zip(&got) {
            let x = f64::from(x);
            let mut want = ROUNDINGS.map(|round| Exact(x, 0.0).round(format, round)).to_vec();
            let near = want[0];
            want.extend([near, -near, near]);
            let got: Vec<f64> = got.iter().map(|&bits| number(bits)).collect();
            let want: Vec<_> = want.into_iter().map(Some).collect();
            assert_columns(kernel, x, &got, &want, same_values);
        }
    }
}

#[test]
fn f16_and_bf16_convert_to_other_types() {
    use Round::{Near, Up, Zero};
    let int = [f64::from(i32::MIN), f64::from(i32::MAX)];
    let (uint, short, ushort) = ([0.0, f64::from(u32::MAX)], [-32768.0, 32767.0], [0.0, 65535.0]);
    let (long, ulong, char, uchar) =
        ([i64::MIN as f64, i64::MAX as f64], [0.0, u64::MAX as f64], [-128.0, 127.0], [0.0, 255.0]);
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let mut random = random(2);
    let mut bits: Vec<u16> = (0..600).map(|_| random.u16(..)).collect();
    bits.extend([
        0, 0x8000, 1, 0x3ff, 0x400, 0x3800, 0x3c00, 0x3e00, 0x4100, 0x7bff, 0x7c00, 0xfc00, 0x7e00, 0x7f80, 0xff80,
        0x7fff,
    ]);
    let got = run_unary::<_, f64>(&gpu, &module, "half_to_others", &bits, 13);
    for (&bits, got) in bits.iter().zip(&got) {
        let x = f16_of(bits);
        let mut want = vec![Some(x), Some(x)];
        want.extend(ROUNDINGS.map(|round| Some(round_to_integer(x, round, int))));
        let rest =
            [(Near, uint), (Near, short), (Zero, ushort), (Near, long), (Zero, ulong), (Zero, char), (Zero, uchar)];
        want.extend(rest.map(|(round, range)| Some(round_to_integer(x, round, range))));
        if x.is_nan() {
            want[6..].fill(None);
        }
        assert_columns("half_to_others", x, got, &want, |a, b| a == b || a.is_nan() && b.is_nan());
    }
    let got = run_unary::<_, f64>(&gpu, &module, "bfloat16_to_others", &bits, 9);
    for (&bits, got) in bits.iter().zip(&got) {
        let x = bf16_of(bits);
        let rest = [(Near, int), (Zero, int), (Up, uint), (Near, short), (Near, long), (Zero, uchar)];
        let mut want = vec![Some(x)];
        want.extend(rest.map(|(round, range)| Some(round_to_integer(x, round, range))));
        if x.is_nan() {
            want[3..].fill(None);
        }
        want.push(Some(Exact(f64::from(bits) * 257.0, 0.0).round(BF16, Near)));
        want.push(Some(Exact(f64::from(bits) * 65537.0, 0.0).round(BF16, Zero)));
        assert_columns("bfloat16_to_others", x, got, &want, |a, b| a == b || a.is_nan() && b.is_nan());
    }
}

#[test]
fn integers_are_exactly_rounded_to_f16() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let values: Vec<i32> = super::sample_integers(500, 3).into_iter().map(|x| x as i32).collect();
    let got = run_unary::<_, u16>(&gpu, &module, "integers_to_half", &values, 8);
    for (&x, got) in values.iter().zip(&got) {
        let near = |value: f64| Exact(value, 0.0).round(F16, Round::Near);
        let mut want = ROUNDINGS.map(|round| Exact(x.into(), 0.0).round(F16, round)).to_vec();
        want.extend([f64::from(x as u32), f64::from(x as i16), f64::from(x as u16), f64::from(x)].map(near));
        let got: Vec<f64> = got.iter().map(|&bits| f16_of(bits)).collect();
        let want: Vec<_> = want.into_iter().map(Some).collect();
        assert_columns("integers_to_half", x, &got, &want, same_values);
    }
}

/// Bits near the special values of formats: zeros, ones, subnormals, limits, infinities, NaN, and random ones.
fn sample_bits(count: usize, seed: u64, one: u16, infinity: u16) -> Vec<u16> {
    let mut random = random(seed);
    let edges = [0, 0x8000, one, one | 0x8000, 1, 0x8001, infinity - 1, infinity, infinity | 0x8000, 0x7fff];
    let mut sample = || match random.u8(..4) {
        0 => edges[random.usize(..edges.len())],
        1 => random.u16(one - 0x200..one + 0x200) | random.u16(..2) << 15,
        _ => random.u16(..),
    };
    (0..count).map(|_| sample()).collect()
}

/// Sum, difference, product, and `x y + x`, each rounded once to the format.
fn expected_arithmetic(x: f64, y: f64, format: Format) -> [f64; 4] {
    let near = |exact: Exact| exact.round(format, Round::Near);
    [
        rounded_sum(x, y, format, Round::Near),
        rounded_sum(x, -y, format, Round::Near),
        near(Exact::two_product(x, y)),
        rounded_sum(x * y, x, format, Round::Near),
    ]
}

/// (kernel of scalars, kernel of pairs, format, decoder, one, infinity)
type Kind = (&'static str, &'static str, Format, fn(u16) -> f64, u16, u16);

/// Scalar and packed operations: each result, and each half of a pair, is rounded on its own.
#[test]
fn arithmetic_rounds_once() {
    let kinds: [Kind; 2] = [
        ("half_arithmetic", "half2_arithmetic", F16, f16_of, 0x3c00, 0x7c00),
        ("bfloat16_arithmetic", "bfloat162_arithmetic", BF16, bf16_of, 0x3f80, 0x7f80),
    ];
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    for (scalar, packed, format, number, one, infinity) in kinds {
        let (a, b) = (sample_bits(800, 9, one, infinity), sample_bits(800, 10, one, infinity));
        let pair = |both: &[u16]| u32::from(both[0]) | u32::from(both[1]) << 16;
        let words = |all: &[u16]| all.chunks(2).map(pair).collect::<Vec<_>>();
        let scalars = run_binary::<_, u16>(&gpu, &module, scalar, &a, &b, 4);
        let pairs = run_binary::<_, u32>(&gpu, &module, packed, &words(&a), &words(&b), 4);
        for (i, (&a, &b)) in a.iter().zip(&b).enumerate() {
            let (x, y) = (number(a), number(b));
            let want = expected_arithmetic(x, y, format).map(Some);
            let halves = pairs[i / 2].iter().map(|word| (word >> (i % 2 * 16)) as u16);
            for (kernel, found) in [(scalar, scalars[i].clone()), (packed, halves.collect())] {
                let found: Vec<f64> = found.into_iter().map(number).collect();
                assert_columns(kernel, (x, y), &found, &want, |a, b| same_values(a, b) || a == 0.0 && b == 0.0);
            }
        }
    }
}

//! f16, bf16 and the 8-bit floats.

use half::{bf16, f16};

use super::{FILES, assert_columns, is_fast, run_binary, run_unary, sample_floats};
use crate::gpu::{Gpu, launch, random};
use crate::reference::{BF16, E4M3, E5M2, Exact, F16, Format, ROUNDINGS, Round, round_to_integer, rounded_sum};

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
    for (target, file) in FILES {
        let gpu = Gpu::new(target);
        let module = gpu.load(file);
        let values = sample_floats(800, 1);
        let cases: [Case; 2] = [("float_to_half", F16, f16_of), ("float_to_bfloat16", BF16, bf16_of)];
        for (kernel, format, number) in cases {
            let got = run_unary::<_, u16>(&gpu, &module, kernel, &values, 7);
            for (&x, got) in values.iter().zip(&got) {
                if is_fast(file) && x.is_subnormal() {
                    continue;
                }
                let x = f64::from(x);
                let mut want = ROUNDINGS.map(|round| Exact(x, 0.0).round(format, round)).to_vec();
                let near = want[0];
                want.extend([near, -near, near]);
                let got: Vec<f64> = got.iter().map(|&bits| number(bits)).collect();
                let want: Vec<_> = want.into_iter().map(Some).collect();
                assert_columns(&format!("{file} {kernel}"), x, &got, &want, same_values);
            }
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
    for (target, file) in FILES {
        let gpu = Gpu::new(target);
        let module = gpu.load(file);
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
            assert_columns(&format!("{file} half_to_others"), x, got, &want, |a, b| a == b || a.is_nan() && b.is_nan());
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
            if is_fast(file) && x.abs() < f64::from(f32::MIN_POSITIVE) {
                continue;
            }
            assert_columns(&format!("{file} bfloat16_to_others"), x, got, &want, |a, b| {
                a == b || a.is_nan() && b.is_nan()
            });
        }
    }
}

#[test]
fn integers_are_exactly_rounded_to_f16() {
    for (target, file) in FILES {
        let gpu = Gpu::new(target);
        let module = gpu.load(file);
        let values: Vec<i32> = super::sample_integers(500, 3).into_iter().map(|x| x as i32).collect();
        let got = run_unary::<_, u16>(&gpu, &module, "integers_to_half", &values, 8);
        for (&x, got) in values.iter().zip(&got) {
            let near = |value: f64| Exact(value, 0.0).round(F16, Round::Near);
            let mut want = ROUNDINGS.map(|round| Exact(x.into(), 0.0).round(F16, round)).to_vec();
            want.extend([f64::from(x as u32), f64::from(x as i16), f64::from(x as u16), f64::from(x)].map(near));
            let got: Vec<f64> = got.iter().map(|&bits| f16_of(bits)).collect();
            let want: Vec<_> = want.into_iter().map(Some).collect();
            assert_columns(&format!("{file} integers_to_half"), x, &got, &want, same_values);
        }
    }
}

fn saturated(value: f64) -> f64 {
    if value > 0.0 { value.min(1.0) } else { 0.0 }
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

/// Packed operations with exactly known results: each half of a pair is rounded on its own.
#[test]
fn packed_arithmetic_rounds_each_half_once() {
    type Kind = (&'static str, Format, fn(u16) -> f64, [u16; 2], usize);
    // (kernel, format, decoder, one and infinity, columns); sum, difference, product and fused sum come first; column 3 is a
    // quotient.
    let kinds: [Kind; 2] = [
        ("half2_arithmetic", F16, f16_of, [0x3c00, 0x7c00], 30),
        ("bfloat162_arithmetic", BF16, bf16_of, [0x3f80, 0x7f80], 18),
    ];
    for (target, file) in FILES {
        let gpu = Gpu::new(target);
        let module = gpu.load(file);
        for (kernel, format, number, [one, infinity], columns) in kinds {
            let (a, b) = (sample_bits(800, 9, one, infinity), sample_bits(800, 10, one, infinity));
            let pair = |both: &[u16]| u32::from(both[0]) | u32::from(both[1]) << 16;
            let words = |all: &[u16]| all.chunks(2).map(pair).collect::<Vec<_>>();
            let got = run_binary::<_, u32>(&gpu, &module, kernel, &words(&a), &words(&b), columns);
            for (i, (&a, &b)) in a.iter().zip(&b).enumerate() {
                let (x, y) = (number(a), number(b));
                let [sum, difference, product, fused] = expected_arithmetic(x, y, format);
                let tiny = |value: f64| value != 0.0 && value.abs() <= f64::from(f32::MIN_POSITIVE);
                if is_fast(file) && [x, y, sum, difference, product, fused].into_iter().any(tiny) {
                    continue;
                }
                let found: Vec<f64> = got[i / 2].iter().map(|word| number((word >> (i % 2 * 16)) as u16)).collect();
                let mut want = vec![None; columns];
                for (column, value) in [(0, sum), (1, difference), (2, product), (4, fused)] {
                    want[column] = Some(value);
                }
                assert_columns(&format!("{file} {kernel}"), (x, y), &found, &want, |a, b| {
                    same_values(a, b) || a == 0.0 && b == 0.0
                });
            }
        }
    }
}

/// Ordered and unordered comparisons of values and pairs, one bit each.
#[test]
fn f16_comparisons_agree_with_the_host() {
    for (target, file) in FILES {
        let gpu = Gpu::new(target);
        let module = gpu.load(file);
        let (a, b) = (sample_bits(600, 11, 0x3c00, 0x7c00), sample_bits(600, 12, 0x3c00, 0x7c00));
        let got = run_binary::<_, u32>(&gpu, &module, "half_comparisons", &a, &b, 3);
        for ((&a, &b), got) in a.iter().zip(&b).zip(&got) {
            let (x, y) = (f16_of(a), f16_of(b));
            let bits = |all: &[bool]| all.iter().enumerate().map(|(bit, &holds)| u32::from(holds) << bit).sum::<u32>();
            let nan = x.is_nan() || y.is_nan();
            let ordered = [x < y, x <= y, x == y, !nan && x != y, x > y, x >= y];
            let want = [
                bits(&ordered),
                bits(&ordered.map(|holds| holds || nan)),
                bits(&[x < y && y < x, x == y, x.is_nan(), x.is_infinite()]),
            ];
            assert_columns(&format!("{file} half_comparisons"), (x, y), got, &want.map(Some), |a, b| a == b);
        }
    }
}

/// The smaller value; if one is NaN, the other one.
fn minimum_number(x: f64, y: f64) -> f64 {
    if x.is_nan() {
        y
    } else if y.is_nan() || x < y {
        x
    } else {
        y
    }
}

#[test]
fn f16_arithmetic_rounds_once() {
    for (target, file) in FILES {
        let gpu = Gpu::new(target);
        let module = gpu.load(file);
        let (a, b) = (sample_bits(700, 4, 0x3c00, 0x7c00), sample_bits(700, 5, 0x3c00, 0x7c00));
        let got = run_binary::<_, u16>(&gpu, &module, "half_arithmetic", &a, &b, 32);
        for ((&a, &b), got) in a.iter().zip(&b).zip(&got) {
            let (x, y) = (f16_of(a), f16_of(b));
            let [sum, difference, product, fused] = expected_arithmetic(x, y, F16);
            let mut want = vec![None; 32];
            let mut put = |column: usize, value: f64| want[column] = Some(value);
            put(0, sum);
            put(1, difference);
            put(2, product);
            put(4, fused);
            for (column, value) in [(5, sum), (6, difference), (7, product), (8, fused)] {
                put(column, saturated(value));
            }
            put(9, -x);
            put(10, x.abs());
            put(11, Exact::root(x.abs()).round(F16, Round::Near));
            put(20, x.floor());
            put(21, x.ceil());
            put(22, x.trunc());
            put(23, x.round_ties_even());
            // min and max of two zeros may return either.
            if x != y {
                put(24, minimum_number(x, y));
                put(25, -minimum_number(-x, -y));
                put(
                    28,
                    if y.is_nan() {
                        y
                    } else if x.is_nan() {
                        x
                    } else {
                        x.min(y)
                    },
                );
                put(
                    29,
                    if y.is_nan() {
                        y
                    } else if x.is_nan() {
                        x
                    } else {
                        x.max(y)
                    },
                );
            }
            put(26, sum);
            put(27, product);
            put(30, if fused.is_nan() { fused } else { fused.max(0.0) });
            let got: Vec<f64> = got.iter().map(|&bits| f16_of(bits)).collect();
            assert_columns(&format!("{file} half_arithmetic"), (x, y), &got, &want, |a, b| {
                same_values(a, b) || a == 0.0 && b == 0.0
            });
            // Approximations, within one or two units of f16.
            if x.is_finite() && y.is_finite() {
                let p = x.abs();
                let near = [
                    (3, x / y),
                    (12, 1.0 / p.sqrt()),
                    (13, 1.0 / x),
                    (14, x.exp()),
                    (15, x.exp2()),
                    (16, p.ln()),
                    (17, p.log2()),
                    (18, x.sin()),
                    (19, x.cos()),
                    (31, x.tanh()),
                ];
                for (column, value) in
                    near.into_iter().filter(|(column, value)| value.is_finite() && (*column < 18 || p < 100.0))
                {
                    let rounded = Exact(value, 0.0).round(F16, Round::Near);
                    let slack = (rounded.abs() / 512.0).max(if column >= 16 { 1e-3 } else { 1e-6 });
                    let found = got[column];
                    let fine = found == rounded
                        || (found - rounded).abs() <= slack
                        || rounded.abs() > 65000.0 && found.is_infinite();
                    assert!(
                        fine,
                        "{file} half_arithmetic: column {column} of {:?} is {found}, expected {rounded}",
                        (x, y)
                    );
                }
            }
        }
    }
}

#[test]
fn bf16_arithmetic_rounds_once() {
    for (target, file) in FILES {
        let gpu = Gpu::new(target);
        let module = gpu.load(file);
        let (a, b) = (sample_bits(700, 6, 0x3f80, 0x7f80), sample_bits(700, 7, 0x3f80, 0x7f80));
        let got = run_binary::<_, u16>(&gpu, &module, "bfloat16_arithmetic", &a, &b, 29);
        for ((&a, &b), got) in a.iter().zip(&b).zip(&got) {
            let (x, y) = (bf16_of(a), bf16_of(b));
            let tiny = |value: f64| value != 0.0 && value.abs() <= f64::from(f32::MIN_POSITIVE);
            let [sum, difference, product, fused] = expected_arithmetic(x, y, BF16);
            // Fast code computes through f32, which flushes.
            if is_fast(file) && [x, y, sum, difference, product, fused].into_iter().any(tiny) {
                continue;
            }
            let mut want = vec![None; 29];
            let mut put = |column: usize, value: f64| want[column] = Some(value);
            put(0, sum);
            put(1, difference);
            put(2, product);
            put(4, fused);
            put(5, saturated(sum));
            put(6, saturated(fused));
            put(7, -x);
            put(8, x.abs());
            if x != y {
                put(9, minimum_number(x, y));
                put(10, -minimum_number(-x, -y));
                put(
                    11,
                    if y.is_nan() {
                        y
                    } else if x.is_nan() {
                        x
                    } else {
                        x.min(y)
                    },
                );
                put(
                    12,
                    if y.is_nan() {
                        y
                    } else if x.is_nan() {
                        x
                    } else {
                        x.max(y)
                    },
                );
            }
            put(13, if fused.is_nan() { fused } else { fused.max(0.0) });
            put(22, x.floor());
            put(23, x.ceil());
            put(24, x.trunc());
            put(25, x.round_ties_even());
            put(26, if x < y { x } else { y });
            put(27, if x < y { y } else { x });
            let got: Vec<f64> = got.iter().map(|&bits| bf16_of(bits)).collect();
            assert_columns(&format!("{file} bfloat16_arithmetic"), (x, y), &got, &want, |a, b| {
                same_values(a, b) || a == 0.0 && b == 0.0
            });
        }
    }
}

/// The value of an 8-bit float with `fraction` fraction bits: E4M3 has 3, E5M2 has 2.
fn decode_fp8(bits: u8, fraction: u32) -> f64 {
    let (exponent, low) =
        (i32::from(bits >> fraction & ((1 << (7 - fraction)) - 1)), f64::from(bits & ((1 << fraction) - 1)));
    let bias = (1 << (6 - fraction)) - 1;
    let all = (1 << (7 - fraction)) - 1;
    let scale = f64::from(1 << fraction);
    let size = if fraction == 3 && bits & 0x7f == 0x7f || fraction == 2 && exponent == all && low != 0.0 {
        f64::NAN
    } else if fraction == 2 && exponent == all {
        f64::INFINITY
    } else if exponent == 0 {
        low / scale * 2f64.powi(1 - bias)
    } else {
        (1.0 + low / scale) * 2f64.powi(exponent - bias)
    };
    if bits & 0x80 != 0 { -size } else { size }
}

#[test]
fn fp8_conversions_round_and_clamp() {
    for (target, file) in [(80, "formats_fp8.sm_80"), (89, "formats_fp8.sm_89"), (90, "formats_fp8.sm_90")] {
        let gpu = Gpu::new(target);
        let module = gpu.load(file);
        let (e4m3, e5m2) = (|bits| decode_fp8(bits, 3), |bits| decode_fp8(bits, 2));
        let values = sample_floats(1000, 8);
        let clamped = |x: f32, format: Format, most: f64| {
            let value = Exact(x.into(), 0.0).round(format, Round::Near);
            if value.is_nan() { value } else { value.clamp(-most, most) }
        };
        // Two values per element.
        let out = gpu.alloc::<u16>(6 * 500);
        launch!(gpu, module, "float_to_fp8", 8, 64; &gpu.upload(&values), &out, &500);
        let got = super::by_element(&gpu.download(&out), 500);
        for (pair, got) in values.chunks(2).zip(&got) {
            let halves = |word: u16| [word as u8, (word >> 8) as u8];
            let found =
                [halves(got[0]).map(e4m3), halves(got[1]).map(e5m2), [e4m3(got[2] as u8), e5m2(got[3] as u8)]].concat();
            let (a, b) = (pair[0], pair[1]);
            let want = [
                clamped(a, E4M3, 448.0),
                clamped(b, E4M3, 448.0),
                clamped(a, E5M2, 57344.0),
                clamped(b, E5M2, 57344.0),
                clamped(a, E4M3, 448.0),
                clamped(b, E5M2, 57344.0),
            ];
            assert_columns(&format!("{file} float_to_fp8"), (a, b), &found, &want.map(Some), same_values);
        }
        let halves: Vec<u16> = sample_bits(1000, 13, 0x3c00, 0x7c00);
        let out = gpu.alloc::<u16>(2 * 500);
        launch!(gpu, module, "half_to_fp8", 8, 64; &gpu.upload(&halves), &out, &500);
        for (pair, got) in halves.chunks(2).zip(&super::by_element(&gpu.download(&out), 500)) {
            let found = [got[0].to_le_bytes().map(e4m3), got[1].to_le_bytes().map(e5m2)].concat();
            let [a, b] = [pair[0], pair[1]].map(|bits| f16_of(bits) as f32);
            let want = [
                clamped(a, E4M3, 448.0),
                clamped(b, E4M3, 448.0),
                clamped(a, E5M2, 57344.0),
                clamped(b, E5M2, 57344.0),
            ];
            assert_columns(&format!("{file} half_to_fp8"), (a, b), &found, &want.map(Some), same_values);
        }
        let words: Vec<u16> = (0..256).map(|low| low | (255 - low) << 8).collect();
        let out = gpu.alloc::<u32>(2 * 256);
        launch!(gpu, module, "fp8_to_half", 4, 64; &gpu.upload(&words), &out, &256);
        for (&word, got) in words.iter().zip(&super::by_element(&gpu.download(&out), 256)) {
            let found: Vec<f64> =
                got.iter().flat_map(|pair| [f16_of(*pair as u16), f16_of((pair >> 16) as u16)]).collect();
            let bytes = [word as u8, (word >> 8) as u8];
            let want = [bytes.map(e4m3), bytes.map(e5m2)].concat();
            let want: Vec<_> = want.into_iter().map(Some).collect();
            assert_columns(&format!("{file} fp8_to_half"), word, &found, &want, same_values);
        }
        let bytes: Vec<u8> = (0..=255).collect();
        for (&byte, got) in bytes.iter().zip(&run_unary::<_, f32>(&gpu, &module, "fp8_types", &bytes, 5)) {
            let (a, b) = (e4m3(byte), e5m2(byte));
            let want = [a, b, clamped(b as f32, E4M3, 448.0), clamped(a as f32, E5M2, 57344.0), a];
            assert_columns(
                &format!("{file} fp8_types"),
                byte,
                got,
                &want.map(|value| Some(value as f32)),
                super::same_f32,
            );
        }
    }
}

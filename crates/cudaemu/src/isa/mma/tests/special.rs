//! Rounding, overflow and NaN rules of matrix products. The positions of elements do not matter here: all rows of A are equal,
//! and all columns of B.

use super::super::family;
use crate::isa::harness::Harness;

const INFINITY: u16 = 0x7c00;
const NAN: u16 = 0x7e00;
const SMALLEST_SUBNORMAL: u16 = 0x0001; // 2^-24
const LARGEST_FINITE: u16 = 0x7bff; // 65504
const ONE: u16 = 0x3c00;

/// The first elements along k of the rows of A and of the columns of B; the rest is zero.
type Vectors<'a> = &'a [(u16, u16)];

/// Runs an `m16n8k8` product of 16-bit elements; returns the registers of D, which are equal in all lanes. Thread t of a group
/// of four holds k = 2t and 2t + 1.
fn run(name: &str, vectors: Vectors, c: &[i128]) -> Vec<u128> {
    let pair = |which: fn(&(u16, u16)) -> u16, thread: usize| {
        let at = |k: usize| i128::from(vectors.get(k).map_or(0, which));
        at(2 * thread) | at(2 * thread + 1) << 16
    };
    let inputs: Vec<Vec<i128>> = (0..32)
        .map(|lane| {
            let (a, b) = (pair(|v| v.0, lane % 4), pair(|v| v.1, lane % 4));
            [&[a, a, b], c].concat()
        })
        .collect();
    let outputs = Harness::new(family()).run(name, &inputs);
    assert!(outputs.iter().all(|output| output == &outputs[0]), "{name}: all lanes must have the same result");
    outputs[0].clone()
}

fn f32_of(vectors: Vectors, c: f32) -> u32 {
    run("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", vectors, &[i128::from(c.to_bits()); 4])[0] as u32
}

fn f16_of(vectors: Vectors, c: u16) -> u16 {
    let c = i128::from(c) | i128::from(c) << 16;
    run("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16", vectors, &[c; 2])[0] as u16
}

fn bf16_of(vectors: Vectors, c: f32) -> u32 {
    run("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32", vectors, &[i128::from(c.to_bits()); 4])[0] as u32
}

#[test]
fn f32_accumulators_truncate_each_term_and_the_sum() {
    let minus = 0x8000;
    for (vectors, c, expected) in [
        (&[(SMALLEST_SUBNORMAL, SMALLEST_SUBNORMAL)] as Vectors, 0.0, 2f32.powi(-48).to_bits()),
        (&[(SMALLEST_SUBNORMAL, LARGEST_FINITE)], 0.0, (2f32.powi(-24) * 65504.0).to_bits()),
        (&[(LARGEST_FINITE, LARGEST_FINITE); 8], 0.0, (65504f32 * 65504.0 * 8.0).to_bits()),
        (&[(INFINITY, ONE)], -1.0, f32::INFINITY.to_bits()),
        (&[(INFINITY | minus, ONE)], 1.0, f32::NEG_INFINITY.to_bits()),
        (&[(INFINITY, ONE), (INFINITY, ONE | minus)], 0.0, 0x7fff_ffff),
        (&[(INFINITY, ONE)], f32::NEG_INFINITY, 0x7fff_ffff),
        (&[(INFINITY, 0)], 0.0, 0x7fff_ffff),
        (&[(NAN, ONE)], 0.0, 0x7fff_ffff),
        (&[(NAN | minus, 0)], 0.0, 0x7fff_ffff),
        (&[(ONE, ONE)], f32::NAN, 0x7fff_ffff),
        (&[], f32::from_bits(1), 1),
        (&[], f32::from_bits(0x8000_0001), 0x8000_0001),
        // 2^14 has units of 2^-9. The sum has one bit more, so a term of 2^-10 counts, and smaller ones do not.
        (&[(0x1400, ONE); 2], 16_384.0, 0x4680_0001),
        (&[(0x1400, ONE); 3], 16_384.0, 0x4680_0001),
        (&[(0x1400, ONE); 3], -16_384.0, 0xc67f_fffd),
        (&[(0x1400 | minus, ONE); 3], -16_384.0, 0xc680_0001),
        (&[(0x13ff, ONE); 8], 16_384.0, 0x4680_0000),
        (&[(0x13ff | minus, ONE); 8], 16_384.0, 0x4680_0000),
        // A product has the sum of its factors' exponents: 1.5 · 1.5 = 2.25 has 0, so a term of 2^-24 counts; 2 · 1 has 1.
        (&[(0x3e00, 0x3e00), (0xbe00, 0x3e00), (SMALLEST_SUBNORMAL, ONE)], 0.0, 2f32.powi(-24).to_bits()),
        (&[(0x4000, ONE), (0xc000, ONE), (SMALLEST_SUBNORMAL, ONE)], 0.0, 0),
        (
            &[(LARGEST_FINITE, LARGEST_FINITE), (LARGEST_FINITE | minus, LARGEST_FINITE), (SMALLEST_SUBNORMAL, ONE)],
            0.0,
            0,
        ),
    ] {
        let got = f32_of(vectors, c);
        assert_eq!(got, expected, "{vectors:x?} + {c}: got {got:x}, expected {expected:x}");
    }
}

#[test]
fn f16_accumulators_round_the_truncated_sum() {
    for (vectors, c, expected) in [
        (&[(LARGEST_FINITE, ONE), (ONE, ONE)] as Vectors, 0, LARGEST_FINITE),
        (&[(LARGEST_FINITE, ONE), (0x4c00, ONE)], 0, INFINITY), // 65504 + 16 is halfway to 65536
        (&[(LARGEST_FINITE, ONE), (0x4bff, ONE)], 0, LARGEST_FINITE),
        (&[(LARGEST_FINITE, LARGEST_FINITE)], 0, INFINITY),
        (&[(LARGEST_FINITE, 0xfbff)], 0, 0xfc00),
        (&[(SMALLEST_SUBNORMAL, ONE)], 0, SMALLEST_SUBNORMAL),
        (&[(SMALLEST_SUBNORMAL, 0x3800)], 0, 0), // half of the smallest: to even
        (&[(SMALLEST_SUBNORMAL, 0x3801)], 0, SMALLEST_SUBNORMAL),
        (&[(SMALLEST_SUBNORMAL, 0x3800)], SMALLEST_SUBNORMAL, 2),
        (&[(INFINITY, ONE)], 0xfc00, 0x7fff),
        (&[(NAN, ONE)], 0, 0x7fff),
        // 2048 + 1 is a tie. A term of 2^-13 breaks it; one of 2^-14 is truncated to zero.
        (&[(0x6800, ONE), (ONE, ONE), (0x0800, ONE)], 0, 0x6801),
        (&[(0x6800, ONE), (ONE, ONE), (0x0400, ONE)], 0, 0x6800),
        (&[(0x6800, ONE), (ONE, ONE)], 0, 0x6800),
    ] {
        let got = f16_of(vectors, c);
        assert_eq!(got, expected, "{vectors:x?} + {c:x}: got {got:x}, expected {expected:x}");
    }
}

#[test]
fn bf16_products_overflow_and_underflow_like_f32() {
    let (largest, least, one) = (0x7f7f, 0x0001, 0x3f80_u16); // about 3.39e38 and 2^-133
    for (vectors, c, expected) in [
        (&[(largest, one)] as Vectors, 0.0, f32::from_bits(0x7f7f_0000).to_bits()),
        (&[(largest, largest)], 0.0, f32::INFINITY.to_bits()),
        (&[(largest, 0xff7f)], 0.0, f32::NEG_INFINITY.to_bits()),
        // Intermediate sums may exceed the range of f32.
        (&[(largest, 0x4000), (largest, 0xbf80)], 0.0, 0x7f7f_0000),
        (&[(least, 0x3f80)], 0.0, 0x0001_0000),
        (&[(least, least)], 0.0, 0),
        // Results below 2^-126 are truncated too: 1.5 · 2^-149.
        (&[(0x0001, 0x37c0)], 0.0, 0x0000_0001),
        (&[(0x7f80, 0x0000)], 0.0, 0x7fff_ffff),
        (&[(0x7fc0, 0x3f80)], 0.0, 0x7fff_ffff),
    ] {
        let got = bf16_of(vectors, c);
        assert_eq!(got, expected, "{vectors:x?} + {c}: got {got:x}, expected {expected:x}");
    }
}

#[test]
fn integers_wrap() {
    let run = |a: u32, b: u32, c: i32| {
        let [a, b, c] = [i128::from(a), i128::from(b), i128::from(c)];
        let inputs = vec![vec![a, a, b, c, c, c, c]; 32];
        Harness::new(family()).run("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32", &inputs)[0][0] as u32 as i32
    };
    let (least, largest) = (0x8080_8080, 0x7f7f_7f7f);
    assert_eq!(run(least, least, i32::MAX), i32::MIN + 16 * 128 * 128 - 1);
    assert_eq!(run(least, largest, i32::MIN), i32::MAX - 16 * 128 * 127 + 1);
    assert_eq!(run(least, largest, 5), 5 - 16 * 128 * 127);
}

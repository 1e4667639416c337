//! Integer intrinsics of 32 and 64 bits.

use super::{FILE, assert_columns, run_binary, sample_integers};
use crate::gpu::Gpu;

fn bytes(x: u32) -> [u8; 4] {
    x.to_le_bytes()
}

/// `__byte_perm`: each hexadecimal digit of the selector chooses one of the eight bytes by its low three bits.
fn permuted(x: u32, y: u32, selector: u32) -> u32 {
    let all = (u64::from(y) << 32 | u64::from(x)).to_le_bytes();
    u32::from_le_bytes(std::array::from_fn(|i| all[(selector >> (4 * i) & 7) as usize]))
}

#[test]
fn intrinsics_of_32_bits_agree_with_the_host() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let a: Vec<u32> = sample_integers(500, 1).into_iter().map(|x| x as u32).collect();
    let b: Vec<u32> = sample_integers(500, 2).into_iter().rev().map(|x| x as u32).collect();
    let got = run_binary::<_, u32>(&gpu, &module, "integer_intrinsics", &a, &b, 31);
    for (i, ((&x, &y), got)) in a.iter().zip(&b).zip(&got).enumerate() {
        let (s, t) = (x as i32, y as i32);
        let signed = |x: u32| bytes(x).map(|byte| i32::from(byte as i8));
        let unsigned = |x: u32| bytes(x).map(u32::from);
        let dot_signed: i32 = (0..4).map(|i| signed(x)[i] * signed(y)[i]).sum();
        let dot_unsigned: u32 = (0..4).map(|i| unsigned(x)[i] * unsigned(y)[i]).sum();
        let two = |at: usize| {
            let halves = [x as i16, (x >> 16) as i16].map(i32::from);
            halves[0].wrapping_mul(signed(y)[at]).wrapping_add(halves[1].wrapping_mul(signed(y)[at + 1]))
        };
        let two_unsigned = |at: usize| (x & 0xffff) * unsigned(y)[at] + (x >> 16) * unsigned(y)[at + 1];
        let clamp = y.min(32);
        let want = [
            x.leading_zeros(),
            x.count_ones(),
            x.reverse_bits(),
            if x == 0 { 0 } else { x.trailing_zeros() + 1 },
            permuted(x, y, x >> 16),
            permuted(x, y, 0x5140),
            // The arguments are low word, high word, shift.
            ((u64::from(y) << 32 | u64::from(x)) << (y & 31) >> 32) as u32,
            ((u64::from(y) << 32 | u64::from(x)) >> (y & 31)) as u32,
            ((u128::from(y) << 32 | u128::from(x)) << clamp >> 32) as u32,
            ((u64::from(y) << 32 | u64::from(x)) >> clamp) as u32,
            ((i64::from(s) * i64::from(t)) >> 32) as u32,
            ((u64::from(x) * u64::from(y)) >> 32) as u32,
            dot_signed.wrapping_add(s) as u32,
            dot_unsigned.wrapping_add(x),
            two(0).wrapping_add(s) as u32,
            two(2).wrapping_add(s) as u32,
            two_unsigned(0).wrapping_add(x),
            two_unsigned(2).wrapping_add(x),
            ((i64::from(s) + i64::from(t)) >> 1) as u32,
            ((i64::from(s) + i64::from(t) + 1) >> 1) as u32,
            ((u64::from(x) + u64::from(y)) >> 1) as u32,
            s.wrapping_abs() as u32,
            s.min(t) as u32,
            s.max(t) as u32,
            x.min(y),
            x.max(y),
            x.rotate_left(y & 31),
            x >> 8 & 0xff,
            ((x << 12) as i32 >> 20) as u32,
            x & y | !x & y,
            x ^ y ^ i as u32,
        ];
        assert_columns("integer_intrinsics", (x, y), got, &want.map(Some), |a, b| a == b);
    }
}

#[test]
fn intrinsics_of_64_bits_agree_with_the_host() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let (a, mut b) = (sample_integers(500, 3), sample_integers(500, 4));
    b.reverse();
    let got = run_binary::<_, u64>(&gpu, &module, "wide_intrinsics", &a, &b, 15);
    for ((&x, &y), got) in a.iter().zip(&b).zip(&got) {
        let (s, t) = (x as i64, y as i64);
        let want = [
            x.leading_zeros().into(),
            x.count_ones().into(),
            x.reverse_bits(),
            if x == 0 { 0 } else { x.trailing_zeros() as u64 + 1 },
            ((i128::from(s) * i128::from(t)) >> 64) as u64,
            ((u128::from(x) * u128::from(y)) >> 64) as u64,
            s.min(t) as u64,
            x.max(y),
            x >> (y & 63),
            (s >> (y & 63)) as u64,
            (x & 0xffff_ffff) * (y & 0xffff_ffff),
            (i64::from(x as i32) * i64::from(y as i32)) as u64,
            s.wrapping_abs() as u64,
            x.wrapping_mul(y).wrapping_add(x),
            x << (y & 63),
        ];
        assert_columns("wide_intrinsics", (x, y), got, &want.map(Some), |a, b| a == b);
    }
}

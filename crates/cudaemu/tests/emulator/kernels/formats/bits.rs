//! Integer intrinsics of 32 and 64 bits, and on packed bytes and half-words.

use super::{FILES, assert_columns, run_binary, sample_integers};
use crate::gpu::Gpu;

fn bytes(x: u32) -> [u8; 4] {
    x.to_le_bytes()
}

/// Applies a function to the four bytes of two words.
fn per_byte(x: u32, y: u32, apply: fn(u8, u8) -> u8) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| apply(bytes(x)[i], bytes(y)[i])))
}

/// Applies a function to the two half-words of two words.
fn per_half(x: u32, y: u32, apply: fn(u16, u16) -> u16) -> u32 {
    u32::from(apply(x as u16, y as u16)) | u32::from(apply((x >> 16) as u16, (y >> 16) as u16)) << 16
}

/// `__byte_perm`: each hexadecimal digit of the selector chooses one of the eight bytes by its low three bits.
fn permuted(x: u32, y: u32, selector: u32) -> u32 {
    let all = (u64::from(y) << 32 | u64::from(x)).to_le_bytes();
    u32::from_le_bytes(std::array::from_fn(|i| all[(selector >> (4 * i) & 7) as usize]))
}

/// `__fns(x, 0, n)`: the position of the `n`-th set bit; all ones if there are fewer.
fn nth_set(x: u32, n: u32) -> u32 {
    (0..32).filter(|bit| x >> bit & 1 == 1).nth(n as usize - 1).unwrap_or(u32::MAX)
}

#[test]
fn intrinsics_of_32_bits_agree_with_the_host() {
    for (target, file) in FILES {
        let gpu = Gpu::new(target);
        let module = gpu.load(file);
        let a: Vec<u32> = sample_integers(500, 1).into_iter().map(|x| x as u32).collect();
        let b: Vec<u32> = sample_integers(500, 2).into_iter().rev().map(|x| x as u32).collect();
        let got = run_binary::<_, u32>(&gpu, &module, "integer_intrinsics", &a, &b, 36);
        for (i, ((&x, &y), got)) in a.iter().zip(&b).zip(&got).enumerate() {
            let (s, t) = (x as i32, y as i32);
            let low24 = |x: i32| (x << 8 >> 8) as i64;
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
                (low24(s) * low24(t)) as u32,
                (x & 0xff_ffff).wrapping_mul(y & 0xff_ffff),
                ((i64::from(s) * i64::from(t)) >> 32) as u32,
                ((u64::from(x) * u64::from(y)) >> 32) as u32,
                dot_signed.wrapping_add(s) as u32,
                dot_unsigned.wrapping_add(x),
                two(0).wrapping_add(s) as u32,
                two(2).wrapping_add(s) as u32,
                two_unsigned(0).wrapping_add(x),
                two_unsigned(2).wrapping_add(x),
                s.abs_diff(t).wrapping_add(x),
                x.abs_diff(y).wrapping_add(x),
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
                nth_set(x, y % 5 + 1),
            ];
            assert_columns(&format!("{file} integer_intrinsics"), (x, y), got, &want.map(Some), |a, b| a == b);
        }
    }
}

#[test]
fn intrinsics_of_64_bits_agree_with_the_host() {
    for (target, file) in FILES {
        let gpu = Gpu::new(target);
        let module = gpu.load(file);
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
            assert_columns(&format!("{file} wide_intrinsics"), (x, y), got, &want.map(Some), |a, b| a == b);
        }
    }
}

#[test]
fn packed_intrinsics_agree_with_the_host() {
    for (target, file) in FILES {
        let gpu = Gpu::new(target);
        let module = gpu.load(file);
        let a: Vec<u32> = sample_integers(500, 5).into_iter().map(|x| x as u32).collect();
        let b: Vec<u32> = sample_integers(500, 6).into_iter().rev().map(|x| (x >> 7) as u32).collect();
        let got = run_binary::<_, u32>(&gpu, &module, "packed_intrinsics", &a, &b, 20);
        for ((&x, &y), got) in a.iter().zip(&b).zip(&got) {
            let differences = bytes(x).iter().zip(bytes(y)).map(|(&a, b)| u32::from((a as i8).abs_diff(b as i8))).sum();
            let want = [
                per_byte(x, y, u8::wrapping_add),
                per_byte(x, y, u8::wrapping_sub),
                per_byte(x, y, |a, b| (a as i8).saturating_add(b as i8) as u8),
                per_byte(x, y, u8::saturating_sub),
                per_byte(x, 0, |a, _| (a as i8).wrapping_abs() as u8),
                per_byte(x, y, u8::abs_diff),
                per_byte(x, y, |a, b| (a as i8).max(b as i8) as u8),
                per_byte(x, y, u8::min),
                per_byte(x, y, |a, b| if a == b { 0xff } else { 0 }),
                per_byte(x, y, |a, b| if (a as i8) > b as i8 { 0xff } else { 0 }),
                per_byte(x, y, |a, b| (u16::from(a) + u16::from(b)).div_ceil(2) as u8),
                differences,
                per_half(x, y, u16::wrapping_add),
                per_half(x, y, u16::wrapping_sub),
                per_half(x, y, |a, b| (a as i16).max(b as i16) as u16),
                per_half(x, y, u16::min),
                per_half(x, y, |a, b| if a <= b { 0xffff } else { 0 }),
                per_half(x, y, |a, b| (a as i16).saturating_sub(b as i16) as u16),
                per_byte(x, 0, |a, _| a.wrapping_neg()),
                per_byte(x, y, |a, b| u8::from(a == b)),
            ];
            assert_columns(&format!("{file} packed_intrinsics"), (x, y), got, &want.map(Some), |a, b| a == b);
        }
    }
}

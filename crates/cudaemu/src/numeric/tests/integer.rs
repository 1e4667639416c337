//! Integer arithmetic against 128-bit sums and products, and the cases that PTX leaves to the hardware.

use super::super::integer::{self, Integer};

#[test]
fn products_sad_shifts_and_division_agree_with_128_bits() {
    let mut rng = fastrand::Rng::with_seed(1);
    for round in 0..2000 {
        let edge = [0, 1, u64::MAX, 1 << 63, 1 << 31, 0x7fff_ffff, 0x8000, 0xffff];
        let mut next = || if round < 1000 { rng.u64(..) } else { edge[rng.usize(..edge.len())] };
        let (a, b, c) = (next(), next(), next());
        macro_rules! check {
            ($($ty:ty)*) => {$({
                let (x, y, z) = (a as $ty, b as $ty, c as $ty);
                let high = if <$ty>::BITS == 64 && <$ty>::MIN == 0 {
                    ((x as u128 * y as u128) >> 64) as $ty
                } else {
                    ((x as i128 * y as i128) >> <$ty>::BITS) as $ty
                };
                assert_eq!(x.mul_hi(y), high);
                assert_eq!(x.sad(y, z), ((x as i128 - y as i128).abs() + z as i128) as $ty);
                for amount in [0, 1, 7, <$ty>::BITS - 1, <$ty>::BITS, 64, 200, u32::MAX] {
                    assert_eq!(Integer::shl(x, amount), ((x as u128) << amount.min(64)) as $ty);
                    assert_eq!(Integer::shr(x, amount), (x as i128 >> amount.min(64)) as $ty);
                }
                if y == 0 {
                    assert_eq!((Integer::div(x, y), Integer::rem(x, y)), (!0, !0));
                } else {
                    let want = (x as i128 / y as i128, x as i128 % y as i128);
                    assert_eq!((Integer::div(x, y), Integer::rem(x, y)), (want.0 as $ty, want.1 as $ty));
                }
            })*};
        }
        check!(u16 i16 u32 i32 u64 i64);
    }
    assert_eq!(Integer::div(i32::MIN, -1), i32::MIN);
    assert_eq!(Integer::rem(i64::MIN, -1), 0);
    assert_eq!(Integer::rem(-7i32, 3), -1);
}

#[test]
fn two_carry_additions_give_the_wide_sum() {
    let mut rng = fastrand::Rng::with_seed(2);
    for _ in 0..1000 {
        let (a, b) = (rng.u64(..) | rng.u64(..), rng.u64(..));
        let (low, carry) = integer::add_carry_u32(a as u32, b as u32, false);
        let (high, out) = integer::add_carry_u32((a >> 32) as u32, (b >> 32) as u32, carry);
        assert_eq!((u64::from(high) << 32 | u64::from(low), out), a.overflowing_add(b));
        let (low, borrow) = integer::sub_borrow_u32(a as u32, b as u32, false);
        let (high, out) = integer::sub_borrow_u32((a >> 32) as u32, (b >> 32) as u32, borrow);
        assert_eq!((u64::from(high) << 32 | u64::from(low), out), a.overflowing_sub(b));
        assert_eq!(integer::add_carry_u64(a, b, false), a.overflowing_add(b));
        assert_eq!(integer::sub_borrow_u64(a, b, false), a.overflowing_sub(b));
    }
    assert_eq!(integer::add_carry_u64(u64::MAX, u64::MAX, true), (u64::MAX, true));
    assert_eq!(integer::sub_borrow_u64(0, u64::MAX, true), (0, true));
    assert_eq!(integer::add_carry_u32(u32::MAX, 0, true), (0, true));
    assert_eq!(integer::sub_borrow_u32(5, 5, true), (u32::MAX, true));
}

#[test]
fn products_of_24_bits_use_the_low_bits_of_the_operands() {
    assert_eq!(integer::mul24_lo_u32(0xffff_ffff, 0xff00_0002), 0x01ff_fffe);
    assert_eq!(integer::mul24_hi_u32(0x00ff_ffff, 0x00ff_ffff), 0xffff_fe00);
    assert_eq!(integer::mul24_lo_s32(0x00ff_ffff, 5), -5);
    assert_eq!(integer::mul24_hi_s32(0x0080_0000, 0x0080_0000), 0x4000_0000);
    assert_eq!(integer::mul24_hi_s32(0x00ff_ffff, 1), -1);
    assert_eq!(integer::mad_hi_sat_s32(i32::MIN, i32::MIN, i32::MAX), i32::MAX);
    assert_eq!(integer::mad_hi_sat_s32(i32::MIN, i32::MAX, i32::MIN), i32::MIN);
    assert_eq!(integer::mad24_hi_sat_s32(0x0080_0000, 0x0080_0000, 0x4000_0000), i32::MAX);
}

#[test]
fn dot_products_extend_bytes_by_the_sign_flags() {
    let (a, b) = (0xff80_7f01, 0x02ff_8003);
    // Bytes from the lowest: 1, 127, 128 or -128, 255 or -1; 3, 128 or -128, 255 or -1, 2.
    assert_eq!(integer::dp4a(a, b, 10, false, false), 10 + 3 + 127 * 128 + 128 * 255 + 255 * 2);
    assert_eq!(integer::dp4a(a, b, 10, true, true) as i32, 10 + 3 - 127 * 128 + 128 - 2);
    assert_eq!(integer::dp4a(a, b, 10, true, false) as i32, 10 + 3 + 127 * 128 - 128 * 255 - 2);
    assert_eq!(integer::dp4a(a, b, 10, false, true) as i32, 10 + 3 - 127 * 128 - 128 + 255 * 2);
    assert_eq!(integer::dp4a(1, 1, u32::MAX, false, false), 0);
    // Halves of a: 0x7f01 and 0xff80 (65408 or -128).
    assert_eq!(integer::dp2a(a, b, 1, false, false, false), 1 + 0x7f01 * 3 + 0xff80 * 128);
    assert_eq!(integer::dp2a(a, b, 1, true, true, false) as i32, 1 + 0x7f01 * 3 + 128 * 128);
    assert_eq!(integer::dp2a(a, b, 1, true, false, true) as i32, 1 + 0x7f01 * 255 - 128 * 2);
    assert_eq!(integer::dp2a(a, b, 1, false, true, true) as i32, 1 - 0x7f01 + 0xff80 * 2);
}

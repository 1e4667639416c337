//! Integer arithmetic against 128-bit sums and products, and the cases that PTX leaves to the hardware.

use super::super::integer::{self, Integer};

#[test]
fn products_shifts_and_division_agree_with_128_bits() {
    let mut rng = fastrand::Rng::with_seed(1);
    for round in 0..2000 {
        let edge = [0, 1, u64::MAX, 1 << 63, 1 << 31, 0x7fff_ffff, 0x8000, 0xffff];
        let mut next = || if round < 1000 { rng.u64(..) } else { edge[rng.usize(..edge.len())] };
        let (a, b) = (next(), next());
        macro_rules! check {
            ($($ty:ty)*) => {$({
                let (x, y) = (a as $ty, b as $ty);
                let high = if <$ty>::BITS == 64 && <$ty>::MIN == 0 {
                    ((x as u128 * y as u128) >> 64) as $ty
                } else {
                    ((x as i128 * y as i128) >> <$ty>::BITS) as $ty
                };
                assert_eq!(x.mul_hi(y), high);
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

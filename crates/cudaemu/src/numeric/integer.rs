//! Integer arithmetic (PTX ISA, "Integer Arithmetic Instructions"), generic over the six register types. Addition,
//! subtraction and the low half of products are Rust's `wrapping_*`.

/// An integer type of PTX arithmetic: `u16`, `i16`, `u32`, `i32`, `u64`, `i64`.
pub trait Integer: Copy + Ord {
    /// Upper half of the product.
    fn mul_hi(self, other: Self) -> Self;
    /// `div`. PTX leaves division by zero open; the instruction sequences of GPUs return all ones, for `rem` too. The smallest
    /// signed value divided by -1 wraps to itself, with remainder 0.
    fn div(self, other: Self) -> Self;
    /// `rem`: the sign is the dividend's. For a divisor of zero see [`Integer::div`].
    fn rem(self, other: Self) -> Self;
    /// Shift right by an amount clamped to the width: arithmetic for signed types (`shr.s*`), else logical.
    fn shr(self, amount: u32) -> Self;
    /// Shift left by an amount clamped to the width (`shl.b*`).
    fn shl(self, amount: u32) -> Self;
}

macro_rules! integer {
    ($($ty:ty, $wide:ty;)*) => {$(
        impl Integer for $ty {
            #[inline(always)]
            fn mul_hi(self, other: Self) -> Self {
                ((self as $wide * other as $wide) >> <$ty>::BITS) as $ty
            }
            #[inline(always)]
            fn div(self, other: Self) -> Self {
                if other == 0 { !0 } else { self.wrapping_div(other) }
            }
            #[inline(always)]
            fn rem(self, other: Self) -> Self {
                if other == 0 { !0 } else { self.wrapping_rem(other) }
            }
            #[inline(always)]
            fn shr(self, amount: u32) -> Self {
                // Only the sign remains. Two shifts, by width - 1 and by 1, give it without an overflowing shift amount.
                let most = <$ty>::BITS - 1;
                if amount > most { (self >> most) >> 1 } else { self >> amount }
            }
            #[inline(always)]
            fn shl(self, amount: u32) -> Self {
                self.checked_shl(amount).unwrap_or(0)
            }
        }
    )*};
}

integer! {
    u16, u32;
    i16, i32;
    u32, u64;
    i32, i64;
    u64, u128;
    i64, i128;
}

#[inline(always)]
fn byte(word: u32, index: u32, signed: bool) -> i32 {
    let byte = (word >> (8 * index)) as u8;
    if signed { i32::from(byte as i8) } else { i32::from(byte) }
}

/// `dp4a.atype.btype`: `c` plus the dot product of four bytes, wrapping.
#[inline(always)]
pub fn dp4a(a: u32, b: u32, c: u32, a_signed: bool, b_signed: bool) -> u32 {
    let mut sum = c;
    for i in 0..4 {
        sum = sum.wrapping_add((byte(a, i, a_signed) * byte(b, i, b_signed)) as u32);
    }
    sum
}

/// `dp2a.mode.atype.btype`: `c` plus the dot product of the two 16-bit halves of `a` with the lower (`hi`: the upper)
/// two bytes of `b`, wrapping.
#[inline(always)]
pub fn dp2a(a: u32, b: u32, c: u32, a_signed: bool, b_signed: bool, hi: bool) -> u32 {
    let half = |i: u32| {
        let half = (a >> (16 * i)) as u16;
        if a_signed { i32::from(half as i16) } else { i32::from(half) }
    };
    let first = if hi { 2 } else { 0 };
    (0..2).fold(c, |sum, i| sum.wrapping_add((half(i) * byte(b, first + i, b_signed)) as u32))
}

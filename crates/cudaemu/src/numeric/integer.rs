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
    /// `sad`: `c + |self - b|`, wrapping.
    fn sad(self, b: Self, c: Self) -> Self;
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
            fn sad(self, b: Self, c: Self) -> Self {
                c.wrapping_add(self.abs_diff(b) as $ty)
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

/// `add.cc` and `addc`: the sum and the carry out.
#[inline(always)]
pub fn add_carry_u32(a: u32, b: u32, carry: bool) -> (u32, bool) {
    let sum = u64::from(a) + u64::from(b) + u64::from(carry);
    (sum as u32, sum >> 32 != 0)
}

/// `add.cc` and `addc` of 64 bits.
#[inline(always)]
pub fn add_carry_u64(a: u64, b: u64, carry: bool) -> (u64, bool) {
    let sum = u128::from(a) + u128::from(b) + u128::from(carry);
    (sum as u64, sum >> 64 != 0)
}

/// `sub.cc` and `subc`: `a - (b + borrow)` and the borrow out, which PTX keeps in the same flag as the carry.
#[inline(always)]
pub fn sub_borrow_u32(a: u32, b: u32, borrow: bool) -> (u32, bool) {
    let difference = u64::from(a).wrapping_sub(u64::from(b)).wrapping_sub(u64::from(borrow));
    (difference as u32, difference >> 63 != 0)
}

/// `sub.cc` and `subc` of 64 bits.
#[inline(always)]
pub fn sub_borrow_u64(a: u64, b: u64, borrow: bool) -> (u64, bool) {
    let difference = u128::from(a).wrapping_sub(u128::from(b)).wrapping_sub(u128::from(borrow));
    (difference as u64, difference >> 127 != 0)
}

/// `mul24.lo.u32`: the low 32 bits of the 48-bit product of the low 24 bits.
#[inline(always)]
pub fn mul24_lo_u32(a: u32, b: u32) -> u32 {
    wide24_u(a, b) as u32
}

/// `mul24.hi.u32`: bits 47 to 16 of the 48-bit product.
#[inline(always)]
pub fn mul24_hi_u32(a: u32, b: u32) -> u32 {
    (wide24_u(a, b) >> 16) as u32
}

/// `mul24.lo.s32`: as `.u32`, of sign-extended 24-bit operands.
#[inline(always)]
pub fn mul24_lo_s32(a: i32, b: i32) -> i32 {
    wide24_s(a, b) as i32
}

/// `mul24.hi.s32`: bits 47 to 16 of the 48-bit product.
#[inline(always)]
pub fn mul24_hi_s32(a: i32, b: i32) -> i32 {
    (wide24_s(a, b) >> 16) as i32
}

#[inline(always)]
fn wide24_u(a: u32, b: u32) -> u64 {
    u64::from(a & 0xff_ffff) * u64::from(b & 0xff_ffff)
}

#[inline(always)]
fn wide24_s(a: i32, b: i32) -> i64 {
    i64::from(a << 8 >> 8) * i64::from(b << 8 >> 8)
}

/// `mad.hi.sat.s32`: the upper half of `a * b` plus `c`, clamped.
#[inline(always)]
pub fn mad_hi_sat_s32(a: i32, b: i32, c: i32) -> i32 {
    a.mul_hi(b).saturating_add(c)
}

/// `mad24.hi.sat.s32`: bits 47 to 16 of the 24-bit product plus `c`, clamped.
#[inline(always)]
pub fn mad24_hi_sat_s32(a: i32, b: i32, c: i32) -> i32 {
    mul24_hi_s32(a, b).saturating_add(c)
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

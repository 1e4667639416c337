//! Bit fields, permutations and funnel shifts (PTX ISA, "Integer Arithmetic Instructions", "Logic and Shift
//! Instructions", `prmt`). `popc`, `clz` and `brev` are Rust's `count_ones`, `leading_zeros` and `reverse_bits`.

use super::integer::Integer as _;

/// The field of `len` bits at `pos`, both modulo 256, of a zero-extended register; bits beyond the register are zero.
#[inline(always)]
fn extract(a: u64, pos: u32, len: u32) -> u64 {
    a.shr(pos & 0xff) & !(!0u64).shl(len & 0xff)
}

/// The sign bit that `bfe.s*` extends: the field's, or the register's if the field ends beyond it.
#[inline(always)]
fn field_sign(a: u64, pos: u32, len: u32, width: u32) -> bool {
    let (pos, len) = (pos & 0xff, len & 0xff);
    len != 0 && a >> (pos + len - 1).min(width - 1) & 1 == 1
}

/// `bfe.u32`: the `len` bits of `a` at `pos` (both modulo 256); bits beyond the register are zero.
#[inline(always)]
pub fn bfe_u32(a: u32, pos: u32, len: u32) -> u32 {
    extract(u64::from(a), pos, len) as u32
}

/// `bfe.u64`
#[inline(always)]
pub fn bfe_u64(a: u64, pos: u32, len: u32) -> u64 {
    extract(a, pos, len)
}

/// `bfe.s32`: as `.u32`, sign-extended with the field's top bit, or with the register's if the field ends beyond it. A length
/// of zero gives zero.
#[inline(always)]
pub fn bfe_s32(a: u32, pos: u32, len: u32) -> u32 {
    bfe_signed(u64::from(a), pos, len, 32) as u32
}

/// `bfe.s64`
#[inline(always)]
pub fn bfe_s64(a: u64, pos: u32, len: u32) -> u64 {
    bfe_signed(a, pos, len, 64)
}

#[inline(always)]
fn bfe_signed(a: u64, pos: u32, len: u32, width: u32) -> u64 {
    let field = extract(a, pos, len);
    if !field_sign(a, pos, len, width) {
        return field;
    }
    // Ones from the end of the field or of the register, whichever is lower.
    let taken = (len & 0xff).min(width.saturating_sub(pos & 0xff));
    field | (!0u64).shl(taken)
}

/// `bfi.b32 f, a, b, pos, len`: `b` with its `len` bits at `pos` (both modulo 256) replaced by the low bits of `a`.
#[inline(always)]
pub fn bfi_b32(a: u32, b: u32, pos: u32, len: u32) -> u32 {
    bfi_b64(u64::from(a), u64::from(b), pos, len) as u32
}

/// `bfi.b64`
#[inline(always)]
pub fn bfi_b64(a: u64, b: u64, pos: u32, len: u32) -> u64 {
    let (pos, len) = (pos & 0xff, len & 0xff);
    let mask = (!(!0u64).shl(len)).shl(pos);
    (b & !mask) | (a.shl(pos) & mask)
}

/// `bfind.u32`: position of the highest set bit, or 0xffffffff; with `.shiftamt`, the left shift that moves it to the top.
#[inline(always)]
pub fn bfind_u32(a: u32, shiftamt: bool) -> u32 {
    if a == 0 {
        return u32::MAX;
    }
    if shiftamt { a.leading_zeros() } else { 31 - a.leading_zeros() }
}

/// `bfind.s32`: the highest bit that differs from the sign.
#[inline(always)]
pub fn bfind_s32(a: i32, shiftamt: bool) -> u32 {
    bfind_u32((a ^ a >> 31) as u32, shiftamt)
}

/// `bfind.u64`
#[inline(always)]
pub fn bfind_u64(a: u64, shiftamt: bool) -> u32 {
    if a == 0 {
        return u32::MAX;
    }
    if shiftamt { a.leading_zeros() } else { 63 - a.leading_zeros() }
}

/// `bfind.s64`
#[inline(always)]
pub fn bfind_s64(a: i64, shiftamt: bool) -> u32 {
    bfind_u64((a ^ a >> 63) as u64, shiftamt)
}

/// `prmt.b32 d, a, b, c`: four bytes out of `{b, a}`. Bits 2 to 0 of each selector of four bits choose the byte, and bit 3
/// replaces it by copies of its sign.
#[inline(always)]
pub fn prmt(a: u32, b: u32, selectors: u32) -> u32 {
    let bytes = u64::from(b) << 32 | u64::from(a);
    let mut result = 0;
    for i in 0..4 {
        let selector = selectors >> (4 * i);
        let byte = (bytes >> (8 * (selector & 7))) as u8;
        let byte = if selector & 8 != 0 { (byte as i8 >> 7) as u8 } else { byte };
        result |= u32::from(byte) << (8 * i);
    }
    result
}

#[inline(always)]
fn funnel_amount(amount: u32, wrap: bool) -> u32 {
    if wrap { amount & 31 } else { amount.min(32) }
}

/// `shf.l.mode.b32 d, a, b, c`: the upper half of `{b, a}` shifted left by `c`, modulo 32 (`.wrap`) or at most 32
/// (`.clamp`).
#[inline(always)]
pub fn shf_l(a: u32, b: u32, amount: u32, wrap: bool) -> u32 {
    let pair = u64::from(b) << 32 | u64::from(a);
    (pair << funnel_amount(amount, wrap) >> 32) as u32
}

/// `shf.r.mode.b32 d, a, b, c`: the lower half of `{b, a}` shifted right by `c`, modulo 32 (`.wrap`) or at most 32
/// (`.clamp`).
#[inline(always)]
pub fn shf_r(a: u32, b: u32, amount: u32, wrap: bool) -> u32 {
    let pair = u64::from(b) << 32 | u64::from(a);
    (pair >> funnel_amount(amount, wrap)) as u32
}

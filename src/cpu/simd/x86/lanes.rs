//! The lanes of AVX2, AVX-VNNI and AVX-512.

use super::format::Products;
use crate::cpu::simd::lanes::{Bf16Lanes, Lanes};
use std::arch::x86_64::*;
use std::marker::PhantomData;

/// Sixteen lanes in two vectors of AVX2, with FMA and F16C, and the products of `P`.
pub(super) struct Narrow<P>(PhantomData<P>);

/// Sixteen lanes in a vector of AVX-512 F, BW and VNNI.
pub(super) struct Wide;

/// Functions of [`Lanes`] on registers: the same expression for both halves of the arguments.
macro_rules! halves {
    ($($name:ident($($x:ident: $ty:ident),*; $($n:ident: $nty:ty),*) -> $out:ident = $body:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name($($x: Self::$ty,)* $($n: $nty,)*) -> Self::$out {
            // SAFETY: registers only; the caller vouches for the instructions.
            unsafe { [{ $(let $x = $x[0];)* $body }, { $(let $x = $x[1];)* $body }] }
        }
    )*};
}

/// Functions of [`Lanes`] that read memory: the same expression for both halves, which start `$step` bytes apart.
macro_rules! loads {
    ($($name:ident($p:ident: *const $ty:ty, $step:literal) -> $out:ident = $body:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name(p: *const $ty) -> Self::$out {
            // SAFETY: the caller vouches for the bytes and the instructions.
            unsafe { [{ let $p = p; $body }, { let $p = p.byte_add($step); $body }] }
        }
    )*};
}

/// A shift count that an instruction takes.
#[inline(always)]
unsafe fn count(by: u32) -> __m128i {
    // SAFETY: a register only; every x86-64 has SSE2.
    unsafe { _mm_cvtsi32_si128(by as i32) }
}

/// The shuffle that takes byte `b` of each lane to the high bytes of both its halves.
#[inline(always)]
unsafe fn twice(b: u32) -> __m256i {
    // SAFETY: registers only; the caller vouches for AVX2.
    unsafe {
        let lanes =
            _mm256_setr_epi32(0, 0x0400_0400, 0x0800_0800, 0x0c00_0c00, 0, 0x0400_0400, 0x0800_0800, 0x0c00_0c00);
        // Bytes whose highest bit is set become 0.
        _mm256_or_si256(_mm256_add_epi8(lanes, _mm256_set1_epi16((b << 8) as i16)), _mm256_set1_epi16(0x80))
    }
}

impl<P: Products> Lanes for Narrow<P> {
    type Int = [__m256i; 2];
    type Float = [__m256; 2];
    type Four = [__m256i; 2];
    type Factor = [__m256; 2];
    const EXACT: bool = P::EXACT;
    const SIGNED: bool = false;
    const TWICE: usize = 2;
    const BY_TWO: bool = false;

    halves! {
        zero(;) -> Int = _mm256_setzero_si256();
        bytes(; value: u8) -> Int = _mm256_set1_epi8(value as i8);
        and(a: Int, b: Int;) -> Int = _mm256_and_si256(a, b);
        or(a: Int, b: Int;) -> Int = _mm256_or_si256(a, b);
        left(a: Int; by: u32) -> Int = _mm256_sll_epi32(a, count(by));
        right(a: Int; by: u32) -> Int = _mm256_srl_epi32(a, count(by));
        signed_byte(a: Int; b: u32) -> Int = _mm256_srai_epi32::<24>(_mm256_sll_epi32(a, count(24 - 8 * b)));
        subtract_bytes(a: Int, b: Int;) -> Int = _mm256_sub_epi8(a, b);
        multiply_pairs(sums: Int, a: Int, b: Int;) -> Int = _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
        multiply(sums: Int, codes: Int, y: Four;) -> Int = if P::EXACT {
            P::add(sums, codes, y)
        } else {
            _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, y))
        };
        multiply_large(sums: Int, codes: Int, y: Four;) -> Int = if P::EXACT {
            P::add(sums, codes, y)
        } else {
            // The signs go to y: magnitudes are at most 128, and pairs of products fit.
            P::add(sums, _mm256_abs_epi8(codes), _mm256_sign_epi8(y, codes))
        };
        signed_pair(a: Int; b: u32) -> Int = _mm256_srai_epi16::<8>(_mm256_shuffle_epi8(a, twice(b)));
        zeros(;) -> Float = _mm256_setzero_ps();
        to_float(a: Int;) -> Float = _mm256_cvtepi32_ps(a);
        as_float(a: Int;) -> Float = _mm256_castsi256_ps(a);
        times(a: Float, b: Float;) -> Float = _mm256_mul_ps(a, b);
        fused(a: Float, b: Float, c: Float;) -> Float = _mm256_fmadd_ps(a, b, c);
        fused_factor(a: Float, b: Factor, c: Float;) -> Float = _mm256_fmadd_ps(a, b, c);
        sum(a: Float, b: Float;) -> Float = _mm256_add_ps(a, b);
    }

    loads! {
        load(p: *const u8, 32) -> Int = _mm256_loadu_si256(p.cast());
        spread(p: *const u8, 0) -> Int = _mm256_set1_epi32(p.cast::<i32>().read_unaligned());
        load_floats(p: *const f32, 32) -> Float = _mm256_loadu_ps(p);
        load_halves(p: *const u8, 16) -> Float = _mm256_cvtph_ps(_mm_loadu_si128(p.cast()));
        spread_float(p: *const f32, 0) -> Float = _mm256_broadcast_ss(&*p);
    }

    #[inline(always)]
    unsafe fn four(p: *const u8, g: usize) -> Self::Four {
        // SAFETY: as the caller vouches.
        unsafe { Self::spread(p.add(4 * g)) }
    }

    #[inline(always)]
    unsafe fn factor(p: *const f32, i: usize) -> Self::Factor {
        // SAFETY: as the caller vouches.
        unsafe { Self::spread_float(p.add(i)) }
    }

    #[inline(always)]
    unsafe fn look_up(table: &[u8; 16], codes: Self::Int) -> Self::Int {
        // SAFETY: the table has 16 bytes; the caller vouches for the instructions.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            [_mm256_shuffle_epi8(table, codes[0]), _mm256_shuffle_epi8(table, codes[1])]
        }
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, a: Self::Float) {
        // SAFETY: the caller vouches for room for 64 bytes.
        unsafe {
            _mm256_storeu_ps(p, a[0]);
            _mm256_storeu_ps(p.add(8), a[1]);
        }
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: an address that is only asked for may be any.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}

/// Functions of [`Lanes`] that are one expression.
macro_rules! single {
    ($($name:ident($($x:ident: $ty:ty),*) -> $out:ty = $body:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name($($x: $ty),*) -> $out {
            // SAFETY: registers, or bytes that the caller vouches for, as for the instructions.
            unsafe { $body }
        }
    )*};
}

impl Lanes for Wide {
    type Int = __m512i;
    type Float = __m512;
    type Four = __m512i;
    type Factor = __m512;
    const EXACT: bool = true;
    const SIGNED: bool = false;
    const TWICE: usize = 12;
    const BY_TWO: bool = true;

    single! {
        zero() -> __m512i = _mm512_setzero_si512();
        load(p: *const u8) -> __m512i = _mm512_loadu_si512(p.cast());
        spread(p: *const u8) -> __m512i = _mm512_set1_epi32(p.cast::<i32>().read_unaligned());
        bytes(value: u8) -> __m512i = _mm512_set1_epi8(value as i8);
        and(a: __m512i, b: __m512i) -> __m512i = _mm512_and_si512(a, b);
        or(a: __m512i, b: __m512i) -> __m512i = _mm512_or_si512(a, b);
        left(a: __m512i, by: u32) -> __m512i = _mm512_sll_epi32(a, count(by));
        right(a: __m512i, by: u32) -> __m512i = _mm512_srl_epi32(a, count(by));
        signed_byte(a: __m512i, b: u32) -> __m512i = _mm512_srai_epi32::<24>(_mm512_sll_epi32(a, count(24 - 8 * b)));
        subtract_bytes(a: __m512i, b: __m512i) -> __m512i = _mm512_sub_epi8(a, b);
        look_up(table: &[u8; 16], codes: __m512i) -> __m512i =
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), codes);
        four(p: *const u8, g: usize) -> __m512i = Self::spread(p.add(4 * g));
        multiply(sums: __m512i, codes: __m512i, y: __m512i) -> __m512i = _mm512_dpbusd_epi32(sums, codes, y);
        multiply_pairs(sums: __m512i, a: __m512i, b: __m512i) -> __m512i = _mm512_dpwssd_epi32(sums, a, b);
        zeros() -> __m512 = _mm512_setzero_ps();
        to_float(a: __m512i) -> __m512 = _mm512_cvtepi32_ps(a);
        as_float(a: __m512i) -> __m512 = _mm512_castsi512_ps(a);
        load_floats(p: *const f32) -> __m512 = _mm512_loadu_ps(p);
        load_halves(p: *const u8) -> __m512 = _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()));
        spread_float(p: *const f32) -> __m512 = _mm512_set1_ps(*p);
        factor(p: *const f32, i: usize) -> __m512 = Self::spread_float(p.add(i));
        times(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        fused(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        fused_factor(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        sum(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        store(p: *mut f32, a: __m512) -> () = _mm512_storeu_ps(p, a);
        prefetch(p: *const u8) -> () = _mm_prefetch::<_MM_HINT_T0>(p.cast());
    }
}

/// It needs AVX512-BF16 too.
impl Bf16Lanes for Wide {
    single! {
        multiply_bf16(sums: __m512, a: __m512i, b: __m512i) -> __m512 = _mm512_dpbf16_ps(sums, as_bf16(a), as_bf16(b));
    }
}

/// The bits as bf16.
#[inline(always)]
pub(super) fn as_bf16(bits: __m512i) -> __m512bh {
    // SAFETY: vectors of as many bits, in which all are numbers.
    unsafe { std::mem::transmute(bits) }
}

//! [`SimdOps`] for AVX2, AVX-VNNI and AVX-512.

use super::row_format::QuantDot;
use crate::cpu::simd::simd_ops::{SimdBf16Ops, SimdOps};
use std::arch::x86_64::*;
use std::marker::PhantomData;

/// AVX2 with FMA and F16C: sixteen lanes in two vectors; `P` multiplies codes.
pub(super) struct Avx2Ops<P>(PhantomData<P>);

/// AVX-512 F, BW and VNNI: sixteen lanes in one vector.
pub(super) struct Avx512Ops;

/// Functions of [`SimdOps`] on registers: one expression, applied to both halves of the arguments.
macro_rules! halves {
    ($($name:ident($($x:ident: $ty:ident),*; $($n:ident: $nty:ty),*) -> $out:ident = $body:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name($($x: Self::$ty,)* $($n: $nty,)*) -> Self::$out {
            // SAFETY: uses registers only; the caller guarantees that the processor has the instructions.
            unsafe { [{ $(let $x = $x[0];)* $body }, { $(let $x = $x[1];)* $body }] }
        }
    )*};
}

/// Functions of [`SimdOps`] that read memory: one expression for both halves, which lie `$step` bytes apart.
macro_rules! loads {
    ($($name:ident($p:ident: *const $ty:ty, $step:literal) -> $out:ident = $body:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name(p: *const $ty) -> Self::$out {
            // SAFETY: the caller guarantees that `p` points to the readable bytes, and that the processor has the instructions.
            unsafe { [{ let $p = p; $body }, { let $p = p.byte_add($step); $body }] }
        }
    )*};
}

/// A shift count in the register that the instruction takes.
#[inline(always)]
unsafe fn count(by: u32) -> __m128i {
    // SAFETY: a register only; every x86-64 has SSE2.
    unsafe { _mm_cvtsi32_si128(by as i32) }
}

/// The shuffle that moves byte `b` of each lane to the high byte of both its halves.
#[inline(always)]
unsafe fn byte_to_i16_shuffle(b: u32) -> __m256i {
    // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
    unsafe {
        let lanes =
            _mm256_setr_epi32(0, 0x0400_0400, 0x0800_0800, 0x0c00_0c00, 0, 0x0400_0400, 0x0800_0800, 0x0c00_0c00);
        // Index bytes with the highest bit set yield 0.
        _mm256_or_si256(_mm256_add_epi8(lanes, _mm256_set1_epi16((b << 8) as i16)), _mm256_set1_epi16(0x80))
    }
}

impl<P: QuantDot> SimdOps for Avx2Ops<P> {
    type Int = [__m256i; 2];
    type Float = [__m256; 2];
    type QuantX4 = [__m256i; 2];
    type ScaleVec = [__m256; 2];
    const I32_DOT: bool = P::I32_DOT;
    const SIGNED_CODES: bool = false;
    const MAX_DOUBLE_ACC: usize = 2;
    const FLOAT_STEPS_BY_TWO: bool = false;

    halves! {
        zero_int(;) -> Int = _mm256_setzero_si256();
        broadcast_u8(; value: u8) -> Int = _mm256_set1_epi8(value as i8);
        and(a: Int, b: Int;) -> Int = _mm256_and_si256(a, b);
        or(a: Int, b: Int;) -> Int = _mm256_or_si256(a, b);
        shift_left(a: Int; by: u32) -> Int = _mm256_sll_epi32(a, count(by));
        shift_right(a: Int; by: u32) -> Int = _mm256_srl_epi32(a, count(by));
        sign_extend_byte(a: Int; b: u32) -> Int = _mm256_srai_epi32::<24>(_mm256_sll_epi32(a, count(24 - 8 * b)));
        sub_bytes(a: Int, b: Int;) -> Int = _mm256_sub_epi8(a, b);
        dot2_i16(sums: Int, a: Int, b: Int;) -> Int = _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
        dot4(sums: Int, codes: Int, y: QuantX4;) -> Int = if P::I32_DOT {
            P::add(sums, codes, y)
        } else {
            _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, y))
        };
        dot4_large(sums: Int, codes: Int, y: QuantX4;) -> Int = if P::I32_DOT {
            P::add(sums, codes, y)
        } else {
            // The signs move to y: magnitudes are at most 128, so that pairs of products fit 16 bits.
            P::add(sums, _mm256_abs_epi8(codes), _mm256_sign_epi8(y, codes))
        };
        sign_extend_byte_x2(a: Int; b: u32) -> Int = _mm256_srai_epi16::<8>(_mm256_shuffle_epi8(a, byte_to_i16_shuffle(b)));
        zero_f32(;) -> Float = _mm256_setzero_ps();
        int_to_f32(a: Int;) -> Float = _mm256_cvtepi32_ps(a);
        bitcast_f32(a: Int;) -> Float = _mm256_castsi256_ps(a);
        mul(a: Float, b: Float;) -> Float = _mm256_mul_ps(a, b);
        fma(a: Float, b: Float, c: Float;) -> Float = _mm256_fmadd_ps(a, b, c);
        fma_scale(a: Float, b: ScaleVec, c: Float;) -> Float = _mm256_fmadd_ps(a, b, c);
        add(a: Float, b: Float;) -> Float = _mm256_add_ps(a, b);
    }

    loads! {
        load_bytes(p: *const u8, 32) -> Int = _mm256_loadu_si256(p.cast());
        broadcast_u32(p: *const u8, 0) -> Int = _mm256_set1_epi32(p.cast::<i32>().read_unaligned());
        load_f32(p: *const f32, 32) -> Float = _mm256_loadu_ps(p);
        load_f16(p: *const u8, 16) -> Float = _mm256_cvtph_ps(_mm_loadu_si128(p.cast()));
        broadcast_f32(p: *const f32, 0) -> Float = _mm256_broadcast_ss(&*p);
    }

    #[inline(always)]
    unsafe fn load_x4(p: *const u8, g: usize) -> Self::QuantX4 {
        // SAFETY: the caller meets this function's requirements.
        unsafe { Self::broadcast_u32(p.add(4 * g)) }
    }

    #[inline(always)]
    unsafe fn load_scale(p: *const f32, i: usize) -> Self::ScaleVec {
        // SAFETY: the caller meets this function's requirements.
        unsafe { Self::broadcast_f32(p.add(i)) }
    }

    #[inline(always)]
    unsafe fn table_lookup(table: &[u8; 16], codes: Self::Int) -> Self::Int {
        // SAFETY: the table has 16 bytes; the caller guarantees that the processor has the instructions.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            [_mm256_shuffle_epi8(table, codes[0]), _mm256_shuffle_epi8(table, codes[1])]
        }
    }

    #[inline(always)]
    unsafe fn store_f32(p: *mut f32, a: Self::Float) {
        // SAFETY: the caller guarantees that `p` points to room for 64 bytes.
        unsafe {
            _mm256_storeu_ps(p, a[0]);
            _mm256_storeu_ps(p.add(8), a[1]);
        }
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch may have any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}

/// Functions of [`SimdOps`] that are one expression on a single vector.
macro_rules! single {
    ($($name:ident($($x:ident: $ty:ty),*) -> $out:ty = $body:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name($($x: $ty),*) -> $out {
            // SAFETY: the caller guarantees that a pointer is valid for the load, and that the processor has the instructions.
            unsafe { $body }
        }
    )*};
}

impl SimdOps for Avx512Ops {
    type Int = __m512i;
    type Float = __m512;
    type QuantX4 = __m512i;
    type ScaleVec = __m512;
    const I32_DOT: bool = true;
    const SIGNED_CODES: bool = false;
    const MAX_DOUBLE_ACC: usize = 12;
    const FLOAT_STEPS_BY_TWO: bool = true;

    single! {
        zero_int() -> __m512i = _mm512_setzero_si512();
        load_bytes(p: *const u8) -> __m512i = _mm512_loadu_si512(p.cast());
        broadcast_u32(p: *const u8) -> __m512i = _mm512_set1_epi32(p.cast::<i32>().read_unaligned());
        broadcast_u8(value: u8) -> __m512i = _mm512_set1_epi8(value as i8);
        and(a: __m512i, b: __m512i) -> __m512i = _mm512_and_si512(a, b);
        or(a: __m512i, b: __m512i) -> __m512i = _mm512_or_si512(a, b);
        shift_left(a: __m512i, by: u32) -> __m512i = _mm512_sll_epi32(a, count(by));
        shift_right(a: __m512i, by: u32) -> __m512i = _mm512_srl_epi32(a, count(by));
        sign_extend_byte(a: __m512i, b: u32) -> __m512i = _mm512_srai_epi32::<24>(_mm512_sll_epi32(a, count(24 - 8 * b)));
        sub_bytes(a: __m512i, b: __m512i) -> __m512i = _mm512_sub_epi8(a, b);
        table_lookup(table: &[u8; 16], codes: __m512i) -> __m512i =
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), codes);
        load_x4(p: *const u8, g: usize) -> __m512i = Self::broadcast_u32(p.add(4 * g));
        dot4(sums: __m512i, codes: __m512i, y: __m512i) -> __m512i = _mm512_dpbusd_epi32(sums, codes, y);
        dot2_i16(sums: __m512i, a: __m512i, b: __m512i) -> __m512i = _mm512_dpwssd_epi32(sums, a, b);
        zero_f32() -> __m512 = _mm512_setzero_ps();
        int_to_f32(a: __m512i) -> __m512 = _mm512_cvtepi32_ps(a);
        bitcast_f32(a: __m512i) -> __m512 = _mm512_castsi512_ps(a);
        load_f32(p: *const f32) -> __m512 = _mm512_loadu_ps(p);
        load_f16(p: *const u8) -> __m512 = _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()));
        broadcast_f32(p: *const f32) -> __m512 = _mm512_set1_ps(*p);
        load_scale(p: *const f32, i: usize) -> __m512 = Self::broadcast_f32(p.add(i));
        mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        fma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        fma_scale(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        store_f32(p: *mut f32, a: __m512) -> () = _mm512_storeu_ps(p, a);
        prefetch(p: *const u8) -> () = _mm_prefetch::<_MM_HINT_T0>(p.cast());
    }
}

/// These functions need AVX512-BF16 too.
impl SimdBf16Ops for Avx512Ops {
    single! {
        dot2_bf16(sums: __m512, a: __m512i, b: __m512i) -> __m512 = _mm512_dpbf16_ps(sums, as_bf16(a), as_bf16(b));
    }
}

/// Reinterprets the bits as bf16.
#[inline(always)]
pub(super) fn as_bf16(bits: __m512i) -> __m512bh {
    // SAFETY: both are vectors of equal size in which any bits are valid.
    unsafe { std::mem::transmute(bits) }
}

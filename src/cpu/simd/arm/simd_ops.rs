//! [`SimdOps`] for NEON.

use super::dot_instructions::{QuantDot, f16_to_f32, prefetch};
use crate::cpu::simd::simd_ops::SimdOps;
use std::arch::aarch64::*;
use std::marker::PhantomData;

/// NEON: sixteen lanes in four vectors; `P` multiplies codes.
pub(super) struct NeonOps<P>(PhantomData<P>);

/// Functions of [`SimdOps`] on registers: one expression, applied to the four quarters of the arguments.
macro_rules! quarters {
    ($($name:ident($($x:ident: $ty:ident),*; $($n:ident: $nty:ty),*) -> $out:ident = $body:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name($($x: Self::$ty,)* $($n: $nty,)*) -> Self::$out {
            // SAFETY: uses registers only; NEON belongs to the architecture, and the caller guarantees that the processor has the
            // other instructions.
            unsafe {
                [
                    { $(let $x = $x[0];)* $body },
                    { $(let $x = $x[1];)* $body },
                    { $(let $x = $x[2];)* $body },
                    { $(let $x = $x[3];)* $body },
                ]
            }
        }
    )*};
}

/// Functions of [`SimdOps`] that read memory: one expression for the four quarters, which lie `$step` bytes apart.
macro_rules! loads {
    ($($name:ident($p:ident: *const $ty:ty, $step:literal) -> $out:ident = $body:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name(p: *const $ty) -> Self::$out {
            // SAFETY: the caller guarantees that `p` points to the bytes.
            unsafe {
                [
                    { let $p = p; $body },
                    { let $p = p.byte_add($step); $body },
                    { let $p = p.byte_add(2 * $step); $body },
                    { let $p = p.byte_add(3 * $step); $body },
                ]
            }
        }
    )*};
}

/// Reinterprets 32-bit lanes as bytes.
#[inline(always)]
fn bytes_of(a: uint32x4_t) -> uint8x16_t {
    // SAFETY: registers only; NEON belongs to the architecture.
    unsafe { vreinterpretq_u8_u32(a) }
}

/// Reinterprets bytes as 32-bit lanes.
#[inline(always)]
fn lanes_of(a: uint8x16_t) -> uint32x4_t {
    // SAFETY: as above.
    unsafe { vreinterpretq_u32_u8(a) }
}

impl<P: QuantDot> SimdOps for NeonOps<P> {
    type Int = [uint32x4_t; 4];
    type Float = [float32x4_t; 4];
    type QuantX4 = P::QuantX4;
    /// Two floats, and the index of the factor.
    type ScaleVec = (float32x2_t, usize);
    const I32_DOT: bool = true;
    const SIGNED_CODES: bool = true;
    const MAX_DOUBLE_ACC: usize = 3;
    const FLOAT_STEPS_BY_TWO: bool = true;

    quarters! {
        zero_int(;) -> Int = vdupq_n_u32(0);
        broadcast_u8(; value: u8) -> Int = lanes_of(vdupq_n_u8(value));
        and(a: Int, b: Int;) -> Int = vandq_u32(a, b);
        or(a: Int, b: Int;) -> Int = vorrq_u32(a, b);
        shift_left(a: Int; by: u32) -> Int = vshlq_u32(a, vdupq_n_s32(by as i32));
        shift_right(a: Int; by: u32) -> Int = vshlq_u32(a, vdupq_n_s32(-(by as i32)));
        high_nibbles(a: Int;) -> Int = lanes_of(vshrq_n_u8::<4>(bytes_of(a)));
        sign_extend_byte(a: Int; b: u32) -> Int = {
            let top = vshlq_u32(a, vdupq_n_s32(24 - 8 * b as i32));
            vreinterpretq_u32_s32(vshrq_n_s32::<24>(vreinterpretq_s32_u32(top)))
        };
        sub_bytes(a: Int, b: Int;) -> Int = lanes_of(vsubq_u8(bytes_of(a), bytes_of(b)));
        dot4(sums: Int, codes: Int; y: Self::QuantX4) -> Int = vreinterpretq_u32_s32(P::dot4_lane(
            vreinterpretq_s32_u32(sums),
            vreinterpretq_s8_u32(codes),
            y,
        ));
        dot2_i16(sums: Int, a: Int, b: Int;) -> Int = {
            let (a, b) = (vreinterpretq_s16_u32(a), vreinterpretq_s16_u32(b));
            let (low, high) = (vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
            vaddq_u32(sums, vreinterpretq_u32_s32(vpaddq_s32(low, high)))
        };
        zero_f32(;) -> Float = vdupq_n_f32(0.0);
        int_to_f32(a: Int;) -> Float = vcvtq_f32_s32(vreinterpretq_s32_u32(a));
        bitcast_f32(a: Int;) -> Float = vreinterpretq_f32_u32(a);
        mul(a: Float, b: Float;) -> Float = vmulq_f32(a, b);
        fma(a: Float, b: Float, c: Float;) -> Float = vfmaq_f32(c, a, b);
        add(a: Float, b: Float;) -> Float = vaddq_f32(a, b);
    }

    loads! {
        load_bytes(p: *const u8, 16) -> Int = lanes_of(vld1q_u8(p));
        broadcast_u32(p: *const u8, 0) -> Int = vld1q_dup_u32(p.cast());
        load_f32(p: *const f32, 16) -> Float = vld1q_f32(p);
        load_f16(p: *const u8, 8) -> Float = f16_to_f32(vld1_u16(p.cast()));
        broadcast_f32(p: *const f32, 0) -> Float = vld1q_dup_f32(p);
    }

    #[inline(always)]
    unsafe fn load_x4(p: *const u8, g: usize) -> Self::QuantX4 {
        // SAFETY: the caller meets this function's requirements.
        unsafe { P::load_x4(p.cast(), g) }
    }

    #[inline(always)]
    unsafe fn load_scale(p: *const f32, i: usize) -> Self::ScaleVec {
        // SAFETY: the caller guarantees that `p` points to two floats.
        (unsafe { vld1_f32(p) }, i)
    }

    #[inline(always)]
    unsafe fn fma_scale(a: Self::Float, (b, i): Self::ScaleVec, mut c: Self::Float) -> Self::Float {
        // SAFETY: registers only; NEON belongs to the architecture.
        unsafe {
            for q in 0..4 {
                c[q] = if i == 0 { vfmaq_lane_f32::<0>(c[q], a[q], b) } else { vfmaq_lane_f32::<1>(c[q], a[q], b) };
            }
        }
        c
    }

    #[inline(always)]
    unsafe fn table_lookup(table: &[u8; 16], codes: Self::Int) -> Self::Int {
        // SAFETY: the table has 16 bytes.
        unsafe {
            let table = vld1q_u8(table.as_ptr());
            let mut entries = codes;
            for q in 0..4 {
                entries[q] = lanes_of(vqtbl1q_u8(table, bytes_of(codes[q])));
            }
            entries
        }
    }

    #[inline(always)]
    unsafe fn store_f32(p: *mut f32, a: Self::Float) {
        for (i, a) in a.into_iter().enumerate() {
            // SAFETY: the caller guarantees that `p` points to room for 64 bytes.
            unsafe { vst1q_f32(p.add(4 * i), a) };
        }
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        prefetch(p);
    }
}

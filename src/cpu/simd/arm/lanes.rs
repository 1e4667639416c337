//! The lanes of NEON.

use super::products::{Products, prefetch, widen_halves};
use crate::cpu::simd::lanes::Lanes;
use std::arch::aarch64::*;
use std::marker::PhantomData;

/// Sixteen lanes in four vectors, with the products of `P`.
pub(super) struct Neon<P>(PhantomData<P>);

/// Functions of [`Lanes`] on registers: the same expression for the four quarters of the arguments.
macro_rules! quarters {
    ($($name:ident($($x:ident: $ty:ident),*; $($n:ident: $nty:ty),*) -> $out:ident = $body:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name($($x: Self::$ty,)* $($n: $nty,)*) -> Self::$out {
            // SAFETY: registers only; NEON belongs to the architecture, and the caller vouches for other instructions.
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

/// Functions of [`Lanes`] that read memory: the same expression for the four quarters, which start `$step` bytes apart.
macro_rules! loads {
    ($($name:ident($p:ident: *const $ty:ty, $step:literal) -> $out:ident = $body:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name(p: *const $ty) -> Self::$out {
            // SAFETY: the caller vouches for the bytes.
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

/// The same bits as bytes, and as lanes.
#[inline(always)]
fn bytes_of(a: uint32x4_t) -> uint8x16_t {
    // SAFETY: registers only; NEON belongs to the architecture.
    unsafe { vreinterpretq_u8_u32(a) }
}

#[inline(always)]
fn lanes_of(a: uint8x16_t) -> uint32x4_t {
    // SAFETY: as above.
    unsafe { vreinterpretq_u32_u8(a) }
}

impl<P: Products> Lanes for Neon<P> {
    type Int = [uint32x4_t; 4];
    type Float = [float32x4_t; 4];
    type Four = P::Four;
    /// Two floats, and which of them.
    type Factor = (float32x2_t, usize);
    const EXACT: bool = true;
    const SIGNED: bool = true;
    const TWICE: usize = 3;
    const BY_TWO: bool = true;

    quarters! {
        zero(;) -> Int = vdupq_n_u32(0);
        bytes(; value: u8) -> Int = lanes_of(vdupq_n_u8(value));
        and(a: Int, b: Int;) -> Int = vandq_u32(a, b);
        or(a: Int, b: Int;) -> Int = vorrq_u32(a, b);
        left(a: Int; by: u32) -> Int = vshlq_u32(a, vdupq_n_s32(by as i32));
        right(a: Int; by: u32) -> Int = vshlq_u32(a, vdupq_n_s32(-(by as i32)));
        high_nibbles(a: Int;) -> Int = lanes_of(vshrq_n_u8::<4>(bytes_of(a)));
        signed_byte(a: Int; b: u32) -> Int = {
            let top = vshlq_u32(a, vdupq_n_s32(24 - 8 * b as i32));
            vreinterpretq_u32_s32(vshrq_n_s32::<24>(vreinterpretq_s32_u32(top)))
        };
        subtract_bytes(a: Int, b: Int;) -> Int = lanes_of(vsubq_u8(bytes_of(a), bytes_of(b)));
        multiply(sums: Int, codes: Int; y: Self::Four) -> Int = vreinterpretq_u32_s32(P::add_four(
            vreinterpretq_s32_u32(sums),
            vreinterpretq_s8_u32(codes),
            y,
        ));
        multiply_pairs(sums: Int, a: Int, b: Int;) -> Int = {
            let (a, b) = (vreinterpretq_s16_u32(a), vreinterpretq_s16_u32(b));
            let (low, high) = (vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
            vaddq_u32(sums, vreinterpretq_u32_s32(vpaddq_s32(low, high)))
        };
        zeros(;) -> Float = vdupq_n_f32(0.0);
        to_float(a: Int;) -> Float = vcvtq_f32_s32(vreinterpretq_s32_u32(a));
        as_float(a: Int;) -> Float = vreinterpretq_f32_u32(a);
        times(a: Float, b: Float;) -> Float = vmulq_f32(a, b);
        fused(a: Float, b: Float, c: Float;) -> Float = vfmaq_f32(c, a, b);
        sum(a: Float, b: Float;) -> Float = vaddq_f32(a, b);
    }

    loads! {
        load(p: *const u8, 16) -> Int = lanes_of(vld1q_u8(p));
        spread(p: *const u8, 0) -> Int = vld1q_dup_u32(p.cast());
        load_floats(p: *const f32, 16) -> Float = vld1q_f32(p);
        load_halves(p: *const u8, 8) -> Float = widen_halves(vld1_u16(p.cast()));
        spread_float(p: *const f32, 0) -> Float = vld1q_dup_f32(p);
    }

    #[inline(always)]
    unsafe fn four(p: *const u8, g: usize) -> Self::Four {
        // SAFETY: as the caller vouches.
        unsafe { P::four(p.cast(), g) }
    }

    #[inline(always)]
    unsafe fn factor(p: *const f32, i: usize) -> Self::Factor {
        // SAFETY: the caller vouches for two floats.
        (unsafe { vld1_f32(p) }, i)
    }

    #[inline(always)]
    unsafe fn fused_factor(a: Self::Float, (b, i): Self::Factor, mut c: Self::Float) -> Self::Float {
        // SAFETY: registers only; NEON belongs to the architecture.
        unsafe {
            for q in 0..4 {
                c[q] = if i == 0 { vfmaq_lane_f32::<0>(c[q], a[q], b) } else { vfmaq_lane_f32::<1>(c[q], a[q], b) };
            }
        }
        c
    }

    #[inline(always)]
    unsafe fn look_up(table: &[u8; 16], codes: Self::Int) -> Self::Int {
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
    unsafe fn store(p: *mut f32, a: Self::Float) {
        for (i, a) in a.into_iter().enumerate() {
            // SAFETY: the caller vouches for room for 64 bytes.
            unsafe { vst1q_f32(p.add(4 * i), a) };
        }
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        prefetch(p);
    }
}

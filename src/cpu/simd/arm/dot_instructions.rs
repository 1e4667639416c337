//! Instructions that multiply codes. `std::arch` has no stable functions for the 8-bit dot and matrix products, so they are
//! inline assembly.

use std::arch::aarch64::*;
use std::arch::asm;

/// A dot-product instruction for signed codes.
///
/// # Safety
/// The functions need the instruction set that the type names.
pub(super) trait QuantDot {
    /// Codes of a column. [`QuantDot::dot4_lane`] uses four of them.
    type QuantX4: Copy;

    /// `sums[l] + sum of a[4l..4l + 4] * b[4l..4l + 4]`; two adjacent products must fit 16 bits together.
    unsafe fn add(sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t;

    /// Loads codes `4 g` to `4 g + 3` of a column at `p`, which has whole groups of sixteen.
    unsafe fn load_x4(p: *const i8, g: usize) -> Self::QuantX4;

    /// As [`QuantDot::add`], with the same four codes in every lane.
    unsafe fn dot4_lane(sums: int32x4_t, a: int8x16_t, b: Self::QuantX4) -> int32x4_t;
}

/// Baseline NEON: products in 16 bits, added in pairs, accumulated in 32 bits.
pub(super) struct BaseNeon;

impl QuantDot for BaseNeon {
    type QuantX4 = int8x16_t;

    #[inline(always)]
    unsafe fn add(sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        // SAFETY: registers only; NEON belongs to the architecture.
        unsafe {
            let low = vmull_s8(vget_low_s8(a), vget_low_s8(b));
            vpadalq_s16(sums, vpaddq_s16(low, vmull_high_s8(a, b)))
        }
    }

    #[inline(always)]
    unsafe fn load_x4(p: *const i8, g: usize) -> int8x16_t {
        // SAFETY: the caller guarantees that `p` points to the four codes of the group.
        unsafe { vreinterpretq_s8_s32(vld1q_dup_s32(p.add(4 * g).cast())) }
    }

    #[inline(always)]
    unsafe fn dot4_lane(sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        // SAFETY: the caller meets this function's requirements.
        unsafe { Self::add(sums, a, b) }
    }
}

/// The `sdot` instruction of the `dotprod` feature.
pub(super) struct DotProd;

/// An instruction with an accumulator and two vectors of codes.
macro_rules! instruction {
    ($text:literal, $sums:ident, $a:ident, $b:ident) => {
        asm!(
            concat!($text, " {sums:v}.4s, {a:v}.16b, {b:v}.16b"),
            sums = inout(vreg) $sums, a = in(vreg) $a, b = in(vreg) $b,
            options(pure, nomem, nostack, preserves_flags)
        )
    };
    ($text:literal, $sums:ident, $a:ident, $b:ident, lane $lane:literal) => {
        asm!(
            concat!($text, " {sums:v}.4s, {a:v}.16b, {b:v}.4b[", $lane, "]"),
            sums = inout(vreg) $sums, a = in(vreg) $a, b = in(vreg) $b,
            options(pure, nomem, nostack, preserves_flags)
        )
    };
}

impl QuantDot for DotProd {
    /// Sixteen codes, and the index of the four.
    type QuantX4 = (int8x16_t, usize);

    #[inline(always)]
    unsafe fn add(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        // SAFETY: uses registers only, no flags; the caller guarantees that the processor has the instruction.
        unsafe { instruction!("sdot", sums, a, b) };
        sums
    }

    #[inline(always)]
    unsafe fn load_x4(p: *const i8, g: usize) -> Self::QuantX4 {
        // SAFETY: the caller guarantees that `p` points to all sixteen codes around the four.
        (unsafe { vld1q_s8(p.add(g / 4 * 16)) }, g % 4)
    }

    #[inline(always)]
    unsafe fn dot4_lane(mut sums: int32x4_t, a: int8x16_t, (b, lane): Self::QuantX4) -> int32x4_t {
        // SAFETY: as above.
        unsafe {
            match lane {
                0 => instruction!("sdot", sums, a, b, lane 0),
                1 => instruction!("sdot", sums, a, b, lane 1),
                2 => instruction!("sdot", sums, a, b, lane 2),
                _ => instruction!("sdot", sums, a, b, lane 3),
            }
        }
        sums
    }
}

/// `smmla`: adds to `sums` (two rows by two columns) the products of two rows of eight codes with two columns of eight codes.
///
/// # Safety
/// The processor has `i8mm`.
#[inline(always)]
pub(super) unsafe fn smmla(mut sums: int32x4_t, rows: int8x16_t, columns: int8x16_t) -> int32x4_t {
    // SAFETY: uses registers only, no flags; the caller guarantees that the processor has the instruction.
    unsafe { instruction!("smmla", sums, rows, columns) };
    sums
}

/// `c + a * b[lane]`.
#[inline(always)]
pub(super) unsafe fn fma_lane(c: float32x4_t, a: float32x4_t, b: float32x4_t, lane: usize) -> float32x4_t {
    // SAFETY: registers only; NEON belongs to the architecture.
    unsafe {
        match lane {
            0 => vfmaq_laneq_f32::<0>(c, a, b),
            1 => vfmaq_laneq_f32::<1>(c, a, b),
            2 => vfmaq_laneq_f32::<2>(c, a, b),
            _ => vfmaq_laneq_f32::<3>(c, a, b),
        }
    }
}

/// Four f16 as f32.
#[inline(always)]
pub(super) unsafe fn f16_to_f32(bits: uint16x4_t) -> float32x4_t {
    // SAFETY: registers only; every AArch64 processor converts halves.
    unsafe { vcvt_f32_f16(vreinterpret_f16_u16(bits)) }
}

/// Software prefetch of the cache line at `p`; any address is allowed.
#[inline(always)]
pub(in crate::cpu::simd) fn prefetch(p: *const u8) {
    // SAFETY: the instruction is a hint: it neither faults nor changes registers or memory.
    unsafe { asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(readonly, nostack, preserves_flags)) }
}

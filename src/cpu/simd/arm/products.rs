//! Ways to multiply codes. The dot and matrix products of 8-bit numbers have no stable functions in `std::arch`: they are
//! written as the instructions that they are.

use std::arch::aarch64::*;
use std::arch::asm;

/// How products of signed codes are summed.
///
/// # Safety
/// The functions need the instruction set that the type names.
pub(super) trait Products {
    /// Codes of a column, of which [`Products::add_four`] takes four.
    type Four: Copy;

    /// `sums[l] + sum of a[4l..4l + 4] * b[4l..4l + 4]`; two neighbouring products must fit 16 bits together.
    unsafe fn add(sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t;

    /// Codes `4 g` to `4 g + 3` of a column at `p`, which has whole groups of sixteen.
    unsafe fn four(p: *const i8, g: usize) -> Self::Four;

    /// As [`Products::add`], with the same four codes in every lane.
    unsafe fn add_four(sums: int32x4_t, a: int8x16_t, b: Self::Four) -> int32x4_t;
}

/// What every AArch64 processor has: products in 16 bits, summed in pairs, added in 32.
pub(super) struct Plain;

impl Products for Plain {
    type Four = int8x16_t;

    #[inline(always)]
    unsafe fn add(sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        // SAFETY: registers only; NEON belongs to the architecture.
        unsafe {
            let low = vmull_s8(vget_low_s8(a), vget_low_s8(b));
            vpadalq_s16(sums, vpaddq_s16(low, vmull_high_s8(a, b)))
        }
    }

    #[inline(always)]
    unsafe fn four(p: *const i8, g: usize) -> int8x16_t {
        // SAFETY: the caller vouches for the group's four codes.
        unsafe { vreinterpretq_s8_s32(vld1q_dup_s32(p.add(4 * g).cast())) }
    }

    #[inline(always)]
    unsafe fn add_four(sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        // SAFETY: as the caller vouches.
        unsafe { Self::add(sums, a, b) }
    }
}

/// The dot products of the `dotprod` feature.
pub(super) struct DotProd;

/// An instruction on sums and two vectors of codes.
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

impl Products for DotProd {
    /// Sixteen codes, and which four of them.
    type Four = (int8x16_t, usize);

    #[inline(always)]
    unsafe fn add(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        // SAFETY: registers only, no flags; the caller vouches for the instruction.
        unsafe { instruction!("sdot", sums, a, b) };
        sums
    }

    #[inline(always)]
    unsafe fn four(p: *const i8, g: usize) -> Self::Four {
        // SAFETY: the caller vouches for the sixteen codes around the four.
        (unsafe { vld1q_s8(p.add(g / 4 * 16)) }, g % 4)
    }

    #[inline(always)]
    unsafe fn add_four(mut sums: int32x4_t, a: int8x16_t, (b, lane): Self::Four) -> int32x4_t {
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

/// `sums`, two rows of two, and the products of two rows of eight codes with two columns of eight.
///
/// # Safety
/// The processor has `i8mm`.
#[inline(always)]
pub(super) unsafe fn add_matrix(mut sums: int32x4_t, rows: int8x16_t, columns: int8x16_t) -> int32x4_t {
    // SAFETY: registers only, no flags; the caller vouches for the instruction.
    unsafe { instruction!("smmla", sums, rows, columns) };
    sums
}

/// `c + a * b[lane]`.
#[inline(always)]
pub(super) unsafe fn fused_lane(c: float32x4_t, a: float32x4_t, b: float32x4_t, lane: usize) -> float32x4_t {
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

/// Four halves as f32.
#[inline(always)]
pub(super) unsafe fn widen_halves(bits: uint16x4_t) -> float32x4_t {
    // SAFETY: registers only; every AArch64 processor converts halves.
    unsafe { vcvt_f32_f16(vreinterpret_f16_u16(bits)) }
}

/// Asks for the cache line at `p`, which need not exist.
#[inline(always)]
pub(super) fn prefetch(p: *const u8) {
    // SAFETY: the instruction is a hint: it neither faults nor changes anything that a program sees.
    unsafe { asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(readonly, nostack, preserves_flags)) }
}

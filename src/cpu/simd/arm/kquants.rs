//! Row formats of the K-quants (superblocks of 256 elements with quantised scales): Q2_K to Q6_K.

use super::dot_instructions::f16_to_f32;
use super::row_format::{Affine, RowFormat, eight_scales, times};
use crate::tensor::DType;
use std::arch::aarch64::*;

/// An unaligned f16 as f32, in all lanes.
#[inline(always)]
unsafe fn half(p: *const u8) -> float32x4_t {
    // SAFETY: the caller guarantees that `p` points to 2 readable bytes.
    unsafe { f16_to_f32(vdup_n_u16(p.cast::<u16>().read_unaligned())) }
}

/// A bit field of 32 bytes: shifted right by `by`, masked.
#[inline(always)]
unsafe fn field(p: *const u8, by: usize, mask: u8) -> [uint8x16_t; 2] {
    // SAFETY: the caller guarantees that `p` points to 32 readable bytes.
    unsafe {
        let (by, mask) = (vdupq_n_s8(-(by as i8)), vdupq_n_u8(mask));
        let (low, high) = (vshlq_u8(vld1q_u8(p), by), vshlq_u8(vld1q_u8(p.add(16)), by));
        [vandq_u8(low, mask), vandq_u8(high, mask)]
    }
}

/// Codes from their low bits and, `SHIFT` bits higher, the bits of `high`.
#[inline(always)]
unsafe fn with_high<const SHIFT: i32>(low: [uint8x16_t; 2], high: [uint8x16_t; 2]) -> [int8x16_t; 2] {
    // SAFETY: registers only; NEON belongs to the architecture.
    unsafe {
        let codes = [vorrq_u8(low[0], vshlq_n_u8::<SHIFT>(high[0])), vorrq_u8(low[1], vshlq_n_u8::<SHIFT>(high[1]))];
        signed(codes)
    }
}

/// Codes below 128 as signed bytes.
#[inline(always)]
unsafe fn signed(codes: [uint8x16_t; 2]) -> [int8x16_t; 2] {
    // SAFETY: as above.
    unsafe { [vreinterpretq_s8_u8(codes[0]), vreinterpretq_s8_u8(codes[1])] }
}

/// The scales of sixteen sub-blocks, in the order of [`RowFormat::scales`], times `d`.
#[inline(always)]
unsafe fn sixteen_scales(scales: int8x16_t, d: float32x4_t) -> [float32x4_t; 4] {
    // SAFETY: as above.
    unsafe {
        let even = vmovl_s8(vget_low_s8(vuzp1q_s8(scales, scales)));
        let odd = vmovl_s8(vget_low_s8(vuzp2q_s8(scales, scales)));
        let first = [vmovl_s16(vget_low_s16(even)), vmovl_s16(vget_low_s16(odd))];
        let second = [vmovl_high_s16(even), vmovl_high_s16(odd)];
        let scales =
            [vcvtq_f32_s32(first[0]), vcvtq_f32_s32(first[1]), vcvtq_f32_s32(second[0]), vcvtq_f32_s32(second[1])];
        times(scales, d)
    }
}

/// Eight bytes as f32, times `d`.
#[inline(always)]
unsafe fn widen(bytes: u64, d: float32x4_t) -> [float32x4_t; 4] {
    // SAFETY: as above.
    unsafe {
        let words = vmovl_u8(vcreate_u8(bytes));
        let (low, high) = (vmovl_u16(vget_low_u16(words)), vmovl_high_u16(words));
        eight_scales(vmulq_f32(vcvtq_f32_u32(low), d), vmulq_f32(vcvtq_f32_u32(high), d))
    }
}

/// The scales and minima of Q4_K and Q5_K.
#[inline(always)]
unsafe fn k4_scales(p: *const u8) -> Affine {
    const SIX: u32 = 0x3f3f_3f3f;
    const FOUR: u32 = 0x0f0f_0f0f;
    const TWO: u32 = 0x0303_0303;
    // SAFETY: d, dmin and 12 bytes of scales start the block.
    unsafe {
        let word = |i: usize| p.add(4 + 4 * i).cast::<u32>().read_unaligned();
        let (a, b, c) = (word(0), word(1), word(2));
        let scales = u64::from(a & SIX) | u64::from((c & FOUR) | (a >> 6 & TWO) << 4) << 32;
        let mins = u64::from(b & SIX) | u64::from((c >> 4 & FOUR) | (b >> 6 & TWO) << 4) << 32;
        Affine { scale: widen(scales, half(p)), bias: widen(mins, vnegq_f32(half(p.add(2)))) }
    }
}

/// A row format with superblocks of 256 elements and sub-blocks of `$sub`. `$scales` decodes the scales of the block at `$p`,
/// `$codes` the codes of its elements `32 * $j` and following.
macro_rules! superblock {
    ($name:ident, sub $sub:literal, |$p:ident, $j:ident| scales $scales:expr, codes $codes:expr) => {
        #[allow(non_camel_case_types)] // ggml's name of the type
        pub(super) struct $name;

        impl RowFormat for $name {
            const DTYPE: DType = DType::$name;
            const SUB: usize = $sub;
            const BIASED: bool = true;

            #[inline(always)]
            unsafe fn scales($p: *const u8) -> Affine {
                // SAFETY: a block lies at `p`, and the offsets are of its fields.
                unsafe { $scales }
            }

            #[inline(always)]
            unsafe fn codes($p: *const u8, $j: usize) -> [int8x16_t; 2] {
                // SAFETY: as above; j is below 8.
                unsafe { $codes }
            }
        }
    };
}

superblock!(Q2_K, sub 16, |p, j|
    scales {
        let both = vld1q_u8(p);
        let scales = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
        let mins = vreinterpretq_s8_u8(vshrq_n_u8::<4>(both));
        Affine { scale: sixteen_scales(scales, half(p.add(80))), bias: sixteen_scales(mins, vnegq_f32(half(p.add(82)))) }
    },
    codes signed(field(p.add(16 + 32 * (j / 4)), 2 * (j % 4), 3)));

superblock!(Q3_K, sub 16, |p, j|
scales {
    let word = |i: usize| p.add(96 + 4 * i).cast::<u32>().read_unaligned();
    let (a, b, c) = (word(0), word(1), word(2));
    let six = |low: u32, high: u32| u64::from((low & 0x0f0f_0f0f) | (high & 0x0303_0303) << 4);
    let (low, high) = (six(a, c) | six(b, c >> 2) << 32, six(a >> 4, c >> 4) | six(b >> 4, c >> 6) << 32);
    let scales = vsubq_s8(vcombine_s8(vcreate_s8(low), vcreate_s8(high)), vdupq_n_s8(32));
    Affine::offset(sixteen_scales(scales, half(p.add(108))), 4.0)
},
codes with_high::<2>(field(p.add(32 + 32 * (j / 4)), 2 * (j % 4), 3), field(p, j, 1)));

superblock!(Q4_K, sub 32, |p, j|
    scales k4_scales(p),
    codes signed(field(p.add(16 + 32 * (j / 2)), 4 * (j % 2), 15)));

superblock!(Q5_K, sub 32, |p, j|
    scales k4_scales(p),
    codes with_high::<4>(field(p.add(48 + 32 * (j / 2)), 4 * (j % 2), 15), field(p.add(16), j, 1)));

superblock!(Q6_K, sub 16, |p, j|
scales Affine::offset(sixteen_scales(vld1q_s8(p.add(192).cast()), half(p.add(208))), 32.0),
codes with_high::<4>(
    field(p.add(64 * (j / 4) + 32 * (j % 2)), 4 * (j % 4 / 2), 15),
    field(p.add(128 + 32 * (j / 4)), 2 * (j % 4), 3),
));

//! Row formats of the legacy quants (blocks of 32 elements): Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4.

use super::dot_instructions::f16_to_f32;
use super::row_format::{Affine, RowFormat, eight_scales};
use crate::cpu::simd::panel_format::unit_of;
use crate::tensor::DType;
use crate::tensor::blocks::{FP4_VALUES, IQ4_VALUES};
use std::arch::aarch64::*;

/// Eight f16, `step` bytes apart, as f32.
#[inline(always)]
unsafe fn halves(p: *const u8, step: usize) -> [float32x4_t; 4] {
    // SAFETY: the caller guarantees that `p` points to `7 * step + 2` readable bytes.
    unsafe {
        let mut bits = [0u16; 8];
        for j in 0..8 {
            bits[j] = p.add(j * step).cast::<u16>().read_unaligned();
        }
        let bits = vld1q_u16(bits.as_ptr());
        eight_scales(f16_to_f32(vget_low_u16(bits)), f16_to_f32(vget_high_u16(bits)))
    }
}

/// The low nibbles of 16 bytes, then the high nibbles.
#[inline(always)]
unsafe fn nibbles(p: *const u8) -> [uint8x16_t; 2] {
    // SAFETY: the caller guarantees that `p` points to 16 readable bytes.
    unsafe {
        let bytes = vld1q_u8(p);
        [vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8::<4>(bytes)]
    }
}

/// `codes` plus 16 where bit j of the u32 at `p` is set, for element j.
#[inline(always)]
unsafe fn with_fifth_bits(p: *const u8, codes: [uint8x16_t; 2]) -> [int8x16_t; 2] {
    // SAFETY: the caller guarantees that `p` points to 4 readable bytes.
    unsafe {
        let mask = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
        let mut with_bits = [vdupq_n_s8(0); 2];
        for h in 0..2 {
            // One mask bit for each element of the half.
            let bits = vcombine_u8(vdup_n_u8(*p.add(2 * h)), vdup_n_u8(*p.add(2 * h + 1)));
            let fifth = vandq_u8(vtstq_u8(bits, mask), vdupq_n_u8(16));
            with_bits[h] = vreinterpretq_s8_u8(vorrq_u8(codes[h], fifth));
        }
        with_bits
    }
}

/// Codes below 128 as signed bytes.
#[inline(always)]
unsafe fn signed(codes: [uint8x16_t; 2]) -> [int8x16_t; 2] {
    // SAFETY: registers only; NEON belongs to the architecture.
    unsafe { [vreinterpretq_s8_u8(codes[0]), vreinterpretq_s8_u8(codes[1])] }
}

/// Table lookup: the entries for the nibbles.
#[inline(always)]
unsafe fn look_up(table: &[i8; 16], nibbles: [uint8x16_t; 2]) -> [int8x16_t; 2] {
    // SAFETY: the table has 16 bytes.
    unsafe {
        let table = vld1q_s8(table.as_ptr());
        [vqtbl1q_s8(table, nibbles[0]), vqtbl1q_s8(table, nibbles[1])]
    }
}

/// The scales `2^(e - 128)` of eight MXFP4 blocks, from their exponent bytes `e`.
#[inline(always)]
unsafe fn units(p: *const u8) -> [float32x4_t; 4] {
    // SAFETY: the caller guarantees that `p` points to eight blocks, whose first bytes are read.
    unsafe {
        let mut units = [0f32; 8];
        for j in 0..8 {
            units[j] = unit_of(*p.add(17 * j));
        }
        eight_scales(vld1q_f32(units.as_ptr()), vld1q_f32(units.as_ptr().add(4)))
    }
}

/// A row format with blocks of 32 elements. `$scales` decodes the scales of the eight blocks from `$p` on, `$codes` the codes
/// of the block at `$p`.
macro_rules! legacy {
    ($name:ident, biased $biased:literal, |$p:ident| scales $scales:expr, codes $codes:expr) => {
        #[allow(non_camel_case_types)] // ggml's name of the type
        pub(super) struct $name;

        impl RowFormat for $name {
            const DTYPE: DType = DType::$name;
            const SUB: usize = 32;
            const BIASED: bool = $biased;

            #[inline(always)]
            unsafe fn scales($p: *const u8) -> Affine {
                // SAFETY: eight blocks lie at `p`, and the fields inside their blocks.
                unsafe { $scales }
            }

            #[inline(always)]
            unsafe fn codes(p: *const u8, j: usize) -> [int8x16_t; 2] {
                // SAFETY: as above.
                unsafe {
                    let $p = p.add(j * Self::DTYPE.block_bytes());
                    $codes
                }
            }
        }
    };
}

legacy!(Q4_0, biased true, |p| scales Affine::offset(halves(p, 18), 8.0), codes signed(nibbles(p.add(2))));
legacy!(Q4_1, biased true, |p|
    scales Affine { scale: halves(p, 20), bias: halves(p.add(2), 20) }, codes signed(nibbles(p.add(4))));
legacy!(Q5_0, biased true, |p|
    scales Affine::offset(halves(p, 22), 16.0), codes with_fifth_bits(p.add(2), nibbles(p.add(6))));
legacy!(Q5_1, biased true, |p|
    scales Affine { scale: halves(p, 24), bias: halves(p.add(2), 24) },
    codes with_fifth_bits(p.add(4), nibbles(p.add(8))));
legacy!(Q8_0, biased false, |p|
    scales Affine::offset(halves(p, 34), 0.0), codes [vld1q_s8(p.add(2).cast()), vld1q_s8(p.add(18).cast())]);
legacy!(IQ4_NL, biased false, |p|
    scales Affine::offset(halves(p, 18), 0.0), codes look_up(&IQ4_VALUES, nibbles(p.add(2))));
legacy!(MXFP4, biased false, |p|
    scales Affine::offset(units(p), 0.0), codes look_up(&FP4_VALUES, nibbles(p.add(1))));

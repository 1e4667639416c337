//! Row formats of the legacy quants (blocks of 32 elements): Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4.

use super::quant_row_dot::dot_blocks;
use super::row_format::{Affine, BlockFormat, QuantDot, RowFormat};
use crate::cpu::simd::packing::PackedColumn;
use crate::tensor::DType;
use crate::tensor::blocks::{FP4_VALUES, IQ4_VALUES};
use std::arch::x86_64::*;

/// Eight f16, `step` bytes apart, as f32.
#[inline(always)]
unsafe fn halves(p: *const u8, step: usize) -> __m256 {
    // SAFETY: the caller guarantees that `p` points to `7 * step + 2` readable bytes, and that the processor has F16C.
    unsafe {
        let at = |j: usize| p.add(j * step).cast::<i16>().read_unaligned();
        _mm256_cvtph_ps(_mm_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)))
    }
}

/// The low nibbles of 16 bytes, then the high nibbles.
#[inline(always)]
unsafe fn nibbles(p: *const u8) -> __m256i {
    // SAFETY: the caller guarantees that `p` points to 16 readable bytes, and that the processor has AVX2.
    unsafe {
        let low = _mm_loadu_si128(p.cast());
        let both = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), _mm_srli_epi16::<4>(low));
        _mm256_and_si256(both, _mm256_set1_epi8(15))
    }
}

/// 16 in byte j if bit j of the u32 at `p` is set.
#[inline(always)]
unsafe fn fifth_bits(p: *const u8) -> __m256i {
    // SAFETY: the caller guarantees that `p` points to 4 readable bytes, and that the processor has AVX2.
    unsafe {
        let bits = _mm256_set1_epi32(p.cast::<i32>().read_unaligned());
        let spread = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
        let mask = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
        let bits = _mm256_and_si256(_mm256_shuffle_epi8(bits, spread), mask);
        _mm256_and_si256(_mm256_cmpeq_epi8(bits, mask), _mm256_set1_epi8(16))
    }
}

/// Table lookup: the entries for the nibbles.
#[inline(always)]
unsafe fn look_up(table: &[i8; 16], nibbles: __m256i) -> __m256i {
    // SAFETY: the table has 16 bytes; the caller guarantees that the processor has AVX2.
    unsafe { _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())), nibbles) }
}

/// A row format with blocks of 32 elements. `$scales` decodes the scales of the eight blocks from `$p` on, `$codes` the codes
/// of the block at `$p`.
macro_rules! legacy {
    ($name:ident, unsigned $unsigned:literal, |$p:ident| scales $scales:expr, codes $codes:expr) => {
        #[allow(non_camel_case_types)] // ggml's name of the type
        pub(super) struct $name;

        impl RowFormat for $name {
            const DTYPE: DType = DType::$name;
            const SUB: usize = 32;

            #[inline(always)]
            unsafe fn dot_row<P: QuantDot, const C: usize>(
                row: *const u8,
                whole: usize,
                last: *const u8,
                columns: [PackedColumn; C],
                padded: usize,
            ) -> [f32; C] {
                // SAFETY: the caller meets this function's requirements.
                unsafe { dot_blocks::<Self, P, C>(row, whole, last, columns, padded) }
            }
        }

        impl BlockFormat for $name {
            const UNSIGNED: bool = $unsigned;

            #[inline(always)]
            unsafe fn scales($p: *const u8) -> Affine {
                // SAFETY: eight blocks lie at `p`, and the fields inside their blocks.
                unsafe { $scales }
            }

            #[inline(always)]
            unsafe fn codes(p: *const u8, j: usize) -> __m256i {
                // SAFETY: as above.
                unsafe {
                    let $p = p.add(j * Self::DTYPE.block_bytes());
                    $codes
                }
            }
        }
    };
}

legacy!(Q4_0, unsigned true, |p| scales Affine::offset(halves(p, 18), 8.0), codes nibbles(p.add(2)));
legacy!(Q4_1, unsigned true, |p| scales Affine { scale: halves(p, 20), bias: halves(p.add(2), 20) }, codes nibbles(p.add(4)));
legacy!(Q5_0, unsigned true, |p| scales Affine::offset(halves(p, 22), 16.0),
    codes _mm256_or_si256(nibbles(p.add(6)), fifth_bits(p.add(2))));
legacy!(Q5_1, unsigned true, |p| scales Affine { scale: halves(p, 24), bias: halves(p.add(2), 24) },
    codes _mm256_or_si256(nibbles(p.add(8)), fifth_bits(p.add(4))));
legacy!(Q8_0, unsigned false, |p| scales Affine::offset(halves(p, 34), 0.0), codes _mm256_loadu_si256(p.add(2).cast()));
legacy!(IQ4_NL, unsigned false, |p| scales Affine::offset(halves(p, 18), 0.0), codes look_up(&IQ4_VALUES, nibbles(p.add(2))));
legacy!(MXFP4, unsigned true, |p| scales Affine::offset(units(p), 12.0), codes look_up(&FP4_CODES, nibbles(p.add(1))));

/// FP4 values plus 12, so that they are unsigned.
const FP4_CODES: [i8; 16] = {
    let mut codes = FP4_VALUES;
    let mut i = 0;
    while i < 16 {
        codes[i] += 12;
        i += 1;
    }
    codes
};

/// The scales `2^(e - 128)` of eight MXFP4 blocks, from their exponent bytes `e`.
#[inline(always)]
unsafe fn units(p: *const u8) -> __m256 {
    // SAFETY: the first byte of each block is read; the caller guarantees that the processor has AVX2.
    unsafe {
        let at = |j: usize| u64::from(*p.add(j * 17)) << (8 * j);
        let bytes = (at(0) | at(1)) | (at(2) | at(3)) | ((at(4) | at(5)) | (at(6) | at(7)));
        let e = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes as i64));
        // Exponents 0 and 1 are subnormal.
        let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e, _mm256_set1_epi32(1)));
        let small = _mm256_sllv_epi32(_mm256_set1_epi32(1 << 21), e);
        let is_normal = _mm256_cmpgt_epi32(e, _mm256_set1_epi32(1));
        _mm256_castsi256_ps(_mm256_blendv_epi8(small, normal, is_normal))
    }
}

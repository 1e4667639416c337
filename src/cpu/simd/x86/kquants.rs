//! Row formats of the K-quants (superblocks of 256 elements with quantised scales): Q2_K to Q6_K.

use super::quant_row_dot::dot_superblocks;
use super::row_format::{CodeKind, QuantDot, RowFormat, SuperblockFormat, SuperblockScales};
use crate::cpu::simd::packing::PackedColumn;
use crate::tensor::DType;
use std::arch::x86_64::*;

/// An unaligned f16 as f32, in all lanes.
#[inline(always)]
pub(super) unsafe fn half(p: *const u8) -> __m256 {
    // SAFETY: the caller guarantees that `p` points to 2 readable bytes, and that the processor has F16C.
    unsafe { _mm256_cvtph_ps(_mm_set1_epi16(p.cast::<i16>().read_unaligned())) }
}

/// A bit field of 32 bytes: shifted right by `by`, masked.
#[inline(always)]
pub(super) unsafe fn field(p: *const u8, by: usize, mask: i8) -> __m256i {
    // SAFETY: the caller guarantees that `p` points to 32 readable bytes, and that the processor has AVX2. Bits from the
    // neighbouring byte are above the mask.
    unsafe {
        let bytes = _mm256_loadu_si256(p.cast());
        _mm256_and_si256(_mm256_srl_epi16(bytes, _mm_cvtsi32_si128(by as i32)), _mm256_set1_epi8(mask))
    }
}

/// Sixteen i8 as i16, in the order of [`SuperblockScales::scales`].
#[inline(always)]
unsafe fn sixteen_scales(scales: __m128i) -> __m256i {
    // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
    unsafe {
        let order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
        _mm256_cvtepi8_epi16(_mm_shuffle_epi8(scales, order))
    }
}

/// The results of [`sixteen_scales`] as f32, in the order of [`SuperblockScales::mins`].
#[inline(always)]
pub(super) unsafe fn sixteen_floats(scales: __m256i) -> [__m256; 2] {
    // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
    unsafe {
        let (low, high) = (_mm256_unpacklo_epi16(scales, scales), _mm256_unpackhi_epi16(scales, scales));
        [low, high].map(|pairs| _mm256_cvtepi32_ps(_mm256_srai_epi32::<16>(pairs)))
    }
}

/// Sixteen i8 scales times `d`, for codes with a zero offset: `d * scale * (code - zero)`.
#[inline(always)]
unsafe fn offset_scales(d: __m256, scales: __m128i, zero: f32) -> SuperblockScales {
    // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
    unsafe {
        let scales = sixteen_scales(scales);
        SuperblockScales { d, scales, m: _mm256_mul_ps(d, _mm256_set1_ps(-zero)), mins: sixteen_floats(scales) }
    }
}

/// The negated f16 at `p` as f32, in all lanes.
#[inline(always)]
pub(super) unsafe fn negated_half(p: *const u8) -> __m256 {
    // SAFETY: as `half`.
    unsafe { _mm256_xor_ps(half(p), _mm256_set1_ps(-0.0)) }
}

/// Eight bytes as f32.
#[inline(always)]
unsafe fn widen(bytes: u64) -> __m256 {
    // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
    unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes as i64))) }
}

/// The scales and minima of Q4_K and Q5_K.
#[inline(always)]
unsafe fn k4_scales(p: *const u8) -> SuperblockScales {
    const SIX: u32 = 0x3f3f_3f3f;
    const FOUR: u32 = 0x0f0f_0f0f;
    const TWO: u32 = 0x0303_0303;
    // SAFETY: d, dmin and 12 bytes of scales start the block; the caller guarantees that the processor has AVX2 and F16C.
    unsafe {
        let word = |i: usize| p.add(4 + 4 * i).cast::<u32>().read_unaligned();
        let (a, b, c) = (word(0), word(1), word(2));
        let scales = u64::from(a & SIX) | u64::from((c & FOUR) | (a >> 6 & TWO) << 4) << 32;
        let mins = u64::from(b & SIX) | u64::from((c >> 4 & FOUR) | (b >> 6 & TWO) << 4) << 32;
        let scales = _mm256_broadcastsi128_si256(_mm_cvtepu8_epi16(_mm_cvtsi64_si128(scales as i64)));
        SuperblockScales { d: half(p), scales, m: negated_half(p.add(2)), mins: [widen(mins), _mm256_setzero_ps()] }
    }
}

/// A format with superblocks of 256 elements and sub-blocks of `$sub`. `$scales` decodes the scales of the superblock at `$p`, `$codes` the
/// codes of its elements `32 * $j` and following: unsigned ones, or codes of `$kind` with their signs, by the head `$fields`.
macro_rules! superblock {
    ($name:ident, sub $sub:literal, |$p:ident, $j:ident| scales $scales:expr, codes $codes:expr) => {
        superblock!($name, sub $sub, Unsigned, one_scale false, head (), |$p, _head, $j|
            scales $scales, fields (), codes ($codes, 0));
    };
    ($name:ident, sub $sub:literal, $kind:ident, one_scale $one:literal, head $head:ty, |$p:ident, $of:ident, $j:ident|
     scales $scales:expr, fields $fields:expr, codes $codes:expr) => {
        #[allow(non_camel_case_types)] // ggml's name of the type
        pub(super) struct $name;

        impl RowFormat for $name {
            const DTYPE: DType = DType::$name;
            const SUB: usize = $sub;

            #[inline(always)]
            unsafe fn dot_row<P: QuantDot, const C: usize>(
                row: *const u8,
                whole: usize,
                last: *const u8,
                columns: [PackedColumn; C],
                padded: usize,
            ) -> [f32; C] {
                // SAFETY: the caller meets this function's requirements.
                unsafe { dot_superblocks::<Self, P, C>(row, whole, last, columns, padded) }
            }
        }

        #[allow(unused_variables, unused_unsafe)] // a format without a head, or whose codes are in its head
        impl SuperblockFormat for $name {
            const CODES: CodeKind = CodeKind::$kind;
            const ONE_SCALE: bool = $one;
            type Head = $head;

            #[inline(always)]
            unsafe fn scales($p: *const u8) -> SuperblockScales {
                // SAFETY: a block lies at `p`, and the offsets are of its fields.
                unsafe { $scales }
            }

            #[inline(always)]
            unsafe fn head($p: *const u8) -> $head {
                // SAFETY: as above.
                unsafe { $fields }
            }

            #[inline(always)]
            unsafe fn codes($p: *const u8, $of: &$head, $j: usize) -> (__m256i, u32) {
                // SAFETY: as above; j is below 8.
                unsafe { $codes }
            }
        }
    };
}
pub(super) use superblock;

superblock!(Q2_K, sub 16, |p, j|
    scales {
        let both = _mm_loadu_si128(p.cast());
        let low = _mm_set1_epi8(15);
        let mins = sixteen_scales(_mm_and_si128(_mm_srli_epi16::<4>(both), low));
        SuperblockScales {
            d: half(p.add(80)),
            scales: sixteen_scales(_mm_and_si128(both, low)),
            m: negated_half(p.add(82)),
            mins: sixteen_floats(mins),
        }
    },
    codes field(p.add(16 + 32 * (j / 4)), 2 * (j % 4), 3));

superblock!(Q3_K, sub 16, |p, j|
scales {
    let word = |i: usize| p.add(96 + 4 * i).cast::<u32>().read_unaligned();
    let (a, b, c) = (word(0), word(1), word(2));
    let six = |low: u32, high: u32| ((low & 0x0f0f_0f0f) | (high & 0x0303_0303) << 4) as i32;
    let scales = _mm_setr_epi32(six(a, c), six(b, c >> 2), six(a >> 4, c >> 4), six(b >> 4, c >> 6));
    let d = half(p.add(108));
    offset_scales(d, _mm_sub_epi8(scales, _mm_set1_epi8(32)), 4.0)
},
codes {
    let high = _mm256_slli_epi16::<2>(field(p, j, 1));
    _mm256_or_si256(field(p.add(32 + 32 * (j / 4)), 2 * (j % 4), 3), high)
});

superblock!(Q4_K, sub 32, |p, j|
    scales k4_scales(p),
    codes field(p.add(16 + 32 * (j / 2)), 4 * (j % 2), 15));

superblock!(Q5_K, sub 32, |p, j|
scales k4_scales(p),
codes {
    let high = _mm256_slli_epi16::<4>(field(p.add(16), j, 1));
    _mm256_or_si256(field(p.add(48 + 32 * (j / 2)), 4 * (j % 2), 15), high)
});

superblock!(Q6_K, sub 16, |p, j|
scales {
    offset_scales(half(p.add(208)), _mm_loadu_si128(p.add(192).cast()), 32.0)
},
codes {
    let high = _mm256_slli_epi16::<4>(field(p.add(128 + 32 * (j / 4)), 2 * (j % 4), 3));
    _mm256_or_si256(field(p.add(64 * (j / 4) + 32 * (j % 2)), 4 * (j % 4 / 2), 15), high)
});

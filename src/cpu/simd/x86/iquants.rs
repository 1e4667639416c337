//! Row formats of the types whose codes are signed, in superblocks with integer scales ([`SignedFormat`]): entries of a grid or numbers of
//! a table.
//!
//! Bit fields are taken apart for a whole superblock at once, by vectors, and stored ([`SignedFormat::Head`]): grid indices and words of
//! signs are then operands of scalar loads and of broadcasts. What is left for the entries of a group is two loads.

use super::kquants::{half, sixteen_floats, superblock};
use super::quant_row_dot::dot_superblocks;
use super::row_format::{CodeKind, QuantDot, RowFormat, SuperblockFormat, SuperblockScales, opaque};
use crate::cpu::simd::packing::PackedColumn;
use crate::tensor::DType;
use crate::tensor::blocks::IQ4_VALUES;
use crate::tensor::quant::grids;
use std::arch::x86_64::*;

/// Four entries of eight bytes, by their indices: of as many bits as N has, since a mask or a bounds check would keep the compiler from loading
/// each index alone.
#[inline(always)]
unsafe fn four_of_eight<const N: usize>(grid: &[[u8; 8]; N], indices: [usize; 4]) -> __m256i {
    // SAFETY: the caller guarantees that the indices are below N, and that the processor has AVX2.
    unsafe {
        let [a, b, c, d] = indices.map(|index| i64::from_le_bytes(*grid.get_unchecked(index)));
        _mm256_setr_epi64x(a, b, c, d)
    }
}

/// Eight entries of four bytes, by their indices.
#[inline(always)]
unsafe fn eight_of_four<const N: usize>(grid: &[[u8; 4]; N], indices: [usize; 8]) -> __m256i {
    // SAFETY: as above.
    unsafe {
        let [a, b, c, d, e, f, g, h] = indices.map(|index| i32::from_le_bytes(*grid.get_unchecked(index)));
        _mm256_setr_epi32(a, b, c, d, e, f, g, h)
    }
}

/// `N` indices from `first` on.
#[inline(always)]
fn some<const N: usize, const ALL: usize>(indices: &[u16; ALL], first: usize) -> [usize; N] {
    std::array::from_fn(|i| usize::from(indices[first + i]))
}

/// `N` bytes of the block from `p` on, as indices.
#[inline(always)]
unsafe fn byte_indices<const N: usize>(p: *const u8) -> [usize; N] {
    // SAFETY: the caller guarantees that `p` points to N readable bytes.
    unsafe { std::array::from_fn(|i| usize::from(*p.add(i))) }
}

/// The vector as eight words.
#[inline(always)]
unsafe fn words(vector: __m256i) -> [u32; 8] {
    let mut words = [0; 8];
    // SAFETY: eight words are written; the caller guarantees that the processor has AVX2.
    unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), vector) };
    words
}

/// Vectors of sixteen as indices.
#[inline(always)]
unsafe fn stored<const N: usize>(vectors: &[__m256i]) -> [u16; N] {
    let mut indices = [0; N];
    for (to, vector) in indices.as_chunks_mut::<16>().0.iter_mut().zip(vectors) {
        // SAFETY: sixteen indices are written; the caller guarantees that the processor has AVX2.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), *vector) };
    }
    indices
}

/// Sixteen bytes as sixteen numbers of 16 bits.
#[inline(always)]
unsafe fn widened(p: *const u8) -> __m256i {
    // SAFETY: the caller guarantees that `p` points to 16 readable bytes, and that the processor has AVX2.
    unsafe { _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast())) }
}

/// Eight bytes, in both halves.
#[inline(always)]
unsafe fn eight_bytes(p: *const u8) -> __m256i {
    // SAFETY: the caller guarantees that `p` points to 8 readable bytes, and that the processor has AVX2.
    unsafe { _mm256_set1_epi64x(p.cast::<i64>().read_unaligned()) }
}

/// 32 bytes with seven bits of signs each, as words: the eighth bit makes the number of bits that are set even.
#[inline(always)]
unsafe fn even_signs(seven: __m256i) -> [u32; 8] {
    // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
    unsafe {
        // Bit 7 for those numbers of four bits in which an odd number of bits is set.
        let odd = _mm256_set_epi64x(
            0x0080_8000_8000_0080,
            0x8000_0080_0080_8000_u64 as i64,
            0x0080_8000_8000_0080,
            0x8000_0080_0080_8000_u64 as i64,
        );
        let folded = _mm256_and_si256(_mm256_xor_si256(seven, _mm256_srli_epi16::<4>(seven)), _mm256_set1_epi8(15));
        words(_mm256_or_si256(seven, _mm256_shuffle_epi8(odd, folded)))
    }
}

/// The bits of each word that a mask has.
#[inline(always)]
unsafe fn masked(words: __m256i, mask: i32) -> __m256i {
    // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
    unsafe { _mm256_and_si256(words, _mm256_set1_epi32(mask)) }
}

/// As [`even_signs`], for four times seven bits in each word.
#[inline(always)]
unsafe fn even_signs_of_words(four_times_seven: __m256i) -> [u32; 8] {
    // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
    unsafe {
        // Two fields of 14 bits, then four of 7.
        let x = four_times_seven;
        let x = _mm256_or_si256(masked(x, 0x3fff), masked(_mm256_slli_epi32::<2>(x), 0x3fff_0000));
        even_signs(_mm256_or_si256(masked(x, 0x007f_007f), masked(_mm256_slli_epi32::<1>(x), 0x7f00_7f00)))
    }
}

/// The product of a vector and a number.
#[inline(always)]
unsafe fn times(x: __m256, by: f32) -> __m256 {
    // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
    unsafe { _mm256_mul_ps(x, _mm256_set1_ps(by)) }
}

/// The scale `2 n + 1` of each sub-block, from numbers of 16 bits.
#[inline(always)]
unsafe fn odd_scales(n: __m256i) -> __m256i {
    // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
    unsafe { _mm256_or_si256(_mm256_add_epi16(n, n), _mm256_set1_epi16(1)) }
}

/// The scales of sixteen elements from eight bytes: a low nibble for the first sixteen of each 32, a high nibble for the others.
#[inline(always)]
unsafe fn nibble_scales(p: *const u8) -> __m256i {
    // SAFETY: the caller guarantees that `p` points to 8 readable bytes, and that the processor has AVX2.
    unsafe {
        let (both, four) = (_mm_loadl_epi64(p.cast()), _mm_set1_epi8(15));
        let nibbles = _mm_unpacklo_epi64(_mm_and_si128(both, four), _mm_and_si128(_mm_srli_epi16::<4>(both), four));
        odd_scales(_mm256_cvtepu8_epi16(nibbles))
    }
}

/// The scales of 32 elements from the top four bits of eight words.
#[inline(always)]
unsafe fn top_nibble_scales(words: __m256i) -> __m256i {
    // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
    unsafe {
        let nibbles = _mm256_srli_epi32::<28>(words);
        odd_scales(_mm256_permute4x64_epi64::<0b10_00_10_00>(_mm256_packus_epi32(nibbles, nibbles)))
    }
}

/// Eight nibbles from four bytes, the low one of each first, as numbers of 16 bits in both halves.
#[inline(always)]
unsafe fn eight_nibbles(p: *const u8) -> __m256i {
    // SAFETY: the caller guarantees that `p` points to 4 readable bytes, and that the processor has AVX2.
    unsafe {
        let (both, four) = (_mm_cvtsi32_si128(p.cast::<i32>().read_unaligned()), _mm_set1_epi8(15));
        let nibbles = _mm_unpacklo_epi8(_mm_and_si128(both, four), _mm_and_si128(_mm_srli_epi16::<4>(both), four));
        _mm256_broadcastsi128_si256(_mm_cvtepu8_epi16(nibbles))
    }
}

/// Of eight bytes from byte `FIRST` on, each repeated `EACH` (4 or 8) times, as sixteen numbers of 16 bits.
#[inline(always)]
unsafe fn repeated<const EACH: usize, const FIRST: i8>(bytes: __m256i) -> __m256i {
    let four = |i: usize| i64::from(FIRST) * 0x0001_0001_0001_0001 + (i * 4 / EACH) as i64 * 0x0001_0001_0001_0001;
    // 0x80 makes the high byte of each number 0.
    let order = [0, 1, 2, 3].map(|i| four(i) | 0x8000_8000_8000_8000_u64 as i64);
    // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
    unsafe { _mm256_shuffle_epi8(bytes, _mm256_setr_epi64x(order[0], order[1], order[2], order[3])) }
}

/// Scales without minima.
#[inline(always)]
unsafe fn without_minima(d: __m256, scales: __m256i) -> SuperblockScales {
    // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
    let none = unsafe { _mm256_setzero_ps() };
    SuperblockScales { d, scales, m: none, mins: [none; 2] }
}

/// The eight words of IQ2_XXS with signs and a scale: each 32 elements have four indices, then such a word.
#[inline(always)]
unsafe fn iq2_xxs_words(p: *const u8) -> __m256i {
    // SAFETY: the caller guarantees that a block lies at `p`, and that the processor has AVX2.
    unsafe {
        let (low, high) = (_mm256_loadu_ps(p.add(2).cast()), _mm256_loadu_ps(p.add(34).cast()));
        let second = _mm256_castps_si256(_mm256_shuffle_ps::<0b11_01_11_01>(low, high));
        _mm256_permute4x64_epi64::<0b11_01_10_00>(second)
    }
}

superblock!(IQ2_XXS, sub 16, SignWords, one_scale false, head [u32; 8], |p, signs, j|
    scales without_minima(times(half(p), 0.125), top_nibble_scales(iq2_xxs_words(p))),
    fields even_signs_of_words(iq2_xxs_words(p)),
    codes (four_of_eight(&grids::IQ2_XXS, byte_indices(p.add(2 + 8 * j))), signs[j]));

superblock!(IQ2_XS, sub 16, SignWords, one_scale false, head ([u32; 8], [u16; 32]), |p, head, j|
    scales without_minima(times(half(p), 0.125), nibble_scales(p.add(66))),
    fields {
        let (low, high) = (_mm256_loadu_si256(p.add(2).cast()), _mm256_loadu_si256(p.add(34).cast()));
        // The signs are in the upper seven bits of odd bytes.
        let odd = _mm256_set1_epi64x(0x0f0d_0b09_0705_0301);
        let odd = _mm256_unpacklo_epi64(_mm256_shuffle_epi8(low, odd), _mm256_shuffle_epi8(high, odd));
        let sevens = masked(_mm256_srli_epi16::<1>(odd), 0x7f7f_7f7f);
        let signs = even_signs(_mm256_permute4x64_epi64::<0b11_01_10_00>(sevens));
        let nine = _mm256_set1_epi16(511);
        let indices = stored(&[_mm256_and_si256(low, nine), _mm256_and_si256(high, nine)]);
        (signs, indices)
    },
    codes (four_of_eight(&grids::IQ2_XS, some(&head.1, 4 * j)), head.0[j]));

/// Sixteen indices; bits 2 l and 2 l + 1 of a byte of `highs`, from byte `FIRST` on, belong to index l of four.
#[inline(always)]
unsafe fn iq2_s_indices<const FIRST: i8>(lows: *const u8, highs: __m256i) -> __m256i {
    // SAFETY: 16 bytes are read; the caller guarantees that the processor has AVX2.
    unsafe {
        let places = _mm256_set1_epi64x(0x0004_0010_0040_0100);
        let high = _mm256_mullo_epi16(repeated::<4, FIRST>(highs), places);
        _mm256_or_si256(widened(lows), _mm256_and_si256(high, _mm256_set1_epi16(0x300)))
    }
}

superblock!(IQ2_S, sub 16, SignWords, one_scale false, head ([u32; 8], [u16; 32]), |p, head, j|
    scales without_minima(times(half(p), 0.125), nibble_scales(p.add(74))),
    fields {
        let highs = eight_bytes(p.add(66));
        let indices = stored(&[iq2_s_indices::<0>(p.add(2), highs), iq2_s_indices::<4>(p.add(18), highs)]);
        (words(_mm256_loadu_si256(p.add(34).cast())), indices)
    },
    codes (four_of_eight(&grids::IQ2_S, some(&head.1, 4 * j)), head.0[j]));

superblock!(IQ3_XXS, sub 16, SignWords, one_scale false, head [u32; 8], |p, signs, j|
    scales without_minima(times(half(p), 0.25), top_nibble_scales(_mm256_loadu_si256(p.add(66).cast()))),
    fields even_signs_of_words(_mm256_loadu_si256(p.add(66).cast())),
    codes (eight_of_four(&grids::IQ3_XXS, byte_indices(p.add(2 + 8 * j))), signs[j]));

/// Sixteen indices; bit i of a byte of `highs`, from byte `FIRST` on, belongs to index i of eight.
#[inline(always)]
unsafe fn iq3_s_indices<const FIRST: i8>(lows: *const u8, highs: __m256i) -> __m256i {
    // SAFETY: 16 bytes are read; the caller guarantees that the processor has AVX2.
    unsafe {
        let places = _mm256_broadcastsi128_si256(_mm_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128));
        let bit = _mm256_and_si256(repeated::<8, FIRST>(highs), places);
        let high = _mm256_and_si256(_mm256_cmpeq_epi16(bit, places), _mm256_set1_epi16(256));
        _mm256_or_si256(widened(lows), high)
    }
}

superblock!(IQ3_S, sub 16, SignWords, one_scale false, head ([u32; 8], [u16; 64]), |p, head, j|
    scales without_minima(half(p), odd_scales(eight_nibbles(p.add(106)))),
    fields {
        let highs = eight_bytes(p.add(66));
        let indices = stored(&[
            iq3_s_indices::<0>(p.add(2), highs),
            iq3_s_indices::<2>(p.add(18), highs),
            iq3_s_indices::<4>(p.add(34), highs),
            iq3_s_indices::<6>(p.add(50), highs),
        ]);
        (words(_mm256_loadu_si256(p.add(74).cast())), indices)
    },
    codes (eight_of_four(&grids::IQ3_S, some(&head.1, 8 * j)), head.0[j]));

/// Sixteen indices; bits 3 l to 3 l + 2 of a word, from word `FIRST` on, belong to index l of four.
#[inline(always)]
unsafe fn iq1_s_indices<const FIRST: i8>(lows: *const u8, words: __m256i) -> __m256i {
    // SAFETY: 16 bytes are read; the caller guarantees that the processor has AVX2.
    unsafe {
        let pair = |number: i8| i64::from(2 * (FIRST + number)) * 0x0101_0101_0101_0101 + 0x0100_0100_0100_0100;
        let word = _mm256_shuffle_epi8(words, _mm256_setr_epi64x(pair(0), pair(1), pair(2), pair(3)));
        let high = _mm256_mullo_epi16(word, _mm256_set1_epi64x(0x0000_0004_0020_0100));
        let high = _mm256_blend_epi16::<0b1000_1000>(high, _mm256_srli_epi16::<1>(word));
        _mm256_or_si256(widened(lows), _mm256_and_si256(high, _mm256_set1_epi16(0x700)))
    }
}

// An entry is eight times the number and 8, so that 8 less or more than the shift's sign is a minimum of the scale.
superblock!(IQ1_S, sub 16, Unsigned, one_scale false, head [u16; 32], |p, indices, j|
    scales {
        let words = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.add(34).cast()));
        let scales = odd_scales(_mm256_and_si256(_mm256_srli_epi16::<12>(words), _mm256_set1_epi16(7)));
        // -7, or -9 where the top bit is set.
        let negative = _mm256_srai_epi16::<15>(words);
        let shift = _mm256_sub_epi16(_mm256_add_epi16(negative, negative), _mm256_set1_epi16(7));
        let (d, mins) = (times(half(p), 0.125), sixteen_floats(_mm256_mullo_epi16(scales, shift)));
        SuperblockScales { d, scales, m: d, mins }
    },
    fields {
        let words = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.add(34).cast()));
        stored(&[iq1_s_indices::<0>(p.add(2), words), iq1_s_indices::<4>(p.add(18), words)])
    },
    codes (four_of_eight(&grids::IQ1, some(indices, 4 * j)), 0));

/// Sixteen indices, each with three bits of a nibble of `highs`.
#[inline(always)]
unsafe fn iq1_m_indices(lows: *const u8, highs: *const u8) -> __m256i {
    // SAFETY: 16 and 8 bytes are read; the caller guarantees that the processor has AVX2.
    unsafe {
        let high = _mm_loadl_epi64(highs.cast());
        let both = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(high, high));
        let high = _mm256_mullo_epi16(both, _mm256_set1_epi32(0x0010_0100));
        _mm256_or_si256(widened(lows), _mm256_and_si256(high, _mm256_set1_epi16(0x700)))
    }
}

superblock!(IQ1_M, sub 16, Unsigned, one_scale false, head ([u32; 8], [u16; 32]), |p, head, j|
scales {
    // Four scales of three bits in each word: the even ones, then the odd ones.
    let words = _mm_loadl_epi64(p.add(48).cast());
    let twice = _mm256_cvtepu16_epi32(_mm_unpacklo_epi16(words, words));
    let even = masked(_mm256_srlv_epi32(twice, _mm256_set1_epi64x(6 << 32)), 7);
    let odd = masked(_mm256_srlv_epi32(twice, _mm256_set1_epi64x(9 << 32 | 3)), 7);
    let scales = odd_scales(_mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(even, opaque(odd))));
    // The top nibbles of the words.
    let four = p.add(48).cast::<u64>().read_unaligned();
    let bits = (four >> 12 & 0xf) | (four >> 24 & 0xf0) | (four >> 36 & 0xf00) | (four >> 48 & 0xf000);
    let d = times(half((bits as u16).to_le_bytes().as_ptr()), 0.125);
    SuperblockScales { d, scales, m: times(d, -9.0), mins: sixteen_floats(scales) }
},
fields {
    let indices = stored(&[iq1_m_indices(p, p.add(32)), iq1_m_indices(p.add(16), p.add(40))]);
    // What each eight elements have more than the number and 9: 0, or 2 for a shift of 1/8.
    let (highs, eight) = (_mm_loadu_si128(p.add(32).cast()), _mm_set1_epi8(8));
    let [low, high] = [_mm_andnot_si128(highs, eight), _mm_andnot_si128(_mm_srli_epi16::<4>(highs), eight)];
    let positive = _mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high));
    (words(_mm256_srli_epi16::<2>(positive)), indices)
},
codes {
    let spread = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
    let more = _mm256_shuffle_epi8(_mm256_set1_epi32(head.0[j] as i32), spread);
    (_mm256_add_epi8(four_of_eight(&grids::IQ1, some(&head.1, 4 * j)), more), 0)
});

superblock!(IQ4_XS, sub 32, Signed, one_scale false, head (), |p, head, j|
scales {
    let high = i32::from(p.add(2).cast::<u16>().read_unaligned()) << 4;
    let places = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
    let high = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(high), places), _mm256_set1_epi32(0x30));
    let high = _mm256_permute4x64_epi64::<0b10_00_10_00>(_mm256_packus_epi32(high, high));
    let six = _mm256_or_si256(eight_nibbles(p.add(4)), high);
    without_minima(half(p), _mm256_sub_epi16(six, _mm256_set1_epi16(32)))
},
fields (),
codes {
    let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(IQ4_VALUES.as_ptr().cast()));
    let low = _mm_loadu_si128(p.add(8 + 16 * j).cast());
    let both = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), _mm_srli_epi16::<4>(low));
    (_mm256_shuffle_epi8(table, _mm256_and_si256(both, _mm256_set1_epi8(15))), 0)
});

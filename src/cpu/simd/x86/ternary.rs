//! Row formats of TQ1_0 and TQ2_0: 256 ternary digits with one scale. A code is the digit plus 1.

use super::kquants::{field, half, negated_half, superblock};
use super::quant_row_dot::dot_superblocks;
use super::row_format::{CodeKind, QuantDot, RowFormat, SuperblockFormat, SuperblockScales};
use crate::cpu::simd::packing::PackedColumn;
use crate::tensor::DType;
use std::arch::x86_64::*;

/// The scale of all codes at `p`, and -1 times it for each sub-block.
#[inline(always)]
unsafe fn one_scale(p: *const u8) -> SuperblockScales {
    // SAFETY: the caller guarantees that `p` points to 2 readable bytes, and that the processor has AVX2 and F16C.
    unsafe {
        let ones = _mm256_set1_ps(1.0);
        SuperblockScales { d: half(p), scales: _mm256_set1_epi16(1), m: negated_half(p), mins: [ones; 2] }
    }
}

/// Bytes times three, without carries.
#[inline(always)]
unsafe fn thrice(bytes: __m256i) -> __m256i {
    // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
    // The compiler makes products of sums of bytes, which take vectors of 512 bits with AVX-512.
    unsafe { _mm256_add_epi8(bytes, _mm256_and_si256(_mm256_slli_epi16::<1>(bytes), _mm256_set1_epi8(-2))) }
}

/// The first digits of bytes, which are fractions of 256 in base three: those of three times a byte divided by 256. `bytes` are less 128,
/// for comparisons with sign; three times such a byte is less 128 too.
#[inline(always)]
unsafe fn first_digits(bytes: __m256i) -> __m256i {
    // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
    unsafe {
        // Three times a byte is at least 256 from 86 on, and at least 512 from 171 on: 128 more than -42
        // and 43. A comparison that holds is -1.
        let one = _mm256_cmpgt_epi8(bytes, _mm256_set1_epi8(-43));
        let two = _mm256_cmpgt_epi8(bytes, _mm256_set1_epi8(42));
        _mm256_abs_epi8(_mm256_add_epi8(one, two))
    }
}

superblock!(TQ2_0, sub 32, Unsigned, one_scale true, head (), |p, head, j|
    scales one_scale(p.add(64)),
    fields (),
    codes (field(p.add(32 * (j / 4)), 2 * (j % 4), 3), 0));

superblock!(TQ1_0, sub 16, Unsigned, one_scale true, head (), |p, head, j|
scales one_scale(p.add(52)),
fields (),
codes {
    let less_128 = _mm256_set1_epi8(-128);
    let digits = if j < 5 {
        // Digit j of 32 bytes.
        let mut bytes = _mm256_xor_si256(_mm256_loadu_si256(p.cast()), less_128);
        for _ in 0..j {
            bytes = thrice(bytes);
        }
        bytes
    } else {
        // Digits 0 to 4 of 16 bytes, and digits 0 to 3 of four.
        let bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.add(32).cast()));
        let zero = _mm256_xor_si256(bytes, less_128);
        let one = thrice(zero);
        match j {
            5 => _mm256_blend_epi32::<0xf0>(zero, one),
            6 => _mm256_blend_epi32::<0xf0>(thrice(one), thrice(thrice(one))),
            _ => {
                let four = _mm256_set1_epi32(p.add(48).cast::<i32>().read_unaligned());
                // Word n of the upper half times the n-th power of three: even bytes, then odd ones.
                let powers = _mm256_setr_epi32(0, 0, 0, 0, 0x0001_0001, 0x0003_0003, 0x0009_0009, 0x001b_001b);
                let low = _mm256_and_si256(_mm256_mullo_epi16(four, powers), _mm256_set1_epi16(255));
                let high = _mm256_slli_epi16::<8>(_mm256_mullo_epi16(_mm256_srli_epi16::<8>(four), powers));
                let last = _mm256_xor_si256(_mm256_or_si256(low, high), less_128);
                _mm256_blend_epi32::<0xf0>(thrice(thrice(thrice(one))), last)
            }
        }
    };
    (first_digits(digits), 0)
});

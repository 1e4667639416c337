//! Expansions of rows to 8-bit codes ([`crate::tensor::quant::expand`]) by AVX2, for types for which the compiler does not find the
//! instructions itself: 32 codes at a time, by vectors of grid entries, signs and table look-ups.

use crate::tensor::DType;
use crate::tensor::blocks::{self, Block, FP4_VALUES, IQ4_VALUES};
use crate::tensor::blocks::{BlockIq1M, BlockIq1S, BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3S, BlockIq3Xxs};
use crate::tensor::blocks::{BlockIq4Xs, BlockNvfp4};
use crate::tensor::quant::expand::{Expand, Expanded, expand_superblock};
use crate::tensor::quant::grids::{self, EVEN_SIGNS};
use std::arch::x86_64::*;

/// Expands 256 elements of `B`, as [`expand_superblock`] does.
///
/// # Safety
/// The processor has AVX2, and the function that calls enables it.
#[inline(always)]
pub(super) unsafe fn expand<B: Expand<N>, const N: usize>(bytes: &[u8], out: &mut Expanded) {
    // SAFETY: the caller meets this function's requirements.
    unsafe {
        match (B::DTYPE, bytes.len() == 256 / N * B::DTYPE.block_bytes()) {
            (DType::IQ2_XXS, true) => iq2_xxs(block(bytes), out),
            (DType::IQ2_XS, true) => iq2_xs(block(bytes), out),
            (DType::IQ2_S, true) => iq2_s(block(bytes), out),
            (DType::IQ3_XXS, true) => iq3_xxs(block(bytes), out),
            (DType::IQ3_S, true) => iq3_s(block(bytes), out),
            (DType::IQ1_S, true) => iq1_s(block(bytes), out),
            (DType::IQ1_M, true) => iq1_m(block(bytes), out),
            (DType::IQ4_XS, true) => iq4_xs(block(bytes), out),
            (DType::NVFP4, true) => nvfp4(blocks::blocks(bytes), out),
            _ => expand_superblock::<B, N>(bytes, out),
        }
    }
}

/// The only block.
#[inline(always)]
fn block<B: Block>(bytes: &[u8]) -> &B {
    &blocks::blocks(bytes)[0]
}

/// Four entries of eight bytes.
#[inline(always)]
unsafe fn four_of_eight(entries: [[u8; 8]; 4]) -> __m256i {
    let [a, b, c, d] = entries.map(i64::from_le_bytes);
    // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
    unsafe { _mm256_setr_epi64x(a, b, c, d) }
}

/// Eight entries of four bytes.
#[inline(always)]
unsafe fn eight_of_four(entries: [[u8; 4]; 8]) -> __m256i {
    let [a, b, c, d, e, f, g, h] = entries.map(i32::from_le_bytes);
    // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
    unsafe { _mm256_setr_epi32(a, b, c, d, e, f, g, h) }
}

/// 0xFF in the bytes that are negative, by four times seven bits of signs.
#[inline(always)]
unsafe fn even_signs(word: u32) -> __m256i {
    let [a, b, c, d] = [0, 7, 14, 21].map(|by| EVEN_SIGNS[(word >> by) as usize & 127] as i64);
    // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
    unsafe { _mm256_setr_epi64x(a, b, c, d) }
}

/// 0xFF in byte k for bit k of the word.
#[inline(always)]
unsafe fn byte_signs(word: [u8; 4]) -> __m256i {
    // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
    unsafe {
        let spread = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
        let mask = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
        let bits = _mm256_shuffle_epi8(_mm256_set1_epi32(i32::from_le_bytes(word)), spread);
        _mm256_cmpeq_epi8(_mm256_and_si256(bits, mask), mask)
    }
}

/// Stores 32 codes: `magnitudes` with the signs of a mask.
#[inline(always)]
unsafe fn store_signed(out: &mut Expanded, b: usize, magnitudes: __m256i, signs: __m256i) {
    // SAFETY: the caller guarantees that the processor has AVX2.
    unsafe { store(out, b, _mm256_sub_epi8(_mm256_xor_si256(magnitudes, signs), signs)) }
}

/// Stores codes `32 * b` and following.
#[inline(always)]
unsafe fn store(out: &mut Expanded, b: usize, codes: __m256i) {
    let to = &mut out.codes.as_chunks_mut::<32>().0[b];
    // SAFETY: 32 bytes are read; the caller guarantees that the processor has AVX2.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), codes) }
}

/// Sets both scales of 32 elements.
#[inline(always)]
fn set_scale(out: &mut Expanded, b: usize, scale: f32) {
    out.scales.as_chunks_mut::<2>().0[b] = [scale; 2];
}

/// The sixteen scales `d * (nibble + 0.5) / 4`.
#[inline(always)]
unsafe fn nibble_scales(d: f32, packed: &[u8; 8], out: &mut Expanded) {
    // SAFETY: 8 bytes are read and 16 floats written; the caller guarantees that the processor has AVX2.
    unsafe {
        let both = _mm_loadl_epi64(packed.as_ptr().cast());
        let four = _mm_set1_epi8(15);
        let nibbles = _mm_unpacklo_epi8(_mm_and_si128(both, four), _mm_and_si128(_mm_srli_epi16::<4>(both), four));
        let (factor, half) = (_mm256_set1_ps(d * 0.25), _mm256_set1_ps(0.5));
        for (i, nibbles) in [nibbles, _mm_srli_si128::<8>(nibbles)].into_iter().enumerate() {
            let scales = _mm256_add_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(nibbles)), half);
            _mm256_storeu_ps(out.scales[8 * i..].as_mut_ptr(), _mm256_mul_ps(scales, factor));
        }
    }
}

#[inline(always)]
unsafe fn iq2_xxs(block: &BlockIq2Xxs, out: &mut Expanded) {
    let d = block.d.to_f32() * 0.25;
    for b in 0..8 {
        let (indices, word) = block.indices_and_word(b);
        set_scale(out, b, d * ((word >> 28) as f32 + 0.5));
        // SAFETY: the caller meets this function's requirements.
        unsafe {
            let magnitudes = four_of_eight(indices.map(|i| grids::IQ2_XXS[usize::from(i)]));
            store_signed(out, b, magnitudes, even_signs(word));
        }
    }
}

#[inline(always)]
unsafe fn iq2_xs(block: &BlockIq2Xs, out: &mut Expanded) {
    // SAFETY: the caller meets this function's requirements.
    unsafe {
        nibble_scales(block.d.to_f32(), &block.scales, out);
        for b in 0..8 {
            let words = [0, 1, 2, 3].map(|l| usize::from(u16::from_le_bytes(block.qs[4 * b + l])));
            let [s0, s1, s2, s3] = words.map(|word| EVEN_SIGNS[word >> 9] as i64);
            let magnitudes = four_of_eight(words.map(|word| grids::IQ2_XS[word & 511]));
            store_signed(out, b, magnitudes, _mm256_setr_epi64x(s0, s1, s2, s3));
        }
    }
}

#[inline(always)]
unsafe fn iq2_s(block: &BlockIq2S, out: &mut Expanded) {
    // SAFETY: the caller meets this function's requirements.
    unsafe {
        nibble_scales(block.d.to_f32(), &block.scales, out);
        let (indices, signs) = (block.qs.as_chunks::<4>().0, block.signs.as_chunks::<4>().0);
        for b in 0..8 {
            let high = usize::from(block.qh[b]) << 8;
            let entry = |l: usize| grids::IQ2_S[usize::from(indices[b][l]) | high >> (2 * l) & 0x300];
            store_signed(out, b, four_of_eight([entry(0), entry(1), entry(2), entry(3)]), byte_signs(signs[b]));
        }
    }
}

#[inline(always)]
unsafe fn iq3_xxs(block: &BlockIq3Xxs, out: &mut Expanded) {
    let d = block.d.to_f32() * 0.5;
    for (b, indices) in block.qs.as_chunks::<8>().0.iter().enumerate() {
        let word = u32::from_le_bytes(block.scales_and_signs[b]);
        set_scale(out, b, d * ((word >> 28) as f32 + 0.5));
        // SAFETY: the caller meets this function's requirements.
        unsafe {
            let magnitudes = eight_of_four(indices.map(|i| grids::IQ3_XXS[usize::from(i)]));
            store_signed(out, b, magnitudes, even_signs(word));
        }
    }
}

#[inline(always)]
unsafe fn iq3_s(block: &BlockIq3S, out: &mut Expanded) {
    let d = block.d.to_f32();
    let signs = block.signs.as_chunks::<4>().0;
    for (b, indices) in block.qs.as_chunks::<8>().0.iter().enumerate() {
        let scale = block.scales[b / 2] >> (b % 2 * 4) & 15;
        set_scale(out, b, d * f32::from(1 + 2 * scale));
        let high = usize::from(block.qh[b]) << 8;
        // SAFETY: the caller meets this function's requirements.
        unsafe {
            let entry = |i: usize| grids::IQ3_S[usize::from(indices[i]) | high >> i & 256];
            let entries = [entry(0), entry(1), entry(2), entry(3), entry(4), entry(5), entry(6), entry(7)];
            store_signed(out, b, eight_of_four(entries), byte_signs(signs[b]));
        }
    }
}

/// The code of the shift: entries of [`grids::IQ1`] have 0x88 more.
const fn less(negative: bool) -> u8 {
    if negative { 0x89 } else { 0x87 }
}

#[inline(always)]
unsafe fn iq1_s(block: &BlockIq1S, out: &mut Expanded) {
    let d = block.d.to_f32() * 0.125;
    for (b, indices) in block.qs.as_chunks::<4>().0.iter().enumerate() {
        let word = usize::from(u16::from_le_bytes(block.qh[b]));
        set_scale(out, b, d * (2 * (word >> 12 & 7) + 1) as f32);
        // SAFETY: the caller meets this function's requirements.
        unsafe {
            let entry = |l: usize| grids::IQ1[usize::from(indices[l]) | (word >> (3 * l) & 7) << 8];
            let entries = four_of_eight([entry(0), entry(1), entry(2), entry(3)]);
            store(out, b, _mm256_sub_epi8(entries, _mm256_set1_epi8(less(word >> 15 == 1) as i8)));
        }
    }
}

#[inline(always)]
unsafe fn iq1_m(block: &BlockIq1M, out: &mut Expanded) {
    let d = block.d().to_f32() * 0.125;
    for (s, scale) in out.scales.iter_mut().enumerate() {
        *scale = d * f32::from(2 * block.scale(s) + 1);
    }
    let highs = block.qh.as_chunks::<2>().0;
    for (b, indices) in block.qs.as_chunks::<4>().0.iter().enumerate() {
        let high = usize::from(u16::from_le_bytes(highs[b]));
        // SAFETY: the caller meets this function's requirements.
        unsafe {
            let entry = |l: usize| grids::IQ1[usize::from(indices[l]) | (high >> (4 * l) & 7) << 8];
            let entries = four_of_eight([entry(0), entry(1), entry(2), entry(3)]);
            let less = |l: usize| i64::from_le_bytes([less(high >> (4 * l + 3) & 1 == 1); 8]);
            store(out, b, _mm256_sub_epi8(entries, _mm256_setr_epi64x(less(0), less(1), less(2), less(3))));
        }
    }
}

#[inline(always)]
unsafe fn iq4_xs(block: &BlockIq4Xs, out: &mut Expanded) {
    let d = block.d.to_f32();
    let scales = block.scales();
    for (b, qs) in block.qs.as_chunks::<16>().0.iter().enumerate() {
        set_scale(out, b, d * f32::from(scales[b]));
        // SAFETY: the table and the codes have sixteen bytes each; the caller guarantees that the processor has AVX2.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(IQ4_VALUES.as_ptr().cast()));
            let low = _mm_loadu_si128(qs.as_ptr().cast());
            let both = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), _mm_srli_epi16::<4>(low));
            store(out, b, _mm256_shuffle_epi8(table, _mm256_and_si256(both, _mm256_set1_epi8(15))));
        }
    }
}

#[inline(always)]
unsafe fn nvfp4(blocks: &[BlockNvfp4], out: &mut Expanded) {
    for (i, block) in blocks.iter().enumerate().take(4) {
        for (scale, d) in out.scales[4 * i..].iter_mut().zip(block.d) {
            *scale = BlockNvfp4::unit_of(d);
        }
        for (h, qs) in block.qs.as_chunks::<16>().0.iter().enumerate() {
            // SAFETY: the table and the codes have sixteen bytes each; the caller guarantees that the processor has AVX2.
            unsafe {
                let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(FP4_VALUES.as_ptr().cast()));
                let low = _mm_loadu_si128(qs.as_ptr().cast());
                let high = _mm_srli_epi16::<4>(low);
                // Eight low nibbles, then the high nibbles of the same bytes.
                let (first, second) = (_mm_unpacklo_epi64(low, high), _mm_unpackhi_epi64(low, high));
                let both = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(first), second);
                store(out, 2 * i + h, _mm256_shuffle_epi8(table, _mm256_and_si256(both, _mm256_set1_epi8(15))));
            }
        }
    }
}

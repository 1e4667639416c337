//! Expansions of rows to 8-bit codes ([`crate::tensor::quant::expand`]) by AVX2, for a type for which the compiler does not find the
//! instructions itself.

use crate::tensor::DType;
use crate::tensor::blocks::{self, BlockNvfp4, FP4_VALUES};
use crate::tensor::quant::expand::{Expand, Expanded, expand_superblock};
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
            (DType::NVFP4, true) => nvfp4(blocks::blocks(bytes), out),
            _ => expand_superblock::<B, N>(bytes, out),
        }
    }
}

/// Stores codes `32 * b` and following.
#[inline(always)]
unsafe fn store(out: &mut Expanded, b: usize, codes: __m256i) {
    let to = &mut out.codes.as_chunks_mut::<32>().0[b];
    // SAFETY: 32 bytes are read; the caller guarantees that the processor has AVX2.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), codes) }
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

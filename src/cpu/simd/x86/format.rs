//! What the kernels need to know of a block type, and the ways to multiply codes.
//!
//! Kernels here have no closures around instructions: one that is not inlined would be compiled without them, and call
//! each. Loops whose counters choose instructions are unrolled by [`crate::cpu::simd::unroll`].

use crate::tensor::DType;
use std::arch::x86_64::*;

/// How far ahead of their use rows are asked for: more than memory's latency takes, far less than a cache holds.
pub(super) const AHEAD: usize = 2048;

/// A type whose elements are `scale * code + bias` by sub-block, seen in superblocks of 256 elements.
///
/// # Safety
/// All functions need AVX2, FMA and F16C, and `p` must point to [`Format::BYTES`] readable bytes.
pub(super) trait Format {
    /// The type.
    const DTYPE: DType;

    /// Bytes of 256 elements.
    const BYTES: usize = Self::DTYPE.block_bytes() * (256 / Self::DTYPE.block_len());

    /// Elements of a sub-block: 16 or 32.
    const SUB: usize;

    /// The largest code; codes are 0 and up. `None` when codes are i8 (and there is no bias).
    const TOP: Option<i32>;

    /// Scales and biases. For sub-blocks of 32 the first entry alone, in order; for those of 16 two entries of eight, each in
    /// the order 0 2 4 6 1 3 5 7, so that the halves of vectors are those of blocks of 32.
    unsafe fn scales(p: *const u8) -> [Affine; 2];

    /// The codes of elements `32 * j` and on, in order.
    unsafe fn codes(p: *const u8, j: usize) -> __m256i;
}

/// Scales and biases of eight sub-blocks.
#[derive(Clone, Copy)]
pub(super) struct Affine {
    pub(super) scale: __m256,
    pub(super) bias: __m256,
}

impl Affine {
    /// All the same bias, relative to the scale: codes with an offset.
    #[inline(always)]
    pub(super) unsafe fn offset(scale: __m256, zero: f32) -> Affine {
        // SAFETY: registers only; the caller vouches for the instructions.
        unsafe { Affine { scale, bias: _mm256_mul_ps(scale, _mm256_set1_ps(-zero)) } }
    }

    #[inline(always)]
    pub(super) unsafe fn none() -> Affine {
        // SAFETY: as above.
        unsafe { Affine { scale: _mm256_setzero_ps(), bias: _mm256_setzero_ps() } }
    }
}

/// How products of codes are summed.
///
/// # Safety
/// The functions need the instruction set that the type names.
pub(super) trait Products {
    /// Whether any unsigned byte may meet any signed one, summed in 32 bits at once.
    const EXACT: bool;

    /// `sums[l] + sum of u[4l..4l + 4] * s[4l..4l + 4]`, for `u` up to 128 or exact products.
    unsafe fn add(sums: __m256i, u: __m256i, s: __m256i) -> __m256i;
}

/// AVX2 alone: pairs in 16 bits, which `u` up to 128 cannot overflow, as `s` is at least -127.
pub(super) struct Avx2;

impl Products for Avx2 {
    const EXACT: bool = false;

    #[inline(always)]
    unsafe fn add(sums: __m256i, u: __m256i, s: __m256i) -> __m256i {
        // SAFETY: registers only; the caller vouches for AVX2.
        unsafe { _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1))) }
    }
}

/// AVX512-VNNI with AVX512-VL.
pub(super) struct VnniVl;

impl Products for VnniVl {
    const EXACT: bool = true;

    #[inline(always)]
    unsafe fn add(sums: __m256i, u: __m256i, s: __m256i) -> __m256i {
        // SAFETY: registers only; the caller vouches for the instruction.
        unsafe { _mm256_dpbusd_epi32(sums, u, s) }
    }
}

/// AVX-VNNI: the same instruction where there is no AVX-512.
pub(super) struct Vnni;

impl Products for Vnni {
    const EXACT: bool = true;

    #[inline(always)]
    unsafe fn add(sums: __m256i, u: __m256i, s: __m256i) -> __m256i {
        // SAFETY: as above.
        unsafe { _mm256_dpbusd_avx_epi32(sums, u, s) }
    }
}

/// The same sums by AVX2, to test the kernels that are built on them where the instruction is missing.
#[cfg(test)]
pub(super) struct EmulatedVnni;

#[cfg(test)]
impl Products for EmulatedVnni {
    const EXACT: bool = true;

    #[inline(always)]
    unsafe fn add(sums: __m256i, u: __m256i, s: __m256i) -> __m256i {
        // SAFETY: registers only; the caller vouches for AVX2.
        unsafe {
            let low = _mm256_set1_epi16(0xff);
            let even = _mm256_madd_epi16(_mm256_and_si256(u, low), _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(s)));
            let odd = _mm256_madd_epi16(_mm256_srli_epi16::<8>(u), _mm256_srai_epi16::<8>(s));
            _mm256_add_epi32(sums, _mm256_add_epi32(even, odd))
        }
    }
}

/// The sum of eight lanes.
#[inline(always)]
pub(super) unsafe fn horizontal_sum(x: __m256) -> f32 {
    // SAFETY: registers only; the caller vouches for AVX2.
    unsafe {
        let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
    }
}

//! Row formats: decoding of block types in place, and the instructions that multiply codes.
//!
//! These kernels use no closures around instructions: a closure that is not inlined is compiled without them, and then calls a
//! function for each. Loops whose counters select instructions are unrolled by [`crate::cpu::simd::unroll`].

use crate::tensor::DType;
use std::arch::x86_64::*;

/// Software prefetch distance of rows in bytes: longer than memory latency needs, far smaller than a cache.
pub(super) const PREFETCH_DISTANCE: usize = 2048;

/// A block type in place. Its elements are `scale * code + bias` with scale and bias per sub-block; blocks are read in
/// superblocks of 256 elements.
///
/// # Safety
/// All functions need AVX2, FMA and F16C, and `p` must point to [`RowFormat::BYTES`] readable bytes.
pub(super) trait RowFormat {
    /// The type.
    const DTYPE: DType;

    /// Bytes of 256 elements.
    const BYTES: usize = Self::DTYPE.block_bytes() * (256 / Self::DTYPE.block_len());

    /// Elements of a sub-block: 16 or 32.
    const SUB: usize;

    /// The largest code, for unsigned codes. `None` for i8 codes, which have no bias.
    const TOP: Option<i32>;

    /// Scales and biases. Sub-blocks of 32 use only the first entry, in order. Sub-blocks of 16 use two entries of eight, each
    /// in the order 0 2 4 6 1 3 5 7, so that each half of a vector belongs to one half of the blocks of 32.
    unsafe fn scales(p: *const u8) -> [Affine; 2];

    /// The codes of elements `32 * j` and following, in order.
    unsafe fn codes(p: *const u8, j: usize) -> __m256i;
}

/// Scales and biases of eight sub-blocks.
#[derive(Clone, Copy)]
pub(super) struct Affine {
    pub(super) scale: __m256,
    pub(super) bias: __m256,
}

impl Affine {
    /// The biases of codes with a zero offset: `-zero * scale`.
    #[inline(always)]
    pub(super) unsafe fn offset(scale: __m256, zero: f32) -> Affine {
        // SAFETY: registers only; the caller vouches for the instructions.
        unsafe { Affine { scale, bias: _mm256_mul_ps(scale, _mm256_set1_ps(-zero)) } }
    }

    /// Zeros, for the entry that sub-blocks of 32 do not use.
    #[inline(always)]
    pub(super) unsafe fn zero() -> Affine {
        // SAFETY: as above.
        unsafe { Affine { scale: _mm256_setzero_ps(), bias: _mm256_setzero_ps() } }
    }
}

/// A dot-product instruction for codes.
///
/// # Safety
/// The functions need the instruction set that the type names.
pub(super) trait QuantDot {
    /// Whether products of any unsigned byte with any signed byte are accumulated in 32 bits.
    const I32_DOT: bool;

    /// `sums[l] + sum of u[4l..4l + 4] * s[4l..4l + 4]`; without `I32_DOT` for `u` up to 128 only.
    unsafe fn add(sums: __m256i, u: __m256i, s: __m256i) -> __m256i;
}

/// AVX2 without VNNI: pairs of products in 16 bits. `u` up to 128 cannot overflow them, as `s` is at least -127.
pub(super) struct Avx2;

impl QuantDot for Avx2 {
    const I32_DOT: bool = false;

    #[inline(always)]
    unsafe fn add(sums: __m256i, u: __m256i, s: __m256i) -> __m256i {
        // SAFETY: registers only; the caller vouches for AVX2.
        unsafe { _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1))) }
    }
}

/// AVX512-VNNI with AVX512-VL.
pub(super) struct VnniVl;

impl QuantDot for VnniVl {
    const I32_DOT: bool = true;

    #[inline(always)]
    unsafe fn add(sums: __m256i, u: __m256i, s: __m256i) -> __m256i {
        // SAFETY: registers only; the caller vouches for the instruction.
        unsafe { _mm256_dpbusd_epi32(sums, u, s) }
    }
}

/// AVX-VNNI: the same instruction on processors without AVX-512.
pub(super) struct Vnni;

impl QuantDot for Vnni {
    const I32_DOT: bool = true;

    #[inline(always)]
    unsafe fn add(sums: __m256i, u: __m256i, s: __m256i) -> __m256i {
        // SAFETY: as above.
        unsafe { _mm256_dpbusd_avx_epi32(sums, u, s) }
    }
}

/// VNNI's results computed by AVX2: tests the VNNI kernels on processors without the instruction.
#[cfg(test)]
pub(super) struct EmulatedVnni;

#[cfg(test)]
impl QuantDot for EmulatedVnni {
    const I32_DOT: bool = true;

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

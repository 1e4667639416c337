//! The attention GEMM kernels for AVX2 (vectors of 8 floats) and AVX-512 (vectors of 16 floats).
//!
//! A *quarter* is a 128-bit part of a vector of AVX-512: four floats.

use super::register_tiles::attention_gemm_kernels;
use std::arch::x86_64::*;

attention_gemm_kernels!(
    avx2,
    "avx2,fma,f16c",
    lanes: 8,
    vector: __m256,
    zero: _mm256_setzero_ps,
    load: _mm256_loadu_ps,
    store: _mm256_storeu_ps,
    splat: _mm256_set1_ps,
    fma: _mm256_fmadd_ps,
    load_halves: load_8_halves,
    prefetch: prefetch,
    horizontal_sums: horizontal_sums_of_8,
    dots: 2,
    sums: 2,
    column_vectors: 2
);

attention_gemm_kernels!(
    avx512,
    "avx512f",
    lanes: 16,
    vector: __m512,
    zero: _mm512_setzero_ps,
    load: _mm512_loadu_ps,
    store: _mm512_storeu_ps,
    splat: _mm512_set1_ps,
    fma: _mm512_fmadd_ps,
    load_halves: load_16_halves,
    prefetch: prefetch,
    horizontal_sums: horizontal_sums_of_16,
    dots: 4,
    sums: 4,
    column_vectors: 4
);

/// Software prefetch of the cache line at `p`; any address is allowed.
#[inline(always)]
fn prefetch(p: *const u8) {
    // SAFETY: the instruction, which every x86-64 processor has, is a hint: it neither faults nor changes registers or memory.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
}

/// Loads 8 f16 as f32.
///
/// # Safety
/// `p` points to 16 readable bytes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load_8_halves(p: *const u8) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
}

/// Loads 16 f16 as f32.
///
/// # Safety
/// `p` points to 32 readable bytes.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_16_halves(p: *const u8) -> __m512 {
    // SAFETY: as the caller promises.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
}

/// The sum of the lanes of each vector.
#[inline]
#[target_feature(enable = "avx2")]
fn horizontal_sums_of_8<const R: usize, const C: usize>(sums: [[__m256; C]; R]) -> [[f32; C]; R] {
    let mut totals = [[0.0; C]; R];
    for r in 0..R {
        for c in 0..C {
            let v = sums[r][c];
            let half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
            totals[r][c] = _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
        }
    }
    totals
}

/// The sum of the lanes of each vector. 4 by 4 vectors are reduced together, which takes a third of the instructions.
#[inline]
#[target_feature(enable = "avx512f")]
fn horizontal_sums_of_16<const R: usize, const C: usize>(sums: [[__m512; C]; R]) -> [[f32; C]; R] {
    let mut totals = [[0.0; C]; R];
    if R == 4 && C == 4 {
        let mut lines = [_mm512_setzero_ps(); 4];
        for r in 0..R {
            lines[r] = reduce_within_quarters([sums[r][0], sums[r][1], sums[r][2], sums[r][3]]);
        }
        let mut flat = [0.0; 16];
        // SAFETY: 16 floats.
        unsafe { _mm512_storeu_ps(flat.as_mut_ptr(), reduce_across_quarters(lines)) };
        for r in 0..R {
            totals[r].copy_from_slice(&flat[4 * r..4 * r + 4]);
        }
    } else {
        for r in 0..R {
            for c in 0..C {
                totals[r][c] = _mm512_reduce_add_ps(sums[r][c]);
            }
        }
    }
    totals
}

/// Sums the four lanes of each quarter. Quarter q of the result is
/// `[sum of quarter q of a, of quarter q of b, of quarter q of c, of quarter q of d]`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu::simd) fn reduce_within_quarters([a, b, c, d]: [__m512; 4]) -> __m512 {
    let (low, high) = (_mm512_castps_pd(add_lane_pairs(a, b)), _mm512_castps_pd(add_lane_pairs(c, d)));
    let first = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
    _mm512_add_ps(first, _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)))
}

/// Sums the four quarters of each vector, lane by lane: quarter 0 of the result is the sum of the quarters of `a`, quarter 1
/// that of `b`, and so on. Applied to four results of [`reduce_within_quarters`], it gives the horizontal sums of their sixteen
/// vectors in order.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu::simd) fn reduce_across_quarters([a, b, c, d]: [__m512; 4]) -> __m512 {
    add_quarter_pairs(add_quarter_pairs(a, b), add_quarter_pairs(c, d))
}

/// Adds lanes in pairs within each quarter: `[a0 + a2, b0 + b2, a1 + a3, b1 + b3]`, where `a0` to `a3` are the lanes of
/// that quarter of `a`.
#[inline]
#[target_feature(enable = "avx512f")]
fn add_lane_pairs(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b))
}

/// Adds neighbouring quarters: the result has the quarters `[a0 + a1, a2 + a3, b0 + b1, b2 + b3]`, where `a0` to `a3` are the
/// quarters of `a`.
#[inline]
#[target_feature(enable = "avx512f")]
fn add_quarter_pairs(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b))
}

//! Vectors of 8 or 16 floats.

use super::tiles::vector_products;
use std::arch::x86_64::*;

vector_products!(
    avx2,
    "avx2,fma,f16c",
    8,
    __m256,
    _mm256_setzero_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_set1_ps,
    _mm256_fmadd_ps,
    halves_of_8,
    totals_of_8,
    2,
    2,
    2
);

vector_products!(
    avx512,
    "avx512f",
    16,
    __m512,
    _mm512_setzero_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_set1_ps,
    _mm512_fmadd_ps,
    halves_of_16,
    totals_of_16,
    4,
    4,
    4
);

/// # Safety
/// 16 bytes lie there.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn halves_of_8(p: *const u8) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
}

/// # Safety
/// 32 bytes lie there.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn halves_of_16(p: *const u8) -> __m512 {
    // SAFETY: as the caller promises.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
}

/// The sum of the lanes of each vector.
#[inline]
#[target_feature(enable = "avx2")]
fn totals_of_8<const R: usize, const C: usize>(sums: [[__m256; C]; R]) -> [[f32; C]; R] {
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

/// The sum of the lanes of each vector; of 4 by 4 together, which takes a third of the steps.
#[inline]
#[target_feature(enable = "avx512f")]
fn totals_of_16<const R: usize, const C: usize>(sums: [[__m512; C]; R]) -> [[f32; C]; R] {
    let mut totals = [[0.0; C]; R];
    if R == 4 && C == 4 {
        let mut lines = [_mm512_setzero_ps(); 4];
        for r in 0..R {
            lines[r] = quarter_sums([sums[r][0], sums[r][1], sums[r][2], sums[r][3]]);
        }
        let mut flat = [0.0; 16];
        // SAFETY: 16 floats.
        unsafe { _mm512_storeu_ps(flat.as_mut_ptr(), sum_quarters(lines)) };
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

/// In each quarter the sum of that quarter of the first vector, of the second, the third and the fourth.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu::simd) fn quarter_sums([a, b, c, d]: [__m512; 4]) -> __m512 {
    let (low, high) = (_mm512_castps_pd(pairs(a, b)), _mm512_castps_pd(pairs(c, d)));
    let first = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
    _mm512_add_ps(first, _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)))
}

/// The sums of the quarters of four vectors, side by side: with [`quarter_sums`] the totals of sixteen vectors in order.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu::simd) fn sum_quarters([a, b, c, d]: [__m512; 4]) -> __m512 {
    quarters(quarters(a, b), quarters(c, d))
}

/// In each quarter `[a0 + a2, b0 + b2, a1 + a3, b1 + b3]`.
#[inline]
#[target_feature(enable = "avx512f")]
fn pairs(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b))
}

/// Quarters `[a0 + a1, a2 + a3, b0 + b1, b2 + b3]`.
#[inline]
#[target_feature(enable = "avx512f")]
fn quarters(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b))
}

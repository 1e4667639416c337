//! Products of F32, F16 and BF16 rows, where they lie, with columns of f32.

use super::format::{AHEAD, horizontal_sum};
use crate::cpu::simd::Dot;
use crate::tensor::DType;
use std::arch::x86_64::*;

/// A float type, eight elements at a time.
trait Float {
    const BYTES: usize;

    /// Eight elements as f32.
    ///
    /// # Safety
    /// AVX2 and F16C; eight elements at `p`.
    unsafe fn load(p: *const u8) -> __m256;
}

struct F32;
struct F16;
struct Bf16;

impl Float for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m256 {
        // SAFETY: as the caller vouches.
        unsafe { _mm256_loadu_ps(p.cast()) }
    }
}

impl Float for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m256 {
        // SAFETY: as the caller vouches.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
}

impl Float for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m256 {
        // SAFETY: as the caller vouches.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))) }
    }
}

/// The products of a float type's rows; they need AVX2, FMA and F16C.
pub(super) fn dot_of(dtype: DType) -> Option<Dot> {
    match dtype {
        DType::F32 => Some(dot::<F32>),
        DType::F16 => Some(dot::<F16>),
        DType::BF16 => Some(dot::<Bf16>),
        _ => None,
    }
}

/// # Safety
/// AVX2, FMA and F16C; columns of `padded` f32, as many as the rows have elements with their padding; room in `out` for
/// all sums, `out[c * rows.len() + r]`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot<F: Float>(rows: &[&[u8]], columns: &[&[u8]], padded: usize, out: &mut [f32]) {
    let mut done = 0;
    while done < columns.len() {
        let out = &mut out[done * rows.len()..];
        // SAFETY: as the caller vouches.
        unsafe {
            done += match columns[done..] {
                [a, b, c, d, ..] => dot_columns::<F, 4>(rows, [a, b, c, d], padded, out),
                [a, b, c] => dot_columns::<F, 3>(rows, [a, b, c], padded, out),
                [a, b] => dot_columns::<F, 2>(rows, [a, b], padded, out),
                [a] => dot_columns::<F, 1>(rows, [a], padded, out),
                [] => 1,
            };
        }
    }
}

/// # Safety
/// As [`dot`].
#[inline(always)]
unsafe fn dot_columns<F: Float, const C: usize>(
    rows: &[&[u8]],
    columns: [&[u8]; C],
    padded: usize,
    out: &mut [f32],
) -> usize {
    // SAFETY: eight number i of a row meets elements 8 i and on of the columns, which are padded to whole eights; the last
    // one may be a copy, filled up with zeros.
    unsafe {
        for r in 0..rows.len() {
            let row = rows[r];
            let (whole, mut last) = (row.len() / (8 * F::BYTES), [0; 32]);
            let rest = &row[8 * F::BYTES * whole..];
            if !rest.is_empty() {
                last[..rest.len()].copy_from_slice(rest);
            }
            // Two sums each, so that one product need not wait for the one before.
            let mut sums = [[_mm256_setzero_ps(); 2]; C];
            for i in 0..whole / 2 {
                _mm_prefetch::<_MM_HINT_T0>(row.as_ptr().wrapping_add(16 * F::BYTES * i + AHEAD).cast());
                for h in 0..2 {
                    let x = F::load(row.as_ptr().add(8 * F::BYTES * (2 * i + h)));
                    for c in 0..C {
                        let y = _mm256_loadu_ps(columns[c].as_ptr().cast::<f32>().add(16 * i + 8 * h));
                        sums[c][h] = _mm256_fmadd_ps(x, y, sums[c][h]);
                    }
                }
            }
            for i in whole / 2 * 2..padded / 8 {
                let x = F::load(if i < whole { row.as_ptr().add(8 * F::BYTES * i) } else { last.as_ptr() });
                for c in 0..C {
                    let y = _mm256_loadu_ps(columns[c].as_ptr().cast::<f32>().add(8 * i));
                    sums[c][0] = _mm256_fmadd_ps(x, y, sums[c][0]);
                }
            }
            for c in 0..C {
                out[c * rows.len() + r] = horizontal_sum(_mm256_add_ps(sums[c][0], sums[c][1]));
            }
        }
    }
    C
}

//! Row dot products: F32, F16 and BF16 rows in place with columns of f32, and BF16 rows with columns of bf16.

use super::row_format::PREFETCH_DISTANCE;
use super::simd_ops::as_bf16;
use crate::cpu::panel::PANEL_ROWS;
use crate::cpu::simd::RowDotFn;
use crate::cpu::simd::attention_gemm::x86::{reduce_across_quarters, reduce_within_quarters};
use crate::tensor::DType;
use std::arch::x86_64::*;

/// A float type.
trait Float {
    const BYTES: usize;

    /// Eight elements as f32.
    ///
    /// # Safety
    /// The processor has AVX2 and F16C; `p` points to eight elements.
    unsafe fn load(p: *const u8) -> __m256;

    /// Sixteen elements as f32. Elements outside the mask are zero and are not read (tail masking).
    ///
    /// # Safety
    /// The processor has AVX-512 F, BW and VL; `p` points to the elements of the mask.
    unsafe fn load_16(p: *const u8, mask: __mmask16) -> __m512;
}

struct F32;
struct F16;
struct Bf16;

impl Float for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m256 {
        // SAFETY: the caller meets this function's requirements.
        unsafe { _mm256_loadu_ps(p.cast()) }
    }

    #[inline(always)]
    unsafe fn load_16(p: *const u8, mask: __mmask16) -> __m512 {
        // SAFETY: the caller meets this function's requirements.
        unsafe { _mm512_maskz_loadu_ps(mask, p.cast()) }
    }
}

impl Float for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m256 {
        // SAFETY: the caller meets this function's requirements.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }

    #[inline(always)]
    unsafe fn load_16(p: *const u8, mask: __mmask16) -> __m512 {
        // SAFETY: the caller meets this function's requirements.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p.cast())) }
    }
}

impl Float for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m256 {
        // SAFETY: the caller meets this function's requirements.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))) }
    }

    #[inline(always)]
    unsafe fn load_16(p: *const u8, mask: __mmask16) -> __m512 {
        // SAFETY: the caller meets this function's requirements.
        unsafe {
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(
                mask,
                p.cast(),
            ))))
        }
    }
}

/// The row dot product of a float type. It needs AVX2, FMA and F16C.
pub(super) fn dot_of(dtype: DType) -> Option<RowDotFn> {
    match dtype {
        DType::F32 => Some(dot::<F32>),
        DType::F16 => Some(dot::<F16>),
        DType::BF16 => Some(dot::<Bf16>),
        _ => None,
    }
}

/// As [`dot_of`], with AVX-512, sixteen rows at a time. It needs AVX-512 F, BW and VL too.
pub(super) fn avx512_dot_of(dtype: DType) -> Option<RowDotFn> {
    match dtype {
        DType::F32 => Some(avx512_dot::<F32>),
        DType::F16 => Some(avx512_dot::<F16>),
        DType::BF16 => Some(avx512_dot::<Bf16>),
        _ => None,
    }
}

/// As [`avx512_dot_of`], for BF16 rows with columns of bf16. It needs AVX512-BF16 too.
pub(super) fn bf16_dot_of(dtype: DType) -> Option<RowDotFn> {
    (dtype == DType::BF16).then_some(bf16_dot)
}

/// Row dot products with f32 columns, up to four columns at a time: `out[c * rows.len() + r]`.
///
/// # Safety
/// The processor has AVX2, FMA and F16C. Each column has `padded` f32: the rows' number of elements, rounded up to whole
/// vectors of eight. `out` has space for all sums.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot<F: Float>(rows: &[&[u8]], columns: &[&[u8]], padded: usize, out: &mut [f32]) {
    let mut done = 0;
    while done < columns.len() {
        let out = &mut out[done * rows.len()..];
        // At least eight independent accumulators, so that an FMA need not wait for the previous one.
        // SAFETY: the caller meets this function's requirements.
        unsafe {
            done += match columns[done..] {
                [a, b, c, d, ..] => dot_columns::<F, 2, 1, 4>(rows, [a, b, c, d], padded, out),
                [a, b, c] => dot_columns::<F, 3, 1, 3>(rows, [a, b, c], padded, out),
                [a, b] => dot_columns::<F, 4, 1, 2>(rows, [a, b], padded, out),
                [a] => dot_columns::<F, 4, 2, 1>(rows, [a], padded, out),
                [] => 1,
            };
        }
    }
}

/// As [`dot`], for `C` columns; returns `C`. Computes `R` rows at a time (at most four), with `H` accumulators for each sum (at
/// most two).
///
/// # Safety
/// As [`dot`].
#[inline(always)]
unsafe fn dot_columns<F: Float, const R: usize, const H: usize, const C: usize>(
    rows: &[&[u8]],
    columns: [&[u8]; C],
    padded: usize,
    out: &mut [f32],
) -> usize {
    let y = columns.map(|column| column.as_ptr().cast::<f32>());
    // The rows of a matrix lie a constant stride apart.
    let row_stride = rows.get(1).map_or(0, |row| row.as_ptr().addr().wrapping_sub(rows[0].as_ptr().addr()));
    for (group, group_rows) in rows.chunks(R).enumerate() {
        let first = group * R;
        // A partial group repeats its last row.
        let mut x = [group_rows[0].as_ptr(); R];
        for r in 0..R {
            x[r] = group_rows[r.min(group_rows.len() - 1)].as_ptr();
        }
        let whole = group_rows[0].len() / (8 * F::BYTES);
        // Short rows may lie far apart: then the prefetch goes to one of the next rows, not after this row.
        let ahead = match PREFETCH_DISTANCE / group_rows[0].len().max(1) {
            0 => PREFETCH_DISTANCE,
            n => row_stride.wrapping_mul(n.clamp(R, 2 * PANEL_ROWS)),
        };
        // SAFETY: vector i (eight elements) of a row is multiplied by elements 8 i and following of the columns, which are
        // padded to whole vectors. The last vector may be a copy of the tail, filled up with zeros.
        unsafe {
            let mut sums = [[[_mm256_setzero_ps(); H]; R]; C];
            for i in 0..whole / 2 {
                for r in 0..R {
                    _mm_prefetch::<_MM_HINT_T0>(x[r].wrapping_add(16 * F::BYTES * i + ahead).cast());
                }
                add_eight::<F, R, H, C>(&mut sums, 0, x, y, 2 * i);
                add_eight::<F, R, H, C>(&mut sums, H - 1, x, y, 2 * i + 1);
            }
            if whole % 2 == 1 {
                add_eight::<F, R, H, C>(&mut sums, 0, x, y, whole - 1);
            }
            if whole < padded / 8 {
                let mut last = [[0; 32]; R];
                for r in 0..R {
                    let rest = &group_rows[r.min(group_rows.len() - 1)][8 * F::BYTES * whole..];
                    last[r][..rest.len()].copy_from_slice(rest);
                }
                let last = last.each_ref().map(|last| last.as_ptr());
                add_eight::<F, R, H, C>(&mut sums, 0, last, y.map(|y| y.add(8 * whole)), 0);
            }
            // Reduces four sums together: all rows of one column, or two rows of two columns.
            let columns_together = 4 / R.next_power_of_two();
            for c in (0..C).step_by(columns_together) {
                let mut four = [_mm256_setzero_ps(); 4];
                for i in 0..columns_together.min(C - c) {
                    for r in 0..R {
                        let h = sums[c + i][r];
                        four[4 / columns_together * i + r] = if H == 1 { h[0] } else { _mm256_add_ps(h[0], h[H - 1]) };
                    }
                }
                let mut totals = [0.0; 4];
                _mm_storeu_ps(totals.as_mut_ptr(), four_horizontal_sums(four));
                for i in 0..columns_together.min(C - c) {
                    let out = &mut out[(c + i) * rows.len() + first..][..group_rows.len()];
                    let totals: [f32; R] = std::array::from_fn(|r| totals[4 / columns_together * i + r]);
                    // With a length known at compile time the copy needs no call.
                    match out.as_mut_array::<R>() {
                        Some(out) => *out = totals,
                        None => out.copy_from_slice(&totals[..out.len()]),
                    }
                }
            }
        }
    }
    C
}

/// Adds the products of vector `i` of each row and column to accumulator `h` of their sums.
///
/// # Safety
/// The instructions of [`dot`]; all of `x` and `y` have this vector.
#[inline(always)]
unsafe fn add_eight<F: Float, const R: usize, const H: usize, const C: usize>(
    sums: &mut [[[__m256; H]; R]; C],
    h: usize,
    x: [*const u8; R],
    y: [*const f32; C],
    i: usize,
) {
    // SAFETY: the caller meets this function's requirements.
    unsafe {
        let y = y.map(|y| _mm256_loadu_ps(y.add(8 * i)));
        for r in 0..R {
            let x = F::load(x[r].add(8 * F::BYTES * i));
            for c in 0..C {
                sums[c][r][h] = _mm256_fmadd_ps(x, y[c], sums[c][r][h]);
            }
        }
    }
}

/// The sums of the lanes of each vector.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn four_horizontal_sums([a, b, c, d]: [__m256; 4]) -> __m128 {
    // SAFETY: the caller meets this function's requirements.
    unsafe {
        let low = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
        let high = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d)));
        let even = _mm256_castpd_ps(_mm256_unpacklo_pd(low, high));
        let sums = _mm256_add_ps(even, _mm256_castpd_ps(_mm256_unpackhi_pd(low, high)));
        _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums))
    }
}

/// How AVX-512 multiplies rows of a float type by columns.
///
/// # Safety
/// The functions need AVX-512 F, BW and VL; the functions of [`Bf16Pairs`] need AVX512-BF16 too. Pointers point to the elements of the
/// mask; elements outside the mask count as zero and are not read.
trait Avx512FloatDot {
    /// Bytes of an element of a row, and of a column.
    const BYTES: [usize; 2];
    /// Elements of a vector.
    const STEP: usize;

    unsafe fn row(p: *const u8, mask: u32) -> __m512;
    unsafe fn column(p: *const u8, mask: u32) -> __m512;
    /// `sums` plus the products of one vector.
    unsafe fn add(sums: __m512, row: __m512, column: __m512) -> __m512;
}

impl<F: Float> Avx512FloatDot for F {
    const BYTES: [usize; 2] = [F::BYTES, 4];
    const STEP: usize = 16;

    #[inline(always)]
    unsafe fn row(p: *const u8, mask: u32) -> __m512 {
        // SAFETY: the caller meets this function's requirements.
        unsafe { F::load_16(p, mask as u16) }
    }

    #[inline(always)]
    unsafe fn column(p: *const u8, mask: u32) -> __m512 {
        // SAFETY: the caller meets this function's requirements.
        unsafe { F32::load_16(p, mask as u16) }
    }

    #[inline(always)]
    unsafe fn add(sums: __m512, row: __m512, column: __m512) -> __m512 {
        // SAFETY: the caller meets this function's requirements.
        unsafe { _mm512_fmadd_ps(row, column, sums) }
    }
}

/// BF16 rows with columns of bf16, two products per lane.
struct Bf16Pairs;

impl Avx512FloatDot for Bf16Pairs {
    const BYTES: [usize; 2] = [2; 2];
    const STEP: usize = 32;

    #[inline(always)]
    unsafe fn row(p: *const u8, mask: u32) -> __m512 {
        // SAFETY: the caller meets this function's requirements.
        unsafe { _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, p.cast())) }
    }

    #[inline(always)]
    unsafe fn column(p: *const u8, mask: u32) -> __m512 {
        // SAFETY: the caller meets this function's requirements.
        unsafe { Self::row(p, mask) }
    }

    #[inline(always)]
    unsafe fn add(sums: __m512, row: __m512, column: __m512) -> __m512 {
        // SAFETY: the caller meets this function's requirements.
        unsafe { _mm512_dpbf16_ps(sums, as_bf16(_mm512_castps_si512(row)), as_bf16(_mm512_castps_si512(column))) }
    }
}

/// As [`dot`], with AVX-512.
///
/// # Safety
/// As [`dot`], and the processor has AVX-512 F, BW and VL.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl")]
unsafe fn avx512_dot<F: Float>(rows: &[&[u8]], columns: &[&[u8]], _: usize, out: &mut [f32]) {
    // SAFETY: the caller meets this function's requirements.
    unsafe { avx512_rows::<F>(rows, columns, out) }
}

/// As [`avx512_dot`], for BF16 rows with columns of bf16.
///
/// # Safety
/// As [`avx512_dot`], and the processor has AVX512-BF16; each column has `padded` bf16.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn bf16_dot(rows: &[&[u8]], columns: &[&[u8]], _: usize, out: &mut [f32]) {
    // SAFETY: the caller meets this function's requirements.
    unsafe { avx512_rows::<Bf16Pairs>(rows, columns, out) }
}

/// All columns, up to four at a time.
///
/// # Safety
/// As [`avx512_dot`], or [`bf16_dot`].
#[inline(always)]
unsafe fn avx512_rows<P: Avx512FloatDot>(rows: &[&[u8]], columns: &[&[u8]], out: &mut [f32]) {
    let mut done = 0;
    while done < columns.len() {
        let out = &mut out[done * rows.len()..];
        // SAFETY: the caller meets this function's requirements.
        unsafe {
            done += match columns[done..] {
                [a, b, c, d, ..] => avx512_columns::<P, 4>(rows, [a, b, c, d], out),
                [a, b, ..] => avx512_columns::<P, 2>(rows, [a, b], out),
                [a] => avx512_columns::<P, 1>(rows, [a], out),
                [] => 1,
            };
        }
    }
}

/// `C` columns, sixteen rows at a time; returns `C`.
///
/// # Safety
/// As [`avx512_rows`].
#[inline(always)]
unsafe fn avx512_columns<P: Avx512FloatDot, const C: usize>(
    rows: &[&[u8]],
    columns: [&[u8]; C],
    out: &mut [f32],
) -> usize {
    let columns = columns.map(<[u8]>::as_ptr);
    for (group, group_rows) in rows.chunks(PANEL_ROWS).enumerate() {
        let k = group_rows[0].len() / P::BYTES[0];
        // SAFETY: uses registers only; the caller guarantees that the processor has the instructions.
        let mut partial_sums = [[unsafe { _mm512_setzero_ps() }; 4]; C];
        for q in 0..group_rows.len().div_ceil(4) {
            // A partial group repeats its last row.
            let row = |r: usize| group_rows[(4 * q + r).min(group_rows.len() - 1)].as_ptr();
            let quad = [row(0), row(1), row(2), row(3)];
            // Short rows may lie far apart: then the prefetch goes to the rows of the next group.
            let next = rows.get((group + 1) * PANEL_ROWS + 4 * q).filter(|row| row.len() <= PREFETCH_DISTANCE);
            let ahead = next.map_or(PREFETCH_DISTANCE, |row| row.as_ptr().addr().wrapping_sub(quad[0].addr()));
            // SAFETY: rows and columns have the elements of a step from i on, or the elements of the mask.
            unsafe {
                let mut sums = [[_mm512_setzero_ps(); 4]; C];
                for i in (0..k / P::STEP * P::STEP).step_by(P::STEP) {
                    add_products::<P, C>(&mut sums, quad, columns, i, u32::MAX, ahead);
                }
                if k % P::STEP > 0 {
                    add_products::<P, C>(
                        &mut sums,
                        quad,
                        columns,
                        k / P::STEP * P::STEP,
                        (1 << (k % P::STEP)) - 1,
                        ahead,
                    );
                }
                for c in 0..C {
                    partial_sums[c][q] = reduce_within_quarters(sums[c]);
                }
            }
        }
        for c in 0..C {
            let (mut totals, n) = ([0.0; PANEL_ROWS], group_rows.len());
            // SAFETY: sixteen floats.
            unsafe { _mm512_storeu_ps(totals.as_mut_ptr(), reduce_across_quarters(partial_sums[c])) };
            out[c * rows.len() + group * PANEL_ROWS..][..n].copy_from_slice(&totals[..n]);
        }
    }
    C
}

/// Adds the products of one step, from element `i` on, of four rows with all columns to `sums`. The mask selects the elements.
/// Prefetches the rows `ahead` bytes further.
///
/// # Safety
/// As [`avx512_rows`]; rows and columns have these elements.
#[inline(always)]
unsafe fn add_products<P: Avx512FloatDot, const C: usize>(
    sums: &mut [[__m512; 4]; C],
    rows: [*const u8; 4],
    columns: [*const u8; C],
    i: usize,
    mask: u32,
    ahead: usize,
) {
    let [row_bytes, column_bytes] = P::BYTES;
    // SAFETY: the caller meets this function's requirements.
    unsafe {
        let mut y = [_mm512_setzero_ps(); C];
        for c in 0..C {
            y[c] = P::column(columns[c].add(column_bytes * i), mask);
        }
        for r in 0..4 {
            _mm_prefetch::<_MM_HINT_T0>(rows[r].wrapping_add(row_bytes * i + ahead).cast());
            let x = P::row(rows[r].add(row_bytes * i), mask);
            for c in 0..C {
                sums[c][r] = P::add(sums[c][r], x, y[c]);
            }
        }
    }
}

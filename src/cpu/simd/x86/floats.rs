//! Products of F32, F16 and BF16 rows, where they lie, with columns of f32, and of BF16 rows with columns of bf16.

use super::format::AHEAD;
use super::lanes::as_bf16;
use crate::cpu::simd::Dot;
use crate::cpu::simd::vec::x86::{quarter_sums, sum_quarters};
use crate::cpu::strip::STRIP;
use crate::tensor::DType;
use std::arch::x86_64::*;

/// A float type.
trait Float {
    const BYTES: usize;

    /// Eight elements as f32.
    ///
    /// # Safety
    /// AVX2 and F16C; eight elements at `p`.
    unsafe fn load(p: *const u8) -> __m256;

    /// Sixteen elements as f32, of which those that the mask leaves out are zeros and need not exist.
    ///
    /// # Safety
    /// AVX-512 F, BW and VL; the others at `p`.
    unsafe fn load_wide(p: *const u8, mask: __mmask16) -> __m512;
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

    #[inline(always)]
    unsafe fn load_wide(p: *const u8, mask: __mmask16) -> __m512 {
        // SAFETY: as the caller vouches.
        unsafe { _mm512_maskz_loadu_ps(mask, p.cast()) }
    }
}

impl Float for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m256 {
        // SAFETY: as the caller vouches.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }

    #[inline(always)]
    unsafe fn load_wide(p: *const u8, mask: __mmask16) -> __m512 {
        // SAFETY: as the caller vouches.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p.cast())) }
    }
}

impl Float for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m256 {
        // SAFETY: as the caller vouches.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))) }
    }

    #[inline(always)]
    unsafe fn load_wide(p: *const u8, mask: __mmask16) -> __m512 {
        // SAFETY: as the caller vouches.
        unsafe {
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(
                mask,
                p.cast(),
            ))))
        }
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

/// As [`dot_of`], of sixteen rows at a time; they need AVX-512 F, BW and VL too.
pub(super) fn wide_dot_of(dtype: DType) -> Option<Dot> {
    match dtype {
        DType::F32 => Some(wide_dot::<F32>),
        DType::F16 => Some(wide_dot::<F16>),
        DType::BF16 => Some(wide_dot::<Bf16>),
        _ => None,
    }
}

/// As [`wide_dot_of`], of BF16 rows with columns of bf16; they need AVX512-BF16 too.
pub(super) fn bf16_dot_of(dtype: DType) -> Option<Dot> {
    (dtype == DType::BF16).then_some(bf16_dot)
}

/// # Safety
/// AVX2, FMA and F16C; columns of `padded` f32, as many as the rows have elements with their padding; room in `out` for
/// all sums, `out[c * rows.len() + r]`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot<F: Float>(rows: &[&[u8]], columns: &[&[u8]], padded: usize, out: &mut [f32]) {
    let mut done = 0;
    while done < columns.len() {
        let out = &mut out[done * rows.len()..];
        // Eight sums or more at a time, so that no product need wait for the one before.
        // SAFETY: as the caller vouches.
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

/// `R` rows at a time (at most four), with `H` sums for each product (at most two).
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
    // Rows of a matrix lie a stride apart.
    let apart = rows.get(1).map_or(0, |row| row.as_ptr().addr().wrapping_sub(rows[0].as_ptr().addr()));
    for (group, some) in rows.chunks(R).enumerate() {
        let first = group * R;
        // Rows beyond the last one are the last one again.
        let mut x = [some[0].as_ptr(); R];
        for r in 0..R {
            x[r] = some[r.min(some.len() - 1)].as_ptr();
        }
        let whole = some[0].len() / (8 * F::BYTES);
        // Short rows may lie far apart: what to ask for lies in one of the next rows, not behind this one.
        let ahead = match AHEAD / some[0].len().max(1) {
            0 => AHEAD,
            n => apart.wrapping_mul(n.clamp(R, 2 * STRIP)),
        };
        // SAFETY: eight number i of a row meets elements 8 i and on of the columns, which are padded to whole eights; the
        // last one may be a copy, filled up with zeros.
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
                    let rest = &some[r.min(some.len() - 1)][8 * F::BYTES * whole..];
                    last[r][..rest.len()].copy_from_slice(rest);
                }
                let last = last.each_ref().map(|last| last.as_ptr());
                add_eight::<F, R, H, C>(&mut sums, 0, last, y.map(|y| y.add(8 * whole)), 0);
            }
            // Four sums' lanes together: of all rows and one column, or of two rows and two columns.
            let each = 4 / R.next_power_of_two();
            for c in (0..C).step_by(each) {
                let mut four = [_mm256_setzero_ps(); 4];
                for i in 0..each.min(C - c) {
                    for r in 0..R {
                        let h = sums[c + i][r];
                        four[4 / each * i + r] = if H == 1 { h[0] } else { _mm256_add_ps(h[0], h[H - 1]) };
                    }
                }
                let mut totals = [0.0; 4];
                _mm_storeu_ps(totals.as_mut_ptr(), four_sums(four));
                for i in 0..each.min(C - c) {
                    let out = &mut out[(c + i) * rows.len() + first..][..some.len()];
                    let totals: [f32; R] = std::array::from_fn(|r| totals[4 / each * i + r]);
                    // A length that the compiler knows takes no call to copy.
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

/// Adds the products of eight number `i` of each row and column to sums `h`.
///
/// # Safety
/// The instructions of [`dot`]; that eight is there at all of `x` and `y`.
#[inline(always)]
unsafe fn add_eight<F: Float, const R: usize, const H: usize, const C: usize>(
    sums: &mut [[[__m256; H]; R]; C],
    h: usize,
    x: [*const u8; R],
    y: [*const f32; C],
    i: usize,
) {
    // SAFETY: as the caller vouches.
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
/// AVX2.
#[inline(always)]
unsafe fn four_sums([a, b, c, d]: [__m256; 4]) -> __m128 {
    // SAFETY: as the caller vouches.
    unsafe {
        let low = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
        let high = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d)));
        let even = _mm256_castpd_ps(_mm256_unpacklo_pd(low, high));
        let sums = _mm256_add_ps(even, _mm256_castpd_ps(_mm256_unpackhi_pd(low, high)));
        _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums))
    }
}

/// How vectors of AVX-512 multiply rows of a float type with columns.
///
/// # Safety
/// The functions need AVX-512 F, BW and VL, those of [`Bf16Pairs`] AVX512-BF16 too; and the elements at the pointers, but for those
/// that the mask leaves out, which count as zeros.
trait WideProduct {
    /// Bytes of an element of a row, and of a column.
    const BYTES: [usize; 2];
    /// Elements in a vector.
    const STEP: usize;

    unsafe fn row(p: *const u8, mask: u32) -> __m512;
    unsafe fn column(p: *const u8, mask: u32) -> __m512;
    /// `sums` and the products.
    unsafe fn add(sums: __m512, row: __m512, column: __m512) -> __m512;
}

impl<F: Float> WideProduct for F {
    const BYTES: [usize; 2] = [F::BYTES, 4];
    const STEP: usize = 16;

    #[inline(always)]
    unsafe fn row(p: *const u8, mask: u32) -> __m512 {
        // SAFETY: as the caller vouches.
        unsafe { F::load_wide(p, mask as u16) }
    }

    #[inline(always)]
    unsafe fn column(p: *const u8, mask: u32) -> __m512 {
        // SAFETY: as the caller vouches.
        unsafe { F32::load_wide(p, mask as u16) }
    }

    #[inline(always)]
    unsafe fn add(sums: __m512, row: __m512, column: __m512) -> __m512 {
        // SAFETY: as the caller vouches.
        unsafe { _mm512_fmadd_ps(row, column, sums) }
    }
}

/// Rows of BF16 with columns of bf16, two products in each lane.
struct Bf16Pairs;

impl WideProduct for Bf16Pairs {
    const BYTES: [usize; 2] = [2; 2];
    const STEP: usize = 32;

    #[inline(always)]
    unsafe fn row(p: *const u8, mask: u32) -> __m512 {
        // SAFETY: as the caller vouches.
        unsafe { _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, p.cast())) }
    }

    #[inline(always)]
    unsafe fn column(p: *const u8, mask: u32) -> __m512 {
        // SAFETY: as the caller vouches.
        unsafe { Self::row(p, mask) }
    }

    #[inline(always)]
    unsafe fn add(sums: __m512, row: __m512, column: __m512) -> __m512 {
        // SAFETY: as the caller vouches.
        unsafe { _mm512_dpbf16_ps(sums, as_bf16(_mm512_castps_si512(row)), as_bf16(_mm512_castps_si512(column))) }
    }
}

/// # Safety
/// As [`dot`], with AVX-512 F, BW and VL.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl")]
unsafe fn wide_dot<F: Float>(rows: &[&[u8]], columns: &[&[u8]], _: usize, out: &mut [f32]) {
    // SAFETY: as the caller vouches.
    unsafe { wide_rows::<F>(rows, columns, out) }
}

/// # Safety
/// As [`wide_dot`], with AVX512-BF16; columns of as many bf16.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn bf16_dot(rows: &[&[u8]], columns: &[&[u8]], _: usize, out: &mut [f32]) {
    // SAFETY: as the caller vouches.
    unsafe { wide_rows::<Bf16Pairs>(rows, columns, out) }
}

/// # Safety
/// As [`wide_dot`], or [`bf16_dot`].
#[inline(always)]
unsafe fn wide_rows<P: WideProduct>(rows: &[&[u8]], columns: &[&[u8]], out: &mut [f32]) {
    let mut done = 0;
    while done < columns.len() {
        let out = &mut out[done * rows.len()..];
        // SAFETY: as the caller vouches.
        unsafe {
            done += match columns[done..] {
                [a, b, c, d, ..] => wide_columns::<P, 4>(rows, [a, b, c, d], out),
                [a, b, ..] => wide_columns::<P, 2>(rows, [a, b], out),
                [a] => wide_columns::<P, 1>(rows, [a], out),
                [] => 1,
            };
        }
    }
}

/// # Safety
/// As [`wide_rows`].
#[inline(always)]
unsafe fn wide_columns<P: WideProduct, const C: usize>(rows: &[&[u8]], columns: [&[u8]; C], out: &mut [f32]) -> usize {
    let columns = columns.map(<[u8]>::as_ptr);
    for (group, sixteen) in rows.chunks(STRIP).enumerate() {
        let k = sixteen[0].len() / P::BYTES[0];
        // SAFETY: registers only; the caller vouches for the instructions.
        let mut lines = [[unsafe { _mm512_setzero_ps() }; 4]; C];
        for q in 0..sixteen.len().div_ceil(4) {
            // Rows beyond the last one are the last one again.
            let row = |r: usize| sixteen[(4 * q + r).min(sixteen.len() - 1)].as_ptr();
            let quad = [row(0), row(1), row(2), row(3)];
            // Short rows may lie far apart: the ones to ask for are those of the next sixteen.
            let next = rows.get((group + 1) * STRIP + 4 * q).filter(|row| row.len() <= AHEAD);
            let ahead = next.map_or(AHEAD, |row| row.as_ptr().addr().wrapping_sub(quad[0].addr()));
            // SAFETY: rows and columns have a step's elements from i on, or those of them that the mask leaves.
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
                    lines[c][q] = quarter_sums(sums[c]);
                }
            }
        }
        for c in 0..C {
            let (mut totals, n) = ([0.0; STRIP], sixteen.len());
            // SAFETY: sixteen floats.
            unsafe { _mm512_storeu_ps(totals.as_mut_ptr(), sum_quarters(lines[c])) };
            out[c * rows.len() + group * STRIP..][..n].copy_from_slice(&totals[..n]);
        }
    }
    C
}

/// Adds the products of a step from element `i` on of four rows, of those elements that the mask leaves, with the columns' to
/// `sums`, and asks for what lies `ahead` of them.
///
/// # Safety
/// As [`wide_rows`]; rows and columns have these elements.
#[inline(always)]
unsafe fn add_products<P: WideProduct, const C: usize>(
    sums: &mut [[__m512; 4]; C],
    rows: [*const u8; 4],
    columns: [*const u8; C],
    i: usize,
    mask: u32,
    ahead: usize,
) {
    let [row_bytes, column_bytes] = P::BYTES;
    // SAFETY: as the caller vouches.
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

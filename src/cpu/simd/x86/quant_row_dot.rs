//! Row dot products: quantised rows in place with columns of codes.

use super::row_format::{
    BlockFormat, CodeKind, PREFETCH_DISTANCE, QuantDot, RowFormat, SuperblockFormat, horizontal_sum,
};
use crate::cpu::simd::packing::PackedColumn;
use crate::cpu::simd::{MAX_SUPERBLOCK_BYTES, unroll};
use std::arch::x86_64::*;
use std::hint::black_box;

/// Dot products of rows with any number of columns: `out[c * rows.len() + r]`.
///
/// # Safety
/// The processor has the instructions of `P`, AVX2, FMA and F16C; the columns are packed for `F` with `padded` elements, as
/// many as the rows have with padding; `out` has space for all sums.
#[inline(always)]
pub(super) unsafe fn dot<F: RowFormat, P: QuantDot>(rows: &[&[u8]], columns: &[&[u8]], padded: usize, out: &mut [f32]) {
    let mut done = 0;
    while done < columns.len() {
        let out = &mut out[done * rows.len()..];
        // SAFETY: the caller meets this function's requirements.
        unsafe {
            done += match columns[done..] {
                [a, b, c, d, ..] => dot_columns::<F, P, 4>(rows, [a, b, c, d], padded, out),
                [a, b, c] => dot_columns::<F, P, 3>(rows, [a, b, c], padded, out),
                [a, b] => dot_columns::<F, P, 2>(rows, [a, b], padded, out),
                [a] => dot_columns::<F, P, 1>(rows, [a], padded, out),
                [] => 1,
            };
        }
    }
}

/// As [`dot`], for `C` columns; returns `C`.
///
/// # Safety
/// As [`dot`].
#[inline(always)]
unsafe fn dot_columns<F: RowFormat, P: QuantDot, const C: usize>(
    rows: &[&[u8]],
    columns: [&[u8]; C],
    padded: usize,
    out: &mut [f32],
) -> usize {
    let mut last = [0; MAX_SUPERBLOCK_BYTES];
    // SAFETY: the sections are in a packed column; the sum of row r goes to element r of each column's `out`.
    unsafe {
        let mut parts = [PackedColumn::NONE; C];
        for c in 0..C {
            parts[c] = PackedColumn::new(columns[c], padded, F::SUB);
        }
        for r in 0..rows.len() {
            let whole = rows[r].len() / F::BYTES;
            let rest = &rows[r][whole * F::BYTES..];
            if !rest.is_empty() {
                last[..rest.len()].copy_from_slice(rest);
            }
            let sums = F::dot_row::<P, C>(rows[r].as_ptr(), whole, last.as_ptr(), parts, padded);
            for c in 0..C {
                out[c * rows.len() + r] = sums[c];
            }
        }
    }
    C
}

/// [`RowFormat::dot_row`] of blocks of 32: `sum over blocks of scale * column scale * (integer dot product) + bias * (column
/// sum)`.
///
/// # Safety
/// As [`RowFormat::dot_row`].
#[inline(always)]
pub(super) unsafe fn dot_blocks<F: BlockFormat, P: QuantDot, const C: usize>(
    row: *const u8,
    whole: usize,
    last: *const u8,
    columns: [PackedColumn; C],
    padded: usize,
) -> [f32; C] {
    // SAFETY: elements 256 s and following of the row are multiplied by the same elements of the columns, which exist since row and columns
    // have equally many. Codes are read inside their block (`BlockFormat`).
    unsafe {
        // Two accumulators for each sum, so that an FMA need not wait for the previous one.
        let mut sums = [[_mm256_setzero_ps(); 2]; C];
        let mut scales = [[0f32; 8]; C];
        for s in 0..padded / 256 {
            let p = if s < whole { row.add(s * F::BYTES) } else { last };
            prefetch_next::<F>(p);
            let affine = F::scales(p);
            for c in 0..C {
                let scale = _mm256_mul_ps(affine.scale, _mm256_loadu_ps(columns[c].scales.add(8 * s)));
                _mm256_storeu_ps(scales[c].as_mut_ptr(), scale);
                if F::UNSIGNED {
                    let sum = _mm256_loadu_ps(columns[c].sums.add(8 * s));
                    sums[c][0] = _mm256_fmadd_ps(affine.bias, sum, sums[c][0]);
                }
            }
            // Keeps the scales in memory, because a load broadcasts a scale for free. The compiler would keep them in a
            // register and shuffle.
            black_box(&mut scales);
            unroll!(j in [0 1 2 3 4 5 6 7] {
                let codes = F::codes(p, j);
                for c in 0..C {
                    let y = _mm256_loadu_si256(columns[c].codes.add(256 * s + 32 * j).cast());
                    let zero = _mm256_setzero_si256();
                    let sum = if F::UNSIGNED {
                        P::add(zero, codes, y)
                    } else {
                        // Moves the sign of the code to the column's value.
                        P::add(zero, _mm256_abs_epi8(codes), _mm256_sign_epi8(y, codes))
                    };
                    let scale = _mm256_broadcast_ss(&scales[c][j]);
                    sums[c][j % 2] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, sums[c][j % 2]);
                }
            });
        }
        let mut out = [0.0; C];
        for c in 0..C {
            out[c] = horizontal_sum(_mm256_add_ps(sums[c][0], sums[c][1]));
        }
        out
    }
}

/// [`RowFormat::dot_row`] of superblocks: `sum over superblocks of d * column scale * (sum over sub-blocks of scale * integer
/// dot product) + m * (sum over sub-blocks of min * column sum)`.
///
/// Pairs of products in 16 bits are multiplied by the scales, also in 16 bits, so that a superblock has one conversion to f32.
/// That takes no more instructions than a VNNI dot product of each sub-block followed by its own conversion and scale.
///
/// # Safety
/// As [`RowFormat::dot_row`].
#[inline(always)]
pub(super) unsafe fn dot_superblocks<F: SuperblockFormat, P: QuantDot, const C: usize>(
    row: *const u8,
    whole: usize,
    last: *const u8,
    columns: [PackedColumn; C],
    padded: usize,
) -> [f32; C] {
    // SAFETY: as in `dot_blocks`.
    unsafe {
        let mut totals = [_mm256_setzero_ps(); C];
        for s in 0..padded / 256 {
            let p = if s < whole { row.add(s * F::BYTES) } else { last };
            prefetch_next::<F>(p);
            let scales = F::scales(p);
            let pairs = pairs_of_scales(scales.scales);
            let mut head = F::head(p);
            // Keeps the head in memory: the compiler would take vectors of indices apart in registers.
            black_box(&mut head);
            // The sum of two products has 16 bits; times a scale of 8 it has 24, and a lane adds sixteen of them. With one scale, codes
            // are ternary digits: eight sums of two products fit 16 bits.
            let mut sums = [_mm256_setzero_si256(); C];
            unroll!(j in [0 1 2 3 4 5 6 7] {
                let (codes, signs) = F::codes(p, &head, j);
                let magnitudes = if F::CODES == CodeKind::Signed { _mm256_abs_epi8(codes) } else { codes };
                let scale = scales_of_part(pairs, j);
                for c in 0..C {
                    let y = _mm256_loadu_si256(columns[c].codes.add(256 * s + 32 * j).cast());
                    // Signs move to the column's codes.
                    let y = match F::CODES {
                        CodeKind::Unsigned => y,
                        CodeKind::Signed => _mm256_sign_epi8(y, codes),
                        CodeKind::SignWords => P::negate(y, signs),
                    };
                    let products = _mm256_maddubs_epi16(magnitudes, y);
                    sums[c] = if F::ONE_SCALE {
                        _mm256_add_epi16(sums[c], products)
                    } else {
                        _mm256_add_epi32(sums[c], _mm256_madd_epi16(products, scale))
                    };
                }
            });
            for c in 0..C {
                if F::ONE_SCALE {
                    sums[c] = _mm256_madd_epi16(sums[c], _mm256_set1_epi16(1));
                }
                let scale = _mm256_mul_ps(scales.d, _mm256_broadcast_ss(&*columns[c].scales.add(8 * s)));
                totals[c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[c]), scale, totals[c]);
                if F::CODES == CodeKind::Unsigned {
                    let column_sums = columns[c].sums.add(256 / F::SUB * s);
                    let mut bias = _mm256_mul_ps(scales.mins[0], _mm256_loadu_ps(column_sums));
                    if F::SUB == 16 {
                        bias = _mm256_fmadd_ps(scales.mins[1], _mm256_loadu_ps(column_sums.add(8)), bias);
                    }
                    totals[c] = _mm256_fmadd_ps(bias, scales.m, totals[c]);
                }
            }
        }
        let mut out = [0.0; C];
        for c in 0..C {
            out[c] = horizontal_sum(totals[c]);
        }
        out
    }
}

/// Each scale twice, for two products of 16 bits: those of parts 0 to 3, and of parts 4 to 7.
#[inline(always)]
unsafe fn pairs_of_scales(scales: __m256i) -> [__m256i; 2] {
    // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
    unsafe { [_mm256_unpacklo_epi16(scales, scales), _mm256_unpackhi_epi16(scales, scales)] }
}

/// The scales of codes `32 * j` and following, in the lanes of their products.
#[inline(always)]
unsafe fn scales_of_part(pairs: [__m256i; 2], j: usize) -> __m256i {
    let pairs = pairs[j / 4];
    // SAFETY: uses registers only; the caller guarantees that the processor has AVX2.
    unsafe {
        match j % 4 {
            0 => _mm256_shuffle_epi32::<0x00>(pairs),
            1 => _mm256_shuffle_epi32::<0x55>(pairs),
            2 => _mm256_shuffle_epi32::<0xaa>(pairs),
            _ => _mm256_shuffle_epi32::<0xff>(pairs),
        }
    }
}

/// Prefetches the row one prefetch distance after `p`, as many cache lines as 256 elements have.
#[inline(always)]
fn prefetch_next<F: RowFormat>(p: *const u8) {
    for line in 0..F::BYTES.div_ceil(64) {
        // SAFETY: a prefetch of any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(PREFETCH_DISTANCE + 64 * line).cast()) };
    }
}

//! Row dot products: quantised rows in place with columns of codes.
//!
//! They compute `sum over sub-blocks of scale * column scale * (integer dot product) + bias * (column sum)`.

use super::row_format::{PREFETCH_DISTANCE, QuantDot, RowFormat, horizontal_sum};
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
        // SAFETY: as the caller vouches.
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
    // SAFETY: the sections are those of a packed column; the sum of row r goes to element r of each column's `out`.
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
            let sums = dot_row::<F, P, C>(rows[r].as_ptr(), whole, last.as_ptr(), parts, padded);
            for c in 0..C {
                out[c * rows.len() + r] = sums[c];
            }
        }
    }
    C
}

/// The dot products of one row with `C` columns.
///
/// # Safety
/// As [`dot`], for a row of `whole` superblocks and, if `padded` has one more, `last` points to the padded last superblock.
#[inline(always)]
unsafe fn dot_row<F: RowFormat, P: QuantDot, const C: usize>(
    row: *const u8,
    whole: usize,
    last: *const u8,
    columns: [PackedColumn; C],
    padded: usize,
) -> [f32; C] {
    // SAFETY: superblock s of the row is multiplied by elements 256 s and following of the columns, which exist since row and
    // columns have equally many. Codes are read inside their superblock (`RowFormat`).
    unsafe {
        // Two accumulators for each sum, so that an FMA need not wait for the previous one.
        let mut sums = [[_mm256_setzero_ps(); 2]; C];
        // Scales of a superblock's sub-blocks: eight in entry 0, or eight in each entry if sub-blocks have 16 elements.
        let mut scales = [[[0f32; 8]; 2]; C];
        for s in 0..padded / 256 {
            let p = if s < whole { row.add(s * F::BYTES) } else { last };
            for line in 0..F::BYTES.div_ceil(64) {
                _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(PREFETCH_DISTANCE + 64 * line).cast());
            }
            let affine = F::scales(p);
            for c in 0..C {
                let d = columns[c].scales.add(8 * s);
                if F::SUB == 32 {
                    let scale = _mm256_mul_ps(affine[0].scale, _mm256_loadu_ps(d));
                    _mm256_storeu_ps(scales[c][0].as_mut_ptr(), scale);
                    if F::TOP.is_some() {
                        let sum = _mm256_loadu_ps(columns[c].sums.add(8 * s));
                        sums[c][0] = _mm256_fmadd_ps(affine[0].bias, sum, sums[c][0]);
                    }
                } else {
                    for g in 0..2 {
                        let d = _mm256_broadcast_ps(&d.add(4 * g).cast::<__m128>().read_unaligned());
                        _mm256_storeu_ps(scales[c][g].as_mut_ptr(), _mm256_mul_ps(affine[g].scale, d));
                        let sum = _mm256_loadu_ps(columns[c].sums.add(16 * s + 8 * g));
                        sums[c][g] = _mm256_fmadd_ps(affine[g].bias, sum, sums[c][g]);
                    }
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
                    let sum = match F::TOP {
                        Some(_) => P::add(zero, codes, y),
                        // Moves the sign of the code to the column's value.
                        None => P::add(zero, _mm256_abs_epi8(codes), _mm256_sign_epi8(y, codes)),
                    };
                    let scale = if F::SUB == 32 {
                        _mm256_broadcast_ss(&scales[c][0][j])
                    } else {
                        let group = _mm256_loadu_ps(scales[c][j / 4].as_ptr());
                        match j % 4 {
                            0 => _mm256_permute_ps::<0x00>(group),
                            1 => _mm256_permute_ps::<0x55>(group),
                            2 => _mm256_permute_ps::<0xaa>(group),
                            _ => _mm256_permute_ps::<0xff>(group),
                        }
                    };
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

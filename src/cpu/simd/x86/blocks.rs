//! Products of rows of block types, where they lie, with columns of codes.
//!
//! Everything is `sum over sub-blocks of scale * column scale * (integer sum) + bias * (column sum)`.

use super::format::{AHEAD, Format, Products, horizontal_sum};
use crate::cpu::simd::packing::Parts;
use crate::cpu::simd::{LARGEST, unroll};
use std::arch::x86_64::*;
use std::hint::black_box;

/// Products of rows with any number of columns: `out[c * rows.len() + r]`.
///
/// # Safety
/// The instructions of `P`, AVX2, FMA and F16C; columns are packed for `F` with `padded` elements, as many as the rows have
/// with their padding; `out` has room for all.
#[inline(always)]
pub(super) unsafe fn dot<F: Format, P: Products>(rows: &[&[u8]], columns: &[&[u8]], padded: usize, out: &mut [f32]) {
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

/// # Safety
/// As [`dot`].
#[inline(always)]
unsafe fn dot_columns<F: Format, P: Products, const C: usize>(
    rows: &[&[u8]],
    columns: [&[u8]; C],
    padded: usize,
    out: &mut [f32],
) -> usize {
    let mut last = [0; LARGEST];
    // SAFETY: the parts of a packed column; sums of row r go to element r of each column's `out`.
    unsafe {
        let mut parts = [Parts::NONE; C];
        for c in 0..C {
            parts[c] = Parts::new(columns[c], padded, F::SUB);
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

/// # Safety
/// As [`dot`], for a row of `whole` superblocks and, if `padded` says so, one at `last`.
#[inline(always)]
unsafe fn dot_row<F: Format, P: Products, const C: usize>(
    row: *const u8,
    whole: usize,
    last: *const u8,
    columns: [Parts; C],
    padded: usize,
) -> [f32; C] {
    // SAFETY: superblock s of the row meets elements 256 s and on of the columns, which are there since row and columns
    // have equally many. Codes are read inside their superblock (`Format`).
    unsafe {
        // Two sums each, so that one product need not wait for the one before.
        let mut sums = [[_mm256_setzero_ps(); 2]; C];
        // What a block's products are scaled with: all lanes, or one half for each sub-block of 16.
        let mut scales = [[[0f32; 8]; 2]; C];
        for s in 0..padded / 256 {
            let p = if s < whole { row.add(s * F::BYTES) } else { last };
            for line in 0..F::BYTES.div_ceil(64) {
                _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(AHEAD + 64 * line).cast());
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
            // Loads spread a scale over all lanes for nothing. The compiler would keep them in a register and shuffle.
            black_box(&mut scales);
            unroll!(j in [0 1 2 3 4 5 6 7] {
                let codes = F::codes(p, j);
                for c in 0..C {
                    let y = _mm256_loadu_si256(columns[c].codes.add(256 * s + 32 * j).cast());
                    let zero = _mm256_setzero_si256();
                    let sum = match F::TOP {
                        Some(_) => P::add(zero, codes, y),
                        // The sign moves over to the column.
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

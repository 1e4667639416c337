//! Row dot products: quantised rows in place with columns of codes.
//!
//! They compute `sum over sub-blocks of scale * column scale * (integer dot product) + bias * (column sum)`.

use super::dot_instructions::{fma_lane, prefetch};
use super::row_format::{PREFETCH_DISTANCE, QuantDot, RowFormat};
use crate::cpu::simd::packing::PackedColumn;
use crate::cpu::simd::{MAX_SUPERBLOCK_BYTES, unroll};
use std::arch::aarch64::*;

/// Dot products of rows with any number of columns: `out[c * rows.len() + r]`.
///
/// # Safety
/// The processor has the instructions of `P`; the columns are packed for `F` with `padded` elements, as many as the rows have
/// with padding; `out` has space for all sums.
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
    let subs = 256 / F::SUB;
    // SAFETY: superblock s of the row is multiplied by elements 256 s and following of the columns, which exist since row and
    // columns have equally many. Codes are read inside their superblock (`RowFormat`).
    unsafe {
        // Two accumulators for each sum, so that an FMA need not wait for the previous one.
        let mut sums = [[vdupq_n_f32(0.0); 2]; C];
        for s in 0..padded / 256 {
            let p = if s < whole { row.add(s * F::BYTES) } else { last };
            for line in 0..F::BYTES.div_ceil(64) {
                prefetch(p.wrapping_add(PREFETCH_DISTANCE + 64 * line));
            }
            let affine = F::scales(p);
            let mut scales = [affine.scale; C];
            for c in 0..C {
                for i in 0..subs / 4 {
                    // Two sub-blocks of 16 share one scale of the column, which has one per 32 elements.
                    let d = if F::SUB == 32 { i } else { i / 2 };
                    scales[c][i] = vmulq_f32(scales[c][i], vld1q_f32(columns[c].scales.add(8 * s + 4 * d)));
                    if F::BIASED {
                        let sum = vld1q_f32(columns[c].sums.add(subs * s + 4 * i));
                        sums[c][i % 2] = vfmaq_f32(sums[c][i % 2], affine.bias[i], sum);
                    }
                }
            }
            unroll!(j in [0 1 2 3 4 5 6 7] {
                let codes = F::codes(p, j);
                for c in 0..C {
                    let y = columns[c].codes.add(256 * s + 32 * j);
                    let y = [vld1q_s8(y), vld1q_s8(y.add(16))];
                    let first = P::add(vdupq_n_s32(0), codes[0], y[0]);
                    if F::SUB == 32 {
                        let sum = vcvtq_f32_s32(P::add(first, codes[1], y[1]));
                        sums[c][j % 2] = fma_lane(sums[c][j % 2], sum, scales[c][j / 4], j % 4);
                    } else {
                        let second = P::add(vdupq_n_s32(0), codes[1], y[1]);
                        let (even, odd) = (scales[c][j / 4 * 2], scales[c][j / 4 * 2 + 1]);
                        sums[c][0] = fma_lane(sums[c][0], vcvtq_f32_s32(first), even, j % 4);
                        sums[c][1] = fma_lane(sums[c][1], vcvtq_f32_s32(second), odd, j % 4);
                    }
                }
            });
        }
        let mut out = [0.0; C];
        for c in 0..C {
            out[c] = vaddvq_f32(vaddq_f32(sums[c][0], sums[c][1]));
        }
        out
    }
}

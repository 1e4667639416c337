//! Row dot products: F32, F16 and BF16 rows in place with columns of f32.

use super::dot_instructions::{f16_to_f32, prefetch};
use super::row_format::PREFETCH_DISTANCE;
use crate::cpu::simd::RowDotFn;
use crate::tensor::DType;
use std::arch::aarch64::*;

/// A float type, eight elements at a time.
trait Float {
    const BYTES: usize;

    /// Eight elements as f32.
    ///
    /// # Safety
    /// `p` points to eight elements.
    unsafe fn load(p: *const u8) -> [float32x4_t; 2];
}

struct F32;
struct F16;
struct Bf16;

impl Float for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> [float32x4_t; 2] {
        // SAFETY: the caller meets this function's requirements; loads of bytes take any address.
        unsafe { [vreinterpretq_f32_u8(vld1q_u8(p)), vreinterpretq_f32_u8(vld1q_u8(p.add(16)))] }
    }
}

impl Float for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> [float32x4_t; 2] {
        // SAFETY: as above.
        unsafe { [f16_to_f32(vreinterpret_u16_u8(vld1_u8(p))), f16_to_f32(vreinterpret_u16_u8(vld1_u8(p.add(8))))] }
    }
}

impl Float for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> [float32x4_t; 2] {
        // SAFETY: as above.
        unsafe {
            let bits = vreinterpretq_u16_u8(vld1q_u8(p));
            let (low, high) = (vshll_n_u16::<16>(vget_low_u16(bits)), vshll_high_n_u16::<16>(bits));
            [vreinterpretq_f32_u32(low), vreinterpretq_f32_u32(high)]
        }
    }
}

/// The row dot product of a float type.
pub(super) fn dot_of(dtype: DType) -> Option<RowDotFn> {
    match dtype {
        DType::F32 => Some(dot::<F32>),
        DType::F16 => Some(dot::<F16>),
        DType::BF16 => Some(dot::<Bf16>),
        _ => None,
    }
}

/// Row dot products with f32 columns, four columns at a time: `out[c * rows.len() + r]`.
///
/// # Safety
/// Each column has `padded` f32: the rows' number of elements, rounded up to whole vectors of eight. `out` has space for all
/// sums.
unsafe fn dot<F: Float>(rows: &[&[u8]], columns: &[&[u8]], padded: usize, out: &mut [f32]) {
    let mut done = 0;
    while done < columns.len() {
        let out = &mut out[done * rows.len()..];
        // SAFETY: the caller meets this function's requirements.
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

/// As [`dot`], for `C` columns; returns `C`.
///
/// # Safety
/// As [`dot`].
#[inline(always)]
unsafe fn dot_columns<F: Float, const C: usize>(
    rows: &[&[u8]],
    columns: [&[u8]; C],
    padded: usize,
    out: &mut [f32],
) -> usize {
    // SAFETY: vector i (eight elements) of a row is multiplied by elements 8 i and following of the columns, which are padded
    // to whole vectors. The last vector may be a copy of the tail, filled up with zeros.
    unsafe {
        for r in 0..rows.len() {
            let row = rows[r];
            let (whole, mut last) = (row.len() / (8 * F::BYTES), [0; 32]);
            let rest = &row[8 * F::BYTES * whole..];
            if !rest.is_empty() {
                last[..rest.len()].copy_from_slice(rest);
            }
            // Four accumulators for each sum, so that an FMA need not wait for the previous ones.
            let mut sums = [[vdupq_n_f32(0.0); 4]; C];
            for i in 0..whole / 2 {
                prefetch(row.as_ptr().wrapping_add(16 * F::BYTES * i + PREFETCH_DISTANCE));
                for h in 0..2 {
                    let x = F::load(row.as_ptr().add(8 * F::BYTES * (2 * i + h)));
                    for c in 0..C {
                        let y = columns[c].as_ptr().cast::<f32>().add(16 * i + 8 * h);
                        sums[c][2 * h] = vfmaq_f32(sums[c][2 * h], x[0], vld1q_f32(y));
                        sums[c][2 * h + 1] = vfmaq_f32(sums[c][2 * h + 1], x[1], vld1q_f32(y.add(4)));
                    }
                }
            }
            for i in whole / 2 * 2..padded / 8 {
                let x = F::load(if i < whole { row.as_ptr().add(8 * F::BYTES * i) } else { last.as_ptr() });
                for c in 0..C {
                    let y = columns[c].as_ptr().cast::<f32>().add(8 * i);
                    sums[c][0] = vfmaq_f32(sums[c][0], x[0], vld1q_f32(y));
                    sums[c][1] = vfmaq_f32(sums[c][1], x[1], vld1q_f32(y.add(4)));
                }
            }
            for c in 0..C {
                let (low, high) = (vaddq_f32(sums[c][0], sums[c][1]), vaddq_f32(sums[c][2], sums[c][3]));
                out[c * rows.len() + r] = vaddvq_f32(vaddq_f32(low, high));
            }
        }
    }
    C
}

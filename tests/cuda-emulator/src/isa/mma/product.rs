//! Products of whole matrices, stored row by row: `c += a · b` with `a` of m × k and `b` of k × n. `n` is a multiple of 8.

use crate::numeric::Rounding;
use crate::numeric::double;

/// Columns that are summed side by side, in registers of the processor.
const WIDTH: usize = 8;

/// Floating-point elements (each exact in `f32`), summed in `f64`.
#[inline(always)]
pub(super) fn floats<const B: usize>(a: &[f32], b: &[f32; B], c: &mut [f64], n: usize, k: usize) {
    let b = b.map(f64::from);
    for (row, sums) in a.chunks_exact(k).zip(c.chunks_exact_mut(n)) {
        for (block, sums) in sums.as_chunks_mut::<WIDTH>().0.iter_mut().enumerate() {
            let mut acc = *sums;
            for (step, &x) in row.iter().enumerate() {
                let Some(y) = b[step * n + block * WIDTH..].first_chunk::<WIDTH>() else { continue };
                let x = f64::from(x);
                for column in 0..WIDTH {
                    acc[column] += x * y[column];
                }
            }
            *sums = acc;
        }
    }
}

/// Small integers: in `f32`, whose 24 bits hold any sum of 64 products of bytes.
#[inline(always)]
pub(super) fn integers<const B: usize>(a: &[f32], b: &[f32; B], c: &mut [f32], n: usize, k: usize) {
    for (row, sums) in a.chunks_exact(k).zip(c.chunks_exact_mut(n)) {
        for (block, sums) in sums.as_chunks_mut::<WIDTH>().0.iter_mut().enumerate() {
            let mut acc = *sums;
            for (step, &x) in row.iter().enumerate() {
                let Some(y) = b[step * n + block * WIDTH..].first_chunk::<WIDTH>() else { continue };
                for column in 0..WIDTH {
                    acc[column] += x * y[column];
                }
            }
            *sums = acc;
        }
    }
}

/// Doubles: a chain of `fma` along k, which begins with the accumulator.
pub(super) fn doubles(a: &[f64], b: &[f64], c: &mut [f64], n: usize, k: usize, round: Rounding) {
    for (row, sums) in a.chunks_exact(k).zip(c.chunks_exact_mut(n)) {
        for (column, sum) in sums.iter_mut().enumerate() {
            for (step, &x) in row.iter().enumerate() {
                *sum = double::fma(x, b[step * n + column], *sum, round);
            }
        }
    }
}

/// Bits: the number of those that are set after `op`, a word of 32 at a time; `k` counts words.
pub(super) fn bits(a: &[u32], b: &[u32], c: &mut [u32], n: usize, k: usize, op: impl Fn(u32, u32) -> u32) {
    for (row, sums) in a.chunks_exact(k).zip(c.chunks_exact_mut(n)) {
        for (column, sum) in sums.iter_mut().enumerate() {
            for (step, &x) in row.iter().enumerate() {
                *sum = sum.wrapping_add(op(x, b[step * n + column]).count_ones());
            }
        }
    }
}

/// The integer result: accumulator and sum, clamped (`.satfinite`) or wrapped to 32 bits.
pub(super) fn add_s32(c: u32, sum: f32, saturate: bool) -> u32 {
    let exact = i64::from(c as i32) + sum as i64;
    let result = if saturate { exact.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) } else { exact };
    result as u32
}

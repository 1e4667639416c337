//! [`ExpandedDot`] for AVX2, with AVX2's or VNNI's dot products of codes.

use super::row_format::{QuantDot, horizontal_sum};
use crate::cpu::simd::expanded::ExpandedDot;
use crate::cpu::simd::packing::PackedColumn;
use crate::cpu::simd::unroll;
use crate::tensor::quant::expand::Expanded;
use std::arch::x86_64::*;
use std::marker::PhantomData;

/// Eight lanes with two accumulators; `P` multiplies codes.
pub(super) struct ExpandedRows<P>(PhantomData<P>);

impl<P: QuantDot> ExpandedDot for ExpandedRows<P> {
    type Sum = [__m256; 2];

    #[inline(always)]
    unsafe fn zero() -> Self::Sum {
        // SAFETY: uses registers only; the caller guarantees that the processor has the instructions.
        unsafe { [_mm256_setzero_ps(); 2] }
    }

    #[inline(always)]
    unsafe fn add<const C: usize>(sums: &mut [Self::Sum; C], block: &Expanded, columns: &[PackedColumn; C], s: usize) {
        // SAFETY: the block has 256 codes and 16 scales; the caller guarantees that the columns have as many elements.
        unsafe {
            unroll!(j in [0 1 2 3 4 5 6 7] {
                let codes = _mm256_loadu_si256(block.codes.as_ptr().add(32 * j).cast());
                let magnitudes = _mm256_abs_epi8(codes);
                // The lower half of the lanes belongs to the first sixteen codes.
                let [low, high] = [0, 1].map(|h| &block.scales[2 * j + h]);
                let scale = _mm256_blend_ps::<0xf0>(_mm256_broadcast_ss(low), _mm256_broadcast_ss(high));
                for c in 0..C {
                    // The signs move to the column's codes.
                    let y = _mm256_loadu_si256(columns[c].codes.add(256 * s + 32 * j).cast());
                    let sum = P::add(_mm256_setzero_si256(), magnitudes, _mm256_sign_epi8(y, codes));
                    let scale = _mm256_mul_ps(scale, _mm256_broadcast_ss(&*columns[c].scales.add(8 * s + j)));
                    sums[c][j % 2] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, sums[c][j % 2]);
                }
            });
        }
    }

    #[inline(always)]
    unsafe fn total(sums: Self::Sum) -> f32 {
        // SAFETY: as above.
        unsafe { horizontal_sum(_mm256_add_ps(sums[0], sums[1])) }
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch may have any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}

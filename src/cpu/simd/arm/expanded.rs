//! [`ExpandedDot`] for NEON, with its own dot products of codes or the instructions of `dotprod`.

use super::dot_instructions::{QuantDot, prefetch};
use crate::cpu::simd::expanded::ExpandedDot;
use crate::cpu::simd::packing::PackedColumn;
use crate::cpu::simd::unroll;
use crate::tensor::quant::expand::Expanded;
use std::arch::aarch64::*;
use std::marker::PhantomData;

/// Four lanes with two accumulators; `P` multiplies codes.
pub(super) struct ExpandedRows<P>(PhantomData<P>);

impl<P: QuantDot> ExpandedDot for ExpandedRows<P> {
    type Sum = [float32x4_t; 2];

    #[inline(always)]
    unsafe fn zero() -> Self::Sum {
        // SAFETY: registers only; NEON belongs to the architecture.
        unsafe { [vdupq_n_f32(0.0); 2] }
    }

    #[inline(always)]
    unsafe fn add<const C: usize>(sums: &mut [Self::Sum; C], block: &Expanded, columns: &[PackedColumn; C], s: usize) {
        // SAFETY: the block has 256 codes and 16 scales; the caller guarantees that the columns have as many elements.
        unsafe {
            unroll!(j in [0 1 2 3 4 5 6 7] {
                for h in 0..2 {
                    let codes = vld1q_s8(block.codes.as_ptr().add(32 * j + 16 * h));
                    for c in 0..C {
                        let y = vld1q_s8(columns[c].codes.add(256 * s + 32 * j + 16 * h));
                        let sum = vcvtq_f32_s32(P::add(vdupq_n_s32(0), codes, y));
                        let scale = block.scales[2 * j + h] * *columns[c].scales.add(8 * s + j);
                        sums[c][h] = vfmaq_n_f32(sums[c][h], sum, scale);
                    }
                }
            });
        }
    }

    #[inline(always)]
    unsafe fn total(sums: Self::Sum) -> f32 {
        // SAFETY: as above.
        unsafe { vaddvq_f32(vaddq_f32(sums[0], sums[1])) }
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        prefetch(p)
    }
}

//! Row formats: decoding of block types in place.
//!
//! These kernels use no closures around instructions: a closure that is not inlined is compiled without them, and then calls a
//! function for each. Loops whose counters select instructions are unrolled by [`crate::cpu::simd::unroll`].

pub(super) use super::dot_instructions::{BaseNeon, DotProd, QuantDot};
use crate::tensor::DType;
use std::arch::aarch64::*;

/// Software prefetch distance of rows in bytes: longer than memory latency needs, far smaller than a cache.
pub(super) const PREFETCH_DISTANCE: usize = 2048;

/// A block type in place. Its elements are `scale * code + bias` with scale and bias per sub-block; blocks are read in
/// superblocks of 256 elements.
///
/// # Safety
/// `p` must point to [`RowFormat::BYTES`] readable bytes.
pub(super) trait RowFormat {
    /// The type.
    const DTYPE: DType;

    /// Bytes of 256 elements.
    const BYTES: usize = Self::DTYPE.block_bytes() * (256 / Self::DTYPE.block_len());

    /// Elements of a sub-block: 16 or 32.
    const SUB: usize;

    /// Whether sub-blocks have biases.
    const BIASED: bool;

    /// Scales and biases. Sub-blocks of 32 use only the first two vectors, in order. Sub-blocks of 16 use all four, each two
    /// in the order 0 2 4 6 1 3 5 7, in which columns hold their sums.
    unsafe fn scales(p: *const u8) -> Affine;

    /// The codes of elements `32 * j` and following, in order.
    unsafe fn codes(p: *const u8, j: usize) -> [int8x16_t; 2];
}

/// Scales and biases of eight or sixteen sub-blocks.
#[derive(Clone, Copy)]
pub(super) struct Affine {
    pub(super) scale: [float32x4_t; 4],
    pub(super) bias: [float32x4_t; 4],
}

impl Affine {
    /// The biases of codes with a zero offset: `-zero * scale`.
    #[inline(always)]
    pub(super) unsafe fn offset(scale: [float32x4_t; 4], zero: f32) -> Affine {
        // SAFETY: registers only; NEON belongs to the architecture.
        Affine { scale, bias: unsafe { times(scale, vdupq_n_f32(-zero)) } }
    }
}

/// Multiplies each of four vectors by `by`.
#[inline(always)]
pub(super) unsafe fn times(a: [float32x4_t; 4], by: float32x4_t) -> [float32x4_t; 4] {
    // SAFETY: registers only; NEON belongs to the architecture.
    unsafe { [vmulq_f32(a[0], by), vmulq_f32(a[1], by), vmulq_f32(a[2], by), vmulq_f32(a[3], by)] }
}

/// Eight scales in two vectors, followed by two vectors of zeros: the form of [`Affine`] for sub-blocks of 32.
#[inline(always)]
pub(super) unsafe fn eight_scales(low: float32x4_t, high: float32x4_t) -> [float32x4_t; 4] {
    // SAFETY: as above.
    unsafe { [low, high, vdupq_n_f32(0.0), vdupq_n_f32(0.0)] }
}

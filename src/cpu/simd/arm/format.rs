//! What the kernels need to know of a block type.
//!
//! Kernels here have no closures around instructions: one that is not inlined would be compiled without them, and call
//! each. Loops whose counters choose instructions are unrolled by [`crate::cpu::simd::unroll`].

pub(super) use super::products::{DotProd, Plain, Products};
use crate::tensor::DType;
use std::arch::aarch64::*;

/// How far ahead of their use rows are asked for: more than memory's latency takes, far less than a cache holds.
pub(super) const AHEAD: usize = 2048;

/// A type whose elements are `scale * code + bias` by sub-block, seen in superblocks of 256 elements.
///
/// # Safety
/// `p` must point to [`Format::BYTES`] readable bytes.
pub(super) trait Format {
    /// The type.
    const DTYPE: DType;

    /// Bytes of 256 elements.
    const BYTES: usize = Self::DTYPE.block_bytes() * (256 / Self::DTYPE.block_len());

    /// Elements of a sub-block: 16 or 32.
    const SUB: usize;

    /// Whether there are biases.
    const BIASED: bool;

    /// Scales and biases. For sub-blocks of 32 the first two vectors alone, in order; for those of 16 all four, each two in
    /// the order 0 2 4 6 1 3 5 7, in which columns hold their sums.
    unsafe fn scales(p: *const u8) -> Affine;

    /// The codes of elements `32 * j` and on, in order.
    unsafe fn codes(p: *const u8, j: usize) -> [int8x16_t; 2];
}

/// Scales and biases of eight or sixteen sub-blocks.
#[derive(Clone, Copy)]
pub(super) struct Affine {
    pub(super) scale: [float32x4_t; 4],
    pub(super) bias: [float32x4_t; 4],
}

impl Affine {
    /// All the same bias, relative to the scale: codes with an offset.
    #[inline(always)]
    pub(super) unsafe fn offset(scale: [float32x4_t; 4], zero: f32) -> Affine {
        // SAFETY: registers only; NEON belongs to the architecture.
        Affine { scale, bias: unsafe { times(scale, vdupq_n_f32(-zero)) } }
    }
}

/// Four vectors times one.
#[inline(always)]
pub(super) unsafe fn times(a: [float32x4_t; 4], by: float32x4_t) -> [float32x4_t; 4] {
    // SAFETY: registers only; NEON belongs to the architecture.
    unsafe { [vmulq_f32(a[0], by), vmulq_f32(a[1], by), vmulq_f32(a[2], by), vmulq_f32(a[3], by)] }
}

/// Two vectors of eight scales, and none.
#[inline(always)]
pub(super) unsafe fn eight(low: float32x4_t, high: float32x4_t) -> [float32x4_t; 4] {
    // SAFETY: as above.
    unsafe { [low, high, vdupq_n_f32(0.0), vdupq_n_f32(0.0)] }
}

//! The attention GEMM kernels for NEON (vectors of 4 floats).

use super::register_tiles::attention_gemm_kernels;
use crate::cpu::simd::arm::prefetch;
use std::arch::aarch64::*;

attention_gemm_kernels!(
    neon,
    "neon",
    lanes: 4,
    vector: float32x4_t,
    zero: zero,
    load: vld1q_f32,
    store: vst1q_f32,
    splat: vdupq_n_f32,
    fma: fma,
    load_halves: load_4_halves,
    prefetch: prefetch,
    horizontal_sums: horizontal_sums,
    // Sizes of the register tiles; see the macro.
    dots: 4,
    sums: 4,
    column_vectors: 4
);

#[inline]
#[target_feature(enable = "neon")]
fn zero() -> float32x4_t {
    vdupq_n_f32(0.0)
}

/// `a * b + c`.
#[inline]
#[target_feature(enable = "neon")]
fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
    vfmaq_f32(c, a, b)
}

/// Loads 4 f16 as f32.
///
/// # Safety
/// `p` points to 8 readable bytes.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn load_4_halves(p: *const u8) -> float32x4_t {
    // SAFETY: as the caller promises; every AArch64 processor converts halves.
    unsafe { vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p.cast()))) }
}

/// The sum of the lanes of each vector.
#[inline]
#[target_feature(enable = "neon")]
fn horizontal_sums<const R: usize, const C: usize>(sums: [[float32x4_t; C]; R]) -> [[f32; C]; R] {
    let mut totals = [[0.0; C]; R];
    for r in 0..R {
        for c in 0..C {
            totals[r][c] = vaddvq_f32(sums[r][c]);
        }
    }
    totals
}

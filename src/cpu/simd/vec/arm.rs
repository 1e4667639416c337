//! Vectors of 4 floats.

use super::tiles::vector_products;
use std::arch::aarch64::*;

vector_products!(neon, "neon", 4, float32x4_t, zero, vld1q_f32, vst1q_f32, vdupq_n_f32, fused, halves, totals, 4, 4, 4);

#[inline]
#[target_feature(enable = "neon")]
fn zero() -> float32x4_t {
    vdupq_n_f32(0.0)
}

/// `a * b + c`.
#[inline]
#[target_feature(enable = "neon")]
fn fused(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
    vfmaq_f32(c, a, b)
}

/// # Safety
/// 8 bytes lie there.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn halves(p: *const u8) -> float32x4_t {
    // SAFETY: as the caller promises; every AArch64 processor converts halves.
    unsafe { vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p.cast()))) }
}

/// The sum of the lanes of each vector.
#[inline]
#[target_feature(enable = "neon")]
fn totals<const R: usize, const C: usize>(sums: [[float32x4_t; C]; R]) -> [[f32; C]; R] {
    let mut totals = [[0.0; C]; R];
    for r in 0..R {
        for c in 0..C {
            totals[r][c] = vaddvq_f32(sums[r][c]);
        }
    }
    totals
}

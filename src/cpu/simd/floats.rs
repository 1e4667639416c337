//! Products of strips of F32, F16 and BF16 with columns of f32.

use super::lanes::Lanes;
use super::{AHEAD, Sums, asks_ahead};
use crate::tensor::DType;

/// A float type in strips.
///
/// # Safety
/// The function needs the instructions of `L`, and element `k` of sixteen rows in the strip at `p`.
pub(super) trait Float {
    /// The type.
    const DTYPE: DType;

    /// Element `k` of sixteen rows.
    unsafe fn load<L: Lanes>(p: *const u8, k: usize) -> L::Float;
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct BF16;

impl Float for F32 {
    const DTYPE: DType = DType::F32;

    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8, k: usize) -> L::Float {
        // SAFETY: as the caller vouches.
        unsafe { L::load_floats(p.add(64 * k).cast()) }
    }
}

impl Float for F16 {
    const DTYPE: DType = DType::F16;

    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8, k: usize) -> L::Float {
        // SAFETY: as the caller vouches.
        unsafe { L::load_halves(p.add(32 * k)) }
    }
}

impl Float for BF16 {
    const DTYPE: DType = DType::BF16;

    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8, k: usize) -> L::Float {
        // SAFETY: as the caller vouches. Two elements share a lane, and the high half of an f32 is the bf16.
        unsafe {
            let pair = L::load(p.add(64 * (k / 2)));
            let high = L::left(L::bytes(255), 16);
            L::as_float(L::and(L::left(pair, 16 * (1 - k as u32 % 2)), high))
        }
    }
}

/// Products of `S` strips of `k` elements with `C` columns: `out[c * stride + s]`.
///
/// # Safety
/// The instructions of `L`; strips of 16 rows of `F`, which has them for this `k`; columns of at least `k` f32, an even number; `out`
/// has room.
#[inline(always)]
pub(super) unsafe fn tile<L: Lanes, F: Float, const S: usize, const C: usize>(
    strips: [*const u8; S],
    columns: [*const f32; C],
    k: usize,
    out: &mut [Sums],
    stride: usize,
) {
    // SAFETY: elements below k are there in strips and columns.
    unsafe {
        // Two sums each, so that with few columns one product need not wait for the one before.
        let (mut even, mut odd) = ([[L::zeros(); S]; C], [[L::zeros(); S]; C]);
        let asks = C <= 2 && asks_ahead();
        let (step, bytes) = (32 * F::DTYPE.block_bytes(), 16 * F::DTYPE.block_bytes() * k);
        let twice = C * S <= 4 && C * S <= L::TWICE;
        // Two elements at once would leave a sum without a register: each addition to it would wait for a store.
        let at_once = if twice || L::BY_TWO { 2 } else { 1 };
        for i in 0..k / at_once {
            let i = i * at_once;
            if asks && i % 2 == 0 {
                // Behind a strip's end the next strips follow: those of this call are not asked for again.
                let ahead = step / 2 * i + AHEAD;
                let ahead = if ahead < bytes { ahead } else { ahead + (S - 1) * bytes };
                for s in 0..S {
                    for line in (0..step).step_by(64) {
                        L::prefetch(strips[s].wrapping_add(ahead + line));
                    }
                }
            }
            add::<L, F, S, C>(&mut even, strips, columns, i, 0);
            if twice {
                add::<L, F, S, C>(&mut odd, strips, columns, i, 1);
            } else if at_once == 2 {
                add::<L, F, S, C>(&mut even, strips, columns, i, 1);
            }
        }
        if k % at_once == 1 {
            add::<L, F, S, C>(&mut even, strips, columns, k - 1, 0);
        }
        for c in 0..C {
            for s in 0..S {
                L::store(out[c * stride + s].as_mut_ptr(), L::sum(even[c][s], odd[c][s]));
            }
        }
    }
}

/// Adds the products of element `k + i`: `i` is 0 or 1.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn add<L: Lanes, F: Float, const S: usize, const C: usize>(
    sums: &mut [[L::Float; S]; C],
    strips: [*const u8; S],
    columns: [*const f32; C],
    k: usize,
    i: usize,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut x = [L::zeros(); S];
        for s in 0..S {
            x[s] = F::load::<L>(strips[s], k + i);
        }
        for c in 0..C {
            let y = L::factor(columns[c].add(k), i);
            for s in 0..S {
                sums[c][s] = L::fused_factor(x[s], y, sums[c][s]);
            }
        }
    }
}

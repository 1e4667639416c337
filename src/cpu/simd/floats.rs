//! Products of strips of F32, F16 and BF16 with columns of f32, and of BF16 with columns of bf16.

use super::lanes::{Bf16Lanes, Lanes};
use super::{AHEAD, Out, asks_ahead};
use crate::tensor::DType;

/// A float type in strips, whose elements become f32.
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

/// How lanes `L` multiply a float type's strips with columns.
///
/// # Safety
/// The functions need the instructions of `L`, and step `i` of sixteen rows in the strip, or of the column.
pub(super) trait Product<L: Lanes> {
    /// The type.
    const DTYPE: DType;
    /// Elements that a step multiplies: four bytes of a column.
    const STEP: usize;
    /// A step of sixteen rows.
    type Rows: Copy;
    /// A step of a column, for every row.
    type Factor: Copy;

    unsafe fn rows(strip: *const u8, i: usize) -> Self::Rows;
    /// The first (`i` 0) or the second of two steps of a column.
    unsafe fn factor(column: *const f32, i: usize) -> Self::Factor;
    /// `sums` and the products.
    unsafe fn add(sums: L::Float, rows: Self::Rows, factor: Self::Factor) -> L::Float;
}

impl<L: Lanes, F: Float> Product<L> for F {
    const DTYPE: DType = F::DTYPE;
    const STEP: usize = 1;
    type Rows = L::Float;
    type Factor = L::Factor;

    #[inline(always)]
    unsafe fn rows(strip: *const u8, i: usize) -> L::Float {
        // SAFETY: as the caller vouches.
        unsafe { F::load::<L>(strip, i) }
    }

    #[inline(always)]
    unsafe fn factor(column: *const f32, i: usize) -> L::Factor {
        // SAFETY: as the caller vouches.
        unsafe { L::factor(column, i) }
    }

    #[inline(always)]
    unsafe fn add(sums: L::Float, rows: L::Float, factor: L::Factor) -> L::Float {
        // SAFETY: as the caller vouches.
        unsafe { L::fused_factor(rows, factor, sums) }
    }
}

/// BF16 as it is, with columns of bf16: two elements in each lane.
pub(super) struct Bf16Pairs;

impl<L: Bf16Lanes> Product<L> for Bf16Pairs {
    const DTYPE: DType = DType::BF16;
    const STEP: usize = 2;
    type Rows = L::Int;
    type Factor = L::Int;

    #[inline(always)]
    unsafe fn rows(strip: *const u8, i: usize) -> L::Int {
        // SAFETY: as the caller vouches.
        unsafe { L::load(strip.add(64 * i)) }
    }

    #[inline(always)]
    unsafe fn factor(column: *const f32, i: usize) -> L::Int {
        // SAFETY: as the caller vouches.
        unsafe { L::spread(column.add(i).cast()) }
    }

    #[inline(always)]
    unsafe fn add(sums: L::Float, rows: L::Int, factor: L::Int) -> L::Float {
        // SAFETY: as the caller vouches.
        unsafe { L::multiply_bf16(sums, rows, factor) }
    }
}

/// Products of `S` strips of `k` elements with `C` columns.
///
/// # Safety
/// The instructions of `L`; strips of 16 rows of `F`, which has them for this `k`; columns packed for it, of at least `k`
/// elements and an even number of steps; `out` has room.
#[inline(always)]
pub(super) unsafe fn tile<L: Lanes, F: Product<L>, const S: usize, const C: usize>(
    strips: [*const u8; S],
    columns: [*const f32; C],
    k: usize,
    mut out: Out<'_>,
) {
    let steps = k / F::STEP;
    // SAFETY: steps below these are there in strips and columns.
    unsafe {
        // Two sums each, so that with few columns one product need not wait for the one before.
        let (mut even, mut odd) = ([[L::zeros(); S]; C], [[L::zeros(); S]; C]);
        let asks = C <= 2 && asks_ahead();
        let (step, bytes) = (32 * F::STEP * F::DTYPE.block_bytes(), 16 * F::DTYPE.block_bytes() * k);
        let twice = C * S <= 4 && C * S <= L::TWICE;
        // Two steps at once would leave a sum without a register: each addition to it would wait for a store.
        let at_once = if twice || L::BY_TWO { 2 } else { 1 };
        for i in 0..steps / at_once {
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
        if steps % at_once == 1 {
            add::<L, F, S, C>(&mut even, strips, columns, steps - 1, 0);
        }
        for c in 0..C {
            for s in 0..S {
                out.put::<L>(c, s, L::sum(even[c][s], odd[c][s]));
            }
        }
    }
}

/// Adds the products of step `at + i`: `i` is 0 or 1.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn add<L: Lanes, F: Product<L>, const S: usize, const C: usize>(
    sums: &mut [[L::Float; S]; C],
    strips: [*const u8; S],
    columns: [*const f32; C],
    at: usize,
    i: usize,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut x = [F::rows(strips[0], at + i); S];
        for s in 1..S {
            x[s] = F::rows(strips[s], at + i);
        }
        for c in 0..C {
            let y = F::factor(columns[c].add(at), i);
            for s in 0..S {
                sums[c][s] = F::add(sums[c][s], x[s], y);
            }
        }
    }
}

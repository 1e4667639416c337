//! Micro-kernel for panels of F32, F16 and BF16 with columns of f32, and for panels of BF16 with columns of bf16.

use super::TileOutput;
use super::simd_ops::{SimdBf16Ops, SimdOps};
use crate::tensor::DType;

/// A float type in panels, converted to f32 as it is loaded.
///
/// # Safety
/// The function needs the instructions of `L`, and element `k` of sixteen rows in the panel at `p`.
pub(super) trait Float {
    /// The type.
    const DTYPE: DType;

    /// Element `k` of sixteen rows.
    unsafe fn load<L: SimdOps>(p: *const u8, k: usize) -> L::Float;
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct BF16;

impl Float for F32 {
    const DTYPE: DType = DType::F32;

    #[inline(always)]
    unsafe fn load<L: SimdOps>(p: *const u8, k: usize) -> L::Float {
        // SAFETY: the caller meets this function's requirements.
        unsafe { L::load_f32(p.add(64 * k).cast()) }
    }
}

impl Float for F16 {
    const DTYPE: DType = DType::F16;

    #[inline(always)]
    unsafe fn load<L: SimdOps>(p: *const u8, k: usize) -> L::Float {
        // SAFETY: the caller meets this function's requirements.
        unsafe { L::load_f16(p.add(32 * k)) }
    }
}

impl Float for BF16 {
    const DTYPE: DType = DType::BF16;

    #[inline(always)]
    unsafe fn load<L: SimdOps>(p: *const u8, k: usize) -> L::Float {
        // SAFETY: the caller meets this function's requirements. Two elements share a lane; a bf16 is the high half of an f32.
        unsafe {
            let pair = L::load_bytes(p.add(64 * (k / 2)));
            let high = L::shift_left(L::broadcast_u8(255), 16);
            L::bitcast_f32(L::and(L::shift_left(pair, 16 * (1 - k as u32 % 2)), high))
        }
    }
}

/// How the instruction set `L` multiplies panels of a float type by columns, one step along k at a time.
///
/// # Safety
/// The functions need the instructions of `L`, and step `i` of sixteen rows in the panel, or of the column.
pub(super) trait FloatProduct<L: SimdOps> {
    /// The type.
    const DTYPE: DType;
    /// Elements along k that a step multiplies: four bytes of a column.
    const STEP: usize;
    /// A step of sixteen rows.
    type RowsStep: Copy;
    /// A step of a column, broadcast to all rows.
    type ColumnStep: Copy;

    unsafe fn rows_step(panel: *const u8, i: usize) -> Self::RowsStep;
    /// The first (`i` = 0) or the second of two steps of a column.
    unsafe fn column_step(column: *const f32, i: usize) -> Self::ColumnStep;
    /// `sums` plus the products of one step.
    unsafe fn add(sums: L::Float, rows: Self::RowsStep, column_step: Self::ColumnStep) -> L::Float;
}

impl<L: SimdOps, F: Float> FloatProduct<L> for F {
    const DTYPE: DType = F::DTYPE;
    const STEP: usize = 1;
    type RowsStep = L::Float;
    type ColumnStep = L::ScaleVec;

    #[inline(always)]
    unsafe fn rows_step(panel: *const u8, i: usize) -> L::Float {
        // SAFETY: the caller meets this function's requirements.
        unsafe { F::load::<L>(panel, i) }
    }

    #[inline(always)]
    unsafe fn column_step(column: *const f32, i: usize) -> L::ScaleVec {
        // SAFETY: the caller meets this function's requirements.
        unsafe { L::load_scale(column, i) }
    }

    #[inline(always)]
    unsafe fn add(sums: L::Float, rows: L::Float, column_step: L::ScaleVec) -> L::Float {
        // SAFETY: the caller meets this function's requirements.
        unsafe { L::fma_scale(rows, column_step, sums) }
    }
}

/// BF16 without conversion, with columns of bf16: two elements in each lane.
pub(super) struct Bf16Pairs;

impl<L: SimdBf16Ops> FloatProduct<L> for Bf16Pairs {
    const DTYPE: DType = DType::BF16;
    const STEP: usize = 2;
    type RowsStep = L::Int;
    type ColumnStep = L::Int;

    #[inline(always)]
    unsafe fn rows_step(panel: *const u8, i: usize) -> L::Int {
        // SAFETY: the caller meets this function's requirements.
        unsafe { L::load_bytes(panel.add(64 * i)) }
    }

    #[inline(always)]
    unsafe fn column_step(column: *const f32, i: usize) -> L::Int {
        // SAFETY: the caller meets this function's requirements.
        unsafe { L::broadcast_u32(column.add(i).cast()) }
    }

    #[inline(always)]
    unsafe fn add(sums: L::Float, rows: L::Int, column_step: L::Int) -> L::Float {
        // SAFETY: the caller meets this function's requirements.
        unsafe { L::dot2_bf16(sums, rows, column_step) }
    }
}

/// Micro-kernel: a register tile of `S` panels by `C` columns, over `k` elements. `prefetch_distance`:
/// [`super::PanelReads::prefetch`].
///
/// # Safety
/// The processor has the instructions of `L`; the panels hold 16 rows of `F` with `k` elements; the columns are packed for `F`
/// with at least `k` elements and an even number of steps; `out` has space for the tile.
#[inline(always)]
pub(super) unsafe fn micro_kernel<L: SimdOps, F: FloatProduct<L>, const S: usize, const C: usize>(
    panels: [*const u8; S],
    columns: [*const f32; C],
    k: usize,
    prefetch_distance: usize,
    mut out: TileOutput<'_>,
) {
    let steps = k / F::STEP;
    // SAFETY: panels and columns have all steps below `steps`.
    unsafe {
        // Two accumulators for each sum if registers suffice: with few columns an FMA would otherwise wait for the previous
        // one.
        let (mut even, mut odd) = ([[L::zero_f32(); S]; C], [[L::zero_f32(); S]; C]);
        // Bytes of two steps of a panel, and of a whole panel.
        let (two_steps, panel_bytes) = (32 * F::STEP * F::DTYPE.block_bytes(), 16 * F::DTYPE.block_bytes() * k);
        let double_acc = C * S <= 4 && C * S <= L::MAX_DOUBLE_ACC;
        // With a single accumulator for each sum, most instruction sets take one step at a time: two steps would spill one
        // accumulator, and each addition to it would wait for a store.
        let at_once = if double_acc || L::FLOAT_STEPS_BY_TWO { 2 } else { 1 };
        for i in 0..steps / at_once {
            let i = i * at_once;
            if prefetch_distance > 0 && i % 2 == 0 {
                // At the end of a panel the next panels follow; panels of this call are skipped, as their own prefetches cover
                // them.
                let ahead = two_steps / 2 * i + prefetch_distance;
                let ahead = if ahead < panel_bytes { ahead } else { ahead + (S - 1) * panel_bytes };
                for s in 0..S {
                    for line in (0..two_steps).step_by(64) {
                        L::prefetch(panels[s].wrapping_add(ahead + line));
                    }
                }
            }
            add::<L, F, S, C>(&mut even, panels, columns, i, 0);
            if double_acc {
                add::<L, F, S, C>(&mut odd, panels, columns, i, 1);
            } else if at_once == 2 {
                add::<L, F, S, C>(&mut even, panels, columns, i, 1);
            }
        }
        if steps % at_once == 1 {
            add::<L, F, S, C>(&mut even, panels, columns, steps - 1, 0);
        }
        for c in 0..C {
            for s in 0..S {
                out.store::<L>(c, s, L::add(even[c][s], odd[c][s]));
            }
        }
    }
}

/// Adds the products of step `at + i`; `i` is 0 or 1.
///
/// # Safety
/// As [`micro_kernel`].
#[inline(always)]
unsafe fn add<L: SimdOps, F: FloatProduct<L>, const S: usize, const C: usize>(
    sums: &mut [[L::Float; S]; C],
    panels: [*const u8; S],
    columns: [*const f32; C],
    at: usize,
    i: usize,
) {
    // SAFETY: the caller meets this function's requirements.
    unsafe {
        let mut x = [F::rows_step(panels[0], at + i); S];
        for s in 1..S {
            x[s] = F::rows_step(panels[s], at + i);
        }
        for c in 0..C {
            let y = F::column_step(columns[c].add(at), i);
            for s in 0..S {
                sums[c][s] = F::add(sums[c][s], x[s], y);
            }
        }
    }
}

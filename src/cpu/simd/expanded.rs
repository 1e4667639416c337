//! Products with types that expand to 8-bit codes and a scale per sixteen elements ([`crate::tensor::quant::expand`]): the
//! i-quants, NVFP4, and the types of one or two bits.
//!
//! Rows stay as they are in device memory. With few columns, 256 elements of a row at a time are expanded to a buffer in the L1
//! cache and multiplied by up to four columns ([`dot`]). With more columns, sixteen rows are expanded to a panel, which the
//! micro-kernel multiplies by all of them ([`pack`], [`ExpandedPanels`]).

use super::packing::PackedColumn;
use super::panel_format::{PanelFormat, Scales};
use super::quant_dot::{SubBlock, sub_block};
use super::simd_ops::SimdOps;
use crate::cpu::panel::{Field, PANEL_ROWS};
use crate::tensor::DType;
use crate::tensor::quant::expand::{ExpandSuperblock, Expanded};
use bytemuck::Zeroable;
use std::hint::black_box;

/// Elements of a sub-block, which share a scale.
pub(super) const SUB: usize = 16;

/// Bytes ahead of a row that is expanded, for prefetches: as rows that are read in place.
const PREFETCH_DISTANCE: usize = 2048;

/// Bytes of 256 elements of sixteen rows in a panel.
const PANEL_BYTES: usize = PANEL_ROWS * size_of::<Expanded>();

/// Bytes of a panel of rows of `k` elements.
pub(super) fn panel_bytes(k: usize) -> usize {
    k.div_ceil(256).saturating_mul(PANEL_BYTES)
}

/// Panels of sixteen expanded rows. For each 256 elements: the scales of each sub-block side by side, then four codes plus 128 of
/// each row side by side, and so on.
pub(super) struct ExpandedPanels;

impl PanelFormat for ExpandedPanels {
    /// A type of as many elements, and the partner of most: one type stands for all, because their panels are the same.
    const DTYPE: DType = DType::Q8_K;
    /// None: such panels are not made in place.
    const FIELDS: &'static [Field] = &[];
    const BYTES: usize = PANEL_BYTES;
    const SUB: usize = SUB;
    const TOP: i32 = 255;
    const ZERO: i32 = 128;
    const BIASED: bool = false;
    const PARTS: usize = 1;
    const EXPANDED: bool = true;

    #[inline(always)]
    fn sub(chunk: usize, _: usize) -> usize {
        chunk
    }

    #[inline(always)]
    unsafe fn codes<L: SimdOps>(p: *const u8, chunk: usize, _: usize, g: usize) -> L::Int {
        // SAFETY: the codes follow sixteen scales of sixteen rows; the caller guarantees that the block is whole, and that the
        // processor has the instructions.
        unsafe { L::load_bytes(p.add(4 * 16 * PANEL_ROWS + 64 * (4 * chunk + g))) }
    }

    /// None: [`blocks`] reads the scale of each sub-block.
    #[inline(always)]
    unsafe fn scales<L: SimdOps>(_: *const u8) -> Scales<L> {
        // SAFETY: uses registers only; the caller guarantees that the processor has the instructions.
        unsafe { Scales::single(L::zero_f32(), L::zero_f32()) }
    }
}

/// Expands sixteen rows to a panel; `bytes` is the size of 256 elements.
///
/// # Panics
/// If the panel is shorter than [`panel_bytes`] of the rows: a bug of the caller.
pub(super) fn pack(expand: ExpandSuperblock, bytes: usize, rows: &[&[u8]; PANEL_ROWS], panel: &mut [u8]) {
    let mut block = Expanded::zeroed();
    for (r, row) in rows.iter().enumerate() {
        for (row, panel) in row.chunks(bytes).zip(panel.chunks_exact_mut(PANEL_BYTES)) {
            expand(row, &mut block);
            let (scales, codes) = panel.as_chunks_mut::<4>().0.split_at_mut(16 * PANEL_ROWS);
            for (to, scale) in scales.iter_mut().skip(r).step_by(PANEL_ROWS).zip(&block.scales) {
                *to = scale.to_le_bytes();
            }
            for (to, codes) in codes.iter_mut().skip(r).step_by(PANEL_ROWS).zip(block.codes.as_chunks::<4>().0) {
                *to = codes.map(|code| code as u8 ^ 0x80);
            }
        }
    }
}

/// Micro-kernel over `count` times 256 elements of panels of [`ExpandedPanels`].
///
/// # Safety
/// As [`super::quant_dot::micro_kernel`], with `k = 256 * count`.
#[inline(always)]
pub(super) unsafe fn blocks<L: SimdOps, F: PanelFormat, const S: usize, const C: usize>(
    mut panels: [*const u8; S],
    columns: [PackedColumn; C],
    count: usize,
) -> [[L::Float; S]; C] {
    // SAFETY: elements 256 b and following of the panels are multiplied by the same elements of the columns, which exist.
    unsafe {
        let mut totals = [[L::zero_f32(); S]; C];
        for b in 0..count {
            // `black_box` keeps the compiler from unrolling the loop.
            for sub in 0..black_box(256 / SUB) {
                if !L::I32_DOT || S * C > L::MAX_DOUBLE_ACC {
                    // The integer sums fill the registers: the compiler must not keep the totals in registers meanwhile.
                    black_box(&mut totals);
                }
                let place = SubBlock { k: 256 * b + SUB * sub, number: 256 / SUB * b + sub, chunk: sub, part: 0 };
                let sums = sub_block::<L, F, S, C>(panels, columns, place);
                for s in 0..S {
                    let row_scales = L::load_f32(panels[s].add(4 * PANEL_ROWS * sub).cast());
                    for c in 0..C {
                        let scales = L::mul(row_scales, L::broadcast_f32(columns[c].scales.add(8 * b + sub / 2)));
                        totals[c][s] = L::fma(L::int_to_f32(sums[c][s]), scales, totals[c][s]);
                    }
                }
            }
            for s in 0..S {
                panels[s] = panels[s].add(F::BYTES);
            }
        }
        totals
    }
}

/// Products of 256 expanded elements with columns, of an instruction set.
///
/// # Safety
/// All functions need the instructions of the implementing type.
pub(super) trait ExpandedDot {
    /// Partial sums of one column.
    type Sum: Copy;

    /// Sums of zero.
    unsafe fn zero() -> Self::Sum;

    /// Adds the products of a block with elements `256 * s` and following of the columns, which exist.
    unsafe fn add<const C: usize>(sums: &mut [Self::Sum; C], block: &Expanded, columns: &[PackedColumn; C], s: usize);

    /// The sum of the partial sums.
    unsafe fn total(sums: Self::Sum) -> f32;

    /// Software prefetch of the cache line at `p`; any address is allowed.
    unsafe fn prefetch(p: *const u8);
}

/// The expansion of one type, compiled for an instruction set.
pub(super) type ExpandFn = unsafe fn(&[u8], &mut Expanded);

/// Row dot products with any number of columns: `out[c * rows.len() + r]`. `bytes` is the size of 256 elements of a row.
///
/// # Safety
/// The processor has the instructions of `D` and `expand`; the columns have `padded` elements in codes with sums per sixteen, as
/// many as the rows have with padding.
#[inline(always)]
pub(super) unsafe fn dot<D: ExpandedDot>(
    rows: &[&[u8]],
    columns: &[&[u8]],
    padded: usize,
    out: &mut [f32],
    (bytes, expand): (usize, ExpandFn),
) {
    let mut done = 0;
    while done < columns.len() {
        let out = &mut out[done * rows.len()..];
        // SAFETY: the caller meets this function's requirements.
        unsafe {
            done += match columns[done..] {
                [a, b, c, d, ..] => dot_columns::<D, 4>(rows, [a, b, c, d], padded, out, (bytes, expand)),
                [a, b, _] | [a, b] => dot_columns::<D, 2>(rows, [a, b], padded, out, (bytes, expand)),
                [a] => dot_columns::<D, 1>(rows, [a], padded, out, (bytes, expand)),
                [] => 1,
            };
        }
    }
}

/// As [`dot`], for `C` columns; returns `C`.
///
/// # Safety
/// As [`dot`].
#[inline(always)]
unsafe fn dot_columns<D: ExpandedDot, const C: usize>(
    rows: &[&[u8]],
    columns: [&[u8]; C],
    padded: usize,
    out: &mut [f32],
    (bytes, expand): (usize, ExpandFn),
) -> usize {
    let mut parts = [PackedColumn::NONE; C];
    for c in 0..C {
        // Only codes and scales are read, whose place does not depend on the sums.
        parts[c] = PackedColumn::new(columns[c], padded, 32);
    }
    let mut block = Expanded::zeroed();
    for r in 0..rows.len() {
        // SAFETY: rows and columns have equally many blocks with padding, so block s of the columns exists; the caller guarantees
        // that the processor has the instructions.
        unsafe {
            let mut sums = [D::zero(); C];
            for (s, row) in rows[r].chunks(bytes).enumerate().take(padded / 256) {
                for line in 0..bytes.div_ceil(64) {
                    D::prefetch(row.as_ptr().wrapping_add(PREFETCH_DISTANCE + 64 * line));
                }
                expand(row, &mut block);
                D::add(&mut sums, &block, &parts, s);
            }
            for c in 0..C {
                out[c * rows.len() + r] = D::total(sums[c]);
            }
        }
    }
    C
}

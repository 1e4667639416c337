//! Micro-kernel for quantised panels with many columns by `smmla`, the matrix instruction of `i8mm`: two rows of eight codes
//! times two columns of eight.
//!
//! A panel has four codes of each row side by side, the instruction needs eight. Therefore 256 elements of a panel are
//! unpacked once into pairs of rows, and then multiplied by all columns, two at a time. The sums stay in the instruction's
//! two-by-two layout until the end of the 256 elements.

use super::dot_instructions::{DotProd, smmla};
use super::simd_ops::NeonOps;
use crate::cpu::simd::packing::{PackedColumn, RhsPacking};
use crate::cpu::simd::panel_format::{PanelFormat, Scales};
use crate::cpu::simd::quant_dot::dot_minima;
use crate::cpu::simd::simd_ops::SimdOps;
use crate::cpu::simd::{TileOutput, unroll};
use std::arch::aarch64::*;

type L = NeonOps<DotProd>;

/// Pairs of rows in a panel.
const ROW_PAIRS: usize = 8;

/// Up to 256 elements of a panel, unpacked: one superblock, or eight blocks.
struct UnpackedPanel {
    /// For each eight elements: the codes of each pair of rows, less the code for zero.
    codes: [[int8x16_t; ROW_PAIRS]; 32],
    /// For each sub-block: the scales of each pair of rows, each scale twice. Superblocks have integer scales.
    scales: [[float32x4_t; ROW_PAIRS]; 16],
    /// The scales of each block; a superblock has only entry 0.
    blocks: [Scales<L>; 8],
}

impl UnpackedPanel {
    fn new() -> UnpackedPanel {
        // SAFETY: registers only; NEON belongs to the architecture.
        unsafe {
            let (zero, zeros) = (L::zero_int(), L::zero_f32());
            let none = Scales { d: zeros, m: zeros, scales: [zero; 4], mins: [zero; 4] };
            UnpackedPanel {
                codes: [[vdupq_n_s8(0); ROW_PAIRS]; 32],
                scales: [[zeros[0]; ROW_PAIRS]; 16],
                blocks: [none; 8],
            }
        }
    }

    /// Unpacks a superblock, or `blocks` blocks.
    ///
    /// # Safety
    /// `p` points to the superblock, or to the blocks, of sixteen rows.
    #[inline(always)]
    unsafe fn fill<F: PanelFormat>(&mut self, p: *const u8, blocks: usize) {
        let chunks = F::DTYPE.block_len() / (F::SUB * F::PARTS);
        for b in 0..blocks {
            // SAFETY: the caller meets this function's requirements; chunks and parts are within the format's.
            unsafe {
                let p = p.add(b * F::BYTES);
                let block = F::scales::<L>(p);
                self.blocks[b] = block;
                for chunk in 0..chunks {
                    unroll!(part in [0 1 2 3] {
                        if part < F::PARTS {
                            let sub = b + F::sub(chunk, part);
                            let scale = if F::DTYPE.block_len() == 32 {
                                block.d
                            } else {
                                L::int_to_f32(L::sign_extend_byte(self.blocks[b].scales[sub / 4], (sub % 4) as u32))
                            };
                            for q in 0..4 {
                                self.scales[sub][2 * q] = vzip1q_f32(scale[q], scale[q]);
                                self.scales[sub][2 * q + 1] = vzip2q_f32(scale[q], scale[q]);
                            }
                            unroll!(i in [0 1 2 3] {
                                if i < F::SUB / 8 {
                                    let pairs = unpack_row_pairs::<F>(p, chunk, part, i);
                                    self.codes[sub * (F::SUB / 8) + i] = pairs;
                                }
                            });
                        }
                    });
                }
            }
        }
    }

    /// The products of all rows with two columns over `subs` sub-blocks from `first` on, in pairs of rows.
    ///
    /// # Safety
    /// The processor has `i8mm`; the columns are packed for `F` and have these sub-blocks.
    #[inline(always)]
    unsafe fn multiply<F: PanelFormat>(
        &self,
        columns: [PackedColumn; 2],
        first: usize,
        subs: usize,
    ) -> [float32x4_t; ROW_PAIRS] {
        // SAFETY: the caller meets this function's requirements; the loads are within whole sub-blocks of the columns.
        unsafe {
            let mut totals = [vdupq_n_f32(0.0); ROW_PAIRS];
            for sub in 0..subs {
                let mut sums = [vdupq_n_s32(0); ROW_PAIRS];
                for i in 0..F::SUB / 16 {
                    let at = (first + sub) * F::SUB + 16 * i;
                    let a = vreinterpretq_s64_s8(vld1q_s8(columns[0].codes.add(at)));
                    let b = vreinterpretq_s64_s8(vld1q_s8(columns[1].codes.add(at)));
                    let eights = [vreinterpretq_s8_s64(vzip1q_s64(a, b)), vreinterpretq_s8_s64(vzip2q_s64(a, b))];
                    for h in 0..2 {
                        let codes = &self.codes[sub * (F::SUB / 8) + 2 * i + h];
                        for r in 0..ROW_PAIRS {
                            sums[r] = smmla(sums[r], codes[r], eights[h]);
                        }
                    }
                }
                let scales = &self.scales[sub];
                if F::DTYPE.block_len() == 32 {
                    // The column's scale of the block.
                    let a = vld1q_dup_f32(columns[0].scales.add(first + sub));
                    let d = vzip1q_f32(a, vld1q_dup_f32(columns[1].scales.add(first + sub)));
                    for r in 0..ROW_PAIRS {
                        totals[r] = vfmaq_f32(totals[r], vcvtq_f32_s32(sums[r]), vmulq_f32(scales[r], d));
                    }
                } else {
                    for r in 0..ROW_PAIRS {
                        totals[r] = vfmaq_f32(totals[r], vcvtq_f32_s32(sums[r]), scales[r]);
                    }
                }
            }
            totals
        }
    }

    /// Scales the results of [`UnpackedPanel::multiply`] for one column and adds the biases; `first` is the superblock or the
    /// first block.
    ///
    /// # Safety
    /// The column is packed for `F` and has these blocks.
    #[inline(always)]
    unsafe fn finish<F: PanelFormat>(
        &self,
        mut products: [float32x4_t; 4],
        column: PackedColumn,
        first: usize,
        blocks: usize,
    ) -> [float32x4_t; 4] {
        // SAFETY: the caller meets this function's requirements.
        unsafe {
            if F::DTYPE.block_len() == 32 {
                if F::BIASED {
                    for b in 0..blocks {
                        let sum = L::broadcast_f32(column.sums.add(first + b));
                        products = L::fma(self.blocks[b].m, sum, products);
                    }
                }
                return products;
            }
            let (block, subs) = (&self.blocks[0], 256 / F::SUB);
            let mut total = L::mul(block.d, products);
            if F::BIASED {
                // The sums are packed with their signs changed.
                let mins = dot_minima::<L>(block, column.int_sums.add(2 * subs * first), subs);
                total = L::fma(block.m, L::int_to_f32(mins), total);
            }
            L::mul(total, L::broadcast_f32(column.scales.add(8 * first)))
        }
    }
}

/// Elements `8 i` to `8 i + 7` of a sub-block, in pairs of rows, less the code for zero.
///
/// # Safety
/// As [`PanelFormat::codes`].
#[inline(always)]
unsafe fn unpack_row_pairs<F: PanelFormat>(
    p: *const u8,
    chunk: usize,
    part: usize,
    i: usize,
) -> [int8x16_t; ROW_PAIRS] {
    // SAFETY: the caller meets this function's requirements.
    unsafe {
        let mut fours = [F::codes::<L>(p, chunk, part, 2 * i), F::codes::<L>(p, chunk, part, 2 * i + 1)];
        if F::ZERO != 0 {
            for h in 0..2 {
                fours[h] = L::sub_bytes(fours[h], L::broadcast_u8(F::ZERO as u8));
            }
        }
        let mut pairs = [vdupq_n_s8(0); ROW_PAIRS];
        for q in 0..4 {
            pairs[2 * q] = vreinterpretq_s8_u32(vzip1q_u32(fours[0][q], fours[1][q]));
            pairs[2 * q + 1] = vreinterpretq_s8_u32(vzip2q_u32(fours[0][q], fours[1][q]));
        }
        pairs
    }
}

/// Micro-kernel: one panel of `k` elements by all columns.
///
/// # Safety
/// The processor has `i8mm`; otherwise as [`crate::cpu::simd::quant_dot::micro_kernel`].
#[inline(always)]
pub(super) unsafe fn micro_kernel<F: PanelFormat>(
    panel: *const u8,
    columns: &[&[u8]],
    k: usize,
    mut out: TileOutput<'_>,
) {
    let (padded, blocks) = (RhsPacking::codes::<F>(true).padded(k), k / F::DTYPE.block_len());
    // Blocks unpacked at once, and sub-blocks of each.
    let (at_once, subs) = (256 / F::DTYPE.block_len(), F::DTYPE.block_len() / F::SUB);
    let mut unpacked = UnpackedPanel::new();
    for first in (0..blocks).step_by(at_once) {
        let count = at_once.min(blocks - first);
        // SAFETY: the panel has `blocks` blocks, the columns as many elements. A last single column is paired with itself.
        unsafe {
            unpacked.fill::<F>(panel.add(first * F::BYTES), count);
            for (pair, columns) in columns.chunks(2).enumerate() {
                let both = [columns[0], columns[columns.len() - 1]];
                let parts = [PackedColumn::new(both[0], padded, F::SUB), PackedColumn::new(both[1], padded, F::SUB)];
                let sums = unpacked.multiply::<F>(parts, first * subs, count * subs);
                let mut products = [L::zero_f32(); 2];
                for q in 0..4 {
                    products[0][q] = vuzp1q_f32(sums[2 * q], sums[2 * q + 1]);
                    products[1][q] = vuzp2q_f32(sums[2 * q], sums[2 * q + 1]);
                }
                for c in 0..columns.len() {
                    let total = unpacked.finish::<F>(products[c], parts[c], first, count);
                    out.store::<L>(2 * pair + c, 0, total);
                }
            }
            // The following blocks accumulate.
            out.accumulate = true;
        }
    }
}

//! Products of strips of block types with many columns, by the matrix instruction: two rows of eight codes with two
//! columns of eight.
//!
//! A strip has four codes of each row side by side, the instruction wants eight. So 256 elements of a strip are taken apart
//! once, into pairs of rows, and then meet all columns two by two. Sums stay as the instruction leaves them, two by two,
//! until the end of the 256 elements.

use super::lanes::Neon;
use super::products::{DotProd, add_matrix};
use crate::cpu::simd::codes::minima;
use crate::cpu::simd::formats::{Format, Scales};
use crate::cpu::simd::lanes::Lanes;
use crate::cpu::simd::packing::{Packing, Parts};
use crate::cpu::simd::{Out, unroll};
use std::arch::aarch64::*;

type L = Neon<DotProd>;

/// Pairs of rows in a strip.
const PAIRS: usize = 8;

/// Up to 256 elements of a strip: a superblock, or eight blocks.
struct Group {
    /// By eight elements: the codes of pairs of rows, less their zero.
    codes: [[int8x16_t; PAIRS]; 32],
    /// By sub-block: the scales of pairs of rows, each twice. Those of superblocks are whole numbers.
    scales: [[float32x4_t; PAIRS]; 16],
    /// By block: its scales. A superblock is the first.
    blocks: [Scales<L>; 8],
}

impl Group {
    fn new() -> Group {
        // SAFETY: registers only; NEON belongs to the architecture.
        unsafe {
            let (zero, zeros) = (L::zero(), L::zeros());
            let none = Scales { d: zeros, m: zeros, scales: [zero; 4], mins: [zero; 4] };
            Group { codes: [[vdupq_n_s8(0); PAIRS]; 32], scales: [[zeros[0]; PAIRS]; 16], blocks: [none; 8] }
        }
    }

    /// Takes a superblock apart, or `blocks` blocks.
    ///
    /// # Safety
    /// They lie at `p`, of sixteen rows.
    #[inline(always)]
    unsafe fn fill<F: Format>(&mut self, p: *const u8, blocks: usize) {
        let chunks = F::DTYPE.block_len() / (F::SUB * F::PARTS);
        for b in 0..blocks {
            // SAFETY: as the caller vouches; chunks and parts are those of the format.
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
                                L::to_float(L::signed_byte(self.blocks[b].scales[sub / 4], (sub % 4) as u32))
                            };
                            for q in 0..4 {
                                self.scales[sub][2 * q] = vzip1q_f32(scale[q], scale[q]);
                                self.scales[sub][2 * q + 1] = vzip2q_f32(scale[q], scale[q]);
                            }
                            unroll!(i in [0 1 2 3] {
                                if i < F::SUB / 8 {
                                    let pairs = pairs::<F>(p, chunk, part, i);
                                    self.codes[sub * (F::SUB / 8) + i] = pairs;
                                }
                            });
                        }
                    });
                }
            }
        }
    }

    /// The products of all rows with two columns from their sub-block `first` on: `subs` of them, in pairs of rows.
    ///
    /// # Safety
    /// The processor has `i8mm`; the columns are packed for `F` and have the sub-blocks.
    #[inline(always)]
    unsafe fn multiply<F: Format>(&self, columns: [Parts; 2], first: usize, subs: usize) -> [float32x4_t; PAIRS] {
        // SAFETY: as the caller vouches; loads of whole sub-blocks of columns.
        unsafe {
            let mut totals = [vdupq_n_f32(0.0); PAIRS];
            for sub in 0..subs {
                let mut sums = [vdupq_n_s32(0); PAIRS];
                for i in 0..F::SUB / 16 {
                    let at = (first + sub) * F::SUB + 16 * i;
                    let a = vreinterpretq_s64_s8(vld1q_s8(columns[0].codes.add(at)));
                    let b = vreinterpretq_s64_s8(vld1q_s8(columns[1].codes.add(at)));
                    let eights = [vreinterpretq_s8_s64(vzip1q_s64(a, b)), vreinterpretq_s8_s64(vzip2q_s64(a, b))];
                    for h in 0..2 {
                        let codes = &self.codes[sub * (F::SUB / 8) + 2 * i + h];
                        for r in 0..PAIRS {
                            sums[r] = add_matrix(sums[r], codes[r], eights[h]);
                        }
                    }
                }
                let scales = &self.scales[sub];
                if F::DTYPE.block_len() == 32 {
                    // The scale of a column's block.
                    let a = vld1q_dup_f32(columns[0].scales.add(first + sub));
                    let d = vzip1q_f32(a, vld1q_dup_f32(columns[1].scales.add(first + sub)));
                    for r in 0..PAIRS {
                        totals[r] = vfmaq_f32(totals[r], vcvtq_f32_s32(sums[r]), vmulq_f32(scales[r], d));
                    }
                } else {
                    for r in 0..PAIRS {
                        totals[r] = vfmaq_f32(totals[r], vcvtq_f32_s32(sums[r]), scales[r]);
                    }
                }
            }
            totals
        }
    }

    /// The products with a column of superblock or blocks number `first` and on, from what [`Group::multiply`] gave.
    ///
    /// # Safety
    /// The column is packed for `F` and has them.
    #[inline(always)]
    unsafe fn finish<F: Format>(
        &self,
        mut products: [float32x4_t; 4],
        column: Parts,
        first: usize,
        blocks: usize,
    ) -> [float32x4_t; 4] {
        // SAFETY: as the caller vouches.
        unsafe {
            if F::DTYPE.block_len() == 32 {
                if F::BIASED {
                    for b in 0..blocks {
                        let sum = L::spread_float(column.sums.add(first + b));
                        products = L::fused(self.blocks[b].m, sum, products);
                    }
                }
                return products;
            }
            let (block, subs) = (&self.blocks[0], 256 / F::SUB);
            let mut total = L::times(block.d, products);
            if F::BIASED {
                // Packed with a minus.
                let mins = minima::<L>(block, column.wholes.add(2 * subs * first), subs);
                total = L::fused(block.m, L::to_float(mins), total);
            }
            L::times(total, L::spread_float(column.scales.add(8 * first)))
        }
    }
}

/// Elements `8 i` to `8 i + 7` of a sub-block, in pairs of rows, less the code for 0.
///
/// # Safety
/// As [`Format::codes`].
#[inline(always)]
unsafe fn pairs<F: Format>(p: *const u8, chunk: usize, part: usize, i: usize) -> [int8x16_t; PAIRS] {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut fours = [F::codes::<L>(p, chunk, part, 2 * i), F::codes::<L>(p, chunk, part, 2 * i + 1)];
        if F::ZERO != 0 {
            for h in 0..2 {
                fours[h] = L::subtract_bytes(fours[h], L::bytes(F::ZERO as u8));
            }
        }
        let mut pairs = [vdupq_n_s8(0); PAIRS];
        for q in 0..4 {
            pairs[2 * q] = vreinterpretq_s8_u32(vzip1q_u32(fours[0][q], fours[1][q]));
            pairs[2 * q + 1] = vreinterpretq_s8_u32(vzip2q_u32(fours[0][q], fours[1][q]));
        }
        pairs
    }
}

/// Products of a strip of `k` elements with packed columns.
///
/// # Safety
/// The processor has `i8mm`; otherwise as [`crate::cpu::simd::codes::tile`].
#[inline(always)]
pub(super) unsafe fn tile<F: Format>(strip: *const u8, columns: &[&[u8]], k: usize, mut out: Out<'_>) {
    let (padded, blocks) = (Packing::codes::<F>(true).padded(k), k / F::DTYPE.block_len());
    // Blocks at once, and sub-blocks of each.
    let (most, subs) = (256 / F::DTYPE.block_len(), F::DTYPE.block_len() / F::SUB);
    let mut group = Group::new();
    for first in (0..blocks).step_by(most) {
        let count = most.min(blocks - first);
        // SAFETY: the strip has `blocks` blocks, the columns as many elements. The last column may stand alone: it is its
        // own partner.
        unsafe {
            group.fill::<F>(strip.add(first * F::BYTES), count);
            for (pair, columns) in columns.chunks(2).enumerate() {
                let both = [columns[0], columns[columns.len() - 1]];
                let parts = [Parts::new(both[0], padded, F::SUB), Parts::new(both[1], padded, F::SUB)];
                let sums = group.multiply::<F>(parts, first * subs, count * subs);
                let mut products = [L::zeros(); 2];
                for q in 0..4 {
                    products[0][q] = vuzp1q_f32(sums[2 * q], sums[2 * q + 1]);
                    products[1][q] = vuzp2q_f32(sums[2 * q], sums[2 * q + 1]);
                }
                for c in 0..columns.len() {
                    let total = group.finish::<F>(products[c], parts[c], first, count);
                    out.put::<L>(2 * pair + c, 0, total);
                }
            }
            // What the next blocks give goes on top.
            out.adds = true;
        }
    }
}

//! Micro-kernel for panels of block types with columns of codes.
//!
//! It computes `sum over sub-blocks of scale * column scale * (integer dot product of codes) + bias * (column sum)`. If the
//! code for zero is not 0, the integer accumulators start at minus the zero's contribution.

use super::packing::PackedColumn;
use super::panel_format::{PanelFormat, Scales};
use super::simd_ops::SimdOps;
use super::{TileOutput, expanded, i16_accumulate, unroll};
use std::hint::black_box;

/// Position of a sub-block in a column and in a block of the panels.
#[derive(Clone, Copy)]
pub(super) struct SubBlock {
    /// First element in the column.
    pub(super) k: usize,
    /// Index of the sub-block in the column.
    pub(super) number: usize,
    /// Chunk of its codes in the block: see [`PanelFormat::codes`].
    pub(super) chunk: usize,
    /// Part of its codes in the chunk: see [`PanelFormat::PARTS`].
    pub(super) part: usize,
}

/// Whether the kernel subtracts the zero from the codes of `F` before it multiplies them.
const fn subtracts_zero<L: SimdOps, F: PanelFormat>() -> bool {
    F::TOP > 127 && (L::SIGNED_CODES || !L::I32_DOT)
}

/// Micro-kernel: a register tile of `S` panels by `C` columns, over `k` elements. `prefetch_distance`:
/// [`super::PanelReads::prefetch`].
///
/// # Safety
/// The processor has the instructions of `L`; the panels hold 16 rows of `F`; the columns are packed for `F` with at least `k`
/// elements; `out` has space for the tile.
#[inline(always)]
pub(super) unsafe fn micro_kernel<L: SimdOps, F: PanelFormat, const S: usize, const C: usize>(
    panels: [*const u8; S],
    columns: [PackedColumn; C],
    k: usize,
    prefetch_distance: usize,
    mut out: TileOutput<'_>,
) {
    // SAFETY: the caller meets this function's requirements.
    unsafe {
        let totals = if F::EXPANDED {
            expanded::blocks::<L, F, S, C>(panels, columns, k.div_ceil(256))
        } else if F::DTYPE.block_len() < 256 {
            small_blocks::<L, F, S, C>(panels, columns, k / F::DTYPE.block_len(), prefetch_distance)
        } else if L::I32_DOT || F::TOP > 127 {
            superblocks::<L, F, S, C>(panels, columns, k / 256, prefetch_distance)
        } else {
            i16_accumulate::superblocks::<L, F, S, C>(panels, columns, k / 256, prefetch_distance)
        };
        for c in 0..C {
            for s in 0..S {
                out.store::<L>(c, s, totals[c][s]);
            }
        }
    }
}

/// Dot products over `blocks` blocks of less than 256 elements; a column has one scale for each 32 elements.
///
/// # Safety
/// As [`micro_kernel`], with `k` elements in these blocks.
#[inline(always)]
unsafe fn small_blocks<L: SimdOps, F: PanelFormat, const S: usize, const C: usize>(
    mut panels: [*const u8; S],
    columns: [PackedColumn; C],
    blocks: usize,
    prefetch_distance: usize,
) -> [[L::Float; S]; C] {
    let subs = F::DTYPE.block_len() / F::SUB;
    // SAFETY: block b of the panels is multiplied by its elements of the columns, which exist.
    unsafe {
        let mut totals = [[L::zero_f32(); S]; C];
        for b in 0..blocks {
            let prefetch_distance = distance_at::<F, S>(prefetch_distance, b, blocks);
            for sub in 0..subs {
                if prefetch_distance > 0 {
                    prefetch_next::<L, F, S>(panels, prefetch_distance, sub);
                }
                if !L::I32_DOT || S * C > L::MAX_DOUBLE_ACC {
                    // The integer sums fill the registers: the compiler must not keep the totals in registers meanwhile.
                    black_box(&mut totals);
                }
                let number = subs * b + sub;
                let place = SubBlock { k: F::SUB * number, number, chunk: sub, part: 0 };
                let sums = if L::I32_DOT || F::TOP > 127 {
                    sub_block::<L, F, S, C>(panels, columns, place)
                } else {
                    i16_accumulate::sub_block::<L, F, S, C>(panels, columns, place)
                };
                for s in 0..S {
                    let (d, m) = F::sub_scales::<L>(panels[s], sub);
                    for c in 0..C {
                        let scale = L::mul(d, L::broadcast_f32(columns[c].scales.add(F::SUB * number / 32)));
                        totals[c][s] = L::fma(L::int_to_f32(sums[c][s]), scale, totals[c][s]);
                        if F::BIASED {
                            totals[c][s] = L::fma(m, L::broadcast_f32(columns[c].sums.add(number)), totals[c][s]);
                        }
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

/// Dot products over `blocks` superblocks of 256 elements (K-quants); a column has one scale for each superblock.
///
/// # Safety
/// As [`micro_kernel`], with `k = 256 * blocks`.
#[inline(always)]
unsafe fn superblocks<L: SimdOps, F: PanelFormat, const S: usize, const C: usize>(
    mut panels: [*const u8; S],
    columns: [PackedColumn; C],
    blocks: usize,
    prefetch_distance: usize,
) -> [[L::Float; S]; C] {
    let subs = 256 / F::SUB;
    // SAFETY: block b of the panels is multiplied by elements 256 b and following of the columns, which exist; sub-blocks are
    // below `subs`, their groups of four below SUB / 4.
    unsafe {
        let mut totals = [[L::zero_f32(); S]; C];
        for b in 0..blocks {
            let prefetch_distance = distance_at::<F, S>(prefetch_distance, b, blocks);
            // The integer sums fill the registers: the compiler must not keep the totals in registers meanwhile.
            black_box(&mut totals);
            let mut scales = [F::scales::<L>(panels[0]); S];
            for s in 1..S {
                scales[s] = F::scales::<L>(panels[s]);
            }
            // The bytes of the scales are indexed: they must be in memory, and the loop must not be unrolled.
            black_box(&mut scales);
            let mut inner = [[L::zero_f32(); S]; C];
            for chunk in 0..black_box(subs / F::PARTS) {
                unroll!(part in [0 1 2 3] {
                    if part < F::PARTS {
                        if prefetch_distance > 0 {
                            prefetch_next::<L, F, S>(panels, prefetch_distance, chunk * F::PARTS + part);
                        }
                        let sub = F::sub(chunk, part);
                        let place = SubBlock { k: 256 * b + F::SUB * sub, number: subs * b + sub, chunk, part };
                        let sums = sub_block::<L, F, S, C>(panels, columns, place);
                        for s in 0..S {
                            let scale = L::int_to_f32(L::sign_extend_byte(scales[s].scales[sub / 4], (sub % 4) as u32));
                            for c in 0..C {
                                inner[c][s] = L::fma(L::int_to_f32(sums[c][s]), scale, inner[c][s]);
                            }
                        }
                    }
                });
            }
            for s in 0..S {
                for c in 0..C {
                    totals[c][s] = add_superblock::<L, F>(totals[c][s], inner[c][s], &scales[s], &columns[c], b);
                }
                panels[s] = panels[s].add(F::BYTES);
            }
        }
        totals
    }
}

/// `total` plus the product of superblock `b`; `inner` is the sum of its integer dot products times the sub-blocks' scales.
///
/// # Safety
/// The processor has the instructions of `L`; the column is packed for `F` and has the superblock.
#[inline(always)]
pub(super) unsafe fn add_superblock<L: SimdOps, F: PanelFormat>(
    total: L::Float,
    inner: L::Float,
    scales: &Scales<L>,
    column: &PackedColumn,
    b: usize,
) -> L::Float {
    let subs = 256 / F::SUB;
    // SAFETY: the caller meets this function's requirements.
    unsafe {
        let mut product = L::mul(scales.d, inner);
        if F::BIASED {
            let mins = dot_minima::<L>(scales, column.int_sums.add(2 * subs * b), subs);
            // The sums are packed with their signs changed.
            product = L::fma(scales.m, L::int_to_f32(mins), product);
        }
        L::fma(L::broadcast_f32(column.scales.add(8 * b)), product, total)
    }
}

/// Products of the minima with the column's sums of their sub-blocks, which lie in pairs of i16: 0 2, 1 3, and so on.
///
/// # Safety
/// The processor has the instructions of `L`; `subs` sums lie at `sums`.
#[inline(always)]
pub(super) unsafe fn dot_minima<L: SimdOps>(scales: &Scales<L>, sums: *const u8, subs: usize) -> L::Int {
    // SAFETY: the caller meets this function's requirements.
    unsafe {
        let low = L::broadcast_u8_as_i16(255);
        let mut total = L::zero_int();
        for i in 0..subs / 4 {
            let (even, odd) = (L::and(scales.mins[i], low), L::and(L::shift_right(scales.mins[i], 8), low));
            total = L::dot2_i16(total, even, L::broadcast_u32(sums.add(8 * i)));
            total = L::dot2_i16(total, odd, L::broadcast_u32(sums.add(8 * i + 4)));
        }
        total
    }
}

/// Integer dot products of one sub-block.
///
/// # Safety
/// As [`micro_kernel`].
#[inline(always)]
pub(super) unsafe fn sub_block<L: SimdOps, F: PanelFormat, const S: usize, const C: usize>(
    panels: [*const u8; S],
    columns: [PackedColumn; C],
    place: SubBlock,
) -> [[L::Int; S]; C] {
    // SAFETY: the caller meets this function's requirements.
    unsafe {
        let mut sums = [[L::zero_int(); S]; C];
        if F::ZERO != 0 && !subtracts_zero::<L, F>() {
            for c in 0..C {
                sums[c] = [L::broadcast_u32(columns[c].int_sums.add(4 * place.number)); S];
            }
        }
        // The low and the high nibbles of the same bytes are used directly after each other.
        unroll!(i in [0 1 2 3 4 5 6 7] {
            if i < F::SUB / 4 {
                let g = if F::SUB == 32 && F::PARTS == 1 { i / 2 + 4 * (i % 2) } else { i };
                let mut codes = [L::zero_int(); S];
                for s in 0..S {
                    codes[s] = F::codes::<L>(panels[s], place.chunk, place.part, g);
                    if subtracts_zero::<L, F>() {
                        codes[s] = L::sub_bytes(codes[s], L::broadcast_u8(128));
                    }
                }
                for c in 0..C {
                    let y = L::load_x4(columns[c].codes.add(place.k).cast(), g);
                    for s in 0..S {
                        sums[c][s] = if F::TOP > 127 {
                            L::dot4_large(sums[c][s], codes[s], y)
                        } else {
                            L::dot4(sums[c][s], codes[s], y)
                        };
                    }
                }
            }
        });
        sums
    }
}

/// The prefetch distance at block `b` of panels of `blocks`. After the end of a panel the next panels follow; panels of this call are
/// skipped, as their own prefetches cover them.
#[inline(always)]
pub(super) fn distance_at<F: PanelFormat, const S: usize>(distance: usize, b: usize, blocks: usize) -> usize {
    let is_within = distance < (blocks - b) * F::BYTES;
    if distance == 0 || is_within { distance } else { distance + (S - 1) * blocks * F::BYTES }
}

/// Prefetches sub-block `i`'s share of the panel bytes `prefetch_distance` bytes ahead. Spread over the sub-blocks, because many
/// prefetches at once delay the loads; the same number of cache lines each time, so that the loop is unrolled.
///
/// # Safety
/// The processor has the instructions of `L`.
#[inline(always)]
pub(super) unsafe fn prefetch_next<L: SimdOps, F: PanelFormat, const S: usize>(
    panels: [*const u8; S],
    prefetch_distance: usize,
    i: usize,
) {
    let bytes = F::BYTES / (F::DTYPE.block_len() / F::SUB);
    for s in 0..S {
        for line in 0..bytes.div_ceil(64) {
            // SAFETY: the caller meets this function's requirements.
            unsafe { L::prefetch(panels[s].wrapping_add(prefetch_distance + i * bytes + 64 * line)) };
        }
    }
}

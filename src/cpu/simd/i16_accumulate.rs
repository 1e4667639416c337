//! Quantised dot products for instruction sets that accumulate in 16 bits (AVX2's `maddubs`, [`SimdOps::I32_DOT`] false), for
//! types with codes below 128.
//!
//! Each 32-bit lane holds two i16 accumulators for a sub-block, each for half of the lane's codes. They may wrap on the way,
//! but not in the result: the products of codes less their zero fit, and the accumulators start with the zero's contribution
//! subtracted. `madd` with the integer scales then widens them to 32 bits, so that the sums become floats only once per
//! superblock.

use super::packing::PackedColumn;
use super::panel_format::PanelFormat;
use super::quant_dot::{SubBlock, add_superblock, distance_at, prefetch_next};
use super::simd_ops::SimdOps;
use super::unroll;
use std::hint::black_box;

/// Groups of four elements whose products fit an i16 accumulator: two products of a code less its zero with at most 127.
const fn groups_before_overflow<F: PanelFormat>() -> usize {
    let largest = if F::TOP - F::ZERO > F::ZERO { F::TOP - F::ZERO } else { F::ZERO };
    let groups = (32767 / (2 * 127 * largest)) as usize;
    let groups = if groups < F::SUB / 4 { groups } else { F::SUB / 4 };
    // The subtracted start value is valid for a whole sub-block only.
    assert!(F::TOP > 127 || F::ZERO == 0 || groups == F::SUB / 4);
    groups
}

/// Integer dot products of one sub-block.
///
/// # Safety
/// As [`super::quant_dot::micro_kernel`].
#[inline(always)]
pub(super) unsafe fn sub_block<L: SimdOps, F: PanelFormat, const S: usize, const C: usize>(
    panels: [*const u8; S],
    columns: [PackedColumn; C],
    place: SubBlock,
) -> [[L::Int; S]; C] {
    // SAFETY: the caller meets this function's requirements.
    unsafe {
        let mut sums = [[L::zero_int(); S]; C];
        add::<L, F, S, C>(&mut sums, panels, columns, place, [L::broadcast_u8_as_i16(1); S]);
        sums
    }
}

/// Dot products over `blocks` superblocks of 256 elements; a column has one scale for each.
///
/// # Safety
/// As [`super::quant_dot::micro_kernel`].
#[inline(always)]
pub(super) unsafe fn superblocks<L: SimdOps, F: PanelFormat, const S: usize, const C: usize>(
    panels: [*const u8; S],
    columns: [PackedColumn; C],
    blocks: usize,
    prefetch_distance: usize,
) -> [[L::Float; S]; C] {
    // SAFETY: the caller meets this function's requirements.
    unsafe {
        if F::SUB == 32 || S == 1 {
            return panels_at_once::<L, F, S, C>(panels, columns, blocks, prefetch_distance);
        }
        // Sub-blocks of 16 need so many instructions each that two panels at once are not faster.
        let mut totals = [[L::zero_f32(); S]; C];
        for s in 0..S {
            let one = panels_at_once::<L, F, 1, C>([panels[s]], columns, blocks, prefetch_distance);
            for c in 0..C {
                totals[c][s] = one[c][0];
            }
        }
        totals
    }
}

/// As [`superblocks`], always with all `S` panels at once.
///
/// # Safety
/// As [`superblocks`].
#[inline(always)]
unsafe fn panels_at_once<L: SimdOps, F: PanelFormat, const S: usize, const C: usize>(
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
        let mut weights = [[L::zero_int(); S]; 16];
        for b in 0..blocks {
            let prefetch_distance = distance_at::<F, S>(prefetch_distance, b, blocks);
            // The integer sums fill the registers: the compiler must not keep the totals in registers meanwhile.
            black_box(&mut totals);
            let mut scales = [F::scales::<L>(panels[0]); S];
            for s in 0..S {
                scales[s] = F::scales::<L>(panels[s]);
                for i in 0..subs / 4 {
                    unroll!(j in [0 1 2 3] {
                        weights[4 * i + j][s] = L::sign_extend_byte_x2(scales[s].scales[i], j as u32);
                    });
                }
            }
            let mut inner = [[L::zero_int(); S]; C];
            // `black_box` keeps the compiler from unrolling the loop.
            for chunk in 0..black_box(subs / F::PARTS) {
                unroll!(part in [0 1 2 3] {
                    if part < F::PARTS {
                        if prefetch_distance > 0 {
                            prefetch_next::<L, F, S>(panels, prefetch_distance, chunk * F::PARTS + part);
                        }
                        // With few columns memory is the limit, and hardware prefetchers follow ascending addresses: the
                        // compiler must not move the loads of one part before the loads of another.
                        let panels = if C <= 2 { black_box(panels) } else { panels };
                        let sub = F::sub(chunk, part);
                        let place = SubBlock { k: 256 * b + F::SUB * sub, number: subs * b + sub, chunk, part };
                        if S * C > L::MAX_DOUBLE_ACC {
                            black_box(&mut inner);
                        }
                        add::<L, F, S, C>(&mut inner, panels, columns, place, weights[sub]);
                    }
                });
            }
            for s in 0..S {
                for c in 0..C {
                    let inner = L::int_to_f32(inner[c][s]);
                    totals[c][s] = add_superblock::<L, F>(totals[c][s], inner, &scales[s], &columns[c], b);
                }
                panels[s] = panels[s].add(F::BYTES);
            }
        }
        totals
    }
}

/// Adds `weights` (the same in both i16 of each lane) times the code products of a sub-block.
///
/// # Safety
/// As [`super::quant_dot::micro_kernel`].
#[inline(always)]
unsafe fn add<L: SimdOps, F: PanelFormat, const S: usize, const C: usize>(
    sums: &mut [[L::Int; S]; C],
    panels: [*const u8; S],
    columns: [PackedColumn; C],
    place: SubBlock,
    weights: [L::Int; S],
) {
    // SAFETY: the caller meets this function's requirements.
    unsafe {
        let mut partial = [[L::zero_int(); S]; C];
        if F::ZERO != 0 {
            for c in 0..C {
                partial[c] = [L::broadcast_u32(columns[c].int_sums.add(4 * place.number)); S];
            }
        }
        unroll!(g in [0 1 2 3 4 5 6 7] {
            if g < F::SUB / 4 {
                for s in 0..S {
                    let codes = F::codes::<L>(panels[s], place.chunk, place.part, g);
                    for c in 0..C {
                        let y = L::load_x4(columns[c].codes.add(place.k).cast(), g);
                        partial[c][s] = L::dot4(partial[c][s], codes, y);
                    }
                }
                if (g + 1).is_multiple_of(const { groups_before_overflow::<F>() }) || g + 1 == F::SUB / 4 {
                    for c in 0..C {
                        for s in 0..S {
                            sums[c][s] = L::dot2_i16(sums[c][s], partial[c][s], weights[s]);
                            partial[c][s] = L::zero_int();
                        }
                    }
                }
            }
        });
    }
}

//! Products of strips of block types by instruction sets that sum products of codes in 16 bits ([`Lanes::EXACT`] false), of
//! types with codes below 128.
//!
//! A sub-block's products are summed in pairs of i16, half of each lane's codes in each. On the way these sums may wrap: those of
//! codes less their zero, which they end as, fit, as sums start at what the zero takes away. Whole-number scales then
//! multiply them as they become 32 bits wide, so that a superblock becomes floats once.

use super::codes::{Place, add_superblock, ask};
use super::formats::Format;
use super::lanes::Lanes;
use super::packing::Parts;
use super::unroll;
use std::hint::black_box;

/// Groups of four elements of a sub-block whose products fit 16 bits: of two codes each, less their zero, with at most 127.
const fn run<F: Format>() -> usize {
    let largest = if F::TOP - F::ZERO > F::ZERO { F::TOP - F::ZERO } else { F::ZERO };
    let groups = (32767 / (2 * 127 * largest)) as usize;
    let run = if groups < F::SUB / 4 { groups } else { F::SUB / 4 };
    // A start holds for a whole sub-block.
    assert!(F::TOP > 127 || F::ZERO == 0 || run == F::SUB / 4);
    run
}

/// Sums of code products of one sub-block.
///
/// # Safety
/// As [`super::codes::tile`].
#[inline(always)]
pub(super) unsafe fn sub_block<L: Lanes, F: Format, const S: usize, const C: usize>(
    strips: [*const u8; S],
    columns: [Parts; C],
    place: Place,
) -> [[L::Int; S]; C] {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut sums = [[L::zero(); S]; C];
        add::<L, F, S, C>(&mut sums, strips, columns, place, [L::words(1); S]);
        sums
    }
}

/// Products of `blocks` blocks of 256 elements, for each of which a column has one scale.
///
/// # Safety
/// As [`super::codes::tile`].
#[inline(always)]
pub(super) unsafe fn superblocks<L: Lanes, F: Format, const S: usize, const C: usize>(
    strips: [*const u8; S],
    columns: [Parts; C],
    blocks: usize,
    asks: bool,
) -> [[L::Float; S]; C] {
    // SAFETY: as the caller vouches.
    unsafe {
        if F::SUB == 32 || S == 1 {
            return together::<L, F, S, C>(strips, columns, blocks, asks);
        }
        // So much is done for each sub-block of 16 that two strips at once do not come sooner.
        let mut totals = [[L::zeros(); S]; C];
        for s in 0..S {
            let one = together::<L, F, 1, C>([strips[s]], columns, blocks, asks);
            for c in 0..C {
                totals[c][s] = one[c][0];
            }
        }
        totals
    }
}

/// # Safety
/// As [`superblocks`].
#[inline(always)]
unsafe fn together<L: Lanes, F: Format, const S: usize, const C: usize>(
    mut strips: [*const u8; S],
    columns: [Parts; C],
    blocks: usize,
    asks: bool,
) -> [[L::Float; S]; C] {
    let subs = 256 / F::SUB;
    // SAFETY: block b of the strips meets elements 256 b and on of the columns, all of which are there; sub-blocks are
    // below `subs`, their groups of four below SUB / 4.
    unsafe {
        let mut totals = [[L::zeros(); S]; C];
        let mut weights = [[L::zero(); S]; 16];
        for b in 0..blocks {
            black_box(&mut totals);
            let mut scales = [F::scales::<L>(strips[0]); S];
            for s in 0..S {
                scales[s] = F::scales::<L>(strips[s]);
                for i in 0..subs / 4 {
                    unroll!(j in [0 1 2 3] {
                        weights[4 * i + j][s] = L::signed_pair(scales[s].scales[i], j as u32);
                    });
                }
            }
            let mut inner = [[L::zero(); S]; C];
            for chunk in 0..black_box(subs / F::PARTS) {
                unroll!(part in [0 1 2 3] {
                    if part < F::PARTS {
                        if asks {
                            ask::<L, F, S>(strips, chunk * F::PARTS + part);
                        }
                        // What few columns wait for is memory, and cores foresee reads in the order of the bytes: no part's are
                        // to move before those of another.
                        let strips = if C <= 2 { black_box(strips) } else { strips };
                        let sub = F::sub(chunk, part);
                        let place = Place { k: 256 * b + F::SUB * sub, number: subs * b + sub, chunk, part };
                        if S * C > L::TWICE {
                            black_box(&mut inner);
                        }
                        add::<L, F, S, C>(&mut inner, strips, columns, place, weights[sub]);
                    }
                });
            }
            for s in 0..S {
                for c in 0..C {
                    let inner = L::to_float(inner[c][s]);
                    totals[c][s] = add_superblock::<L, F>(totals[c][s], inner, &scales[s], &columns[c], b);
                }
                strips[s] = strips[s].add(F::BYTES);
            }
        }
        totals
    }
}

/// Adds `weights`, the same in both i16 of each lane, times the products of a sub-block's codes.
///
/// # Safety
/// As [`super::codes::tile`].
#[inline(always)]
unsafe fn add<L: Lanes, F: Format, const S: usize, const C: usize>(
    sums: &mut [[L::Int; S]; C],
    strips: [*const u8; S],
    columns: [Parts; C],
    place: Place,
    weights: [L::Int; S],
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut partial = [[L::zero(); S]; C];
        if F::ZERO != 0 {
            for c in 0..C {
                partial[c] = [L::spread(columns[c].wholes.add(4 * place.number)); S];
            }
        }
        unroll!(g in [0 1 2 3 4 5 6 7] {
            if g < F::SUB / 4 {
                for s in 0..S {
                    let codes = F::codes::<L>(strips[s], place.chunk, place.part, g);
                    for c in 0..C {
                        let y = L::four(columns[c].codes.add(place.k).cast(), g);
                        partial[c][s] = L::multiply(partial[c][s], codes, y);
                    }
                }
                if (g + 1).is_multiple_of(const { run::<F>() }) || g + 1 == F::SUB / 4 {
                    for c in 0..C {
                        for s in 0..S {
                            sums[c][s] = L::multiply_pairs(sums[c][s], partial[c][s], weights[s]);
                            partial[c][s] = L::zero();
                        }
                    }
                }
            }
        });
    }
}

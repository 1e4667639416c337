//! Products of strips of block types with columns of codes.
//!
//! Everything is `sum over sub-blocks of scale * column scale * (sum of code products) + bias * (column sum)`, where sums of
//! codes with an offset start at what the offset takes away.

use super::formats::{Format, Scales};
use super::lanes::Lanes;
use super::packing::Parts;
use super::{AHEAD, Out, asks_ahead, pairs, unroll};
use std::hint::black_box;

/// A sub-block: its first element and its number in a column, and where its codes lie in a block ([`Format::codes`]).
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) k: usize,
    pub(super) number: usize,
    pub(super) chunk: usize,
    pub(super) part: usize,
}

/// Whether products are of codes of `F` less their zero.
const fn lowered<L: Lanes, F: Format>() -> bool {
    F::TOP > 127 && (L::SIGNED || !L::EXACT)
}

/// Products of `S` strips of `k` elements with `C` packed columns.
///
/// # Safety
/// The instructions of `L`; strips of 16 rows of `F`; columns packed for it, of at least `k` elements; `out` has room.
#[inline(always)]
pub(super) unsafe fn tile<L: Lanes, F: Format, const S: usize, const C: usize>(
    strips: [*const u8; S],
    columns: [Parts; C],
    k: usize,
    mut out: Out<'_>,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        // Where columns are too few to hide memory's latency. Sub-blocks of 16 take their codes from several places at once,
        // which no core foresees.
        let asks = C <= 2 && (asks_ahead() || F::SUB == 16);
        let totals = if F::DTYPE.block_len() == 32 {
            legacy::<L, F, S, C>(strips, columns, k / 32, asks)
        } else if L::EXACT {
            superblocks::<L, F, S, C>(strips, columns, k / 256, asks)
        } else {
            pairs::superblocks::<L, F, S, C>(strips, columns, k / 256, asks)
        };
        for c in 0..C {
            for s in 0..S {
                out.put::<L>(c, s, totals[c][s]);
            }
        }
    }
}

/// # Safety
/// As [`tile`], for `blocks` blocks of 32 elements.
#[inline(always)]
unsafe fn legacy<L: Lanes, F: Format, const S: usize, const C: usize>(
    mut strips: [*const u8; S],
    columns: [Parts; C],
    blocks: usize,
    asks: bool,
) -> [[L::Float; S]; C] {
    // SAFETY: block b of the strips meets elements 32 b and on of the columns, all of which are there.
    unsafe {
        let mut totals = [[L::zeros(); S]; C];
        for b in 0..blocks {
            if asks {
                ask::<L, F, S>(strips, 0);
            }
            if !L::EXACT || S * C > L::TWICE {
                // The sums fill the registers: the compiler must not keep the totals in them meanwhile.
                black_box(&mut totals);
            }
            let place = Place { k: 32 * b, number: b, chunk: 0, part: 0 };
            let sums = if L::EXACT || F::TOP > 127 {
                sub_block::<L, F, S, C>(strips, columns, place)
            } else {
                pairs::sub_block::<L, F, S, C>(strips, columns, place)
            };
            for s in 0..S {
                let scales = F::scales::<L>(strips[s]);
                for c in 0..C {
                    let scale = L::times(scales.d, L::spread_float(columns[c].scales.add(b)));
                    totals[c][s] = L::fused(L::to_float(sums[c][s]), scale, totals[c][s]);
                    if F::BIASED {
                        totals[c][s] = L::fused(scales.m, L::spread_float(columns[c].sums.add(b)), totals[c][s]);
                    }
                }
                strips[s] = strips[s].add(F::BYTES);
            }
        }
        totals
    }
}

/// # Safety
/// As [`tile`], for `blocks` blocks of 256 elements, for each of which a column has one scale.
#[inline(always)]
unsafe fn superblocks<L: Lanes, F: Format, const S: usize, const C: usize>(
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
        for b in 0..blocks {
            // The sums fill the registers: the compiler must not keep the totals in them meanwhile.
            black_box(&mut totals);
            let mut scales = [F::scales::<L>(strips[0]); S];
            for s in 1..S {
                scales[s] = F::scales::<L>(strips[s]);
            }
            // Bytes of scales are reached by number: they must lie in memory, and no loop over them be unrolled.
            black_box(&mut scales);
            let mut inner = [[L::zeros(); S]; C];
            for chunk in 0..black_box(subs / F::PARTS) {
                unroll!(part in [0 1 2 3] {
                    if part < F::PARTS {
                        if asks {
                            ask::<L, F, S>(strips, chunk * F::PARTS + part);
                        }
                        let sub = F::sub(chunk, part);
                        let place = Place { k: 256 * b + F::SUB * sub, number: subs * b + sub, chunk, part };
                        let sums = sub_block::<L, F, S, C>(strips, columns, place);
                        for s in 0..S {
                            let scale = L::to_float(L::signed_byte(scales[s].scales[sub / 4], (sub % 4) as u32));
                            for c in 0..C {
                                inner[c][s] = L::fused(L::to_float(sums[c][s]), scale, inner[c][s]);
                            }
                        }
                    }
                });
            }
            for s in 0..S {
                for c in 0..C {
                    totals[c][s] = add_superblock::<L, F>(totals[c][s], inner[c][s], &scales[s], &columns[c], b);
                }
                strips[s] = strips[s].add(F::BYTES);
            }
        }
        totals
    }
}

/// `total` and the product of superblock `b`, of which `inner` sums the code products by the sub-blocks' scales.
///
/// # Safety
/// The instructions of `L`; a column with the superblock, packed for `F`.
#[inline(always)]
pub(super) unsafe fn add_superblock<L: Lanes, F: Format>(
    total: L::Float,
    inner: L::Float,
    scales: &Scales<L>,
    column: &Parts,
    b: usize,
) -> L::Float {
    let subs = 256 / F::SUB;
    // SAFETY: as the caller vouches.
    unsafe {
        let mut product = L::times(scales.d, inner);
        if F::BIASED {
            let mins = minima::<L>(scales, column.wholes.add(2 * subs * b), subs);
            // Packed with a minus.
            product = L::fused(scales.m, L::to_float(mins), product);
        }
        L::fused(L::spread_float(column.scales.add(8 * b)), product, total)
    }
}

/// Sums of the products of minima with the column's sums of their sub-blocks, which lie in pairs of i16: 0 2, 1 3, and on.
///
/// # Safety
/// The instructions of `L`; `subs` sums at `sums`.
#[inline(always)]
pub(super) unsafe fn minima<L: Lanes>(scales: &Scales<L>, sums: *const u8, subs: usize) -> L::Int {
    // SAFETY: as the caller vouches.
    unsafe {
        let low = L::words(255);
        let mut total = L::zero();
        for i in 0..subs / 4 {
            let (even, odd) = (L::and(scales.mins[i], low), L::and(L::right(scales.mins[i], 8), low));
            total = L::multiply_pairs(total, even, L::spread(sums.add(8 * i)));
            total = L::multiply_pairs(total, odd, L::spread(sums.add(8 * i + 4)));
        }
        total
    }
}

/// Sums of code products of one sub-block.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn sub_block<L: Lanes, F: Format, const S: usize, const C: usize>(
    strips: [*const u8; S],
    columns: [Parts; C],
    place: Place,
) -> [[L::Int; S]; C] {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut sums = [[L::zero(); S]; C];
        if F::ZERO != 0 && !lowered::<L, F>() {
            for c in 0..C {
                sums[c] = [L::spread(columns[c].wholes.add(4 * place.number)); S];
            }
        }
        // Nibbles of the same bytes follow each other.
        unroll!(i in [0 1 2 3 4 5 6 7] {
            if i < F::SUB / 4 {
                let g = if F::SUB == 32 && F::PARTS == 1 { i / 2 + 4 * (i % 2) } else { i };
                let mut codes = [L::zero(); S];
                for s in 0..S {
                    codes[s] = F::codes::<L>(strips[s], place.chunk, place.part, g);
                    if lowered::<L, F>() {
                        codes[s] = L::subtract_bytes(codes[s], L::bytes(128));
                    }
                }
                for c in 0..C {
                    let y = L::four(columns[c].codes.add(place.k).cast(), g);
                    for s in 0..S {
                        sums[c][s] = if F::TOP > 127 {
                            L::multiply_large(sums[c][s], codes[s], y)
                        } else {
                            L::multiply(sums[c][s], codes[s], y)
                        };
                    }
                }
            }
        });
        sums
    }
}

/// Asks for sub-block `i`'s share of the strips' bytes that come next: a core that is asked for many lines at once lets its loads
/// wait. As many lines for each, so that no loop is left of it.
///
/// # Safety
/// The instructions of `L`.
#[inline(always)]
pub(super) unsafe fn ask<L: Lanes, F: Format, const S: usize>(strips: [*const u8; S], i: usize) {
    let bytes = F::BYTES / (F::DTYPE.block_len() / F::SUB);
    for s in 0..S {
        for line in 0..bytes.div_ceil(64) {
            // SAFETY: as the caller vouches.
            unsafe { L::prefetch(strips[s].wrapping_add(AHEAD + i * bytes + 64 * line)) };
        }
    }
}

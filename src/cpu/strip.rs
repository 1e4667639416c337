//! Strips: sixteen rows of a matrix, interleaved so that one vector holds the same elements of all of them.
//!
//! A strip has just the bytes of its rows, so that weights can change to it and back where they lie. A row is a sequence
//! of blocks, a block a sequence of [`Field`]s, and a field a sequence of units of 1, 2 or 4 bytes. A strip holds the
//! first blocks of all rows, then the second ones, and so on; inside, field by field and unit by unit, each unit of rows
//! 0 to 15 side by side. Codes come in units of four bytes: elements 4g to 4g + 3 of sixteen rows fill a vector of
//! sixteen 32-bit lanes, which is what the dot products of all instruction sets want.

use super::simd::strip_fields;
use super::simd::transpose::{Vector, fours, twos};
use crate::tensor::DType;
use std::array;

/// Rows of a strip.
pub(crate) const STRIP: usize = 16;

/// A part of a block: `count` units of `unit` bytes.
pub(super) struct Field {
    unit: usize,
    count: usize,
    change: Change,
}

/// What happens to the bytes of a field on the way into a strip.
#[derive(Clone, Copy)]
pub(super) enum Change {
    Nothing,
    /// i8 codes are raised by 128: dot products multiply unsigned with signed bytes.
    Raise,
    /// 32 bits of elements 4g + b move to bit g of byte b: a shift and a mask give those of group g, byte by byte.
    Fifths,
}

pub(super) const fn field(unit: usize, count: usize) -> Field {
    Field { unit, count, change: Change::Nothing }
}

pub(super) const fn changed(unit: usize, count: usize, change: Change) -> Field {
    Field { unit, count, change }
}

/// The fields of a block (those of a block type come from its format); `None` for types without strips. Floats have blocks of one element, BF16 of two, so that both halves of a lane are used.
const fn fields(dtype: DType) -> Option<&'static [Field]> {
    Some(match dtype {
        DType::F32 => const { &[field(4, 1)] },
        DType::F16 => const { &[field(2, 1)] },
        DType::BF16 => const { &[field(4, 1)] },
        _ => return strip_fields(dtype),
    })
}

/// Bytes of one block of `fields`.
fn block_bytes(fields: &[Field]) -> usize {
    fields.iter().map(|f| f.unit * f.count).sum()
}

/// Whether sixteen rows of `k` elements of `dtype` can become a strip of just their bytes.
pub(crate) fn packs(dtype: DType, k: usize) -> bool {
    let row = dtype.row_bytes(k).filter(|&bytes| bytes > 0);
    fields(dtype).zip(row).is_some_and(|(fields, bytes)| bytes.is_multiple_of(block_bytes(fields)))
}

/// Interleaves sixteen dense rows of equal length into a strip of as many bytes.
///
/// # Panics
/// When [`packs`] says that such rows have no strip, or lengths differ: a bug of the caller.
pub(crate) fn pack(dtype: DType, rows: &[&[u8]; STRIP], strip: &mut [u8]) {
    let fields = fields(dtype).expect("a type with strips");
    let (bytes, block) = (rows[0].len(), block_bytes(fields));
    assert!(bytes.is_multiple_of(block) && strip.len() == STRIP * bytes, "a strip of {} bytes", strip.len());
    assert!(rows.iter().all(|row| row.len() == bytes), "rows of {bytes} bytes");
    // Floats: a row is one field of many units.
    if let [Field { unit: 2, .. }] = fields {
        return interleave::<2>(rows, 0, strip);
    } else if fields.len() == 1 {
        return interleave::<4>(rows, 0, strip);
    }
    for (b, strip) in strip.chunks_exact_mut(STRIP * block).enumerate() {
        let (mut from, mut rest) = (b * block, strip);
        for field in fields {
            let (to, after) = rest.split_at_mut(STRIP * field.unit * field.count);
            match field.unit {
                1 => interleave::<1>(rows, from, to),
                2 => interleave::<2>(rows, from, to),
                _ => {
                    interleave::<4>(rows, from, to);
                    change(field.change, to, gather_fifths);
                }
            }
            (from, rest) = (from + field.unit * field.count, after);
        }
    }
}

/// Row `r` of a strip, as it was.
///
/// # Panics
/// As [`pack`], and when `r` is no row of a strip.
pub(crate) fn unpack_row(dtype: DType, strip: &[u8], r: usize, row: &mut [u8]) {
    let fields = fields(dtype).expect("a type with strips");
    let block = block_bytes(fields);
    assert!(row.len().is_multiple_of(block) && strip.len() == STRIP * row.len() && r < STRIP, "row {r} of a strip");
    for (strip, row) in strip.chunks_exact(STRIP * block).zip(row.chunks_exact_mut(block)) {
        let (mut from, mut to) = (strip, row);
        for field in fields {
            let (units, after) = from.split_at(STRIP * field.unit * field.count);
            let (part, rest) = to.split_at_mut(field.unit * field.count);
            for (unit, to) in units.chunks_exact(STRIP * field.unit).zip(part.chunks_exact_mut(field.unit)) {
                to.copy_from_slice(&unit[r * field.unit..][..field.unit]);
            }
            change(field.change, part, scatter_fifths);
            (from, to) = (after, rest);
        }
    }
}

/// Units of sixteen rows from byte `from` on, side by side: squares of them, as many as a vector has, and then the rest one
/// by one.
#[inline(always)]
fn interleave<const UNIT: usize>(rows: &[&[u8]; STRIP], from: usize, to: &mut [u8]) {
    const VECTOR: usize = size_of::<Vector>();
    // Units of one byte come singly.
    let whole = if UNIT == 1 { 0 } else { to.len() / (STRIP * VECTOR) * (STRIP * VECTOR) };
    let (squares, rest) = to.split_at_mut(whole);
    let mut at = from;
    for square in squares.chunks_exact_mut(STRIP * VECTOR) {
        let of = |row: usize| rows[row][at..].first_chunk().expect("a vector's bytes of each row");
        // Written out: a loop that calls a closure for each step stays a call.
        if UNIT == 2 {
            for r in [0, 8] {
                place(&twos(array::from_fn(|i| of(r + i))), r * UNIT, square);
            }
        } else {
            for r in [0, 4, 8, 12] {
                place(&fours(array::from_fn(|i| of(r + i))), r * UNIT, square);
            }
        }
        at += VECTOR;
    }
    for units in rest.as_chunks_mut::<UNIT>().0.chunks_exact_mut(STRIP) {
        for (unit, row) in units.iter_mut().zip(rows) {
            unit.copy_from_slice(&row[at..at + UNIT]);
        }
        at += UNIT;
    }
}

/// Vectors of units, from byte `at` of each sixteen on.
#[inline(always)]
fn place<const N: usize>(columns: &[Vector; N], at: usize, square: &mut [u8]) {
    for (column, units) in columns.iter().zip(square.chunks_exact_mut(STRIP * size_of::<Vector>() / N)) {
        units[at..at + column.len()].copy_from_slice(column);
    }
}

fn change(change: Change, bytes: &mut [u8], fifths: fn(u32) -> u32) {
    match change {
        Change::Nothing => {}
        Change::Raise => bytes.iter_mut().for_each(|b| *b ^= 0x80),
        Change::Fifths => {
            for word in bytes.as_chunks_mut::<4>().0 {
                *word = fifths(u32::from_le_bytes(*word)).to_le_bytes();
            }
        }
    }
}

/// Bit 4g + b of a word goes to bit 8b + g.
fn gather_fifths(word: u32) -> u32 {
    unshuffle(unshuffle(word))
}

/// The inverse of [`gather_fifths`].
fn scatter_fifths(word: u32) -> u32 {
    shuffle(shuffle(word))
}

/// The steps of a perfect shuffle of bits: swap what lies `by` apart under the mask.
const SWAPS: [(u32, u32); 4] = [(1, 0x2222_2222), (2, 0x0c0c_0c0c), (4, 0x00f0_00f0), (8, 0x0000_ff00)];

fn swap(word: u32, (by, mask): (u32, u32)) -> u32 {
    let differ = (word ^ (word >> by)) & mask;
    word ^ differ ^ (differ << by)
}

/// Even bits to the lower half, odd ones to the upper.
fn unshuffle(word: u32) -> u32 {
    SWAPS.into_iter().fold(word, swap)
}

/// The inverse of [`unshuffle`].
fn shuffle(word: u32) -> u32 {
    SWAPS.into_iter().rev().fold(word, swap)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Capability;

    #[test]
    fn rows_come_back() {
        let mut rng = fastrand::Rng::with_seed(7);
        let mut types = 0;
        for dtype in DType::ALL.iter().copied() {
            let k = 3 * dtype.block_len().max(32) * 8;
            if fields(dtype).is_none() {
                assert!(!packs(dtype, k), "{dtype}");
                continue;
            }
            types += 1;
            assert!(packs(dtype, k), "{dtype}");
            let bytes = dtype.row_bytes(k).unwrap();
            let rows: Vec<Vec<u8>> = (0..STRIP).map(|_| (0..bytes).map(|_| rng.u8(..)).collect()).collect();
            let mut strip = vec![0; STRIP * bytes];
            pack(dtype, &std::array::from_fn(|r| &rows[r][..]), &mut strip);
            for (r, row) in rows.iter().enumerate() {
                let mut got = vec![0; bytes];
                unpack_row(dtype, &strip, r, &mut got);
                assert!(got == *row, "{dtype} row {r}");
            }
        }
        assert_eq!(types, DType::with_capability(Capability::Simd).count());
    }

    #[test]
    fn blocks_are_whole() {
        for dtype in DType::ALL.iter().copied() {
            let Some(fields) = fields(dtype) else { continue };
            let elements = if dtype == DType::BF16 { 2 } else { dtype.block_len() };
            assert_eq!(Some(block_bytes(fields)), dtype.row_bytes(elements), "{dtype}");
        }
        assert!(packs(DType::F16, 3) && !packs(DType::BF16, 3) && !packs(DType::Q8_0, 0) && !packs(DType::I32, 64));
    }

    #[test]
    fn fifth_bits_of_a_group_share_a_position() {
        for element in 0..32 {
            let (g, b) = (element / 4, element % 4);
            assert_eq!(gather_fifths(1 << element), 1 << (8 * b + g));
            assert_eq!(scatter_fifths(1 << (8 * b + g)), 1 << element);
        }
    }

    /// The kernels read strips by these offsets.
    #[test]
    fn a_strip_lists_units_of_all_rows() {
        let rows: Vec<Vec<u8>> = (0..STRIP as u8).map(|r| (0..36).map(|i| r * 15 + i % 18).collect()).collect();
        let mut strip = vec![0; STRIP * 36];
        pack(DType::Q4_0, &std::array::from_fn(|r| &rows[r][..]), &mut strip);
        // Second block, third group of codes of row 5: bytes 18 + 2 + 8 and on of the row.
        assert_eq!(strip[288 + 32 + 2 * 64 + 5 * 4..][..4], rows[5][18 + 2 + 8..][..4]);
        assert_eq!(strip[288 + 5 * 2..][..2], rows[5][18..20]);
    }
}

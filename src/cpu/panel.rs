//! Panels (BLIS: packed micro-panels; ggml: repack): sixteen rows of a weight matrix, interleaved so that one vector load
//! reads the same elements of all sixteen rows. The micro-kernels in [`super::simd`] compute sixteen rows at a time from them.
//!
//! A panel has exactly the bytes of its rows, so that weights are repacked in place and converted back in place. A row is a
//! sequence of blocks, a block a sequence of [`Field`]s, and a field a sequence of units of 1, 2 or 4 bytes. A panel holds the
//! first blocks of all rows, then the second blocks, and so on. Inside a block the order is field by field and unit by unit,
//! each unit of rows 0 to 15 side by side. Quantised codes have units of four bytes: elements 4g to 4g + 3 of sixteen rows
//! fill a vector of sixteen 32-bit lanes, the operand of the dot-product instructions of all instruction sets.

use super::simd::panel_fields;
use super::simd::transpose::{Vector, transpose_4x4_u32, transpose_8x8_u16};
use crate::tensor::DType;
use std::array;

/// Rows of a panel: the micro-kernels' register tile has this many rows.
pub(crate) const PANEL_ROWS: usize = 16;

/// A part of a block: `count` units of `unit` bytes.
pub(super) struct Field {
    unit: usize,
    count: usize,
    transform: FieldTransform,
}

/// Transformation of a field's bytes when they are packed.
#[derive(Clone, Copy)]
pub(super) enum FieldTransform {
    None,
    /// Adds 128 to i8 codes: the dot-product instructions multiply unsigned by signed bytes.
    AddOffset,
    /// Moves the 2-bit code of element 4g + b (sixteen per 32 bits) to bits 2g and 2g + 1 of byte b.
    TransposePairs,
    /// Moves the fifth bit of element 4g + b (32 bits per block) to bit g of byte b. Then a shift and a mask yield the bits of
    /// group g, one per byte.
    GatherFifthBits,
}

/// A field of `count` units of `unit` bytes, whose bytes are not transformed.
pub(super) const fn field(unit: usize, count: usize) -> Field {
    Field { unit, count, transform: FieldTransform::None }
}

/// A field of `count` units of `unit` bytes that `transform` changes.
pub(super) const fn transformed_field(unit: usize, count: usize, transform: FieldTransform) -> Field {
    Field { unit, count, transform }
}

/// The fields of a block, for block types from their format; `None` for types without panels. Floats have blocks of one
/// element, BF16 of two, so that a 32-bit lane is full.
const fn fields(dtype: DType) -> Option<&'static [Field]> {
    Some(match dtype {
        DType::F32 => const { &[field(4, 1)] },
        DType::F16 => const { &[field(2, 1)] },
        DType::BF16 => const { &[field(4, 1)] },
        _ => return panel_fields(dtype),
    })
}

/// Bytes of one block of `fields`.
fn block_bytes(fields: &[Field]) -> usize {
    fields.iter().map(|f| f.unit * f.count).sum()
}

/// Bytes of a row's block in a panel of `dtype`.
///
/// # Panics
/// For types without panels: a bug of the caller.
pub(crate) fn panel_block_bytes(dtype: DType) -> usize {
    block_bytes(fields(dtype).expect("a type with panels"))
}

/// Whether sixteen rows of `k` elements of `dtype` can be packed into a panel of exactly their bytes.
pub(crate) fn can_pack(dtype: DType, k: usize) -> bool {
    let row = dtype.row_bytes(k).filter(|&bytes| bytes > 0);
    fields(dtype).zip(row).is_some_and(|(fields, bytes)| bytes.is_multiple_of(block_bytes(fields)))
}

/// Packing: interleaves sixteen dense rows of equal length into a panel of as many bytes.
///
/// # Panics
/// If [`can_pack`] is false for such rows, or lengths differ: a bug of the caller.
pub(crate) fn pack(dtype: DType, rows: &[&[u8]; PANEL_ROWS], panel: &mut [u8]) {
    let fields = fields(dtype).expect("a type with panels");
    let (bytes, block) = (rows[0].len(), block_bytes(fields));
    assert!(bytes.is_multiple_of(block) && panel.len() == PANEL_ROWS * bytes, "a panel of {} bytes", panel.len());
    assert!(rows.iter().all(|row| row.len() == bytes), "rows of {bytes} bytes");
    // Floats: the whole row is one field of many units.
    if let [Field { unit: 2, .. }] = fields {
        return interleave::<2>(rows, 0, panel);
    } else if fields.len() == 1 {
        return interleave::<4>(rows, 0, panel);
    }
    for (b, panel) in panel.chunks_exact_mut(PANEL_ROWS * block).enumerate() {
        let (mut from, mut rest) = (b * block, panel);
        for field in fields {
            let (to, after) = rest.split_at_mut(PANEL_ROWS * field.unit * field.count);
            match field.unit {
                1 => interleave::<1>(rows, from, to),
                2 => interleave::<2>(rows, from, to),
                _ => {
                    interleave::<4>(rows, from, to);
                    apply_transform(field.transform, to, gather_fifth_bits);
                }
            }
            (from, rest) = (from + field.unit * field.count, after);
        }
    }
}

/// The inverse of [`pack`]: the sixteen rows of a panel in their original byte order, one after the other.
///
/// # Panics
/// As [`pack`].
pub(crate) fn unpack(dtype: DType, panel: &[u8], rows: &mut [u8]) {
    let fields = fields(dtype).expect("a type with panels");
    let (bytes, block) = (rows.len() / PANEL_ROWS, block_bytes(fields));
    assert!(bytes.is_multiple_of(block) && panel.len() == PANEL_ROWS * bytes, "a panel of {} bytes", panel.len());
    if let [Field { unit: 2, .. }] = fields {
        return separate::<2>(panel, rows, 0);
    } else if fields.len() == 1 {
        return separate::<4>(panel, rows, 0);
    }
    for (b, panel) in panel.chunks_exact(PANEL_ROWS * block).enumerate() {
        let (mut to, mut rest) = (b * block, panel);
        for field in fields {
            let (from, after) = rest.split_at(PANEL_ROWS * field.unit * field.count);
            match field.unit {
                1 => separate::<1>(from, rows, to),
                2 => separate::<2>(from, rows, to),
                _ => {
                    separate::<4>(from, rows, to);
                    for row in rows.chunks_exact_mut(bytes) {
                        apply_transform(field.transform, &mut row[to..to + 4 * field.count], scatter_fifth_bits);
                    }
                }
            }
            (to, rest) = (to + field.unit * field.count, after);
        }
    }
}

/// Row `r` of a panel in its original byte order.
///
/// # Panics
/// As [`pack`], and if the panel has no row `r`.
pub(crate) fn unpack_row(dtype: DType, panel: &[u8], r: usize, row: &mut [u8]) {
    let fields = fields(dtype).expect("a type with panels");
    let block = block_bytes(fields);
    assert!(
        row.len().is_multiple_of(block) && panel.len() == PANEL_ROWS * row.len() && r < PANEL_ROWS,
        "row {r} of a panel"
    );
    for (panel, row) in panel.chunks_exact(PANEL_ROWS * block).zip(row.chunks_exact_mut(block)) {
        let (mut from, mut to) = (panel, row);
        for field in fields {
            let (units, after) = from.split_at(PANEL_ROWS * field.unit * field.count);
            let (part, rest) = to.split_at_mut(field.unit * field.count);
            for (unit, to) in units.chunks_exact(PANEL_ROWS * field.unit).zip(part.chunks_exact_mut(field.unit)) {
                to.copy_from_slice(&unit[r * field.unit..][..field.unit]);
            }
            apply_transform(field.transform, part, scatter_fifth_bits);
            (from, to) = (after, rest);
        }
    }
}

/// Replaces row `r` of a panel: the inverse of [`unpack_row`]. The other rows keep their bytes.
///
/// # Panics
/// As [`unpack_row`].
pub(crate) fn pack_row(dtype: DType, row: &[u8], r: usize, panel: &mut [u8]) {
    let fields = fields(dtype).expect("a type with panels");
    let block = block_bytes(fields);
    assert!(
        row.len().is_multiple_of(block) && panel.len() == PANEL_ROWS * row.len() && r < PANEL_ROWS,
        "row {r} of a panel"
    );
    for (panel, row) in panel.chunks_exact_mut(PANEL_ROWS * block).zip(row.chunks_exact(block)) {
        let (mut to, mut from) = (panel, row);
        for field in fields {
            let (units, after) = to.split_at_mut(PANEL_ROWS * field.unit * field.count);
            let (part, rest) = from.split_at(field.unit * field.count);
            for (unit, from) in units.chunks_exact_mut(PANEL_ROWS * field.unit).zip(part.chunks_exact(field.unit)) {
                let unit = &mut unit[r * field.unit..][..field.unit];
                unit.copy_from_slice(from);
                // Fields with a transformation have units of four bytes, each of which it changes by itself.
                apply_transform(field.transform, unit, gather_fifth_bits);
            }
            (to, from) = (after, rest);
        }
    }
}

/// Writes the units of sixteen rows from byte `from` on side by side: vector-sized squares by transposition, the rest unit by
/// unit.
#[inline(always)]
fn interleave<const UNIT: usize>(rows: &[&[u8]; PANEL_ROWS], from: usize, to: &mut [u8]) {
    const VECTOR: usize = size_of::<Vector>();
    // Units of one byte are copied one by one.
    let whole = if UNIT == 1 { 0 } else { to.len() / (PANEL_ROWS * VECTOR) * (PANEL_ROWS * VECTOR) };
    let (squares, rest) = to.split_at_mut(whole);
    let mut at = from;
    for square in squares.chunks_exact_mut(PANEL_ROWS * VECTOR) {
        let of = |row: usize| rows[row][at..].first_chunk().expect("a vector's bytes of each row");
        // The two cases are written out: the compiler does not inline a closure that is called in a loop here.
        if UNIT == 2 {
            for r in [0, 8] {
                store_columns(&transpose_8x8_u16(array::from_fn(|i| of(r + i))), r * UNIT, square);
            }
        } else {
            for r in [0, 4, 8, 12] {
                store_columns(&transpose_4x4_u32(array::from_fn(|i| of(r + i))), r * UNIT, square);
            }
        }
        at += VECTOR;
    }
    for units in rest.as_chunks_mut::<UNIT>().0.chunks_exact_mut(PANEL_ROWS) {
        for (unit, row) in units.iter_mut().zip(rows) {
            unit.copy_from_slice(&row[at..at + UNIT]);
        }
        at += UNIT;
    }
}

/// Stores transposed columns into a square, at byte `at` of each group of sixteen units.
#[inline(always)]
fn store_columns<const N: usize>(columns: &[Vector; N], at: usize, square: &mut [u8]) {
    for (column, units) in columns.iter().zip(square.chunks_exact_mut(PANEL_ROWS * size_of::<Vector>() / N)) {
        units[at..at + column.len()].copy_from_slice(column);
    }
}

/// The inverse of [`interleave`]: writes the units of each row to its place, from byte `to` of the row on.
#[inline(always)]
fn separate<const UNIT: usize>(from: &[u8], rows: &mut [u8], to: usize) {
    const VECTOR: usize = size_of::<Vector>();
    const SQUARE: usize = PANEL_ROWS * VECTOR;
    let stride = rows.len() / PANEL_ROWS;
    let whole = if UNIT == 1 { 0 } else { from.len() / SQUARE * SQUARE };
    let (squares, rest) = from.split_at(whole);
    let mut at = to;
    for square in squares.chunks_exact(SQUARE) {
        // Vector `j` of the square: the units `j` of some rows side by side.
        let units = |r: usize, j: usize| {
            square[(j * PANEL_ROWS + r) * UNIT..].first_chunk().expect("a vector's bytes of each unit")
        };
        let mut store = |row: usize, bytes: &Vector| rows[row * stride + at..][..VECTOR].copy_from_slice(bytes);
        if UNIT == 2 {
            for r in [0, 8] {
                let parts = transpose_8x8_u16(array::from_fn(|j| units(r, j)));
                (0..8).for_each(|i| store(r + i, &parts[i]));
            }
        } else {
            for r in [0, 4, 8, 12] {
                let parts = transpose_4x4_u32(array::from_fn(|j| units(r, j)));
                (0..4).for_each(|i| store(r + i, &parts[i]));
            }
        }
        at += VECTOR;
    }
    for units in rest.chunks_exact(PANEL_ROWS * UNIT) {
        for (unit, row) in units.chunks_exact(UNIT).zip(rows.chunks_exact_mut(stride)) {
            row[at..at + UNIT].copy_from_slice(unit);
        }
        at += UNIT;
    }
}

fn apply_transform(transform: FieldTransform, bytes: &mut [u8], permute_bits: fn(u32) -> u32) {
    match transform {
        FieldTransform::None => {}
        FieldTransform::AddOffset => bytes.iter_mut().for_each(|b| *b ^= 0x80),
        FieldTransform::TransposePairs => {
            for word in bytes.as_chunks_mut::<4>().0 {
                *word = transpose_pairs(u32::from_le_bytes(*word)).to_le_bytes();
            }
        }
        FieldTransform::GatherFifthBits => {
            for word in bytes.as_chunks_mut::<4>().0 {
                *word = permute_bits(u32::from_le_bytes(*word)).to_le_bytes();
            }
        }
    }
}

/// Transposes the 4 by 4 pairs of bits of a word: its own inverse.
fn transpose_pairs(word: u32) -> u32 {
    swap_bits(swap_bits(word, (6, 0x00cc_00cc)), (12, 0x0000_f0f0))
}

/// Moves bit 4g + b of a word to bit 8b + g.
fn gather_fifth_bits(word: u32) -> u32 {
    unshuffle(unshuffle(word))
}

/// The inverse of [`gather_fifth_bits`].
fn scatter_fifth_bits(word: u32) -> u32 {
    shuffle(shuffle(word))
}

/// Steps of a perfect shuffle of bits: each swaps the bits under the mask with those `by` positions higher.
const SWAPS: [(u32, u32); 4] = [(1, 0x2222_2222), (2, 0x0c0c_0c0c), (4, 0x00f0_00f0), (8, 0x0000_ff00)];

fn swap_bits(word: u32, (by, mask): (u32, u32)) -> u32 {
    let differ = (word ^ (word >> by)) & mask;
    word ^ differ ^ (differ << by)
}

/// Even bits to the lower half, odd bits to the upper half.
fn unshuffle(word: u32) -> u32 {
    SWAPS.into_iter().fold(word, swap_bits)
}

/// The inverse of [`unshuffle`].
fn shuffle(word: u32) -> u32 {
    SWAPS.into_iter().rev().fold(word, swap_bits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Capability;

    #[test]
    fn pack_and_unpack_round_trip() {
        let mut rng = fastrand::Rng::with_seed(7);
        let mut types = 0;
        for dtype in DType::ALL.iter().copied() {
            let k = 3 * dtype.block_len().max(32) * 8;
            if fields(dtype).is_none() {
                assert!(!can_pack(dtype, k), "{dtype}");
                continue;
            }
            types += 1;
            assert!(can_pack(dtype, k), "{dtype}");
            let bytes = dtype.row_bytes(k).unwrap();
            let rows: Vec<Vec<u8>> = (0..PANEL_ROWS).map(|_| (0..bytes).map(|_| rng.u8(..)).collect()).collect();
            let mut panel = vec![0; PANEL_ROWS * bytes];
            pack(dtype, &std::array::from_fn(|r| &rows[r][..]), &mut panel);
            for (r, row) in rows.iter().enumerate() {
                let mut got = vec![0; bytes];
                unpack_row(dtype, &panel, r, &mut got);
                assert!(got == *row, "{dtype} row {r}");
            }
            let mut all = vec![0; PANEL_ROWS * bytes];
            unpack(dtype, &panel, &mut all);
            assert!(all == rows.concat(), "{dtype}");
            // Row by row in any order, over other bytes, the same panel.
            let mut again: Vec<u8> = panel.iter().map(|b| !b).collect();
            for r in (0..PANEL_ROWS).rev() {
                pack_row(dtype, &rows[r], r, &mut again);
            }
            assert!(again == panel, "{dtype}");
        }
        // Types that are expanded for each product have none.
        assert!((15..=DType::with_capability(Capability::Simd).count()).contains(&types), "{types} types");
    }

    #[test]
    fn fields_cover_whole_blocks() {
        for dtype in DType::ALL.iter().copied() {
            let Some(fields) = fields(dtype) else { continue };
            let elements = if dtype == DType::BF16 { 2 } else { dtype.block_len() };
            assert_eq!(Some(block_bytes(fields)), dtype.row_bytes(elements), "{dtype}");
        }
        assert!(
            can_pack(DType::F16, 3)
                && !can_pack(DType::BF16, 3)
                && !can_pack(DType::Q8_0, 0)
                && !can_pack(DType::I32, 64)
        );
    }

    #[test]
    fn fifth_bits_of_a_group_share_a_bit_position() {
        for element in 0..32 {
            let (g, b) = (element / 4, element % 4);
            assert_eq!(gather_fifth_bits(1 << element), 1 << (8 * b + g));
            assert_eq!(scatter_fifth_bits(1 << (8 * b + g)), 1 << element);
        }
    }

    /// The micro-kernels read panels at these offsets.
    #[test]
    fn panel_interleaves_units_of_all_rows() {
        let rows: Vec<Vec<u8>> = (0..PANEL_ROWS as u8).map(|r| (0..36).map(|i| r * 15 + i % 18).collect()).collect();
        let mut panel = vec![0; PANEL_ROWS * 36];
        pack(DType::Q4_0, &std::array::from_fn(|r| &rows[r][..]), &mut panel);
        // A block of Q4_0 has 18 bytes: 2 of the scale, then 4 groups of 4 bytes of codes. So a block of sixteen rows has 288
        // bytes: 32 of scales, then groups of 64. Second block, third group of codes, row 5:
        assert_eq!(panel[288 + 32 + 2 * 64 + 5 * 4..][..4], rows[5][18 + 2 + 8..][..4]);
        // Second block, scale of row 5:
        assert_eq!(panel[288 + 5 * 2..][..2], rows[5][18..20]);
    }
}

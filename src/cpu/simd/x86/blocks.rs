//! Products of block types with columns of codes.
//!
//! Everything is `sum over sub-blocks of scale * column scale * (integer sum) + bias * (column sum)`.

use super::format::{AHEAD, Affine, Format, Products, horizontal_sum, transpose, unroll};
use crate::cpu::simd::{STRIP, Sums};
use std::arch::x86_64::*;
use std::hint::black_box;

/// Bytes of 256 elements of the largest type: room for the end of a row.
const LARGEST: usize = 8 * 34;

/// The parts of a packed column; see [`crate::cpu::simd::Packing::Codes`].
#[derive(Clone, Copy)]
struct Column {
    codes: *const i8,
    scales: *const f32,
    sums: *const f32,
}

impl Column {
    const NONE: Column = Column { codes: std::ptr::null(), scales: std::ptr::null(), sums: std::ptr::null() };

    /// # Safety
    /// A packed column of `padded` elements.
    #[inline(always)]
    unsafe fn new(bytes: &[u8], padded: usize) -> Column {
        let codes = bytes.as_ptr();
        // SAFETY: the parts follow each other in the column.
        unsafe {
            let scales = codes.add(padded);
            Column { codes: codes.cast(), scales: scales.cast(), sums: scales.add(padded / 8).cast() }
        }
    }
}

/// Products of rows with any number of columns: `out[c * rows.len() + r]`.
///
/// # Safety
/// The instructions of `P`, AVX2, FMA and F16C; columns are packed for `F` with `padded` elements, as many as the rows have
/// with their padding; `out` has room for all.
#[inline(always)]
pub(super) unsafe fn dot<F: Format, P: Products>(rows: &[&[u8]], columns: &[&[u8]], padded: usize, out: &mut [f32]) {
    let mut done = 0;
    while done < columns.len() {
        let out = &mut out[done * rows.len()..];
        // SAFETY: as the caller vouches.
        unsafe {
            done += match columns[done..] {
                [a, b, c, d, ..] => dot_columns::<F, P, 4>(rows, [a, b, c, d], padded, out),
                [a, b, c] => dot_columns::<F, P, 3>(rows, [a, b, c], padded, out),
                [a, b] => dot_columns::<F, P, 2>(rows, [a, b], padded, out),
                [a] => dot_columns::<F, P, 1>(rows, [a], padded, out),
                [] => 1,
            };
        }
    }
}

/// # Safety
/// As [`dot`].
#[inline(always)]
unsafe fn dot_columns<F: Format, P: Products, const C: usize>(
    rows: &[&[u8]],
    columns: [&[u8]; C],
    padded: usize,
    out: &mut [f32],
) -> usize {
    let mut last = [0; LARGEST];
    // SAFETY: the parts of a packed column; sums of row r go to element r of each column's `out`.
    unsafe {
        let mut parts = [Column::NONE; C];
        for c in 0..C {
            parts[c] = Column::new(columns[c], padded);
        }
        for r in 0..rows.len() {
            let whole = rows[r].len() / F::BYTES;
            let rest = &rows[r][whole * F::BYTES..];
            if !rest.is_empty() {
                last[..rest.len()].copy_from_slice(rest);
            }
            let sums = dot_row::<F, P, C>(rows[r].as_ptr(), whole, last.as_ptr(), parts, padded);
            for c in 0..C {
                out[c * rows.len() + r] = sums[c];
            }
        }
    }
    C
}

/// # Safety
/// As [`dot`], for a row of `whole` superblocks and, if `padded` says so, one at `last`.
#[inline(always)]
unsafe fn dot_row<F: Format, P: Products, const C: usize>(
    row: *const u8,
    whole: usize,
    last: *const u8,
    columns: [Column; C],
    padded: usize,
) -> [f32; C] {
    // SAFETY: superblock s of the row meets elements 256 s and on of the columns, which are there since row and columns
    // have equally many. Codes are read inside their superblock (`Format`).
    unsafe {
        // Two sums each, so that one product need not wait for the one before.
        let mut sums = [[_mm256_setzero_ps(); 2]; C];
        // What a block's products are scaled with: all lanes, or one half for each sub-block of 16.
        let mut scales = [[[0f32; 8]; 2]; C];
        for s in 0..padded / 256 {
            let p = if s < whole { row.add(s * F::BYTES) } else { last };
            for line in 0..F::BYTES.div_ceil(64) {
                _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(AHEAD + 64 * line).cast());
            }
            let affine = F::scales(p);
            for c in 0..C {
                let d = columns[c].scales.add(8 * s);
                if F::SUB == 32 {
                    let scale = _mm256_mul_ps(affine[0].scale, _mm256_loadu_ps(d));
                    _mm256_storeu_ps(scales[c][0].as_mut_ptr(), scale);
                    if F::TOP.is_some() {
                        let sum = _mm256_loadu_ps(columns[c].sums.add(8 * s));
                        sums[c][0] = _mm256_fmadd_ps(affine[0].bias, sum, sums[c][0]);
                    }
                } else {
                    for g in 0..2 {
                        let d = _mm256_broadcast_ps(&d.add(4 * g).cast::<__m128>().read_unaligned());
                        _mm256_storeu_ps(scales[c][g].as_mut_ptr(), _mm256_mul_ps(affine[g].scale, d));
                        let sum = _mm256_loadu_ps(columns[c].sums.add(16 * s + 8 * g));
                        sums[c][g] = _mm256_fmadd_ps(affine[g].bias, sum, sums[c][g]);
                    }
                }
            }
            // Loads spread a scale over all lanes for nothing. The compiler would keep them in a register and shuffle.
            black_box(&mut scales);
            unroll!(j in [0 1 2 3 4 5 6 7] {
                let codes = F::codes(p, j);
                for c in 0..C {
                    let y = _mm256_loadu_si256(columns[c].codes.add(256 * s + 32 * j).cast());
                    let zero = _mm256_setzero_si256();
                    let sum = match F::TOP {
                        Some(_) => P::add(zero, codes, y),
                        // The sign moves over to the column.
                        None => P::add(zero, _mm256_abs_epi8(codes), _mm256_sign_epi8(y, codes)),
                    };
                    let scale = if F::SUB == 32 {
                        _mm256_broadcast_ss(&scales[c][0][j])
                    } else {
                        let group = _mm256_loadu_ps(scales[c][j / 4].as_ptr());
                        match j % 4 {
                            0 => _mm256_permute_ps::<0x00>(group),
                            1 => _mm256_permute_ps::<0x55>(group),
                            2 => _mm256_permute_ps::<0xaa>(group),
                            _ => _mm256_permute_ps::<0xff>(group),
                        }
                    };
                    sums[c][j % 2] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, sums[c][j % 2]);
                }
            });
        }
        let mut out = [0.0; C];
        for c in 0..C {
            out[c] = horizontal_sum(_mm256_add_ps(sums[c][0], sums[c][1]));
        }
        out
    }
}

/// How a type's codes lie in a strip, and how many products add up without overflow. Codes of signed types are raised by
/// 128, and their bias takes that back.
#[derive(Clone, Copy)]
enum Codes {
    /// Bytes; the products of a sub-block add up in 16 bits.
    Bytes,
    /// Bytes; only two products of two add up in 16 bits.
    Pairs,
    /// High and low nibbles apart, as in [`Codes::Bytes`], in groups of four by turns.
    Split,
    /// Bytes of any size, for exact products.
    Exact,
}

impl Codes {
    /// The layout that suits a format and a way to multiply.
    const fn of<F: Format, P: Products>() -> Codes {
        match F::TOP {
            _ if P::EXACT => Codes::Exact,
            None => Codes::Split,
            // One lane sums SUB / 2 products of codes with -128 to 127.
            Some(top) if F::SUB as i32 / 2 * top * 128 < 1 << 15 => Codes::Bytes,
            Some(_) => Codes::Pairs,
        }
    }

    /// Bytes per element.
    const fn bytes(self) -> usize {
        if matches!(self, Codes::Split) { 2 } else { 1 }
    }
}

/// Bytes of a strip per padded element: codes, then f32 scales and biases of each sub-block.
pub(super) const fn strip_bytes<F: Format, P: Products>() -> usize {
    STRIP * Codes::of::<F, P>().bytes() + 2 * STRIP * 4 / F::SUB
}

/// Expands sixteen rows. In a strip, codes come in groups of four elements of all rows; scales and biases by sub-block,
/// sixteen of each.
///
/// # Safety
/// The instructions of `P`, AVX2, FMA and F16C; rows of equal length, `padded` elements with their padding; a strip of
/// [`strip_bytes`] per padded element, 32-byte aligned.
#[inline(always)]
pub(super) unsafe fn expand<F: Format, P: Products>(rows: &[&[u8]; STRIP], padded: usize, strip: &mut [u8]) {
    let layout = Codes::of::<F, P>();
    let mut last = [[0; LARGEST]; 8];
    for half in 0..2 {
        let rows = &rows[8 * half..8 * half + 8];
        let whole = rows[0].len() / F::BYTES;
        for r in 0..8 {
            let rest = &rows[r][whole * F::BYTES..];
            last[r][..rest.len()].copy_from_slice(rest);
        }
        for s in 0..padded / 256 {
            // SAFETY: superblocks are whole, or copies with padding. In the strip, superblock s takes 256 of `padded`
            // elements in each part; `half` chooses half of every sixteen.
            unsafe {
                let codes = strip.as_mut_ptr().add(256 * s * STRIP * layout.bytes() + 32 * half);
                let scales = strip.as_mut_ptr().add(padded * STRIP * layout.bytes()).cast::<f32>();
                let biases = scales.add(padded / F::SUB * STRIP);
                let mut at = [std::ptr::null(); 8];
                for r in 0..8 {
                    at[r] = if s < whole { rows[r].as_ptr().add(s * F::BYTES) } else { last[r].as_ptr() };
                }
                let mut affine = [[Affine::none(); 2]; 8];
                for r in 0..8 {
                    affine[r] = F::scales(at[r]);
                }
                for g in 0..32 / F::SUB {
                    let (mut scale, mut bias) = ([_mm256_setzero_ps(); 8], [_mm256_setzero_ps(); 8]);
                    for r in 0..8 {
                        scale[r] = affine[r][g].scale;
                        bias[r] = match F::TOP {
                            Some(_) => affine[r][g].bias,
                            None => _mm256_mul_ps(scale[r], _mm256_set1_ps(-128.0)),
                        };
                    }
                    let (scale, bias) = (transpose(scale), transpose(bias));
                    for i in 0..8 {
                        let to = STRIP * (256 / F::SUB * s + 8 * g + i) + 8 * half;
                        _mm256_store_ps(scales.add(to), scale[i]);
                        _mm256_store_ps(biases.add(to), bias[i]);
                    }
                }
                unroll!(j in [0 1 2 3 4 5 6 7] {
                    let mut block = [_mm256_setzero_si256(); 8];
                    for r in 0..8 {
                        block[r] = F::codes(at[r], j);
                        if F::TOP.is_none() {
                            block[r] = _mm256_xor_si256(block[r], _mm256_set1_epi8(-128));
                        }
                    }
                    let codes = codes.add(64 * 8 * j * layout.bytes());
                    if let Codes::Split = layout {
                        let mut high = block;
                        for r in 0..8 {
                            high[r] = _mm256_and_si256(_mm256_srli_epi16::<4>(block[r]), _mm256_set1_epi8(15));
                            block[r] = _mm256_and_si256(block[r], _mm256_set1_epi8(15));
                        }
                        store_groups(codes, 128, high);
                        store_groups(codes.add(64), 128, block);
                    } else {
                        store_groups(codes, 64, block);
                    }
                });
            }
        }
    }
}

/// Stores eight rows of eight 32-bit groups as eight groups of eight rows, `step` bytes apart.
///
/// # Safety
/// AVX2, and room for that.
#[inline(always)]
unsafe fn store_groups(to: *mut u8, step: usize, rows: [__m256i; 8]) {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut groups = [_mm256_setzero_ps(); 8];
        for r in 0..8 {
            groups[r] = _mm256_castsi256_ps(rows[r]);
        }
        let groups = transpose(groups);
        for i in 0..8 {
            _mm256_store_ps(to.add(step * i).cast(), groups[i]);
        }
    }
}

/// Products of a strip with 1 to 4 columns.
///
/// # Safety
/// As [`expand`], with a strip from it, and columns and sums as for [`dot`].
#[inline(always)]
pub(super) unsafe fn tile<F: Format, P: Products>(strip: &[u8], columns: &[&[u8]], padded: usize, out: &mut [Sums]) {
    // SAFETY: as the caller vouches.
    unsafe {
        match *columns {
            [a] => tile_columns::<F, P, 1>(strip, [a], padded, out),
            [a, b] => tile_columns::<F, P, 2>(strip, [a, b], padded, out),
            [a, b, c] => tile_columns::<F, P, 3>(strip, [a, b, c], padded, out),
            [a, b, c, d] => tile_columns::<F, P, 4>(strip, [a, b, c, d], padded, out),
            _ => {}
        }
    }
}

/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn tile_columns<F: Format, P: Products, const C: usize>(
    strip: &[u8],
    columns: [&[u8]; C],
    padded: usize,
    out: &mut [Sums],
) {
    let layout = Codes::of::<F, P>();
    // SAFETY: sub-block b of the strip meets elements SUB * b and on of the columns, all of which have `padded`.
    unsafe {
        let mut parts = [Column::NONE; C];
        for c in 0..C {
            parts[c] = Column::new(columns[c], padded);
        }
        let columns = parts;
        let mut codes = strip.as_ptr();
        let mut scales = codes.add(padded * STRIP * layout.bytes()).cast::<f32>();
        let mut biases = scales.add(padded / F::SUB * STRIP);
        let mut totals = [[_mm256_setzero_ps(); 2]; C];
        // The sums of a sub-block fill the registers: the compiler must neither unroll their loop, which it would do with
        // a count that it knows, nor keep the totals in registers meanwhile.
        let groups = black_box(F::SUB / 4);
        for s in 0..padded / (8 * F::SUB) {
            // Eight sub-blocks in the order of the strip's scales.
            for i in 0..8 {
                let sub = if F::SUB == 32 { i } else { i % 4 * 2 + i / 4 };
                let (block, k) = (8 * s + i, 8 * F::SUB * s + F::SUB * sub);
                let x = codes.add(F::SUB * sub * STRIP * layout.bytes());
                let mut y = [std::ptr::null(); C];
                for c in 0..C {
                    y[c] = columns[c].codes.add(k);
                }
                black_box(&mut totals);
                let sums = match layout {
                    Codes::Bytes => bytes::<C>(x, 64, y, groups, 1),
                    Codes::Pairs => pairs::<C>(x, y, groups),
                    Codes::Exact => exact::<P, C>(x, y, groups),
                    Codes::Split => {
                        let mut sums = bytes::<C>(x, 128, y, groups, 16);
                        let low = bytes::<C>(x.add(64), 128, y, groups, 1);
                        for c in 0..C {
                            for r in 0..2 {
                                sums[c][r] = _mm256_add_epi32(sums[c][r], low[c][r]);
                            }
                        }
                        sums
                    }
                };
                let [low, high] = two(scales.add(STRIP * i).cast());
                let scale = [_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)];
                for c in 0..C {
                    let d = _mm256_set1_ps(*columns[c].scales.add(k / 32));
                    for r in 0..2 {
                        let sum = _mm256_cvtepi32_ps(sums[c][r]);
                        totals[c][r] = _mm256_fmadd_ps(_mm256_mul_ps(scale[r], d), sum, totals[c][r]);
                    }
                }
                let [low, high] = two(biases.add(STRIP * i).cast());
                let bias = [_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)];
                for c in 0..C {
                    let sum = _mm256_set1_ps(*columns[c].sums.add(block));
                    for r in 0..2 {
                        totals[c][r] = _mm256_fmadd_ps(bias[r], sum, totals[c][r]);
                    }
                }
            }
            codes = codes.add(8 * F::SUB * STRIP * layout.bytes());
            scales = scales.add(8 * STRIP);
            biases = biases.add(8 * STRIP);
        }
        for c in 0..C {
            for r in 0..2 {
                _mm256_storeu_ps(out[c][8 * r..].as_mut_ptr(), totals[c][r]);
            }
        }
    }
}

/// Two aligned vectors.
#[inline(always)]
unsafe fn two(p: *const u8) -> [__m256i; 2] {
    // SAFETY: the caller vouches for 64 bytes, aligned, and for AVX2.
    unsafe { [_mm256_load_si256(p.cast()), _mm256_load_si256(p.add(32).cast())] }
}

/// Four elements of a column in every lane.
#[inline(always)]
unsafe fn spread(p: *const i8) -> __m256i {
    // SAFETY: the caller vouches for 4 bytes and for AVX2.
    unsafe { _mm256_set1_epi32(p.cast::<i32>().read_unaligned()) }
}

/// `weight` times the sums of products of `n` groups of four elements, by column and half of the strip, whose groups are
/// `step` bytes apart.
///
/// # Safety
/// AVX2; `n` groups in strip and columns; products add up in 16 bits.
#[inline(always)]
unsafe fn bytes<const C: usize>(
    x: *const u8,
    step: usize,
    y: [*const i8; C],
    n: usize,
    weight: i16,
) -> [[__m256i; 2]; C] {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut sums = [[_mm256_setzero_si256(); 2]; C];
        for q in 0..n {
            let x = two(x.add(step * q));
            for c in 0..C {
                let y = spread(y[c].add(4 * q));
                for r in 0..2 {
                    sums[c][r] = _mm256_add_epi16(sums[c][r], _mm256_maddubs_epi16(x[r], y));
                }
            }
        }
        for c in 0..C {
            for r in 0..2 {
                sums[c][r] = _mm256_madd_epi16(sums[c][r], _mm256_set1_epi16(weight));
            }
        }
        sums
    }
}

/// As [`bytes`], where only two products of two add up in 16 bits; `n` is even.
///
/// # Safety
/// As [`bytes`].
#[inline(always)]
unsafe fn pairs<const C: usize>(x: *const u8, y: [*const i8; C], n: usize) -> [[__m256i; 2]; C] {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut sums = [[_mm256_setzero_si256(); 2]; C];
        for q in 0..n / 2 {
            let (first, second) = (two(x.add(128 * q)), two(x.add(128 * q + 64)));
            for c in 0..C {
                let (a, b) = (spread(y[c].add(8 * q)), spread(y[c].add(8 * q + 4)));
                for r in 0..2 {
                    let both = _mm256_add_epi16(_mm256_maddubs_epi16(first[r], a), _mm256_maddubs_epi16(second[r], b));
                    sums[c][r] = _mm256_add_epi32(sums[c][r], _mm256_madd_epi16(both, _mm256_set1_epi16(1)));
                }
            }
        }
        sums
    }
}

/// As [`bytes`], with exact products.
///
/// # Safety
/// The instructions of `P`; `n` groups in strip and columns.
#[inline(always)]
unsafe fn exact<P: Products, const C: usize>(x: *const u8, y: [*const i8; C], n: usize) -> [[__m256i; 2]; C] {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut sums = [[_mm256_setzero_si256(); 2]; C];
        for q in 0..n {
            let x = two(x.add(64 * q));
            for c in 0..C {
                let y = spread(y[c].add(4 * q));
                for r in 0..2 {
                    sums[c][r] = P::add(sums[c][r], x[r], y);
                }
            }
        }
        sums
    }
}

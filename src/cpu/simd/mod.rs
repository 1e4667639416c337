//! Hot inner loops in the widest instructions that the processor has, chosen at run time: the small f32 products of
//! attention ([`mod@vec`]), and here the vector kernels of matrix products.
//!
//! A product packs its columns once ([`Packing`]): as f32 for float weights (as bf16, where these meet bf16), as 8-bit codes with scales for block types.
//! Rows of weights come in strips ([`crate::cpu::strip`]), as the device holds them or packed for the purpose, whose
//! vectors hold the same elements of sixteen rows ([`Tiles::run`]); few columns meet rows that are no strips where they
//! lie ([`Kernels::dot`]). The kernels of strips are written once, over the [`lanes`] of an instruction set.
#![allow(unsafe_code)] // one of the modules that lib.rs and tests/layout list

#[cfg(target_arch = "aarch64")]
mod arm;
mod codes;
mod floats;
mod formats;
mod lanes;
mod packing;
mod pairs;
pub(crate) mod transpose;
pub(crate) mod vec;
mod wide;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use packing::{PIECE, Packing};
pub(crate) use wide::{Level, Wide, widest};

use super::strip::{self, Field, STRIP};
use crate::tensor::table::for_each_simd;
use crate::tensor::{Capability, DType};
use lanes::Lanes;

/// Most strips that one call of [`Tiles::run`] takes.
pub(crate) const MAX_STRIPS: usize = 2;

/// Most columns that [`Tiles::run`] best takes at once.
pub(crate) const MAX_TILE: usize = if cfg!(target_arch = "aarch64") { 16 } else { 8 };

/// Most columns for which rows that are no strips are read where they lie.
pub(crate) const MAX_FEW: usize = 12;

/// How far ahead of its use a strip is asked for when it meets few columns: more than memory's latency takes, far less
/// than a cache holds.
const AHEAD: usize = 4096;

/// Whether strips that meet few columns are asked for ahead of their use. Not on cores of AMD: they see by themselves what comes
/// next, and with so many questions loads have to wait (Zen 4 reads Q4_K at 83 % of memory's speed, and at 52 % if asked).
fn asks_ahead() -> bool {
    #[cfg(target_arch = "x86_64")]
    let asks = !x86::is_amd();
    #[cfg(not(target_arch = "x86_64"))]
    let asks = true;
    asks
}

/// Bytes of 256 elements of the largest block type: room for the end of a row.
const LARGEST: usize = {
    let (mut largest, mut i) = (0, 0);
    while i < DType::ALL.len() {
        let dtype = DType::ALL[i];
        if dtype.is_block() && dtype.can(Capability::Simd) {
            let bytes = 256 / dtype.block_len() * dtype.block_bytes();
            largest = if bytes > largest { bytes } else { largest };
        }
        i += 1;
    }
    largest
};

/// Sums of a strip and a column.
pub(crate) type Sums = [f32; STRIP];

/// Where [`Tiles::run`] leaves its sums: those of strip `s` and column `c` at `sums[c * stride + s]`.
pub(crate) struct Out<'a> {
    pub(crate) sums: &'a mut [Sums],
    pub(crate) stride: usize,
    /// Whether they are added to what is there.
    pub(crate) adds: bool,
}

impl Out<'_> {
    /// From strip `s` and column `c` on.
    fn from(&mut self, c: usize, s: usize) -> Out<'_> {
        Out { sums: &mut self.sums[c * self.stride + s..], stride: self.stride, adds: self.adds }
    }

    /// Leaves the sums of strip `s` and column `c`.
    ///
    /// # Safety
    /// The instructions of `L`.
    #[inline(always)]
    unsafe fn put<L: Lanes>(&mut self, c: usize, s: usize, sums: L::Float) {
        let to = self.sums[c * self.stride + s].as_mut_ptr();
        // SAFETY: sixteen floats; the caller vouches for the instructions.
        unsafe { L::store(to, if self.adds { L::sum(L::load_floats(to), sums) } else { sums }) }
    }
}

type Dot = unsafe fn(rows: &[&[u8]], columns: &[&[u8]], padded: usize, out: &mut [f32]);
type Tile = unsafe fn(strips: &[*const u8], columns: &[&[u8]], k: usize, out: Out<'_>);

/// `unroll!(j in [0 1 2] { ... })`: the body once for each number.
macro_rules! unroll {
    ($j:ident in [$($n:literal)*] $body:block) => {
        $({
            let $j: usize = $n;
            $body
        })*
    };
}
use unroll;

/// `$of` of the format of the strips of `$dtype`; `None` for types that have none.
macro_rules! of_format {
    ([$dtype:ident $of:ident] $($name:ident $format:ident;)*) => {
        match $dtype {
            $($crate::tensor::DType::$name => Some($of::<$crate::cpu::simd::formats::$format>),)*
            _ => None,
        }
    };
}
use of_format;

/// As [`of_format`], of the formats of rows where they lie, which are in scope by their names.
macro_rules! of_row_format {
    ([$dtype:ident $of:ident] $($name:ident $format:ident;)*) => {
        match $dtype {
            $($crate::tensor::DType::$name => Some($of::<$format>),)*
            _ => None,
        }
    };
}
use of_row_format;

/// The kernels of `$strips` strips of block types for lanes `$lanes`, by the numbers of columns in the list, largest first, each
/// with as many strips at a time as registers hold sums for; `$target` gives them the instructions.
macro_rules! code_tiles {
    ($name:ident, $lanes:ty, $strips:literal, [$($columns:literal by $at_once:literal),*] $(, #[$target:meta])?) => {
        mod $name {
            use $crate::cpu::simd::formats::Format;
            use $crate::cpu::simd::lanes::Lanes;
            use $crate::cpu::simd::packing::{Packing, Parts};
            use $crate::cpu::simd::{Out, Tile, codes};
            use $crate::tensor::DType;

            /// The products of a block type's strips. They need the instruction set.
            pub(in crate::cpu::simd) fn tile_of(dtype: DType) -> Option<Tile> {
                // Within this file the macro is found by its textual scope, elsewhere by this import.
                #[allow(unused_imports)]
                use $crate::{cpu::simd::of_format, tensor::table::for_each_simd};
                for_each_simd!(of_format!(dtype tile))
            }

            /// # Safety
            /// As [`codes::tile`].
            $(#[$target])?
            unsafe fn tile<F: Format>(strips: &[*const u8], columns: &[&[u8]], k: usize, mut out: Out<'_>) {
                let padded = Packing::codes::<F>(<$lanes>::EXACT).padded(k);
                let mut done = 0;
                while done < columns.len() {
                    $(if columns.len() - done >= $columns {
                        let mut parts = [Parts::NONE; $columns];
                        for c in 0..$columns {
                            parts[c] = Parts::new(columns[done + c], padded, F::SUB);
                        }
                        for (s, strips) in strips[..$strips].as_chunks().0.iter().enumerate() {
                            let out = out.from(done, s * $at_once);
                            // SAFETY: as the caller vouches; this function has the instructions.
                            unsafe { codes::tile::<$lanes, F, $at_once, $columns>(*strips, parts, k, out) };
                        }
                        done += $columns;
                        continue;
                    })*
                }
            }
        }
    };
}
use code_tiles;

/// As [`code_tiles`], of the float types in the first list, each by the [`floats::Product`] beside it.
macro_rules! float_tiles {
    ($name:ident, $lanes:ty, [$($dtype:ident: $float:ident),*], $strips:literal, [$($columns:literal by $at_once:literal),*] $(, #[$target:meta])?) => {
        mod $name {
            use $crate::cpu::simd::{Out, Tile, floats};
            use $crate::tensor::DType;

            /// The products of a float type's strips. They need the instruction set.
            pub(in crate::cpu::simd) fn tile_of(dtype: DType) -> Option<Tile> {
                match dtype {
                    $(DType::$dtype => Some(tile::<floats::$float>),)*
                    _ => None,
                }
            }

            /// # Safety
            /// As [`floats::tile`].
            $(#[$target])?
            unsafe fn tile<F: floats::Product<$lanes>>(strips: &[*const u8], columns: &[&[u8]], k: usize, mut out: Out<'_>) {
                let mut done = 0;
                while done < columns.len() {
                    $(if columns.len() - done >= $columns {
                        let mut starts = [std::ptr::null(); $columns];
                        for c in 0..$columns {
                            starts[c] = columns[done + c].as_ptr().cast();
                        }
                        for (s, strips) in strips[..$strips].as_chunks().0.iter().enumerate() {
                            let out = out.from(done, s * $at_once);
                            // SAFETY: as the caller vouches; this function has the instructions.
                            unsafe { floats::tile::<$lanes, F, $at_once, $columns>(*strips, starts, k, out) };
                        }
                        done += $columns;
                        continue;
                    })*
                }
            }
        }
    };
}
use float_tiles;

/// The products `$products` of block types' rows where they lie, compiled for one instruction set: with the `blocks` of the
/// module and the formats in its `rows`.
macro_rules! row_kernels {
    ($module:ident, $products:ident, $features:literal) => {
        mod $module {
            use super::format::{Format, $products};
            use super::blocks;
            use super::rows::*;
            use $crate::cpu::simd::Dot;
            use $crate::tensor::DType;

            /// The products of a block type's rows. They need the instruction set.
            pub(super) fn dot_of(dtype: DType) -> Option<Dot> {
                use $crate::{cpu::simd::of_row_format, tensor::table::for_each_simd};
                for_each_simd!(of_row_format!(dtype dot))
            }

            /// # Safety
            /// As [`blocks::dot`].
            #[target_feature(enable = $features)]
            unsafe fn dot<F: Format>(rows: &[&[u8]], columns: &[&[u8]], padded: usize, out: &mut [f32]) {
                // SAFETY: as the caller vouches; this function has the instructions.
                unsafe { blocks::dot::<F, $products>(rows, columns, padded, out) }
            }
        }
    };
}
use row_kernels;

#[cfg(test)]
code_tiles!(portable_codes, crate::cpu::simd::lanes::Portable<true>, 2, [2 by 2, 1 by 1]);
#[cfg(test)]
code_tiles!(portable_pairs, crate::cpu::simd::lanes::Portable<false>, 2, [2 by 1, 1 by 2]);
#[cfg(test)]
code_tiles!(portable_signed, crate::cpu::simd::lanes::Portable<true, true>, 1, [2 by 1, 1 by 1]);
#[cfg(test)]
float_tiles!(portable_floats, crate::cpu::simd::lanes::Portable<true>, [F32: F32, F16: F16, BF16: BF16], 2, [2 by 2, 1 by 1]);
#[cfg(test)]
float_tiles!(portable_bf16, crate::cpu::simd::lanes::Portable<true>, [BF16: Bf16Pairs], 2, [2 by 2, 1 by 1]);

/// Products of BF16 rows with columns of bf16 in plain Rust.
///
/// # Safety
/// None: what is missing panics.
#[cfg(test)]
unsafe fn portable_bf16_dot(rows: &[&[u8]], columns: &[&[u8]], _: usize, out: &mut [f32]) {
    let values = |bytes: &[u8]| -> Vec<half::bf16> {
        bytes.as_chunks().0.iter().map(|&b| half::bf16::from_le_bytes(b)).collect()
    };
    for (i, out) in out.iter_mut().enumerate() {
        let (row, column) = (values(rows[i % rows.len()]), values(columns[i / rows.len()]));
        *out = row.iter().zip(&column).map(|(x, y)| x.to_f32() * y.to_f32()).sum();
    }
}

/// Kernels for rows of `dtype` in plain Rust, with columns of bf16.
#[cfg(test)]
fn portable_bf16_kernels(dtype: DType) -> Option<(Dot, Tile)> {
    Some((portable_bf16_dot, portable_bf16::tile_of(dtype)?))
}

/// The fields of `$dtype`'s format.
macro_rules! fields_of {
    ([$dtype:ident] $($name:ident $format:ident;)*) => {
        match $dtype {
            $(DType::$name => Some(<formats::$format as formats::Format>::FIELDS),)*
            _ => None,
        }
    };
}

/// The fields of a block of `dtype` in strips; `None` for types without a format.
pub(super) const fn strip_fields(dtype: DType) -> Option<&'static [Field]> {
    for_each_simd!(fields_of!(dtype))
}

/// The instruction set of the kernels that this processor gets, for people.
pub(crate) fn instruction_set() -> &'static str {
    Kernels::available(DType::Q8_0).first().map_or("portable code", |(name, _)| name)
}

/// The kernels for rows of one type.
#[derive(Clone, Copy)]
pub(crate) struct Kernels {
    dtype: DType,
    packing: Packing,
    /// Strips that `tile` takes at once.
    strips: usize,
    /// Columns that `tile` best takes at once.
    columns: usize,
    dot: Dot,
    tile: Tile,
}

impl Kernels {
    /// The fastest kernels that this processor has for rows of `dtype`; `None` when it has none.
    pub(crate) fn of(dtype: DType) -> Option<Kernels> {
        Self::available(dtype).first().map(|(_, kernels)| *kernels)
    }

    /// All kernels that this processor has for rows of `dtype`, with the names of their instruction sets, fastest first.
    fn available(dtype: DType) -> Vec<(&'static str, Kernels)> {
        #[cfg(target_arch = "x86_64")]
        let all = x86::available(dtype);
        #[cfg(target_arch = "aarch64")]
        let all = arm::available(dtype);
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let all = Vec::new();
        all
    }

    /// How columns are packed for these kernels.
    pub(crate) fn packing(&self) -> Packing {
        self.packing
    }

    /// Most columns for which [`Kernels::dot`] is faster than packing strips for them, at most [`MAX_FEW`].
    pub(crate) fn few(&self) -> usize {
        if self.dtype.is_block() { 4 } else { MAX_FEW }
    }

    /// Strips that [`Tiles::run`] takes at once, at most [`MAX_STRIPS`].
    pub(crate) fn strips(&self) -> usize {
        self.strips
    }

    /// Columns that [`Tiles::run`] best takes at once, at most [`MAX_TILE`].
    pub(crate) fn tile_columns(&self) -> usize {
        self.columns
    }

    /// The products of dense rows of `k` elements with packed columns (at a multiple of 4 bytes): `out[c * rows.len() + r]`.
    ///
    /// # Panics
    /// When lengths or alignments do not fit: a bug of the caller.
    pub(crate) fn dot(&self, k: usize, rows: &[&[u8]], columns: &[&[u8]], out: &mut [f32]) {
        let bytes = self.dtype.row_bytes(k);
        assert!(rows.iter().all(|row| Some(row.len()) == bytes), "rows of {k} elements");
        assert!(all_fit(columns, self.packing.column_bytes(k)), "aligned columns of {k} elements");
        assert_eq!(rows.len() * columns.len(), out.len(), "a sum per row and column");
        // SAFETY: these kernels exist only on processors with their instructions (`available`); lengths and alignments fit.
        unsafe { (self.dot)(rows, columns, self.packing.padded(k), out) };
    }

    /// Bytes of a strip of rows of `k` elements.
    pub(crate) fn strip_bytes(&self, k: usize) -> usize {
        self.dtype.row_bytes(k).unwrap_or(0).saturating_mul(STRIP)
    }

    /// Whether rows are blocks of codes, and not floats.
    pub(crate) fn is_block(&self) -> bool {
        self.dtype.is_block()
    }

    /// The products of strips of rows of `k` elements; `None` when such rows have no strips.
    pub(crate) fn tiles(&self, k: usize) -> Option<Tiles> {
        let (strip, column) = (self.strip_bytes(k), self.packing.column_bytes(k));
        strip::packs(self.dtype, k).then_some(Tiles { k, strip, column, strips: self.strips, tile: self.tile })
    }
}

/// The products of strips of rows of one type and length with packed columns.
#[derive(Clone, Copy)]
pub(crate) struct Tiles {
    k: usize,
    /// Bytes of a strip, and of a column.
    strip: usize,
    column: usize,
    /// Strips of a call.
    strips: usize,
    tile: Tile,
}

impl Tiles {
    /// The products of [`Kernels::strips`] strips with packed columns (at a multiple of 4 bytes).
    ///
    /// # Panics
    /// When lengths or alignments do not fit: a bug of the caller.
    pub(crate) fn run(&self, strips: &[&[u8]], columns: &[&[u8]], out: Out<'_>) {
        let whole = strips.len() == self.strips && strips.iter().all(|strip| strip.len() == self.strip);
        assert!(whole && all_fit(columns, self.column), "strips and aligned columns of {} elements", self.k);
        let room = columns.len().saturating_sub(1).saturating_mul(out.stride).saturating_add(strips.len());
        assert!(strips.len() <= out.stride && room <= out.sums.len(), "room for a sum per strip and column");
        let starts = [strips[0].as_ptr(), strips[strips.len() - 1].as_ptr()];
        // SAFETY: as in `Kernels::dot`; such rows have strips.
        unsafe { (self.tile)(&starts[..strips.len()], columns, self.k, out) };
    }
}

/// Whether all columns have so many bytes and are aligned for floats.
fn all_fit(columns: &[&[u8]], bytes: usize) -> bool {
    columns.iter().all(|column| column.len() == bytes && column.as_ptr().cast::<f32>().is_aligned())
}

#[cfg(test)]
mod tests;

//! Hot inner loops in the widest instructions that the processor has, chosen at run time: the small f32 products of
//! attention ([`mod@vec`]), and here the vector kernels of matrix products.
//!
//! A product packs its columns once ([`Packing`]): as f32 for float weights, as 8-bit codes with scales for block types.
//! Few columns meet each row of weights where it lies ([`Kernels::dot`]); for many, sixteen rows at a time are expanded
//! into a *strip* ([`Kernels::expand`]), in which one vector holds the same elements of eight rows, and which then meets
//! all columns ([`Kernels::tile`]).
#![allow(unsafe_code)] // one of the modules that DESIGN names

mod packing;
pub(crate) mod vec;
mod wide;
#[cfg(target_arch = "x86_64")]
mod x86;

use packing::Rounding;
pub(crate) use packing::{PIECE, Packing};
pub(crate) use wide::{Level, Wide, widest};

use crate::tensor::DType;

/// Rows of a strip.
pub(crate) const STRIP: usize = 16;

/// Most columns that one call of [`Kernels::tile`] takes.
pub(crate) const MAX_TILE: usize = 6;

/// Most columns for which rows are read where they lie.
pub(crate) const MAX_FEW: usize = 12;

/// Sums of a tile: one column each.
pub(crate) type Sums = [f32; STRIP];

type Dot = unsafe fn(rows: &[&[u8]], columns: &[&[u8]], padded: usize, out: &mut [f32]);
type Expand = unsafe fn(rows: &[&[u8]; STRIP], padded: usize, strip: &mut [u8]);
type Tile = unsafe fn(strip: &[u8], columns: &[&[u8]], padded: usize, out: &mut [Sums]);

/// The instruction set of the kernels that this processor gets, for people.
pub(crate) fn instruction_set() -> &'static str {
    Kernels::available(DType::Q8_0).map(|(name, _)| name).next().unwrap_or("portable code")
}

/// The kernels for rows of one type.
#[derive(Clone, Copy)]
pub(crate) struct Kernels {
    dtype: DType,
    packing: Packing,
    /// Most columns that are met sooner by rows where they lie than by strips, at most [`MAX_FEW`]; measured.
    few: usize,
    /// Bytes of a strip per padded element.
    strip: usize,
    /// Most columns of a tile, at most [`MAX_TILE`].
    columns: usize,
    dot: Dot,
    expand: Expand,
    tile: Tile,
}

impl Kernels {
    /// The fastest kernels that this processor has for rows of `dtype`; `None` when it has none.
    pub(crate) fn of(dtype: DType) -> Option<Kernels> {
        Self::available(dtype).map(|(_, kernels)| kernels).next()
    }

    /// All kernels that this processor has for rows of `dtype`, with the names of their instruction sets, fastest first.
    fn available(dtype: DType) -> impl Iterator<Item = (&'static str, Kernels)> {
        #[cfg(target_arch = "x86_64")]
        let all = x86::available(dtype);
        #[cfg(not(target_arch = "x86_64"))]
        let all = [None::<(&'static str, Kernels)>; 1].map(|none| none.filter(|(_, k)| k.dtype == dtype));
        all.into_iter().flatten()
    }

    /// How columns are packed for these kernels.
    pub(crate) fn packing(&self) -> Packing {
        self.packing
    }

    /// Bytes of a strip of rows of `k` elements.
    pub(crate) fn strip_bytes(&self, k: usize) -> usize {
        self.packing.padded(k).saturating_mul(self.strip)
    }

    /// Most columns for which [`Kernels::dot`] is faster than strips, at most [`MAX_FEW`].
    pub(crate) fn few(&self) -> usize {
        self.few
    }

    /// Most columns that [`Kernels::tile`] takes at once.
    pub(crate) fn tile_columns(&self) -> usize {
        self.columns
    }

    /// The products of dense rows of `k` elements with packed columns (at a multiple of 4 bytes): `out[c * rows.len() + r]`.
    ///
    /// # Panics
    /// When lengths or alignments do not fit: a bug of the caller.
    pub(crate) fn dot(&self, k: usize, rows: &[&[u8]], columns: &[&[u8]], out: &mut [f32]) {
        self.check(k, rows, columns);
        assert_eq!(rows.len() * columns.len(), out.len(), "a sum per row and column");
        // SAFETY: these kernels exist only on processors with their instructions (`available`); lengths and alignments fit.
        unsafe { (self.dot)(rows, columns, self.packing.padded(k), out) };
    }

    /// Expands sixteen rows of `k` elements into a strip of [`Kernels::strip_bytes`], at a multiple of 32 bytes.
    ///
    /// # Panics
    /// When lengths or alignments do not fit: a bug of the caller.
    pub(crate) fn expand(&self, k: usize, rows: &[&[u8]; STRIP], strip: &mut [u8]) {
        self.check(k, rows, &[]);
        self.check_strip(k, strip);
        // SAFETY: as in `dot`.
        unsafe { (self.expand)(rows, self.packing.padded(k), strip) };
    }

    /// The products of a strip with 1 to [`Kernels::tile_columns`] packed columns, one `out` each.
    ///
    /// # Panics
    /// When lengths or alignments do not fit: a bug of the caller.
    pub(crate) fn tile(&self, k: usize, strip: &[u8], columns: &[&[u8]], out: &mut [Sums]) {
        self.check(k, &[], columns);
        self.check_strip(k, strip);
        assert!(columns.len() == out.len() && (1..=self.columns).contains(&columns.len()), "columns of a tile");
        // SAFETY: as in `dot`.
        unsafe { (self.tile)(strip, columns, self.packing.padded(k), out) };
    }

    fn check(&self, k: usize, rows: &[&[u8]], columns: &[&[u8]]) {
        let bytes = self.dtype.row_bytes(k);
        assert!(rows.iter().all(|row| Some(row.len()) == bytes), "rows of {k} elements");
        let bytes = self.packing.column_bytes(k);
        let fits = |column: &&[u8]| column.len() == bytes && column.as_ptr().cast::<f32>().is_aligned();
        assert!(columns.iter().all(fits), "aligned columns of {k} elements");
    }

    fn check_strip(&self, k: usize, strip: &[u8]) {
        assert!(strip.len() == self.strip_bytes(k) && strip.as_ptr().addr().is_multiple_of(32), "an aligned strip");
    }
}

#[cfg(test)]
mod tests;

//! SIMD kernels, chosen at run time by the processor's instruction sets: the micro-kernels and row dot products of GEMM
//! (here), the small f32 products of attention ([`attention_gemm`]), and multiversioned loops ([`multiversion`]).
//!
//! GEMM in BLIS's terms: the weights (a) come in *panels* of sixteen interleaved rows ([`crate::cpu::panel`]), repacked in
//! device memory or packed for one product. The *packing* of the right-hand side (b) is done once per product
//! ([`RhsPacking`]): f32 for float weights (bf16 where BF16 weights meet bf16 instructions), 8-bit codes with scales for block
//! types. The *micro-kernel* ([`MicroKernel::run`]) computes a *register tile* of one or two panels by a few columns. Its
//! *cache blocks* are chosen in `ops::mul_mat::fast`. With few columns packing does not pay: rows are then read in place by
//! row dot products ([`GemmKernels::dot`]).
//!
//! Micro-kernels are written once over the trait [`simd_ops::SimdOps`] and compiled for each instruction set. Start with
//! [`GemmKernels`].
#![allow(unsafe_code)] // one of the modules that lib.rs and tests/layout list

#[cfg(target_arch = "aarch64")]
mod arm;
pub(crate) mod attention_gemm;
mod expanded;
mod float_dot;
mod i16_accumulate;
mod kernel_macros;
mod multiversion;
mod packing;
mod panel_format;
mod panel_reads;
mod quant_dot;
mod simd_ops;
pub(crate) mod transpose;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use multiversion::{Multiversion, SimdLevel, multiversion, run_widest};
pub(crate) use packing::{RHS_PIECE, RhsPacking};
pub(crate) use panel_reads::{PanelReadClass, PanelReads};

use kernel_macros::{float_tiles, quant_tiles, row_kernels};

use super::panel::{self, Field, PANEL_ROWS};
use crate::tensor::quant::expand::expander;
use crate::tensor::table::for_each_panel;
use crate::tensor::{Capability, DType};
use simd_ops::SimdOps;

/// Most panels of one call of [`MicroKernel::run`].
pub(crate) const MAX_PANELS: usize = 2;

/// Most columns in a register tile of any [`MicroKernel::run`].
pub(crate) const MAX_TILE_COLUMNS: usize = if cfg!(target_arch = "aarch64") { 16 } else { 8 };

/// Most columns for which unpacked rows are read in place.
pub(crate) const MAX_DOT_COLUMNS: usize = 12;

/// Drops the cache lines of `bytes` from all levels, where unprivileged code can: on x86-64.
pub(crate) fn flush_from_caches(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    x86::flush_from_caches(bytes);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// Bytes of 256 elements of the largest block type: the buffer for the last, partial superblock of a row.
const MAX_SUPERBLOCK_BYTES: usize = {
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

/// Sums of one panel and one column.
pub(crate) type PanelSums = [f32; PANEL_ROWS];

/// Output of [`MicroKernel::run`]: the sums of panel `s` and column `c` are `sums[c * stride + s]`.
pub(crate) struct TileOutput<'a> {
    pub(crate) sums: &'a mut [PanelSums],
    pub(crate) stride: usize,
    /// Adds to the sums instead of overwriting them: for cache blocks along k after the first.
    pub(crate) accumulate: bool,
}

impl TileOutput<'_> {
    /// The output from panel `s` and column `c` on.
    fn offset(&mut self, c: usize, s: usize) -> TileOutput<'_> {
        TileOutput { sums: &mut self.sums[c * self.stride + s..], stride: self.stride, accumulate: self.accumulate }
    }

    /// Stores the sums of panel `s` and column `c`.
    ///
    /// # Safety
    /// The processor has the instructions of `L`.
    #[inline(always)]
    unsafe fn store<L: SimdOps>(&mut self, c: usize, s: usize, sums: L::Float) {
        let to = self.sums[c * self.stride + s].as_mut_ptr();
        // SAFETY: `to` points to sixteen floats; the caller guarantees that the processor has the instructions.
        unsafe { L::store_f32(to, if self.accumulate { L::add(L::load_f32(to), sums) } else { sums }) }
    }
}

/// The function behind [`GemmKernels::dot`]; `padded` is the number of elements of a packed column.
type RowDotFn = unsafe fn(rows: &[&[u8]], columns: &[&[u8]], padded: usize, out: &mut [f32]);
/// The function behind [`MicroKernel::run`], for rows of `k` elements.
type MicroKernelFn = unsafe fn(panels: &[*const u8], columns: &[&[u8]], k: usize, out: TileOutput<'_>);

/// `unroll!(j in [0 1 2] { ... })`: repeats the body for each number, so that `j` is a constant.
macro_rules! unroll {
    ($j:ident in [$($n:literal)*] $body:block) => {
        $({
            let $j: usize = $n;
            $body
        })*
    };
}
use unroll;

/// `$of` of the panel format of `$dtype`; `None` for types without panels.
macro_rules! with_panel_format {
    ([$dtype:ident $of:ident] $($name:ident $format:ident;)*) => {
        match $dtype {
            $($crate::tensor::DType::$name => Some($of::<$crate::cpu::simd::panel_format::$format>),)*
            _ => None,
        }
    };
}
use with_panel_format;

/// As [`with_panel_format`], with the row formats of an instruction set, which are in scope by their names.
macro_rules! with_row_format {
    ([$dtype:ident $of:ident] $($name:ident $format:ident;)*) => {
        match $dtype {
            $($crate::tensor::DType::$name => Some($of::<$format>),)*
            _ => None,
        }
    };
}
use with_row_format;

/// `$of` of the expansion of `$dtype`; `None` for types without one.
macro_rules! with_expansion {
    ([$dtype:ident $of:ident] $($name:ident $block:ident $len:literal;)*) => {
        match $dtype {
            $($crate::tensor::DType::$name => Some($of::<$crate::tensor::blocks::$block, $len>),)*
            _ => None,
        }
    };
}
use with_expansion;

#[cfg(test)]
quant_tiles!(portable_i32, crate::cpu::simd::simd_ops::Portable<true>, 2, [2 by 2, 1 by 1]);
#[cfg(test)]
quant_tiles!(portable_i16, crate::cpu::simd::simd_ops::Portable<false>, 2, [2 by 1, 1 by 2]);
#[cfg(test)]
quant_tiles!(portable_signed, crate::cpu::simd::simd_ops::Portable<true, true>, 1, [2 by 1, 1 by 1]);
#[cfg(test)]
float_tiles!(portable_floats, crate::cpu::simd::simd_ops::Portable<true>, [F32: F32, F16: F16, BF16: BF16], 2,
    [2 by 2, 1 by 1]);
#[cfg(test)]
float_tiles!(portable_bf16, crate::cpu::simd::simd_ops::Portable<true>, [BF16: Bf16Pairs], 2, [2 by 2, 1 by 1]);

/// Dot products of BF16 rows with columns of bf16 in plain Rust.
///
/// # Safety
/// Always safe to call: wrong lengths panic.
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

/// Kernels for BF16 in plain Rust, with columns of bf16.
#[cfg(test)]
fn portable_bf16_kernels(dtype: DType) -> Option<(RowDotFn, MicroKernelFn)> {
    Some((portable_bf16_dot, portable_bf16::micro_kernel_of(dtype)?))
}

/// The panel fields of the format of `$dtype`.
macro_rules! panel_fields_of {
    ([$dtype:ident] $($name:ident $format:ident;)*) => {
        match $dtype {
            $(DType::$name => Some(<panel_format::$format as panel_format::PanelFormat>::FIELDS),)*
            _ => None,
        }
    };
}

/// The fields of a block of `dtype` in panels; `None` for types without a panel format.
pub(super) const fn panel_fields(dtype: DType) -> Option<&'static [Field]> {
    for_each_panel!(panel_fields_of!(dtype))
}

/// Whether panels of `dtype` are made by an expansion ([`expanded`]), for each product: such rows have no panels in place.
fn expands_panels(dtype: DType) -> bool {
    expander(dtype).is_some() && panel_fields(dtype).is_none()
}

/// Name of the instruction set that quantised products use on this processor, for log lines.
pub(crate) fn instruction_set() -> &'static str {
    GemmKernels::available(DType::Q8_0).first().map_or("portable code", |(name, _)| name)
}

/// The GEMM kernels for weights of one type on one instruction set.
#[derive(Clone, Copy)]
pub(crate) struct GemmKernels {
    dtype: DType,
    packing: RhsPacking,
    /// Panels of one micro-kernel call.
    panels: usize,
    /// Most columns of the register tile.
    columns: usize,
    dot: RowDotFn,
    micro_kernel: MicroKernelFn,
}

impl GemmKernels {
    /// The fastest kernels of this processor for weights of `dtype`; `None` if it has none.
    pub(crate) fn of(dtype: DType) -> Option<GemmKernels> {
        Self::available(dtype).first().map(|(_, kernels)| *kernels)
    }

    /// All kernels of this processor for weights of `dtype`, with the names of their instruction sets, fastest first.
    fn available(dtype: DType) -> Vec<(&'static str, GemmKernels)> {
        #[cfg(target_arch = "x86_64")]
        let all = x86::available(dtype);
        #[cfg(target_arch = "aarch64")]
        let all = arm::available(dtype);
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let all = Vec::new();
        all
    }

    /// The kernels for BF16 weights by bf16 dot products and by FMA, where the processor has both.
    pub(crate) fn bf16_candidates() -> Option<[GemmKernels; 2]> {
        #[cfg(target_arch = "x86_64")]
        let candidates = x86::bf16_candidates();
        #[cfg(not(target_arch = "x86_64"))]
        let candidates = None;
        candidates
    }

    /// Makes [`GemmKernels::of`] choose bf16 dot products for BF16 weights, or FMA, from now on.
    pub(crate) fn set_bf16_dots(enabled: bool) {
        #[cfg(target_arch = "x86_64")]
        x86::set_bf16_dots(enabled);
        #[cfg(not(target_arch = "x86_64"))]
        let _ = enabled;
    }

    /// Whether [`GemmKernels::of`] chooses bf16 dot products for BF16 weights, where the processor has them.
    pub(crate) fn uses_bf16_dots() -> bool {
        #[cfg(target_arch = "x86_64")]
        let enabled = x86::uses_bf16_dots();
        #[cfg(not(target_arch = "x86_64"))]
        let enabled = false;
        enabled
    }

    /// The packing of the right-hand side for these kernels.
    pub(crate) fn packing(&self) -> RhsPacking {
        self.packing
    }

    /// Most columns for which [`GemmKernels::dot`] on rows in place is faster than packing panels; at most
    /// [`MAX_DOT_COLUMNS`].
    pub(crate) fn max_dot_columns(&self) -> usize {
        if self.dtype.is_block() { 4 } else { MAX_DOT_COLUMNS }
    }

    /// Panels of one call of [`MicroKernel::run`], at most [`MAX_PANELS`].
    pub(crate) fn panels(&self) -> usize {
        self.panels
    }

    /// Most columns of the register tile of [`MicroKernel::run`], at most [`MAX_TILE_COLUMNS`].
    pub(crate) fn tile_columns(&self) -> usize {
        self.columns
    }

    /// Row dot products: dense rows of `k` elements with packed columns (aligned to 4 bytes), `out[c * rows.len() + r]`.
    ///
    /// # Panics
    /// If lengths or alignments do not fit: a bug of the caller.
    pub(crate) fn dot(&self, k: usize, rows: &[&[u8]], columns: &[&[u8]], out: &mut [f32]) {
        let bytes = self.dtype.row_bytes(k);
        assert!(rows.iter().all(|row| Some(row.len()) == bytes), "rows of {k} elements");
        assert!(columns_fit(columns, self.packing.column_bytes(k)), "aligned columns of {k} elements");
        assert_eq!(rows.len() * columns.len(), out.len(), "a sum per row and column");
        // SAFETY: these kernels exist only on processors with their instructions (`available`); the assertions have checked
        // lengths and alignments.
        unsafe { (self.dot)(rows, columns, self.packing.padded(k), out) };
    }

    /// Bytes of a panel of rows of `k` elements.
    pub(crate) fn panel_bytes(&self, k: usize) -> usize {
        if expands_panels(self.dtype) {
            return expanded::panel_bytes(k);
        }
        self.dtype.row_bytes(k).unwrap_or(0).saturating_mul(PANEL_ROWS)
    }

    /// Packs sixteen dense rows of `k` elements, which have a micro-kernel, into a panel of [`GemmKernels::panel_bytes`].
    ///
    /// # Panics
    /// If lengths do not fit: a bug of the caller.
    pub(crate) fn pack_panel(&self, rows: &[&[u8]; PANEL_ROWS], panel: &mut [u8]) {
        match expander(self.dtype).filter(|_| expands_panels(self.dtype)) {
            Some(expand) => {
                let bytes = 256 / self.dtype.block_len() * self.dtype.block_bytes();
                expanded::pack(expand, bytes, rows, panel);
            }
            None => panel::pack(self.dtype, rows, panel),
        }
    }

    /// Whether the weights are blocks of codes, not floats.
    pub(crate) fn is_block(&self) -> bool {
        self.dtype.is_block()
    }

    /// The micro-kernel for rows of `k` elements; `None` if such rows cannot be packed into panels.
    pub(crate) fn micro_kernel(&self, k: usize) -> Option<MicroKernel> {
        let (panel, column) = (self.panel_bytes(k), self.packing.column_bytes(k));
        let packs = expands_panels(self.dtype) || panel::can_pack(self.dtype, k);
        packs.then_some(MicroKernel { k, panel, column, panels: self.panels, micro_kernel: self.micro_kernel })
    }
}

/// The micro-kernel for panels of one type and row length.
#[derive(Clone, Copy)]
pub(crate) struct MicroKernel {
    k: usize,
    /// Bytes of a panel.
    panel: usize,
    /// Bytes of a packed column.
    column: usize,
    /// Panels of a call.
    panels: usize,
    micro_kernel: MicroKernelFn,
}

impl MicroKernel {
    /// Multiplies [`GemmKernels::panels`] panels by packed columns (aligned to 4 bytes).
    ///
    /// # Panics
    /// If lengths or alignments do not fit: a bug of the caller.
    pub(crate) fn run(&self, panels: &[&[u8]], columns: &[&[u8]], out: TileOutput<'_>) {
        let panels_fit = panels.len() == self.panels && panels.iter().all(|panel| panel.len() == self.panel);
        assert!(panels_fit && columns_fit(columns, self.column), "panels and aligned columns of {} elements", self.k);
        let sums = columns.len().saturating_sub(1).saturating_mul(out.stride).saturating_add(panels.len());
        assert!(panels.len() <= out.stride && sums <= out.sums.len(), "space for a sum per panel and column");
        let starts = [panels[0].as_ptr(), panels[panels.len() - 1].as_ptr()];
        // SAFETY: as in `GemmKernels::dot`; rows of this length have panels.
        unsafe { (self.micro_kernel)(&starts[..panels.len()], columns, self.k, out) };
    }
}

/// Whether all columns have `bytes` bytes and are aligned for f32.
fn columns_fit(columns: &[&[u8]], bytes: usize) -> bool {
    columns.iter().all(|column| column.len() == bytes && column.as_ptr().cast::<f32>().is_aligned())
}

#[cfg(test)]
mod tests;

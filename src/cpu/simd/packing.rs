//! Packing of the right-hand side: converts the columns of a product to the form that the micro-kernels and row dot products
//! read.
//!
//! Values are rounded as in ggml's CPU backend, to the partner type of the weights (ggml's `vec_dot_type`: Q8_0 for Q4_0). So
//! a model gives the same results in both, up to the order of additions, and the routing of a mixture of experts does not
//! change.

use super::expanded::ExpandedPanels;
use super::expands_panels;
use super::multiversion::{Multiversion, SimdLevel, multiversion, run_widest};
use super::panel_format::{self, PanelFormat};
use crate::tensor::DType;
use crate::tensor::blocks::{self, BlockQ8_0, BlockQ8_1, BlockQ8K};
use crate::tensor::table::{for_each_float, for_each_panel};
use half::f16;

/// Most elements that are packed at once: a whole number of blocks of every type.
pub(crate) const RHS_PIECE: usize = 1024;

/// Elements of a block of [`RhsPacking::Codes`]; each has a scale.
const QUANT_BLOCK: usize = 32;

/// Elements of a superblock: columns for K-quants have one scale for all of its blocks.
const SUPERBLOCK: usize = 256;

/// The type that the values of [`RhsPacking::Floats`] are rounded to: that of the weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Rounding {
    F32,
    F16,
    BF16,
}

/// The rounding of columns for weights of the float type `$dtype`.
macro_rules! rounding_of {
    ([$dtype:ident] $($name:ident $float:ident;)*) => {
        match $dtype {
            $(DType::$name => Some(Rounding::$float),)*
            _ => None,
        }
    };
}

/// The packing of columns for weights of the block type `$dtype`.
macro_rules! codes_of {
    ([$dtype:ident $i32_dot:ident] $($name:ident $format:ident;)*) => {
        match $dtype {
            $(DType::$name => Some(RhsPacking::codes::<panel_format::$format>($i32_dot)),)*
            _ => None,
        }
    };
}

/// Layout of a packed column.
///
/// Columns are padded with zeros, to whole vectors or, for codes, to 256 elements: the kernels support no other length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RhsPacking {
    /// f32 values, rounded to the weights' type.
    Floats(Rounding),
    /// bf16 values.
    Bf16,
    /// One i8 code per element, then one f32 scale per 32 elements, then the f32 sum of each `sub` values (multiplied by the
    /// bias of the weights' sub-blocks), then integer sums of the same. `sub` is 32, or 16; with 16, each eight f32 sums are
    /// in the order 0 2 4 6 1 3 5 7, in which the row dot products hold the scales of 16-element sub-blocks. With
    /// `shared_scale`, the eight blocks of a superblock have the same scale.
    Codes { sub: usize, shared_scale: bool, int_sums: IntSums },
}

/// Integer sums of each `sub` codes, for the micro-kernels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum IntSums {
    /// None.
    None,
    /// i32: the negated sum times the weights' code for zero (the payload). It is the start value of the accumulators.
    ZeroOffsets(i32),
    /// Two i16: the same for elements 0 and 1 of each four elements, and for elements 2 and 3.
    HalfZeroOffsets(i32),
    /// i16: the negated sum. Each four sums are in the order 0 2 1 3, in which [`super::quant_dot::dot_minima`] multiplies them
    /// by pairs of minima.
    NegatedI16,
}

impl IntSums {
    /// Bytes of one sum.
    const fn bytes(self) -> usize {
        match self {
            IntSums::None => 0,
            IntSums::ZeroOffsets(_) | IntSums::HalfZeroOffsets(_) => 4,
            IntSums::NegatedI16 => 2,
        }
    }
}

/// The sections of a packed column of codes.
#[derive(Clone, Copy)]
pub(super) struct PackedColumn {
    pub(super) codes: *const i8,
    pub(super) scales: *const f32,
    pub(super) sums: *const f32,
    pub(super) int_sums: *const u8,
}

impl PackedColumn {
    pub(super) const NONE: PackedColumn = PackedColumn {
        codes: std::ptr::null(),
        scales: std::ptr::null(),
        sums: std::ptr::null(),
        int_sums: std::ptr::null(),
    };

    /// The sections of a column of `padded` elements with a sum for each `sub`.
    ///
    /// # Panics
    /// If the column is shorter.
    pub(super) fn new(column: &[u8], padded: usize, sub: usize) -> PackedColumn {
        let (codes, rest) = column.split_at(padded);
        let (scales, rest) = rest.split_at(padded / QUANT_BLOCK * 4);
        let (sums, int_sums) = rest.split_at(padded / sub * 4);
        PackedColumn {
            codes: codes.as_ptr().cast(),
            scales: scales.as_ptr().cast(),
            sums: sums.as_ptr().cast(),
            int_sums: int_sums.as_ptr(),
        }
    }
}

impl RhsPacking {
    /// The packing of columns for weights of `dtype`, for kernels with [`SimdOps::I32_DOT`] or without;
    /// [`super::float_dot::Bf16Pairs`] needs [`RhsPacking::Bf16`] instead. `None` for types without kernels.
    ///
    /// [`SimdOps::I32_DOT`]: super::simd_ops::SimdOps::I32_DOT
    pub(super) fn of(dtype: DType, i32_dot: bool) -> Option<RhsPacking> {
        match for_each_float!(rounding_of!(dtype)) {
            Some(rounding) => Some(RhsPacking::Floats(rounding)),
            None if expands_panels(dtype) => {
                let RhsPacking::Codes { sub, int_sums, .. } = RhsPacking::codes::<ExpandedPanels>(i32_dot) else {
                    return None;
                };
                Some(RhsPacking::Codes { sub, shared_scale: dtype.partner() == DType::Q8_K, int_sums })
            }
            None => for_each_panel!(codes_of!(dtype i32_dot)),
        }
    }

    pub(super) const fn codes<F: PanelFormat>(i32_dot: bool) -> RhsPacking {
        let shared_scale = F::DTYPE.block_len() == SUPERBLOCK;
        let int_sums = match (F::BIASED, shared_scale) {
            (false, _) if i32_dot => IntSums::ZeroOffsets(F::ZERO),
            // The kernels subtract the zero from the codes.
            (false, _) if F::TOP > 127 => IntSums::None,
            (false, _) => IntSums::HalfZeroOffsets(F::ZERO),
            (true, true) => IntSums::NegatedI16,
            (true, false) => IntSums::None,
        };
        RhsPacking::Codes { sub: F::SUB, shared_scale, int_sums }
    }

    /// Elements of a column of `k`, including padding.
    pub(crate) fn padded(self, k: usize) -> usize {
        k.next_multiple_of(match self {
            RhsPacking::Floats(_) => 8,
            RhsPacking::Bf16 => 16,
            RhsPacking::Codes { .. } => SUPERBLOCK,
        })
    }

    /// Bytes of an element, without scales and sums.
    pub(crate) fn element_bytes(self) -> usize {
        match self {
            RhsPacking::Floats(_) => 4,
            RhsPacking::Bf16 => 2,
            RhsPacking::Codes { .. } => 1,
        }
    }

    /// Bytes of a packed column of `k` elements: a multiple of 32.
    pub(crate) fn column_bytes(self, k: usize) -> usize {
        let n = self.padded(k);
        match self {
            RhsPacking::Floats(_) | RhsPacking::Bf16 => n.saturating_mul(self.element_bytes()),
            RhsPacking::Codes { sub, int_sums, .. } => n
                .saturating_add(n / QUANT_BLOCK * 4)
                .saturating_add(n / sub * (4 + int_sums.bytes()))
                .next_multiple_of(32),
        }
    }

    /// Bytes from one packed column to the next. Columns of one register tile must not start at the same offset modulo 4 KiB:
    /// they would compete for the same few ways of the L1 cache.
    pub(crate) fn stride(self, k: usize) -> usize {
        let bytes = self.column_bytes(k);
        if bytes.is_multiple_of(2048) { bytes.saturating_add(1088) } else { bytes }
    }

    /// Packs the elements from `first` on (a multiple of [`RHS_PIECE`]) of a column of `k`: a whole piece, or the rest.
    /// `write(offset, bytes)` receives the parts of the packed column; together they cover every byte that is read.
    pub(crate) fn pack(self, k: usize, first: usize, values: &[f32], mut write: impl FnMut(usize, &[u8])) {
        debug_assert!(first.is_multiple_of(RHS_PIECE) && values.len() == RHS_PIECE.min(k - first), "a piece");
        let n = self.padded(k);
        match self {
            RhsPacking::Floats(rounding) => {
                rounding.apply(values, |at, rounded| write((first + at) * 4, bytemuck::cast_slice(rounded)));
                self.pad(k, first + values.len(), write);
            }
            RhsPacking::Bf16 => {
                convert_in_pieces(values, 0, round_to_bf16_bits, |at, bits| {
                    write((first + at) * 2, bytemuck::cast_slice(bits))
                });
                self.pad(k, first + values.len(), write);
            }
            RhsPacking::Codes { sub, shared_scale, int_sums } => {
                let (quantise, at) = (QuantiseArgs { values, sub, shared_scale, int_sums }, (n, first));
                let used = (values.len(), sub, int_sums);
                // Short columns must not pay for initialising large arrays.
                if values.len() <= SUPERBLOCK {
                    quantise_piece::<SUPERBLOCK, { SUPERBLOCK / QUANT_BLOCK }, { SUPERBLOCK / 16 }>(quantise)
                        .write(used, at, write);
                } else {
                    quantise_piece::<RHS_PIECE, { RHS_PIECE / QUANT_BLOCK }, { RHS_PIECE / 16 }>(quantise)
                        .write(used, at, write);
                }
            }
        }
    }

    /// As [`RhsPacking::pack`], for a column that has codes already: `row` is the whole dense row of `dtype`, Q8_0, Q8_1 or Q8_K. The
    /// packing is one of codes.
    pub(crate) fn pack_blocks(self, k: usize, first: usize, dtype: DType, row: &[u8], write: impl FnMut(usize, &[u8])) {
        let RhsPacking::Codes { sub, int_sums, .. } = self else {
            debug_assert!(false, "a column of {dtype} beside weights without codes");
            return;
        };
        let mut piece = QuantisedPiece::<RHS_PIECE, { RHS_PIECE / QUANT_BLOCK }, { RHS_PIECE / 16 }>::ZERO;
        let len = RHS_PIECE.min(k - first);
        for b in 0..len / QUANT_BLOCK {
            let (step, codes) = block_of_codes(dtype, row, first / QUANT_BLOCK + b);
            piece.store_block(b, step, codes, sub, int_sums);
        }
        piece.write((len, sub, int_sums), (self.padded(k), first), write);
    }

    /// Writes the padding of a column of `k` after its last piece.
    fn pad(self, k: usize, end: usize, mut write: impl FnMut(usize, &[u8])) {
        let (bytes, padding) = (self.element_bytes(), self.padded(k) - k);
        if end == k && padding > 0 {
            write(k * bytes, &[0; 32][..padding * bytes]);
        }
    }
}

/// A quantised piece of a column of at most `N` elements in `BLOCKS` blocks, with sums of `HALVES` half blocks. A shorter piece
/// uses only the first part of each array.
struct QuantisedPiece<const N: usize, const BLOCKS: usize, const HALVES: usize> {
    codes: [i8; N],
    scales: [f32; BLOCKS],
    sums: [f32; HALVES],
    offsets: [i32; HALVES],
    negated: [i16; HALVES],
}

/// The values of a piece and the form to quantise them to; see [`RhsPacking::Codes`].
#[derive(Clone, Copy)]
struct QuantiseArgs<'a> {
    values: &'a [f32],
    sub: usize,
    shared_scale: bool,
    int_sums: IntSums,
}

multiversion! {
    /// Quantises a piece of at most `N` values, in whole blocks.
    fn quantise_piece<'a, const N: usize, const BLOCKS: usize, const HALVES: usize>(
        piece: QuantiseArgs<'a>,
    ) -> QuantisedPiece<N, BLOCKS, HALVES> {
        let QuantiseArgs { values, sub, shared_scale, int_sums } = piece;
        let mut out = QuantisedPiece::ZERO;
        let mut scale = QuantScale::default();
        for (b, block) in values.as_chunks::<QUANT_BLOCK>().0.iter().enumerate() {
            if !shared_scale {
                scale = QuantScale::of_block(block);
            } else if b % (SUPERBLOCK / QUANT_BLOCK) == 0 {
                scale = QuantScale::of_superblock(&values[b * QUANT_BLOCK..][..SUPERBLOCK]);
            }
            let codes = scale.quantise(block);
            out.store_block(b, scale.step, codes, sub, int_sums);
        }
        out
    }
}

impl<const N: usize, const BLOCKS: usize, const HALVES: usize> QuantisedPiece<N, BLOCKS, HALVES> {
    /// Zeros: also the padding after the last block.
    const ZERO: Self = QuantisedPiece {
        codes: [0; N],
        scales: [0.0; BLOCKS],
        sums: [0.0; HALVES],
        offsets: [0; HALVES],
        negated: [0; HALVES],
    };

    /// Stores block `b` and its sums; see [`RhsPacking::Codes`].
    #[inline(always)]
    fn store_block(&mut self, b: usize, step: f32, codes: [i8; QUANT_BLOCK], sub: usize, int_sums: IntSums) {
        self.codes.as_chunks_mut().0[b] = codes;
        let [low, high] = sums_of_codes(&codes);
        self.scales[b] = step;
        if sub == QUANT_BLOCK {
            self.sums[b] = low as f32 * step + high as f32 * step;
            self.store_int_sum(int_sums, b, low + high, &codes);
        } else {
            // Blocks 4g to 4g + 3: their first halves, then their second halves.
            self.sums[b / 4 * 8 + b % 4] = low as f32 * step;
            self.sums[b / 4 * 8 + b % 4 + 4] = high as f32 * step;
            let (first, second) = codes.split_at(16);
            self.store_int_sum(int_sums, 2 * b, low, first);
            self.store_int_sum(int_sums, 2 * b + 1, high, second);
        }
    }

    /// Writes the sections of a column of `n` elements (with padding) from element `first` on; `len` elements are in use.
    fn write(
        &self,
        (len, sub, int_sums): (usize, usize, IntSums),
        (n, first): (usize, usize),
        mut write: impl FnMut(usize, &[u8]),
    ) {
        let len = len.next_multiple_of(SUPERBLOCK);
        write(first, bytemuck::cast_slice(&self.codes[..len]));
        write(n + first / QUANT_BLOCK * 4, bytemuck::cast_slice(&self.scales[..len / QUANT_BLOCK]));
        let end = n + n / QUANT_BLOCK * 4 + n / sub * 4;
        write(end - (n - first) / sub * 4, bytemuck::cast_slice(&self.sums[..len / sub]));
        match int_sums {
            IntSums::None => {}
            IntSums::ZeroOffsets(_) | IntSums::HalfZeroOffsets(_) => {
                write(end + first / sub * 4, bytemuck::cast_slice(&self.offsets[..len / sub]))
            }
            IntSums::NegatedI16 => write(end + first / sub * 2, bytemuck::cast_slice(&self.negated[..len / sub])),
        }
    }

    #[inline(always)]
    fn store_int_sum(&mut self, int_sums: IntSums, number: usize, sum: i32, codes: &[i8]) {
        match int_sums {
            IntSums::None => {}
            IntSums::ZeroOffsets(zero) => self.offsets[number] = -zero * sum,
            IntSums::HalfZeroOffsets(zero) => {
                // Wraps, as the accumulators do.
                let first: i32 =
                    codes.as_chunks::<4>().0.iter().map(|four| i32::from(four[0]) + i32::from(four[1])).sum();
                let [first, second] = [first, sum - first].map(|sum| (-zero * sum) as u16);
                self.offsets[number] = i32::from_ne_bytes(bytemuck::cast([first, second]));
            }
            // Fits i16: at most 32 codes of 7 bits and a sign.
            IntSums::NegatedI16 => self.negated[number / 4 * 4 + [0, 2, 1, 3][number % 4]] = -sum as i16,
        }
    }
}

impl Rounding {
    /// Calls `each` with chunks of rounded values and the index of the first value.
    fn apply(self, values: &[f32], mut each: impl FnMut(usize, &[f32])) {
        match self {
            Rounding::F32 => each(0, values),
            Rounding::F16 => convert_in_pieces(values, 0.0, round_to_f16, each),
            Rounding::BF16 => convert_in_pieces(values, 0.0, round_to_bf16, each),
        }
    }
}

/// Calls `each` with chunks of converted values and the index of the first value.
fn convert_in_pieces<T: Copy>(
    values: &[f32],
    zero: T,
    convert: impl Fn(f32) -> T + Copy,
    mut each: impl FnMut(usize, &[T]),
) {
    const CONVERT_CHUNK: usize = 256;
    let mut converted = [zero; CONVERT_CHUNK];
    for (i, values) in values.chunks(CONVERT_CHUNK).enumerate() {
        let converted = &mut converted[..values.len()];
        run_widest(ConvertLoop(values, converted, convert));
        each(i * CONVERT_CHUNK, converted);
    }
}

/// Input, output and conversion of a loop.
struct ConvertLoop<'a, T, F>(&'a [f32], &'a mut [T], F);

impl<T, F: Fn(f32) -> T> Multiversion for ConvertLoop<'_, T, F> {
    type Out = ();

    #[inline(always)]
    fn run<L: SimdLevel>(self) {
        for (x, converted) in self.0.iter().zip(self.1) {
            *converted = (self.2)(*x);
        }
    }
}

/// The f16 nearest to `x`, ties to even, as f32. In f32 arithmetic, which vectorises on every processor.
#[inline(always)]
fn round_to_f16(x: f32) -> f32 {
    /// The smallest normal f16.
    const NORMAL: f32 = 1.0 / 16384.0;
    let magnitude = x.abs();
    let bits = magnitude.to_bits();
    // Drops 13 bits of the fraction. Values rounded up to 2^16 become infinite.
    let normal = f32::from_bits((bits + 0xfff + (bits >> 13 & 1)) & !0x1fff);
    let normal = if normal >= 65536.0 { f32::INFINITY } else { normal };
    // Subnormal f16 are multiples of 2^-24, as are all f32 between 1/2 and 1.
    let subnormal = (magnitude + 0.5) - 0.5;
    let rounded = if magnitude < NORMAL { subnormal } else { normal };
    if x.is_nan() { x } else { rounded.copysign(x) }
}

/// The bf16 nearest to `x`, ties to even, as f32.
#[inline(always)]
fn round_to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = f32::from_bits(bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & !0xffff);
    if x.is_nan() { x } else { rounded }
}

/// The bf16 nearest to `x`, ties to even.
#[inline(always)]
fn round_to_bf16_bits(x: f32) -> u16 {
    let high = (round_to_bf16(x).to_bits() >> 16) as u16;
    // The dropped bits may be all that distinguishes a NaN from infinity.
    if x.is_nan() { high | 1 << 6 } else { high }
}

/// The value of code 1, and its inverse (0 where the inverse would overflow: then all codes are 0).
#[derive(Clone, Copy, Default)]
struct QuantScale {
    step: f32,
    inverse: f32,
}

impl QuantScale {
    /// Q8_0: the largest magnitude gets code 127 or -127; the step is an f16.
    #[inline(always)]
    fn of_block(values: &[f32; QUANT_BLOCK]) -> QuantScale {
        let largest = max_magnitude(values);
        let step = largest / 127.0;
        let half = f16::from_f32(step).to_f32();
        // Outside f16's range ggml's step is 0 or infinite; the f32 step is used instead.
        let step = if half > 0.0 && half.is_finite() { half } else { step };
        let usable = largest > 1e-35 && largest.is_finite();
        QuantScale { step, inverse: if usable { 127.0 / largest } else { 0.0 } }
    }

    /// Q8_K: the value of largest magnitude, the first of equals, gets code -127.
    #[inline(always)]
    fn of_superblock(values: &[f32]) -> QuantScale {
        let largest = max_magnitude(values);
        if !(largest > 1e-35 && largest.is_finite()) {
            return QuantScale { step: largest, inverse: 0.0 };
        }
        let extreme = values.iter().copied().find(|x| x.abs() == largest).unwrap_or(largest);
        let inverse = -127.0 / extreme;
        QuantScale { step: 1.0 / inverse, inverse }
    }

    #[inline(always)]
    fn quantise(self, values: &[f32; QUANT_BLOCK]) -> [i8; QUANT_BLOCK] {
        // Adding 1.5 * 2^23 puts the nearest integer, ties to even, into the low bits.
        const ROUND: f32 = 12_582_912.0;
        values.map(|x| (x * self.inverse + ROUND).to_bits() as i8)
    }
}

/// Scale and codes of elements `32 * b` and following of a row of Q8_0, Q8_1 or Q8_K.
fn block_of_codes(dtype: DType, row: &[u8], b: usize) -> (f32, [i8; QUANT_BLOCK]) {
    match dtype {
        DType::Q8_0 => blocks::blocks::<BlockQ8_0>(row).get(b).map(|block| (block.d.to_f32(), block.qs)),
        DType::Q8_1 => blocks::blocks::<BlockQ8_1>(row).get(b).map(|block| (block.d.to_f32(), block.qs)),
        _ => blocks::blocks::<BlockQ8K>(row)
            .get(b / (SUPERBLOCK / QUANT_BLOCK))
            .map(|block| (block.scale(), block.qs.as_chunks().0[b % (SUPERBLOCK / QUANT_BLOCK)])),
    }
    .unwrap_or((0.0, [0; QUANT_BLOCK]))
}

/// The largest magnitude; not finite if any value is not finite. The length is a multiple of 16.
#[inline(always)]
fn max_magnitude(values: &[f32]) -> f32 {
    // Magnitudes compare as integers, with NaN the largest. Sixteen independent maxima, so that the loop vectorises.
    let mut lanes = [0i32; 16];
    for chunk in values.as_chunks::<16>().0 {
        for l in 0..16 {
            lanes[l] = lanes[l].max((chunk[l].to_bits() & 0x7fff_ffff) as i32);
        }
    }
    f32::from_bits(lanes.iter().fold(0, |max, &m| max.max(m)) as u32)
}

/// Sums of the first and the second 16 codes.
#[inline(always)]
fn sums_of_codes(codes: &[i8; QUANT_BLOCK]) -> [i32; 2] {
    let halves = codes.as_chunks::<16>().0;
    [0, 1].map(|h| halves[h].iter().map(|&q| i32::from(q)).sum())
}

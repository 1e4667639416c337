//! Columns as the kernels read them.
//!
//! They are rounded as ggml's CPU rounds them, to the partner type of the weights (ggml's `vec_dot_type`: Q8_0 for Q4_0): so a
//! model gives the same results here and there, up to the order of additions, and no expert of a mixture flips.

use super::formats::{self, Format};
use super::wide::{Level, Wide, widest};
use crate::tensor::DType;
use crate::tensor::table::{for_each_float, for_each_simd};
use half::f16;

/// Most elements that are packed at once: a whole number of blocks of every type.
pub(crate) const PIECE: usize = 1024;

/// Elements of a block of [`Packing::Codes`], each with a scale.
const BLOCK: usize = 32;

/// Elements of a super-block: the K types' columns have one scale for all of its blocks.
const SUPER: usize = 256;

/// To which type the values of [`Packing::Floats`] are rounded: that of the weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Rounding {
    F32,
    F16,
    BF16,
}

/// The rounding of columns that meet weights of the plain type `$dtype`.
macro_rules! rounding_of {
    ([$dtype:ident] $($name:ident $float:ident;)*) => {
        match $dtype {
            $(DType::$name => Some(Rounding::$float),)*
            _ => None,
        }
    };
}

/// The packing of columns that meet blocks of `$dtype`.
macro_rules! codes_of {
    ([$dtype:ident $exact:ident] $($name:ident $format:ident;)*) => {
        match $dtype {
            $(DType::$name => Some(Packing::codes::<formats::$format>($exact)),)*
            _ => None,
        }
    };
}

/// How the columns of a product are laid out.
///
/// Columns are padded with zeros, to whole vectors or, for codes, to 256 elements: the kernels know no other length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Packing {
    /// f32 values, rounded to the weights' type.
    Floats(Rounding),
    /// bf16 values.
    Bf16,
    /// One i8 code per element, then one f32 scale per 32 elements, then the f32 sum of each `sub` values (which meets
    /// the bias of the weights' sub-blocks), then whole numbers for the same. `sub` is 32, or 16 with each eight f32 sums
    /// in the order 0 2 4 6 1 3 5 7, in which kernels for rows hold the scales of 16-element sub-blocks. With `shared`,
    /// the eight blocks of 256 elements have the same scale.
    Codes { sub: usize, shared: bool, wholes: Wholes },
}

/// What strips need of the sums of each `sub` codes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wholes {
    /// Nothing.
    None,
    /// i32: the sum times minus the weights' code for 0, where sums of products start.
    Starts(i32),
    /// Two i16: the same of elements 0 and 1 of each four, and of 2 and 3.
    HalfStarts(i32),
    /// i16: minus the sum, each four in the order 0 2 1 3, in which bytes of minima become pairs.
    Pairs,
}

impl Wholes {
    /// Bytes for each sum.
    const fn bytes(self) -> usize {
        match self {
            Wholes::None => 0,
            Wholes::Starts(_) | Wholes::HalfStarts(_) => 4,
            Wholes::Pairs => 2,
        }
    }
}

/// The parts of a packed column of codes.
#[derive(Clone, Copy)]
pub(super) struct Parts {
    pub(super) codes: *const i8,
    pub(super) scales: *const f32,
    pub(super) sums: *const f32,
    pub(super) wholes: *const u8,
}

impl Parts {
    pub(super) const NONE: Parts =
        Parts { codes: std::ptr::null(), scales: std::ptr::null(), sums: std::ptr::null(), wholes: std::ptr::null() };

    /// The parts of a column of `padded` elements with a sum for each `sub`.
    ///
    /// # Panics
    /// When the column is shorter.
    pub(super) fn new(column: &[u8], padded: usize, sub: usize) -> Parts {
        let (codes, rest) = column.split_at(padded);
        let (scales, rest) = rest.split_at(padded / BLOCK * 4);
        let (sums, wholes) = rest.split_at(padded / sub * 4);
        Parts {
            codes: codes.as_ptr().cast(),
            scales: scales.as_ptr().cast(),
            sums: sums.as_ptr().cast(),
            wholes: wholes.as_ptr(),
        }
    }
}

impl Packing {
    /// How columns for weights of a type are packed, for kernels that are [`Lanes::EXACT`] or not; those of
    /// [`super::floats::Bf16Pairs`] want others. `None` for types without kernels.
    ///
    /// [`Lanes::EXACT`]: super::lanes::Lanes::EXACT
    pub(super) fn of(dtype: DType, exact: bool) -> Option<Packing> {
        match for_each_float!(rounding_of!(dtype)) {
            Some(rounding) => Some(Packing::Floats(rounding)),
            None => for_each_simd!(codes_of!(dtype exact)),
        }
    }

    pub(super) const fn codes<F: Format>(exact: bool) -> Packing {
        let shared = F::DTYPE.block_len() == SUPER;
        let wholes = match (F::BIASED, shared) {
            (false, _) if exact => Wholes::Starts(F::ZERO),
            // Products of codes less their zero.
            (false, _) if F::TOP > 127 => Wholes::None,
            (false, _) => Wholes::HalfStarts(F::ZERO),
            (true, true) => Wholes::Pairs,
            (true, false) => Wholes::None,
        };
        Packing::Codes { sub: F::SUB, shared, wholes }
    }

    /// Elements of a column of `k`, with its padding.
    pub(crate) fn padded(self, k: usize) -> usize {
        k.next_multiple_of(match self {
            Packing::Floats(_) => 8,
            Packing::Bf16 => 16,
            Packing::Codes { .. } => SUPER,
        })
    }

    /// Bytes of an element, but for what comes behind all of them.
    pub(crate) fn element_bytes(self) -> usize {
        match self {
            Packing::Floats(_) => 4,
            Packing::Bf16 => 2,
            Packing::Codes { .. } => 1,
        }
    }

    /// Bytes of a column of `k` elements: a multiple of 32.
    pub(crate) fn column_bytes(self, k: usize) -> usize {
        let n = self.padded(k);
        match self {
            Packing::Floats(_) | Packing::Bf16 => n.saturating_mul(self.element_bytes()),
            Packing::Codes { sub, wholes, .. } => {
                n.saturating_add(n / BLOCK * 4).saturating_add(n / sub * (4 + wholes.bytes())).next_multiple_of(32)
            }
        }
    }

    /// Bytes from the start of one column to that of the next. Those that meet rows together must not start at the same place of
    /// each 4 KiB: they would have the same few places in the first cache level.
    pub(crate) fn stride(self, k: usize) -> usize {
        let bytes = self.column_bytes(k);
        if bytes.is_multiple_of(2048) { bytes.saturating_add(1088) } else { bytes }
    }

    /// Packs the elements from `first` on, a multiple of [`PIECE`], of a column of `k`: all that are left, or a piece.
    /// `write(offset, bytes)` gets the parts of the packed column, which together leave no byte of it out that is read.
    pub(crate) fn pack(self, k: usize, first: usize, values: &[f32], mut write: impl FnMut(usize, &[u8])) {
        debug_assert!(first.is_multiple_of(PIECE) && values.len() == PIECE.min(k - first), "a piece");
        let n = self.padded(k);
        match self {
            Packing::Floats(rounding) => {
                rounding.apply(values, |at, rounded| write((first + at) * 4, bytemuck::cast_slice(rounded)));
                self.pad(k, first + values.len(), write);
            }
            Packing::Bf16 => {
                in_pieces(values, 0, to_bf16_bits, |at, bits| write((first + at) * 2, bytemuck::cast_slice(bits)));
                self.pad(k, first + values.len(), write);
            }
            Packing::Codes { sub, shared, wholes } => {
                let (quantise, at) = (Quantise { values, sub, shared, wholes }, (n, first));
                // Short columns are not to pay for large arrays.
                if values.len() <= SUPER {
                    widest(Room::<SUPER, { SUPER / BLOCK }, { SUPER / 16 }>(quantise)).write(&quantise, at, write);
                } else {
                    widest(Room::<PIECE, { PIECE / BLOCK }, { PIECE / 16 }>(quantise)).write(&quantise, at, write);
                }
            }
        }
    }

    /// Writes the padding of a column of `k`, if a piece ends where the column does.
    fn pad(self, k: usize, end: usize, mut write: impl FnMut(usize, &[u8])) {
        let (bytes, padding) = (self.element_bytes(), self.padded(k) - k);
        if end == k && padding > 0 {
            write(k * bytes, &[0; 32][..padding * bytes]);
        }
    }
}

/// A piece of a column of codes; what its length does not need is left over.
struct Quantised<const N: usize, const BLOCKS: usize, const HALVES: usize> {
    codes: [i8; N],
    scales: [f32; BLOCKS],
    sums: [f32; HALVES],
    starts: [i32; HALVES],
    pairs: [i16; HALVES],
}

/// Rounds a piece of a column, of whole blocks, to codes; see [`Packing::Codes`].
#[derive(Clone, Copy)]
struct Quantise<'a> {
    values: &'a [f32],
    sub: usize,
    shared: bool,
    wholes: Wholes,
}

/// A piece of at most `N` values.
struct Room<'a, const N: usize, const BLOCKS: usize, const HALVES: usize>(Quantise<'a>);

impl<const N: usize, const BLOCKS: usize, const HALVES: usize> Wide for Room<'_, N, BLOCKS, HALVES> {
    type Out = Quantised<N, BLOCKS, HALVES>;

    #[inline(always)]
    fn run<L: Level>(self) -> Self::Out {
        let Quantise { values, sub, shared, wholes } = self.0;
        // The padding behind the last block is zeros.
        let mut out = Quantised {
            codes: [0; N],
            scales: [0.0; BLOCKS],
            sums: [0.0; HALVES],
            starts: [0; HALVES],
            pairs: [0; HALVES],
        };
        let mut scale = Scale::default();
        for (b, block) in values.as_chunks::<BLOCK>().0.iter().enumerate() {
            if !shared {
                scale = Scale::of_block(block);
            } else if b % (SUPER / BLOCK) == 0 {
                scale = Scale::of_super_block(&values[b * BLOCK..][..SUPER]);
            }
            let codes = scale.quantise(block);
            out.codes.as_chunks_mut().0[b] = codes;
            let [low, high] = sums_of_codes(&codes);
            out.scales[b] = scale.step;
            if sub == BLOCK {
                out.sums[b] = low as f32 * scale.step + high as f32 * scale.step;
                out.whole(wholes, b, low + high, &codes);
            } else {
                // Blocks 4g to 4g + 3: first halves, then second halves.
                out.sums[b / 4 * 8 + b % 4] = low as f32 * scale.step;
                out.sums[b / 4 * 8 + b % 4 + 4] = high as f32 * scale.step;
                let (first, second) = codes.split_at(16);
                out.whole(wholes, 2 * b, low, first);
                out.whole(wholes, 2 * b + 1, high, second);
            }
        }
        out
    }
}

impl<const N: usize, const BLOCKS: usize, const HALVES: usize> Quantised<N, BLOCKS, HALVES> {
    /// The parts of a column of `n` elements with its padding, from element `first` on.
    fn write(&self, of: &Quantise<'_>, (n, first): (usize, usize), mut write: impl FnMut(usize, &[u8])) {
        let (len, sub) = (of.values.len().next_multiple_of(SUPER), of.sub);
        write(first, bytemuck::cast_slice(&self.codes[..len]));
        write(n + first / BLOCK * 4, bytemuck::cast_slice(&self.scales[..len / BLOCK]));
        let end = n + n / BLOCK * 4 + n / sub * 4;
        write(end - (n - first) / sub * 4, bytemuck::cast_slice(&self.sums[..len / sub]));
        match of.wholes {
            Wholes::None => {}
            Wholes::Starts(_) | Wholes::HalfStarts(_) => {
                write(end + first / sub * 4, bytemuck::cast_slice(&self.starts[..len / sub]))
            }
            Wholes::Pairs => write(end + first / sub * 2, bytemuck::cast_slice(&self.pairs[..len / sub])),
        }
    }

    #[inline(always)]
    fn whole(&mut self, wholes: Wholes, number: usize, sum: i32, codes: &[i8]) {
        match wholes {
            Wholes::None => {}
            Wholes::Starts(zero) => self.starts[number] = -zero * sum,
            Wholes::HalfStarts(zero) => {
                // Wraps as the sums do.
                let first: i32 =
                    codes.as_chunks::<4>().0.iter().map(|four| i32::from(four[0]) + i32::from(four[1])).sum();
                let [first, second] = [first, sum - first].map(|sum| (-zero * sum) as u16);
                self.starts[number] = i32::from_ne_bytes(bytemuck::cast([first, second]));
            }
            // At most 32 codes of 7 bits and a sign.
            Wholes::Pairs => self.pairs[number / 4 * 4 + [0, 2, 1, 3][number % 4]] = -sum as i16,
        }
    }
}

impl Rounding {
    /// Calls `each` for the rounded values, some at a time, with the place of the first.
    fn apply(self, values: &[f32], mut each: impl FnMut(usize, &[f32])) {
        match self {
            Rounding::F32 => each(0, values),
            Rounding::F16 => in_pieces(values, 0.0, to_half, each),
            Rounding::BF16 => in_pieces(values, 0.0, to_bf16, each),
        }
    }
}

/// Calls `each` for what `convert` makes of the values, some at a time, with the place of the first.
fn in_pieces<T: Copy>(values: &[f32], zero: T, convert: impl Fn(f32) -> T + Copy, mut each: impl FnMut(usize, &[T])) {
    const SOME: usize = 256;
    let mut converted = [zero; SOME];
    for (i, values) in values.chunks(SOME).enumerate() {
        let converted = &mut converted[..values.len()];
        widest(Converted(values, converted, convert));
        each(i * SOME, converted);
    }
}

/// Values, where they end, and what becomes of each.
struct Converted<'a, T, F>(&'a [f32], &'a mut [T], F);

impl<T, F: Fn(f32) -> T> Wide for Converted<'_, T, F> {
    type Out = ();

    #[inline(always)]
    fn run<L: Level>(self) {
        for (x, converted) in self.0.iter().zip(self.1) {
            *converted = (self.2)(*x);
        }
    }
}

/// The f16 nearest to `x`, ties to even, as f32. In arithmetic of f32, which every processor does in vectors.
#[inline(always)]
fn to_half(x: f32) -> f32 {
    /// The least normal f16.
    const NORMAL: f32 = 1.0 / 16384.0;
    let magnitude = x.abs();
    let bits = magnitude.to_bits();
    // 13 bits of the fraction go. What is rounded up to 2^16 is infinite.
    let normal = f32::from_bits((bits + 0xfff + (bits >> 13 & 1)) & !0x1fff);
    let normal = if normal >= 65536.0 { f32::INFINITY } else { normal };
    // Subnormal ones are multiples of 2^-24, as are all f32 between 1/2 and 1.
    let subnormal = (magnitude + 0.5) - 0.5;
    let rounded = if magnitude < NORMAL { subnormal } else { normal };
    if x.is_nan() { x } else { rounded.copysign(x) }
}

/// The bf16 nearest to `x`, ties to even, as f32.
#[inline(always)]
fn to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = f32::from_bits(bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & !0xffff);
    if x.is_nan() { x } else { rounded }
}

/// The same as bf16.
#[inline(always)]
fn to_bf16_bits(x: f32) -> u16 {
    let high = (to_bf16(x).to_bits() >> 16) as u16;
    // What tells a NaN from infinity may lie in the bits that go.
    if x.is_nan() { high | 1 << 6 } else { high }
}

/// What a code stands for, and its inverse (0 where that would overflow: such columns are zero for all purposes).
#[derive(Clone, Copy, Default)]
struct Scale {
    step: f32,
    inverse: f32,
}

impl Scale {
    /// The largest magnitude gets code 127 or -127; the step is an f16. (Q8_0)
    #[inline(always)]
    fn of_block(values: &[f32; BLOCK]) -> Scale {
        let largest = magnitude(values);
        let step = largest / 127.0;
        let half = f16::from_f32(step).to_f32();
        // Beyond f16's range ggml's step is 0 or infinite; there is no need for that.
        let step = if half > 0.0 && half.is_finite() { half } else { step };
        let usable = largest > 1e-35 && largest.is_finite();
        Scale { step, inverse: if usable { 127.0 / largest } else { 0.0 } }
    }

    /// The value of largest magnitude, the first of equals, gets code -127. (Q8_K)
    #[inline(always)]
    fn of_super_block(values: &[f32]) -> Scale {
        let largest = magnitude(values);
        if !(largest > 1e-35 && largest.is_finite()) {
            return Scale { step: largest, inverse: 0.0 };
        }
        let extreme = values.iter().copied().find(|x| x.abs() == largest).unwrap_or(largest);
        let inverse = -127.0 / extreme;
        Scale { step: 1.0 / inverse, inverse }
    }

    #[inline(always)]
    fn quantise(self, values: &[f32; BLOCK]) -> [i8; BLOCK] {
        // Adding 1.5 * 2^23 leaves the nearest whole number, ties to even, in the low bits.
        const ROUND: f32 = 12_582_912.0;
        values.map(|x| (x * self.inverse + ROUND).to_bits() as i8)
    }
}

/// The largest magnitude; not finite when any value is not. Of a whole number of sixteens.
#[inline(always)]
fn magnitude(values: &[f32]) -> f32 {
    // Magnitudes compare as integers, where NaN is largest. In lanes, so that it vectorises.
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
fn sums_of_codes(codes: &[i8; BLOCK]) -> [i32; 2] {
    let halves = codes.as_chunks::<16>().0;
    [0, 1].map(|h| halves[h].iter().map(|&q| i32::from(q)).sum())
}

//! Quantisation blocks as they lie in memory and on the wire.
//!
//! Every struct has alignment 1, so a block can be read at any address. The order of the fields is that of ggml's blocks
//! (ggml-common.h). `q` is the code of an element; `d`, `dmin` and `m` are the scales and the offset of the formula given with
//! each struct. `lo` and `hi` are the low and the high nibble of a byte.

use super::DType;
use bytemuck::{Pod, Zeroable};

/// An IEEE half as two little-endian bytes, at any address.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(transparent)]
pub struct F16Bits(pub [u8; 2]);

impl F16Bits {
    /// From the 16 bits of the number.
    pub const fn from_bits(bits: u16) -> Self {
        F16Bits(bits.to_le_bytes())
    }

    /// The 16 bits of the number.
    pub const fn to_bits(self) -> u16 {
        u16::from_le_bytes(self.0)
    }

    /// Exact conversion. Free of calls and of branches on the magnitude, so that it inlines into block loops.
    #[inline]
    pub fn to_f32(self) -> f32 {
        let bits = u32::from(self.to_bits());
        // The exponent field is rebased by a product, which is exact and normalises subnormals by itself.
        let rebase = f32::from_bits((127 + 112) << 23);
        let magnitude = (f32::from_bits((bits & 0x7fff) << 13) * rebase).to_bits();
        let special = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
        f32::from_bits((bits & 0x8000) << 16 | magnitude | special)
    }

    /// Rounds to nearest, ties to even; values that are too large become infinite; NaN becomes the quiet NaN 0x7E00 with its
    /// sign.
    #[inline]
    pub fn from_f32(value: f32) -> Self {
        Self::from_bits(canonical_nan(half::f16::from_f32(value).to_bits()))
    }
}

/// Gives every half NaN the payload 0x200, which hardware conversions do not, so that all machines agree.
#[inline]
pub(super) const fn canonical_nan(bits: u16) -> u16 {
    if bits & 0x7fff > 0x7c00 { bits & 0x8000 | 0x7e00 } else { bits }
}

/// A quantisation block that can be read from any bytes of its size.
pub trait Block: Pod {
    /// The element type that consists of these blocks.
    const DTYPE: DType;
}

/// The whole blocks at the start of `bytes`; a partial block at the end is left out.
pub fn blocks<B: Block>(bytes: &[u8]) -> &[B] {
    let whole = bytes.len() - bytes.len() % size_of::<B>();
    bytemuck::cast_slice(&bytes[..whole])
}

/// As [`blocks`], for writing.
pub fn blocks_mut<B: Block>(bytes: &mut [u8]) -> &mut [B] {
    let whole = bytes.len() - bytes.len() % size_of::<B>();
    bytemuck::cast_slice_mut(&mut bytes[..whole])
}

macro_rules! blocks {
    ($($(#[$doc:meta])* $name:ident = $dtype:ident { $($(#[$field_doc:meta])* $field:ident: $ty:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
        #[repr(C)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $ty,)*
        }

        impl Block for $name {
            const DTYPE: DType = DType::$dtype;
        }

        // A wrong size would shift every later block; alignment above 1 would make casts of wire bytes fail.
        const _: () = assert!(size_of::<$name>() == DType::$dtype.block_bytes() && align_of::<$name>() == 1);
    )*};
}

blocks! {
    /// 32 elements of 4 bits: `(q - 8) * d`.
    BlockQ4_0 = Q4_0 {
        /// Scale.
        d: F16Bits,
        /// Codes of elements j (lo) and j + 16 (hi).
        qs: [u8; 16],
    }

    /// 32 elements of 4 bits: `q * d + m`.
    BlockQ4_1 = Q4_1 {
        /// Scale.
        d: F16Bits,
        /// Minimum.
        m: F16Bits,
        /// Codes of elements j (lo) and j + 16 (hi).
        qs: [u8; 16],
    }

    /// 32 elements of 5 bits: `(q - 16) * d`.
    BlockQ5_0 = Q5_0 {
        /// Scale.
        d: F16Bits,
        /// Fifth bits: bit j of this little-endian u32 belongs to element j.
        qh: [u8; 4],
        /// Low four bits of elements j (lo) and j + 16 (hi).
        qs: [u8; 16],
    }

    /// 32 elements of 5 bits: `q * d + m`.
    BlockQ5_1 = Q5_1 {
        /// Scale.
        d: F16Bits,
        /// Minimum.
        m: F16Bits,
        /// Fifth bits: bit j of this little-endian u32 belongs to element j.
        qh: [u8; 4],
        /// Low four bits of elements j (lo) and j + 16 (hi).
        qs: [u8; 16],
    }

    /// 32 elements of 8 bits: `q * d`.
    BlockQ8_0 = Q8_0 {
        /// Scale.
        d: F16Bits,
        /// Codes.
        qs: [i8; 32],
    }

    /// 32 elements of 8 bits, `q * d`, with their sum. Second sources of products with Q4_1 and Q5_1 may have this type.
    BlockQ8_1 = Q8_1 {
        /// Scale.
        d: F16Bits,
        /// `d` times the sum of the codes.
        s: F16Bits,
        /// Codes.
        qs: [i8; 32],
    }

    /// 32 elements of 4 bits: `FP4_VALUES[q] * 2^(e - 128)`.
    BlockMxfp4 = MXFP4 {
        /// Exponent of the scale (E8M0).
        e: u8,
        /// Codes of elements j (lo) and j + 16 (hi).
        qs: [u8; 16],
    }

    /// 32 elements of 4 bits, non-linear: `IQ4_VALUES[q] * d`.
    BlockIq4Nl = IQ4_NL {
        /// Scale.
        d: F16Bits,
        /// Codes of elements j (lo) and j + 16 (hi).
        qs: [u8; 16],
    }

    /// 256 elements of 2 bits in 16 sub-blocks: `d * scale * q - dmin * min`.
    BlockQ2K = Q2_K {
        /// Per sub-block of 16: scale (lo) and minimum (hi).
        scales: [u8; 16],
        /// Codes: 32 bytes per half; bits 2c, 2c+1 of byte l of half h are element 128h + 32c + l.
        qs: [u8; 64],
        /// Scale of the scales.
        d: F16Bits,
        /// Scale of the minima.
        dmin: F16Bits,
    }

    /// 256 elements of 3 bits in 16 sub-blocks: `d * (scale - 32) * (q - 4)`.
    BlockQ3K = Q3_K {
        /// Third bits: bit 4h + c of byte l is element 128h + 32c + l.
        hmask: [u8; 32],
        /// Low two bits, placed as in [`BlockQ2K`].
        qs: [u8; 64],
        /// Sixteen 6-bit scales, see [`BlockQ3K::scales`].
        scales: [u8; 12],
        /// Scale of the scales.
        d: F16Bits,
    }

    /// 256 elements of 4 bits in 8 sub-blocks: `d * scale * q - dmin * min`.
    BlockQ4K = Q4_K {
        /// Scale of the scales.
        d: F16Bits,
        /// Scale of the minima.
        dmin: F16Bits,
        /// Eight 6-bit scales and minima, see [`unpack_scales_mins`].
        scales: [u8; 12],
        /// Codes: byte l of the p-th 32 bytes holds elements 64p + l (lo) and 64p + 32 + l (hi).
        qs: [u8; 128],
    }

    /// 256 elements of 5 bits in 8 sub-blocks: `d * scale * q - dmin * min`.
    BlockQ5K = Q5_K {
        /// Scale of the scales.
        d: F16Bits,
        /// Scale of the minima.
        dmin: F16Bits,
        /// Eight 6-bit scales and minima, see [`unpack_scales_mins`].
        scales: [u8; 12],
        /// Fifth bits: bit s of byte l is element 32s + l.
        qh: [u8; 32],
        /// Low four bits, placed as in [`BlockQ4K`].
        qs: [u8; 128],
    }

    /// 256 elements of 6 bits in 16 sub-blocks: `d * scale * (q - 32)`.
    BlockQ6K = Q6_K {
        /// Low four bits: byte 64h + 32c + l (c = 0, 1) holds elements 128h + 32c + l (lo) and 64 further (hi).
        ql: [u8; 128],
        /// High two bits: bits 2c, 2c+1 of byte 32h + l are element 128h + 32c + l.
        qh: [u8; 64],
        /// Scale of each sub-block of 16.
        scales: [i8; 16],
        /// Scale of the scales.
        d: F16Bits,
    }

    /// 256 elements of 8 bits, `q * d`, with their sums. Second sources of products with types of 256 elements may have this type.
    BlockQ8K = Q8_K {
        /// Scale: a little-endian f32, possibly negative.
        d: [u8; 4],
        /// Codes.
        qs: [i8; 256],
        /// Sums of each 16 codes: little-endian i16.
        bsums: [[u8; 2]; 16],
    }
}

blocks! {
    /// One element of 8 bits (OCP FP8): sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities.
    BlockF8E4M3 = F8_E4M3 {
        /// The number: 0x7F and 0xFF are NaN, exponent 0 is subnormal, in units of 2^-9.
        bits: u8,
    }
}

// Formats of models with few bits per weight: signs, ternary codes, FP4, and entries of grids.
blocks! {
    /// 128 elements of one bit: `d` or `-d`.
    BlockQ1_0 = Q1_0 {
        /// Scale.
        d: F16Bits,
        /// Bit j % 8 of byte j / 8: set is plus.
        qs: [u8; 16],
    }

    /// 64 elements of 2 bits: `(q - 1) * d`.
    BlockQ2_0 = Q2_0 {
        /// Scale.
        d: F16Bits,
        /// Four codes a byte, lowest bits first.
        qs: [u8; 16],
    }

    /// 64 elements of 4 bits with a scale per 16: `FP4_VALUES[q] * unit_of(d)`.
    BlockNvfp4 = NVFP4 {
        /// Unsigned E4M3 scales, see [`BlockNvfp4::unit_of`].
        d: [u8; 4],
        /// Eight bytes per 16 elements: the first eight lo, the others hi.
        qs: [u8; 32],
    }

    /// 256 ternary elements, five to a byte: `(q - 1) * d`, where q is digit n of byte b: `(b * 3^n mod 256) * 3 / 256`.
    BlockTq1_0 = TQ1_0 {
        /// Five base-3 digits a byte: digit n of byte m of the first 32 is element 32n + m, of byte m of the other 16 element 160
        /// + 16n + m.
        qs: [u8; 48],
        /// Four base-3 digits a byte: digit n of byte m is element 240 + 4n + m.
        qh: [u8; 4],
        /// Scale.
        d: F16Bits,
    }

    /// 256 ternary elements of 2 bits: `(q - 1) * d`.
    BlockTq2_0 = TQ2_0 {
        /// Four codes a byte: bits 2n, 2n+1 of byte m of half h are element 128h + 32n + m.
        qs: [u8; 64],
        /// Scale.
        d: F16Bits,
    }

    /// 256 elements: each group of eight is an entry of a grid of 256, with signs: `d * (scale + 0.5) / 4 * entry`.
    BlockIq2Xxs = IQ2_XXS {
        /// Scale.
        d: F16Bits,
        /// Per 32 elements: four grid indices, then 28 sign bits and a 4-bit scale; little-endian words of 16 bits.
        qs: [[u8; 2]; 32],
    }

    /// 256 elements: each group of eight is an entry of a grid of 512, with signs: `d * (scale + 0.5) / 4 * entry`.
    BlockIq2Xs = IQ2_XS {
        /// Scale.
        d: F16Bits,
        /// Per eight elements: 9 bits of grid index, 7 of signs; little-endian.
        qs: [[u8; 2]; 32],
        /// Two 4-bit scales per 32 elements.
        scales: [u8; 8],
    }

    /// 256 elements: each group of eight is an entry of a grid of 1024, with signs: `d * (scale + 0.5) / 4 * entry`.
    BlockIq2S = IQ2_S {
        /// Scale.
        d: F16Bits,
        /// Low bytes of the grid indices.
        qs: [u8; 32],
        /// A sign byte per eight elements.
        signs: [u8; 32],
        /// High two bits of the grid indices.
        qh: [u8; 8],
        /// Two 4-bit scales per 32 elements.
        scales: [u8; 8],
    }

    /// 256 elements: each group of four is an entry of a grid of 256, with signs: `d * (scale + 0.5) / 2 * entry`.
    BlockIq3Xxs = IQ3_XXS {
        /// Scale.
        d: F16Bits,
        /// Grid indices.
        qs: [u8; 64],
        /// Per 32 elements: 28 sign bits and a 4-bit scale, little-endian.
        scales_and_signs: [[u8; 4]; 8],
    }

    /// 256 elements: each group of four is an entry of a grid of 512, with signs: `d * (2 * scale + 1) * entry`.
    BlockIq3S = IQ3_S {
        /// Scale.
        d: F16Bits,
        /// Low bytes of the grid indices.
        qs: [u8; 64],
        /// Ninth bits of the grid indices.
        qh: [u8; 8],
        /// A sign byte per eight elements.
        signs: [u8; 32],
        /// A 4-bit scale per 32 elements.
        scales: [u8; 4],
    }

    /// 256 elements: each group of eight is an entry of a ternary grid of 2048, shifted: `d * (2 * scale + 1) * (entry ± 1/8)`.
    BlockIq1S = IQ1_S {
        /// Scale.
        d: F16Bits,
        /// Low bytes of the grid indices.
        qs: [u8; 32],
        /// Per 32 elements: high index bits, a 3-bit scale, the sign of the shift; little-endian.
        qh: [[u8; 2]; 8],
    }

    /// 256 elements as in [`BlockIq1S`], with a shift per eight and a scale per sixteen.
    BlockIq1M = IQ1_M {
        /// Low bytes of the grid indices.
        qs: [u8; 32],
        /// Per eight elements a nibble: high index bits and the sign of the shift.
        qh: [u8; 16],
        /// 3-bit scales; the top nibbles of the four 16-bit words make up the f16 scale of all.
        scales: [u8; 8],
    }

    /// 256 elements of 4 bits: `d * (scale - 32) * IQ4_VALUES[q]`, with 6-bit scales per 32.
    BlockIq4Xs = IQ4_XS {
        /// Scale of the scales.
        d: F16Bits,
        /// High two bits of the scales, little-endian; see [`BlockIq4Xs::scales`].
        scales_h: [u8; 2],
        /// Low four bits of the scales.
        scales_l: [u8; 4],
        /// Sixteen bytes per 32 elements: the first sixteen lo, the others hi.
        qs: [u8; 128],
    }
}

/// Values of the 16 codes of IQ4_NL and IQ4_XS.
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Values of the 16 codes of MXFP4 and NVFP4: E2M1, doubled to be whole.
pub const FP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

impl BlockMxfp4 {
    /// The scale of one unit of [`FP4_VALUES`]: `2^(e - 128)`, which is subnormal for `e` below 2.
    #[inline]
    pub fn unit(&self) -> f32 {
        let e = u32::from(self.e);
        f32::from_bits(if e < 2 { 1 << (21 + e) } else { (e - 1) << 23 })
    }
}

impl BlockNvfp4 {
    /// One unit of [`FP4_VALUES`] by a byte of [`BlockNvfp4::d`]: half of the E4M3 number without its sign; 0 for 0x7F. ggml tells
    /// this byte from 0xFF, which counts as 480.
    #[inline]
    pub fn unit_of(scale: u8) -> f32 {
        let number = f32::from_bits(u32::from(scale & 0x7f) << 20);
        // The exponent field is rebased by a product, which is exact and normalises subnormals by itself.
        if scale == 0x7f { 0.0 } else { number * f32::from_bits((127 + 119) << 23) }
    }
}

impl BlockQ3K {
    /// The sixteen scales, -32 to 31.
    #[inline]
    pub fn scales(&self) -> [i8; 16] {
        std::array::from_fn(|s| {
            let low = self.scales[s % 8] >> (4 * (s / 8)) & 15;
            let high = self.scales[8 + s % 4] >> (2 * (s / 4)) & 3;
            (low | high << 4) as i8 - 32
        })
    }

    /// Inverse of [`BlockQ3K::scales`].
    pub fn pack_scales(scales: &[i8; 16]) -> [u8; 12] {
        let mut packed = [0; 12];
        for (s, &scale) in scales.iter().enumerate() {
            let bits = (scale.clamp(-32, 31) + 32) as u8;
            packed[s % 8] |= (bits & 15) << (4 * (s / 8));
            packed[8 + s % 4] |= (bits >> 4) << (2 * (s / 4));
        }
        packed
    }
}

/// The 6-bit scales and minima of the eight sub-blocks of a Q4_K or Q5_K block.
#[inline]
pub fn unpack_scales_mins(packed: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let (mut scales, mut mins) = ([0; 8], [0; 8]);
    for s in 0..4 {
        // Twelve bytes hold sub-blocks 0 to 3 in their low six bits; 4 to 7 lie in nibbles and in the bits left over.
        let (a, b, c) = (packed[s], packed[s + 4], packed[s + 8]);
        scales[s] = a & 63;
        mins[s] = b & 63;
        scales[s + 4] = c & 15 | a >> 6 << 4;
        mins[s + 4] = c >> 4 | b >> 6 << 4;
    }
    (scales, mins)
}

/// Inverse of [`unpack_scales_mins`]; values are taken modulo 64.
pub fn pack_scales_mins(scales: &[u8; 8], mins: &[u8; 8]) -> [u8; 12] {
    let mut packed = [0; 12];
    for s in 0..4 {
        let (scale, min) = (scales[s + 4] & 63, mins[s + 4] & 63);
        packed[s] = scales[s] & 63 | scale >> 4 << 6;
        packed[s + 4] = mins[s] & 63 | min >> 4 << 6;
        packed[s + 8] = scale & 15 | min << 4;
    }
    packed
}

impl BlockQ8K {
    /// The scale.
    pub fn scale(&self) -> f32 {
        f32::from_le_bytes(self.d)
    }

    /// The sum of codes `16 * k` to `16 * k + 15`, for `k` below 16.
    pub fn sum(&self, k: usize) -> i16 {
        i16::from_le_bytes(self.bsums[k])
    }
}

impl BlockIq2Xxs {
    /// Of 32 elements, `b` below 8: the four grid indices, and the word with 7 bits of signs for each and 4 bits of scale.
    #[inline]
    pub fn indices_and_word(&self, b: usize) -> ([u8; 4], u32) {
        let [[i0, i1], [i2, i3], [w0, w1], [w2, w3]] = [0, 1, 2, 3].map(|i| self.qs[4 * b + i]);
        ([i0, i1, i2, i3], u32::from_le_bytes([w0, w1, w2, w3]))
    }
}

impl BlockIq1M {
    /// The scale of all elements, from the top nibbles of the words of `scales`.
    #[inline]
    pub fn d(&self) -> F16Bits {
        let nibble = |word: usize| u16::from(self.scales[2 * word + 1] >> 4) << (4 * word);
        F16Bits::from_bits(nibble(0) | nibble(1) | nibble(2) | nibble(3))
    }

    /// The 3-bit scale of sixteen elements, `s` below 16.
    #[inline]
    pub fn scale(&self, s: usize) -> u8 {
        let word = u16::from_le_bytes([self.scales[s / 4 * 2], self.scales[s / 4 * 2 + 1]]);
        (word >> (3 * (s % 4)) & 7) as u8
    }
}

impl BlockIq4Xs {
    /// The eight scales, -32 to 31.
    #[inline]
    pub fn scales(&self) -> [i8; 8] {
        let high = u16::from_le_bytes(self.scales_h);
        std::array::from_fn(|b| {
            let low = self.scales_l[b / 2] >> (b % 2 * 4) & 15;
            (low | ((high >> (2 * b) & 3) as u8) << 4) as i8 - 32
        })
    }

    /// Inverse of [`BlockIq4Xs::scales`]: `scales_h` and `scales_l`.
    pub fn pack_scales(scales: &[i8; 8]) -> ([u8; 2], [u8; 4]) {
        let (mut high, mut low) = (0u16, [0; 4]);
        for (b, &scale) in scales.iter().enumerate() {
            let bits = (scale.clamp(-32, 31) + 32) as u8;
            high |= u16::from(bits >> 4) << (2 * b);
            low[b / 2] |= (bits & 15) << (b % 2 * 4);
        }
        (high.to_le_bytes(), low)
    }
}

//! Conversion of F32, F16, BF16 and F8_E4M3 rows. The bytes may be unaligned.

use super::Codec;
use crate::tensor::blocks::{BlockF8E4M3, canonical_nan};
use half::f16;
use half::slice::HalfFloatSliceExt;

/// Elements converted at a time, through an aligned buffer: the bytes of a row need not be aligned for `half`'s vector
/// conversion.
const CHUNK: usize = 256;

/// Rows of F32.
pub(super) struct F32;

impl F32 {
    pub(super) fn dequantise(bytes: &[u8], values: &mut [f32]) {
        debug_assert_eq!(bytes.len(), 4 * values.len(), "a dense row of F32");
        for (value, from) in values.iter_mut().zip(bytes.as_chunks().0) {
            *value = f32::from_le_bytes(*from);
        }
    }

    pub(super) fn quantise(values: &[f32], bytes: &mut [u8]) {
        debug_assert_eq!(bytes.len(), 4 * values.len(), "a dense row of F32");
        for (value, to) in values.iter().zip(bytes.as_chunks_mut().0) {
            *to = value.to_le_bytes();
        }
    }
}

/// Rows of F16.
pub(super) struct F16;

impl F16 {
    pub(super) fn dequantise(bytes: &[u8], values: &mut [f32]) {
        debug_assert_eq!(bytes.len(), 2 * values.len(), "a dense row of F16");
        let mut buffer = [f16::ZERO; CHUNK];
        for (values, from) in values.chunks_mut(CHUNK).zip(bytes.as_chunks().0.chunks(CHUNK)) {
            let n = values.len().min(from.len());
            for (half, from) in buffer.iter_mut().zip(from) {
                *half = f16::from_bits(u16::from_le_bytes(*from));
            }
            buffer[..n].convert_to_f32_slice(&mut values[..n]);
        }
    }

    pub(super) fn quantise(values: &[f32], bytes: &mut [u8]) {
        debug_assert_eq!(bytes.len(), 2 * values.len(), "a dense row of F16");
        let mut buffer = [f16::ZERO; CHUNK];
        for (values, to) in values.chunks(CHUNK).zip(bytes.as_chunks_mut().0.chunks_mut(CHUNK)) {
            let n = values.len().min(to.len());
            buffer[..n].convert_from_f32_slice(&values[..n]);
            for (half, to) in buffer[..n].iter().zip(to) {
                *to = canonical_nan(half.to_bits()).to_le_bytes();
            }
        }
    }
}

/// Rows of BF16.
pub(super) struct BF16;

impl BF16 {
    pub(super) fn dequantise(bytes: &[u8], values: &mut [f32]) {
        debug_assert_eq!(bytes.len(), 2 * values.len(), "a dense row of BF16");
        for (value, from) in values.iter_mut().zip(bytes.as_chunks().0) {
            *value = f32::from_bits(u32::from(u16::from_le_bytes(*from)) << 16);
        }
    }

    pub(super) fn quantise(values: &[f32], bytes: &mut [u8]) {
        debug_assert_eq!(bytes.len(), 2 * values.len(), "a dense row of BF16");
        for (value, to) in values.iter().zip(bytes.as_chunks_mut().0) {
            let bits = value.to_bits();
            // A NaN keeps its upper payload bits and becomes quiet. The addition of `nearest_even` could overflow into the
            // sign, or turn a NaN into an infinity.
            let nearest_even = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
            let rounded = if value.is_nan() { bits >> 16 | 64 } else { nearest_even };
            *to = (rounded as u16).to_le_bytes();
        }
    }
}

impl Codec<1> for BlockF8E4M3 {
    fn unpack(&self, values: &mut [f32; 1]) {
        let (sign, magnitude) = (u32::from(self.bits & 0x80) << 24, u32::from(self.bits & 0x7f));
        // The exponent field is rebased by a product, which is exact and normalises subnormals by itself.
        let rebase = f32::from_bits((127 + 120) << 23);
        let number = (f32::from_bits(magnitude << 20) * rebase).to_bits();
        let nan = if magnitude == 0x7f { 0x7fc0_0000 } else { 0 };
        values[0] = f32::from_bits(sign | number | nan);
    }

    /// Rounds to nearest, ties to even. Values beyond ±448, infinities too, become ±448; NaN of either sign becomes 0x7F.
    fn pack(values: &[f32; 1]) -> Self {
        const SMALLEST_NORMAL: f32 = 1.0 / 64.0;
        const LARGEST: f32 = 448.0;
        /// Its unit in the last place is that of the subnormals, 2^-9: a sum with it is rounded to whole units.
        const UNITS: f32 = 16384.0;
        let (sign, magnitude) = ((values[0].to_bits() >> 24) as u8 & 0x80, values[0].abs());
        let bits = magnitude.to_bits();
        let code = if magnitude.is_nan() {
            return BlockF8E4M3 { bits: 0x7f };
        } else if magnitude >= LARGEST {
            0x7e
        } else if magnitude < SMALLEST_NORMAL {
            (magnitude + UNITS).to_bits() - UNITS.to_bits()
        } else {
            // Rounds away the lower 20 of the mantissa's 23 bits, and rebases the exponent from 127 to 7.
            ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20) - ((127 - 7) << 3)
        };
        BlockF8E4M3 { bits: sign | code as u8 }
    }
}

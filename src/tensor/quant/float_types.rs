//! Conversion of F32, F16 and BF16 rows. The bytes may be unaligned.

use crate::tensor::blocks::canonical_nan;
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

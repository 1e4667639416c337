//! Conversion of dense rows between f32 and every type that has a scalar rule.
//!
//! Formulas: `OPS.md` sections 3.1 (dequantisation: the value of an element is the formula's, rounded once to f32)
//! and 3.2 (quantisation: codes and scales are the formula's; for the K types a least-squares fit of our own).

mod fit;
mod kquants;
mod legacy;
mod plain;
#[cfg(test)]
mod tests;

use super::DType;
use super::blocks::{self, Block, BlockIq4Nl, BlockMxfp4};
use super::blocks::{BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K};
use super::blocks::{BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0};

/// Converts a dense row of some type to f32.
///
/// Bytes and values must describe the same number of elements, `bytes.len() == dtype.row_bytes(values.len())`. Other
/// lengths are a bug of the caller, caught in debug builds; release builds convert the whole blocks both sides have.
pub type Dequantise = fn(&[u8], &mut [f32]);

/// Converts f32 to a dense row of some type. Lengths as for [`Dequantise`].
pub type Quantise = fn(&[f32], &mut [u8]);

/// The conversion from rows of `dtype` to f32, or `None` for a type that has none here.
pub fn dequantiser(dtype: DType) -> Option<Dequantise> {
    Some(match dtype {
        DType::F32 => plain::dequantise_f32,
        DType::F16 => plain::dequantise_f16,
        DType::BF16 => plain::dequantise_bf16,
        DType::Q4_0 => unpack_row::<BlockQ4_0, 32>,
        DType::Q4_1 => unpack_row::<BlockQ4_1, 32>,
        DType::Q5_0 => unpack_row::<BlockQ5_0, 32>,
        DType::Q5_1 => unpack_row::<BlockQ5_1, 32>,
        DType::Q8_0 => unpack_row::<BlockQ8_0, 32>,
        DType::MXFP4 => unpack_row::<BlockMxfp4, 32>,
        DType::IQ4_NL => unpack_row::<BlockIq4Nl, 32>,
        DType::Q2_K => unpack_row::<BlockQ2K, 256>,
        DType::Q3_K => unpack_row::<BlockQ3K, 256>,
        DType::Q4_K => unpack_row::<BlockQ4K, 256>,
        DType::Q5_K => unpack_row::<BlockQ5K, 256>,
        DType::Q6_K => unpack_row::<BlockQ6K, 256>,
        _ => return None,
    })
}

/// The conversion from f32 to rows of `dtype`, or `None` for a type that has none here.
///
/// Values that are not finite, or too large for the type's scale, give unspecified codes, never a panic.
pub fn quantiser(dtype: DType) -> Option<Quantise> {
    Some(match dtype {
        DType::F32 => plain::quantise_f32,
        DType::F16 => plain::quantise_f16,
        DType::BF16 => plain::quantise_bf16,
        DType::Q4_0 => pack_row::<BlockQ4_0, 32>,
        DType::Q4_1 => pack_row::<BlockQ4_1, 32>,
        DType::Q5_0 => pack_row::<BlockQ5_0, 32>,
        DType::Q5_1 => pack_row::<BlockQ5_1, 32>,
        DType::Q8_0 => pack_row::<BlockQ8_0, 32>,
        DType::MXFP4 => pack_row::<BlockMxfp4, 32>,
        DType::IQ4_NL => pack_row::<BlockIq4Nl, 32>,
        DType::Q2_K => pack_row::<BlockQ2K, 256>,
        DType::Q3_K => pack_row::<BlockQ3K, 256>,
        DType::Q4_K => pack_row::<BlockQ4K, 256>,
        DType::Q5_K => pack_row::<BlockQ5K, 256>,
        DType::Q6_K => pack_row::<BlockQ6K, 256>,
        _ => return None,
    })
}

/// A block of `N` elements that converts to and from f32.
trait Codec<const N: usize>: Block {
    /// Writes the value of every element.
    fn unpack(&self, values: &mut [f32; N]);

    /// The block that stands for `values`.
    fn pack(values: &[f32; N]) -> Self;
}

fn unpack_row<B: Codec<N>, const N: usize>(bytes: &[u8], values: &mut [f32]) {
    debug_assert_eq!(Some(bytes.len()), B::DTYPE.row_bytes(values.len()), "a dense row of {}", B::DTYPE);
    for (block, chunk) in blocks::blocks::<B>(bytes).iter().zip(values.as_chunks_mut::<N>().0) {
        block.unpack(chunk);
    }
}

fn pack_row<B: Codec<N>, const N: usize>(values: &[f32], bytes: &mut [u8]) {
    debug_assert_eq!(Some(bytes.len()), B::DTYPE.row_bytes(values.len()), "a dense row of {}", B::DTYPE);
    for (block, chunk) in blocks::blocks_mut::<B>(bytes).iter_mut().zip(values.as_chunks::<N>().0) {
        *block = B::pack(chunk);
    }
}

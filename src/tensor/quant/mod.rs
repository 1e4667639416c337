//! Conversion of dense rows between f32 and the float and block types that the table of types gives a conversion:
//! [`dequantiser`] and [`quantiser`].
//!
//! The formulas are ggml's (ggml-quants.c). Dequantisation gives the exact value of the formula, rounded once to f32.
//! Quantisation gives the same codes and scales as ggml, except for the K types and IQ4_XS, which use different least-squares
//! fits (`kquant_fit.rs`, `iq4_xs.rs`).

pub(crate) mod expand;
mod float_types;
pub(crate) mod grids;
mod iq4_xs;
mod iquants;
mod kquant_fit;
mod kquants;
mod legacy;
mod low_bit;
mod nvfp4;
#[cfg(test)]
pub(crate) mod tests;

use super::DType;
use super::blocks::{self, Block};
use super::table::{for_each_codec, for_each_decoder, for_each_float};

/// A function that converts a dense row of a type to f32.
///
/// Bytes and values must describe the same number of elements, `bytes.len() == dtype.row_bytes(values.len())`. Other
/// lengths are a bug of the caller, asserted in debug builds; release builds convert the whole blocks that both sides have.
pub type Dequantise = fn(&[u8], &mut [f32]);

/// A function that converts f32 to a dense row of a type. Lengths as for [`Dequantise`].
pub type Quantise = fn(&[f32], &mut [u8]);

/// `$row` of the block of `$dtype`; `None` for other types than those listed.
macro_rules! of_codec {
    ([$dtype:ident $row:ident] $($name:ident $block:ident $len:literal;)*) => {
        match $dtype {
            $(DType::$name => Some($row::<blocks::$block, $len>),)*
            _ => None,
        }
    };
}

/// `$convert` of the float type `$dtype`; `$other` for all other types.
macro_rules! of_float {
    ([$dtype:ident $convert:ident else $other:expr] $($name:ident $float:ident;)*) => {
        match $dtype {
            $(DType::$name => Some(float_types::$float::$convert),)*
            _ => $other,
        }
    };
}

/// The conversion from rows of `dtype` to f32; `None` for a type without [`Capability::Decode`](super::Capability::Decode).
pub fn dequantiser(dtype: DType) -> Option<Dequantise> {
    fn of_block(dtype: DType) -> Option<Dequantise> {
        for_each_decoder!(of_codec!(dtype unpack_row))
    }
    for_each_float!(of_float!(dtype dequantise else of_block(dtype)))
}

/// The conversion from f32 to rows of `dtype`; `None` for a type without [`Capability::Convert`](super::Capability::Convert).
///
/// Values that are not finite, or too large for the type's scale, give unspecified codes but do not panic.
pub fn quantiser(dtype: DType) -> Option<Quantise> {
    fn of_block(dtype: DType) -> Option<Quantise> {
        for_each_codec!(of_codec!(dtype pack_row))
    }
    for_each_float!(of_float!(dtype quantise else of_block(dtype)))
}

/// A block of `N` elements that converts to f32.
trait Decoder<const N: usize>: Block {
    /// Dequantises every element.
    fn decode(&self, values: &mut [f32; N]);
}

impl<B: Codec<N>, const N: usize> Decoder<N> for B {
    fn decode(&self, values: &mut [f32; N]) {
        self.unpack(values);
    }
}

/// A block of `N` elements that converts to and from f32.
trait Codec<const N: usize>: Block {
    /// Dequantises every element.
    fn unpack(&self, values: &mut [f32; N]);

    /// Quantises `values` to a block.
    fn pack(values: &[f32; N]) -> Self;
}

fn unpack_row<B: Decoder<N>, const N: usize>(bytes: &[u8], values: &mut [f32]) {
    debug_assert_eq!(Some(bytes.len()), B::DTYPE.row_bytes(values.len()), "a dense row of {}", B::DTYPE);
    for (block, chunk) in blocks::blocks::<B>(bytes).iter().zip(values.as_chunks_mut::<N>().0) {
        block.decode(chunk);
    }
}

fn pack_row<B: Codec<N>, const N: usize>(values: &[f32], bytes: &mut [u8]) {
    debug_assert_eq!(Some(bytes.len()), B::DTYPE.row_bytes(values.len()), "a dense row of {}", B::DTYPE);
    for (block, chunk) in blocks::blocks_mut::<B>(bytes).iter_mut().zip(values.as_chunks::<N>().0) {
        *block = B::pack(chunk);
    }
}

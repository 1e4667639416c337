//! Blocks as codes of eight bits with a scale per sixteen: the form in which the CPU's integer products take the types whose codes
//! are grid entries, ternary digits or numbers of a table. Exact: an element is its code times its scale.

use super::Decoder;
use crate::tensor::DType;
use crate::tensor::blocks::{self, Block};
use crate::tensor::table::for_each_expanded;
use bytemuck::{Pod, Zeroable};

/// Elements of a sub-block, which share a scale.
const SUB: usize = 16;

/// 256 elements: the elements of sub-block `s` are `codes[16 * s..16 * s + 16]` times `scales[s]`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Expanded {
    pub(crate) scales: [f32; 16],
    pub(crate) codes: [i8; 256],
}

/// A block of `N` elements that expands to codes and scales.
pub(crate) trait Expand<const N: usize>: Block {
    /// Writes the codes, of magnitude up to 127, and a scale for each sixteen.
    fn expand(&self, codes: &mut [i8; N], scales: &mut [f32]);

    /// Dequantises every element.
    fn unpack_expanded(&self, values: &mut [f32; N]) {
        let (mut codes, mut scales) = ([0; N], [0.0; 16]);
        self.expand(&mut codes, &mut scales[..N / SUB]);
        let subs = values.as_chunks_mut::<SUB>().0.iter_mut().zip(codes.as_chunks::<SUB>().0).zip(&scales);
        for ((values, codes), scale) in subs {
            *values = codes.map(|code| f32::from(code) * scale);
        }
    }
}

/// Expands 256 elements; what `bytes` lacks of them becomes zeros.
pub(crate) type ExpandSuperblock = fn(&[u8], &mut Expanded);

/// The expansion of `dtype`; `None` for a type whose row in the table does not declare it.
pub(crate) fn expander(dtype: DType) -> Option<ExpandSuperblock> {
    macro_rules! expander_of {
        ([$dtype:ident] $($name:ident $block:ident $len:literal;)*) => {
            match $dtype {
                $(DType::$name => Some(expand_superblock::<blocks::$block, $len>),)*
                _ => None,
            }
        };
    }
    for_each_expanded!(expander_of!(dtype))
}

/// See [`ExpandSuperblock`].
#[inline(always)]
pub(crate) fn expand_superblock<B: Expand<N>, const N: usize>(bytes: &[u8], out: &mut Expanded) {
    let mut parts = out.codes.as_chunks_mut::<N>().0.iter_mut().zip(out.scales.chunks_exact_mut(N / SUB));
    for (block, (codes, scales)) in blocks::blocks::<B>(bytes).iter().zip(&mut parts) {
        block.expand(codes, scales);
    }
    for (_, scales) in parts {
        scales.fill(0.0);
    }
}

macro_rules! decoders {
    ($($block:ident)*) => {$(
        impl Decoder<256> for blocks::$block {
            fn decode(&self, values: &mut [f32; 256]) {
                self.unpack_expanded(values);
            }
        }
    )*};
}

decoders!(BlockIq1S BlockIq1M BlockIq2Xxs BlockIq2Xs BlockIq2S BlockIq3Xxs BlockIq3S);

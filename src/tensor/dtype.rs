//! Element types: the 36 types of protocol 8.0.1, generated from the table in [`super::table`].
//!
//! A *block* is the smallest addressable unit of a type: one element of a plain type, 32 to 256
//! elements of a quantised type. Source: ggml's table of types (`type_traits` in ggml.c).

use super::table::for_each_type;
use std::fmt;

/// `true` for a capability that a table row declares; `$name` is the name after its keyword.
macro_rules! declared {
    ($name:ident) => {
        true
    };
}

macro_rules! dtypes {
    ([] $($name:ident = $number:literal, $block:literal elements in $bytes:literal bytes, aligned $align:literal
        $(, float $float:ident)? $(, codec $codec:ident within $error:literal)? $(, decoder $decoder:ident)?
        $(, simd $simd:ident)? $(, expanded $expanded:ident)? $(, panel $panel:ident)?
        $(, cuda_read $cuda_read:ident)? $(, cuda $cuda:ident)? $(, cache $cache:ident)?;)*) => {
        /// An element type. The discriminant is its number on the wire.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(non_camel_case_types)] // ggml's names: Q4_K, IQ2_XXS
        #[repr(u32)]
        #[non_exhaustive]
        pub enum DType {
            $(#[allow(missing_docs)] $name = $number,)*
        }

        $(const _: () = assert!(($block as usize).is_power_of_two() && ($align as usize).is_power_of_two());)*

        impl DType {
            /// Every type, in order of its row in the table.
            pub const ALL: &'static [DType] = &[$(DType::$name),*];

            /// The type with this number on the wire, or `None` for removed and unknown numbers.
            pub const fn from_wire(number: u32) -> Option<DType> {
                match number {
                    $($number => Some(DType::$name),)*
                    _ => None,
                }
            }

            /// Elements per block, a power of two; 1 for plain types.
            pub const fn block_len(self) -> usize {
                match self { $(DType::$name => $block,)* }
            }

            /// Bytes per block; for plain types, per element.
            pub const fn block_bytes(self) -> usize {
                match self { $(DType::$name => $bytes,)* }
            }

            /// Alignment in bytes of an element or block. A GPU faults at misaligned addresses; a CPU does not.
            pub const fn alignment(self) -> usize {
                match self { $(DType::$name => $align,)* }
            }

            /// The type's name in ggml, for example `Q4_K`.
            pub const fn name(self) -> &'static str {
                match self { $(DType::$name => stringify!($name),)* }
            }

            /// Whether the type is F32, F16 or BF16, the types of element-wise ops. F8_E4M3 is none of them: it is a type of
            /// weights, as the quantised types are.
            pub const fn is_float(self) -> bool {
                match self { $($(DType::$float => true,)?)* _ => false }
            }

            /// Whether fanout has this capability for the type.
            pub const fn can(self, what: Capability) -> bool {
                match what {
                    Capability::Convert => match self {
                        $($(DType::$name => declared!($float),)? $(DType::$name => declared!($codec),)?)*
                        _ => false,
                    },
                    Capability::Decode => match self {
                        $($(DType::$name => declared!($float),)? $(DType::$name => declared!($codec),)?
                            $(DType::$name => declared!($decoder),)?)*
                        _ => false,
                    },
                    Capability::Simd => match self {
                        $($(DType::$name => declared!($float),)? $(DType::$name => declared!($simd),)?
                            $(DType::$name => declared!($expanded),)?)*
                        _ => false,
                    },
                    Capability::CudaRead => match self {
                        $($(DType::$name => declared!($cuda_read),)? $(DType::$name => declared!($cuda),)?)*
                        _ => false,
                    },
                    Capability::Cuda => match self { $($(DType::$name => declared!($cuda),)?)* _ => false },
                    Capability::Cache => match self { $($(DType::$name => declared!($cache),)?)* _ => false },
                }
            }

            /// Bound on the squared error of normally distributed values after [`quantiser`] and [`dequantiser`], relative to
            /// the squared values. About a fifth above the error of ggml's formulas. `None` for plain types and types without a
            /// codec.
            ///
            /// [`quantiser`]: super::quant::quantiser
            /// [`dequantiser`]: super::quant::dequantiser
            pub const fn round_trip_error(self) -> Option<f64> {
                match self {
                    $($(DType::$name => Some($error),)?)*
                    _ => None,
                }
            }
        }
    };
}

for_each_type! { dtypes!() }

/// A capability of fanout for a type, beyond storing, copying and sending it. Declared in the type's row of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Capability {
    /// Rows convert from and to f32 ([`quant`](super::quant)): every CPU op that takes the type runs.
    Convert,
    /// Rows convert to f32: every CPU op that reads the type runs. The types without [`Capability::Convert`] are i-quants, whose
    /// codes only a program for making models computes.
    Decode,
    /// The CPU has vector kernels for products with weights of the type.
    Simd,
    /// The CUDA kernels read the type: GET_ROWS, copies to float types, and products.
    CudaRead,
    /// The CUDA kernels read and write the type: copies, rows by index, products of repacked weights, and attention.
    Cuda,
    /// FLASH_ATTN_EXT has a CUDA entry point of its own for K and V of the type.
    Cache,
}

impl DType {
    /// The type's number on the wire.
    pub const fn to_wire(self) -> u32 {
        self as u32
    }

    /// The type, beside F32, in which ggml's products with weights of this type take their second source: rows of it need not be
    /// rounded to codes again (ggml's `vec_dot_type`).
    pub const fn partner(self) -> DType {
        match self {
            DType::Q4_1 | DType::Q5_1 => DType::Q8_1,
            _ if self.block_len() == 256 => DType::Q8_K,
            _ if self.block_len() > 1 => DType::Q8_0,
            DType::F16 | DType::BF16 => self,
            _ => DType::F32,
        }
    }

    /// Whether a block has more than one element.
    pub const fn is_block(self) -> bool {
        self.block_len() > 1
    }

    /// The types with this capability, in the order of the table.
    pub fn with_capability(what: Capability) -> impl Iterator<Item = DType> + Clone {
        DType::ALL.iter().copied().filter(move |dtype| dtype.can(what))
    }

    /// Bytes of a dense row of `n` elements; `None` unless `n` is a whole number of blocks and the size fits.
    pub fn row_bytes(self, n: usize) -> Option<usize> {
        let whole = n & (self.block_len() - 1) == 0;
        self.blocks(n).checked_mul(self.block_bytes()).filter(|_| whole)
    }

    /// Blocks in `n` elements, rounded down.
    pub(crate) fn blocks(self, n: usize) -> usize {
        // A shift, since block lengths are powers of two, which the compiler cannot derive. A division would take longer than
        // the rest of the kernels' address computation.
        n >> self.block_len().trailing_zeros()
    }
}

impl fmt::Debug for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_holds_the_36_types_of_protocol_8_0_1() {
        assert_eq!(DType::ALL.len(), 36);
        for &t in DType::ALL {
            assert_eq!(DType::from_wire(t.to_wire()), Some(t));
            assert!(t.block_len().is_power_of_two() && t.block_bytes() > 0);
            assert!(t.block_bytes().is_multiple_of(t.alignment()), "{t}: blocks of a row are aligned");
        }
    }

    /// Vector kernels and CUDA kernels that read a type require conversion to f32; other CUDA kernels and cache entries conversion both
    /// ways.
    #[test]
    fn capabilities_build_on_conversion() {
        for &t in DType::ALL {
            assert!(!t.can(Capability::Cache) || t.can(Capability::Cuda), "{t}");
            assert!(!t.can(Capability::Cuda) || t.can(Capability::Convert), "{t}");
            assert!(!t.can(Capability::CudaRead) || t.can(Capability::Decode), "{t}");
            assert!(!(t.can(Capability::Convert) || t.can(Capability::Simd)) || t.can(Capability::Decode), "{t}");
            assert!(!t.is_float() || t.can(Capability::Convert), "{t}");
            assert_eq!(t.round_trip_error().is_some(), !t.is_float() && t.can(Capability::Convert), "{t}");
        }
    }

    #[test]
    fn removed_and_unknown_numbers_are_no_type() {
        for n in [4, 5, 31, 32, 33, 36, 37, 38, 44, u32::MAX] {
            assert_eq!(DType::from_wire(n), None, "{n}");
        }
    }

    #[test]
    fn rows_are_whole_blocks() {
        assert_eq!(DType::Q4_0.row_bytes(64), Some(36));
        assert_eq!(DType::Q4_0.row_bytes(33), None);
        assert_eq!(DType::F64.row_bytes(usize::MAX), None);
    }
}

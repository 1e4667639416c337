//! Element types: the 35 of protocol 7.0, by number, block size and bytes.
//!
//! A *block* is the smallest addressable unit of a type: one element for plain types, 32 to 256
//! elements for quantised ones. Source: `OPS.md` section 3 (ggml's type table).

use std::fmt;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $block:literal elements in $bytes:literal bytes;)*) => {
        /// An element type. The discriminant is its number on the wire.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(non_camel_case_types)] // the field's own names: Q4_K, IQ2_XXS
        #[repr(u32)]
        pub enum DType {
            $($(#[$doc])* #[allow(missing_docs)] $name = $number,)*
        }

        $(const _: () = assert!(($block as usize).is_power_of_two());)*

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

            /// Elements in a block (1 for plain types): a power of two.
            pub const fn block_len(self) -> usize {
                match self { $(DType::$name => $block,)* }
            }

            /// Bytes of a block (of an element, for plain types).
            pub const fn block_bytes(self) -> usize {
                match self { $(DType::$name => $bytes,)* }
            }

            /// The type's name in ggml, for example `Q4_K`.
            pub const fn name(self) -> &'static str {
                match self { $(DType::$name => stringify!($name),)* }
            }
        }
    };
}

dtypes! {
    F32 = 0, 1 elements in 4 bytes;
    F16 = 1, 1 elements in 2 bytes;
    Q4_0 = 2, 32 elements in 18 bytes;
    Q4_1 = 3, 32 elements in 20 bytes;
    Q5_0 = 6, 32 elements in 22 bytes;
    Q5_1 = 7, 32 elements in 24 bytes;
    Q8_0 = 8, 32 elements in 34 bytes;
    Q8_1 = 9, 32 elements in 36 bytes;
    Q2_K = 10, 256 elements in 84 bytes;
    Q3_K = 11, 256 elements in 110 bytes;
    Q4_K = 12, 256 elements in 144 bytes;
    Q5_K = 13, 256 elements in 176 bytes;
    Q6_K = 14, 256 elements in 210 bytes;
    Q8_K = 15, 256 elements in 292 bytes;
    IQ2_XXS = 16, 256 elements in 66 bytes;
    IQ2_XS = 17, 256 elements in 74 bytes;
    IQ3_XXS = 18, 256 elements in 98 bytes;
    IQ1_S = 19, 256 elements in 50 bytes;
    IQ4_NL = 20, 32 elements in 18 bytes;
    IQ3_S = 21, 256 elements in 110 bytes;
    IQ2_S = 22, 256 elements in 82 bytes;
    IQ4_XS = 23, 256 elements in 136 bytes;
    I8 = 24, 1 elements in 1 bytes;
    I16 = 25, 1 elements in 2 bytes;
    I32 = 26, 1 elements in 4 bytes;
    I64 = 27, 1 elements in 8 bytes;
    F64 = 28, 1 elements in 8 bytes;
    IQ1_M = 29, 256 elements in 56 bytes;
    BF16 = 30, 1 elements in 2 bytes;
    TQ1_0 = 34, 256 elements in 54 bytes;
    TQ2_0 = 35, 256 elements in 66 bytes;
    MXFP4 = 39, 32 elements in 17 bytes;
    NVFP4 = 40, 64 elements in 36 bytes;
    Q1_0 = 41, 128 elements in 18 bytes;
    Q2_0 = 42, 64 elements in 18 bytes;
}

impl DType {
    /// The type's number on the wire.
    pub const fn to_wire(self) -> u32 {
        self as u32
    }

    /// Whether elements come in blocks of more than one.
    pub const fn is_block(self) -> bool {
        self.block_len() > 1
    }

    /// Whether it is one of the three that element-wise ops compute on.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16)
    }

    /// Bytes of which addresses of elements (of blocks) should be multiples: a GPU faults at others, a CPU does not. Blocks
    /// are read as halves at most, and MXFP4's as bytes.
    pub const fn alignment(self) -> usize {
        match self {
            DType::MXFP4 => 1,
            t if t.is_block() => 2,
            t => t.block_bytes(),
        }
    }

    /// Bytes of a dense row of `n` elements; `None` unless `n` is a whole number of blocks and the size fits.
    pub fn row_bytes(self, n: usize) -> Option<usize> {
        let whole = n & (self.block_len() - 1) == 0;
        self.blocks(n).checked_mul(self.block_bytes()).filter(|_| whole)
    }

    /// Blocks in `n` elements, rounded down.
    pub(crate) fn blocks(self, n: usize) -> usize {
        // The compiler cannot know that blocks are powers of two: a division would take longer than all that kernels do around it.
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
    fn table_holds_the_35_types_of_protocol_7() {
        assert_eq!(DType::ALL.len(), 35);
        for &t in DType::ALL {
            assert_eq!(DType::from_wire(t.to_wire()), Some(t));
            assert!(t.block_len().is_power_of_two() && t.block_bytes() > 0);
        }
    }

    #[test]
    fn removed_and_unknown_numbers_are_no_type() {
        for n in [4, 5, 31, 32, 33, 36, 37, 38, 43, u32::MAX] {
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

//! The ops: one table of all 101 of protocol 7.0, and typed parameters and shape rules for those we run.
//!
//! One *stem* names an op family in every room: `ops/<stem>.rs` (parameters, shape rule, wire codec),
//! `cpu/ops/<stem>.rs` (kernels), `tests/ops/<stem>.rs`. To add an op: give its row in [`OpCode`]'s table a stem and
//! its family a variant; the compiler and `tests/layout.rs` list what is missing.
//!
//! Ops that compute nothing (NONE, RESHAPE, VIEW, PERMUTE, TRANSPOSE) are rows of the table only: a graph holds
//! their result as a tensor with a place, and no node.

mod node;
mod table;
mod words;

pub mod binary;
pub mod concat;
pub mod copy;
pub mod flash_attn;
pub mod glu;
pub mod mul_mat;
pub mod norm;
pub mod reduce;
pub mod rope;
pub mod rows;
pub mod softmax;
pub mod sort;
pub mod unary;

pub use node::{NodeView, Out, ShapeError, Sources};
pub use table::OpCode;
pub use words::{ParamError, Words};

pub(crate) use node::ensure;

/// Most sources a node can have.
pub const MAX_SRC: usize = 10;

/// What every op family provides: its wire codec and its shape rule.
pub trait Family: Sized {
    /// The op's row in the table.
    fn code(&self) -> OpCode;

    /// Parameters from op_params.
    ///
    /// # Errors
    /// [`ParamError`] when a word is outside what the op defines.
    fn decode(code: OpCode, words: &Words) -> Result<Self, ParamError>;

    /// Parameters as op_params; the inverse of [`Family::decode`].
    fn encode(&self) -> Words;

    /// The destination that these sources give, where they alone decide it.
    ///
    /// # Errors
    /// [`ShapeError`] when the sources do not fit the op.
    fn infer(&self, srcs: &Sources<'_>) -> Result<Out, ShapeError>;

    /// The shape rule: everything a kernel may rely on about types, shapes and strides of a node, whoever made it.
    ///
    /// # Errors
    /// [`ShapeError`] names the rule that does not hold.
    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError>;

    /// Whether the destination may lie exactly on source `i`, where both have the same layout.
    fn in_place(&self, i: usize) -> bool;

    /// Whether source `i` only names the memory that the destination writes (CPY's and SET_ROWS' target).
    fn writes_onto(&self, _i: usize) -> bool {
        false
    }
}

macro_rules! families {
    ($($stem:ident: $family:ident [$($code:ident),+];)+) => {
        /// A computing op with its typed parameters, by family.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Op {
            $(
                #[doc = concat!("Family `", stringify!($stem), "`.")]
                $family($stem::$family),
            )+
        }

        impl Op {
            /// The op of a wire number's row with its parameters; `None` when the op is not one we run.
            ///
            /// # Errors
            /// [`ParamError`] when a parameter is outside what the op defines.
            pub fn decode(code: OpCode, words: &Words) -> Result<Option<Op>, ParamError> {
                match code {
                    $($(OpCode::$code)|+ => Ok(Some(Op::$family($stem::$family::decode(code, words)?))),)+
                    _ => Ok(None),
                }
            }

            /// The op's row in the table.
            pub fn code(&self) -> OpCode {
                match self { $(Op::$family(f) => f.code(),)+ }
            }

            /// Parameters as op_params.
            pub fn encode(&self) -> Words {
                match self { $(Op::$family(f) => f.encode(),)+ }
            }

            /// The destination that these sources give.
            ///
            /// # Errors
            /// [`ShapeError`] when the sources do not fit the op.
            pub fn infer(&self, srcs: &Sources<'_>) -> Result<Out, ShapeError> {
                match self { $(Op::$family(f) => f.infer(srcs),)+ }
            }

            /// Whether a node keeps the op's shape rule; after this, kernels trust it.
            ///
            /// # Errors
            /// [`ShapeError`] names the rule that does not hold.
            pub fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
                match self { $(Op::$family(f) => f.check(node),)+ }
            }

            /// Whether the destination may lie exactly on source `i`, where both have the same layout.
            pub fn in_place(&self, i: usize) -> bool {
                match self { $(Op::$family(f) => f.in_place(i),)+ }
            }

            /// Whether source `i` only names the memory that the destination writes.
            pub fn writes_onto(&self, i: usize) -> bool {
                match self { $(Op::$family(f) => f.writes_onto(i),)+ }
            }
        }

        $(
            impl From<$stem::$family> for Op {
                fn from(f: $stem::$family) -> Op {
                    Op::$family(f)
                }
            }
        )+

        #[cfg(test)]
        mod family_tests {
            use super::*;

            #[test]
            fn families_and_table_agree_on_stems() {
                $($(assert_eq!(OpCode::$code.stem(), Some(stringify!($stem)));)+)+
            }
        }
    };
}

families! {
    binary: Binary [Add, Sub, Mul, Div, AddId];
    unary: Unary [Sqr, Sqrt, Unary, Scale, Clamp, Fill];
    glu: Glu [Glu];
    reduce: Reduce [Sum, SumRows, Cumsum, Mean, Argmax];
    norm: Norm [Norm, RmsNorm, GroupNorm, L2Norm];
    copy: Copy [Dup, Cpy, Cont];
    rows: Rows [GetRows, SetRows];
    concat: Concat [Concat, Repeat];
    sort: Sort [Argsort, TopK];
    mul_mat: MulMat [MulMat, MulMatId];
    rope: Rope [Rope];
    softmax: SoftMax [SoftMax];
    flash_attn: FlashAttn [FlashAttnExt];
}

//! The ops: one table of all 101 of protocol 7.0, and typed parameters and shape rules for those we run.
//!
//! One *stem* names an op family in every room: `ops/<stem>.rs` (parameters, shape rule, wire codec),
//! `cpu/ops/<stem>.rs` (kernels), `tests/ops/<stem>.rs`. A row of the family table below lists the family's ops and says
//! whether it has CUDA kernels; a family without them runs on the CPU. CONTRIBUTING.md lists the steps for adding one.
//!
//! Ops that compute nothing (NONE, RESHAPE, VIEW, PERMUTE, TRANSPOSE) are rows of the table only: a graph holds
//! their result as a tensor with a place, and no node.

mod node;
mod op_params;
mod table;

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

pub use node::{NodeView, OutputSpec, ShapeError, Sources};
pub use op_params::{OpParams, ParamError};
pub use table::OpCode;

pub(crate) use node::ensure;

/// Most sources a node can have.
pub const MAX_SRC: usize = 10;

/// What every op family provides: its wire codec and its shape rule.
pub trait OpFamily: Sized {
    /// The op's row in the table.
    fn code(&self) -> OpCode;

    /// Parameters from op_params.
    ///
    /// # Errors
    /// [`ParamError`] when a word is outside what the op defines.
    fn decode(code: OpCode, words: &OpParams) -> Result<Self, ParamError>;

    /// Parameters as op_params; the inverse of [`Family::decode`].
    fn encode(&self) -> OpParams;

    /// The destination that these sources give, where they alone decide it.
    ///
    /// # Errors
    /// [`ShapeError`] when the sources do not fit the op.
    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError>;

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

    /// Whether some elements of the destination keep the value they had before the node.
    fn keeps_rest(&self) -> bool {
        false
    }

    /// How many times a node uses what it reads as a whole: columns of a product, tokens of ROPE, rows of what is computed row
    /// by row. 0 for copies and rows by index: bytes that are only moved are not worth moving to another device first.
    fn batch(&self, node: &NodeView<'_>) -> usize {
        node.dst.rows()
    }
}

/// A row of the table of op families.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct FamilyRow {
    /// The name of the family's file in every room.
    pub stem: &'static str,
    /// Its ops.
    pub codes: &'static [OpCode],
    /// Whether it has CUDA kernels. The CPU runs every family.
    pub cuda: bool,
}

/// Calls `$then! { [args] rows }` with the table of op families: stem, variant of [`Op`], ops, and the devices with kernels.
macro_rules! for_each_family {
    ($then:ident!($($args:tt)*)) => {
        $then! { [$($args)*]
            binary: Binary [Add, Sub, Mul, Div, AddId] on cpu cuda;
            unary: Unary [Sqr, Sqrt, Unary, Scale, Clamp, Fill] on cpu cuda;
            glu: Glu [Glu] on cpu cuda;
            reduce: Reduce [Sum, SumRows, Cumsum, Mean, Argmax] on cpu cuda;
            norm: Norm [Norm, RmsNorm, GroupNorm, L2Norm] on cpu cuda;
            copy: CopyOp [Dup, Cpy, Cont] on cpu cuda;
            rows: Rows [GetRows, SetRows] on cpu cuda;
            concat: Concat [Concat, Repeat] on cpu cuda;
            sort: Sort [Argsort, TopK] on cpu cuda;
            mul_mat: MulMat [MulMat, MulMatId] on cpu cuda;
            rope: Rope [Rope] on cpu cuda;
            softmax: SoftMax [SoftMax] on cpu cuda;
            flash_attn: FlashAttn [FlashAttnExt] on cpu cuda;
        }
    };
}
pub(crate) use for_each_family;

/// Whether a row names CUDA.
macro_rules! on_cuda {
    (cuda) => {
        true
    };
    () => {
        false
    };
}

macro_rules! families {
    ([] $($stem:ident: $family:ident [$($code:ident),+] on cpu $($cuda:ident)?;)+) => {
        /// The table of op families: what fanout runs.
        pub const FAMILIES: &[FamilyRow] = &[$(FamilyRow {
            stem: stringify!($stem),
            codes: &[$(OpCode::$code),+],
            cuda: on_cuda!($($cuda)?),
        }),+];

        impl OpCode {
            /// The op's family (`view` for ops that compute nothing), or `None` when fanout does not run it.
            pub const fn stem(self) -> Option<&'static str> {
                match self {
                    $($(OpCode::$code)|+ => Some(stringify!($stem)),)+
                    code if code.is_view() => Some("view"),
                    _ => None,
                }
            }
        }

        /// A computing op with its typed parameters, by family.
        #[derive(Clone, Debug, PartialEq)]
        #[non_exhaustive]
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
            pub fn decode(code: OpCode, words: &OpParams) -> Result<Option<Op>, ParamError> {
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
            pub fn encode(&self) -> OpParams {
                match self { $(Op::$family(f) => f.encode(),)+ }
            }

            /// The destination that these sources give.
            ///
            /// # Errors
            /// [`ShapeError`] when the sources do not fit the op.
            pub fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
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

            /// Whether some elements of the destination keep the value they had before the node.
            pub fn keeps_rest(&self) -> bool {
                match self { $(Op::$family(f) => f.keeps_rest(),)+ }
            }

            /// How many times a node with this op uses what it reads as a whole: see [`Family::batch`].
            pub fn batch(&self, node: &NodeView<'_>) -> usize {
                match self { $(Op::$family(f) => f.batch(node),)+ }
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

for_each_family! { families!() }

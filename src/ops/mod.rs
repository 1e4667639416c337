//! The definition of the ops: the op codes of protocol 8.0.1 (all 102) and of fanout's own ops, and for the ops that fanout runs
//! their typed parameters, wire codec and shape rules. Shapes are written in the order of `ne`, fastest dimension first.
//!
//! Kernels are elsewhere. Related ops form a family, and one file name (the *stem*) is used for it everywhere: `ops/<stem>.rs`
//! has parameters, shape rule and wire codec, `cpu/ops/<stem>.rs` the CPU kernels, and `tests/ops/<stem>.rs` the tests. The
//! family table below lists each family's ops and whether it has CUDA kernels; a family without them runs on the CPU.
//! CONTRIBUTING.md lists the steps for adding an op. `docs/ops.md` describes the operands and semantics of every op.
//!
//! Start with this file. `node.rs` has the types that shape rules work on, `op_params.rs` the encoded parameters, `conv_axis.rs`
//! how windows move over images, and `table.rs` the op codes. View ops (NONE, RESHAPE, VIEW, PERMUTE, TRANSPOSE) compute nothing
//! and have an op code only: in a graph, their result is a tensor inside another tensor's memory, without a node.

mod conv_axis;
mod node;
mod op_params;
mod table;

pub mod assign;
pub mod backward;
pub mod binary;
pub mod collective;
pub mod concat;
pub mod conv;
pub mod copy;
pub mod diag;
pub mod dsv4;
pub mod flash_attn;
pub mod glu;
pub mod im2col;
pub mod linear_attn;
pub mod mul_mat;
pub mod norm;
pub mod out_prod;
pub mod pad;
pub mod pool;
pub mod reduce;
pub mod rope;
pub mod rows;
pub mod sequence;
pub mod softmax;
pub mod solve_tri;
pub mod sort;
pub mod ssm;
pub mod topk_mask;
pub mod training;
pub mod unary;
pub mod upscale;
pub mod window;

pub use conv_axis::ConvAxis;
pub use node::{NodeView, OutputSpec, ShapeError, Sources};
pub use op_params::{OpParams, ParamError};
pub use table::OpCode;

pub(crate) use node::ensure;

use std::ops::Deref;

/// The largest number of sources of a node.
pub const MAX_SRC: usize = 10;

/// The contract of an op family: wire codec, shape rule, and which sources the destination may share memory with.
///
/// [`OpFamily::check`] is the only validation: kernels rely on everything that it guarantees, and check nothing but data.
pub trait OpFamily {
    /// The op code.
    fn code(&self) -> OpCode;

    /// Decodes the parameters from op_params.
    ///
    /// # Errors
    /// [`ParamError`] for a value that the op does not define.
    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError>
    where
        Self: Sized;

    /// Encodes the parameters as op_params; the inverse of [`OpFamily::decode`].
    fn encode(&self) -> OpParams;

    /// Shape inference: type and shape of the destination, from the sources.
    ///
    /// # Errors
    /// [`ShapeError`] for sources that are invalid for the op, and for ops whose destination does not follow from the sources.
    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError>;

    /// The shape rule: checks all properties of types, shapes and strides that kernels rely on. It applies to nodes built in
    /// process as well as to nodes from a peer.
    ///
    /// # Errors
    /// [`ShapeError`] names the violated rule.
    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError>;

    /// In-place execution: whether the destination may have exactly the memory of source `i`, with the same layout.
    fn in_place(&self, i: usize) -> bool;

    /// Whether source `i` is not read and only names the memory that the destination writes (the target of CPY and SET_ROWS).
    fn writes_onto(&self, _i: usize) -> bool {
        false
    }

    /// Whether the node also writes source `i`: it reads the source, and leaves new values in its memory. Such a source shares
    /// no byte with another operand of the node.
    fn updates(&self, _i: usize) -> bool {
        false
    }

    /// Whether some elements of the destination keep the value that they had before the node.
    fn keeps_rest(&self) -> bool {
        false
    }

    /// Whether source `i` may have no elements although the destination has some.
    fn may_be_empty(&self, _i: usize) -> bool {
        false
    }

    /// The batch size of a node, i.e. how often it reuses its operands: the columns of a matrix product, the tokens of ROPE,
    /// the rows of row-wise ops. The scheduler offloads only nodes with a large batch to another device. Copies and row lookups
    /// have batch 0: they only move bytes, so moving these bytes to another device first gains nothing.
    fn batch(&self, node: &NodeView<'_>) -> usize {
        node.dst.rows()
    }
}

/// [`OpFamily::code`], [`OpFamily::decode`] and [`OpFamily::encode`] of a family without parameters, whose variants have the names of
/// their op codes.
macro_rules! plain_ops {
    ($($code:ident),+) => {
        fn code(&self) -> OpCode {
            match self {
                $(Self::$code => OpCode::$code),+
            }
        }

        fn decode(code: OpCode, _: &super::OpParams) -> Result<Self, super::ParamError> {
            match code {
                $(OpCode::$code => Ok(Self::$code),)+
                // The table of families calls it with these codes only.
                _ => Err(super::ParamError::new(code, 0, "op", code as i32, "one of the family")),
            }
        }

        fn encode(&self) -> super::OpParams {
            super::OpParams::default()
        }
    };
}
pub(crate) use plain_ops;

/// A row of the family table.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct FamilyRow {
    /// The family's file name, without extension, in `ops/`, `cpu/ops/` and `tests/ops/`.
    pub stem: &'static str,
    /// The op codes of the family.
    pub codes: &'static [OpCode],
    /// Whether the family has CUDA kernels. The CPU runs every family.
    pub cuda: bool,
    /// The ops of a family with CUDA kernels that have none themselves.
    pub cpu_only: &'static [OpCode],
}

impl FamilyRow {
    /// Whether an op of the family has CUDA kernels.
    pub fn has_cuda(&self, code: OpCode) -> bool {
        self.cuda && !self.cpu_only.contains(&code)
    }
}

/// The family table, as an X-macro: calls `$then! { [args] rows }`. A row has the stem, the variant of [`Op`], the op codes,
/// and the devices with kernels. A second list has the ops of a family with CUDA kernels that run on the CPU only.
macro_rules! for_each_family {
    ($then:ident!($($args:tt)*)) => {
        $then! { [$($args)*]
            binary: Binary [Add, Add1, Sub, Mul, Div, AddId] on cpu cuda;
            unary: Unary [Sqr, Sqrt, Log, Sin, Cos, Unary, Scale, Clamp, LeakyRelu, Fill] on cpu cuda;
            glu: Glu [Glu] on cpu cuda;
            reduce: Reduce [Sum, SumRows, Cumsum, Mean, Argmax, CountEqual] on cpu cuda;
            norm: Norm [Norm, RmsNorm, GroupNorm, L2Norm] on cpu cuda;
            copy: CopyOp [Dup, Cpy, Cont] on cpu cuda;
            rows: Rows [GetRows, SetRows] on cpu cuda;
            concat: Concat [Concat, Repeat] on cpu cuda;
            sort: Sort [Argsort, TopK] on cpu cuda;
            mul_mat: MulMat [MulMat, MulMatId] on cpu cuda;
            rope: Rope [Rope, RopeBack] on cpu cuda;
            softmax: SoftMax [SoftMax] on cpu cuda;
            flash_attn: FlashAttn [FlashAttnExt] on cpu cuda;
            topk_mask: TopkMask [TopKMask] on cpu cuda;
            im2col: Im2col [Im2col, Im2col3d, Col2im1d] on cpu cuda, [Im2colBack] on cpu;
            conv: Conv [Conv2d, Conv3d, Conv2dDw, ConvTranspose1d, ConvTranspose2d] on cpu cuda;
            pool: Pool [Pool1d, Pool2d] on cpu cuda, [Pool2dBack] on cpu;
            upscale: Upscale [Upscale] on cpu cuda;
            window: Window [WinPart, WinUnpart, GetRelPos, AddRelPos] on cpu;
            ssm: Ssm [SsmConv, SsmScan] on cpu cuda;
            linear_attn: LinearAttn [RwkvWkv6, GatedLinearAttn, RwkvWkv7, GatedDeltaNet] on cpu cuda;
            solve_tri: SolveTri [SolveTri] on cpu cuda;
            dsv4: Dsv4 [LightningIndexer, Dsv4HcComb, Dsv4HcPre, Dsv4HcPost] on cpu cuda;
            backward: Backward [RepeatBack] on cpu cuda, [SiluBack, RmsNormBack, SoftMaxBack, GetRowsBack] on cpu;
            assign: Assign [Acc, Set] on cpu cuda;
            sequence: Sequence [Arange, TimestepEmbedding] on cpu cuda;
            diag: Diag [Diag, DiagMaskInf, DiagMaskZero, Tri] on cpu cuda;
            pad: Pad [Pad, PadReflect1d, Roll] on cpu cuda;
            out_prod: OutProd [OutProd] on cpu cuda;
            training: Training [CrossEntropyLoss, CrossEntropyLossBack, OptStepAdamw, OptStepSgd] on cpu;
            collective: Collective [AllReduce, AllGather, ReduceScatter] on cpu;
        }
    };
}
pub(crate) use for_each_family;

/// `true` if a row lists CUDA.
macro_rules! on_cuda {
    (cuda) => {
        true
    };
    () => {
        false
    };
}

macro_rules! families {
    ([] $($stem:ident: $family:ident [$($code:ident),+] on cpu $($cuda:ident)? $(, [$($cpu_only:ident),+] on cpu)?;)+) => {
        /// The families of all ops that fanout runs.
        pub const FAMILIES: &[FamilyRow] = &[$(FamilyRow {
            stem: stringify!($stem),
            codes: &[$(OpCode::$code,)+ $($(OpCode::$cpu_only),+)?],
            cuda: on_cuda!($($cuda)?),
            cpu_only: &[$($(OpCode::$cpu_only),+)?],
        }),+];

        impl OpCode {
            /// The stem of the op's family, `view` for view ops, or `None` for an op that fanout does not run.
            pub const fn stem(self) -> Option<&'static str> {
                match self {
                    $($(OpCode::$code)|+ $(| $(OpCode::$cpu_only)|+)? => Some(stringify!($stem)),)+
                    code if code.is_view() => Some("view"),
                    _ => None,
                }
            }
        }

        /// An op that computes, with its typed parameters, by family. It has the methods of [`OpFamily`].
        #[derive(Clone, Debug, PartialEq)]
        #[non_exhaustive]
        pub enum Op {
            $(
                #[doc = concat!("Family `", stringify!($stem), "`.")]
                $family($stem::$family),
            )+
        }

        impl Op {
            /// Decodes the parameters of an op; `None` for an op that fanout does not run.
            ///
            /// # Errors
            /// [`ParamError`] for a value that the op does not define.
            pub fn decode(code: OpCode, params: &OpParams) -> Result<Option<Op>, ParamError> {
                match code {
                    $($(OpCode::$code)|+ $(| $(OpCode::$cpu_only)|+)? => {
                        Ok(Some(Op::$family($stem::$family::decode(code, params)?)))
                    })+
                    _ => Ok(None),
                }
            }
        }

        impl Deref for Op {
            type Target = dyn OpFamily;

            fn deref(&self) -> &Self::Target {
                match self { $(Op::$family(f) => f,)+ }
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
                $($($(assert_eq!(OpCode::$cpu_only.stem(), Some(stringify!($stem)));)+)?)+
            }
        }
    };
}

for_each_family! { families!() }

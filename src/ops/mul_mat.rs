//! MUL_MAT: matrix products (GEMM), broadcast over the outer dimensions. MUL_MAT_ID: products with matrices that are selected
//! by index, as a mixture of experts needs them.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::DType;

/// The id of MUL_MAT_ID and ADD_ID that selects nothing: the row of MUL_MAT_ID's result is zeros, ADD_ID adds nothing to its
/// row. Every other id outside the experts is an error.
pub const NO_EXPERT: i64 = -1;

/// A matrix product of rows: the common dimension `k` is dimension 0 (the fastest) of both sources.
///
/// MUL_MAT: a `[k, m, a2, a3]`, b `[k, n, b2, b3]`, dst F32 `[m, n, b2, b3]`,
/// `dst[i, j, i2, i3] = sum_k a[k, i, i2 / (b2 / a2), i3 / (b3 / a3)] * b[k, j, i2, i3]`.
///
/// MUL_MAT_ID: a `[k, m, n_expert, 1]`, b `[k, nb, n_tok, 1]`, ids I32 `[n_used, n_tok, 1, 1]`, dst F32
/// `[m, n_used, n_tok, 1]`, `dst[i, e, t] = sum_k a[k, i, ids[e, t]] * b[k, e % nb, t]`; 0 where the id is [`NO_EXPERT`].
///
/// b has the type F32, [`DType::partner`] of a's type or, beside a of a float type, any float type.
///
/// The parameters are hints: a device may follow them or compute more precisely.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MulMat {
    /// Whether the op is MUL_MAT_ID: source 2 selects the matrix for each row.
    pub by_id: bool,
    /// Minimum precision of the accumulation.
    pub accumulate: Precision,
    /// A known structure of a (MUL_MAT only).
    pub hint: MulMatHint,
    /// Precision to which b may be rounded.
    pub round: Precision,
}

impl MulMat {
    /// MUL_MAT without hints.
    pub const PLAIN: MulMat =
        MulMat { by_id: false, accumulate: Precision::Any, hint: MulMatHint::None, round: Precision::Any };

    /// MUL_MAT_ID without hints.
    pub const BY_ID: MulMat = MulMat { by_id: true, ..MulMat::PLAIN };
}

/// A numeric precision. The discriminant is the number on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
#[non_exhaustive]
pub enum Precision {
    /// The device chooses.
    Any = 0,
    /// f32.
    F32 = 10,
    /// bf16.
    Bf16 = 15,
    /// f16.
    F16 = 20,
    /// Blocks of 8-bit codes.
    Q8 = 30,
    /// Blocks of 4-bit codes.
    Q4 = 40,
}

impl Precision {
    fn decode(code: OpCode, params: &OpParams, word: usize, name: &'static str) -> Result<Precision, ParamError> {
        use Precision::{Any, Bf16, F16, F32, Q4, Q8};
        let got = params.int(word);
        let precision = [Any, F32, Bf16, F16, Q8, Q4].into_iter().find(|&p| p as i32 == got);
        precision.ok_or_else(|| ParamError::new(code, word, name, got, "0, 10, 15, 20, 30 or 40"))
    }
}

/// A known structure of a. The discriminant is the number on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
#[non_exhaustive]
pub enum MulMatHint {
    /// No known structure.
    None = 0,
    /// a is a Hadamard matrix; a plain matrix product gives the same result up to rounding.
    Hadamard = 1,
}

impl OpFamily for MulMat {
    fn code(&self) -> OpCode {
        if self.by_id { OpCode::MulMatId } else { OpCode::MulMat }
    }

    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        let by_id = code == OpCode::MulMatId;
        let hint = match params.int(1) {
            0 => MulMatHint::None,
            1 if !by_id => MulMatHint::Hadamard,
            got => return Err(ParamError::new(code, 1, "hint", got, "0, or 1 for MUL_MAT")),
        };
        let accumulate = Precision::decode(code, params, 0, "accumulation precision")?;
        let round = Precision::decode(code, params, 3, "source precision")?;
        Ok(MulMat { by_id, accumulate, hint, round })
    }

    fn encode(&self) -> OpParams {
        let params = OpParams::default().with_int(0, self.accumulate as i32).with_int(1, self.hint as i32);
        params.with_int(3, self.round as i32)
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        let (a, b) = (srcs.required(0)?.ne(), srcs.required(1)?.ne());
        let ne = if self.by_id { [a[1], srcs.required(2)?.ne()[0], b[2], 1] } else { [a[1], b[1], b[2], b[3]] };
        Ok(OutputSpec { dtype: DType::F32, ne })
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let (a, b) = (node.src(0)?, node.src(1)?);
        node.expect_dst(self.infer(&node.srcs)?)?;
        let (an, bn) = (a.ne(), b.ne());
        ensure!(node, an[0] == bn[0], "rows of both sources have the same length");
        ensure!(node, a.rows_dense() && b.rows_dense(), "rows of both sources are dense");
        ensure!(node, a.rows() > 0 && b.rows() > 0, "both sources have rows");
        if self.by_id {
            let ids = node.src(2)?;
            ensure!(node, ids.dtype() == DType::I32, "ids are I32");
            ensure!(node, an[3] == 1 && bn[3] == 1, "a is [k, m, n_expert], b is [k, nb, n_tok]");
            ensure!(node, ids.ne() == [ids.ne()[0], bn[2], 1, 1], "ids are [n_used, n_tok]");
            ensure!(node, ids.ne()[0].is_multiple_of(bn[1]), "n_used is a multiple of b's rows per token");
            // Kernels sort the rows by expert with 32-bit indices.
            let limit = u32::MAX as usize;
            ensure!(node, ids.elements() < limit && an[2] < limit, "ids and experts are fewer than 2^32");
        } else {
            let whole = bn[2].is_multiple_of(an[2]) && bn[3].is_multiple_of(an[3]);
            ensure!(node, whole, "b's outer counts are multiples of a's");
        }
        Ok(())
    }

    fn in_place(&self, _: usize) -> bool {
        false
    }

    /// A product of rows without elements is 0.
    fn may_be_empty(&self, i: usize) -> bool {
        i < 2
    }

    /// MUL_MAT: the columns. MUL_MAT_ID: the tokens, because `ne[1]` counts the experts of a token.
    fn batch(&self, node: &NodeView<'_>) -> usize {
        node.dst.ne()[if self.by_id { 2 } else { 1 }]
    }
}

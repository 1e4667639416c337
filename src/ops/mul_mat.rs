//! MUL_MAT: matrix products with broadcast planes; MUL_MAT_ID: products with the matrices of chosen experts.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::DType;

/// A matrix product of rows: both sources have their common dimension, of `k` elements, first.
///
/// MUL_MAT: a `[a3, a2, m, k]`, b `[b3, b2, n, k]`, dst F32 `[b3, b2, n, m]`,
/// `dst[i3, i2, j, i] = sum_k a[i3 / (b3 / a3), i2 / (b2 / a2), i, k] * b[i3, i2, j, k]`.
///
/// MUL_MAT_ID: a `[1, n_expert, m, k]`, b `[1, n_tok, nb, k]`, ids I32 `[1, 1, n_tok, n_used]`, dst F32
/// `[1, n_tok, n_used, m]`, `dst[t, e, i] = sum_k a[ids[t, e], i, k] * b[t, e % nb, k]`.
///
/// The parameters are hints: a device may follow them or compute more precisely.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MulMat {
    /// Whether a third source chooses the matrix for each row: MUL_MAT_ID.
    pub by_id: bool,
    /// Least precision of the accumulation.
    pub accumulate: Precision,
    /// What is known of a (MUL_MAT only).
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

/// A precision that a parameter names. The discriminant is its number on the wire.
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
    fn decode(code: OpCode, words: &OpParams, word: usize, name: &'static str) -> Result<Precision, ParamError> {
        use Precision::{Any, Bf16, F16, F32, Q4, Q8};
        let got = words.int(word);
        let known = [Any, F32, Bf16, F16, Q8, Q4].into_iter().find(|&p| p as i32 == got);
        known.ok_or_else(|| ParamError::new(code, word, name, got, "0, 10, 15, 20, 30 or 40"))
    }
}

/// What is known of a. The discriminant is its number on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
#[non_exhaustive]
pub enum MulMatHint {
    /// Nothing.
    None = 0,
    /// It is a Hadamard matrix; the plain product is equal up to rounding.
    Hadamard = 1,
}

impl OpFamily for MulMat {
    fn code(&self) -> OpCode {
        if self.by_id { OpCode::MulMatId } else { OpCode::MulMat }
    }

    fn decode(code: OpCode, words: &OpParams) -> Result<Self, ParamError> {
        let by_id = code == OpCode::MulMatId;
        let hint = match words.int(1) {
            0 => MulMatHint::None,
            1 if !by_id => MulMatHint::Hadamard,
            got => return Err(ParamError::new(code, 1, "hint", got, "0, or 1 for MUL_MAT")),
        };
        let accumulate = Precision::decode(code, words, 0, "accumulation precision")?;
        let round = Precision::decode(code, words, 3, "source precision")?;
        Ok(MulMat { by_id, accumulate, hint, round })
    }

    fn encode(&self) -> OpParams {
        let words = OpParams::default().with_int(0, self.accumulate as i32).with_int(1, self.hint as i32);
        words.with_int(3, self.round as i32)
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
        ensure!(node, !a.is_empty() && !b.is_empty(), "both sources have elements");
        if self.by_id {
            let ids = node.src(2)?;
            ensure!(node, ids.dtype() == DType::I32, "ids are I32");
            ensure!(node, an[3] == 1 && bn[3] == 1, "a is [k, m, n_expert], b is [k, nb, n_tok]");
            ensure!(node, ids.ne() == [ids.ne()[0], bn[2], 1, 1], "ids are [n_used, n_tok]");
            ensure!(node, ids.ne()[0].is_multiple_of(bn[1]), "n_used is a multiple of b's rows per token");
            // Kernels sort the rows by expert, with numbers of 32 bits.
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

    /// Columns; of MUL_MAT_ID tokens, since `ne[1]` counts the experts of one.
    fn batch(&self, node: &NodeView<'_>) -> usize {
        node.dst.ne()[if self.by_id { 2 } else { 1 }]
    }
}

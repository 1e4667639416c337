//! SOLVE_TRI: systems of linear equations with a lower triangular matrix.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::DType;

/// Solves `A X = B` by forward substitution; the elements of A above the diagonal are not read.
///
/// A F32 `[n, n, b2, b3]` (ne0 are the columns) and B F32 `[k, n, b2, b3]`, both contiguous; dst F32 has B's shape and is
/// contiguous. A diagonal element of 0 gives infinities or NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SolveTri;

impl OpFamily for SolveTri {
    fn code(&self) -> OpCode {
        OpCode::SolveTri
    }

    fn decode(_: OpCode, _: &OpParams) -> Result<Self, ParamError> {
        Ok(SolveTri)
    }

    fn encode(&self) -> OpParams {
        OpParams::default()
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        Ok(OutputSpec { dtype: DType::F32, ne: srcs.required(1)?.ne() })
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        node.expect_dst(self.infer(&node.srcs)?)?;
        let (a, b) = (node.src(0)?, node.src(1)?);
        ensure!(node, a.dtype() == DType::F32 && b.dtype() == DType::F32, "sources are F32");
        ensure!(node, a.ne()[0] == a.ne()[1], "the matrix is square");
        ensure!(node, a.ne()[1..] == b.ne()[1..], "one matrix for each right side, with a row for each of its rows");
        let packed = a.is_contiguous() && b.is_contiguous() && node.dst.is_contiguous();
        ensure!(node, packed, "sources and dst are contiguous");
        Ok(())
    }

    fn in_place(&self, _: usize) -> bool {
        false
    }
}

//! OUT_PROD: sums of outer products, the gradient of a matrix product with respect to its weights.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::DType;

/// `dst[i, j, i2, i3] = sum over k of a[i, k, i2 / (b2 / a2), i3 / (b3 / a3)] * b[j, k, i2, i3]`: a `[n, k, a2, a3]` with dense
/// rows, b F32 `[m, k, b2, b3]` with any strides, dst F32 `[n, m, b2, b3]`. Consecutive planes of b share a plane of a. Products
/// are added in f32, in the order of k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutProd;

impl OpFamily for OutProd {
    fn code(&self) -> OpCode {
        OpCode::OutProd
    }

    fn decode(_: OpCode, _: &OpParams) -> Result<Self, ParamError> {
        Ok(OutProd)
    }

    fn encode(&self) -> OpParams {
        OpParams::default()
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        let (a, [m, _, b2, b3]) = (srcs.required(0)?, srcs.required(1)?.ne());
        Ok(OutputSpec { dtype: DType::F32, ne: [a.ne()[0], m, b2, b3] })
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let (a, b) = (node.src(0)?, node.src(1)?);
        node.expect_dst(self.infer(&node.srcs)?)?;
        ensure!(node, !node.dst.is_empty(), "dst is not empty");
        ensure!(node, a.ne()[1] == b.ne()[1], "a and b have equally many rows");
        ensure!(node, (2..4).all(|d| b.ne()[d].is_multiple_of(a.ne()[d])), "the planes of a repeat for those of b");
        ensure!(node, a.rows_dense() && node.dst.rows_dense(), "rows of a and dst are dense");
        ensure!(node, a.ne()[1] == 1 || a.nb()[0] <= a.nb()[1], "a is not transposed");
        Ok(())
    }

    fn in_place(&self, _: usize) -> bool {
        false
    }

    fn may_be_empty(&self, _: usize) -> bool {
        true
    }
}

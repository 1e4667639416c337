//! ARGSORT and TOP_K: indices of each row's values in sorted order.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::DType;

/// Sorting of each row; the result is I32 indices. A NaN sorts beyond the infinity of its sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sort {
    /// All indices in sorted order; dst has the source's shape. The sort is stable: equal values keep the order of their
    /// indices (ggml: any order).
    Argsort {
        /// Largest value first.
        descending: bool,
    },
    /// Indices of the k largest values, in any order. dst is `[k, ne1, ne2, ne3]`; its shape determines k.
    TopK,
}

impl OpFamily for Sort {
    fn code(&self) -> OpCode {
        match self {
            Sort::Argsort { .. } => OpCode::Argsort,
            Sort::TopK => OpCode::TopK,
        }
    }

    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        if code == OpCode::TopK {
            return Ok(Sort::TopK);
        }
        match params.int(0) {
            order @ 0..=1 => Ok(Sort::Argsort { descending: order == 1 }),
            got => Err(ParamError::new(code, 0, "order", got, "0 (ascending) or 1 (descending)")),
        }
    }

    fn encode(&self) -> OpParams {
        match *self {
            Sort::Argsort { descending } => OpParams::default().with_int(0, i32::from(descending)),
            Sort::TopK => OpParams::default(),
        }
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        match self {
            Sort::Argsort { .. } => Ok(OutputSpec { dtype: DType::I32, ne: srcs.required(0)?.ne() }),
            Sort::TopK => Err(srcs.rule_error("the destination's shape must be given: it determines k")),
        }
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let (src, dst) = (node.src(0)?.ne(), node.dst.ne());
        ensure!(node, node.dst.dtype() == DType::I32, "indices are I32");
        ensure!(node, dst[1..] == src[1..], "one row of indices for each row of values");
        ensure!(node, i32::try_from(src[0]).is_ok(), "indices of a row fit an i32");
        match self {
            Sort::Argsort { .. } => ensure!(node, dst[0] == src[0], "dst has the source's shape"),
            Sort::TopK => ensure!(node, dst[0] <= src[0], "k is at most the length of a row"),
        }
        Ok(())
    }

    fn in_place(&self, _: usize) -> bool {
        false
    }
}

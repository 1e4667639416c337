//! SUM, SUM_ROWS, MEAN, ARGMAX: one value out of many; CUMSUM: the sums on the way.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::DType;

/// A reduction of a tensor `[ne3, ne2, ne1, ne0]`. None has parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// The sum of all elements, `[1, 1, 1, 1]`, accumulated in f64 and rounded once.
    Sum,
    /// The sum of each row, `[ne3, ne2, ne1, 1]`, accumulated in f64.
    SumRows,
    /// The running sums of each row, `[ne3, ne2, ne1, ne0]`: element k is the sum of elements 0 to k. Added in f32, on
    /// the CPU one after another.
    Cumsum,
    /// The mean of each row, `[ne3, ne2, ne1, 1]`: the f64 sum rounded to f32, then divided by `ne0` in f32.
    Mean,
    /// The index of the largest value of each row of a matrix `[1, 1, m, n]`, I32 `[1, 1, 1, m]`. Of several, the last;
    /// NaN is never the largest; 0 when there is nothing else.
    Argmax,
}

impl OpFamily for Reduce {
    fn code(&self) -> OpCode {
        match self {
            Reduce::Sum => OpCode::Sum,
            Reduce::SumRows => OpCode::SumRows,
            Reduce::Cumsum => OpCode::Cumsum,
            Reduce::Mean => OpCode::Mean,
            Reduce::Argmax => OpCode::Argmax,
        }
    }

    fn decode(code: OpCode, _: &OpParams) -> Result<Self, ParamError> {
        Ok(match code {
            OpCode::SumRows => Reduce::SumRows,
            OpCode::Cumsum => Reduce::Cumsum,
            OpCode::Mean => Reduce::Mean,
            OpCode::Argmax => Reduce::Argmax,
            _ => Reduce::Sum,
        })
    }

    fn encode(&self) -> OpParams {
        OpParams::default()
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        let x = srcs.required(0)?;
        let [_, n1, n2, n3] = x.ne();
        Ok(match self {
            Reduce::Sum => OutputSpec { dtype: x.dtype(), ne: [1; 4] },
            Reduce::SumRows | Reduce::Mean => OutputSpec { dtype: DType::F32, ne: [1, n1, n2, n3] },
            Reduce::Cumsum => OutputSpec { dtype: DType::F32, ne: x.ne() },
            Reduce::Argmax => OutputSpec { dtype: DType::I32, ne: [n1, 1, 1, 1] },
        })
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let [n, _, n2, n3] = node.src(0)?.ne();
        if let Reduce::Argmax = self {
            ensure!(node, n2 == 1 && n3 == 1, "the source is a matrix");
            ensure!(node, i32::try_from(n).is_ok(), "an index within a row fits an I32");
        }
        node.expect_dst(self.infer(&node.srcs)?)
    }

    // No client places a CUMSUM on its source, and where none lies there a device may scan a row in parts.
    fn in_place(&self, _: usize) -> bool {
        false
    }
}

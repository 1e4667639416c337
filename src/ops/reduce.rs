//! SUM, SUM_ROWS, MEAN, ARGMAX, COUNT_EQUAL: reductions to one value. CUMSUM: prefix sums.

use super::{NodeView, OpCode, OpFamily, OutputSpec, ShapeError, Sources, ensure, plain_ops};
use crate::tensor::DType;

/// A reduction of a tensor `[ne0, ne1, ne2, ne3]`. These ops have no parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// The sum of all elements, `[1, 1, 1, 1]`, accumulated in f64 and rounded once.
    Sum,
    /// The sum of each row, `[1, ne1, ne2, ne3]`, accumulated in f64.
    SumRows,
    /// The prefix sums of each row, same shape: element k is the sum of elements 0 to k. Accumulated in f32; the CPU adds
    /// sequentially.
    Cumsum,
    /// The mean of each row, `[1, ne1, ne2, ne3]`: the f64 sum rounded to f32, then divided by `ne0` in f32.
    Mean,
    /// The index of the largest value of each row of a matrix `[n, m, 1, 1]`, as I32 `[m, 1, 1, 1]`. Ties go to the last index.
    /// NaN never counts as the largest; the index of a row of NaNs is 0.
    Argmax,
    /// The number of places at which two tensors of integers have equal values, as I64 `[1, 1, 1, 1]`.
    CountEqual,
}

impl OpFamily for Reduce {
    plain_ops!(Sum, SumRows, Cumsum, Mean, Argmax, CountEqual);

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        let x = srcs.required(0)?;
        let [_, n1, n2, n3] = x.ne();
        Ok(match self {
            Reduce::Sum => OutputSpec { dtype: x.dtype(), ne: [1; 4] },
            Reduce::SumRows | Reduce::Mean => OutputSpec { dtype: DType::F32, ne: [1, n1, n2, n3] },
            Reduce::Cumsum => OutputSpec { dtype: DType::F32, ne: x.ne() },
            Reduce::Argmax => OutputSpec { dtype: DType::I32, ne: [n1, 1, 1, 1] },
            Reduce::CountEqual => OutputSpec { dtype: DType::I64, ne: [1; 4] },
        })
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let [n, _, n2, n3] = node.src(0)?.ne();
        if let Reduce::Argmax = self {
            ensure!(node, n2 == 1 && n3 == 1, "the source is a matrix");
            ensure!(node, i32::try_from(n).is_ok(), "an index within a row fits an I32");
        }
        if let Reduce::CountEqual = self {
            ensure!(node, node.src(0)?.same_shape(node.src(1)?), "the sources have one shape");
        }
        node.expect_dst(self.infer(&node.srcs)?)
    }

    // Not in place, also for CUMSUM: no client runs it in place, and a destination apart from the source lets a device scan the
    // parts of a row in parallel.
    fn in_place(&self, _: usize) -> bool {
        false
    }

    fn may_be_empty(&self, _: usize) -> bool {
        matches!(self, Reduce::Sum | Reduce::SumRows | Reduce::Mean | Reduce::CountEqual)
    }
}

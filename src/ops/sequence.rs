//! ARANGE: a sequence of numbers. TIMESTEP_EMBEDDING: sinusoidal embedding of the timesteps of a diffusion model.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::DType;

/// A tensor of F32 that follows from parameters, or from one number per row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sequence {
    /// `start + step i`, as `[ceil((stop - start) / step), 1, 1, 1]`. There is no source.
    Arange {
        /// The first number.
        start: f32,
        /// The sequence ends below this number, which is above `start`.
        stop: f32,
        /// Difference of two numbers; above 0.
        step: f32,
    },
    /// A row for each number t of source 0, a vector `[n]`; dst `[dim, n, 1, 1]`. With `h = dim / 2`, element j < h is
    /// `cos(t f_j)` and element `j + h` is `sin(t f_j)`, where `f_j = max_period^(-j / h)`. The last element of an odd row is 0.
    TimestepEmbedding {
        /// Length of the rows.
        dim: u32,
        /// Period of the slowest wave, divided by 2π.
        max_period: i32,
    },
}

impl Sequence {
    /// The length of an ARANGE, as ggml computes it in f32; `None` unless it is positive and finite.
    fn steps(start: f32, stop: f32, step: f32) -> Option<usize> {
        let steps = ((stop - start) / step).ceil();
        // Larger counts have more bytes than any tensor. The comparison is false for NaN.
        (stop > start && steps >= 1.0 && steps < (1u64 << 60) as f32).then_some(steps as usize)
    }
}

impl OpFamily for Sequence {
    fn code(&self) -> OpCode {
        match self {
            Sequence::Arange { .. } => OpCode::Arange,
            Sequence::TimestepEmbedding { .. } => OpCode::TimestepEmbedding,
        }
    }

    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        if code == OpCode::Arange {
            return Ok(Sequence::Arange { start: params.float(0), stop: params.float(1), step: params.float(2) });
        }
        let dim = params.int(0);
        let dim = u32::try_from(dim).map_err(|_| ParamError::new(code, 0, "dim", dim, "at least 0"))?;
        Ok(Sequence::TimestepEmbedding { dim, max_period: params.int(1) })
    }

    fn encode(&self) -> OpParams {
        let params = OpParams::default();
        match *self {
            Sequence::Arange { start, stop, step } => {
                params.with_float(0, start).with_float(1, stop).with_float(2, step)
            }
            Sequence::TimestepEmbedding { dim, max_period } => params.with_int(0, dim as i32).with_int(1, max_period),
        }
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        let ne = match *self {
            Sequence::Arange { start, stop, step } => {
                let steps = Sequence::steps(start, stop, step);
                [steps.ok_or_else(|| srcs.rule_error("stop is above start, and the step leads there"))?, 1, 1, 1]
            }
            Sequence::TimestepEmbedding { dim, .. } => [dim as usize, srcs.required(0)?.ne()[0], 1, 1],
        };
        Ok(OutputSpec { dtype: DType::F32, ne })
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        node.expect_dst(self.infer(&node.srcs)?)?;
        ensure!(node, node.dst.rows_dense(), "rows of dst are dense");
        Ok(())
    }

    fn in_place(&self, _: usize) -> bool {
        false
    }
}

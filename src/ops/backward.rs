//! Gradients: SILU_BACK, RMS_NORM_BACK, SOFT_MAX_BACK, REPEAT_BACK, GET_ROWS_BACK. ROPE_BACK is in `rope`, and
//! CROSS_ENTROPY_LOSS_BACK in `training`.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::DType;

/// The gradient of an op with respect to its input. Source 0 is the gradient `dy` of the op's result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Backward {
    /// Of SILU: `dy s (1 + x (1 - s))` with `s = 1 / (1 + e^-x)`. Source 1 is x, of dy's shape.
    Silu,
    /// Of RMS_NORM, by rows: `(dy - x sum(x dy) / (sum(x²) + n eps)) / sqrt(mean(x²) + eps)`. Source 1 is x, of dy's shape.
    RmsNorm {
        /// The eps of the norm; at least 0.
        eps: f32,
    },
    /// Of SOFT_MAX without ALiBi, by rows: `(dy - sum(y dy)) y scale`. Source 1 is y, the result of the SOFT_MAX. All tensors
    /// are contiguous.
    SoftMax {
        /// The scale of the softmax.
        scale: f32,
    },
    /// Of REPEAT: the sums of the elements of dy whose indices are equal modulo the counts of dst, which has a given shape.
    Repeat,
    /// Of GET_ROWS: `dst[:, ids[i]]` is the sum of the rows `dy[:, i]`, and 0 in rows without an id. dy F32 or F16
    /// `[n, k, 1, 1]`, source 1 ids I32 `[k, 1, 1, 1]`, dst F32 `[n, rows, 1, 1]` of a given shape.
    GetRows,
}

impl OpFamily for Backward {
    fn code(&self) -> OpCode {
        match self {
            Backward::Silu => OpCode::SiluBack,
            Backward::RmsNorm { .. } => OpCode::RmsNormBack,
            Backward::SoftMax { .. } => OpCode::SoftMaxBack,
            Backward::Repeat => OpCode::RepeatBack,
            Backward::GetRows => OpCode::GetRowsBack,
        }
    }

    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        Ok(match code {
            OpCode::RmsNormBack => {
                let eps = params.float(0);
                if eps.is_nan() || eps < 0.0 {
                    return Err(ParamError::new(code, 0, "eps", eps, "at least 0"));
                }
                Backward::RmsNorm { eps }
            }
            OpCode::SoftMaxBack => {
                // The gradient of a softmax with ALiBi is not defined by ggml.
                let max_bias = params.float(1);
                if max_bias != 0.0 {
                    return Err(ParamError::new(code, 1, "max_bias", max_bias, "0"));
                }
                Backward::SoftMax { scale: params.float(0) }
            }
            OpCode::RepeatBack => Backward::Repeat,
            OpCode::GetRowsBack => Backward::GetRows,
            _ => Backward::Silu,
        })
    }

    fn encode(&self) -> OpParams {
        match *self {
            Backward::RmsNorm { eps } => OpParams::default().with_float(0, eps),
            Backward::SoftMax { scale } => OpParams::default().with_float(0, scale),
            Backward::Silu | Backward::Repeat | Backward::GetRows => OpParams::default(),
        }
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        match self {
            Backward::Repeat | Backward::GetRows => {
                Err(srcs.rule_error("the destination's shape must be given: it does not follow from the sources"))
            }
            _ => Ok(OutputSpec::like(srcs.required(0)?)),
        }
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let (dy, dst) = (node.src(0)?, node.dst);
        match self {
            Backward::Repeat => {
                ensure!(node, dst.can_repeat_to(dy), "each of the gradient's counts is a multiple of dst's")
            }
            Backward::GetRows => {
                let (ids, [n, k, n2, n3]) = (node.src(1)?, dy.ne());
                ensure!(node, ids.dtype() == DType::I32, "ids are I32");
                ensure!(
                    node,
                    n2 == 1 && n3 == 1 && ids.ne()[0] <= k && ids.ne()[1..] == [1; 3],
                    "a matrix of gradients and at most one id for each row"
                );
                ensure!(
                    node,
                    dst.ne()[0] == n && dst.ne()[2..] == [1, 1],
                    "dst is a matrix with the gradient's row length"
                );
            }
            Backward::Silu | Backward::RmsNorm { .. } | Backward::SoftMax { .. } => {
                node.expect_dst(OutputSpec::like(dy))?;
                ensure!(node, dy.same_shape(node.src(1)?), "both sources have one shape");
            }
        }
        if let Backward::SoftMax { .. } = self {
            let contiguous = dy.is_contiguous() && node.src(1)?.is_contiguous() && dst.is_contiguous();
            ensure!(node, contiguous, "all tensors are contiguous");
        }
        Ok(())
    }

    fn in_place(&self, _: usize) -> bool {
        !matches!(self, Backward::Repeat | Backward::GetRows)
    }

    fn may_be_empty(&self, _: usize) -> bool {
        matches!(self, Backward::GetRows)
    }
}

//! NORM, RMS_NORM, L2_NORM: normalise each row by its own statistic. GROUP_NORM: normalises each group of channels.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use std::num::NonZeroU32;

/// A normalisation of the rows, or of groups of channels, of a tensor; the result has the same shape. Sums of f32 terms are
/// accumulated in f64; all other arithmetic is f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norm {
    /// `(x - mean) / sqrt(var + eps)` with `var = mean((x - mean)²)`.
    Norm {
        /// Added to the variance; at least 0.
        eps: f32,
    },
    /// `x / sqrt(mean(x²) + eps)`.
    RmsNorm {
        /// Added to the mean square; at least 0.
        eps: f32,
    },
    /// As [`Norm::Norm`], with mean and variance over a group of channels. A channel is a plane `[ne0, ne1]` along dimension 2;
    /// each index of dimension 3 has its own groups.
    GroupNorm {
        /// Number of groups, at most `i32::MAX`. Each has `ceil(ne2 / groups)` channels; the last groups may have fewer, or
        /// none.
        groups: NonZeroU32,
        /// Added to the variance; at least 0.
        eps: f32,
    },
    /// `x / max(sqrt(sum(x²)), eps)`.
    L2Norm {
        /// Minimum of the divisor; at least 0.
        eps: f32,
    },
}

impl OpFamily for Norm {
    fn code(&self) -> OpCode {
        match self {
            Norm::Norm { .. } => OpCode::Norm,
            Norm::RmsNorm { .. } => OpCode::RmsNorm,
            Norm::GroupNorm { .. } => OpCode::GroupNorm,
            Norm::L2Norm { .. } => OpCode::L2Norm,
        }
    }

    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        let word = usize::from(code == OpCode::GroupNorm);
        let eps = params.float(word);
        if eps.is_nan() || eps < 0.0 {
            return Err(ParamError::new(code, word, "eps", eps, "at least 0"));
        }
        Ok(match code {
            OpCode::GroupNorm => {
                let groups = u32::try_from(params.int(0)).ok().and_then(NonZeroU32::new);
                let groups = groups.ok_or_else(|| ParamError::new(code, 0, "n_groups", params.int(0), "at least 1"))?;
                Norm::GroupNorm { groups, eps }
            }
            OpCode::Norm => Norm::Norm { eps },
            OpCode::L2Norm => Norm::L2Norm { eps },
            _ => Norm::RmsNorm { eps },
        })
    }

    fn encode(&self) -> OpParams {
        match *self {
            Norm::GroupNorm { groups, eps } => OpParams::default().with_int(0, groups.get() as i32).with_float(1, eps),
            Norm::Norm { eps } | Norm::RmsNorm { eps } | Norm::L2Norm { eps } => OpParams::default().with_float(0, eps),
        }
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        Ok(OutputSpec::like(srcs.required(0)?))
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        ensure!(node, node.dst.ne() == node.src(0)?.ne(), "dst has the source's shape");
        if let Norm::GroupNorm { groups, .. } = self {
            ensure!(node, i32::try_from(groups.get()).is_ok(), "the number of groups fits an I32");
        }
        Ok(())
    }

    fn in_place(&self, _: usize) -> bool {
        true
    }
}

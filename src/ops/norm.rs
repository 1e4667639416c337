//! NORM, RMS_NORM, L2_NORM: each row scaled by a statistic of its own.

use super::{Family, NodeView, OpCode, Out, ParamError, ShapeError, Sources, Words, ensure};

/// A normalisation of the rows of a tensor `[ne3, ne2, ne1, ne0]`; the result has its shape. Sums are accumulated in
/// f64 over f32 terms, all else is f32.
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
    /// `x / max(sqrt(sum(x²)), eps)`.
    L2Norm {
        /// Least divisor; at least 0.
        eps: f32,
    },
}

impl Family for Norm {
    fn code(&self) -> OpCode {
        match self {
            Norm::Norm { .. } => OpCode::Norm,
            Norm::RmsNorm { .. } => OpCode::RmsNorm,
            Norm::L2Norm { .. } => OpCode::L2Norm,
        }
    }

    fn decode(code: OpCode, words: &Words) -> Result<Self, ParamError> {
        let eps = words.float(0);
        if eps.is_nan() || eps < 0.0 {
            return Err(ParamError::new(code, 0, "eps", eps, "at least 0"));
        }
        Ok(match code {
            OpCode::Norm => Norm::Norm { eps },
            OpCode::L2Norm => Norm::L2Norm { eps },
            _ => Norm::RmsNorm { eps },
        })
    }

    fn encode(&self) -> Words {
        let (Norm::Norm { eps } | Norm::RmsNorm { eps } | Norm::L2Norm { eps }) = *self;
        Words::default().with_float(0, eps)
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<Out, ShapeError> {
        Ok(Out::like(srcs.need(0)?))
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        ensure!(node, node.dst.ne() == node.src(0)?.ne(), "dst has the source's shape");
        Ok(())
    }

    fn in_place(&self, _i: usize) -> bool {
        true
    }
}

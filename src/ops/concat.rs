//! CONCAT: joins two tensors along a dimension. REPEAT: tiles a tensor.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::DIMS;

/// An op that assembles its destination from whole sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Concat {
    /// Source 0 followed by source 1 along a dimension. The types and the counts of all other dimensions are equal.
    Concat {
        /// The dimension, 0 (fastest) to 3.
        dim: u8,
    },
    /// `dst[i] = a[i % ne]` in each dimension. The shape of the destination determines the number of repetitions.
    Repeat,
}

impl OpFamily for Concat {
    fn code(&self) -> OpCode {
        match self {
            Concat::Concat { .. } => OpCode::Concat,
            Concat::Repeat => OpCode::Repeat,
        }
    }

    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        if code == OpCode::Repeat {
            return Ok(Concat::Repeat);
        }
        match params.int(0) {
            dim @ 0..=3 => Ok(Concat::Concat { dim: dim as u8 }),
            got => Err(ParamError::new(code, 0, "dim", got, "0 to 3")),
        }
    }

    fn encode(&self) -> OpParams {
        match *self {
            Concat::Concat { dim } => OpParams::default().with_int(0, i32::from(dim)),
            Concat::Repeat => OpParams::default(),
        }
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        let a = srcs.required(0)?;
        let Concat::Concat { dim } = *self else {
            return Err(srcs.rule_error("the destination's shape must be given: it determines the repetitions"));
        };
        let (b, d) = (srcs.required(1)?, usize::from(dim));
        ensure!(srcs, d < DIMS, "the dimension is 0 to 3");
        ensure!(srcs, a.dtype() == b.dtype(), "a and b have one type");
        ensure!(srcs, (0..DIMS).all(|k| k == d || a.ne()[k] == b.ne()[k]), "a and b differ along the dimension only");
        let mut out = OutputSpec::like(a);
        out.ne[d] = a.ne()[d].checked_add(b.ne()[d]).ok_or_else(|| srcs.rule_error("the sum of the counts fits"))?;
        Ok(out)
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        match self {
            Concat::Concat { .. } => node.expect_dst(self.infer(&node.srcs)?),
            Concat::Repeat => {
                let a = node.src(0)?;
                ensure!(node, a.dtype() == node.dst.dtype(), "dst has a's type");
                ensure!(node, a.can_repeat_to(node.dst), "each of dst's counts is a multiple of a's");
                Ok(())
            }
        }
    }

    fn in_place(&self, _: usize) -> bool {
        false
    }

    fn may_be_empty(&self, _: usize) -> bool {
        matches!(self, Concat::Concat { .. })
    }
}

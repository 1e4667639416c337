//! CROSS_ENTROPY_LOSS and its gradient; OPT_STEP_ADAMW and OPT_STEP_SGD, the steps of the optimisers.

use super::{NodeView, OpCode, OpFamily, OutputSpec, ShapeError, Sources, ensure, plain_ops};
use crate::tensor::DType;

/// An op of training. These ops have no parameters in op_params; all tensors are F32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Training {
    /// The cross entropy of rows of logits x (source 0) and rows of target probabilities t (source 1), both of one shape, as
    /// `[1, 1, 1, 1]`: `-mean over rows of sum(t (x - max(x) - ln(sum(e^(x - max(x))))))`.
    CrossEntropyLoss,
    /// Its gradient with respect to x: `(softmax(x) - t) g / rows`. Source 0 is g, the gradient of the loss, one element; the
    /// other sources are x and t. All are contiguous.
    CrossEntropyLossBack,
    /// A step of AdamW (Loshchilov and Hutter 2019): `m = m b1 + g (1 - b1)`, `v = v b2 + g² (1 - b2)`,
    /// `dst = w (1 - alpha wd) - alpha (m b1h) / (sqrt(v b2h) + eps)`. Sources: w, g, m, v of one shape, and a vector of alpha,
    /// b1, b2, eps, wd, b1h, b2h. m and v are written too; dst is usually w.
    OptStepAdamw,
    /// A step of gradient descent with weight decay: `dst = w (1 - alpha wd) - alpha g`. Sources: w, g of one shape, and a
    /// vector of alpha, wd. dst is usually w.
    OptStepSgd,
}

impl Training {
    /// Number of tensors of w's shape among the sources of an optimiser's step, and of its constants, which are the source
    /// after them.
    pub(crate) fn step_sources(self) -> Option<(usize, usize)> {
        match self {
            Training::OptStepAdamw => Some((4, 7)),
            Training::OptStepSgd => Some((2, 2)),
            Training::CrossEntropyLoss | Training::CrossEntropyLossBack => None,
        }
    }
}

impl OpFamily for Training {
    plain_ops!(CrossEntropyLoss, CrossEntropyLossBack, OptStepAdamw, OptStepSgd);

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        Ok(match self {
            Training::CrossEntropyLoss => OutputSpec { dtype: srcs.required(0)?.dtype(), ne: [1; 4] },
            Training::CrossEntropyLossBack => OutputSpec::like(srcs.required(1)?),
            Training::OptStepAdamw | Training::OptStepSgd => OutputSpec::like(srcs.required(0)?),
        })
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        node.expect_dst(self.infer(&node.srcs)?)?;
        match self {
            Training::CrossEntropyLoss => {
                let (x, t) = (node.src(0)?, node.src(1)?);
                ensure!(node, x.same_shape(t), "logits and targets have one shape");
                ensure!(node, x.rows_dense() && t.rows_dense(), "rows are dense");
            }
            Training::CrossEntropyLossBack => {
                let (g, x, t) = (node.src(0)?, node.src(1)?, node.src(2)?);
                ensure!(node, g.ne() == [1; 4], "the gradient of the loss has one element");
                ensure!(node, x.same_shape(t), "logits and targets have one shape");
                let contiguous = x.is_contiguous() && t.is_contiguous() && node.dst.is_contiguous();
                ensure!(node, contiguous, "all tensors are contiguous");
            }
            Training::OptStepAdamw | Training::OptStepSgd => {
                let (tensors, constants) = self.step_sources().unwrap_or_default();
                for i in 0..tensors {
                    ensure!(node, node.src(i)?.same_shape(node.dst), "weights, gradients and moments have one shape");
                    ensure!(node, node.src(i)?.rows_dense(), "rows are dense");
                }
                let params = node.src(tensors)?;
                ensure!(
                    node,
                    params.elements() == constants && params.is_contiguous(),
                    "2 constants of SGD, 7 of AdamW"
                );
                ensure!(node, params.dtype() == DType::F32, "constants are F32");
            }
        }
        Ok(())
    }

    fn in_place(&self, i: usize) -> bool {
        i == 0 && self.step_sources().is_some()
    }

    fn updates(&self, i: usize) -> bool {
        *self == Training::OptStepAdamw && (i == 2 || i == 3)
    }
}

//! SOFT_MAX: softmax over rows, with mask, ALiBi and sinks.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::{DIMS, DType};

/// `softmax(scale * x + slope(h) * mask)` over each row.
///
/// x F32 `[B, H, m, n]`; mask F16 or F32 `[B', H', ≥ m, n]`, repeated over heads and batches; sinks F32 `[H]`: one
/// more logit per head that takes its share and gives no output. A row that is masked entirely, without a sink, is
/// NaN. All are contiguous. The formula is that of ggml's CPU backend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoftMax {
    /// Factor on x.
    pub scale: f32,
    /// ALiBi: above 0, the mask counts with a slope of its own for each head.
    pub max_bias: f32,
}

impl OpFamily for SoftMax {
    fn code(&self) -> OpCode {
        OpCode::SoftMax
    }

    fn decode(_: OpCode, words: &OpParams) -> Result<Self, ParamError> {
        Ok(SoftMax { scale: words.float(0), max_bias: words.float(1) })
    }

    fn encode(&self) -> OpParams {
        OpParams::default().with_float(0, self.scale).with_float(1, self.max_bias)
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        Ok(OutputSpec::like(srcs.required(0)?))
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let x = node.src(0)?;
        node.expect_dst(OutputSpec::like(x))?;
        ensure!(node, x.is_contiguous() && node.dst.is_contiguous(), "x and dst are contiguous");
        check_mask_and_sinks(node, 1, x.ne(), self.max_bias)
    }

    fn in_place(&self, _: usize) -> bool {
        true
    }
}

/// ALiBi: the factor on the mask falls from head to head, by powers of two bases.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Alibi {
    /// Heads whose slope is `bases[0]^(h + 1)`; that of a later one is `bases[1]^(2 (h - steps) + 1)`.
    pub(crate) n_head_log2: usize,
    pub(crate) bases: [f32; 2],
}

impl Alibi {
    /// For query heads 0 to `heads` - 1; `None` where `max_bias` turns it off.
    pub(crate) fn new(max_bias: f32, heads: usize) -> Option<Alibi> {
        let steps = 1 << heads.max(1).ilog2();
        let base = |bias: f32| (-bias / steps as f32).exp2();
        // A NaN is not off: nothing of it stays hidden.
        let off = max_bias <= 0.0;
        (!off).then(|| Alibi { n_head_log2: steps, bases: [base(max_bias), base(max_bias / 2.0)] })
    }

    /// The slope of head `h`.
    pub(crate) fn slope(&self, h: usize) -> f32 {
        let Alibi { n_head_log2: steps, bases } = *self;
        if h < steps { bases[0].powi(h as i32 + 1) } else { bases[1].powi((2 * (h - steps) + 1) as i32) }
    }
}

/// The rules of masks, ALiBi and sinks for scores of the shape `[n, m, heads, batches]` (fastest first), here and in
/// attention: the mask is source `i` and the sinks are the next.
pub(super) fn check_mask_and_sinks(
    node: &NodeView<'_>,
    i: usize,
    [n, m, heads, batches]: [usize; DIMS],
    max_bias: f32,
) -> Result<(), ShapeError> {
    if let Some(mask) = node.srcs.get(i) {
        let ne = mask.ne();
        ensure!(node, matches!(mask.dtype(), DType::F16 | DType::F32), "the mask is F16 or F32");
        ensure!(node, mask.is_contiguous(), "the mask is contiguous");
        ensure!(node, ne[0] == n && ne[1] >= m, "the mask has an entry per score and at least as many rows");
        ensure!(
            node,
            heads.is_multiple_of(ne[2]) && batches.is_multiple_of(ne[3]),
            "the mask repeats over heads and batches"
        );
    } else {
        ensure!(node, max_bias <= 0.0, "ALiBi needs a mask");
    }
    if let Some(sinks) = node.srcs.get(i + 1) {
        ensure!(node, sinks.dtype() == DType::F32 && sinks.ne() == [heads, 1, 1, 1], "sinks are F32, one per head");
    }
    Ok(())
}

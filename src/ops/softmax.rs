//! SOFT_MAX: softmax of each row, with mask, ALiBi and attention sinks.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::{DIMS, DType};

/// `softmax(scale * x + slope(h) * mask)` over each row.
///
/// x F32 `[n, m, H, B]`; mask F16 or F32 `[n, ≥ m, H', B']`, broadcast over heads and batches; sinks F32 `[H]`. A sink is an
/// extra logit per head that enters the normalisation and has no output. A fully masked row without a sink gives NaN. All
/// tensors are contiguous. The formula is the same as in ggml's CPU backend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoftMax {
    /// Factor on x.
    pub scale: f32,
    /// ALiBi: if above 0, the mask is multiplied by a slope that differs per head.
    pub max_bias: f32,
}

impl SoftMax {
    /// Softmax with this factor on x, without ALiBi.
    pub fn new(scale: f32) -> SoftMax {
        SoftMax { scale, max_bias: 0.0 }
    }
}

impl OpFamily for SoftMax {
    fn code(&self) -> OpCode {
        OpCode::SoftMax
    }

    fn decode(_: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        Ok(SoftMax { scale: params.float(0), max_bias: params.float(1) })
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

/// ALiBi (attention with linear biases): the slopes on the mask, which fall geometrically from head to head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Alibi {
    /// The largest power of two up to the number of heads. Head `h` below it has the slope `bases[0]^(h + 1)`, and a later head
    /// `bases[1]^(2 (h - n_head_log2) + 1)`.
    pub(crate) n_head_log2: usize,
    /// Bases of the slopes: see `n_head_log2`.
    pub(crate) bases: [f32; 2],
}

impl Alibi {
    /// The slopes of `heads` query heads; `None` if `max_bias` is 0 or less, which turns ALiBi off.
    pub(crate) fn new(max_bias: f32, heads: usize) -> Option<Alibi> {
        let steps = 1 << heads.max(1).ilog2();
        let base = |bias: f32| (-bias / steps as f32).exp2();
        // A NaN does not turn ALiBi off: it propagates to the result instead of being hidden.
        let off = max_bias <= 0.0;
        (!off).then(|| Alibi { n_head_log2: steps, bases: [base(max_bias), base(max_bias / 2.0)] })
    }

    /// The slope of head `h`.
    pub(crate) fn slope(&self, h: usize) -> f32 {
        let Alibi { n_head_log2: steps, bases } = *self;
        if h < steps { bases[0].powi(h as i32 + 1) } else { bases[1].powi((2 * (h - steps) + 1) as i32) }
    }
}

/// The shape rules of mask, ALiBi and sinks, shared by SOFT_MAX and FLASH_ATTN_EXT. The scores have the shape
/// `[n, m, heads, batches]`; the mask is source `i`, and the sinks are source `i + 1`.
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

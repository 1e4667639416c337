//! FLASH_ATTN_EXT: flash attention, i.e. attention in one op that does not store the matrix of scores.

use super::softmax::check_mask_and_sinks;
use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::DType;

/// `softmax(scale * q k^T + slope(h) * mask) v` for each head.
///
/// q `[DK, N, H, B]`, k `[DK, KV, Hk, B]`, v `[DV, KV, Hv, B]`, with dense rows; mask F16 `[KV, ≥ N, H', B']`, contiguous,
/// broadcast over heads and batches; sinks F32 `[H]`; dst F32 `[DV, H, N, B]`. Consecutive query heads share a head of k and v
/// (grouped-query attention). Positions masked with -inf are skipped; a query without unmasked positions gives 0. The formula
/// is the same as in ggml's CPU backend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlashAttn {
    /// Factor on the scores.
    pub scale: f32,
    /// ALiBi: if above 0, the mask is multiplied by a slope that differs per head.
    pub max_bias: f32,
    /// Logit softcap `c`: each score `s` becomes `c tanh(s / c)`; 0 turns it off.
    pub softcap: f32,
    /// Whether accumulation in f32 is required, not merely allowed.
    pub f32_accumulation: bool,
    /// A guarantee of the client that no mask row has more finite entries than this; 0 guarantees nothing.
    pub n_kv_max: u32,
}

impl FlashAttn {
    /// Attention with this factor on the scores, without ALiBi, softcap and guarantees.
    pub fn new(scale: f32) -> FlashAttn {
        FlashAttn { scale, max_bias: 0.0, softcap: 0.0, f32_accumulation: false, n_kv_max: 0 }
    }
}

impl OpFamily for FlashAttn {
    fn code(&self) -> OpCode {
        OpCode::FlashAttnExt
    }

    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        let f32_accumulation = match params.int(3) {
            0 => false,
            10 => true,
            other => return Err(ParamError::new(code, 3, "precision", other, "0 or 10")),
        };
        let n_kv_max = u32::try_from(params.int(4))
            .map_err(|_| ParamError::new(code, 4, "n_kv_max", params.int(4), "a count, not negative"))?;
        Ok(FlashAttn {
            scale: params.float(0),
            max_bias: params.float(1),
            softcap: params.float(2),
            f32_accumulation,
            n_kv_max,
        })
    }

    fn encode(&self) -> OpParams {
        OpParams::default()
            .with_float(0, self.scale)
            .with_float(1, self.max_bias)
            .with_float(2, self.softcap)
            .with_int(3, if self.f32_accumulation { 10 } else { 0 })
            .with_int(4, self.n_kv_max as i32)
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        let (q, v) = (srcs.required(0)?.ne(), srcs.required(2)?.ne());
        Ok(OutputSpec { dtype: DType::F32, ne: [v[0], q[2], q[1], q[3]] })
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let (q, k, v) = (node.src(0)?, node.src(1)?, node.src(2)?);
        node.expect_dst(self.infer(&node.srcs)?)?;
        ensure!(node, node.dst.is_contiguous(), "dst is contiguous");
        ensure!(node, q.rows_dense() && k.rows_dense() && v.rows_dense(), "rows of q, k and v are dense");
        let ([dk, n, heads, batches], kn, vn) = (q.ne(), k.ne(), v.ne());
        ensure!(node, kn[0] == dk, "rows of q and k are equally long");
        ensure!(node, kn[1] == vn[1], "k and v have equally many positions");
        ensure!(node, kn[3] == batches && vn[3] == batches, "q, k and v have equally many batches");
        ensure!(
            node,
            heads.is_multiple_of(kn[2]) && heads.is_multiple_of(vn[2]),
            "q's heads are a multiple of k's and v's"
        );
        ensure!(node, node.srcs.get(3).is_none_or(|mask| mask.dtype() == DType::F16), "the mask is F16");
        check_mask_and_sinks(node, 3, [kn[1], n, heads, batches], self.max_bias)
    }

    fn in_place(&self, _: usize) -> bool {
        false
    }

    /// Attention over no positions is 0.
    fn may_be_empty(&self, i: usize) -> bool {
        (1..4).contains(&i)
    }
}

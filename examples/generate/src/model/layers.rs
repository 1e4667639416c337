//! Builds a transformer block: attention over the KV cache, then a feed-forward network, each with a residual connection.

use super::cache::{LayerCache, columns, values_view};
use super::graph_context::GraphContext;
use super::{GraphShape, Inputs, Model, ModelError, cache_names, moe};
use crate::hparams::{HParams, Temperature};
use fanout::graph::TensorId;
use fanout::ops::OutputSpec;
use fanout::ops::binary::Binary;
use fanout::ops::copy::CopyOp;
use fanout::ops::flash_attn::FlashAttn;
use fanout::ops::glu::Glu;
use fanout::ops::mul_mat::{MulMat, Precision};
use fanout::ops::rows::Rows;
use fanout::ops::softmax::SoftMax;
use fanout::ops::unary::{Unary, UnaryKind};
use fanout::tensor::{DType, TensorDesc};

/// The inputs and settings that all blocks of a graph share.
pub(super) struct BlockContext<'a> {
    pub(super) model: &'a Model,
    pub(super) shape: GraphShape,
    pub(super) inputs: Inputs,
}

impl BlockContext<'_> {
    /// Adds a whole block and returns its result `[width, tokens]`. With `outputs`, only these tokens continue after attention,
    /// so the result is `[width, outputs]`.
    pub(super) fn block(
        &self,
        ctx: &mut GraphContext<'_>,
        i: usize,
        x: TensorId,
        outputs: Option<TensorId>,
    ) -> Result<TensorId, ModelError> {
        ctx.block(Some(i));
        let (hparams, tokens) = (&self.model.hparams, self.shape.tokens);
        let cur = self.write_cache(ctx, i, x)?;
        let q = ctx.linear("Qcur", "attn_q", cur, hparams.heads * hparams.head_width)?;
        let q = ctx.reshape(q, [hparams.head_width, hparams.heads, tokens, 1])?;
        let q = self.rotated(ctx, i, "Qcur", "attn_q_norm.weight", q)?;
        let q = match hparams.variant.temperature {
            Some(temperature) => self.sharpened(ctx, temperature, q)?,
            None => q,
        };
        let attended = self.attention(ctx, i, q)?;
        let attended = ctx.linear("attn_out", "attn_output", attended, hparams.width)?;
        let (attended, x) = match outputs {
            Some(outputs) => (
                ctx.node("attn_out_rows", Rows::GetRows, &[attended, outputs])?,
                ctx.node("inp_rows", Rows::GetRows, &[x, outputs])?,
            ),
            None => (attended, x),
        };
        let attended = self.result(ctx, "attn_post_norm", attended, "post_attention_norm.weight")?;
        let x = ctx.node("ffn_inp", Binary::Add, &[attended, x])?;
        let cur = ctx.norm("ffn_norm", x, hparams.arch.spec().ffn_norm)?;
        let out = match &hparams.experts {
            Some(experts) => moe::feed_forward(ctx, hparams, experts, cur)?,
            None => feed_forward(ctx, hparams, cur)?,
        };
        let out = self.result(ctx, "ffn_post_norm", out, "post_ffw_norm.weight")?;
        ctx.node("l_out", Binary::Add, &[out, x])
    }

    /// The result of attention or of the feed-forward network, normalised or scaled where the architecture does that.
    fn result(&self, ctx: &mut GraphContext<'_>, name: &str, x: TensorId, norm: &str) -> Result<TensorId, ModelError> {
        let hparams = &self.model.hparams;
        let x = if hparams.arch.spec().result_norms { ctx.norm(name, x, norm)? } else { x };
        ctx.scaled(name, x, hparams.variant.residual_scale)
    }

    /// Adds the nodes that write a block's keys and values into its KV cache. Returns the normalised input, from which the
    /// queries are computed. Sufficient on its own for the last block of a batch without outputs.
    pub(super) fn write_cache(
        &self,
        ctx: &mut GraphContext<'_>,
        i: usize,
        x: TensorId,
    ) -> Result<TensorId, ModelError> {
        ctx.block(Some(i));
        let (hparams, tokens) = (&self.model.hparams, self.shape.tokens);
        let [keys, values] = self.cache(ctx, i)?;
        ctx.record_cells(self.layer(i)?.keys.group, self.inputs.cells)?;
        let cur = ctx.norm("attn_norm", x, "attn_norm.weight")?;
        let k = ctx.linear("Kcur", "attn_k", cur, hparams.kv_width())?;
        let k = ctx.reshape(k, [hparams.head_width, hparams.kv_heads, tokens, 1])?;
        let k = self.rotated(ctx, i, "Kcur", "attn_k_norm.weight", k)?;
        let k = ctx.reshape(k, [hparams.kv_width(), tokens, 1, 1])?;
        ctx.node_onto("cache_k", Rows::SetRows, &[k, self.inputs.cells.cells, keys], keys)?;
        let width = hparams.kv_width();
        let v = ctx.linear("Vcur", "attn_v", cur, width)?;
        if self.model.cache_options.flash_attn {
            ctx.node_onto("cache_v", Rows::SetRows, &[v, self.inputs.cells.cells, values], values)?;
        } else {
            // The cache is transposed: SET_ROWS writes each value as a row of one element.
            let [element, row, ..] = ctx.desc(v)?.nb();
            let each = TensorDesc::strided(DType::F32, [1, tokens, width, 1], [element, row, element, row * tokens])?;
            let (each, desc) = (ctx.view(v, each, 0)?, columns(&ctx.desc(values)?)?);
            let columns = ctx.view(values, desc, 0)?;
            ctx.node_onto("cache_v", Rows::SetRows, &[each, self.inputs.cells.cells, columns], columns)?;
        }
        Ok(cur)
    }

    fn layer(&self, i: usize) -> Result<&LayerCache, ModelError> {
        let layer = self.model.caches.first().and_then(|cache| cache.layers.get(i));
        layer.ok_or_else(|| ModelError::Cache(format!("block {i} has no cache")))
    }

    fn cache(&self, ctx: &mut GraphContext<'_>, i: usize) -> Result<[TensorId; 2], ModelError> {
        let LayerCache { keys, values } = self.layer(i)?;
        let [keys_name, values_name] = cache_names(i);
        Ok([ctx.stored(keys_name, keys)?, ctx.stored(values_name, values)?])
    }

    /// Heads after the per-head norm, which some architectures have, and the rotary position embedding.
    fn rotated(
        &self,
        ctx: &mut GraphContext<'_>,
        i: usize,
        name: &str,
        norm: &str,
        heads: TensorId,
    ) -> Result<TensorId, ModelError> {
        let hparams = &self.model.hparams;
        let heads =
            if hparams.arch.spec().head_norms { ctx.norm(&format!("{name}_normed"), heads, norm)? } else { heads };
        let Some(rope) = hparams.block_rope(i) else { return Ok(heads) };
        let mut srcs = vec![heads, self.inputs.positions];
        if let Some((name, factors)) = self.model.rope_factors(i) {
            srcs.push(ctx.stored(name, factors)?);
        }
        ctx.node(name, rope, &srcs)
    }

    /// Queries `[head_width, heads, tokens]` times the factors of their positions.
    fn sharpened(
        &self,
        ctx: &mut GraphContext<'_>,
        Temperature { scale, step }: Temperature,
        q: TensorId,
    ) -> Result<TensorId, ModelError> {
        let positions = ctx.reshape(self.inputs.cells.positions, [1, 1, self.shape.tokens, 1])?;
        // From the middle of a position, so that no rounding crosses a step.
        let steps = Unary::Scale { scale: step.recip(), bias: 0.5 / step };
        let steps = ctx.node("Qcur_steps", steps, &[positions])?;
        let steps = ctx.node("Qcur_steps", Unary::Kind(UnaryKind::Floor), &[steps])?;
        let steps = ctx.node("Qcur_steps", Unary::Scale { scale: 1.0, bias: 1.0 }, &[steps])?;
        let logarithm = ctx.node("Qcur_log", Unary::Log, &[steps])?;
        let factors = ctx.node("inp_attn_scale", Unary::Scale { scale, bias: 1.0 }, &[logarithm])?;
        ctx.node("Qcur_attn_temp_scaled", Binary::Mul, &[q, factors])
    }

    /// Attention of queries `[head_width, heads, tokens]` over the KV cache; the result is `[heads * head_width, tokens]`.
    fn attention(&self, ctx: &mut GraphContext<'_>, i: usize, q: TensorId) -> Result<TensorId, ModelError> {
        let (hparams, GraphShape { tokens, cells: seen, .. }) = (&self.model.hparams, self.shape);
        let mask = ctx.mask(self.layer(i)?.keys.group, self.inputs.cells, seen, hparams.block_window(i))?;
        let sinks = hparams.arch.spec().sinks.then(|| ctx.weight("attn_sinks.weight", &[hparams.heads])).transpose()?;
        let with_sinks = |srcs: &[TensorId]| srcs.iter().copied().chain(sinks).collect::<Vec<_>>();
        let flash_attn = self.model.cache_options.flash_attn;
        let [keys, values] = self.cache(ctx, i)?;
        let k = ctx.desc(keys)?.heads(hparams.head_width, seen)?;
        let v = values_view(&ctx.desc(values)?, hparams, seen, flash_attn)?;
        let (k, v) = (ctx.view(keys, k, 0)?, ctx.view(values, v, 0)?);
        let q = ctx.permute(q, [0, 2, 1, 3])?;
        let (scale, flat) = (hparams.attention_scale(), [hparams.heads * hparams.head_width, tokens, 1, 1]);
        if flash_attn {
            let op = FlashAttn { scale, max_bias: 0.0, softcap: 0.0, f32_accumulation: true, n_kv_max: 0 };
            let attended = ctx.node("kqv_out", op, &with_sinks(&[q, k, v, mask]))?;
            return ctx.reshape(attended, flat);
        }
        let exact = MulMat { accumulate: Precision::F32, ..MulMat::PLAIN };
        let scores = ctx.node("kq", exact, &[k, q])?;
        let shares = ctx.node("kq_soft_max", SoftMax { scale, max_bias: 0.0 }, &with_sinks(&[scores, mask]))?;
        let attended = ctx.node("kqv", MulMat::PLAIN, &[v, shares])?;
        let attended = ctx.permute(attended, [0, 2, 1, 3])?;
        ctx.node_as("kqv_out", CopyOp::Cont, &[attended], OutputSpec { dtype: DType::F32, ne: flat })
    }
}

fn feed_forward(ctx: &mut GraphContext<'_>, hparams: &HParams, x: TensorId) -> Result<TensorId, ModelError> {
    let gate = ctx.linear("ffn_gate", "ffn_gate", x, hparams.ff)?;
    let up = ctx.linear("ffn_up", "ffn_up", x, hparams.ff)?;
    let gated = ctx.node("ffn_gated", Glu { kind: hparams.variant.gate, swapped: false }, &[gate, up])?;
    ctx.linear("ffn_out", "ffn_down", gated, hparams.width)
}

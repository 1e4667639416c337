//! A transformer block: attention over the cache, then a feed-forward network, each with a residual.

use super::cache::{LayerCache, columns, keys_view, values_view};
use super::graph_context::GraphContext;
use super::{GraphShape, Model, ModelError, moe};
use crate::hparams::HParams;
use fanout::graph::TensorId;
use fanout::ops::OutputSpec;
use fanout::ops::binary::Binary;
use fanout::ops::copy::CopyOp;
use fanout::ops::flash_attn::FlashAttn;
use fanout::ops::glu::{Glu, GluKind};
use fanout::ops::mul_mat::{MulMat, Precision};
use fanout::ops::rows::Rows;
use fanout::ops::softmax::SoftMax;
use fanout::tensor::{DType, TensorDesc};

/// What all blocks of a graph have in common.
pub(super) struct BlockContext<'a> {
    pub(super) model: &'a Model,
    pub(super) shape: GraphShape,
    pub(super) positions: TensorId,
    pub(super) rows: TensorId,
    pub(super) mask: TensorId,
}

impl BlockContext<'_> {
    /// A block that other blocks follow, or whose result someone reads. `last` keeps only the last row after attention.
    pub(super) fn block(
        &self,
        net: &mut GraphContext<'_>,
        i: usize,
        x: TensorId,
        last: bool,
    ) -> Result<TensorId, ModelError> {
        net.block(Some(i));
        let (hyper, tokens) = (&self.model.hparams, self.shape.tokens);
        let cur = self.write_cache(net, i, x)?;
        let q = net.linear("Qcur", "attn_q", cur, hyper.heads * hyper.head_width)?;
        let q = net.reshape(q, [hyper.head_width, hyper.heads, tokens, 1])?;
        let q = self.rotated(net, i, "Qcur", "attn_q_norm.weight", q)?;
        let attended = self.attention(net, i, q)?;
        let attended = net.linear("attn_out", "attn_output", attended, hyper.width)?;
        let (attended, x) = if last { (last_row(net, attended)?, last_row(net, x)?) } else { (attended, x) };
        let x = net.node("ffn_inp", Binary::Add, &[attended, x])?;
        let cur = net.norm("ffn_norm", x, "ffn_norm.weight")?;
        let out = match &hyper.experts {
            Some(experts) => moe::feed_forward(net, hyper, experts, cur)?,
            None => feed_forward(net, hyper, cur)?,
        };
        net.node("l_out", Binary::Add, &[out, x])
    }

    /// Writes the keys and values of a block into its cache; returns the normalised input, which queries come from.
    pub(super) fn write_cache(
        &self,
        net: &mut GraphContext<'_>,
        i: usize,
        x: TensorId,
    ) -> Result<TensorId, ModelError> {
        net.block(Some(i));
        let (hyper, tokens) = (&self.model.hparams, self.shape.tokens);
        let [keys, values] = self.cache(net, i)?;
        let cur = net.norm("attn_norm", x, "attn_norm.weight")?;
        let k = net.linear("Kcur", "attn_k", cur, hyper.kv_width())?;
        let k = net.reshape(k, [hyper.head_width, hyper.kv_heads, tokens, 1])?;
        let k = self.rotated(net, i, "Kcur", "attn_k_norm.weight", k)?;
        let k = net.reshape(k, [hyper.kv_width(), tokens, 1, 1])?;
        net.node_onto("cache_k", Rows::SetRows, &[k, self.rows, keys], keys)?;
        let width = hyper.kv_width();
        let v = net.linear("Vcur", "attn_v", cur, width)?;
        if self.model.cache_options.flash_attn {
            net.node_onto("cache_v", Rows::SetRows, &[v, self.rows, values], values)?;
        } else {
            // The same row of every column: each value is a row of one element.
            let [element, row, ..] = net.desc(v)?.nb();
            let each = TensorDesc::strided(DType::F32, [1, tokens, width, 1], [element, row, element, row * tokens])?;
            let (each, desc) = (net.view(v, each, 0)?, columns(&net.desc(values)?)?);
            let columns = net.view(values, desc, 0)?;
            net.node_onto("cache_v", Rows::SetRows, &[each, self.rows, columns], columns)?;
        }
        Ok(cur)
    }

    fn cache(&self, net: &mut GraphContext<'_>, i: usize) -> Result<[TensorId; 2], ModelError> {
        let LayerCache { keys, values } =
            self.model.cache.get(i).ok_or_else(|| ModelError::Cache(format!("block {i} has no cache")))?;
        Ok([net.stored(format!("cache_k_l{i}"), keys)?, net.stored(format!("cache_v_l{i}"), values)?])
    }

    /// Heads, normalised where the model does that, and turned by their positions.
    fn rotated(
        &self,
        net: &mut GraphContext<'_>,
        i: usize,
        name: &str,
        norm: &str,
        heads: TensorId,
    ) -> Result<TensorId, ModelError> {
        let hyper = &self.model.hparams;
        let heads = match net.optional(norm, &[hyper.head_width])? {
            Some(_) => net.norm(&format!("{name}_normed"), heads, norm)?,
            None => heads,
        };
        let mut srcs = vec![heads, self.positions];
        if let Some((name, factors)) = self.model.rope_factors(i) {
            srcs.push(net.stored(name, factors)?);
        }
        net.node(name, hyper.rope, &srcs)
    }

    /// Attention of queries `[tokens, heads, head_width]` over the cache: `[tokens, heads * head_width]`.
    fn attention(&self, net: &mut GraphContext<'_>, i: usize, q: TensorId) -> Result<TensorId, ModelError> {
        let (hyper, GraphShape { tokens, kv_positions: seen, .. }) = (&self.model.hparams, self.shape);
        let flash_attn = self.model.cache_options.flash_attn;
        let [keys, values] = self.cache(net, i)?;
        let k = keys_view(&net.desc(keys)?, hyper, seen)?;
        let v = values_view(&net.desc(values)?, hyper, seen, flash_attn)?;
        let (k, v) = (net.view(keys, k, 0)?, net.view(values, v, 0)?);
        let q = net.permute(q, [0, 2, 1, 3])?;
        let (scale, flat) = ((hyper.head_width as f32).sqrt().recip(), [hyper.heads * hyper.head_width, tokens, 1, 1]);
        if flash_attn {
            let op = FlashAttn { scale, max_bias: 0.0, softcap: 0.0, f32_accumulation: true, n_kv_max: 0 };
            let attended = net.node("kqv_out", op, &[q, k, v, self.mask])?;
            return net.reshape(attended, flat);
        }
        let exact = MulMat { accumulate: Precision::F32, ..MulMat::PLAIN };
        let scores = net.node("kq", exact, &[k, q])?;
        let shares = net.node("kq_soft_max", SoftMax { scale, max_bias: 0.0 }, &[scores, self.mask])?;
        let attended = net.node("kqv", MulMat::PLAIN, &[v, shares])?;
        let attended = net.permute(attended, [0, 2, 1, 3])?;
        net.node_as("kqv_out", CopyOp::Cont, &[attended], OutputSpec { dtype: DType::F32, ne: flat })
    }
}

fn feed_forward(net: &mut GraphContext<'_>, hyper: &HParams, x: TensorId) -> Result<TensorId, ModelError> {
    let gate = net.linear("ffn_gate", "ffn_gate", x, hyper.ff)?;
    let up = net.linear("ffn_up", "ffn_up", x, hyper.ff)?;
    let gated = net.node("ffn_swiglu", Glu { kind: GluKind::Swiglu, swapped: false }, &[gate, up])?;
    net.linear("ffn_out", "ffn_down", gated, hyper.width)
}

/// The last row of a packed matrix.
fn last_row(net: &mut GraphContext<'_>, x: TensorId) -> Result<TensorId, ModelError> {
    let desc = net.desc(x)?;
    let row = TensorDesc::contiguous(desc.dtype(), [desc.ne()[0], 1, 1, 1])?;
    net.view(x, row, desc.extent().saturating_sub(row.extent()))
}

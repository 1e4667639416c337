//! The mixture-of-experts (MoE) feed-forward network: a router selects a few experts for each token.

use super::ModelError;
use super::graph_context::GraphContext;
use crate::hparams::{Experts, HParams};
use fanout::graph::TensorId;
use fanout::ops::binary::Binary;
use fanout::ops::glu::Glu;
use fanout::ops::mul_mat::MulMat;
use fanout::ops::reduce::Reduce;
use fanout::ops::rows::Rows;
use fanout::ops::softmax::SoftMax;
use fanout::ops::sort::Sort;
use fanout::tensor::{DType, TensorDesc};

/// Top-k routing: softmax over all experts, the `used` largest probabilities normalised to a sum of 1, and a weighted sum of
/// the results of these experts. A softmax over the `used` largest scores, which some architectures specify, gives the same weights.
pub(super) fn feed_forward(
    ctx: &mut GraphContext<'_>,
    hparams: &HParams,
    experts: &Experts,
    x: TensorId,
) -> Result<TensorId, ModelError> {
    let (width, tokens) = (hparams.width, ctx.desc(x)?.ne()[1]);
    let &Experts { count, used, ff } = experts;
    let logits = ctx.linear("ffn_moe_logits", "ffn_gate_inp", x, count)?;
    let shares = ctx.node("ffn_moe_probs", SoftMax { scale: 1.0, max_bias: 0.0 }, &[logits])?;
    let sorted = ctx.node("ffn_moe_argsort", Sort::Argsort { descending: true }, &[shares])?;
    let [id, row, ..] = ctx.desc(sorted)?.nb();
    let chosen = TensorDesc::strided(DType::I32, [used, tokens, 1, 1], [id, row, row * tokens, row * tokens])?;
    let chosen = ctx.view(sorted, chosen, 0)?;

    let shares = ctx.reshape(shares, [1, count, tokens, 1])?;
    let weights = ctx.node("ffn_moe_weights", Rows::GetRows, &[shares, chosen])?;
    let weights = ctx.reshape(weights, [used, tokens, 1, 1])?;
    let sum = ctx.node("ffn_moe_weights_sum", Reduce::SumRows, &[weights])?;
    let weights = ctx.node("ffn_moe_weights_norm", Binary::Div, &[weights, sum])?;
    let weights = ctx.reshape(weights, [1, used, tokens, 1])?;

    let x = ctx.reshape(x, [width, 1, tokens, 1])?;
    let gate = product(ctx, "ffn_moe_gate", ("ffn_gate_exps", x, chosen), [width, ff, count])?;
    let up = product(ctx, "ffn_moe_up", ("ffn_up_exps", x, chosen), [width, ff, count])?;
    let gated = ctx.node("ffn_moe_gated", Glu { kind: hparams.variant.gate, swapped: false }, &[gate, up])?;
    let down = product(ctx, "ffn_moe_down", ("ffn_down_exps", gated, chosen), [ff, width, count])?;
    let weighted = ctx.node("ffn_moe_weighted", Binary::Mul, &[down, weights])?;

    // `weighted` is `[width, used, tokens]`: sum over the experts with one strided view per expert slot.
    let [element, expert, token, _] = ctx.desc(weighted)?.nb();
    let rows =
        TensorDesc::strided(DType::F32, [width, tokens, 1, 1], [element, token, token * tokens, token * tokens])?;
    let mut sum = ctx.view(weighted, rows, 0)?;
    for k in 1..used {
        let next = ctx.view(weighted, rows, k * expert)?;
        sum = ctx.node("ffn_moe_out", Binary::Add, &[sum, next])?;
    }
    Ok(sum)
}

/// The products of each token's experts with `x`, plus their biases if the model has them. `ne` is the shape of the experts' matrices.
fn product(
    ctx: &mut GraphContext<'_>,
    name: &str,
    (stem, x, chosen): (&str, TensorId, TensorId),
    ne: [usize; 3],
) -> Result<TensorId, ModelError> {
    let weight = ctx.weight(&format!("{stem}.weight"), &ne)?;
    let y = ctx.node(name, MulMat::BY_ID, &[weight, x, chosen])?;
    match ctx.optional(&format!("{stem}.bias"), &ne[1..])? {
        Some(bias) => ctx.node(name, Binary::AddId, &[y, bias, chosen]),
        None => Ok(y),
    }
}

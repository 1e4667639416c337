//! A feed-forward network of experts, of which each token uses a few.

use super::ModelError;
use super::graph_context::GraphContext;
use crate::hparams::{Experts, HParams};
use fanout::graph::TensorId;
use fanout::ops::binary::Binary;
use fanout::ops::glu::{Glu, GluKind};
use fanout::ops::mul_mat::MulMat;
use fanout::ops::reduce::Reduce;
use fanout::ops::rows::Rows;
use fanout::ops::softmax::SoftMax;
use fanout::ops::sort::Sort;
use fanout::tensor::{DType, TensorDesc};

/// Softmax over all experts chooses the largest few; their shares, made to sum to 1, weigh their results.
pub(super) fn feed_forward(
    net: &mut GraphContext<'_>,
    hyper: &HParams,
    experts: &Experts,
    x: TensorId,
) -> Result<TensorId, ModelError> {
    let (width, tokens) = (hyper.width, net.desc(x)?.ne()[1]);
    let &Experts { count, used, ff } = experts;
    let logits = net.linear("ffn_moe_logits", "ffn_gate_inp", x, count)?;
    let shares = net.node("ffn_moe_probs", SoftMax { scale: 1.0, max_bias: 0.0 }, &[logits])?;
    let sorted = net.node("ffn_moe_argsort", Sort::Argsort { descending: true }, &[shares])?;
    let [id, row, ..] = net.desc(sorted)?.nb();
    let chosen = TensorDesc::strided(DType::I32, [used, tokens, 1, 1], [id, row, row * tokens, row * tokens])?;
    let chosen = net.view(sorted, chosen, 0)?;

    let shares = net.reshape(shares, [1, count, tokens, 1])?;
    let weights = net.node("ffn_moe_weights", Rows::GetRows, &[shares, chosen])?;
    let weights = net.reshape(weights, [used, tokens, 1, 1])?;
    let sum = net.node("ffn_moe_weights_sum", Reduce::SumRows, &[weights])?;
    let weights = net.node("ffn_moe_weights_norm", Binary::Div, &[weights, sum])?;
    let weights = net.reshape(weights, [1, used, tokens, 1])?;

    let x = net.reshape(x, [width, 1, tokens, 1])?;
    let gate = net.weight("ffn_gate_exps.weight", &[width, ff, count])?;
    let gate = net.node("ffn_moe_gate", MulMat::BY_ID, &[gate, x, chosen])?;
    let up = net.weight("ffn_up_exps.weight", &[width, ff, count])?;
    let up = net.node("ffn_moe_up", MulMat::BY_ID, &[up, x, chosen])?;
    let gated = net.node("ffn_moe_swiglu", Glu { kind: GluKind::Swiglu, swapped: false }, &[gate, up])?;
    let down = net.weight("ffn_down_exps.weight", &[ff, width, count])?;
    let down = net.node("ffn_moe_down", MulMat::BY_ID, &[down, gated, chosen])?;
    let weighted = net.node("ffn_moe_weighted", Binary::Mul, &[down, weights])?;

    // One row per token and used expert: the first ones of all tokens, plus the second ones, and so on.
    let [element, expert, token, _] = net.desc(weighted)?.nb();
    let rows =
        TensorDesc::strided(DType::F32, [width, tokens, 1, 1], [element, token, token * tokens, token * tokens])?;
    let mut sum = net.view(weighted, rows, 0)?;
    for k in 1..used {
        let next = net.view(weighted, rows, k * expert)?;
        sum = net.node("ffn_moe_out", Binary::Add, &[sum, next])?;
    }
    Ok(sum)
}

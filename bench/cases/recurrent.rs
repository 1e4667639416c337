//! The cases of recurrent layers for the static roofline: prompts of Qwen3-Next (the gated delta rule), Kimi Linear (the same with a
//! gate per key), Mamba-2 and Mamba 2.8B, RWKV 7 2.9B, RWKV 6 1.6B and gated linear attention; and a step of Qwen3-Next that decodes.

use super::{Case, Content, Draft, Kind};
use fanout::graph::{BuildError, TensorId};
use fanout::ops::linear_attn::LinearAttn;
use fanout::ops::ssm::Ssm;
use fanout::tensor::DType::{F32, I32};

/// Adds the sources and the node.
type Build = Box<dyn Fn(&mut Draft) -> Result<(), BuildError>>;

/// `floats` are those of all sources and of the result, `ops` multiplications and additions.
fn case(op: &'static str, shape: String, floats: [usize; 2], ops: usize, build: Build) -> Case {
    let [read, written] = floats.map(|n| 4 * n);
    Case { op, dtype: F32.to_string(), shape, read, written, ops, kind: Kind::F32, cold: false, sets: 1, build }
}

fn between(d: &mut Draft, ne: [usize; 4], low: f32, high: f32) -> Result<Option<TensorId>, BuildError> {
    d.leaf(F32, ne, Content::Between(low, high)).map(Some)
}

/// The gated delta rule for `tokens` tokens. Keys have a length of about 1, and the state decays slowly.
fn delta_net(size: usize, [heads, kept_heads]: [usize; 2], by_key: bool, tokens: usize) -> Case {
    let gates = if by_key { size } else { 1 };
    let (of_k, of_v, state) = (size * kept_heads * tokens, size * heads * tokens, size * size * heads);
    let what = if by_key { ", a gate per key" } else { "" };
    let build = move |d: &mut Draft| {
        let bound = (3.0 / size as f32).sqrt();
        let q = between(d, [size, kept_heads, tokens, 1], -1.0, 1.0)?;
        let k = between(d, [size, kept_heads, tokens, 1], -bound, bound)?;
        let v = between(d, [size, heads, tokens, 1], -1.0, 1.0)?;
        let gate = between(d, [gates, heads, tokens, 1], -0.5, 0.0)?;
        let beta = between(d, [1, heads, tokens, 1], 0.0, 1.0)?;
        let state = between(d, [size, size, heads, 1], -1.0, 1.0)?;
        d.b.node(LinearAttn::DeltaNet { snapshots: 1 }, &[q, k, v, gate, beta, state]).map(drop)
    };
    case(
        "GATED_DELTA_NET",
        format!("{heads}/{kept_heads} heads of {size}{what}, by {tokens}"),
        [2 * of_k + of_v + (gates + 1) * heads * tokens + state, of_v + state],
        6 * state * tokens,
        Box::new(build),
    )
}

/// RWKV_WKV6, RWKV_WKV7 or GATED_LINEAR_ATTN.
fn linear(op: LinearAttn, name: &'static str, size: usize, heads: usize, tokens: usize) -> Case {
    let ne = [size, heads, tokens, 1];
    let (of_tokens, state) = (size * heads * tokens, size * size * heads);
    let build = move |d: &mut Draft| {
        let bound = 0.5 / (size as f32).sqrt();
        let mut sources = Vec::new();
        for i in 0..op.state() {
            sources.push(match (op, i) {
                (LinearAttn::RwkvWkv6, 3) => between(d, [size, heads, 1, 1], -1.0, 1.0)?,
                (LinearAttn::RwkvWkv6, 4) | (LinearAttn::RwkvWkv7, 1) | (LinearAttn::Gated { .. }, 3) => {
                    between(d, ne, 0.5, 1.0)?
                }
                (LinearAttn::RwkvWkv7, 4 | 5) => between(d, ne, -bound, bound)?,
                _ => between(d, ne, -1.0, 1.0)?,
            });
        }
        sources.push(between(d, [state, 1, 1, 1], -1.0, 1.0)?);
        d.b.node(op, &sources).map(drop)
    };
    let bonus = if op == LinearAttn::RwkvWkv6 { size * heads } else { 0 };
    let sources = op.state() - usize::from(bonus > 0);
    let per_element = if op == LinearAttn::RwkvWkv7 { 8 } else { 4 };
    case(
        name,
        format!("{heads} heads of {size}, by {tokens}"),
        [sources * of_tokens + bonus + state, of_tokens + state],
        per_element * state * tokens,
        Box::new(build),
    )
}

/// The scan of `heads` heads of `hd` rows with `n` elements; each element has its own decay if `by_element`.
fn scan(n: usize, hd: usize, heads: usize, by_element: bool, tokens: usize) -> Case {
    let (of_x, state) = (hd * heads * tokens, n * hd * heads);
    let decays = if by_element { n } else { 1 };
    let build = move |d: &mut Draft| {
        let states = between(d, [n, hd, heads, 1], -1.0, 1.0)?;
        let x = between(d, [hd, heads, tokens, 1], -1.0, 1.0)?;
        let dt = between(d, [heads, tokens, 1, 1], -5.0, 0.0)?;
        let a = between(d, [decays, heads, 1, 1], -1.0, 0.0)?;
        let b = between(d, [n, 1, tokens, 1], -1.0, 1.0)?;
        let c = between(d, [n, 1, tokens, 1], -1.0, 1.0)?;
        let ids = Some(d.leaf(I32, [1, 1, 1, 1], Content::Indices(vec![0]))?);
        d.b.node(Ssm::Scan { snapshots: 1 }, &[states, x, dt, a, b, c, ids]).map(drop)
    };
    case(
        "SSM_SCAN",
        format!("{heads} heads of {hd}, states of {n}, by {tokens}"),
        [of_x + heads * tokens + 2 * n * tokens + state + decays * heads, of_x + state],
        5 * state * tokens,
        Box::new(build),
    )
}

/// The cases, for prompts of `tokens` tokens.
pub(super) fn canonical(tokens: usize) -> Vec<Case> {
    vec![
        delta_net(128, [32, 16], false, tokens),
        delta_net(128, [32, 16], false, 1),
        delta_net(128, [32, 32], true, tokens),
        linear(LinearAttn::RwkvWkv7, "RWKV_WKV7", 64, 40, tokens),
        linear(LinearAttn::RwkvWkv6, "RWKV_WKV6", 64, 32, tokens),
        linear(LinearAttn::Gated { scale: 0.125 }, "GATED_LINEAR_ATTN", 64, 32, tokens),
        scan(128, 64, 80, false, tokens),
        scan(16, 1, 5120, true, tokens),
    ]
}

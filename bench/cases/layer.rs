//! Layers of a llama model.

use super::{Case, Content, Draft, Sizes, bytes, kind};
use fanout::graph::{BuildError, TensorId};
use fanout::ops::binary::Binary;
use fanout::ops::flash_attn::FlashAttn;
use fanout::ops::glu::{self, Glu};
use fanout::ops::mul_mat::MulMat;
use fanout::ops::norm::Norm;
use fanout::ops::rope::{Rope, RopeMode};
use fanout::ops::rows::Rows;
use fanout::tensor::DType::{self, F16, F32, I32, I64};
use fanout::tensor::TensorDesc;

/// Layers of a llama model at the last `tokens` positions of its context, with their nodes in llama.cpp's order. Each has inputs of
/// its own, and begins with the residual addition that ends the previous layer, because the device fuses that with the norm. Numbers
/// of readers are those of llama.cpp's graphs, so that the device fuses the same nodes.
pub(super) fn layers(s: &Sizes, t: DType, tokens: usize, layers: usize) -> Case {
    let &Sizes { width, ff, heads, kv_heads, head, context, .. } = s;
    let kv_width = kv_heads * head;
    let products = width * (2 * width + 2 * kv_width + 3 * ff);
    let cache = bytes(F16, 2 * kv_width * context);
    let by = if tokens == 1 { String::new() } else { format!(" by {tokens}") };
    Case {
        op: "LLAMA_LAYER",
        dtype: t.to_string(),
        shape: format!("{width}, {ff}, {heads}/{kv_heads} heads of {head}, {context} positions{by}"),
        read: bytes(t, products) + cache,
        written: 4 * width * tokens,
        ops: (2 * products + 4 * heads * head * context) * tokens,
        kind: kind(t),
        cold: true,
        sets: layers,
        build: Box::new(move |d| {
            let columns = |n| [n, tokens, 1, 1];
            let (x, previous) = (d.values(F32, columns(width))?, d.values(F32, columns(width))?);
            let x = d.b.node(Binary::Add, &[Some(previous), Some(x)])?;
            let last: Vec<usize> = (context - tokens..context).collect();
            let positions = d.leaf(I32, [tokens, 1, 1, 1], Content::Indices(last.clone()))?;
            let cache_rows = d.leaf(I64, [tokens, 1, 1, 1], Content::Indices(last))?;
            let mask = d.leaf(F16, [context, tokens, 1, 1], Content::Mask)?;
            let h = norm(d, width, x)?;
            let q = linear(d, t, [width, width], h)?;
            let q = rotated(d, q, [head, heads, tokens], positions)?;
            let v = linear(d, t, [width, kv_width], h)?;
            let k = linear(d, t, [width, kv_width], h)?;
            let k = rotated(d, k, [head, kv_heads, tokens], positions)?;
            d.b.set_use_count(k, 1)?;
            let k = reshaped(d, k, columns(kv_width))?;
            d.b.set_use_count(k, 1)?;
            let mut cached = [k, v];
            for new in &mut cached {
                let cache = d.values(F16, [kv_width, context, 1, 1])?;
                let into = d.b.view(cache, TensorDesc::contiguous(F16, [kv_width, context, 1, 1])?, 0)?;
                d.b.node_into(Rows::SetRows, &[Some(*new), Some(cache_rows), Some(cache)], into)?;
                let row = bytes(F16, head);
                let nb = [F16.block_bytes(), kv_heads * row, row, context * kv_heads * row];
                *new = d.b.view(cache, TensorDesc::strided(F16, [head, context, kv_heads, 1], nb)?, 0)?;
            }
            let nb = [4, 4 * width, 4 * head, 4 * width * tokens];
            let q = d.b.view(q, TensorDesc::strided(F32, [head, tokens, heads, 1], nb)?, 0)?;
            let scale = (head as f32).powf(-0.5);
            let op = FlashAttn { scale, max_bias: 0.0, softcap: 0.0, f32_accumulation: true, n_kv_max: 0 };
            let attended = d.b.node(op, &[Some(q), Some(cached[0]), Some(cached[1]), Some(mask)])?;
            let attended = reshaped(d, attended, columns(width))?;
            let attended = linear(d, t, [width, width], attended)?;
            let x = d.b.node(Binary::Add, &[Some(attended), Some(x)])?;
            let h = norm(d, width, x)?;
            let (gate, up) = (linear(d, t, [width, ff], h)?, linear(d, t, [width, ff], h)?);
            d.b.set_use_count(gate, 1)?;
            d.b.set_use_count(up, 1)?;
            let gated = d.b.node(Glu { kind: glu::GluKind::Swiglu, swapped: false }, &[Some(gate), Some(up)])?;
            linear(d, t, [ff, width], gated).map(drop)
        }),
    }
}

/// A product with a new weight matrix.
fn linear(d: &mut Draft, t: DType, [k, m]: [usize; 2], x: TensorId) -> Result<TensorId, BuildError> {
    let w = d.values(t, [k, m, 1, 1])?;
    d.b.node(MulMat::PLAIN, &[Some(w), Some(x)])
}

/// A norm with its weights.
fn norm(d: &mut Draft, width: usize, x: TensorId) -> Result<TensorId, BuildError> {
    let h = d.b.node(Norm::RmsNorm { eps: 1e-5 }, &[Some(x)])?;
    d.b.set_use_count(h, 1)?;
    let w = d.values(F32, [width, 1, 1, 1])?;
    d.b.node(Binary::Mul, &[Some(h), Some(w)])
}

/// Positional encoding of heads: their size, their number, and that of the tokens.
fn rotated(d: &mut Draft, x: TensorId, heads: [usize; 3], positions: TensorId) -> Result<TensorId, BuildError> {
    let x = reshaped(d, x, [heads[0], heads[1], heads[2], 1])?;
    d.b.node(Rope::new(RopeMode::Normal, heads[0] as u32), &[Some(x), Some(positions)])
}

/// The same values in another shape.
pub(super) fn reshaped(d: &mut Draft, x: TensorId, ne: [usize; 4]) -> Result<TensorId, BuildError> {
    d.b.view(x, TensorDesc::contiguous(F32, ne)?, 0)
}

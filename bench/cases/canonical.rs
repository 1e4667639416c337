//! The canonical cases of the static roofline (scripts/roofline.sh): the sizes of [`Sizes::MODEL`], one node each, and layers of
//! a llama model that decodes one token.

use super::{Case, Content, Draft, Sizes, attention, bytes, kind, mul_mat, mul_mat_id, passes, weights};
use fanout::graph::{BuildError, TensorId};
use fanout::ops::binary::Binary;
use fanout::ops::flash_attn::FlashAttn;
use fanout::ops::glu::{self, Glu};
use fanout::ops::mul_mat::MulMat;
use fanout::ops::norm::Norm;
use fanout::ops::reduce::Reduce;
use fanout::ops::rope::{Rope, RopeMode};
use fanout::ops::rows::Rows;
use fanout::ops::softmax::SoftMax;
use fanout::ops::sort::Sort;
use fanout::tensor::DType::{self, BF16, F16, F32, I32, I64, Q4_0, Q4_K, Q6_K, Q8_0};
use fanout::tensor::{Capability, TensorDesc};

/// Columns of the products: the widths of the vector kernels, of the kernels on tensor cores, and of the tiles of the GEMM; and a prompt.
const COLUMNS: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, PROMPT];

/// Columns of a prompt.
const PROMPT: usize = 512;

/// Whether a type of weights has a case with `n` columns. For some numbers a few types are enough, because the products differ only in the
/// decoder of the weights.
fn has_case(t: DType, n: usize) -> bool {
    match n {
        16 | 32 => [F16, Q8_0, Q4_K].contains(&t),
        128 => t != F32,
        PROMPT => [F16, BF16, Q8_0, Q4_0, Q4_K, Q6_K].contains(&t),
        _ => true,
    }
}

/// The canonical cases. A new kernel needs a case here that launches it; the roofline then finds it by the name of its entry.
pub fn canonical() -> Vec<Case> {
    let s = &Sizes::MODEL;
    let types: Vec<DType> = weights().into_iter().filter(|t| t.can(Capability::Cuda)).collect();
    let only_read = DType::with_capability(Capability::CudaRead).filter(|t| !t.can(Capability::Cuda));
    let mut cases = Vec::new();
    for n in COLUMNS {
        cases.extend(types.iter().filter(|&&t| has_case(t, n)).map(|&t| mul_mat(s, t, n)));
    }
    cases.extend(only_read.flat_map(|t| [1, 128].map(|n| mul_mat(s, t, n))));
    cases.extend(types.iter().map(|&t| mul_mat_id(s, t, 1)));
    cases.extend(types.iter().filter(|t| t.is_block()).map(|&t| unpacked(s, t)));
    cases.extend(types.iter().filter(|t| t.is_block()).map(|&t| tied(s, t)));
    cases.extend([F16, Q8_0].map(|t| attention(s, t, 1, s.context)));
    cases.extend(passes(s, 1));
    cases.extend([F16, Q4_K].map(|t| layer(s, t)));
    cases.push(router());
    cases.push(expert_sum(s));
    cases
}

/// A mixture of experts: their number, and how many of them a token uses.
const MIXTURE: [usize; 2] = [128, 8];

/// The router of a mixture of experts, for one token.
fn router() -> Case {
    let [experts, used] = MIXTURE;
    small(
        "MOE_ROUTE",
        format!("{used} of {experts} experts, by 1"),
        [4 * experts, 8 * experts + 4 * (2 * used + 1)],
        move |d| {
            let logits = d.values(F32, [experts, 1, 1, 1])?;
            let p = d.b.node(SoftMax { scale: 1.0, max_bias: 0.0 }, &[Some(logits)])?;
            let sorted = d.b.node(Sort::Argsort { descending: true }, &[Some(p)])?;
            let nb = [4, 4 * experts, 4 * experts, 4 * experts];
            let ids = d.b.view(sorted, TensorDesc::strided(I32, [used, 1, 1, 1], nb)?, 0)?;
            let table = reshaped(d, p, [1, experts, 1, 1])?;
            let w = d.b.node(Rows::GetRows, &[Some(table), Some(ids)])?;
            let w = reshaped(d, w, [used, 1, 1, 1])?;
            let sum = d.b.node(Reduce::SumRows, &[Some(w)])?;
            d.b.node(Binary::Div, &[Some(w), Some(sum)]).map(drop)
        },
    )
}

/// The weighted sum of the results of a token's experts.
fn expert_sum(s: &Sizes) -> Case {
    let ([_, used], n) = (MIXTURE, s.width);
    small("MOE_SUM", format!("{used} experts of {n}, by 1"), [4 * used * (n + 1), 4 * n], move |d| {
        let (x, w) = (d.values(F32, [n, used, 1, 1])?, d.values(F32, [1, used, 1, 1])?);
        let product = d.b.node(Binary::Mul, &[Some(x), Some(w)])?;
        d.b.set_use_count(product, used as u32)?;
        let mut sum = None;
        for expert in 0..used {
            let nb = [4, 4 * n * used, 4 * n * used, 4 * n * used];
            let part = d.b.view(product, TensorDesc::strided(F32, [n, 1, 1, 1], nb)?, 4 * n * expert)?;
            d.b.set_use_count(part, 1)?;
            let Some(before) = sum.replace(part) else { continue };
            let added = d.b.node(Binary::Add, &[Some(before), Some(part)])?;
            if expert + 1 < used {
                d.b.set_use_count(added, 1)?;
            }
            sum = Some(added);
        }
        Ok(())
    })
}

/// A case with small F32 operands. `read` and `written` are bytes.
fn small(
    op: &'static str,
    shape: String,
    [read, written]: [usize; 2],
    build: impl Fn(&mut Draft) -> Result<(), BuildError> + 'static,
) -> Case {
    let build = Box::new(build);
    Case { op, dtype: F32.to_string(), shape, read, written, ops: 0, kind: kind(F32), cold: false, sets: 1, build }
}

/// A product that reads weights in ggml's layout: every second row of a tensor, which is not repacked.
fn unpacked(s: &Sizes, t: DType) -> Case {
    let width = s.width;
    let mut case = mul_mat(s, t, 1);
    case.op = "MUL_MAT, rows with gaps";
    case.build = Box::new(move |d| {
        let (all, step) = (d.values(t, [width, 2 * width, 1, 1])?, 2 * bytes(t, width));
        let nb = [t.block_bytes(), step, step * width, step * width];
        let a = d.b.view(all, TensorDesc::strided(t, [width, width, 1, 1], nb)?, 0)?;
        let x = d.values(F32, [width, 1, 1, 1])?;
        d.b.node(MulMat::PLAIN, &[Some(a), Some(x)]).map(drop)
    });
    case
}

/// GET_ROWS of a table that is also the weight of a product, as tied embeddings.
fn tied(s: &Sizes, t: DType) -> Case {
    let width = s.width;
    let mut case = mul_mat(s, t, 1);
    case.op = "GET_ROWS and MUL_MAT";
    case.build = Box::new(move |d| {
        let table = d.values(t, [width, width, 1, 1])?;
        let ids = d.leaf(I32, [1, 1, 1, 1], Content::Indices(vec![width - 1]))?;
        let x = d.b.node(Rows::GetRows, &[Some(table), Some(ids)])?;
        d.b.node(MulMat::PLAIN, &[Some(table), Some(x)]).map(drop)
    });
    case
}

/// A layer of a llama model that decodes one token, with its nodes in llama.cpp's order. It begins with
/// the residual addition that ends the previous layer, because the device fuses that with the norm. Numbers of readers are those
/// of llama.cpp's graphs, so that the device fuses the same nodes.
fn layer(s: &Sizes, t: DType) -> Case {
    let &Sizes { width, ff, heads, kv_heads, head, context, .. } = s;
    let kv_width = kv_heads * head;
    let products = width * (2 * width + 2 * kv_width + 3 * ff);
    let cache = bytes(F16, 2 * kv_width * context);
    Case {
        op: "LLAMA_LAYER",
        dtype: t.to_string(),
        shape: format!("{width}, {ff}, {heads}/{kv_heads} heads of {head}, {context} positions"),
        read: bytes(t, products) + cache,
        written: 4 * width,
        ops: 2 * products + 4 * heads * head * context,
        kind: kind(t),
        cold: true,
        sets: 1,
        build: Box::new(move |d| {
            let (x, previous) = (d.values(F32, [width, 1, 1, 1])?, d.values(F32, [width, 1, 1, 1])?);
            let x = d.b.node(Binary::Add, &[Some(previous), Some(x)])?;
            let positions = d.leaf(I32, [1, 1, 1, 1], Content::Indices(vec![context - 1]))?;
            let cache_rows = d.leaf(I64, [1, 1, 1, 1], Content::Indices(vec![context - 1]))?;
            let mask = d.leaf(F16, [context, 1, 1, 1], Content::Mask)?;
            let h = norm(d, width, x)?;
            let q = linear(d, t, [width, width], h)?;
            let q = rotated(d, q, [head, heads], positions)?;
            let v = linear(d, t, [width, kv_width], h)?;
            let k = linear(d, t, [width, kv_width], h)?;
            let k = rotated(d, k, [head, kv_heads], positions)?;
            d.b.set_use_count(k, 1)?;
            let k = reshaped(d, k, [kv_width, 1, 1, 1])?;
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
            let nb = [4, 4 * width, 4 * head, 4 * width];
            let q = d.b.view(q, TensorDesc::strided(F32, [head, 1, heads, 1], nb)?, 0)?;
            let scale = (head as f32).powf(-0.5);
            let op = FlashAttn { scale, max_bias: 0.0, softcap: 0.0, f32_accumulation: true, n_kv_max: 0 };
            let attended = d.b.node(op, &[Some(q), Some(cached[0]), Some(cached[1]), Some(mask)])?;
            let attended = reshaped(d, attended, [width, 1, 1, 1])?;
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

/// Positional encoding of the heads of one token.
fn rotated(d: &mut Draft, x: TensorId, heads: [usize; 2], positions: TensorId) -> Result<TensorId, BuildError> {
    let x = reshaped(d, x, [heads[0], heads[1], 1, 1])?;
    d.b.node(Rope::new(RopeMode::Normal, heads[0] as u32), &[Some(x), Some(positions)])
}

/// The same values in another shape.
fn reshaped(d: &mut Draft, x: TensorId, ne: [usize; 4]) -> Result<TensorId, BuildError> {
    d.b.view(x, TensorDesc::contiguous(F32, ne)?, 0)
}

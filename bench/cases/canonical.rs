//! The canonical cases of the static roofline (scripts/roofline.sh): the sizes of [`Sizes::MODEL`], one node each, and layers of
//! a llama model that decodes one token.

use super::layer::{layers, reshaped};
use super::{
    Case, Content, Draft, Sizes, attention, bytes, kind, latent_attention, mul_mat, mul_mat_id, passes, recurrent,
    vision, weights,
};
use fanout::graph::BuildError;
use fanout::ops::binary::Binary;
use fanout::ops::dsv4::{Dsv4, STREAMS};
use fanout::ops::mul_mat::MulMat;
use fanout::ops::out_prod::OutProd;
use fanout::ops::reduce::Reduce;
use fanout::ops::rows::Rows;
use fanout::ops::softmax::SoftMax;
use fanout::ops::solve_tri::SolveTri;
use fanout::ops::sort::Sort;
use fanout::ops::topk_mask::TopkMask;
use fanout::tensor::DType::{self, BF16, F16, F32, I32, IQ4_XS, Q4_0, Q4_K, Q6_K, Q8_0};
use fanout::tensor::{Capability, TensorDesc};

/// Columns of the products: the widths of the vector kernels, of the kernels on tensor cores, and of the tiles of the GEMM;
/// the first one that uses the GEMM; and a prompt.
const COLUMNS: [usize; 10] = [1, 2, 4, 8, 16, 32, 33, 64, 128, PROMPT];

/// Columns of a prompt.
const PROMPT: usize = 512;

/// Positions behind which decoding is bound by the caches of K and V.
const LONG_CONTEXT: usize = 32768;

/// Whether a type of weights has a case with `n` columns. For some numbers a few types are enough, because the products differ only in the
/// decoder of the weights.
fn has_case(t: DType, n: usize) -> bool {
    match n {
        16 | 32 => [F16, Q8_0, Q4_K].contains(&t),
        33 => t == F16,
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
    cases.extend([F16, Q8_0, Q4_0].map(|t| attention(s, t, 1, s.context)));
    cases.extend([Q8_0, Q4_0].map(|t| attention(s, t, 1, LONG_CONTEXT)));
    cases.extend(prompts(s));
    cases.extend(latent());
    cases.extend([1, PROMPT].into_iter().flat_map(|n| passes(s, n)));
    cases.extend([F16, Q4_K].map(|t| layers(s, t, 1, 1)));
    cases.extend([F16, Q4_K, IQ4_XS].map(experts));
    cases.push(router());
    cases.push(expert_sum(s));
    cases.extend(vision::canonical(s));
    cases.extend([indexer(s), kept_cells(s), mixing_matrix()]);
    cases.extend(streams(s));
    cases.extend([triangular(), outer_products(s)]);
    cases.extend(recurrent::canonical(PROMPT));
    cases
}

/// Attention of a prompt: each kernel, by type and channels, with half of the positions hidden from the middle token; and behind a long context.
fn prompts(s: &Sizes) -> Vec<Case> {
    let of = |t, head, kv| attention(&Sizes { head, ..*s }, t, PROMPT, kv);
    let mut cases: Vec<Case> = PROMPT_HEADS.map(|head| of(F16, head, PROMPT)).into();
    cases.extend([64, 128, 256].map(|head| of(BF16, head, PROMPT)));
    cases.extend([64, 128].map(|head| of(Q8_0, head, PROMPT)));
    cases.extend([(F16, 64), (F16, 128), (Q8_0, 128)].map(|(t, head)| of(t, head, s.context)));
    cases
}

/// Latent attention with the heads of large and small models of DeepSeek: decoding, also behind a long context, and prompts of 2048 queries: more would
/// take the emulator long.
fn latent() -> Vec<Case> {
    let of = |t, heads, n, kv| latent_attention(t, heads, [576, 512], n, kv);
    let sizes = [(128, 1, 4096), (128, 16, 4096), (128, 1, 32768), (16, 1, 4096), (16, 128, 4096)];
    let mut cases: Vec<Case> = sizes.map(|(heads, n, kv)| of(F16, heads, n, kv)).into();
    cases.extend([1, 4].map(|n| of(BF16, 16, n, 4096)));
    cases.extend([F16, BF16].into_iter().flat_map(|t| [1, 4].map(|n| latent_attention(t, 16, [320, 256], n, 4096))));
    cases
}

/// Channels of the variants of attention for prompts.
const PROMPT_HEADS: [usize; 7] = [64, 80, 96, 112, 128, 192, 256];

/// Heads of the lightning indexer, and elements of its keys.
const INDEXER: [usize; 2] = [64, 128];

/// Cells that a token attends to in sparse attention.
const KEPT: usize = 2048;

/// The scores of all cells of a KV cache for one token.
fn indexer(s: &Sizes) -> Case {
    let ([heads, width], cells) = (INDEXER, s.context);
    let mut case = small(
        "LIGHTNING_INDEXER",
        format!("{heads} heads of {width}, {cells} cells, by 1"),
        [2 * cells * (width + 1) + 4 * heads * (width + 1), 4 * cells],
        move |d| {
            let (q, k) = (d.values(F32, [width, heads, 1, 1])?, d.values(F16, [width, 1, cells, 1])?);
            let (w, mask) = (d.values(F32, [heads, 1, 1, 1])?, d.values(F16, [cells, 1, 1, 1])?);
            d.b.node(Dsv4::LightningIndexer, &[Some(q), Some(k), Some(w), Some(mask)]).map(drop)
        },
    );
    case.ops = 2 * width * heads * cells;
    case
}

/// The mask of sparse attention for one token.
fn kept_cells(s: &Sizes) -> Case {
    let cells = s.context;
    small("TOP_K_MASK", format!("{KEPT} of {cells} cells, by 1"), [6 * KEPT, 2 * cells], move |d| {
        let mask = d.values(F16, [cells, 1, 1, 1])?;
        // Scores order cells at random: an odd step permutes them.
        let picks = (0..KEPT).map(|i| i * 1237 % cells).collect();
        let picks = d.leaf(I32, [KEPT, 1, 1, 1], Content::Indices(picks))?;
        d.b.node(TopkMask, &[Some(mask), Some(picks)]).map(drop)
    })
}

/// The matrices that mix the residual streams of a prompt.
fn mixing_matrix() -> Case {
    let mixes = (2 + STREAMS) * STREAMS;
    let bytes = [4 * mixes * PROMPT, 4 * STREAMS * STREAMS * PROMPT];
    small("DSV4_HC_COMB", format!("20 iterations by {PROMPT}"), bytes, move |d| {
        let (x, base) = (d.values(F32, [mixes, PROMPT, 1, 1])?, d.values(F32, [mixes, 1, 1, 1])?);
        let scale = d.values(F32, [3, 1, 1, 1])?;
        d.b.node(Dsv4::HcComb { eps: 1e-6, iterations: 20 }, &[Some(x), Some(scale), Some(base)]).map(drop)
    })
}

/// A layer's input from the residual streams, and the streams after the layer, for one token.
fn streams(s: &Sizes) -> [Case; 2] {
    let (n, row) = (s.width, 4 * s.width);
    let shape = format!("{STREAMS} streams of {n}, by 1");
    let pre = small("DSV4_HC_PRE", shape.clone(), [STREAMS * row, row], move |d| {
        let (x, weights) = (d.values(F32, [n, STREAMS, 1, 1])?, d.values(F32, [STREAMS, 1, 1, 1])?);
        d.b.node(Dsv4::HcPre { scale: 1.0, gated: false }, &[Some(x), Some(weights)]).map(drop)
    });
    let post = small("DSV4_HC_POST", shape, [(1 + STREAMS) * row, STREAMS * row], move |d| {
        let (x, residual) = (d.values(F32, [n, 1, 1, 1])?, d.values(F32, [n, STREAMS, 1, 1])?);
        let (post, comb) = (d.values(F32, [STREAMS, 1, 1, 1])?, d.values(F32, [STREAMS, STREAMS, 1, 1])?);
        d.b.node(Dsv4::HcPost, &[Some(x), Some(residual), Some(post), Some(comb)]).map(drop)
    });
    [pre, post]
}

/// The triangular systems of chunks of 64 tokens in linear attention.
fn triangular() -> Case {
    let (n, heads) = (64, 32);
    small("SOLVE_TRI", format!("{n}x{n}, {heads} matrices"), [8 * n * n * heads, 4 * n * n * heads], move |d| {
        let (a, b) = (d.values(F32, [n, n, heads, 1])?, d.values(F32, [n, n, heads, 1])?);
        d.b.node(SolveTri, &[Some(a), Some(b)]).map(drop)
    })
}

/// The gradient of a small product of weights.
fn outer_products(s: &Sizes) -> Case {
    let (n, depth) = (s.width / 8, s.prompt / 4);
    let mut case = small("OUT_PROD", format!("{n}x{n}x{depth}"), [8 * n * depth, 4 * n * n], move |d| {
        let (a, b) = (d.values(F32, [n, depth, 1, 1])?, d.values(F32, [n, depth, 1, 1])?);
        d.b.node(OutProd, &[Some(a), Some(b)]).map(drop)
    });
    case.ops = 2 * n * n * depth;
    case
}

/// A mixture of experts: their number, and how many of them a token uses.
const MIXTURE: [usize; 2] = [128, 8];

/// Columns and rows of the weights of one of its experts, for gate and up.
const EXPERT_SIZES: [usize; 2] = [2048, 768];

/// A product with the experts of a mixture for a prompt, whose tokens choose them at random.
fn experts(t: DType) -> Case {
    let ([experts, used], [k, m]) = (MIXTURE, EXPERT_SIZES);
    let weights = bytes(t, k * m * experts);
    Case {
        op: "MUL_MAT_ID",
        dtype: t.to_string(),
        shape: format!("{experts}x{m}x{k}, {used} used, by {PROMPT}"),
        read: weights + 4 * k * PROMPT,
        written: 4 * m * used * PROMPT,
        ops: 2 * k * m * used * PROMPT,
        kind: kind(t),
        cold: true,
        sets: 1,
        build: Box::new(move |d| {
            let a = d.values(t, [k, m, experts, 1])?;
            // A token uses experts at an odd distance: they differ.
            let mut state = 11u64;
            let mut below = |n: usize| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) as usize % n
            };
            let of_token =
                |(first, step): (usize, usize)| (0..used).map(move |e| (first + e * (2 * step + 1)) % experts);
            let ids = (0..PROMPT).map(|_| (below(experts), below(experts / 2))).flat_map(of_token).collect();
            let ids = d.leaf(I32, [used, PROMPT, 1, 1], Content::Indices(ids))?;
            let x = d.values(F32, [k, 1, PROMPT, 1])?;
            d.b.node(MulMat::BY_ID, &[Some(a), Some(x), Some(ids)]).map(drop)
        }),
    }
}

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

//! The timed cases: ops on the shapes of an 8B llama model (width 4096, 32 query heads, 8 KV heads, head size 128, feed-forward
//! size 14336), and of vision and speech encoders (`vision`).
//!
//! A case is a graph of equal nodes. If a model would read the op's data from memory, the case is cold: each node has its own
//! data, and all of it together exceeds every CPU cache ([`Sizes::cold`]). If a model would find the data in the cache because
//! the previous node wrote it, the case has little data.

use fanout::graph::{BuildError, Builder, TensorId};
use fanout::ops::OutputSpec;
use fanout::ops::binary::Binary;
use fanout::ops::copy::CopyOp;
use fanout::ops::flash_attn::FlashAttn;
use fanout::ops::glu::{self, Glu};
use fanout::ops::mul_mat::MulMat;
use fanout::ops::norm::Norm;
use fanout::ops::rope::{Rope, RopeMode};
use fanout::ops::rows::Rows;
use fanout::ops::softmax::SoftMax;
use fanout::tensor::DType::{self, BF16, F16, F32, I32, I64, Q4_0, Q4_K, Q6_K, Q8_0};
use fanout::tensor::{Capability, TensorDesc};

mod canonical;
mod content;
mod layer;
mod recurrent;
mod vision;

pub use canonical::canonical;
pub use content::fill;

/// The kind of products of a case, which determines its arithmetic roof.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// f32 products added to f32 sums.
    F32,
    /// bf16 products added to f32 sums.
    Bf16,
    /// 8-bit products added to 32-bit sums.
    Int8,
}

/// The weight types: plain types first, then block-quantised types.
fn weights() -> Vec<DType> {
    let mut types: Vec<_> = DType::with_capability(Capability::Convert).collect();
    types.sort_by_key(|t| t.is_block());
    types
}

/// Total bytes of a hot case (data in a CPU cache), which fit into the L2 cache.
const HOT_BYTES: usize = 1 << 20;

/// Maximum number of nodes of a hot case.
const HOT_NODES: usize = 32;

/// Number of experts of a MUL_MAT_ID.
const EXPERTS: usize = 8;

/// Number of experts that each token uses.
const USED: usize = 2;

/// The sizes of the cases.
pub struct Sizes {
    /// Rows and columns of weights.
    pub width: usize,
    /// Rows and columns of an expert.
    pub expert: usize,
    /// Feed-forward size.
    pub ff: usize,
    /// Query heads.
    pub heads: usize,
    /// Heads of K and V.
    pub kv_heads: usize,
    /// Head size.
    pub head: usize,
    /// Positions in the KV cache.
    pub context: usize,
    /// Tokens of a prompt.
    pub prompt: usize,
    /// Total bytes of a cold case; larger than every CPU cache.
    pub cold: usize,
}

impl Sizes {
    /// The sizes of the 8B model.
    pub const MODEL: Sizes = Sizes {
        width: 4096,
        expert: 2048,
        ff: 14336,
        heads: 32,
        kv_heads: 8,
        head: 128,
        context: 4096,
        prompt: 512,
        cold: 512 << 20,
    };

    /// The smallest sizes that exercise every case, for smoke tests.
    pub const SMOKE: Sizes = Sizes {
        width: 256,
        expert: 256,
        ff: 512,
        heads: 4,
        kv_heads: 2,
        head: 64,
        context: 64,
        prompt: 40,
        cold: 1 << 18,
    };
}

/// The content of a leaf.
pub enum Content {
    /// Random values with standard deviation 1, in the tensor's type.
    Values,
    /// Random values of F32, evenly distributed between these.
    Between(f32, f32),
    /// These indices.
    Indices(Vec<usize>),
    /// A causal F16 mask: 0 up to the query's own position, -inf after it.
    Mask,
}

/// A graph under construction, with the contents of its leaves.
#[derive(Default)]
pub struct Draft {
    pub b: Builder,
    pub contents: Vec<(TensorId, Content)>,
}

impl Draft {
    fn leaf(&mut self, dtype: DType, ne: [usize; 4], content: Content) -> Result<TensorId, BuildError> {
        let id = self.b.leaf(dtype, ne)?;
        self.contents.push((id, content));
        Ok(id)
    }

    fn values(&mut self, dtype: DType, ne: [usize; 4]) -> Result<TensorId, BuildError> {
        self.leaf(dtype, ne, Content::Values)
    }
}

/// Adds the nodes and leaves of one set of data to a draft.
type Build = Box<dyn Fn(&mut Draft) -> Result<(), BuildError>>;

/// A graph of equal nodes, with the minimum work of a node.
pub struct Case {
    pub op: &'static str,
    pub dtype: String,
    pub shape: String,
    /// Bytes that a node reads, each counted once.
    pub read: usize,
    /// Bytes that a node writes.
    pub written: usize,
    /// Multiplications and additions in the node's products; 0 for ops without products.
    pub ops: usize,
    /// The kind of the products.
    pub kind: Kind,
    /// Whether the data comes from memory, and not from a CPU cache.
    pub cold: bool,
    /// Number of sets of data in the graph.
    sets: usize,
    build: Build,
}

impl Case {
    /// The name that `--filter` matches.
    pub fn name(&self) -> String {
        // The trailing space lets the filter `by 1 ` exclude `by 128`.
        format!("{} {} {} ", self.op, self.dtype, self.shape)
    }

    /// Number of sets of data in [`Case::draft`].
    pub fn sets(&self) -> usize {
        self.sets
    }

    /// A graph with all sets of data.
    pub fn draft(&self) -> Result<Draft, BuildError> {
        self.draft_of(self.sets, Draft::default())
    }

    /// As [`Case::draft`], with a slot for each tensor.
    pub fn draft_with_separate_slots(&self) -> Result<Draft, BuildError> {
        self.draft_of(self.sets, Draft { b: Builder::with_separate_slots(), contents: Vec::new() })
    }

    /// A graph with one set of data.
    pub fn single(&self) -> Result<Draft, BuildError> {
        self.draft_of(1, Draft::default())
    }

    fn draft_of(&self, sets: usize, mut draft: Draft) -> Result<Draft, BuildError> {
        for _ in 0..sets {
            (self.build)(&mut draft)?;
        }
        Ok(draft)
    }
}

/// Steps of decoding and prompts of a whole model: its type, its sizes, and the number of tokens.
pub fn models(s: &Sizes, layers: usize) -> Vec<(Case, usize)> {
    let long = Sizes { context: 8 * s.context, ..*s };
    let of_type = |t| {
        let steps = [1, 2, 8, 16, s.prompt / 8, s.prompt].map(|n| (layer::layers(s, t, n, layers), n));
        steps.into_iter().chain([(layer::layers(&long, t, 1, layers), 1)])
    };
    [Q4_K, Q8_0, BF16].into_iter().flat_map(of_type).collect()
}

/// Layers of a model.
pub const LAYERS: usize = 32;

/// All cases, in the order they are timed.
pub fn all(s: &Sizes) -> Vec<Case> {
    let mut cases = Vec::new();
    for n in [1, 8, s.prompt] {
        cases.extend(weights().into_iter().map(|t| mul_mat(s, t, n)));
    }
    for n in [1, s.prompt / 4] {
        cases.extend(weights().into_iter().map(|t| mul_mat_id(s, t, n)));
    }
    for t in [F16, Q8_0] {
        cases.extend(
            [(1, s.context), (s.prompt, s.prompt), (s.prompt, s.context)].map(|(n, kv)| attention(s, t, n, kv)),
        );
    }
    for n in [1, s.prompt] {
        cases.extend(passes(s, n));
    }
    cases.extend(vision::all(s));
    cases
}

fn bytes(dtype: DType, elements: usize) -> usize {
    elements / dtype.block_len() * dtype.block_bytes()
}

/// The kind of products that kernels use for a weight type.
fn kind(weights: DType) -> Kind {
    match weights {
        F32 | F16 | DType::F8_E4M3 => Kind::F32,
        BF16 => Kind::Bf16,
        _ => Kind::Int8,
    }
}

fn mul_mat(s: &Sizes, t: DType, n: usize) -> Case {
    let width = s.width;
    let weights = bytes(t, width * width);
    Case {
        op: "MUL_MAT",
        dtype: t.to_string(),
        shape: format!("{width}x{width} by {n}"),
        read: weights + 4 * width * n,
        written: 4 * width * n,
        ops: 2 * width * width * n,
        kind: kind(t),
        cold: true,
        // With many columns the case is compute-bound, so the weights do not need to be cold.
        sets: if n > 64 { 1 } else { s.cold.div_ceil(weights) },
        build: Box::new(move |d| {
            let (a, b) = (d.values(t, [width, width, 1, 1])?, d.values(F32, [width, n, 1, 1])?);
            d.b.node(MulMat::PLAIN, &[Some(a), Some(b)]).map(drop)
        }),
    }
}

fn mul_mat_id(s: &Sizes, t: DType, n: usize) -> Case {
    let k = s.expert;
    let expert = bytes(t, k * k);
    // With one token, each node reads its used experts only, and consecutive nodes use different experts. Many tokens read all
    // experts.
    let (nodes, read) = if n == 1 { (EXPERTS / USED, USED) } else { (1, EXPERTS) };
    Case {
        op: "MUL_MAT_ID",
        dtype: t.to_string(),
        shape: format!("{EXPERTS}x{k}x{k}, {USED} used, by {n}"),
        read: read * expert + 4 * k * n,
        written: 4 * k * USED * n,
        ops: 2 * k * k * USED * n,
        kind: kind(t),
        cold: true,
        sets: s.cold.div_ceil(EXPERTS * expert),
        build: Box::new(move |d| {
            let a = d.values(t, [k, k, EXPERTS, 1])?;
            for node in 0..nodes {
                let used = (0..n * USED).map(|i| (node * USED + i) % EXPERTS).collect();
                let ids = d.leaf(I32, [USED, n, 1, 1], Content::Indices(used))?;
                let b = d.values(F32, [k, 1, n, 1])?;
                d.b.node(MulMat::BY_ID, &[Some(a), Some(b), Some(ids)])?;
            }
            Ok(())
        }),
    }
}

/// Causal attention of the last `n` of `kv` positions.
fn attention(s: &Sizes, t: DType, n: usize, kv: usize) -> Case {
    let &Sizes { heads, kv_heads, head, .. } = s;
    let cache = bytes(t, head * kv_heads * kv);
    let pairs = n * (kv - n) + n * (n + 1) / 2;
    Case {
        op: "FLASH_ATTN_EXT",
        dtype: t.to_string(),
        shape: format!("{heads}/{kv_heads} heads of {head}, {kv} positions, by {n}"),
        read: 2 * cache + (4 * head * heads + 2 * kv) * n,
        written: 4 * head * heads * n,
        ops: 4 * heads * head * pairs,
        kind: Kind::F32,
        cold: true,
        sets: if n == 1 { s.cold.div_ceil(2 * cache) } else { 1 },
        build: Box::new(move |d| {
            let q = d.values(F32, [head, n, heads, 1])?;
            // Layout of a KV cache: all heads of a position are adjacent, so a head's rows are strided.
            let row = bytes(t, head);
            let nb = [t.block_bytes(), kv_heads * row, row, kv * kv_heads * row];
            let desc = TensorDesc::strided(t, [head, kv, kv_heads, 1], nb)?;
            let [k, v] = [d.b.leaf_with_desc(desc)?, d.b.leaf_with_desc(desc)?];
            d.contents.extend([k, v].map(|id| (id, Content::Values)));
            let mask = d.leaf(F16, [kv, n, 1, 1], Content::Mask)?;
            let scale = (head as f32).powf(-0.5);
            let op = FlashAttn { scale, max_bias: 0.0, softcap: 0.0, f32_accumulation: true, n_kv_max: 0 };
            d.b.node(op, &[Some(q), Some(k), Some(v), Some(mask)]).map(drop)
        }),
    }
}

/// As [`attention`], with V in the first `values` channels of the only head of K, as in latent attention.
fn latent_attention(t: DType, heads: usize, [channels, values]: [usize; 2], n: usize, kv: usize) -> Case {
    let s = &Sizes { heads, kv_heads: 1, head: channels, ..Sizes::MODEL };
    let case = attention(s, t, n, kv);
    let pairs = n * (kv - n) + n * (n + 1) / 2;
    Case {
        shape: format!("{heads} latent heads of {channels}/{values}, {kv} positions, by {n}"),
        read: bytes(t, channels * kv) + (4 * channels * heads + 2 * kv) * n,
        written: 4 * values * heads * n,
        ops: 2 * heads * (channels + values) * pairs,
        sets: 1,
        build: Box::new(move |d| {
            let (q, k) = (d.values(F32, [channels, n, heads, 1])?, d.values(t, [channels, kv, 1, 1])?);
            let row = bytes(t, channels);
            let v = TensorDesc::strided(t, [values, kv, 1, 1], [t.block_bytes(), row, kv * row, kv * row])?;
            let v = d.b.view(k, v, 0)?;
            let mask = d.leaf(F16, [kv, n, 1, 1], Content::Mask)?;
            let scale = (channels as f32).powf(-0.5);
            let op = FlashAttn { scale, max_bias: 0.0, softcap: 0.0, f32_accumulation: true, n_kv_max: 0 };
            d.b.node(op, &[Some(q), Some(k), Some(v), Some(mask)]).map(drop)
        }),
        ..case
    }
}

/// A memory-bound case without products: bytes that a node reads and writes.
struct Pass {
    op: &'static str,
    dtype: String,
    shape: String,
    read: usize,
    written: usize,
}

impl Pass {
    /// The case for `n` tokens: cold with many tokens, hot (data in the CPU cache) with one.
    fn case(self, s: &Sizes, n: usize, build: impl Fn(&mut Draft) -> Result<(), BuildError> + 'static) -> Case {
        let Pass { op, dtype, shape, read, written } = self;
        let (cold, all) = (n > 1, read + written);
        let sets = if cold { s.cold.div_ceil(all) } else { (HOT_BYTES / all).clamp(1, HOT_NODES) };
        Case { op, dtype, shape, read, written, ops: 0, kind: Kind::F32, cold, sets, build: Box::new(build) }
    }
}

/// The memory-bound cases without products, for `n` tokens.
fn passes(s: &Sizes, n: usize) -> Vec<Case> {
    let &Sizes { width, ff, heads, kv_heads, head, context, prompt, .. } = s;
    let row = 4 * width * n;
    let rows = format!("{width} by {n}");
    let pass = |op, dtype: &str, shape: &str, read, written| Pass {
        op,
        dtype: dtype.to_owned(),
        shape: shape.to_owned(),
        read,
        written,
    };
    let ne = [width, n, 1, 1];
    let mut cases = vec![
        pass("RMS_NORM", "F32", &rows, row, row).case(s, n, move |d| {
            let x = d.values(F32, ne)?;
            d.b.node(Norm::RmsNorm { eps: 1e-5 }, &[Some(x)]).map(drop)
        }),
        pass("MUL", "F32", &format!("{rows}, one row"), row + 4 * width, row).case(s, n, move |d| {
            let (x, w) = (d.values(F32, ne)?, d.values(F32, [width, 1, 1, 1])?);
            d.b.node(Binary::Mul, &[Some(x), Some(w)]).map(drop)
        }),
        pass("ADD", "F32", &rows, 2 * row, row).case(s, n, move |d| {
            let (x, y) = (d.values(F32, ne)?, d.values(F32, ne)?);
            d.b.node(Binary::Add, &[Some(x), Some(y)]).map(drop)
        }),
        pass("SWIGLU", "F32", &format!("{ff} by {n}"), 8 * ff * n, 4 * ff * n).case(s, n, move |d| {
            let (x, g) = (d.values(F32, [ff, n, 1, 1])?, d.values(F32, [ff, n, 1, 1])?);
            d.b.node(Glu { kind: glu::GluKind::Swiglu, swapped: false }, &[Some(x), Some(g)]).map(drop)
        }),
        pass("CPY", "F32-F16", &rows, row, row / 2).case(s, n, move |d| {
            let x = d.values(F32, ne)?;
            d.b.node_with_output(CopyOp::Cpy, &[Some(x)], OutputSpec { dtype: F16, ne }).map(drop)
        }),
        pass("CONT", "F32", &format!("{heads} heads of {head} by {n}, permuted"), row, row).case(s, n, move |d| {
            let x = d.values(F32, [head, n, heads, 1])?;
            let nb = [4, 4 * head * n, 4 * head, 4 * head * n * heads];
            let permuted = d.b.view(x, TensorDesc::strided(F32, [head, heads, n, 1], nb)?, 0)?;
            d.b.node(CopyOp::Cont, &[Some(permuted)]).map(drop)
        }),
    ];
    for (name, mode) in [("ROPE", RopeMode::Normal), ("ROPE_NEOX", RopeMode::Neox)] {
        cases.push(pass(name, "F32", &format!("{heads} heads of {head} by {n}"), row, row).case(s, n, move |d| {
            let x = d.values(F32, [head, heads, n, 1])?;
            let positions = d.leaf(I32, [n, 1, 1, 1], Content::Indices((0..n).collect()))?;
            d.b.node(Rope::new(mode, head as u32), &[Some(x), Some(positions)]).map(drop)
        }));
    }
    let kv = if n == 1 { context } else { prompt };
    let scores = 4 * kv * n * heads;
    let shape = format!("{kv} by {n}, {heads} heads");
    cases.push(pass("SOFT_MAX", "F32", &shape, scores + 2 * kv * n, scores).case(s, n, move |d| {
        let x = d.values(F32, [kv, n, heads, 1])?;
        let mask = d.leaf(F16, [kv, n, 1, 1], Content::Mask)?;
        d.b.node(SoftMax { scale: 0.1, max_bias: 0.0 }, &[Some(x), Some(mask)]).map(drop)
    }));
    for t in [F32, F16, Q4_0, Q6_K] {
        let shape = format!("{n} rows of {width}");
        cases.push(pass("GET_ROWS", t.name(), &shape, bytes(t, width * n), row).case(s, n, move |d| {
            // Every other row, because token ids do not select consecutive rows of the embedding.
            let table = d.values(t, [width, 2 * n, 1, 1])?;
            let ids = d.leaf(I32, [n, 1, 1, 1], Content::Indices((0..n).map(|i| 2 * i).collect()))?;
            d.b.node(Rows::GetRows, &[Some(table), Some(ids)]).map(drop)
        }));
    }
    let kv_width = kv_heads * head;
    for t in [F16, Q8_0] {
        let shape = format!("{n} rows of {kv_width}");
        let written = bytes(t, kv_width * n);
        cases.push(pass("SET_ROWS", t.name(), &shape, 4 * kv_width * n, written).case(s, n, move |d| {
            let b = d.values(F32, [kv_width, n, 1, 1])?;
            let ids = d.leaf(I64, [n, 1, 1, 1], Content::Indices((0..n).collect()))?;
            let cache = d.values(t, [kv_width, n, 1, 1])?;
            let dst = d.b.view(cache, TensorDesc::contiguous(t, [kv_width, n, 1, 1])?, 0)?;
            d.b.node_into(Rows::SetRows, &[Some(b), Some(ids), Some(cache)], dst).map(drop)
        }));
    }
    cases
}

//! What is timed: ops on the shapes of an 8B llama (width 4096, 32 heads over 8 of k and v, heads of 128, ff 14336).
//!
//! A case is a graph of equal nodes. Where a model would find its data in memory, each node has data of its own, so much
//! in all that no cache holds it ([`Sizes::cold`]); where a model has it at hand from the node before, there is little.

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
use fanout::tensor::DType::{self, BF16, F16, F32, I32, I64, Q4_0, Q6_K, Q8_0};
use fanout::tensor::{Capability, TensorDesc};

mod content;

pub use content::fill;

/// What a peak is a peak of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// f32 products added to f32 sums.
    F32,
    /// bf16 products added to f32 sums.
    Bf16,
    /// 8-bit products added to 32-bit sums.
    Int8,
}

/// The types of weights: plain types, then blocks.
fn weights() -> Vec<DType> {
    let mut types: Vec<_> = DType::with_capability(Capability::Convert).collect();
    types.sort_by_key(|t| t.is_block());
    types
}

/// Bytes that the second level of any cache holds, and most nodes of a case whose data lies there.
const HOT_BYTES: usize = 1 << 20;
const HOT_NODES: usize = 32;

/// Experts of a MUL_MAT_ID, and how many a token uses.
const EXPERTS: usize = 8;
const USED: usize = 2;

/// How large cases are.
pub struct Sizes {
    /// Rows and columns of weights.
    pub width: usize,
    /// Rows and columns of an expert.
    pub expert: usize,
    pub ff: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head: usize,
    /// Positions of a cache.
    pub context: usize,
    /// Tokens of a prompt.
    pub prompt: usize,
    /// Bytes of data that no cache holds.
    pub cold: usize,
}

impl Sizes {
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

    /// As small as can be: to see that everything runs.
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

/// What a leaf is filled with.
pub enum Content {
    /// Random values of deviation 1, in the tensor's type.
    Values,
    /// These indices.
    Indices(Vec<usize>),
    /// As a causal mask of F16 has it: 0 up to the last position that each query sees, then -inf.
    Mask,
}

/// A graph in the making.
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

/// Adds the nodes that work on one set of data.
type Build = Box<dyn Fn(&mut Draft) -> Result<(), BuildError>>;

/// A graph of equal nodes, and what each must do at least.
pub struct Case {
    pub op: &'static str,
    pub dtype: String,
    pub shape: String,
    /// Bytes read, if from memory, and written.
    pub read: usize,
    pub written: usize,
    /// Multiplications and additions of products.
    pub ops: usize,
    /// The kind of products.
    pub kind: Kind,
    /// Whether the data comes from memory.
    pub cold: bool,
    /// Sets of data in the graph.
    sets: usize,
    build: Build,
}

impl Case {
    /// A name to filter by.
    pub fn name(&self) -> String {
        // With a space at the end too: `by 1 ` is not `by 128`.
        format!("{} {} {} ", self.op, self.dtype, self.shape)
    }

    /// A graph with all sets of data.
    pub fn draft(&self) -> Result<Draft, BuildError> {
        self.draft_of(self.sets)
    }

    /// A graph with one set of data.
    pub fn single(&self) -> Result<Draft, BuildError> {
        self.draft_of(1)
    }

    fn draft_of(&self, sets: usize) -> Result<Draft, BuildError> {
        let mut draft = Draft::default();
        for _ in 0..sets {
            (self.build)(&mut draft)?;
        }
        Ok(draft)
    }
}

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
    cases
}

fn bytes(dtype: DType, elements: usize) -> usize {
    elements / dtype.block_len() * dtype.block_bytes()
}

/// The products that weights of a type are multiplied by.
fn kind(weights: DType) -> Kind {
    match weights {
        F32 | F16 => Kind::F32,
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
        // So many columns take so long that reading the rows is nothing beside it.
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
    // One token reads the experts it uses, and each node the next ones; many tokens read them all.
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

/// The last `n` of `kv` positions attend to all before them.
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
            // A cache holds the heads of one position after the other.
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

/// What a case that only passes over its data reads and writes.
struct Pass {
    op: &'static str,
    dtype: String,
    shape: String,
    read: usize,
    written: usize,
}

impl Pass {
    /// For `n` tokens: of many the data does not stay in a cache, of one it does.
    fn case(self, s: &Sizes, n: usize, build: impl Fn(&mut Draft) -> Result<(), BuildError> + 'static) -> Case {
        let Pass { op, dtype, shape, read, written } = self;
        let (cold, all) = (n > 1, read + written);
        let sets = if cold { s.cold.div_ceil(all) } else { (HOT_BYTES / all).clamp(1, HOT_NODES) };
        Case { op, dtype, shape, read, written, ops: 0, kind: Kind::F32, cold, sets, build: Box::new(build) }
    }
}

/// Ops that only pass over their data, for `n` tokens.
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
            // Every other row: a vocabulary's are not read one after the other.
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

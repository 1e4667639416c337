//! Decoding clients: a synthetic language model, and a session that computes one token after the other.

use super::wire_graph::WireGraph;
use crate::session::Session;
use fanout::graph::{BuildError, Builder, Graph, TensorId};
use fanout::ops::binary::Binary;
use fanout::ops::flash_attn::FlashAttn;
use fanout::ops::glu::{Glu, GluKind};
use fanout::ops::mul_mat::MulMat;
use fanout::ops::norm::Norm;
use fanout::ops::rope::{Rope, RopeMode};
use fanout::ops::rows::Rows;
use fanout::tensor::{DType, TensorDesc};
use std::io::{Error, Result};
use std::time::{Duration, Instant};

/// Channels of an attention head.
const HEAD: usize = 64;

/// Sizes of a model of q4_0 weights.
#[derive(Clone, Copy)]
pub(crate) struct Model {
    hidden: usize,
    layers: usize,
    feed_forward: usize,
    vocabulary: usize,
    /// Heads of keys and values.
    kv_heads: usize,
    /// Positions in the cache, all of which a token attends to.
    context: usize,
}

/// The sizes of Llama 3.2 1B: 695 MB of weights.
pub(crate) const ONE_B: Model =
    Model { hidden: 2048, layers: 16, feed_forward: 8192, vocabulary: 128_256, kv_heads: 8, context: 512 };

/// A quarter of its layers, and a small vocabulary.
pub(crate) const QUARTER: Model = Model { layers: 4, vocabulary: 8192, ..ONE_B };

/// A token of 0.2 to 0.3 ms.
pub(crate) const TINY: Model =
    Model { hidden: 256, layers: 4, feed_forward: 1024, vocabulary: 8192, kv_heads: 2, context: 256 };

/// A model of which a server holds seventeen.
pub(crate) const SHARED: Model =
    Model { hidden: 1024, layers: 4, feed_forward: 4096, vocabulary: 4096, kv_heads: 4, context: 256 };

/// The graph of a token, and what its client needs of it.
struct TokenGraph {
    graph: Graph,
    weights: Vec<TensorId>,
    /// F32 leaves: the input, and the factors of the norms.
    factors: Vec<TensorId>,
    logits: TensorId,
}

/// Builds a [`TokenGraph`].
struct TokenBuilder {
    b: Builder,
    weights: Vec<TensorId>,
    factors: Vec<TensorId>,
}

type Built<T> = std::result::Result<T, BuildError>;

impl TokenBuilder {
    /// The product of a new weight with `x`.
    fn product(&mut self, rows: usize, x: TensorId) -> Built<TensorId> {
        let columns = self.b.tensor(x).map_or(0, |x| x.desc.ne()[0]);
        let weight = self.b.leaf(DType::Q4_0, [columns, rows, 1, 1])?;
        self.weights.push(weight);
        self.b.node(MulMat::PLAIN, &[Some(weight), Some(x)])
    }

    fn norm(&mut self, x: TensorId, hidden: usize) -> Built<TensorId> {
        let factor = self.b.leaf(DType::F32, [hidden, 1, 1, 1])?;
        self.factors.push(factor);
        let normed = self.b.node(Norm::RmsNorm { eps: 1e-5 }, &[Some(x)])?;
        self.b.node(Binary::Mul, &[Some(normed), Some(factor)])
    }

    fn view(&mut self, of: TensorId, describe: impl FnOnce(&TensorDesc) -> TensorDesc) -> Built<TensorId> {
        let desc = self.b.tensor(of).map(|of| describe(&of.desc)).ok_or(BuildError::Tensor("an unknown tensor"))?;
        self.b.view(of, desc, 0)
    }

    fn reshape(&mut self, of: TensorId, ne: [usize; 4]) -> Built<TensorId> {
        self.view(of, |of| of.reshaped(ne).unwrap())
    }

    /// A cache after `row` was written into it, as FLASH_ATTN_EXT reads it.
    fn cache(&mut self, model: &Model, row: TensorId, position: TensorId) -> Built<TensorId> {
        let width = HEAD * model.kv_heads;
        let cache = self.b.leaf(DType::F16, [width, model.context, 1, 1])?;
        let written = self.view(cache, TensorDesc::clone)?;
        self.b.node_into(Rows::SetRows, &[Some(row), Some(position), Some(cache)], written)?;
        let ne = [HEAD, model.context, model.kv_heads, 1];
        let (head, row) = (2 * HEAD, 2 * width);
        self.view(cache, |_| TensorDesc::strided(DType::F16, ne, [2, row, head, row * model.context]).unwrap())
    }
}

impl Model {
    fn token_graph(&self) -> Built<TokenGraph> {
        let heads = self.hidden / HEAD;
        let mut t = TokenBuilder { b: Builder::with_separate_slots(), weights: Vec::new(), factors: Vec::new() };
        let mut x = t.b.leaf(DType::F32, [self.hidden, 1, 1, 1])?;
        t.factors.push(x);
        let angle = t.b.leaf(DType::I32, [1, 1, 1, 1])?;
        let position = t.b.leaf(DType::I64, [1, 1, 1, 1])?;
        let mask = t.b.leaf(DType::F16, [self.context, 1, 1, 1])?;
        let rope = Rope::new(RopeMode::Normal, HEAD as u32);
        let attention = FlashAttn {
            scale: (HEAD as f32).sqrt().recip(),
            max_bias: 0.0,
            softcap: 0.0,
            f32_accumulation: false,
            n_kv_max: 0,
        };
        for _ in 0..self.layers {
            let normed = t.norm(x, self.hidden)?;
            let width = HEAD * self.kv_heads;
            let (q, k, v) = (t.product(self.hidden, normed)?, t.product(width, normed)?, t.product(width, normed)?);
            let q = t.reshape(q, [HEAD, heads, 1, 1])?;
            let q = t.b.node(rope, &[Some(q), Some(angle)])?;
            let q = t.view(q, |q| q.permuted([0, 2, 1, 3]).unwrap())?;
            let k = t.reshape(k, [HEAD, self.kv_heads, 1, 1])?;
            let k = t.b.node(rope, &[Some(k), Some(angle)])?;
            let k = t.reshape(k, [width, 1, 1, 1])?;
            let (k, v) = (t.cache(self, k, position)?, t.cache(self, v, position)?);
            let attended = t.b.node(attention, &[Some(q), Some(k), Some(v), Some(mask)])?;
            let attended = t.reshape(attended, [self.hidden, 1, 1, 1])?;
            let attended = t.product(self.hidden, attended)?;
            x = t.b.node(Binary::Add, &[Some(attended), Some(x)])?;
            let normed = t.norm(x, self.hidden)?;
            let (gate, up) = (t.product(self.feed_forward, normed)?, t.product(self.feed_forward, normed)?);
            let glu = Glu { kind: GluKind::Swiglu, swapped: false };
            let gated = t.b.node(glu, &[Some(gate), Some(up)])?;
            let down = t.product(self.hidden, gated)?;
            x = t.b.node(Binary::Add, &[Some(down), Some(x)])?;
        }
        let normed = t.norm(x, self.hidden)?;
        let logits = t.product(self.vocabulary, normed)?;
        Ok(TokenGraph { graph: t.b.build(), weights: t.weights, factors: t.factors, logits })
    }
}

/// `bytes` bytes of q4_0: a scale of 0.01, and codes that repeat.
pub(crate) fn q4_0(bytes: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(26);
    let mut blocks: Vec<u8> = (0..18 * 257).map(|_| rng.u8(..)).collect();
    blocks.chunks_exact_mut(18).for_each(|block| block[..2].copy_from_slice(&[0x1f, 0x21]));
    blocks.into_iter().cycle().take(bytes).collect()
}

/// Times of tokens.
#[derive(Clone, Copy)]
pub(crate) struct TokenTimes {
    pub(crate) median: Duration,
    pub(crate) slowest: Duration,
}

/// A session that decodes: per token, one GRAPH_COMPUTE and one GET_TENSOR of the logits.
pub(crate) struct Decoder {
    session: Session,
    token: Vec<u8>,
}

impl Decoder {
    /// Uploads a model.
    pub(crate) fn new(mut session: Session, model: &Model) -> Result<Decoder> {
        let token = model.token_graph().map_err(Error::other)?;
        let wire = WireGraph::new(&token.graph, |size| session.alloc_or_fail(size))?;
        let bytes_of = |id| token.graph.tensor(id).map_or(0, |tensor| tensor.desc.extent());
        let longest = token.weights.iter().map(|&id| bytes_of(id)).max().unwrap_or(0);
        let weights = q4_0(longest);
        for &id in &token.weights {
            session.send(&wire.write(id, &weights[..bytes_of(id)]))?;
        }
        for &id in &token.factors {
            session.send(&wire.write(id, &1f32.to_le_bytes().repeat(bytes_of(id) / 4)))?;
        }
        session.synchronise()?;
        let mut message = wire.compute()?;
        message.extend(wire.read(token.logits, bytes_of(token.logits) as u64));
        Ok(Decoder { session, token: message })
    }

    /// Computes a token; returns its time.
    pub(crate) fn token(&mut self) -> Result<Duration> {
        let since = Instant::now();
        self.session.send(&self.token)?;
        self.session.read_reply()?;
        Ok(since.elapsed())
    }

    /// Computes tokens for `time`, at least `at_least`, which is above 0.
    pub(crate) fn tokens(&mut self, time: Duration, at_least: usize) -> Result<TokenTimes> {
        let (since, mut times) = (Instant::now(), Vec::new());
        while since.elapsed() < time || times.len() < at_least {
            times.push(self.token()?);
        }
        times.sort_unstable();
        Ok(TokenTimes { median: times[times.len() / 2], slowest: times[times.len() - 1] })
    }
}

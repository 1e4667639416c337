//! The ops of DeepSeek V4: hyper-connections, which mix `hc` parallel residual streams, and the lightning indexer, which
//! scores the cells of a KV cache for sparse attention.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::{DType, TensorDesc};

/// Streams of DSV4_HC_COMB.
pub const STREAMS: usize = 4;

/// Elements of a token in the mixes of DSV4_HC_COMB: two vectors of streams, then a matrix.
const MIXES: usize = (2 + STREAMS) * STREAMS;

/// Most iterations of DSV4_HC_COMB.
const MAX_ITERATIONS: i32 = 4096;

/// An op of DeepSeek V4. `T` is the number of tokens; sources and destinations are F32 unless stated otherwise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Dsv4 {
    /// `dst[c, t, b] = Σ_h max(q[:, h, t, b] · k[:, 0, c, b], 0) weights[h, t, 0, b] + mask[c, t, 0, b % mB]`.
    ///
    /// q `[E, heads, T, B]`, k `[E, 1, KV, B]` of any type that converts to F32, weights `[heads, T, 1, B]`, mask F16
    /// `[KV, T, 1, mB]`, B a multiple of mB; dst `[KV, T, 1, B]`. All rows are dense.
    LightningIndexer,
    /// The matrix that mixes the streams: Sinkhorn normalisation of a softmax.
    ///
    /// mixes `[24, T]`, scale a vector of at least 3, base `[24]`; dst `[4, 4, T]`. With `m[d, s]` for `s` in `0..4` from the
    /// elements from 8 on, `mixes scale[2] + base`: softmax over d, plus eps; then the sums over s become 1, and
    /// `iterations - 1` times those over d and those over s. Sums are taken plus eps.
    HcComb {
        /// Added to each weight and each sum.
        eps: f32,
        /// Normalisations, 1 to 4096. Models use 20; the bound keeps the phases of a run few.
        iterations: u32,
    },
    /// `dst[e, t] = scale Σ_h x[e, h, t] w`: the input of a layer from the streams.
    ///
    /// x `[E, hc, T]`; weights `[hc, T]`, or gated `[E, hc, T]`, with `w = sigmoid(weights[e, h, t])`; dst `[E, T]`.
    HcPre {
        /// Factor on the sums.
        scale: f32,
        /// Whether the weights are gates of each element.
        gated: bool,
    },
    /// `dst[e, d, t] = x[e, t] post[d, t] + Σ_s residual[e, s, t] comb[d, s, t]`: the streams after a layer.
    ///
    /// x `[E, T]`, residual `[E, hc, T]`, post `[hc, T]`, optionally comb `[hc, hc, T]`, without which stream d keeps
    /// `residual[e, d, t]`; dst `[E, hc, T]`.
    HcPost,
}

impl OpFamily for Dsv4 {
    fn code(&self) -> OpCode {
        match self {
            Dsv4::LightningIndexer => OpCode::LightningIndexer,
            Dsv4::HcComb { .. } => OpCode::Dsv4HcComb,
            Dsv4::HcPre { .. } => OpCode::Dsv4HcPre,
            Dsv4::HcPost => OpCode::Dsv4HcPost,
        }
    }

    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        match code {
            OpCode::LightningIndexer => Ok(Dsv4::LightningIndexer),
            OpCode::Dsv4HcComb => match params.int(1) {
                n @ 1..=MAX_ITERATIONS => Ok(Dsv4::HcComb { eps: params.float(0), iterations: n as u32 }),
                got => Err(ParamError::new(code, 1, "iterations", got, "1 to 4096")),
            },
            OpCode::Dsv4HcPre => Ok(Dsv4::HcPre { scale: params.float(0), gated: params.int(1) != 0 }),
            _ => Ok(Dsv4::HcPost),
        }
    }

    fn encode(&self) -> OpParams {
        match *self {
            Dsv4::LightningIndexer | Dsv4::HcPost => OpParams::default(),
            Dsv4::HcComb { eps, iterations } => OpParams::default().with_float(0, eps).with_int(1, iterations as i32),
            Dsv4::HcPre { scale, gated } => OpParams::default().with_float(0, scale).with_int(1, i32::from(gated)),
        }
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        let first = srcs.required(0)?.ne();
        let ne = match self {
            Dsv4::LightningIndexer => [srcs.required(1)?.ne()[2], first[2], 1, first[3]],
            Dsv4::HcComb { .. } => [STREAMS, STREAMS, first[1], 1],
            Dsv4::HcPre { .. } => [first[0], first[2], 1, 1],
            Dsv4::HcPost => srcs.required(1)?.ne(),
        };
        Ok(OutputSpec { dtype: DType::F32, ne })
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        node.expect_dst(self.infer(&node.srcs)?)?;
        match *self {
            Dsv4::LightningIndexer => check_indexer(node),
            Dsv4::HcComb { .. } => check_comb(node),
            Dsv4::HcPre { gated, .. } => check_pre(node, gated),
            Dsv4::HcPost => check_post(node),
        }
    }

    fn in_place(&self, _: usize) -> bool {
        false
    }
}

fn check_indexer(node: &NodeView<'_>) -> Result<(), ShapeError> {
    let (q, k, weights, mask) = (node.src(0)?, node.src(1)?, node.src(2)?, node.src(3)?);
    ensure!(node, q.dtype() == DType::F32 && weights.dtype() == DType::F32, "q and the weights are F32");
    ensure!(node, mask.dtype() == DType::F16, "the mask is F16");
    let ([width, heads, tokens, batch], [k_width, one, cells, k_batch]) = (q.ne(), k.ne());
    ensure!(node, [k_width, one, k_batch] == [width, 1, batch], "k is [E, 1, KV, B] with q's E and B");
    ensure!(node, weights.ne() == [heads, tokens, 1, batch], "one weight for each head of each token");
    ensure!(node, mask.ne()[..3] == [cells, tokens, 1], "a mask for each token");
    ensure!(node, mask.ne()[3] > 0 && batch.is_multiple_of(mask.ne()[3]), "the batches are a multiple of the mask's");
    ensure!(node, [q, k, weights, mask, node.dst].iter().all(|t| t.rows_dense()), "rows are dense");
    Ok(())
}

fn check_f32(node: &NodeView<'_>, sources: &[&TensorDesc]) -> Result<(), ShapeError> {
    ensure!(node, sources.iter().all(|t| t.dtype() == DType::F32), "sources are F32");
    Ok(())
}

fn check_comb(node: &NodeView<'_>) -> Result<(), ShapeError> {
    let (mixes, scale, base) = (node.src(0)?, node.src(1)?, node.src(2)?);
    check_f32(node, &[mixes, scale, base])?;
    ensure!(node, mixes.ne() == [MIXES, mixes.ne()[1], 1, 1], "mixes are [24, tokens]");
    ensure!(node, scale.ne()[0] >= 3 && scale.ne()[1..] == [1, 1, 1], "scale is a vector of at least 3");
    ensure!(node, base.ne() == [MIXES, 1, 1, 1], "base is a vector of 24");
    Ok(())
}

fn check_pre(node: &NodeView<'_>, gated: bool) -> Result<(), ShapeError> {
    let (x, weights) = (node.src(0)?, node.src(1)?);
    check_f32(node, &[x, weights])?;
    let [_, streams, tokens, one] = x.ne();
    ensure!(node, streams > 0 && one == 1, "x is [E, streams, tokens]");
    if gated {
        ensure!(node, weights.ne() == x.ne(), "one gate for each element");
    } else {
        ensure!(node, weights.ne() == [streams, tokens, 1, 1], "one weight for each stream of each token");
    }
    Ok(())
}

fn check_post(node: &NodeView<'_>) -> Result<(), ShapeError> {
    let (x, residual, post) = (node.src(0)?, node.src(1)?, node.src(2)?);
    check_f32(node, &[x, residual, post])?;
    let [width, streams, tokens, one] = residual.ne();
    ensure!(node, streams > 0 && one == 1, "residual is [E, streams, tokens]");
    ensure!(node, x.ne() == [width, tokens, 1, 1], "x is [E, tokens]");
    ensure!(node, post.ne() == [streams, tokens, 1, 1], "one factor for each stream of each token");
    if let Some(comb) = node.srcs.get(3) {
        check_f32(node, &[comb])?;
        ensure!(node, comb.ne() == [streams, streams, tokens, 1], "comb is [streams, streams, tokens]");
    }
    Ok(())
}

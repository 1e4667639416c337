//! Linear attention: recurrences in which each head has a matrix of state, which decays and takes up `value keyᵀ` of each token.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::{DType, TensorDesc};

/// The recurrences of linear attention. `S` is the size of a head, `H` the number of heads, `T` of tokens.
///
/// Sources are F32. For all ops but GATED_DELTA_NET, the vectors of the tokens are `[S, H, T]` and contiguous; the state is
/// contiguous with `S S H` elements for each of its ne1 sequences, which are equally long runs of tokens; dst F32
/// `[S H, T + S sequences]` has the output `[S, H, T]`, then the states after the last tokens, which are copies of the sources' if T is 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LinearAttn {
    /// RWKV 6. Sources: k, v, r, bonus `[S, H]`, decay, state.
    ///
    /// For the state's element of key i and value j (j fastest), `kv = k_i v_j`: `out_j += r_i (kv bonus_i + state)`, then
    /// `state = state decay_i + kv`.
    RwkvWkv6,
    /// RWKV 7. Sources: r, decay, k, v, a, b, state.
    ///
    /// For the state's element of value i and key j (j fastest), with `s_i = Σ_j a_j state`:
    /// `state = state decay_j + v_i k_j + s_i b_j`, then `out_i = Σ_j state r_j`.
    RwkvWkv7,
    /// Gated linear attention. Sources: k, v, q, gate, state, with the state's layout of RWKV 6.
    ///
    /// `state = state gate_i + k_i v_j`, then `out_j += state (q_i scale)`.
    Gated {
        /// Factor on the queries.
        scale: f32,
    },
    /// The gated delta rule. Sources: q `[S, Hq, T, Bq]`, k `[S, Hk, T, Bk]`, v `[S, H, T, B]`, all with dense rows; gate
    /// `[1 or S, H, T, B]`, beta `[1, H, T, B]` and state `[S, S, H, B]`, contiguous.
    ///
    /// Head h uses heads `h % Hq` and `h % Hk`, sequence b sequences `b / (B / Bq)` and `b / (B / Bk)`. For the state's element
    /// of value j and key i (i fastest): `state *= exp(gate_i)`, `d_j = (v_j - Σ_i state k_i) beta`, `state += d_j k_i`,
    /// `out_j = Σ_i state q_i / sqrt(S)`.
    ///
    /// dst F32 `[S H, T B + snapshots S B]`: the output `[S, H, T, B]`, then blocks of states. Block s has the states s tokens
    /// before the end; blocks from max(T, 1) on keep the values that they had.
    DeltaNet {
        /// Blocks of states in the destination, at least 1.
        snapshots: u32,
    },
}

impl LinearAttn {
    /// Position of the state.
    pub fn state(self) -> usize {
        match self {
            LinearAttn::RwkvWkv6 | LinearAttn::DeltaNet { .. } => 5,
            LinearAttn::RwkvWkv7 => 6,
            LinearAttn::Gated { .. } => 4,
        }
    }

    /// Position of the values.
    pub fn values(self) -> usize {
        match self {
            LinearAttn::RwkvWkv6 | LinearAttn::Gated { .. } => 1,
            LinearAttn::RwkvWkv7 => 3,
            LinearAttn::DeltaNet { .. } => 2,
        }
    }
}

impl OpFamily for LinearAttn {
    fn code(&self) -> OpCode {
        match self {
            LinearAttn::RwkvWkv6 => OpCode::RwkvWkv6,
            LinearAttn::RwkvWkv7 => OpCode::RwkvWkv7,
            LinearAttn::Gated { .. } => OpCode::GatedLinearAttn,
            LinearAttn::DeltaNet { .. } => OpCode::GatedDeltaNet,
        }
    }

    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        match code {
            OpCode::RwkvWkv6 => Ok(LinearAttn::RwkvWkv6),
            OpCode::RwkvWkv7 => Ok(LinearAttn::RwkvWkv7),
            OpCode::GatedLinearAttn => Ok(LinearAttn::Gated { scale: params.float(0) }),
            // Clients before 7.0 know no snapshots: the word is 0 there.
            _ => match params.int(0).max(i32::from(params.int(0) == 0)) {
                snapshots @ 1.. => Ok(LinearAttn::DeltaNet { snapshots: snapshots as u32 }),
                got => Err(ParamError::new(code, 0, "snapshots", got, "at least 1")),
            },
        }
    }

    fn encode(&self) -> OpParams {
        match *self {
            LinearAttn::RwkvWkv6 | LinearAttn::RwkvWkv7 => OpParams::default(),
            LinearAttn::Gated { scale } => OpParams::default().with_float(0, scale),
            LinearAttn::DeltaNet { snapshots } => OpParams::default().with_int(0, snapshots as i32),
        }
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        let ([size, heads, tokens, batch], state) =
            (srcs.required(self.values())?.ne(), srcs.required(self.state())?.ne());
        let (blocks, sequences) = match *self {
            LinearAttn::DeltaNet { snapshots } => (snapshots as usize, batch),
            _ => (1, state[1]),
        };
        let states = blocks.checked_mul(size).and_then(|n| n.checked_mul(sequences));
        let rows = tokens.checked_mul(batch).zip(states).and_then(|(tokens, states)| tokens.checked_add(states));
        match size.checked_mul(heads).zip(rows) {
            Some((width, rows)) => Ok(OutputSpec { dtype: DType::F32, ne: [width, rows, 1, 1] }),
            None => Err(srcs.rule_error("the number of elements of dst fits 64 bits")),
        }
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        node.expect_dst(self.infer(&node.srcs)?)?;
        ensure!(node, node.dst.is_contiguous(), "dst is contiguous");
        match self {
            LinearAttn::DeltaNet { .. } => check_delta_net(node),
            _ => self.check_tokens(node),
        }
    }

    fn in_place(&self, _: usize) -> bool {
        false
    }

    fn keeps_rest(&self) -> bool {
        matches!(self, LinearAttn::DeltaNet { snapshots: 2.. })
    }

    /// Without tokens, the states are copied.
    fn may_be_empty(&self, i: usize) -> bool {
        i != self.state()
    }

    fn batch(&self, node: &NodeView<'_>) -> usize {
        node.srcs.get(self.values()).map_or(0, |v| v.ne()[2].saturating_mul(v.ne()[3]))
    }
}

impl LinearAttn {
    /// The rule of the ops whose tokens lie one after another.
    fn check_tokens(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let (v, state) = (node.src(self.values())?, node.src(self.state())?);
        let [size, heads, tokens, one] = v.ne();
        ensure!(node, one == 1, "the vectors have three dimensions");
        for i in 0..self.state() {
            let t = node.src(i)?;
            ensure!(node, t.is_contiguous(), "sources are contiguous");
            if *self == LinearAttn::RwkvWkv6 && i == 3 {
                ensure!(node, size.checked_mul(heads) == Some(t.elements()), "one bonus for each element of a token");
            } else {
                ensure!(node, t.same_shape(v), "the vectors of the tokens have one shape");
            }
        }
        ensure!(node, state.is_contiguous(), "the state is contiguous");
        let sequences = state.ne()[1];
        let elements = [size, size, heads, sequences].iter().try_fold(1usize, |n, &m| n.checked_mul(m));
        ensure!(node, elements == Some(state.elements()), "the state has a matrix for each head of each sequence");
        ensure!(node, sequences > 0 && tokens.is_multiple_of(sequences), "sequences are equally many tokens");
        Ok(())
    }
}

fn check_delta_net(node: &NodeView<'_>) -> Result<(), ShapeError> {
    let sources: [&TensorDesc; 6] =
        [node.src(0)?, node.src(1)?, node.src(2)?, node.src(3)?, node.src(4)?, node.src(5)?];
    ensure!(node, sources.iter().all(|t| t.dtype() == DType::F32), "sources are F32");
    let [q, k, v, gate, beta, state] = sources;
    ensure!(node, q.rows_dense() && k.rows_dense() && v.rows_dense(), "rows of q, k and v are dense");
    ensure!(
        node,
        gate.is_contiguous() && beta.is_contiguous() && state.is_contiguous(),
        "gate, beta and state are contiguous"
    );
    let [size, heads, tokens, batch] = v.ne();
    for t in [q, k] {
        ensure!(node, [t.ne()[0], t.ne()[2]] == [size, tokens], "q and k have v's head size and tokens");
        ensure!(node, t.ne()[1] > 0, "q and k have a head");
        ensure!(node, t.ne()[3] > 0 && batch.is_multiple_of(t.ne()[3]), "v's sequences are a multiple of q's and k's");
    }
    let outer = [heads, tokens, batch];
    ensure!(node, gate.ne()[0] == 1 || gate.ne()[0] == size, "the gate has one element or one per key");
    ensure!(node, gate.ne()[1..] == outer, "one gate for each head and token");
    ensure!(node, beta.ne()[0] == 1 && beta.ne()[1..] == outer, "one beta for each head and token");
    ensure!(node, state.ne() == [size, size, heads, batch], "the state has a matrix for each head of each sequence");
    Ok(())
}

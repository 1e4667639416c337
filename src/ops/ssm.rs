//! SSM_CONV and SSM_SCAN: the causal convolution and the selective scan of state-space models (Mamba-1 and Mamba-2).

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::{DType, TensorDesc};

/// The ops of state-space models. `T` tokens of each of `S` sequences; a recurrent state of `n` elements per channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ssm {
    /// `dst[c, t, s] = Σ_j x[t + j, c, s] w[j, c]`: a causal convolution of each channel along its tokens.
    ///
    /// x `[d_conv - 1 + T, channels, S]`, whose rows are packed; w `[d_conv, channels]`, contiguous; dst F32
    /// `[channels, T, S]` with dense rows.
    Conv,
    /// A scan over the tokens, with a state that decays by a factor that depends on the token.
    ///
    /// Sources: states `[n, hd, H, slots]`, x `[hd, H, T, S]`, dt `[H, T, S]`, a `[1, H]` (Mamba-2) or `[n, H]` (Mamba-1), b and
    /// c `[n, G, T, S]`, ids I32 `[S]`. H is a multiple of G. Sequence s starts with the state in slot `ids[s]`.
    ///
    /// With `d = softplus(dt)` and the group `g = h / (H / G)` of head h, for each token:
    /// `state = state * exp(d a) + b[n, g] * (x d)` and `y = Σ_n state * c[n, g]`.
    ///
    /// dst F32 is a vector: y `[hd, H, T, S]`, then `snapshots` blocks of states `[n, hd, H, S]`. Block j has the states j tokens
    /// before the end; blocks from max(T, 1) on keep the values that they had. If T is 0, block 0 is a copy of the starting states.
    Scan {
        /// Blocks of states in the destination, at least 1; exactly 1 for Mamba-1.
        snapshots: u32,
    },
}

impl Ssm {
    /// Position of the states of SSM_SCAN.
    pub const STATES: usize = 0;
    /// Position of the input of SSM_SCAN.
    pub const X: usize = 1;
    /// Position of the step sizes before softplus.
    pub const DT: usize = 2;
    /// Position of the logarithmic decay.
    pub const A: usize = 3;
    /// Position of the factors of the input.
    pub const B: usize = 4;
    /// Position of the factors of the output.
    pub const C: usize = 5;
    /// Position of the slots in which the sequences start.
    pub const IDS: usize = 6;
}

impl OpFamily for Ssm {
    fn code(&self) -> OpCode {
        match self {
            Ssm::Conv => OpCode::SsmConv,
            Ssm::Scan { .. } => OpCode::SsmScan,
        }
    }

    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        if code == OpCode::SsmConv {
            return Ok(Ssm::Conv);
        }
        // Clients before 7.0 know no snapshots: the word is 0 there.
        match params.int(0).max(i32::from(params.int(0) == 0)) {
            snapshots @ 1.. => Ok(Ssm::Scan { snapshots: snapshots as u32 }),
            got => Err(ParamError::new(code, 0, "snapshots", got, "at least 1")),
        }
    }

    fn encode(&self) -> OpParams {
        match *self {
            Ssm::Conv => OpParams::default(),
            Ssm::Scan { snapshots } => OpParams::default().with_int(0, snapshots as i32),
        }
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        match *self {
            Ssm::Conv => {
                let ([window, channels, sequences, _], d_conv) = (srcs.required(0)?.ne(), srcs.required(1)?.ne()[0]);
                let tokens = (window + 1)
                    .checked_sub(d_conv)
                    .ok_or_else(|| srcs.rule_error("rows of x have at least d_conv - 1 elements"))?;
                Ok(OutputSpec { dtype: DType::F32, ne: [channels, tokens, sequences, 1] })
            }
            Ssm::Scan { snapshots } => {
                let (states, x) = (srcs.required(Self::STATES)?, srcs.required(Self::X)?);
                let [n, hd, heads, _] = states.ne();
                let factors = [snapshots as usize, n, hd, heads, x.ne()[3]];
                let n = factors.iter().try_fold(1usize, |product, &n| product.checked_mul(n));
                let n = n.and_then(|n| n.checked_add(x.elements()));
                let n = n.ok_or_else(|| srcs.rule_error("the number of elements of dst fits 64 bits"))?;
                Ok(OutputSpec { dtype: DType::F32, ne: [n, 1, 1, 1] })
            }
        }
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        node.expect_dst(self.infer(&node.srcs)?)?;
        match *self {
            Ssm::Conv => check_conv(node),
            Ssm::Scan { snapshots } => check_scan(node, snapshots),
        }
    }

    fn in_place(&self, _: usize) -> bool {
        false
    }

    fn keeps_rest(&self) -> bool {
        matches!(self, Ssm::Scan { snapshots: 2.. })
    }

    /// A convolution with a window without elements is 0. A scan of no tokens copies the states.
    fn may_be_empty(&self, i: usize) -> bool {
        match self {
            Ssm::Conv => true,
            Ssm::Scan { .. } => matches!(i, Self::X | Self::DT | Self::B | Self::C),
        }
    }

    fn batch(&self, node: &NodeView<'_>) -> usize {
        match self {
            Ssm::Conv => node.dst.rows(),
            Ssm::Scan { .. } => node.srcs.get(Self::X).map_or(0, |x| x.ne()[2].saturating_mul(x.ne()[3])),
        }
    }
}

/// Whether dimensions 0 and 1 are packed, so that they are one row in memory.
fn has_packed_rows(t: &TensorDesc) -> bool {
    t.rows_dense() && (t.ne()[1] == 1 || t.nb()[1] == t.row_bytes())
}

fn check_conv(node: &NodeView<'_>) -> Result<(), ShapeError> {
    let (x, w) = (node.src(0)?, node.src(1)?);
    ensure!(node, x.ne()[3] == 1 && w.ne()[2..] == [1, 1], "x has three dimensions, w two");
    ensure!(node, x.ne()[1] == w.ne()[1], "x and w have equally many channels");
    ensure!(node, has_packed_rows(x), "rows of x are packed");
    ensure!(node, w.is_contiguous(), "w is contiguous");
    ensure!(node, node.dst.rows_dense(), "rows of dst are dense");
    Ok(())
}

fn check_scan(node: &NodeView<'_>, snapshots: u32) -> Result<(), ShapeError> {
    let [states, x, dt, a, b, c, ids] = [
        node.src(Ssm::STATES)?,
        node.src(Ssm::X)?,
        node.src(Ssm::DT)?,
        node.src(Ssm::A)?,
        node.src(Ssm::B)?,
        node.src(Ssm::C)?,
        node.src(Ssm::IDS)?,
    ];
    ensure!(node, node.dst.is_contiguous(), "dst is contiguous");
    ensure!(
        node,
        states.is_contiguous() && dt.is_contiguous() && a.is_contiguous(),
        "the states, dt and a are contiguous"
    );
    ensure!(node, has_packed_rows(x) && has_packed_rows(b) && has_packed_rows(c), "rows of x, b and c are packed");
    let ([n, hd, heads, _], [_, _, tokens, sequences]) = (states.ne(), x.ne());
    ensure!(node, x.ne()[..2] == [hd, heads], "x has the heads of the states");
    ensure!(node, dt.ne() == [heads, tokens, sequences, 1], "dt is [heads, tokens, sequences]");
    ensure!(node, b.ne() == c.ne(), "b and c have one shape");
    let [b_n, groups, b_tokens, b_sequences] = b.ne();
    ensure!(
        node,
        [b_n, b_tokens, b_sequences] == [n, tokens, sequences],
        "b and c have the elements of a state, the tokens and the sequences of x"
    );
    ensure!(node, groups > 0 && heads.is_multiple_of(groups), "the heads are a multiple of b's groups");
    ensure!(node, a.ne() == [1, heads, 1, 1] || a.ne() == [n, heads, 1, 1], "a is [1, heads] or [n, heads]");
    ensure!(node, a.ne()[0] == 1 || snapshots == 1, "one block of states where each element has its own decay");
    ensure!(node, ids.dtype() == DType::I32, "ids are I32");
    ensure!(node, ids.ne() == [sequences, 1, 1, 1], "one id for each sequence");
    Ok(())
}

//! RWKV_WKV6, RWKV_WKV7, GATED_LINEAR_ATTN, GATED_DELTA_NET: see [`super::recurrence`]. A state is the matrix of a head. Where the
//! value is its fast dimension (`by_key`), a unit is a group of values: sums over keys do not cross vector lanes. Where the key
//! is (`by_value`), a unit is the row of a value.

mod by_key;
mod by_value;

use super::recurrence::{Recurrence, cost};
use super::{Kernel, unsupported_types};
use crate::cpu::memory::View;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::linear_attn::LinearAttn;
use crate::tensor::DType::F32;
use crate::tensor::TensorDesc;

pub(super) fn select(op: LinearAttn, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let is_f32 = |i| node.srcs.get(i).is_some_and(|t: &TensorDesc| t.dtype() == F32);
    if !(0..=op.state()).all(is_f32) || node.dst.dtype() != F32 {
        return Err(unsupported_types(node));
    }
    let shape = HeadShape::new(op, node).ok_or_else(|| unsupported_types(node))?;
    Ok(match op {
        LinearAttn::RwkvWkv6 => by_key::kernel(shape, by_key::Rule::Wkv6),
        LinearAttn::Gated { scale } => by_key::kernel(shape, by_key::Rule::Gated { scale }),
        LinearAttn::RwkvWkv7 => by_value::wkv7(shape),
        LinearAttn::DeltaNet { snapshots } => by_value::delta_net(shape, snapshots as usize),
    })
}

/// The counts of a node, and its contiguous operands.
#[derive(Clone, Copy)]
struct HeadShape {
    /// Keys and values of a head.
    size: usize,
    heads: usize,
    /// Tokens of a sequence.
    tokens: usize,
    sequences: usize,
    /// The state and the destination as vectors.
    state: TensorDesc,
    dst: TensorDesc,
}

impl HeadShape {
    fn new(op: LinearAttn, node: &NodeView<'_>) -> Option<HeadShape> {
        let (v, state) = (node.srcs.get(op.values())?, node.srcs.get(op.state())?);
        let [size, heads, tokens, batch] = v.ne();
        let (tokens, sequences) = match op {
            LinearAttn::DeltaNet { .. } => (tokens, batch),
            _ => (tokens / state.ne()[1].max(1), state.ne()[1]),
        };
        let vector = |t: &TensorDesc| t.reshaped([t.elements(), 1, 1, 1]).ok();
        Some(HeadShape { size, heads, tokens, sequences, state: vector(state)?, dst: vector(node.dst)? })
    }

    /// Whether the node computes nothing.
    fn is_empty(&self) -> bool {
        self.dst.is_empty() || self.state.is_empty()
    }

    /// The recurrence, with units of `unit_floats`.
    fn recurrence(&self, units: usize, unit_floats: usize) -> Recurrence {
        Recurrence::new(self.heads.saturating_mul(self.sequences), units, unit_floats, self.tokens)
    }

    fn cost(&self) -> usize {
        cost(self.state.elements(), self.tokens)
    }

    /// Position in the state source of a head's matrix. `state` counts the heads of all sequences.
    fn in_state(&self, state: usize) -> usize {
        state * self.size * self.size
    }

    /// Position in dst of the head's matrix in block `block` of the states.
    fn in_block(&self, block: usize, state: usize) -> usize {
        let states = self.heads * self.sequences;
        self.size * (self.tokens * states + (block * states + state) * self.size)
    }

    /// Position in dst of the head's output for token `t` of its sequence.
    fn in_output(&self, state: usize, t: usize) -> usize {
        let (head, sequence) = (state % self.heads, state / self.heads);
        self.size * (head + self.heads * (t + self.tokens * sequence))
    }
}

/// The vector of a head for token `t` of its sequence, of sources whose tokens lie one after another.
fn vector<'b>(source: &View<'b>, shape: &HeadShape, state: usize, t: usize, buffer: &'b mut [f32]) -> &'b [f32] {
    let (head, sequence) = (state % shape.heads, state / shape.heads);
    source.fetch([0, head, t + shape.tokens * sequence, 0], buffer)
}

//! Encodes a batch as the bytes of its graph's input tensors: token ids, positions, cache rows and causal mask.

use super::{Batch, Inputs};
use fanout::graph::TensorId;

impl Inputs {
    /// The bytes of every input, for a graph in which attention reads `seen` positions.
    pub fn of(&self, batch: &Batch<'_>, seen: usize, flash_attn: bool) -> [(TensorId, Vec<u8>); 4] {
        let positions = batch.start..batch.start + batch.tokens.len();
        [
            (self.tokens, batch.tokens.iter().flat_map(|token| token.to_le_bytes()).collect()),
            (self.positions, positions.clone().flat_map(|position| (position as i32).to_le_bytes()).collect()),
            (self.rows, positions.clone().flat_map(|position| (position as i64).to_le_bytes()).collect()),
            (self.mask, if flash_attn { mask(positions, seen, HIDDEN_F16) } else { mask(positions, seen, HIDDEN_F32) }),
        ]
    }
}

/// The mask value of a hidden position: minus infinity.
const HIDDEN_F32: [u8; 4] = f32::NEG_INFINITY.to_le_bytes();
const HIDDEN_F16: [u8; 2] = 0xfc00u16.to_le_bytes();

/// The causal mask, one row of `seen` entries per token: 0 up to the token's own position, `hidden` after it.
fn mask<const WIDTH: usize>(positions: std::ops::Range<usize>, seen: usize, hidden: [u8; WIDTH]) -> Vec<u8> {
    let row = |position: usize| (0..seen).flat_map(move |other| if other <= position { [0; WIDTH] } else { hidden });
    positions.flat_map(row).collect()
}

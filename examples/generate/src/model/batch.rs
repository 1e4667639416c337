//! What a batch writes into the inputs of its graph.

use super::{Batch, Inputs};
use fanout::graph::TensorId;

impl Inputs {
    /// The bytes of all of them, for a graph whose attention sees so many positions.
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

/// Minus infinity.
const HIDDEN_F32: [u8; 4] = f32::NEG_INFINITY.to_le_bytes();
const HIDDEN_F16: [u8; 2] = 0xfc00u16.to_le_bytes();

/// 0 for each position that a token attends to, its own and those before; `hidden` for the others.
fn mask<const WIDTH: usize>(positions: std::ops::Range<usize>, seen: usize, hidden: [u8; WIDTH]) -> Vec<u8> {
    let row = |position: usize| (0..seen).flat_map(move |other| if other <= position { [0; WIDTH] } else { hidden });
    positions.flat_map(row).collect()
}

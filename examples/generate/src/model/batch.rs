//! Encodes a batch as the bytes of its graph's input tensors.

use super::Inputs;
use fanout::graph::TensorId;
use fanout::sched::batching::{BatchOutput, TokenBatch};

/// The uniform number by which the token after an output is drawn.
pub type UniformFn<'a> = &'a dyn Fn(&BatchOutput) -> f32;

impl Inputs {
    /// The bytes of every input, for these outputs of the batch, or none.
    pub fn of(&self, batch: &TokenBatch, outputs: &[BatchOutput], uniform: UniformFn<'_>) -> Vec<(TensorId, Vec<u8>)> {
        let integers = |values: &[u32]| values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let floats = |values: &[u32]| values.iter().flat_map(|&value| (value as f32).to_le_bytes()).collect();
        let mut all = vec![
            (self.tokens, integers(&batch.tokens)),
            (self.positions, integers(&batch.positions)),
            (self.cells.tags, floats(&batch.tags)),
            (self.cells.positions, floats(&batch.positions)),
            (self.cells.cells, batch.cells.iter().flat_map(|&cell| u64::from(cell).to_le_bytes()).collect()),
        ];
        if let Some(id) = self.outputs {
            all.push((id, outputs.iter().flat_map(|output| (output.index as u32).to_le_bytes()).collect()));
        }
        if let Some(id) = self.uniform {
            all.push((id, outputs.iter().flat_map(|output| uniform(output).to_le_bytes()).collect()));
        }
        all
    }
}

//! The model's graph: llama, qwen2, qwen3 and qwen3moe, op by op as llama.cpp builds them, for a batch of one sequence.
//!
//! Shapes are written `[ne3, ne2, ne1, ne0]`, fastest last. A batch of `tokens` tokens flows through the blocks as
//! `[tokens, width]`. Its keys and values go into the cache first; attention then sees all positions from 0 up to a padded
//! number, of which a mask hides what is not the past. So a graph depends on these two numbers and on which logits are wanted,
//! and most tokens repeat the one before.

mod batch;
mod cache;
mod graph_context;
mod layers;
mod moe;

pub use cache::{CacheOptions, KV_PAD, LayerCache};

use crate::hparams::HParams;
use fanout::device::Region;
use fanout::graph::{BuildError, TensorId};
use fanout::ops::rows::Rows;
use fanout::sched::Task;
use fanout::tensor::{DIMS, DType, DescError, TensorDesc};
use graph_context::GraphContext;
use layers::BlockContext;
use std::collections::HashMap;
use thiserror::Error;

/// A model's tensors, and where they lie.
#[derive(Clone, Debug)]
pub struct Model {
    /// What the file says of it.
    pub hparams: HParams,
    /// By name. A tensor that several devices have is called `<name>@<device>` there, see [`copy_name`].
    pub weights: HashMap<String, StoredTensor>,
    /// By block.
    pub cache: Vec<LayerCache>,
    /// How the cache is kept.
    pub cache_options: CacheOptions,
}

/// A tensor that lies on a device from run to run.
#[derive(Clone, Debug)]
pub struct StoredTensor {
    /// Type and shape.
    pub desc: TensorDesc,
    /// Number of the device.
    pub device: usize,
    /// Where; `None` while it is only being planned.
    pub region: Option<Region>,
}

/// Some tokens of the sequence.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Their numbers.
    pub tokens: &'a [u32],
    /// The position of the first one.
    pub start: usize,
}

/// What a graph depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GraphShape {
    /// Tokens of the batch, not 0.
    pub tokens: usize,
    /// Positions that attention sees, see [`CacheOptions::seen`].
    pub kv_positions: usize,
    /// Which tokens' logits are wanted.
    pub outputs: Outputs,
}

/// The tokens whose logits are wanted.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Outputs {
    /// None: the batch only fills the cache.
    None,
    /// The last one's.
    Last,
    /// All.
    All,
}

/// A graph for batches of one shape.
#[derive(Clone, Debug)]
pub struct ModelGraph {
    /// The graph.
    pub task: Task,
    /// What the host writes before each run.
    pub inputs: Inputs,
    /// Logits F32 `[outputs, vocabulary]`, where some are wanted.
    pub logits: Option<TensorId>,
}

/// The inputs of a graph.
#[derive(Clone, Copy, Debug)]
pub struct Inputs {
    /// I32 `[tokens]`.
    pub tokens: TensorId,
    /// I32 `[tokens]`.
    pub positions: TensorId,
    /// Rows of the cache, I64 `[tokens]`.
    pub rows: TensorId,
    /// F32 or F16 `[tokens, seen]`; nobody reads it where the only block's attention is not wanted.
    pub mask: TensorId,
}

/// Why there is no graph.
#[derive(Debug, Error)]
pub enum ModelError {
    /// The file lacks a tensor.
    #[error("the model has no tensor {name:?}, which its architecture needs: is the file complete?")]
    Missing {
        /// Its name.
        name: String,
    },
    /// A tensor that does not fit the file's other figures.
    #[error("tensor {name:?} has the shape {got:?} where the model's figures ask for {want:?}")]
    Shape {
        /// Its name.
        name: String,
        /// Its element counts.
        got: [usize; DIMS],
        /// What they should be.
        want: [usize; DIMS],
    },
    /// A cache that cannot be.
    #[error("{0}")]
    Cache(String),
    /// A shape beyond all bounds.
    #[error(transparent)]
    Desc(#[from] DescError),
    /// A node that breaks its op's rules: figures of the file that contradict each other.
    #[error("{node}: {source}")]
    Build {
        /// Its name.
        node: String,
        /// What is wrong.
        source: BuildError,
    },
}

/// The name of a device's own copy of a tensor.
pub fn copy_name(name: &str, device: usize) -> String {
    format!("{name}@{device}")
}

impl Model {
    /// The graph for batches of a shape.
    ///
    /// # Errors
    /// When tensors are missing or do not fit.
    pub fn graph(&self, shape: GraphShape) -> Result<ModelGraph, ModelError> {
        let hyper = &self.hparams;
        let mut net = GraphContext::new(self);
        let line = [shape.tokens, 1, 1, 1];
        let mask_type = if self.cache_options.flash_attn { DType::F16 } else { DType::F32 };
        let inputs = Inputs {
            tokens: net.input("inp_tokens", DType::I32, line)?,
            positions: net.input("inp_pos", DType::I32, line)?,
            rows: net.input("inp_rows", DType::I64, line)?,
            mask: net.input("inp_mask", mask_type, [shape.kv_positions, shape.tokens, 1, 1])?,
        };
        let common =
            BlockContext { model: self, shape, positions: inputs.positions, rows: inputs.rows, mask: inputs.mask };

        let table = net.weight("token_embd.weight", &[hyper.width, hyper.vocab])?;
        let mut x = net.node("inp_embd", Rows::GetRows, &[table, inputs.tokens])?;
        let last = shape.outputs == Outputs::Last && shape.tokens > 1;
        for i in 0..hyper.layers {
            let end = i + 1 == hyper.layers;
            if end && shape.outputs == Outputs::None {
                common.write_cache(&mut net, i, x)?;
            } else {
                x = common.block(&mut net, i, x, end && last)?;
            }
        }
        let logits = if shape.outputs == Outputs::None { None } else { Some(self.head(&mut net, x)?) };
        Ok(ModelGraph { task: net.build()?, inputs, logits })
    }

    /// From the last block's result to logits.
    fn head(&self, net: &mut GraphContext<'_>, x: TensorId) -> Result<TensorId, ModelError> {
        net.block(None);
        let x = net.norm("result_norm", x, "output_norm.weight")?;
        // Without a matrix of its own the output is tied to the embedding.
        let tied = !self.weights.contains_key("output.weight");
        let stem = if tied { "token_embd" } else { "output" };
        let logits = net.linear("result_output", stem, x, self.hparams.vocab)?;
        net.output(logits)?;
        Ok(logits)
    }

    /// Divisors of the frequencies for a block, on its device where it has them.
    fn rope_factors(&self, layer: usize) -> Option<(String, &StoredTensor)> {
        let name = "rope_freqs.weight";
        let own = copy_name(name, self.cache.get(layer)?.keys.device);
        [own, name.to_owned()].into_iter().find_map(|name| self.weights.get(&name).map(|stored| (name, stored)))
    }
}

#[cfg(test)]
pub(crate) mod tests;

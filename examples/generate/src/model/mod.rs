//! Builds the compute graph of a model (llama, qwen2, qwen3 or qwen3moe), op by op as llama.cpp does, for a batch of one
//! sequence.
//!
//! Shapes are written in the order of `ne`, fastest dimension first. A batch flows through the blocks as `[width, tokens]`.
//! Each block writes the batch's keys and values into the KV cache first. Attention then reads all positions from 0 up to a
//! padded number, and a causal mask hides later positions. A graph therefore depends only on the number of tokens, the padded
//! number of positions and the requested logits ([`GraphShape`]), so most decoded tokens reuse the graph of the previous token.
//!
//! `graph_context.rs` wraps the task builder, `layers.rs` builds a transformer block, `moe.rs` its mixture of experts,
//! `cache.rs` describes the KV cache, and `batch.rs` encodes the inputs.

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

/// A model's hyperparameters and tensors, with the placement of the tensors.
#[derive(Clone, Debug)]
pub struct Model {
    /// Hyperparameters from the file.
    pub hparams: HParams,
    /// Weights by name. A tensor that is copied to several groups is named `<name>@<group>`, see [`copy_name`].
    pub weights: HashMap<String, StoredTensor>,
    /// The KV cache, by block.
    pub cache: Vec<LayerCache>,
    /// Size, type and layout of the KV cache.
    pub cache_options: CacheOptions,
}

/// A tensor that stays on a device across runs: a weight or a part of the KV cache.
#[derive(Clone, Debug)]
pub struct StoredTensor {
    /// Type and shape.
    pub desc: TensorDesc,
    /// Index of the tensor group: one device, or several that each have a part.
    pub group: usize,
    /// By rank of the group: memory of the part; `None` until it is allocated.
    pub regions: Vec<Option<Region>>,
}

/// Consecutive tokens of the sequence.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Token ids.
    pub tokens: &'a [u32],
    /// Position of the first token.
    pub start: usize,
}

/// The key of a graph: batches with the same shape share one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GraphShape {
    /// Tokens of the batch, not 0.
    pub tokens: usize,
    /// Positions that attention reads, padded: see [`CacheOptions::padded_positions`].
    pub kv_positions: usize,
    /// The tokens for which logits are computed.
    pub outputs: Outputs,
}

/// The tokens of a batch for which logits are computed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Outputs {
    /// No token: the batch only fills the KV cache.
    None,
    /// The last token.
    Last,
    /// All tokens.
    All,
}

/// A graph for batches of one shape.
#[derive(Clone, Debug)]
pub struct ModelGraph {
    /// The graph.
    pub task: Task,
    /// Tensors that the host writes before each run.
    pub inputs: Inputs,
    /// Logits, F32 `[vocab, outputs]`; `None` for [`Outputs::None`].
    pub logits: Option<TensorId>,
}

/// The input tensors of a graph.
#[derive(Clone, Copy, Debug)]
pub struct Inputs {
    /// Token ids, I32 `[tokens]`.
    pub tokens: TensorId,
    /// Positions, I32 `[tokens]`.
    pub positions: TensorId,
    /// Rows of the KV cache to write, I64 `[tokens]`.
    pub rows: TensorId,
    /// Causal mask, `[kv_positions, tokens]`, F16 for flash attention and else F32. Unused by the graph of a one-block model
    /// without outputs.
    pub mask: TensorId,
}

/// The graph cannot be built.
#[derive(Debug, Error)]
pub enum ModelError {
    /// The file lacks a tensor.
    #[error("the model has no tensor {name:?}, which its architecture needs: is the file complete?")]
    Missing {
        /// Name of the tensor.
        name: String,
    },
    /// The shape of a tensor contradicts the hyperparameters.
    #[error("tensor {name:?} has the shape {got:?}, but the file's hyperparameters require {want:?}")]
    Shape {
        /// Name of the tensor.
        name: String,
        /// Element counts in the file, fastest dimension first.
        got: [usize; DIMS],
        /// Element counts that the hyperparameters require.
        want: [usize; DIMS],
    },
    /// The KV cache has an invalid layout for the model, or is too small for a batch.
    #[error("{0}")]
    Cache(String),
    /// A shape with a size that overflows, or with rows that are not whole blocks.
    #[error(transparent)]
    Desc(#[from] DescError),
    /// A node violates its op's shape rule: hyperparameters of the file contradict each other.
    #[error("{node}: {source}")]
    Build {
        /// Name of the node.
        node: String,
        /// The violated rule.
        source: BuildError,
    },
}

/// The name of the copy of a tensor on a tensor group.
pub fn copy_name(name: &str, group: usize) -> String {
    format!("{name}@{group}")
}

/// The names of a block's keys and values in the KV cache.
pub fn cache_names(layer: usize) -> [String; 2] {
    [KEYS_PREFIX, VALUES_PREFIX].map(|prefix| format!("{prefix}{layer}"))
}

const KEYS_PREFIX: &str = "cache_k_l";
const VALUES_PREFIX: &str = "cache_v_l";

impl Model {
    /// The weight or cache tensor with a name of the graph.
    pub fn stored(&self, name: &str) -> Option<&StoredTensor> {
        self.weights.get(name).or_else(|| {
            let (is_keys, layer) = match name.strip_prefix(KEYS_PREFIX) {
                Some(layer) => (true, layer),
                None => (false, name.strip_prefix(VALUES_PREFIX)?),
            };
            let cache = self.cache.get(layer.parse::<usize>().ok()?)?;
            Some(if is_keys { &cache.keys } else { &cache.values })
        })
    }

    /// Builds the graph for batches of `shape`. Devices in it are the numbers of tensor groups.
    ///
    /// # Errors
    /// A missing tensor, or a tensor shape that contradicts the hyperparameters.
    pub fn graph(&self, shape: GraphShape) -> Result<ModelGraph, ModelError> {
        let hparams = &self.hparams;
        let mut ctx = GraphContext::new(self);
        let line = [shape.tokens, 1, 1, 1];
        let mask_type = if self.cache_options.flash_attn { DType::F16 } else { DType::F32 };
        let inputs = Inputs {
            tokens: ctx.input("inp_tokens", DType::I32, line)?,
            positions: ctx.input("inp_pos", DType::I32, line)?,
            rows: ctx.input("inp_rows", DType::I64, line)?,
            mask: ctx.input("inp_mask", mask_type, [shape.kv_positions, shape.tokens, 1, 1])?,
        };
        let common =
            BlockContext { model: self, shape, positions: inputs.positions, rows: inputs.rows, mask: inputs.mask };

        let table = ctx.weight("token_embd.weight", &[hparams.width, hparams.vocab])?;
        let mut x = ctx.node("inp_embd", Rows::GetRows, &[table, inputs.tokens])?;
        let last = shape.outputs == Outputs::Last && shape.tokens > 1;
        for i in 0..hparams.layers {
            let end = i + 1 == hparams.layers;
            if end && shape.outputs == Outputs::None {
                common.write_cache(&mut ctx, i, x)?;
            } else {
                x = common.block(&mut ctx, i, x, end && last)?;
            }
        }
        let logits = if shape.outputs == Outputs::None { None } else { Some(self.head(&mut ctx, x)?) };
        Ok(ModelGraph { task: ctx.build()?, inputs, logits })
    }

    /// The output head: final norm and projection of the last block's result to logits.
    fn head(&self, ctx: &mut GraphContext<'_>, x: TensorId) -> Result<TensorId, ModelError> {
        ctx.block(None);
        let x = ctx.norm("result_norm", x, "output_norm.weight")?;
        // A file without `output.weight` ties the output matrix to the embedding.
        let tied = !self.weights.contains_key("output.weight");
        let stem = if tied { "token_embd" } else { "output" };
        let logits = ctx.linear("result_output", stem, x, self.hparams.vocab)?;
        ctx.output(logits)?;
        Ok(logits)
    }

    /// The RoPE frequency factors for a block: the copy on the block's device if there is one, else the original.
    fn rope_factors(&self, layer: usize) -> Option<(String, &StoredTensor)> {
        let name = "rope_freqs.weight";
        let own = copy_name(name, self.cache.get(layer)?.keys.group);
        [own, name.to_owned()].into_iter().find_map(|name| self.weights.get(&name).map(|stored| (name, stored)))
    }
}

#[cfg(test)]
pub(crate) mod tests;

//! Builds the compute graph of a model (one of [`crate::hparams::Arch`]), op by op as llama.cpp does, for a batch of the tokens of
//! one or more sequences.
//!
//! Shapes are written in the order of `ne`, fastest dimension first. A batch flows through the blocks as `[width, tokens]`.
//! Each block writes the batch's keys and values into the KV cache first. Attention then reads all cells from 0 up to a
//! padded number, and a mask hides the cells of other sequences and of later positions. The devices make the mask themselves
//! ([`fanout::sched::batching::mask`]). A graph therefore depends only on the number of tokens, the padded
//! number of cells and the number of logits ([`GraphShape`]), so most decoded tokens reuse the graph of the previous token.
//!
//! `graph_context.rs` wraps the task builder, `layers.rs` builds a transformer block, `moe.rs` its mixture of experts,
//! `cache.rs` describes the KV cache, and `batch.rs` encodes the inputs.

mod batch;
mod cache;
mod graph_context;
mod layers;
mod moe;

pub use batch::UniformFn;
pub use cache::{CacheOptions, CellVectors, KV_PAD, LayerCache, SequenceCache, cache_names};

use crate::hparams::{HParams, Variant};
use fanout::device::Region;
use fanout::graph::{BuildError, TensorId};
use fanout::ops::rows::Rows;
use fanout::ops::unary::{Unary, UnaryKind};
use fanout::sched::Task;
use fanout::sched::batching::mask::TokenInputs;
use fanout::sched::sampling::{LogitsLayout, SampledTokens, Sampling};
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
    /// By group of sequences: its KV cache. All have the same tensors.
    pub caches: Vec<SequenceCache>,
    /// Number, size, type and layout of the KV caches.
    pub cache_options: CacheOptions,
    /// How tokens are sampled.
    pub sampling: Sampling,
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

/// The key of a graph: batches with the same shape share one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GraphShape {
    /// Tokens of the batch, not 0.
    pub tokens: usize,
    /// Cells of the KV cache that attention reads, padded: see [`CacheOptions::padded_cells`].
    pub cells: usize,
    /// Number of tokens for which logits are computed. 0: the batch only fills the KV cache.
    pub outputs: usize,
}

/// A graph for batches of one shape.
#[derive(Clone, Debug)]
pub struct ModelGraph {
    /// The graph.
    pub task: Task,
    /// Tensors that the host writes before each run.
    pub inputs: Inputs,
    /// `None` without outputs.
    pub results: Option<Results>,
}

/// What a graph computes for each of its outputs.
#[derive(Clone, Copy, Debug)]
pub struct Results {
    /// Logits, F32 `[vocab, outputs]`.
    pub logits: TensorId,
    /// The tokens that were sampled from them.
    pub sampled: SampledTokens,
}

/// The input tensors of a graph.
#[derive(Clone, Copy, Debug)]
pub struct Inputs {
    /// Token ids, I32 `[tokens]`.
    pub tokens: TensorId,
    /// Positions, I32 `[tokens]`.
    pub positions: TensorId,
    /// Tags and positions, as the mask needs them, and cells.
    pub cells: TokenInputs,
    /// The tokens for which logits are computed, I32 `[outputs]`, ascending; `None` for none and for all.
    pub outputs: Option<TensorId>,
    /// The numbers by which tokens are drawn, F32 `[1, outputs]`; `None` without outputs, and for greedy sampling.
    pub uniform: Option<TensorId>,
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
    /// The KV cache has an invalid layout for the model, or too few cells for a batch.
    #[error("{0}")]
    Cache(String),
    /// A shape with a size that overflows, or with rows that are not whole blocks.
    #[error(transparent)]
    Desc(#[from] DescError),
    /// A node violates its op's shape rule: hyperparameters of the file contradict each other.
    #[error("{node}: {error}")]
    Build {
        /// Name of the node.
        node: String,
        /// The violated rule.
        error: BuildError,
    },
}

/// The frequency factors of the rotation, whatever the file calls them.
pub const ROPE_FACTORS: &str = "rope_freqs.weight";

/// The name of the copy of a tensor on a tensor group.
pub fn copy_name(name: &str, group: usize) -> String {
    format!("{name}@{group}")
}

impl Model {
    /// The weight with a name of the graph, or the tensor of the KV cache of a group of sequences.
    pub fn stored(&self, name: &str, sequence_group: usize) -> Option<&StoredTensor> {
        self.weights.get(name).or_else(|| self.caches.get(sequence_group)?.get(name))
    }

    /// Builds the graph for batches of `shape`. Devices in it are the numbers of tensor groups. It is the same for all groups of
    /// sequences.
    ///
    /// # Errors
    /// A missing tensor, or a tensor shape that contradicts the hyperparameters.
    pub fn graph(&self, shape: GraphShape) -> Result<ModelGraph, ModelError> {
        let hparams = &self.hparams;
        let mut ctx = GraphContext::new(self);
        let (line, row) = ([shape.tokens, 1, 1, 1], [1, shape.tokens, 1, 1]);
        let some = shape.outputs > 0 && shape.outputs < shape.tokens;
        let inputs = Inputs {
            tokens: ctx.input("inp_tokens", DType::I32, line)?,
            positions: ctx.input("inp_pos", DType::I32, line)?,
            cells: TokenInputs {
                tags: ctx.input("inp_tags", DType::F32, row)?,
                positions: ctx.input("inp_cell_pos", DType::F32, row)?,
                cells: ctx.input("inp_rows", DType::I64, line)?,
            },
            outputs: some.then(|| ctx.input("inp_out_ids", DType::I32, [shape.outputs, 1, 1, 1])).transpose()?,
            // An input of the sampler, which is built last.
            uniform: None,
        };
        let common = BlockContext { model: self, shape, inputs };

        let table = ctx.weight("token_embd.weight", &[hparams.width, hparams.vocab])?;
        let x = ctx.node("inp_embd", Rows::GetRows, &[table, inputs.tokens])?;
        let mut x = ctx.scaled("inp_scaled", x, hparams.variant.embedding_scale)?;
        for i in 0..hparams.layers {
            let end = i + 1 == hparams.layers;
            if end && shape.outputs == 0 {
                common.write_cache(&mut ctx, i, x)?;
            } else {
                x = common.block(&mut ctx, i, x, inputs.outputs.filter(|_| end))?;
            }
        }
        let results = if shape.outputs == 0 { None } else { Some(self.head(&mut ctx, x)?) };
        let inputs = Inputs { uniform: results.and_then(|results| results.sampled.uniform), ..inputs };
        Ok(ModelGraph { task: ctx.build()?, inputs, results })
    }

    /// The output head: final norm, projection of the last block's result to logits, and sampling.
    fn head(&self, ctx: &mut GraphContext<'_>, x: TensorId) -> Result<Results, ModelError> {
        ctx.block(None);
        let x = ctx.norm("result_norm", x, "output_norm.weight")?;
        // A file without `output.weight` ties the output matrix to the embedding.
        let tied = !self.weights.contains_key("output.weight");
        let stem = if tied { "token_embd" } else { "output" };
        let logits = ctx.linear("result_output", stem, x, self.hparams.vocab)?;
        let Variant { logit_scale, logit_cap, .. } = self.hparams.variant;
        let mut logits = ctx.scaled("result_scaled", logits, logit_scale)?;
        if let Some(cap) = logit_cap {
            let small = ctx.scaled("result_capped", logits, cap.recip())?;
            let capped = ctx.node("result_capped", Unary::Kind(UnaryKind::Tanh), &[small])?;
            logits = ctx.scaled("result_capped", capped, cap)?;
        }
        ctx.output(logits)?;
        let ranks = self.weights.get(&format!("{stem}.weight")).map_or(1, |weight| weight.regions.len());
        let layout = if ranks > 1 { LogitsLayout::SplitByVocabulary } else { LogitsLayout::Whole };
        Ok(Results { logits, sampled: ctx.sample(logits, &self.sampling, layout)? })
    }

    /// The RoPE frequency factors for a block: the copy on the block's device if there is one, else the original.
    fn rope_factors(&self, layer: usize) -> Option<(String, &StoredTensor)> {
        let name = ROPE_FACTORS;
        let own = copy_name(name, self.caches.first()?.layers.get(layer)?.keys.group);
        [own, name.to_owned()].into_iter().find_map(|name| self.weights.get(&name).map(|stored| (name, stored)))
    }
}

#[cfg(test)]
pub(crate) mod tests;

//! The graph builder of the model: a task builder that adds weights and nodes by llama.cpp's names.

use super::cache::cell_names;
use super::{Model, ModelError, StoredTensor};
use fanout::graph::{BuildError, TensorId};
use fanout::ops::binary::Binary;
use fanout::ops::mul_mat::MulMat;
use fanout::ops::norm::Norm;
use fanout::ops::unary::Unary;
use fanout::ops::{Op, OutputSpec};
use fanout::sched::batching::mask::{CellTensors, TokenInputs, mask, record_cells};
use fanout::sched::sampling::{LogitsLayout, SampledTokens, Sampling, add_sampler};
use fanout::sched::{Task, TaskBuilder};
use fanout::tensor::{DIMS, DType, TensorDesc};
use std::collections::HashMap;
use std::num::NonZeroU32;

/// A task under construction. Nodes and weights have llama.cpp's names; inside a block, callers omit the prefix `blk.N.`.
pub(super) struct GraphContext<'a> {
    b: TaskBuilder,
    model: &'a Model,
    /// Stored tensors that were already added to the task.
    stored_ids: HashMap<String, TensorId>,
    /// Prefix of the current block such as `blk.3.`; empty outside blocks.
    prefix: String,
    /// Tensor group of the most recent norm.
    group: Option<usize>,
    /// By tensor group: the writer of each cell of the KV cache, noted for this batch.
    cells: HashMap<usize, CellTensors>,
    /// By tensor group and sliding window: the masks that were needed.
    masks: HashMap<(usize, Option<NonZeroU32>), TensorId>,
}

impl<'a> GraphContext<'a> {
    pub(super) fn new(model: &'a Model) -> GraphContext<'a> {
        GraphContext {
            b: TaskBuilder::new(),
            model,
            stored_ids: HashMap::new(),
            prefix: String::new(),
            group: None,
            cells: HashMap::new(),
            masks: HashMap::new(),
        }
    }

    pub(super) fn block(&mut self, layer: Option<usize>) {
        self.prefix = layer.map_or_else(String::new, |i| format!("blk.{i}."));
    }

    pub(super) fn build(self) -> Result<Task, ModelError> {
        self.b.build().map_err(|error| ModelError::Build { node: "the graph".to_owned(), error })
    }

    pub(super) fn input(&mut self, name: &str, dtype: DType, ne: [usize; DIMS]) -> Result<TensorId, ModelError> {
        let input = self.b.input(name, dtype, ne);
        input.map_err(|error| ModelError::Build { node: name.to_owned(), error })
    }

    pub(super) fn output(&mut self, id: TensorId) -> Result<(), ModelError> {
        let output = self.b.output(id);
        output.map_err(|error| ModelError::Build { node: "an output".to_owned(), error })
    }

    /// A required weight, of shape `ne`.
    pub(super) fn weight(&mut self, name: &str, ne: &[usize]) -> Result<TensorId, ModelError> {
        let found = self.optional(name, ne)?;
        found.ok_or_else(|| ModelError::Missing { name: format!("{}{name}", self.prefix) })
    }

    /// An optional weight, of shape `ne` if it exists.
    pub(super) fn optional(&mut self, name: &str, ne: &[usize]) -> Result<Option<TensorId>, ModelError> {
        let name = format!("{}{name}", self.prefix);
        let Some(stored) = self.model.weights.get(&name) else { return Ok(None) };
        let mut want = [1; DIMS];
        want[..ne.len()].copy_from_slice(ne);
        if stored.desc.ne() != want {
            return Err(ModelError::Shape { name, got: stored.desc.ne(), want });
        }
        self.stored(name, stored).map(Some)
    }

    /// Adds a weight or cache tensor to the task, once.
    pub(super) fn stored(&mut self, name: String, stored: &StoredTensor) -> Result<TensorId, ModelError> {
        if let Some(&id) = self.stored_ids.get(&name) {
            return Ok(id);
        }
        let made = self.b.stored(name.clone(), stored.desc, stored.group, None);
        let id = made.map_err(|error| ModelError::Build { node: name.clone(), error })?;
        self.stored_ids.insert(name, id);
        Ok(id)
    }

    /// Adds the nodes that note on a tensor group the writers of the batch's cells, once.
    pub(super) fn record_cells(&mut self, group: usize, tokens: TokenInputs) -> Result<(), ModelError> {
        let vectors = self.model.caches.first().and_then(|cache| cache.cells.get(&group));
        let (Some(vectors), false) = (vectors, self.cells.contains_key(&group)) else { return Ok(()) };
        let [tags, positions] = cell_names(group);
        let cells = CellTensors {
            tags: self.stored(tags, &vectors.tags)?,
            positions: self.stored(positions, &vectors.positions)?,
        };
        record_cells(&mut self.b, cells, tokens, group).map_err(|error| self.build_error("cells", error))?;
        self.cells.insert(group, cells);
        Ok(())
    }

    /// The attention mask on a tensor group where the cells of the batch are noted: `[seen, tokens]`, F16 for flash attention and
    /// else F32.
    pub(super) fn mask(
        &mut self,
        group: usize,
        tokens: TokenInputs,
        seen: usize,
        window: Option<NonZeroU32>,
    ) -> Result<TensorId, ModelError> {
        if let Some(&mask) = self.masks.get(&(group, window)) {
            return Ok(mask);
        }
        let cells = self.cells.get(&group).copied();
        let cells = cells.ok_or_else(|| ModelError::Cache(format!("group {group} has no cells")))?;
        let dtype = if self.model.cache_options.flash_attn { DType::F16 } else { DType::F32 };
        let mask = mask(&mut self.b, cells, tokens, (seen, dtype), window, group);
        let mask = mask.map_err(|error| self.build_error("mask", error))?;
        self.masks.insert((group, window), mask);
        Ok(mask)
    }

    /// Adds the nodes that sample a token from each column of logits.
    pub(super) fn sample(
        &mut self,
        logits: TensorId,
        sampling: &Sampling,
        layout: LogitsLayout,
    ) -> Result<SampledTokens, ModelError> {
        let sampled = add_sampler(&mut self.b, logits, sampling, layout);
        sampled.map_err(|error| self.build_error("the sampler", error))
    }

    /// Adds a node; type and shape of the destination follow from the sources.
    pub(super) fn node(&mut self, name: &str, op: impl Into<Op>, srcs: &[TensorId]) -> Result<TensorId, ModelError> {
        let made = self.b.node(op, &present(srcs));
        self.name_node(name, made)
    }

    /// Adds a node with a contiguous destination of the given type and shape.
    pub(super) fn node_as(
        &mut self,
        name: &str,
        op: impl Into<Op>,
        srcs: &[TensorId],
        out: OutputSpec,
    ) -> Result<TensorId, ModelError> {
        let made = self.b.node_as(op, &present(srcs), out);
        self.name_node(name, made)
    }

    /// Adds a node that writes into an existing tensor, such as a KV cache.
    pub(super) fn node_onto(
        &mut self,
        name: &str,
        op: impl Into<Op>,
        srcs: &[TensorId],
        dst: TensorId,
    ) -> Result<TensorId, ModelError> {
        let made = self.b.node_onto(op, &present(srcs), dst);
        self.name_node(name, made)
    }

    pub(super) fn reshape(&mut self, of: TensorId, ne: [usize; DIMS]) -> Result<TensorId, ModelError> {
        let made = self.b.reshape(of, ne);
        self.check_view(made)
    }

    pub(super) fn permute(&mut self, of: TensorId, axes: [usize; DIMS]) -> Result<TensorId, ModelError> {
        let made = self.b.permute(of, axes);
        self.check_view(made)
    }

    pub(super) fn view(&mut self, of: TensorId, desc: TensorDesc, offset: usize) -> Result<TensorId, ModelError> {
        let made = self.b.view(of, desc, offset);
        self.check_view(made)
    }

    pub(super) fn desc(&self, id: TensorId) -> Result<TensorDesc, ModelError> {
        self.b.desc(id).map_err(|error| ModelError::Build { node: self.prefix.clone(), error })
    }

    /// RMS norm of each row, times a weight. Pinned to the group of the weight where the group changes.
    pub(super) fn norm(&mut self, name: &str, x: TensorId, weight: &str) -> Result<TensorId, ModelError> {
        let width = self.desc(x)?.ne()[0];
        let weight_id = self.weight(weight, &[width])?;
        let scaled = self.node("norm", Norm::RmsNorm { eps: self.model.hparams.rms_epsilon }, &[x])?;
        // RMS_NORM reads no weight, so the scheduler would leave it on the device of the previous block. The next device would
        // then need two copies: the norm's result, and x for the residual. Pinning the norm makes it one.
        let group = self.model.weights.get(&format!("{}{weight}", self.prefix)).map(|w| w.group);
        if self.group.is_some() && self.group != group {
            group.map_or(Ok(()), |group| self.b.pin(group)).map_err(|error| self.build_error("norm", error))?;
        }
        self.group = group;
        self.node(name, Binary::Mul, &[scaled, weight_id])
    }

    /// `x` times a factor.
    pub(super) fn scaled(&mut self, name: &str, x: TensorId, scale: f32) -> Result<TensorId, ModelError> {
        if scale == 1.0 { Ok(x) } else { self.node(name, Unary::Scale { scale, bias: 0.0 }, &[x]) }
    }

    /// The product `weight * x`, plus the bias if the model has one. Their names are `stem` with the suffix `.weight` or
    /// `.bias`; `out` is the number of the weight's rows.
    pub(super) fn linear(&mut self, name: &str, stem: &str, x: TensorId, out: usize) -> Result<TensorId, ModelError> {
        let width = self.desc(x)?.ne()[0];
        let weight = self.weight(&format!("{stem}.weight"), &[width, out])?;
        let y = self.node(name, MulMat::PLAIN, &[weight, x])?;
        match self.optional(&format!("{stem}.bias"), &[out])? {
            Some(bias) => self.node(name, Binary::Add, &[y, bias]),
            None => Ok(y),
        }
    }

    fn name_node(&mut self, name: &str, made: Result<TensorId, BuildError>) -> Result<TensorId, ModelError> {
        let id = made.map_err(|error| self.build_error(name, error))?;
        self.b.name(id, format!("{}{name}", self.prefix));
        Ok(id)
    }

    fn check_view(&self, made: Result<TensorId, BuildError>) -> Result<TensorId, ModelError> {
        made.map_err(|error| self.build_error("a view", error))
    }

    fn build_error(&self, name: &str, error: BuildError) -> ModelError {
        ModelError::Build { node: format!("{}{name}", self.prefix), error }
    }
}

fn present(srcs: &[TensorId]) -> Vec<Option<TensorId>> {
    srcs.iter().copied().map(Some).collect()
}

//! The inference engine: runs batches of tokens through fanout's scheduler and reads the tokens that follow.
//!
//! Graphs are planned once per shape and reused. Devices work on different batches at the same time (pipeline parallelism): on the
//! micro-batches of a long prompt, which are submitted ahead, and on the batches of different groups of sequences.

mod group_runner;

use crate::load;
use crate::model::{GraphShape, Model, ModelError};
use crate::report::GraphStats;
use fanout::device::{Device, DeviceError, MemoryBudget};
use fanout::sched::batching::{BatchOutput, CellError, SequenceGroup};
use fanout::sched::tensor_group::{TensorGroup, TensorSplit, TensorSplitError};
use fanout::sched::{CompareReporter, Options, Plan, SchedError};
use group_runner::{GroupRunner, ModelParts, apply_split};
use std::sync::Arc;
use thiserror::Error;

/// Running the model failed.
#[derive(Debug, Error)]
pub enum EngineError {
    /// The graph could not be built.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The graph could not be split over the devices of a group.
    #[error(transparent)]
    Split(#[from] TensorSplitError),
    /// The scheduler or a device failed.
    #[error(transparent)]
    Sched(#[from] SchedError),
    /// The results could not be read back.
    #[error("reading the results: {0}")]
    Read(DeviceError),
    /// The batch is empty.
    #[error("no tokens: a prompt has at least one")]
    NoTokens,
    /// A group of sequences has no cells left, or does not know the sequence.
    #[error(transparent)]
    Cells(#[from] CellError),
}

impl From<DeviceError> for EngineError {
    fn from(error: DeviceError) -> EngineError {
        EngineError::Read(error)
    }
}

impl EngineError {
    /// Whether a device lacks the memory for the model.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, EngineError::Sched(SchedError::NotEnoughMemory { .. }))
    }
}

/// Most tokens of prompts in a batch while other sequences decode, which wait for it.
const JOINING_TOKENS: usize = 64;

/// How an engine runs batches.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// Most tokens of a batch: longer prompts have several micro-batches.
    pub ubatch: usize,
    /// Pipeline depth: micro-batches of a prompt in flight at a time.
    pub depth: usize,
    /// Most sequences of a group.
    pub sequences: usize,
}

impl EngineOptions {
    /// The shapes of the largest batch and of one token of each sequence, at the end of the context.
    fn largest_shapes(&self, model: &Model) -> [GraphShape; 2] {
        let cells = model.cache_options.cells;
        let shape = |tokens: usize| {
            let tokens = tokens.clamp(1, cells.max(1));
            GraphShape { tokens, cells, outputs: self.sequences.clamp(1, tokens) }
        };
        [shape(self.ubatch.max(self.sequences)), shape(self.sequences)]
    }
}

/// A loaded model with, for each group of sequences, a scheduler and prepared graphs.
///
/// [`Engine::append`] and what belongs to it is for one sequence, the only one of the first group. [`Engine::start`] and
/// [`Engine::finish`] are for many.
pub struct Engine {
    parts: ModelParts,
    runners: Vec<GroupRunner>,
    /// Statistics of the graphs of a full micro-batch and of a single token.
    graph_stats: [GraphStats; 2],
}

/// A token that a device has sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub token: u32,
    /// Its probability in the distribution that it was drawn from. NaN: it was not drawn, because logits are invalid or, rarely, for
    /// rounding: see [`Engine::logits`].
    pub probability: f32,
}

/// A batch that was submitted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Started {
    /// Number of tokens: 0 if none waited, so that nothing was submitted.
    pub tokens: usize,
    /// Whether some of them are of a prompt that is longer than one token.
    pub prompt: bool,
}

/// Decides how the tensors of a model are split over the devices of each group.
///
/// # Errors
/// [`EngineError::Model`], [`EngineError::Split`].
pub fn split_model(model: &Model, groups: Vec<TensorGroup>) -> Result<TensorSplit, EngineError> {
    let token = GraphShape { tokens: 1, cells: model.cache_options.cells, outputs: 1 };
    Ok(TensorSplit::new(&model.graph(token)?.task, groups)?)
}

/// Admission check: verifies, before anything is loaded, that the devices have memory for the weights, the KV caches and the
/// arenas of the largest graphs.
///
/// # Errors
/// [`SchedError::NotEnoughMemory`], which lists required and free memory of all devices; otherwise as [`Engine::new`].
pub fn check_memory(
    (model, split): (&Model, &TensorSplit),
    devices: &[Arc<dyn Device>],
    options: EngineOptions,
) -> Result<(), EngineError> {
    let planning = Options::default().with_depth(options.depth);
    let runners = model.caches.len() as u64;
    // The graph of single tokens first: if even that does not fit, the error shows that the weights themselves are too large.
    for shape in options.largest_shapes(model).into_iter().rev() {
        let rank_task = apply_split((model, split), 0, devices, &model.graph(shape)?.task)?;
        let plan = Plan::new(Arc::clone(rank_task.task()), devices, &planning)?;
        let mut needs = plan.memory_requirements(devices)?;
        // The plan has the cache of one group of sequences; the others have the same.
        for (number, (needs, device)) in needs.iter_mut().zip(devices).enumerate() {
            let cache = load::cache_bytes(model, split, (number, &**device));
            needs.stored = needs.stored.saturating_add(cache.saturating_mul(runners - 1));
            needs.computed = needs.computed.saturating_mul(runners);
        }
        if needs.iter().any(|needs| needs.stored.saturating_add(needs.computed) > needs.free) {
            return Err(SchedError::NotEnoughMemory { needs }.into());
        }
    }
    Ok(())
}

impl Engine {
    /// Creates the engine of a loaded model, and reserves memory for its largest graphs, so that later runs allocate nothing.
    ///
    /// # Errors
    /// A graph that cannot be built, or a device without enough memory.
    pub fn new(
        (model, split): (Model, TensorSplit),
        devices: &[Arc<dyn Device>],
        budget: &Arc<MemoryBudget>,
        options: EngineOptions,
    ) -> Result<Engine, EngineError> {
        let parts = ModelParts { model, split, options };
        let mut graph_stats = [GraphStats::default(); 2];
        let mut runners = Vec::new();
        for number in 0..parts.model.caches.len() {
            let mut runner = GroupRunner::new(number, &parts, devices.to_vec(), budget)?;
            for (stats, shape) in graph_stats.iter_mut().zip(options.largest_shapes(&parts.model)) {
                *stats = runner.reserve(&parts, shape)?;
            }
            runners.push(runner);
        }
        Ok(Engine { parts, runners, graph_stats })
    }

    /// Appends tokens to the sequence and returns the token that follows, drawn by the number `uniform`. Up to `depth`
    /// micro-batches are in flight at once; `submitted` is called with the number of tokens of each that the devices have received.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn append(&mut self, tokens: &[u32], uniform: f32, submitted: &dyn Fn(usize)) -> Result<Sampled, EngineError> {
        let (parts, runner) = self.first()?;
        let last = runner.submit_sequence(parts, tokens, submitted)?;
        runner.submit_alone(parts, &last, &|_| uniform)?;
        runner.finish()?.pop().map(|(_, sampled)| sampled).ok_or(EngineError::NoTokens)
    }

    /// The logits of the batch of a group that was submitted last: one row for each result.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn logits(&mut self, group: usize) -> Result<Vec<Vec<f32>>, EngineError> {
        self.runners.get_mut(group).map_or_else(|| Ok(Vec::new()), GroupRunner::logits)
    }

    /// Shortens the sequence to its first `length` tokens: later tokens overwrite the cells of the KV cache after it.
    pub fn truncate(&mut self, length: usize) {
        self.runners.iter_mut().take(1).for_each(|runner| runner.truncate(length));
    }

    /// Recomputes the KV cache of tokens that were appended before, without reading logits. Each call must have the same tokens
    /// as the original [`Engine::append`], so that sums run in the same order and the cache gets the same bits. Does not wait:
    /// several replays may be in flight at once.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn replay(&mut self, tokens: &[u32]) -> Result<(), EngineError> {
        let (parts, runner) = self.first()?;
        let last = runner.submit_sequence(parts, tokens, &|_| ())?;
        runner.submit(parts, &last, &[], &|_| 0.0)
    }

    /// Evaluates tokens as a prompt and then one of them alone, and leaves the sequence as it was: the graphs of both are planned
    /// afterwards, and their memory has been used.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn warm_up(&mut self, tokens: &[u32]) -> Result<(), EngineError> {
        let start = self.length();
        for batch in [tokens, tokens.get(..1).unwrap_or_default()] {
            self.append(batch, 0.5, &|_| ())?;
            self.truncate(start);
        }
        Ok(())
    }

    /// Runs the last micro-batch of `tokens` node by node on the devices and on `reference`, after running the micro-batches
    /// before it normally. `report` receives each node with the bytes of both results, and may stop the comparison. The length
    /// of the sequence is unchanged afterwards.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn compare(
        &mut self,
        tokens: &[u32],
        reference: &Arc<dyn Device>,
        budget: &Arc<MemoryBudget>,
        report: &mut CompareReporter<'_>,
    ) -> Result<(), EngineError> {
        let (parts, runner) = self.first()?;
        let start = runner.length();
        let last = runner.submit_sequence(parts, tokens, &|_| ())?;
        runner.compare(parts, &last, (reference, budget), report)?;
        runner.truncate(start);
        Ok(())
    }

    /// Number of tokens in the KV cache.
    pub fn length(&self) -> usize {
        self.runners.first().map_or(0, GroupRunner::length)
    }

    /// How it runs batches.
    pub fn options(&self) -> EngineOptions {
        self.parts.options
    }

    /// Number of groups of sequences.
    pub fn groups(&self) -> usize {
        self.runners.len()
    }

    /// Whether any group has a sequence: a new engine has none.
    pub fn has_sequences(&self) -> bool {
        self.runners.iter().any(|runner| runner.sequences.sequences() > 0)
    }

    /// Waits until the devices have done all submitted work.
    ///
    /// # Errors
    /// [`EngineError::Sched`]: the first failure of a device.
    pub fn synchronize(&mut self) -> Result<(), EngineError> {
        self.runners.iter_mut().try_for_each(|runner| Ok(runner.scheduler.synchronize(None)?))
    }

    /// The sequences of a group. Those of a batch in flight must not change, and must not leave.
    pub fn sequences(&mut self, group: usize) -> Option<&mut SequenceGroup> {
        self.runners.get_mut(group).map(|runner| &mut runner.sequences)
    }

    /// Submits the next batch of a group, and does not wait for it. Prompts have short batches while any sequence decodes. Tokens are
    /// drawn by the numbers `uniform`. The results of the group's batch before it must have been read.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn start(&mut self, group: usize, uniform: &dyn Fn(&BatchOutput) -> f32) -> Result<Started, EngineError> {
        let decoding = self.runners.iter().any(|runner| runner.sequences.is_decoding());
        let most = if decoding { JOINING_TOKENS } else { usize::MAX };
        let Some(runner) = self.runners.get_mut(group) else { return Ok(Started::default()) };
        runner.start(&self.parts, most, uniform)
    }

    /// Waits for the batch of a group that was submitted last. Returns the tokens that follow the sequences without waiting tokens; none
    /// if no batch is in flight.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn finish(&mut self, group: usize) -> Result<Vec<(BatchOutput, Sampled)>, EngineError> {
        self.runners.get_mut(group).map_or_else(|| Ok(Vec::new()), GroupRunner::finish)
    }

    /// By device: bytes uploaded and copied to it so far.
    pub fn transferred_bytes(&self) -> Vec<u64> {
        let counts = self.runners.iter().map(|runner| runner.scheduler.transfer_counts());
        sum_by_device(counts.map(|counts| counts.uploaded.iter().zip(&counts.copied).map(|(a, b)| a + b).collect()))
    }

    /// By device: bytes of the arenas for intermediate results.
    pub fn compute_bytes(&self) -> Vec<u64> {
        sum_by_device(self.runners.iter().map(|runner| runner.scheduler.arena_bytes()))
    }

    /// Statistics of the graphs of a full micro-batch and of a single token.
    pub fn graph_stats(&self) -> [GraphStats; 2] {
        self.graph_stats
    }

    #[cfg(test)]
    fn ready_graphs(&self) -> usize {
        self.runners.iter().map(GroupRunner::ready_graphs).sum()
    }

    /// The runner of the only sequence.
    fn first(&mut self) -> Result<(&ModelParts, &mut GroupRunner), EngineError> {
        Ok((&self.parts, self.runners.first_mut().ok_or(CellError::Unknown)?))
    }
}

fn sum_by_device(all: impl Iterator<Item = Vec<u64>>) -> Vec<u64> {
    all.reduce(|sums, bytes| sums.into_iter().zip(bytes).map(|(sum, bytes)| sum + bytes).collect()).unwrap_or_default()
}

#[cfg(test)]
pub(crate) mod tests;

//! The inference engine: runs batches of tokens through fanout's scheduler and reads the logits.
//!
//! Graphs are planned once per shape and reused. A long prompt is cut into micro-batches, which are submitted ahead so that the
//! devices work on different micro-batches at the same time (pipeline parallelism).

use crate::model::{Batch, GraphShape, Inputs, KV_PAD, Model, ModelError, Outputs};
use crate::report::GraphStats;
use fanout::device::{Device, DeviceError, MemoryBudget, PendingRead};
use fanout::graph::TensorId;
use fanout::sched::tensor_group::{RankTask, TensorGroup, TensorSplit, TensorSplitError};
use fanout::sched::{self, CompareReporter, Options, Plan, PreparedPlan, SchedError, Scheduler, TransferCounts};
use std::collections::HashMap;
use std::sync::Arc;
use thiserror::Error;

/// Capacity of the cache of prepared graphs. A prompt uses three graphs at a time, decoding one.
const MAX_READY_GRAPHS: usize = 8;

/// Consecutive micro-batches that share one graph if the pipeline is deeper than 1: switching to another graph drains the
/// pipeline, because the devices wait for each other.
const SHARED_UBATCHES: usize = 8;

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
    /// The logits could not be read back.
    #[error("reading the logits: {0}")]
    Read(#[from] DeviceError),
    /// The batch is empty.
    #[error("no tokens: a prompt has at least one")]
    NoTokens,
}

impl EngineError {
    /// Whether a device lacks the memory for the model.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, EngineError::Sched(SchedError::NotEnoughMemory { .. }))
    }
}

/// A loaded model with its scheduler, its prepared graphs, and the length of the sequence in the KV cache.
pub struct Engine {
    scheduler: Scheduler,
    model: Model,
    split: TensorSplit,
    /// Tokens per micro-batch.
    ubatch: usize,
    /// Pipeline depth: micro-batches in flight at a time.
    depth: usize,
    ready: HashMap<GraphShape, ReadyGraph>,
    /// Tokens in the KV cache.
    length: usize,
    /// Statistics of the graphs of a full micro-batch and of a single token.
    graph_stats: [GraphStats; 2],
}

/// A prepared graph that can be run repeatedly.
struct ReadyGraph {
    prepared: PreparedPlan,
    inputs: Inputs,
    logits: Option<TensorId>,
    /// The graph of all ranks, with its own tensors for the inputs and the parts of the logits.
    rank_task: RankTask,
}

impl ReadyGraph {
    /// The bytes of the inputs, for the graph of all ranks.
    fn inputs<'b>(&self, bytes: &'b [(TensorId, Vec<u8>); 4]) -> Result<Vec<(TensorId, &'b [u8])>, EngineError> {
        let input = |(id, bytes): &'b (TensorId, Vec<u8>)| {
            self.rank_task
                .input(*id)
                .map(|id| (id, &**bytes))
                .ok_or(EngineError::Split(TensorSplitError::Bug("an input was lost")))
        };
        bytes.iter().map(input).collect()
    }
}

/// The graph of all ranks for a graph of groups, with the memory of the model's tensors.
fn apply_split(
    (model, split): (&Model, &TensorSplit),
    devices: &[Arc<dyn Device>],
    task: &sched::Task,
) -> Result<RankTask, TensorSplitError> {
    split.apply(task, devices, &|name, rank| model.stored(name)?.regions.get(rank)?.clone())
}

/// Decides how the tensors of a model are split over the devices of each group.
///
/// # Errors
/// [`EngineError::Model`], [`EngineError::Split`].
pub fn split_model(model: &Model, groups: Vec<TensorGroup>) -> Result<TensorSplit, EngineError> {
    let [_, token] = largest_shapes(model, 1);
    Ok(TensorSplit::new(&model.graph(token)?.task, groups)?)
}

/// Admission check: verifies, before anything is loaded, that the devices have memory for the weights, the KV cache and the
/// arenas of the largest graph.
///
/// # Errors
/// [`SchedError::NotEnoughMemory`], which lists required and free memory of all devices; otherwise as [`Engine::new`].
pub fn check_memory(
    (model, split): (&Model, &TensorSplit),
    devices: &[Arc<dyn Device>],
    ubatch: usize,
    depth: usize,
) -> Result<(), EngineError> {
    let options = Options::default().with_depth(depth);
    // The single-token graph first: if even that does not fit, the error shows that the weights themselves are too large.
    for shape in largest_shapes(model, ubatch).into_iter().rev() {
        let rank_task = apply_split((model, split), devices, &model.graph(shape)?.task)?;
        Plan::new(Arc::clone(rank_task.task()), devices, &options)?.check_memory(devices)?;
    }
    Ok(())
}

/// The shapes of the largest micro-batch and of one token at the end of the context.
fn largest_shapes(model: &Model, ubatch: usize) -> [GraphShape; 2] {
    let seen = model.cache_options.context;
    [ubatch.clamp(1, seen), 1].map(|tokens| GraphShape { tokens, kv_positions: seen, outputs: Outputs::Last })
}

impl Engine {
    /// Creates the engine of a loaded model, and reserves memory for its largest graph, so that later runs allocate nothing.
    ///
    /// # Errors
    /// A graph that cannot be built, or a device without enough memory.
    pub fn new(
        (model, split): (Model, TensorSplit),
        devices: Vec<Arc<dyn Device>>,
        budget: &Arc<MemoryBudget>,
        ubatch: usize,
        depth: usize,
    ) -> Result<Engine, EngineError> {
        let scheduler = Scheduler::new(devices, Options::default().with_depth(depth), budget)?;
        let (ready, graph_stats) = (HashMap::new(), [GraphStats::default(); 2]);
        let mut engine =
            Engine { scheduler, model, split, ubatch: ubatch.max(1), depth, ready, length: 0, graph_stats };
        for (at, shape) in largest_shapes(&engine.model, engine.ubatch).into_iter().enumerate() {
            let rank_task = apply_split(
                (&engine.model, &engine.split),
                engine.scheduler.devices(),
                &engine.model.graph(shape)?.task,
            )?;
            let task = rank_task.task();
            let plan = engine.scheduler.plan(task)?;
            engine.scheduler.reserve(&plan)?;
            let nodes = task.graph().nodes().len();
            engine.graph_stats[at] = GraphStats { nodes, splits: plan.splits(), copies: plan.copies() };
        }
        Ok(engine)
    }

    /// Appends tokens to the sequence and returns the logits of the last token. Up to `depth` micro-batches are in flight at
    /// once.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn append(&mut self, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        self.append_with_progress(tokens, &|_| ())
    }

    /// The same; `submitted` is called with the number of tokens of each micro-batch that the devices have received.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn append_with_progress(&mut self, tokens: &[u32], submitted: &dyn Fn(usize)) -> Result<Vec<f32>, EngineError> {
        self.submit_tokens(tokens, Outputs::Last, submitted)?.ok_or(EngineError::NoTokens)
    }

    /// Shortens the sequence to its first `length` tokens: later tokens overwrite the positions of the KV cache behind it.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }

    /// Recomputes the KV cache of tokens that were appended before, without reading logits. Each call must have the same tokens
    /// as the original [`Engine::append`], so that sums run in the same order and the cache gets the same bits. Does not wait:
    /// several replays may be in flight at once.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn replay(&mut self, tokens: &[u32]) -> Result<(), EngineError> {
        self.submit_tokens(tokens, Outputs::None, &|_| ()).map(drop)
    }

    /// Evaluates tokens as a prompt and then one of them alone, and leaves the sequence as it was: the graphs of both are planned
    /// afterwards, and their memory has been used.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn warm_up(&mut self, tokens: &[u32]) -> Result<(), EngineError> {
        let start = self.length;
        for batch in [tokens, tokens.get(..1).unwrap_or_default()] {
            self.append(batch)?;
            self.truncate(start);
        }
        Ok(())
    }

    /// Submits tokens in micro-batches; only the last one computes `outputs`.
    fn submit_tokens(
        &mut self,
        tokens: &[u32],
        outputs: Outputs,
        submitted: &dyn Fn(usize),
    ) -> Result<Option<Vec<f32>>, EngineError> {
        let end = self.length + tokens.len();
        self.model.cache_options.padded_positions(end)?;
        let mut rest = tokens;
        while rest.len() > self.ubatch {
            let (now, later) = rest.split_at(self.ubatch);
            self.submit(now, end, Outputs::None)?;
            submitted(now.len());
            rest = later;
        }
        self.submit(rest, end, outputs)
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
        if tokens.is_empty() {
            return Err(EngineError::NoTokens);
        }
        let (start, end) = (self.length, self.length + tokens.len());
        let last = tokens.len().saturating_sub(1) / self.ubatch * self.ubatch;
        for batch in tokens[..last].chunks(self.ubatch) {
            self.submit(batch, end, Outputs::None)?;
        }
        let batch = Batch { tokens: &tokens[last..], start: self.length };
        let shape = self.shape(&batch, end, Outputs::Last)?;
        let flash_attn = self.model.cache_options.flash_attn;
        self.prepare(shape)?;
        let Engine { scheduler, ready, .. } = self;
        let Some(ready) = ready.get_mut(&shape) else { return Err(EngineError::NoTokens) };
        let bytes = ready.inputs.of(&batch, shape.kv_positions, flash_attn);
        let inputs = ready.inputs(&bytes)?;
        sched::compare((scheduler, &mut ready.prepared), reference, budget, &inputs, report)?;
        self.truncate(start);
        Ok(())
    }

    /// Number of tokens in the KV cache.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Bytes uploaded and copied so far, by device.
    pub fn transfer_counts(&self) -> &TransferCounts {
        self.scheduler.transfer_counts()
    }

    /// By device: bytes of the arenas for intermediate results.
    pub fn compute_bytes(&self) -> Vec<u64> {
        self.scheduler.arena_bytes()
    }

    /// Statistics of the graphs of a full micro-batch and of a single token.
    pub fn graph_stats(&self) -> [GraphStats; 2] {
        self.graph_stats
    }

    /// Submits one micro-batch of a text that ends before position `end`. Waits for the result only if it computes logits.
    fn submit(&mut self, tokens: &[u32], end: usize, outputs: Outputs) -> Result<Option<Vec<f32>>, EngineError> {
        if tokens.is_empty() {
            return Ok(None);
        }
        let batch = Batch { tokens, start: self.length };
        let shape = self.shape(&batch, end, outputs)?;
        let flash_attn = self.model.cache_options.flash_attn;
        self.prepare(shape)?;
        let Some(ready) = self.ready.get_mut(&shape) else { return Ok(None) };
        let bytes = ready.inputs.of(&batch, shape.kv_positions, flash_attn);
        let inputs = ready.inputs(&bytes)?;
        let Some(logits) = ready.logits else {
            self.scheduler.submit(&mut ready.prepared, &inputs)?;
            self.length += tokens.len();
            return Ok(None);
        };
        if self.scheduler.devices().iter().any(|device| device.link_stats().is_some()) {
            // Remote devices: submit, and let the reply to the read signal completion. Waiting for completion before the read
            // would cost another round trip.
            self.scheduler.submit(&mut ready.prepared, &inputs)?;
        } else {
            // Local devices only: nothing else can be submitted until the logits are read, so the calling thread runs the work
            // itself.
            self.scheduler.run(&mut ready.prepared, &inputs)?;
        }
        self.length += tokens.len();
        let parts = ready.rank_task.output(logits).unwrap_or_default();
        let reads = parts.iter().map(|part| self.scheduler.read(&ready.prepared, part.tensor));
        let reads = reads.collect::<Result<Vec<PendingRead>, _>>()?;
        let parts = reads.into_iter().map(|read| read.wait(None)).collect::<Result<Vec<_>, _>>()?;
        let bytes =
            ready.rank_task.join_output(logits, &parts).ok_or(TensorSplitError::Bug("logits of another size"))?;
        Ok(Some(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()))
    }

    /// The graph shape for a micro-batch of a text that ends before position `end`.
    fn shape(&self, batch: &Batch<'_>, end: usize, outputs: Outputs) -> Result<GraphShape, EngineError> {
        let tokens = batch.tokens.len();
        let own = batch.start + tokens;
        let shared = match outputs {
            Outputs::None if self.depth > 1 => {
                own.next_multiple_of((SHARED_UBATCHES * self.ubatch).max(KV_PAD)).min(end)
            }
            _ => own,
        };
        let seen = self.model.cache_options.padded_positions(shared)?;
        Ok(GraphShape { tokens, kv_positions: seen, outputs })
    }

    fn prepare(&mut self, shape: GraphShape) -> Result<(), EngineError> {
        if self.ready.contains_key(&shape) {
            return Ok(());
        }
        if self.ready.len() >= MAX_READY_GRAPHS {
            self.ready.clear();
        }
        let graph = self.model.graph(shape)?;
        let rank_task = apply_split((&self.model, &self.split), self.scheduler.devices(), &graph.task)?;
        let prepared = self.scheduler.build(rank_task.task())?;
        if log::log_enabled!(log::Level::Debug) {
            log::debug!("built a graph for {shape:?}:");
            // A record for each line: line breaks within a record are escaped.
            prepared.plan().to_string().lines().for_each(|line| log::debug!("{line}"));
        }
        self.ready.insert(shape, ReadyGraph { prepared, inputs: graph.inputs, logits: graph.logits, rank_task });
        Ok(())
    }
}

#[cfg(test)]
mod tests;

//! A group of sequences at work: the scheduler, the prepared graphs and the sequences of one group of sequences.

use super::{EngineError, EngineOptions, Sampled, Started};
use crate::model::{CacheOptions, GraphShape, Inputs, KV_PAD, Model, ModelError, Results, UniformFn};
use crate::report::GraphStats;
use fanout::device::{Device, MemoryBudget, PendingRead};
use fanout::graph::TensorId;
use fanout::sched::batching::{BatchOutput, KvCells, SequenceGroup, SequenceId, TokenBatch};
use fanout::sched::tensor_group::{RankTask, TensorSplit, TensorSplitError};
use fanout::sched::{self, CompareReporter, Options, PreparedPlan, SchedError, Scheduler, Task};
use std::collections::HashMap;
use std::sync::Arc;

/// Capacity of the cache of prepared graphs. A prompt uses three graphs at a time, decoding one, and sequences that come and go one
/// for each number of them.
const MAX_READY_GRAPHS: usize = 32;

/// Consecutive micro-batches that share one graph if the pipeline is deeper than 1: switching to another graph drains the
/// pipeline, because the devices wait for each other.
const SHARED_UBATCHES: usize = 8;

/// The state that all groups of sequences share.
pub(super) struct ModelParts {
    pub(super) model: Model,
    pub(super) split: TensorSplit,
    pub(super) options: EngineOptions,
}

/// A group of sequences with a scheduler of its own. Two runs of one scheduler share memory for intermediate results, and so wait for
/// each other; batches of two groups do so only where both need the same device.
pub(super) struct GroupRunner {
    number: usize,
    pub(super) scheduler: Scheduler,
    ready: HashMap<GraphShape, ReadyGraph>,
    pub(super) sequences: SequenceGroup,
    /// The sequence of [`super::Engine::append`], which has all cells.
    only: Option<SequenceId>,
    last: Option<SubmittedBatch>,
}

/// The batch that was submitted last.
struct SubmittedBatch {
    shape: GraphShape,
    /// Outputs whose results were not read yet.
    outputs: Vec<BatchOutput>,
    /// The parts of the tokens and of the probabilities.
    sampled: [Vec<PendingRead>; 2],
}

/// A prepared graph that can be run repeatedly.
struct ReadyGraph {
    prepared: PreparedPlan,
    inputs: Inputs,
    results: Option<Results>,
    /// The graph of all ranks, with its own tensors for the inputs and the parts of the logits.
    rank_task: RankTask,
}

impl ReadyGraph {
    /// The bytes of the inputs, for the graph of all ranks.
    fn of_ranks<'b>(&self, bytes: &'b [(TensorId, Vec<u8>)]) -> Result<Vec<(TensorId, &'b [u8])>, EngineError> {
        let input = |(id, bytes): &'b (TensorId, Vec<u8>)| {
            self.rank_task
                .input(*id)
                .map(|id| (id, &**bytes))
                .ok_or(EngineError::Split(TensorSplitError::Bug("an input was lost")))
        };
        bytes.iter().map(input).collect()
    }
}

/// The graph of all ranks for a graph of tensor groups, with the memory of the model's tensors and of a group of sequences.
pub(super) fn apply_split(
    (model, split): (&Model, &TensorSplit),
    sequence_group: usize,
    devices: &[Arc<dyn Device>],
    task: &Task,
) -> Result<RankTask, TensorSplitError> {
    split.apply(task, devices, &|name, rank| model.stored(name, sequence_group)?.regions.get(rank)?.clone())
}

type SubmitFn = fn(&mut Scheduler, &mut PreparedPlan, &[(TensorId, &[u8])]) -> Result<(), SchedError>;

impl GroupRunner {
    pub(super) fn new(
        number: usize,
        parts: &ModelParts,
        devices: Vec<Arc<dyn Device>>,
        budget: &Arc<MemoryBudget>,
    ) -> Result<GroupRunner, EngineError> {
        let EngineOptions { ubatch, depth, sequences } = parts.options;
        let CacheOptions { cells, flash_attn, .. } = parts.model.cache_options;
        // Only flash attention skips blocks.
        let block = if flash_attn { KvCells::BLOCK } else { 1 };
        Ok(GroupRunner {
            number,
            scheduler: Scheduler::new(devices, Options::default().with_depth(depth), budget)?,
            ready: HashMap::new(),
            sequences: SequenceGroup::new(cells, block, ubatch.max(sequences)),
            only: None,
            last: None,
        })
    }

    /// Reserves the memory of graphs of a shape.
    pub(super) fn reserve(&mut self, parts: &ModelParts, shape: GraphShape) -> Result<GraphStats, EngineError> {
        let rank_task = self.apply_split(parts, &parts.model.graph(shape)?.task)?;
        let plan = self.scheduler.plan(rank_task.task())?;
        self.scheduler.reserve(&plan)?;
        let nodes = rank_task.task().graph().nodes().len();
        Ok(GraphStats { nodes, splits: plan.splits(), copies: plan.copies() })
    }

    /// Number of evaluated tokens of the only sequence.
    pub(super) fn length(&self) -> usize {
        self.only.map_or(0, |id| self.sequences.length(id))
    }

    /// Shortens the only sequence to its first `length` tokens.
    pub(super) fn truncate(&mut self, length: usize) {
        if let Some(id) = self.only {
            self.sequences.truncate(id, length);
        }
    }

    /// Appends tokens to the only sequence and submits all of its micro-batches but the last one, which is returned.
    pub(super) fn submit_sequence(
        &mut self,
        parts: &ModelParts,
        tokens: &[u32],
        submitted: &dyn Fn(usize),
    ) -> Result<TokenBatch, EngineError> {
        let (end, cells) = (self.length() + tokens.len(), parts.model.cache_options.cells);
        if end > cells {
            let text = format!("position {} is beyond a context of {cells}: give a larger --ctx", end - 1);
            return Err(ModelError::Cache(text).into());
        }
        let id = match self.only {
            Some(id) => id,
            None => *self.only.insert(self.sequences.join(&[], cells)?),
        };
        tokens.iter().try_for_each(|&token| self.sequences.push(id, token))?;
        loop {
            let batch = self.sequences.next_batch(usize::MAX).ok_or(EngineError::NoTokens)?;
            if batch.waiting == 0 {
                return Ok(batch);
            }
            self.submit(parts, &batch, &[], &|_| 0.0)?;
            submitted(batch.tokens.len());
        }
    }

    /// Submits a batch, and the reads of what is sampled after these outputs.
    pub(super) fn submit(
        &mut self,
        parts: &ModelParts,
        batch: &TokenBatch,
        outputs: &[BatchOutput],
        uniform: UniformFn<'_>,
    ) -> Result<(), EngineError> {
        self.submit_with(parts, batch, (outputs, uniform), Scheduler::submit)
    }

    /// As [`GroupRunner::submit`], if nothing else can be submitted until the results are read.
    pub(super) fn submit_alone(
        &mut self,
        parts: &ModelParts,
        batch: &TokenBatch,
        uniform: UniformFn<'_>,
    ) -> Result<(), EngineError> {
        // Remote devices: let the reply to the read signal completion. Waiting for completion before the read would cost another
        // round trip. Local devices only: the calling thread runs the work itself.
        let remote = self.scheduler.devices().iter().any(|device| device.link_stats().is_some());
        let submit = if remote { Scheduler::submit } else { Scheduler::run };
        self.submit_with(parts, batch, (&batch.outputs, uniform), submit)
    }

    fn submit_with(
        &mut self,
        parts: &ModelParts,
        batch: &TokenBatch,
        (outputs, uniform): (&[BatchOutput], UniformFn<'_>),
        submit: SubmitFn,
    ) -> Result<(), EngineError> {
        let shape = shape(parts, batch, outputs.len());
        self.prepare(parts, shape)?;
        let Some(ready) = self.ready.get_mut(&shape) else { return Ok(()) };
        let bytes = ready.inputs.of(batch, outputs, uniform);
        let inputs = ready.of_ranks(&bytes)?;
        submit(&mut self.scheduler, &mut ready.prepared, &inputs)?;
        let mut sampled = [Vec::new(), Vec::new()];
        if let Some(results) = ready.results {
            for (reads, id) in sampled.iter_mut().zip([results.sampled.tokens, results.sampled.probabilities]) {
                *reads = read_parts(&mut self.scheduler, ready, id)?;
            }
        }
        self.last = Some(SubmittedBatch { shape, outputs: outputs.to_vec(), sampled });
        Ok(())
    }

    /// Submits the next batch with at most `prompts` tokens of prompts.
    pub(super) fn start(
        &mut self,
        parts: &ModelParts,
        prompts: usize,
        uniform: UniformFn<'_>,
    ) -> Result<Started, EngineError> {
        let Some(batch) = self.sequences.next_batch(prompts) else { return Ok(Started::default()) };
        self.submit(parts, &batch, &batch.outputs, uniform)?;
        Ok(Started { tokens: batch.tokens.len(), prompt: batch.tokens.len() > batch.outputs.len() })
    }

    /// Waits for the results of the batch that was submitted last.
    pub(super) fn finish(&mut self) -> Result<Vec<(BatchOutput, Sampled)>, EngineError> {
        let Some(last) = &mut self.last else { return Ok(Vec::new()) };
        let outputs = std::mem::take(&mut last.outputs);
        if outputs.is_empty() {
            return Ok(Vec::new());
        }
        let (ready, results) = results_of(&self.ready, last.shape)?;
        let [tokens, probabilities] = std::mem::take(&mut last.sampled);
        let tokens = join(ready, results.sampled.tokens, tokens)?;
        let probabilities = join(ready, results.sampled.probabilities, probabilities)?;
        let sampled = words(&tokens).zip(words(&probabilities)).map(|(token, probability)| Sampled {
            token: u32::from_le_bytes(token),
            probability: f32::from_le_bytes(probability),
        });
        Ok(outputs.into_iter().zip(sampled).collect())
    }

    /// Reads the logits of the batch that was submitted last: one row for each output.
    pub(super) fn logits(&mut self) -> Result<Vec<Vec<f32>>, EngineError> {
        let shape = self.last.as_ref().ok_or(EngineError::NoTokens)?.shape;
        let (ready, results) = results_of(&self.ready, shape)?;
        let parts = read_parts(&mut self.scheduler, ready, results.logits)?;
        let bytes = join(ready, results.logits, parts)?;
        let floats: Vec<f32> = words(&bytes).map(f32::from_le_bytes).collect();
        Ok(floats.chunks_exact(floats.len() / shape.outputs.max(1)).map(<[f32]>::to_vec).collect())
    }

    /// Runs a batch node by node, see [`super::Engine::compare`].
    pub(super) fn compare(
        &mut self,
        parts: &ModelParts,
        batch: &TokenBatch,
        (reference, budget): (&Arc<dyn Device>, &Arc<MemoryBudget>),
        report: &mut CompareReporter<'_>,
    ) -> Result<(), EngineError> {
        let shape = shape(parts, batch, batch.outputs.len());
        self.prepare(parts, shape)?;
        let Some(ready) = self.ready.get_mut(&shape) else { return Ok(()) };
        let bytes = ready.inputs.of(batch, &batch.outputs, &|_| 0.5);
        let inputs = ready.of_ranks(&bytes)?;
        Ok(sched::compare((&mut self.scheduler, &mut ready.prepared), reference, budget, &inputs, report)?)
    }

    #[cfg(test)]
    pub(super) fn ready_graphs(&self) -> usize {
        self.ready.len()
    }

    fn prepare(&mut self, parts: &ModelParts, shape: GraphShape) -> Result<(), EngineError> {
        if self.ready.contains_key(&shape) {
            return Ok(());
        }
        if self.ready.len() >= MAX_READY_GRAPHS {
            self.ready.clear();
        }
        let graph = parts.model.graph(shape)?;
        let rank_task = self.apply_split(parts, &graph.task)?;
        let prepared = self.scheduler.build(rank_task.task())?;
        if log::log_enabled!(log::Level::Debug) {
            log::debug!("built a graph for {shape:?}:");
            // A record for each line: line breaks within a record are escaped.
            prepared.plan().to_string().lines().for_each(|line| log::debug!("{line}"));
        }
        self.ready.insert(shape, ReadyGraph { prepared, inputs: graph.inputs, results: graph.results, rank_task });
        Ok(())
    }

    fn apply_split(&self, parts: &ModelParts, task: &Task) -> Result<RankTask, TensorSplitError> {
        apply_split((&parts.model, &parts.split), self.number, self.scheduler.devices(), task)
    }
}

/// The graph of a shape that was submitted, which has outputs.
fn results_of(
    ready: &HashMap<GraphShape, ReadyGraph>,
    shape: GraphShape,
) -> Result<(&ReadyGraph, Results), EngineError> {
    let ready = ready.get(&shape).and_then(|ready| Some((ready, ready.results?)));
    ready.ok_or(EngineError::Sched(SchedError::Bug("the graph of a submitted batch was dropped, or has no results")))
}

/// Submits the reads of the parts of an output.
fn read_parts(scheduler: &mut Scheduler, ready: &ReadyGraph, id: TensorId) -> Result<Vec<PendingRead>, EngineError> {
    let parts = ready.rank_task.output(id).unwrap_or_default();
    Ok(parts.iter().map(|part| scheduler.read(&ready.prepared, part.tensor)).collect::<Result<_, _>>()?)
}

/// Waits for the parts of an output; returns its bytes.
fn join(ready: &ReadyGraph, id: TensorId, reads: Vec<PendingRead>) -> Result<Vec<u8>, EngineError> {
    let parts = reads.into_iter().map(|read| read.wait(None)).collect::<Result<Vec<_>, _>>()?;
    let bytes = ready.rank_task.join_output(id, &parts);
    Ok(bytes.ok_or(TensorSplitError::Bug("an output of another size"))?)
}

fn words(bytes: &[u8]) -> impl Iterator<Item = [u8; 4]> {
    bytes.chunks_exact(4).map(|word| [word[0], word[1], word[2], word[3]])
}

/// The graph shape for a batch.
fn shape(parts: &ModelParts, batch: &TokenBatch, outputs: usize) -> GraphShape {
    let EngineOptions { ubatch, depth, .. } = parts.options;
    let seen = if outputs == 0 && depth > 1 {
        let shared = batch.seen.next_multiple_of((SHARED_UBATCHES * ubatch).max(KV_PAD));
        shared.min(batch.seen + batch.waiting)
    } else {
        batch.seen
    };
    GraphShape { tokens: batch.tokens.len(), cells: parts.model.cache_options.padded_cells(seen), outputs }
}

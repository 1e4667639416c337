//! A model at work: batches in, logits out.

use crate::model::{Batch, GraphShape, Inputs, KV_PAD, Model, ModelError, Outputs};
use crate::report::GraphStats;
use fanout::device::{Account, Device, DeviceError, Ticket};
use fanout::graph::TensorId;
use fanout::sched::{self, CompareReporter, Options, Plan, PreparedPlan, SchedError, Scheduler, TransferCounts};
use std::collections::HashMap;
use std::sync::Arc;
use thiserror::Error;

/// How many graphs stay ready. A prompt takes three at a time, decoding one.
const MAX_READY_GRAPHS: usize = 8;

/// Micro-batches of a prompt that share a graph where several are under way at once: going over to another one makes the
/// devices wait for each other.
const SHARED_UBATCHES: usize = 8;

/// What went wrong while running.
#[derive(Debug, Error)]
pub enum EngineError {
    /// There is no graph for it.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The scheduler or a device.
    #[error(transparent)]
    Sched(#[from] SchedError),
    /// What was computed did not arrive.
    #[error("reading the logits: {0}")]
    Read(#[from] DeviceError),
    /// Nothing to compute logits of.
    #[error("no tokens: a prompt has at least one")]
    NoTokens,
}

/// A model on its devices, with what of the sequence is in its cache.
pub struct Engine {
    scheduler: Scheduler,
    model: Model,
    /// Tokens of a micro-batch.
    ubatch: usize,
    /// Micro-batches under way at once.
    depth: usize,
    ready: HashMap<GraphShape, ReadyGraph>,
    /// Tokens in the cache.
    length: usize,
    /// How the graphs of a full micro-batch and of a single token lie.
    graph_stats: [GraphStats; 2],
}

/// A graph that can be run again.
struct ReadyGraph {
    prepared: PreparedPlan,
    inputs: Inputs,
    logits: Option<TensorId>,
}

/// That there is room for a model, its cache and its largest graph, while nothing is loaded yet.
///
/// # Errors
/// [`SchedError::Full`] with the numbers of all devices; otherwise as [`Engine::new`].
pub fn check_memory(
    model: &Model,
    devices: &[Arc<dyn Device>],
    ubatch: usize,
    depth: usize,
) -> Result<(), EngineError> {
    let options = Options::default().with_depth(depth);
    // A single token first: what is short of room even then is short of it for the weights.
    for shape in largest_shapes(model, ubatch).into_iter().rev() {
        Plan::new(Arc::new(model.graph(shape)?.task), devices, &options)?.check_memory(devices)?;
    }
    Ok(())
}

/// The shapes of the largest micro-batch and of one token at the end of the context.
fn largest_shapes(model: &Model, ubatch: usize) -> [GraphShape; 2] {
    let seen = model.cache_options.context;
    [ubatch.clamp(1, seen), 1].map(|tokens| GraphShape { tokens, kv_positions: seen, outputs: Outputs::Last })
}

impl Engine {
    /// An engine for a model whose tensors have their memory, with room for its largest graph: running allocates nothing more.
    ///
    /// # Errors
    /// When the model has no graph, or a device has not the memory.
    pub fn new(
        model: Model,
        devices: Vec<Arc<dyn Device>>,
        account: &Arc<Account>,
        ubatch: usize,
        depth: usize,
    ) -> Result<Engine, EngineError> {
        let scheduler = Scheduler::new(devices, Options::default().with_depth(depth), account)?;
        let (ready, laid) = (HashMap::new(), [GraphStats::default(); 2]);
        let mut engine = Engine { scheduler, model, ubatch: ubatch.max(1), depth, ready, length: 0, graph_stats: laid };
        for (at, shape) in largest_shapes(&engine.model, engine.ubatch).into_iter().enumerate() {
            let task = Arc::new(engine.model.graph(shape)?.task);
            let plan = engine.scheduler.plan(&task)?;
            engine.scheduler.reserve(&plan)?;
            let nodes = task.graph().nodes().len();
            engine.graph_stats[at] = GraphStats { nodes, splits: plan.splits(), copies: plan.copies() };
        }
        Ok(engine)
    }

    /// Puts tokens behind those that are there; the logits of the last one. Several micro-batches are under way at once.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn append(&mut self, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        self.submit_tokens(tokens, Outputs::Last)?.ok_or(EngineError::NoTokens)
    }

    /// As [`Engine::append`] for tokens whose logits are known: the same sums in the same order, so that the cache gets the
    /// same bits. It need not wait for anything: several of these are under way at once.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn replay(&mut self, tokens: &[u32]) -> Result<(), EngineError> {
        self.submit_tokens(tokens, Outputs::None).map(drop)
    }

    /// Submits tokens in micro-batches, the last one for `outputs`.
    fn submit_tokens(&mut self, tokens: &[u32], outputs: Outputs) -> Result<Option<Vec<f32>>, EngineError> {
        let end = self.length + tokens.len();
        self.model.cache_options.padded_positions(end)?;
        let mut rest = tokens;
        while rest.len() > self.ubatch {
            let (now, later) = rest.split_at(self.ubatch);
            self.submit(now, end, Outputs::None)?;
            rest = later;
        }
        self.submit(rest, end, outputs)
    }

    /// Runs the last micro-batch of these tokens on the devices and on a reference, node by node, after the ones before it.
    /// `tell` gets each node with its bytes from here and from there, and may end it. Nothing is left of it in the cache.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn compare(
        &mut self,
        tokens: &[u32],
        reference: &Arc<dyn Device>,
        account: &Arc<Account>,
        tell: &mut CompareReporter<'_>,
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
        let inputs = bytes.each_ref().map(|(id, bytes)| (*id, &**bytes));
        sched::compare((scheduler, &mut ready.prepared), reference, account, &inputs, tell)?;
        self.length = start;
        Ok(())
    }

    /// How many tokens are in the cache.
    pub fn length(&self) -> usize {
        self.length
    }

    /// What has been moved so far.
    pub fn transfer_counts(&self) -> &TransferCounts {
        self.scheduler.transfer_counts()
    }

    /// By device: bytes for what is computed.
    pub fn compute_bytes(&self) -> Vec<u64> {
        self.scheduler.arena_bytes()
    }

    /// How the graphs of a full micro-batch and of a single token lie.
    pub fn graph_stats(&self) -> [GraphStats; 2] {
        self.graph_stats
    }

    /// Submits a batch of a text that ends before position `end`; waits where logits are wanted.
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
        let inputs = bytes.each_ref().map(|(id, bytes)| (*id, &**bytes));
        let Some(logits) = ready.logits else {
            self.scheduler.submit(&mut ready.prepared, &inputs)?;
            self.length += tokens.len();
            return Ok(None);
        };
        if self.scheduler.devices().iter().any(|device| device.link_stats().is_some()) {
            // The logits tell that it is done, and to ask for that first would cost a round trip.
            self.scheduler.submit(&mut ready.prepared, &inputs)?;
        } else {
            // Nothing comes after it until its logits are there: the calling thread may as well do the work.
            self.scheduler.run(&mut ready.prepared, &inputs)?;
        }
        self.length += tokens.len();
        let ticket: Ticket = self.scheduler.read(&ready.prepared, logits)?;
        let bytes = ticket.wait(None)?;
        Ok(Some(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()))
    }

    /// What a batch of a text that ends before position `end` asks of its graph.
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
        let prepared = self.scheduler.build(&Arc::new(graph.task))?;
        log::debug!("a graph for {shape:?}:\n{}", prepared.plan());
        self.ready.insert(shape, ReadyGraph { prepared, inputs: graph.inputs, logits: graph.logits });
        Ok(())
    }
}

#[cfg(test)]
mod tests;

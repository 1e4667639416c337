//! Observed runs: after each node that an [`Observer`] selects, the run waits and hands over the node's result.

use super::programs::subgraph;
use super::submit::{SplitRunner, StepContext};
use super::{PreparedPlan, Scheduler};
use crate::device::{Region, UploadSource};
use crate::graph::TensorId;
use crate::ops::OpCode;
use crate::sched::{Plan, SchedError};
use crate::tensor::TensorDesc;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

/// A node as passed to an [`Observer`].
#[derive(Clone, Copy, Debug)]
pub struct ObservedNode<'a> {
    /// Its index in the task's list of nodes.
    pub node: usize,
    /// Its op.
    pub op: OpCode,
    /// Its destination tensor.
    pub id: TensorId,
    /// The destination's name, or an empty string.
    pub name: &'a str,
    /// The destination's type, shape and strides.
    pub desc: &'a TensorDesc,
    /// Index of the device that runs it.
    pub device: usize,
}

/// Callback interface of [`Scheduler::run_observed`], the counterpart of ggml's `cb_eval`.
pub trait Observer {
    /// Selects nodes: [`Observer::on_result`] receives their results. Called for each node, in order, before the node runs.
    fn selects(&mut self, node: ObservedNode<'_>) -> bool;

    /// Receives all bytes that the node's destination spans, right after the node. `Break` ends the run.
    fn on_result(&mut self, node: ObservedNode<'_>, bytes: &[u8]) -> ControlFlow<()>;

    /// Bytes, as many as [`Observer::on_result`] has just received, that replace the result on the device before later nodes read it.
    /// By default the result stays.
    fn replacement(&mut self) -> Option<Vec<u8>> {
        None
    }
}

impl Scheduler {
    /// Runs a task and passes the results of selected nodes to an observer. Slow: each selected node ends a separate program,
    /// and the host waits for that program. Returns `Break` if the observer ended the run: stored tensors then hold the values
    /// written so far, and there are no outputs to read.
    ///
    /// # Errors
    /// As [`Scheduler::run`]; [`SchedError::ObservedCollectives`] for a task with collective nodes.
    pub fn run_observed(
        &mut self,
        prepared: &mut PreparedPlan,
        inputs: &[(TensorId, &[u8])],
        observer: &mut dyn Observer,
    ) -> Result<ControlFlow<()>, SchedError> {
        if !prepared.programs.largest_parts.is_empty() {
            return Err(SchedError::ObservedCollectives);
        }
        let readers = prepared.plan.task.graph().reader_counts();
        let mut run = ObservedRun { observer, readers, flow: ControlFlow::Continue(()) };
        self.submit_steps(prepared, inputs, &mut run)?;
        let flow = run.flow;
        self.synchronize(None).inspect_err(|error| self.note_failure(error))?;
        // All submitted steps are complete, so later runs do not depend on the skipped steps.
        self.incomplete = None;
        Ok(flow)
    }
}

/// The split runner of [`Scheduler::run_observed`].
struct ObservedRun<'a> {
    observer: &'a mut dyn Observer,
    readers: Vec<u32>,
    flow: ControlFlow<()>,
}

impl SplitRunner for ObservedRun<'_> {
    fn run_split(
        &mut self,
        scheduler: &mut Scheduler,
        prepared: &PreparedPlan,
        split: u32,
        context: StepContext,
    ) -> Result<(), SchedError> {
        let plan = &*prepared.plan;
        let nodes = plan.split_graph.splits.get(split as usize).map(|split| split.nodes.clone()).unwrap_or_default();
        let mut start = nodes.start;
        for node in nodes.clone() {
            let Some(observed) = observed_node(plan, node).filter(|&observed| self.observer.selects(observed)) else {
                continue;
            };
            self.run_segment(scheduler, prepared, split, start..node + 1, context)?;
            start = node + 1;
            let region = result_region(scheduler, plan, split, &observed, context)?;
            let bytes = scheduler.download_blocking(observed.device, region.clone())?;
            self.flow = self.observer.on_result(observed, &bytes);
            if self.is_stopped() {
                return Ok(());
            }
            if let Some(bytes) = self.observer.replacement() {
                let running = scheduler.queues.by_index(context.queue)?;
                let named = |e| SchedError::from_device(&scheduler.devices[observed.device].info().name, e);
                running.queue().upload(region, None, UploadSource::Borrowed(&bytes)).map_err(named)?;
            }
        }
        if start < nodes.end {
            self.run_segment(scheduler, prepared, split, start..nodes.end, context)?;
        }
        Ok(())
    }

    fn is_stopped(&self) -> bool {
        self.flow.is_break()
    }
}

impl ObservedRun<'_> {
    /// Runs some consecutive nodes of a split as a separate program.
    fn run_segment(
        &self,
        scheduler: &mut Scheduler,
        prepared: &PreparedPlan,
        split: u32,
        nodes: Range<usize>,
        context: StepContext,
    ) -> Result<(), SchedError> {
        let plan = &*prepared.plan;
        let (graph, memories) = subgraph(plan, split as usize, nodes, &self.readers)?;
        let bound = memories.iter().map(|&memory| scheduler.arenas.buffer_region(plan, memory, context.ring_copy));
        let bindings = bound.collect::<Result<Arc<[Region]>, _>>()?;
        let running = scheduler.queues.by_index(context.queue)?;
        let device = &scheduler.devices[running.id.device];
        let named = |e| SchedError::from_device(&device.info().name, e);
        let program = device.prepare(Arc::new(graph)).map_err(named)?;
        running.queue().run(&program, &bindings).map_err(named)
    }
}

/// The bytes that a node has written.
fn result_region(
    scheduler: &Scheduler,
    plan: &Plan,
    split: u32,
    observed: &ObservedNode<'_>,
    context: StepContext,
) -> Result<Region, SchedError> {
    let place = plan.task.span(observed.id).and_then(|(slot, range)| plan.locate(split as usize, slot, &range));
    let place = place.ok_or(SchedError::Bug("a node's result is not on its device"))?;
    scheduler.arenas.region(plan, &place, context.ring_copy)
}

/// A node as passed to an [`Observer`].
fn observed_node(plan: &Plan, node: usize) -> Option<ObservedNode<'_>> {
    let of = plan.task.graph().nodes().get(node)?;
    Some(ObservedNode {
        node,
        op: of.op.code(),
        id: of.dst,
        name: plan.task.name(of.dst),
        desc: &plan.task.graph().tensor(of.dst)?.desc,
        device: plan.assignments.get(node)?.device,
    })
}

//! Runs that someone watches, node by node.

use super::programs::part;
use super::run::{Moment, Runs};
use super::{Prepared, Scheduler};
use crate::device::Region;
use crate::graph::TensorId;
use crate::ops::OpCode;
use crate::sched::{Plan, SchedError};
use crate::tensor::TensorDesc;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

/// A node as observers see it.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// Its place in the task's list of nodes.
    pub node: usize,
    /// What it computes.
    pub op: OpCode,
    /// The tensor that it writes.
    pub id: TensorId,
    /// That tensor's name, or empty.
    pub name: &'a str,
    /// That tensor's type, shape and strides.
    pub desc: &'a TensorDesc,
    /// Number of the device that computes it.
    pub device: usize,
}

/// Someone who watches a run.
pub trait Observer {
    /// Whether to be shown what a node computes. Asked of every node, in order, before it runs.
    fn asks(&mut self, node: Seen<'_>) -> bool;

    /// Shows all bytes that the node's tensor spans, as the node left them. `Break` ends the run.
    fn shows(&mut self, node: Seen<'_>, bytes: &[u8]) -> ControlFlow<()>;
}

impl Scheduler {
    /// Runs a task while an observer watches. Slow: each node that it asks for is a program's last, and is waited for.
    /// `Break` when the observer ended the run: what is stored is as the run left it there, and there are no outputs to read.
    ///
    /// # Errors
    /// As [`Scheduler::run`].
    pub fn run_observed(
        &mut self,
        prepared: &mut Prepared,
        inputs: &[(TensorId, &[u8])],
        observer: &mut dyn Observer,
    ) -> Result<ControlFlow<()>, SchedError> {
        let readers = prepared.plan.task.graph().readers();
        let mut watched = Watched { observer, readers, flow: ControlFlow::Continue(()) };
        self.go(prepared, inputs, &mut watched)?;
        let flow = watched.flow;
        self.synchronize(None)?;
        // All of it is done, so that later runs need not wait for what was left out.
        self.torn = false;
        Ok(flow)
    }
}

struct Watched<'a> {
    observer: &'a mut dyn Observer,
    readers: Vec<u32>,
    flow: ControlFlow<()>,
}

impl Runs for Watched<'_> {
    fn split(&mut self, scheduler: &mut Scheduler, of: &Prepared, split: u32, at: Moment) -> Result<(), SchedError> {
        let plan = &*of.plan;
        let nodes = plan.cut.splits.get(split as usize).map(|split| split.nodes.clone()).unwrap_or_default();
        let mut start = nodes.start;
        for node in nodes.clone() {
            let Some(seen) = seen(plan, node).filter(|&seen| self.observer.asks(seen)) else { continue };
            self.segment(scheduler, of, split, start..node + 1, at)?;
            start = node + 1;
            let bytes = result(scheduler, plan, split, &seen, at)?;
            self.flow = self.observer.shows(seen, &bytes);
            if self.is_over() {
                return Ok(());
            }
        }
        if start < nodes.end {
            self.segment(scheduler, of, split, start..nodes.end, at)?;
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.flow.is_break()
    }
}

impl Watched<'_> {
    /// Runs some nodes of a split as a program of their own.
    fn segment(
        &self,
        scheduler: &mut Scheduler,
        of: &Prepared,
        split: u32,
        nodes: Range<usize>,
        at: Moment,
    ) -> Result<(), SchedError> {
        let plan = &*of.plan;
        let (graph, memories) = part(plan, split as usize, nodes, &self.readers)?;
        let bound = memories.iter().map(|&memory| scheduler.rooms.memory(plan, memory, at.copy));
        let bindings = bound.collect::<Result<Arc<[Region]>, _>>()?;
        let running = scheduler.lanes.at(at.lane)?;
        let device = &scheduler.devices[running.lane.device];
        let named = |e| SchedError::of(&device.info().name, e);
        let program = device.prepare(Arc::new(graph)).map_err(named)?;
        running.queue().run(&program, &bindings).map_err(named)
    }
}

/// What a node has written.
fn result(
    scheduler: &mut Scheduler,
    plan: &Plan,
    split: u32,
    seen: &Seen<'_>,
    at: Moment,
) -> Result<Vec<u8>, SchedError> {
    let place = plan.task.span(seen.id).and_then(|(slot, range)| plan.locate(split as usize, slot, &range));
    let place = place.ok_or(SchedError::Bug("a node's result is not on its device"))?;
    let region = scheduler.rooms.region(plan, &place, at.copy)?;
    scheduler.fetch(seen.device, region)
}

/// A node as observers see it.
fn seen(plan: &Plan, node: usize) -> Option<Seen<'_>> {
    let of = plan.task.graph().nodes().get(node)?;
    Some(Seen {
        node,
        op: of.op.code(),
        id: of.dst,
        name: plan.task.name(of.dst),
        desc: &plan.task.graph().tensor(of.dst)?.desc,
        device: plan.assigned.get(node)?.device,
    })
}

//! Graph execution: instantiation, update and launch (graph replay).

use std::collections::BTreeMap;

use super::{DeferredRelease, GraphExec, GraphNode, Graphs, NodeUpdateError};
use crate::driver::{Driver, DriverState, StateGuard};
use crate::engine::{EdgeData, ExecPlan, PlanStep, StreamOp, StreamPoint, UpdateMismatch};
use crate::error::{Error, Result};
use crate::handle::{ContextId, GraphExecId, GraphId, NodeId, StreamId};

/// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH`
const AUTO_FREE: u64 = 1;
/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`
pub const UPLOAD: u64 = 2;
/// `CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH`
const DEVICE_LAUNCH: u64 = 4;
/// All valid flags. The remaining one (8) enables per-node priorities, which affect no result.
const FLAGS: u64 = 15;

/// Result of an update: `CUgraphExecUpdateResultInfo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpdateResultInfo {
    /// `CUgraphExecUpdateResult`; 0 is success.
    pub result: u32,
    /// The node of the new graph that does not match.
    pub node: NodeId,
    /// Its counterpart in the old graph.
    pub from: NodeId,
}

impl Graphs {
    fn plan(&self, graph: GraphId) -> Result<ExecPlan<GraphNode>> {
        ExecPlan::new(self.get(graph)?, &|child| self.get(child).ok())
    }

    /// `cuGraphInstantiate`
    pub fn instantiate(&mut self, graph: GraphId, flags: u64) -> Result<GraphExecId> {
        if flags & !FLAGS != 0 || flags & (AUTO_FREE | DEVICE_LAUNCH) == AUTO_FREE | DEVICE_LAUNCH {
            return Err(Error::InvalidValue);
        }
        if flags & DEVICE_LAUNCH != 0 {
            return Err(Error::NotSupported);
        }
        let plan = self.plan(graph)?;
        let allocated = plan.steps().iter().filter_map(|step| match &step.payload {
            Some(GraphNode::Alloc(memory)) => Some(memory.address),
            _ => None,
        });
        let memory: Vec<u64> = allocated.collect();
        // Only one executable graph at a time may use an allocation node's memory.
        if self.execs.iter().any(|(_, exec)| exec.memory.iter().any(|address| memory.contains(address))) {
            return Err(Error::InvalidValue);
        }
        let objects = self.entry(graph)?.objects.clone();
        for (&object, &count) in &objects {
            self.add_references(object, count)?;
        }
        memory.iter().for_each(|&address| self.add_use(address));
        let id = self.new_id();
        Ok(self.execs.insert(GraphExec { plan, flags, id, last: None, objects, memory }))
    }

    /// Ends an executable graph. Launches that are already submitted continue.
    fn drop_exec(&mut self, exec: GraphExecId) -> Result<(DeferredRelease, Option<StreamPoint>)> {
        let gone = self.execs.remove(exec)?;
        let mut deferred = DeferredRelease::default();
        for (object, count) in gone.objects {
            deferred.calls.extend(self.drop_references(object, count));
        }
        for address in gone.memory {
            deferred.memory.extend(self.drop_use(address));
        }
        Ok((deferred, gone.last))
    }

    /// `cuGraphExecUpdate`
    pub fn update(&mut self, exec: GraphExecId, graph: GraphId) -> Result<UpdateResultInfo> {
        let new = self.plan(graph)?;
        let exec = self.execs.get_mut(exec)?;
        let memory =
            |step: &PlanStep<GraphNode>| matches!(step.payload, Some(GraphNode::Alloc(_) | GraphNode::Free(_)));
        let none = NodeId::default();
        if exec.plan.steps().iter().any(memory) {
            return Ok(UpdateResultInfo { result: NodeUpdateError::Unsupported as u32, node: none, from: none });
        }
        Ok(match exec.plan.update(&new, GraphNode::fits) {
            Ok(()) => UpdateResultInfo { result: 0, node: none, from: none },
            Err(UpdateMismatch::Topology(node)) => {
                UpdateResultInfo { result: 2, node: node.unwrap_or_default(), from: none }
            }
            Err(UpdateMismatch::Node(node, from, reason)) => UpdateResultInfo { result: reason as u32, node, from },
        })
    }

    /// Replaces the operation of one node in an executable graph: `cuGraphExecKernelNodeSetParams` and similar calls.
    pub fn set_exec_node(&mut self, exec: GraphExecId, node: NodeId, new: GraphNode) -> Result<()> {
        let step = self.execs.get_mut(exec)?.plan.step_mut(node)?;
        let old = step.payload.as_mut().ok_or(Error::InvalidValue)?;
        GraphNode::fits(old, &new).map_err(|_| Error::InvalidValue)?;
        *old = new;
        Ok(())
    }

    /// Whether a node of an executable graph has a programmatic edge before it.
    pub fn is_behind_programmatic_edge(&mut self, exec: GraphExecId, node: NodeId) -> Result<bool> {
        Ok(self.execs.get_mut(exec)?.plan.step_mut(node)?.programmatic)
    }

    /// `cuGraphExecChildGraphNodeSetParams`
    pub fn set_exec_child(&mut self, exec: GraphExecId, node: NodeId, child: GraphId) -> Result<()> {
        let new = self.plan(child)?;
        let exec = self.execs.get_mut(exec)?;
        exec.plan.update_child(node, &new, GraphNode::fits).map_err(|_| Error::InvalidValue)
    }

    /// `cuGraphNodeSetEnabled`
    pub fn enable(&mut self, exec: GraphExecId, node: NodeId, enabled: bool) -> Result<()> {
        let step = self.execs.get_mut(exec)?.plan.step_mut(node)?;
        if !step.payload.as_ref().is_some_and(GraphNode::can_be_disabled) {
            return Err(Error::InvalidValue);
        }
        step.enabled = enabled;
        Ok(())
    }

    /// A new graph with the current operations of an executable graph, for a launch in a capturing stream.
    pub(in crate::driver) fn graph_of_exec(&mut self, exec: GraphExecId) -> Result<GraphId> {
        let plan = self.execs.get(exec)?.plan.clone();
        if plan.steps().iter().any(|step| matches!(step.payload, Some(GraphNode::Alloc(_) | GraphNode::Free(_)))) {
            return Err(Error::NotSupported);
        }
        let graph = self.create();
        let mut nodes = Vec::new();
        for step in plan.steps() {
            let after: Vec<NodeId> = step.after.iter().map(|&step| nodes[step]).collect();
            let payload = step.payload.clone().filter(|_| step.enabled).unwrap_or(GraphNode::Empty);
            let node = self.add(graph, &after, payload)?;
            if step.programmatic {
                let data = EdgeData { from_port: 1, kind: 1, ..EdgeData::default() };
                let graph = &mut self.graphs.get_mut(graph)?.graph;
                after.iter().for_each(|&before| graph.set_edge_data((before, node), data));
            }
            nodes.push(node);
        }
        Ok(graph)
    }
}

impl Driver {
    /// `cuGraphUpload`: without effect, the emulator has nothing to prepare.
    pub fn upload_graph(&self, exec: GraphExecId, stream: StreamId) -> Result<()> {
        let mut state = self.lock();
        state.graphs.exec_number(exec)?;
        state.resolve_stream(stream).map(drop)
    }

    /// `cuGraphLaunch`
    pub fn launch_graph(&self, exec: GraphExecId, stream: StreamId) -> Result<()> {
        let mut state = self.lock();
        let stream = state.resolve_stream(stream)?;
        if state.captures.is_capturing(stream)? {
            let child = state.graphs.graph_of_exec(exec)?;
            let (graph, after) = state.captures.frontier(stream)?;
            let after = after.to_vec();
            let node = state.graphs.add_owned_child(graph, &after, child)?;
            state.captures.advance(stream, node);
            return Ok(());
        }
        let context = state.streams.get(stream)?.context;
        let graphs = &mut state.graphs;
        let found = graphs.execs.get(exec)?;
        let (steps, last) = (found.plan.steps().to_vec(), found.last);
        let auto_free = found.flags & AUTO_FREE != 0;
        graphs.apply_memory_nodes(steps.iter().filter_map(|step| step.payload.as_ref()), auto_free)?;
        state.streams.host_launched();
        let end = self.run_plan(&mut state, &steps, last, stream, context)?;
        state.graphs.execs.get_mut(exec)?.last = Some(end);
        self.maybe_run_ops(state);
        Ok(())
    }

    /// `cuGraphExecDestroy`
    pub fn destroy_exec(&self, exec: GraphExecId) -> Result<()> {
        let mut state = self.lock();
        let (deferred, last) = state.graphs.drop_exec(exec)?;
        self.release_deferred(state, deferred, last);
        Ok(())
    }

    /// `cuGraphDestroy`
    pub fn destroy_graph(&self, graph: GraphId) -> Result<()> {
        let mut state = self.lock();
        let deferred = state.graphs.destroy(graph)?;
        self.release_deferred(state, deferred, None);
        Ok(())
    }

    /// `cuGraphDestroyNode`
    pub fn destroy_node(&self, node: NodeId) -> Result<()> {
        let mut state = self.lock();
        let deferred = state.graphs.destroy_node(node)?;
        self.release_deferred(state, deferred, None);
        Ok(())
    }

    /// Frees memory and calls destructors after the last launch that may use them.
    fn release_deferred<'a>(&'a self, mut state: StateGuard<'a>, deferred: DeferredRelease, last: Option<StreamPoint>) {
        for address in deferred.memory {
            let Some(context) = state.memory.get(address).map(|owner| owner.context) else { continue };
            let stream = state.streams.create_internal(context);
            // Cannot fail: the stream was created above.
            let _ = state.streams.submit_after(stream, StreamOp::Free(address), last.into_iter().collect());
        }
        let used = last.is_some_and(|last| !state.streams.is_reached(last));
        let owner = last.filter(|_| used).and_then(|last| state.streams.context_of(last.stream));
        match owner {
            Some(context) => {
                for call in deferred.calls {
                    let stream = state.streams.create_internal(context);
                    // Cannot fail: the stream was created above.
                    let _ = state.streams.submit_after(stream, StreamOp::Call(call), last.into_iter().collect());
                }
            }
            None => {
                drop(state);
                deferred.calls.iter().for_each(|call| (call.run)(None));
            }
        }
    }
}

impl Driver {
    /// Submits a plan's steps so that they follow the stream's work so far, and makes the stream wait for all of them. The
    /// first step that depends on nothing but one earlier step shares that step's hidden stream. Every other step gets its own
    /// stream, so that the seed can choose any order that the graph allows.
    fn run_plan(
        &self,
        state: &mut DriverState,
        steps: &[PlanStep<GraphNode>],
        last: Option<StreamPoint>,
        stream: StreamId,
        context: ContextId,
    ) -> Result<StreamPoint> {
        let start = state.streams.submit_after(stream, StreamOp::Wait, last.into_iter().collect())?;
        let mut points: Vec<StreamPoint> = Vec::with_capacity(steps.len());
        // The last step of each hidden stream.
        let mut tails: BTreeMap<usize, StreamId> = BTreeMap::new();
        let mut ends = vec![true; steps.len()];
        for (index, step) in steps.iter().enumerate() {
            let payload = step.payload.as_ref().filter(|_| step.enabled);
            let own = payload
                .and_then(GraphNode::context)
                .filter(|&context| state.contexts.get(context).is_ok())
                .unwrap_or(context);
            let mut after: Vec<StreamPoint> = step.after.iter().map(|&before| points[before]).collect();
            if after.is_empty() {
                after.push(start);
            }
            if let Some(GraphNode::Wait(event)) = payload {
                after.extend(state.events.get(*event).ok().and_then(|event| event.recorded));
            }
            let follows = match step.after[..] {
                [before] => tails.remove(&before).filter(|&stream| state.streams.context_of(stream) == Some(own)),
                _ => None,
            };
            let hidden = match follows {
                Some(stream) => stream,
                None => state.streams.create_internal(own),
            };
            let mut work = payload.map_or(StreamOp::Wait, GraphNode::work);
            if let StreamOp::Launch(launch) = &mut work {
                launch.launch.peers = state.accessible_devices(own)?;
                let owner = state.contexts.get_mut(own)?;
                launch.launch.id = owner.launches;
                owner.launches += 1;
                if step.programmatic {
                    state.note_programmatic_launch(launch.launch.kernel());
                }
            }
            let cost = self.cost(state, own, &work);
            let work = self.apply_hardware_model(state, work);
            let point = state.streams.submit_costing(hidden, work, after, cost)?;
            if let Some(GraphNode::Record(event)) = payload
                && let Ok(event) = state.events.get_mut(*event)
            {
                (event.recorded, event.time) = (Some(point), None);
            }
            step.after.iter().for_each(|&before| ends[before] = false);
            tails.insert(index, hidden);
            points.push(point);
        }
        let after = points.iter().zip(ends).filter(|(_, end)| *end).map(|(&point, _)| point).collect();
        state.streams.submit_after(stream, StreamOp::Wait, after)
    }
}

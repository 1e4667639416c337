//! Graphs of the driver API: handles of graphs, nodes and executable graphs, and launches.
//!
//! Structure and ordering are in the engine ([`crate::engine::Graph`], [`crate::engine::ExecPlan`]). All nodes are kernels. They
//! are checked at creation by the same rules as launches, and hold everything that they need to run any number of times.

use std::collections::BTreeMap;

use super::{Driver, DriverState};
use crate::engine::{Edge, EdgeData, ExecPlan, Graph, KernelLaunch, PlanStep, StreamOp, StreamPoint};
use crate::error::{Error, Result};
use crate::handle::{ContextId, GraphExecId, GraphId, HandleTable, NodeId, StreamId};

/// All valid flags of an instantiation except those for memory nodes, uploads and launches by kernels: `PER_NODE_PRIORITY`,
/// which affects no result.
const FLAGS: u64 = 8;

/// A kernel node.
#[derive(Clone, Debug)]
pub struct KernelNode {
    /// The checked launch, ready to run.
    pub launch: KernelLaunch,
    /// The context that it runs in.
    pub context: ContextId,
}

/// All graphs of the driver.
#[derive(Debug, Default)]
pub struct Graphs {
    graphs: HandleTable<GraphId, Graph<KernelNode>>,
    execs: HandleTable<GraphExecId, GraphExec>,
    /// The graph that contains each node.
    nodes: HandleTable<NodeId, GraphId>,
}

/// An executable graph.
#[derive(Debug)]
struct GraphExec {
    plan: ExecPlan<KernelNode>,
    /// The end of its last launch: launches of one executable graph never overlap.
    last: Option<StreamPoint>,
}

impl Graphs {
    /// `cuGraphCreate`
    pub fn create(&mut self) -> GraphId {
        self.graphs.insert(Graph::default())
    }

    /// `cuGraphDestroy`
    pub fn destroy(&mut self, graph: GraphId) -> Result<()> {
        for node in self.graphs.remove(graph)?.nodes() {
            // Cannot fail: every node of a graph is in the table.
            let _ = self.nodes.remove(node);
        }
        Ok(())
    }

    /// Adds a node that depends on `after`.
    pub fn add(&mut self, graph: GraphId, after: &[NodeId], node: KernelNode) -> Result<NodeId> {
        let id = self.nodes.reserve();
        self.graphs.get_mut(graph)?.add(id, node, after)?;
        self.nodes.insert_reserved(id, graph);
        Ok(id)
    }

    /// `cuGraphAddDependencies`
    pub fn connect(&mut self, graph: GraphId, edges: &[(Edge, EdgeData)]) -> Result<()> {
        self.graphs.get_mut(graph)?.connect(edges)
    }

    /// `cuGraphInstantiate`
    pub fn instantiate(&mut self, graph: GraphId, flags: u64) -> Result<GraphExecId> {
        if flags & !FLAGS != 0 {
            return Err(Error::InvalidValue);
        }
        let plan = ExecPlan::new(self.graphs.get(graph)?);
        Ok(self.execs.insert(GraphExec { plan, last: None }))
    }

    /// `cuGraphExecDestroy`: launches that are already submitted continue.
    pub fn destroy_exec(&mut self, exec: GraphExecId) -> Result<()> {
        self.execs.remove(exec).map(drop)
    }

    /// Replaces the kernel of one node in an executable graph by one of the same context.
    pub fn set_exec_node(&mut self, exec: GraphExecId, node: NodeId, new: KernelNode) -> Result<()> {
        let old = &mut self.execs.get_mut(exec)?.plan.step_mut(node)?.payload;
        if old.context != new.context {
            return Err(Error::InvalidValue);
        }
        *old = new;
        Ok(())
    }

    /// Whether a node of an executable graph has a programmatic edge before it.
    pub fn is_behind_programmatic_edge(&mut self, exec: GraphExecId, node: NodeId) -> Result<bool> {
        Ok(self.execs.get_mut(exec)?.plan.step_mut(node)?.programmatic)
    }
}

impl Driver {
    /// `cuGraphLaunch`
    pub fn launch_graph(&self, exec: GraphExecId, stream: StreamId) -> Result<()> {
        let mut state = self.lock();
        let stream = state.resolve_stream(stream)?;
        let found = state.graphs.execs.get(exec)?;
        let (steps, last) = (found.plan.steps().to_vec(), found.last);
        state.streams.host_launched();
        let end = self.run_plan(&mut state, steps, last, stream)?;
        state.graphs.execs.get_mut(exec)?.last = Some(end);
        self.maybe_run_ops(state);
        Ok(())
    }

    /// Submits a plan's steps so that they follow the stream's work so far, and makes the stream wait for all of them. The
    /// first step that depends on nothing but one earlier step shares that step's hidden stream. Every other step gets its own
    /// stream, so that the seed can choose any order that the graph allows.
    fn run_plan(
        &self,
        state: &mut DriverState,
        steps: Vec<PlanStep<KernelNode>>,
        last: Option<StreamPoint>,
        stream: StreamId,
    ) -> Result<StreamPoint> {
        let start = state.streams.submit_after(stream, StreamOp::Wait, last.into_iter().collect())?;
        let mut points: Vec<StreamPoint> = Vec::with_capacity(steps.len());
        // The last step of each hidden stream.
        let mut tails: BTreeMap<usize, StreamId> = BTreeMap::new();
        let mut ends = vec![true; steps.len()];
        for (index, step) in steps.into_iter().enumerate() {
            let KernelNode { mut launch, context } = step.payload;
            let mut after: Vec<StreamPoint> = step.after.iter().map(|&before| points[before]).collect();
            if after.is_empty() {
                after.push(start);
            }
            let follows = match step.after[..] {
                [before] => tails.remove(&before).filter(|&stream| state.streams.context_of(stream) == Some(context)),
                _ => None,
            };
            let hidden = match follows {
                Some(stream) => stream,
                None => state.streams.create_internal(context),
            };
            launch.launch.peers = state.accessible_devices(context)?;
            let owner = state.contexts.get_mut(context)?;
            launch.launch.id = owner.launches;
            owner.launches += 1;
            if step.programmatic {
                state.note_programmatic_launch(launch.launch.kernel());
            }
            let work = StreamOp::Launch(Box::new(launch));
            let cost = self.cost(state, context, &work);
            let work = self.apply_hardware_model(state, work);
            let point = state.streams.submit_costing(hidden, work, after, cost)?;
            step.after.iter().for_each(|&before| ends[before] = false);
            tails.insert(index, hidden);
            points.push(point);
        }
        let after = points.iter().zip(ends).filter(|(_, end)| *end).map(|(&point, _)| point).collect();
        state.streams.submit_after(stream, StreamOp::Wait, after)
    }
}

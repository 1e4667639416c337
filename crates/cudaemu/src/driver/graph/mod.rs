//! Graphs as programs see them: handles for graphs, their nodes and what is instantiated of them; what each call checks.
//!
//! The shape of graphs is the engine's ([`crate::engine::Graph`], [`crate::engine::Plan`]). Nodes are checked when they are made,
//! as launches and copies are, and hold all that they need to run any number of times.

mod edit;
mod launch;
mod memory;
mod node;
mod node_builder;
mod user_objects;

use std::collections::BTreeMap;

use crate::engine::{ExecPlan, Graph, StreamPoint};
use crate::error::{Error, Result};
use crate::handle::{GraphExecId, GraphId, HandleTable, NodeId, UserObjectId};

pub use launch::{UPLOAD, UpdateResultInfo};
pub use memory::GraphMemory;
pub use node::{AllocNode, CopyNode, CopyRequest, GraphNode, KernelNode, MemOp, NodeUpdateError};
pub use user_objects::UserObject;

/// All graphs.
#[derive(Debug, Default)]
pub struct Graphs {
    graphs: HandleTable<GraphId, GraphEntry>,
    execs: HandleTable<GraphExecId, GraphExec>,
    /// The graph of each node.
    nodes: HandleTable<NodeId, GraphId>,
    objects: HandleTable<UserObjectId, UserObject>,
    /// Memory of graphs, by address.
    memory: BTreeMap<u64, GraphMemory>,
    /// The most bytes of it in use, per device.
    high: BTreeMap<u32, u64>,
    made: u64,
}

/// A graph.
#[derive(Debug, Default)]
struct GraphEntry {
    graph: Graph<GraphNode>,
    /// `cuGraphGetId`
    id: u64,
    /// It belongs to a child graph node, and goes with it.
    owned: bool,
    /// The graph that it was copied from, and which node became which.
    copied: Option<(GraphId, BTreeMap<NodeId, NodeId>)>,
    /// Objects that it keeps, and how often.
    objects: BTreeMap<UserObjectId, u32>,
}

/// What was instantiated of a graph.
#[derive(Debug)]
struct GraphExec {
    plan: ExecPlan<GraphNode>,
    /// `CUDA_GRAPH_INSTANTIATE_FLAG_…`
    flags: u64,
    id: u64,
    /// The end of its last launch: launches of one exec never overlap.
    last: Option<StreamPoint>,
    objects: BTreeMap<UserObjectId, u32>,
    /// Memory that its nodes allocate.
    memory: Vec<u64>,
}

/// Memory of graphs that are gone, and destructors to be called, once the last work that may use them is done.
#[derive(Debug, Default)]
pub struct DeferredRelease {
    /// Addresses to be given back.
    pub memory: Vec<u64>,
    /// Destructors.
    pub calls: Vec<crate::engine::HostCall>,
}

impl Graphs {
    fn new_id(&mut self) -> u64 {
        self.made += 1;
        self.made
    }

    fn entry(&self, graph: GraphId) -> Result<&GraphEntry> {
        self.graphs.get(graph)
    }

    /// A graph.
    pub fn get(&self, graph: GraphId) -> Result<&Graph<GraphNode>> {
        self.entry(graph).map(|entry| &entry.graph)
    }

    /// The graph that a node is in.
    pub fn graph_of(&self, node: NodeId) -> Result<GraphId> {
        self.nodes.get(node).copied()
    }

    /// What a node does.
    pub fn node(&self, node: NodeId) -> Result<&GraphNode> {
        self.get(self.graph_of(node)?)?.payload(node)
    }

    /// `cuGraphGetId`
    pub fn graph_number(&self, graph: GraphId) -> Result<u64> {
        self.entry(graph).map(|entry| entry.id)
    }

    /// `cuGraphExecGetId`
    pub fn exec_number(&self, exec: GraphExecId) -> Result<u64> {
        self.execs.get(exec).map(|exec| exec.id)
    }

    /// `cuGraphExecGetFlags`
    pub fn exec_flags(&self, exec: GraphExecId) -> Result<u64> {
        self.execs.get(exec).map(|exec| exec.flags)
    }

    /// What an instantiated node does, and whether it is enabled.
    pub fn exec_node(&self, exec: GraphExecId, node: NodeId) -> Result<(&GraphNode, bool)> {
        let step = self.execs.get(exec)?.plan.step(node)?;
        Ok((step.payload.as_ref().ok_or(Error::InvalidValue)?, step.enabled))
    }
}

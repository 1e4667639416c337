//! Graphs of the driver API: handles of graphs, nodes and executable graphs, and the checks of each call.
//!
//! Structure and ordering are in the engine ([`crate::engine::Graph`], [`crate::engine::ExecPlan`]). Nodes are checked at
//! creation by the same rules as launches and copies, and hold everything that they need to run any number of times.

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

/// All graphs of the driver.
#[derive(Debug, Default)]
pub struct Graphs {
    graphs: HandleTable<GraphId, GraphEntry>,
    execs: HandleTable<GraphExecId, GraphExec>,
    /// The graph that contains each node.
    nodes: HandleTable<NodeId, GraphId>,
    objects: HandleTable<UserObjectId, UserObject>,
    /// Memory of allocation nodes, by address.
    memory: BTreeMap<u64, GraphMemory>,
    /// High-water mark of graph memory in use, in bytes per device.
    high: BTreeMap<u32, u64>,
    made: u64,
}

/// A graph with its bookkeeping.
#[derive(Debug, Default)]
struct GraphEntry {
    graph: Graph<GraphNode>,
    /// `cuGraphGetId`
    id: u64,
    /// A child graph node owns it and destroys it.
    owned: bool,
    /// The graph that it was copied from, and the copy of each of that graph's nodes.
    copied: Option<(GraphId, BTreeMap<NodeId, NodeId>)>,
    /// User objects that it references, with the number of references.
    objects: BTreeMap<UserObjectId, u32>,
}

/// An executable graph.
#[derive(Debug)]
struct GraphExec {
    plan: ExecPlan<GraphNode>,
    /// `CUDA_GRAPH_INSTANTIATE_FLAG_…`
    flags: u64,
    id: u64,
    /// The end of its last launch: launches of one executable graph never overlap.
    last: Option<StreamPoint>,
    objects: BTreeMap<UserObjectId, u32>,
    /// Addresses of the memory that its nodes allocate.
    memory: Vec<u64>,
}

/// Memory of destroyed graphs, and destructors to call, both after the last operation that may use them.
#[derive(Debug, Default)]
pub struct DeferredRelease {
    /// Addresses to free.
    pub memory: Vec<u64>,
    /// Destructors to call.
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

    /// The graph that contains a node.
    pub fn graph_of(&self, node: NodeId) -> Result<GraphId> {
        self.nodes.get(node).copied()
    }

    /// A node's operation.
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

    /// The operation of a node in an executable graph, and whether the node is enabled.
    pub fn exec_node(&self, exec: GraphExecId, node: NodeId) -> Result<(&GraphNode, bool)> {
        let step = self.execs.get(exec)?.plan.step(node)?;
        Ok((step.payload.as_ref().ok_or(Error::InvalidValue)?, step.enabled))
    }
}

//! Graphs: nodes and their dependencies.
//!
//! A [`Graph`] does not interpret its nodes' operations: they are its payload. Nodes are kept in the order of creation, which
//! pairs the nodes of two graphs when one updates the other ([`ExecPlan::update`]). Instantiation turns a graph into an
//! [`ExecPlan`]: a snapshot in an order in which it can run, with the graphs of child nodes inlined.

mod plan;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{Error, Result};
use crate::handle::{GraphId, NodeId};

pub use plan::{ExecPlan, PlanStep, UpdateMismatch};

/// A node's operation.
pub trait Payload: Clone {
    /// The child graph; `None` for all other nodes.
    fn child(&self) -> Option<GraphId>;
}

/// A node with its edges.
#[derive(Clone, Debug)]
struct Node<P> {
    payload: P,
    after: BTreeSet<NodeId>,
    before: BTreeSet<NodeId>,
}

/// A directed acyclic graph of nodes.
#[derive(Clone, Debug)]
pub struct Graph<P> {
    nodes: BTreeMap<NodeId, Node<P>>,
    /// The data of edges whose data is not zero.
    data: BTreeMap<Edge, EdgeData>,
}

/// (node, dependent node).
pub type Edge = (NodeId, NodeId);

/// `CUgraphEdgeData`. All zeros: the dependent node starts when the node has ended.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EdgeData {
    /// What of the node the edge waits for: 1 until all blocks of a kernel have allowed dependents to start, 2 until they have
    /// started.
    pub from_port: u8,
    /// The part of the dependent node that waits; 0, the whole node, is the only one.
    pub to_port: u8,
    /// `CUgraphDependencyType`: 0, or 1 for a programmatic edge, whose dependent kernel waits by `griddepcontrol.wait`.
    pub kind: u8,
    /// Zeros.
    pub reserved: [u8; 5],
}

impl EdgeData {
    /// Whether the dependent kernel may start before the node has ended.
    pub fn is_programmatic(self) -> bool {
        self.kind == 1
    }

    /// Whether the driver accepts it between two kernels, or else between any nodes.
    pub fn is_valid(self, between_kernels: bool) -> bool {
        let programmatic = |port| Self { from_port: port, kind: 1, ..Self::default() };
        self == Self::default() || between_kernels && [1, 2].map(programmatic).contains(&self)
    }
}

impl<P> Default for Graph<P> {
    fn default() -> Self {
        Self { nodes: BTreeMap::new(), data: BTreeMap::new() }
    }
}

impl<P> Graph<P> {
    /// Adds a node with its dependencies. Each dependency must be in the graph and be listed once.
    pub fn add(&mut self, id: NodeId, payload: P, after: &[NodeId]) -> Result<()> {
        let set: BTreeSet<NodeId> = after.iter().copied().collect();
        if set.len() != after.len()
            || set.iter().any(|node| !self.nodes.contains_key(node))
            || self.nodes.contains_key(&id)
        {
            return Err(Error::InvalidValue);
        }
        for node in &set {
            self.node_mut(*node)?.before.insert(id);
        }
        self.nodes.insert(id, Node { payload, after: set, before: BTreeSet::new() });
        Ok(())
    }

    /// Removes a node and its edges.
    pub fn remove(&mut self, id: NodeId) -> Result<P> {
        let gone = self.nodes.remove(&id).ok_or(Error::InvalidValue)?;
        for node in self.nodes.values_mut() {
            node.after.remove(&id);
            node.before.remove(&id);
        }
        self.data.retain(|&(from, to), _| from != id && to != id);
        Ok(gone.payload)
    }

    /// Adds all edges, or none and fails if an edge exists already, has an end outside of the graph or would close a cycle.
    pub fn connect(&mut self, edges: &[Edge]) -> Result<()> {
        for (count, &(from, to)) in edges.iter().enumerate() {
            if let Err(error) = self.connect_one(from, to) {
                for &(from, to) in &edges[..count] {
                    self.cut(from, to);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn connect_one(&mut self, from: NodeId, to: NodeId) -> Result<()> {
        let there = self.node(from)?.before.contains(&to);
        self.node(to)?;
        if there || self.ancestors(&[from]).contains(&to) {
            return Err(Error::InvalidValue);
        }
        self.node_mut(from)?.before.insert(to);
        self.node_mut(to)?.after.insert(from);
        Ok(())
    }

    /// Removes all edges, or none and fails if an edge does not exist.
    pub fn disconnect(&mut self, edges: &[Edge]) -> Result<()> {
        let distinct: BTreeSet<&Edge> = edges.iter().collect();
        let there = |&&(from, to): &&Edge| self.nodes.get(&from).is_some_and(|node| node.before.contains(&to));
        if distinct.len() != edges.len() || !distinct.iter().all(there) {
            return Err(Error::InvalidValue);
        }
        edges.iter().for_each(|&(from, to)| self.cut(from, to));
        Ok(())
    }

    fn cut(&mut self, from: NodeId, to: NodeId) {
        self.data.remove(&(from, to));
        if let Some(node) = self.nodes.get_mut(&from) {
            node.before.remove(&to);
        }
        if let Some(node) = self.nodes.get_mut(&to) {
            node.after.remove(&from);
        }
    }

    /// Sets the data of an edge, which exists.
    pub fn set_edge_data(&mut self, edge: Edge, data: EdgeData) {
        match data == EdgeData::default() {
            true => self.data.remove(&edge),
            false => self.data.insert(edge, data),
        };
    }

    /// The data of an edge.
    pub fn edge_data(&self, edge: Edge) -> EdgeData {
        self.data.get(&edge).copied().unwrap_or_default()
    }

    fn node(&self, id: NodeId) -> Result<&Node<P>> {
        self.nodes.get(&id).ok_or(Error::InvalidValue)
    }

    fn node_mut(&mut self, id: NodeId) -> Result<&mut Node<P>> {
        self.nodes.get_mut(&id).ok_or(Error::InvalidValue)
    }

    /// A node's operation.
    pub fn payload(&self, id: NodeId) -> Result<&P> {
        self.node(id).map(|node| &node.payload)
    }

    /// A node's operation, mutable.
    pub fn payload_mut(&mut self, id: NodeId) -> Result<&mut P> {
        self.node_mut(id).map(|node| &mut node.payload)
    }

    /// Nodes that a node depends on.
    pub fn dependencies(&self, id: NodeId) -> Result<Vec<NodeId>> {
        Ok(self.node(id)?.after.iter().copied().collect())
    }

    /// Nodes that depend on a node.
    pub fn dependents(&self, id: NodeId) -> Result<Vec<NodeId>> {
        Ok(self.node(id)?.before.iter().copied().collect())
    }

    /// All nodes with their payloads, in the order of creation.
    pub fn iter(&self) -> impl Iterator<Item = (NodeId, &P)> {
        self.nodes.iter().map(|(&id, node)| (id, &node.payload))
    }

    /// All nodes with their payloads, mutable.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (NodeId, &mut P)> {
        self.nodes.iter_mut().map(|(&id, node)| (id, &mut node.payload))
    }

    /// Nodes without dependencies.
    pub fn roots(&self) -> Vec<NodeId> {
        self.nodes.iter().filter(|(_, node)| node.after.is_empty()).map(|(&id, _)| id).collect()
    }

    /// All edges.
    pub fn edges(&self) -> Vec<Edge> {
        self.nodes.iter().flat_map(|(&from, node)| node.before.iter().map(move |&to| (from, to))).collect()
    }

    /// These nodes and all their direct and indirect dependencies.
    pub fn ancestors(&self, of: &[NodeId]) -> BTreeSet<NodeId> {
        let mut found = BTreeSet::new();
        let mut open = of.to_vec();
        while let Some(id) = open.pop() {
            if let Some(node) = self.nodes.get(&id)
                && found.insert(id)
            {
                open.extend(&node.after);
            }
        }
        found
    }

    /// All nodes in topological order; among nodes that could come next, the oldest first.
    pub fn order(&self) -> Vec<NodeId> {
        let mut missing: BTreeMap<NodeId, usize> =
            self.nodes.iter().map(|(&id, node)| (id, node.after.len())).collect();
        let mut next: BTreeSet<NodeId> = self.roots().into_iter().collect();
        let mut order = Vec::with_capacity(self.nodes.len());
        while let Some(id) = next.pop_first() {
            order.push(id);
            for &later in self.nodes.get(&id).map(|node| &node.before).into_iter().flatten() {
                if let Some(missing) = missing.get_mut(&later) {
                    *missing -= 1;
                    if *missing == 0 {
                        next.insert(later);
                    }
                }
            }
        }
        order
    }

    /// A copy with new nodes (`fresh` returns ascending ids), and the copy of each node.
    pub fn copy(&self, mut fresh: impl FnMut() -> NodeId) -> (Self, BTreeMap<NodeId, NodeId>)
    where
        P: Clone,
    {
        let names: BTreeMap<NodeId, NodeId> = self.nodes.keys().map(|&id| (id, fresh())).collect();
        let renamed = |ids: &BTreeSet<NodeId>| ids.iter().filter_map(|id| names.get(id).copied()).collect();
        let nodes = self.nodes.iter().filter_map(|(id, node)| {
            let copy =
                Node { payload: node.payload.clone(), after: renamed(&node.after), before: renamed(&node.before) };
            Some((*names.get(id)?, copy))
        });
        let data =
            self.data.iter().filter_map(|((from, to), &data)| Some(((*names.get(from)?, *names.get(to)?), data)));
        (Self { nodes: nodes.collect(), data: data.collect() }, names)
    }
}

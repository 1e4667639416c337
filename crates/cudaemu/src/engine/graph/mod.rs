//! Graphs: nodes and their dependencies.
//!
//! A [`Graph`] does not interpret its nodes' operations: they are its payload. Instantiation turns a graph into an [`ExecPlan`]:
//! a snapshot in an order in which it can run.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{Error, Result};
use crate::handle::NodeId;

/// A node with the nodes that it depends on.
#[derive(Clone, Debug)]
struct Node<P> {
    payload: P,
    after: BTreeMap<NodeId, EdgeData>,
}

/// A directed acyclic graph of nodes, in the order of creation.
#[derive(Clone, Debug)]
pub struct Graph<P> {
    nodes: BTreeMap<NodeId, Node<P>>,
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

    /// Whether the driver accepts it between two kernels.
    fn is_valid(self) -> bool {
        let programmatic = |port| Self { from_port: port, kind: 1, ..Self::default() };
        [Self::default(), programmatic(1), programmatic(2)].contains(&self)
    }
}

impl<P> Default for Graph<P> {
    fn default() -> Self {
        Self { nodes: BTreeMap::new() }
    }
}

impl<P> Graph<P> {
    /// Adds a node with its dependencies. Each dependency must be in the graph and be listed once.
    pub fn add(&mut self, id: NodeId, payload: P, after: &[NodeId]) -> Result<()> {
        let set: BTreeMap<NodeId, EdgeData> = after.iter().map(|&node| (node, EdgeData::default())).collect();
        let exist = set.keys().all(|node| self.nodes.contains_key(node));
        if set.len() != after.len() || !exist || self.nodes.contains_key(&id) {
            return Err(Error::InvalidValue);
        }
        self.nodes.insert(id, Node { payload, after: set });
        Ok(())
    }

    /// Adds all edges, or none and fails if an edge exists already, has an end outside of the graph or invalid data, or would
    /// close a cycle.
    pub fn connect(&mut self, edges: &[(Edge, EdgeData)]) -> Result<()> {
        for (count, &((from, to), data)) in edges.iter().enumerate() {
            if let Err(error) = self.connect_one(from, to, data) {
                for ((from, to), _) in &edges[..count] {
                    self.nodes.get_mut(to).map(|node| node.after.remove(from));
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn connect_one(&mut self, from: NodeId, to: NodeId, data: EdgeData) -> Result<()> {
        let closes_cycle = self.ancestors(from).contains(&to);
        let exists = self.nodes.contains_key(&from);
        let after = &mut self.nodes.get_mut(&to).ok_or(Error::InvalidValue)?.after;
        if closes_cycle || !exists || !data.is_valid() || after.contains_key(&from) {
            return Err(Error::InvalidValue);
        }
        after.insert(from, data);
        Ok(())
    }

    /// All nodes, in the order of creation.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> {
        self.nodes.keys().copied()
    }

    /// This node and all its direct and indirect dependencies.
    fn ancestors(&self, of: NodeId) -> BTreeSet<NodeId> {
        let mut found = BTreeSet::new();
        let mut open = vec![of];
        while let Some(id) = open.pop() {
            if let Some(node) = self.nodes.get(&id)
                && found.insert(id)
            {
                open.extend(node.after.keys());
            }
        }
        found
    }

    /// All nodes in topological order; among nodes that could come next, the oldest first.
    fn order(&self) -> Vec<NodeId> {
        let mut missing: BTreeMap<NodeId, usize> =
            self.nodes.iter().map(|(&id, node)| (id, node.after.len())).collect();
        let mut dependents = BTreeMap::<NodeId, Vec<NodeId>>::new();
        for (&id, node) in &self.nodes {
            node.after.keys().for_each(|&before| dependents.entry(before).or_default().push(id));
        }
        let mut next: BTreeSet<NodeId> =
            self.nodes.iter().filter(|(_, node)| node.after.is_empty()).map(|(&id, _)| id).collect();
        let mut order = Vec::with_capacity(self.nodes.len());
        while let Some(id) = next.pop_first() {
            order.push(id);
            for &later in dependents.get(&id).into_iter().flatten() {
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
}

/// A step of a plan.
#[derive(Clone, Debug)]
pub struct PlanStep<P> {
    /// The operation.
    pub payload: P,
    /// Indices of earlier steps that it depends on.
    pub after: Vec<usize>,
    /// Whether an edge to its node is programmatic: the kernel itself waits for the node before. The step nevertheless runs after
    /// that node has ended, which is one of the orders that such an edge allows.
    pub programmatic: bool,
}

/// A snapshot of a graph as a list of steps in topological order.
#[derive(Clone, Debug)]
pub struct ExecPlan<P> {
    steps: Vec<PlanStep<P>>,
    /// The step of each node.
    index: BTreeMap<NodeId, usize>,
}

impl<P: Clone> ExecPlan<P> {
    /// Plans a graph.
    pub fn new(graph: &Graph<P>) -> Self {
        let mut plan = Self { steps: Vec::new(), index: BTreeMap::new() };
        for id in graph.order() {
            let Some(Node { payload, after }) = graph.nodes.get(&id) else { continue };
            plan.index.insert(id, plan.steps.len());
            plan.steps.push(PlanStep {
                payload: payload.clone(),
                after: after.keys().filter_map(|node| plan.index.get(node).copied()).collect(),
                programmatic: after.values().any(|data| data.is_programmatic()),
            });
        }
        plan
    }

    /// All steps in topological order.
    pub fn steps(&self) -> &[PlanStep<P>] {
        &self.steps
    }

    /// The step of a node.
    pub fn step_mut(&mut self, node: NodeId) -> Result<&mut PlanStep<P>> {
        self.index.get(&node).and_then(|&at| self.steps.get_mut(at)).ok_or(Error::InvalidValue)
    }
}

//! Execution plans: the result of instantiating a graph.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{Graph, Payload};
use crate::error::{Error, Result};
use crate::handle::{GraphId, NodeId};

/// Maximum nesting of child graphs. (A graph cannot contain itself: adding a child copies it.)
const DEPTH: usize = 64;

/// A step of a plan.
#[derive(Clone, Debug)]
pub struct PlanStep<P> {
    /// The node that it executes.
    pub node: NodeId,
    /// The operation; `None` for the steps that begin and end a child graph.
    pub payload: Option<P>,
    /// Indices of earlier steps that it depends on.
    pub after: Vec<usize>,
    /// A disabled step does nothing, but keeps its dependencies.
    pub enabled: bool,
    /// Whether an edge to its node is programmatic: the kernel itself waits for the node before. The step nevertheless runs after
    /// that node has ended, which is one of the orders that such an edge allows.
    pub programmatic: bool,
}

/// A snapshot of a graph as a list of steps in topological order.
#[derive(Clone, Debug)]
pub struct ExecPlan<P> {
    steps: Vec<PlanStep<P>>,
    /// The step of each node; for a child graph node, the step that begins it.
    index: BTreeMap<NodeId, usize>,
    /// The steps between the begin and the end of each child graph node.
    children: BTreeMap<NodeId, Range<usize>>,
}

/// Why a plan cannot be updated to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpdateMismatch<R> {
    /// The nodes or edges differ; holds the first node of the new graph without counterpart, if any.
    Topology(Option<NodeId>),
    /// A node's operation cannot replace its counterpart's: the new node, the old node, the reason.
    Node(NodeId, NodeId, R),
}

impl<P: Payload> ExecPlan<P> {
    /// Plans a graph. `graphs` returns the graphs of child nodes.
    pub fn new<'a>(graph: &'a Graph<P>, graphs: &dyn Fn(GraphId) -> Option<&'a Graph<P>>) -> Result<Self>
    where
        P: 'a,
    {
        let mut plan = Self { steps: Vec::new(), index: BTreeMap::new(), children: BTreeMap::new() };
        plan.append_graph(graph, &[], graphs, DEPTH)?;
        Ok(plan)
    }

    /// Appends a graph whose roots depend on `after`; returns the steps without dependents.
    fn append_graph<'a>(
        &mut self,
        graph: &'a Graph<P>,
        after: &[usize],
        graphs: &dyn Fn(GraphId) -> Option<&'a Graph<P>>,
        depth: usize,
    ) -> Result<Vec<usize>>
    where
        P: 'a,
    {
        let depth = depth.checked_sub(1).ok_or(Error::InvalidValue)?;
        // The step that ends each node: a child graph node has separate begin and end steps.
        let mut ends = BTreeMap::new();
        for id in graph.order() {
            let dependencies = graph.dependencies(id)?;
            let waits = match dependencies[..] {
                [] => after.to_vec(),
                _ => dependencies.iter().filter_map(|node| ends.get(node).copied()).collect(),
            };
            let payload = graph.payload(id)?;
            let begin = self.push(id, payload.child().is_none().then(|| payload.clone()), waits);
            self.steps[begin].programmatic =
                dependencies.iter().any(|&before| graph.edge_data((before, id)).is_programmatic());
            self.index.insert(id, begin);
            let end = match payload.child() {
                None => begin,
                Some(child) => {
                    let child = graphs(child).ok_or(Error::InvalidValue)?;
                    let mut last = self.append_graph(child, &[begin], graphs, depth)?;
                    if last.is_empty() {
                        last.push(begin);
                    }
                    let end = self.push(id, None, last);
                    self.children.insert(id, begin + 1..end);
                    end
                }
            };
            ends.insert(id, end);
        }
        let last = graph.nodes.iter().filter(|(_, node)| node.before.is_empty());
        Ok(last.filter_map(|(id, _)| ends.get(id).copied()).collect())
    }

    fn push(&mut self, node: NodeId, payload: Option<P>, after: Vec<usize>) -> usize {
        self.steps.push(PlanStep { node, payload, after, enabled: true, programmatic: false });
        self.steps.len() - 1
    }

    /// All steps in topological order.
    pub fn steps(&self) -> &[PlanStep<P>] {
        &self.steps
    }

    /// The step of a node, which may be in a child graph.
    pub fn step(&self, node: NodeId) -> Result<&PlanStep<P>> {
        self.index.get(&node).and_then(|&at| self.steps.get(at)).ok_or(Error::InvalidValue)
    }

    /// The step of a node, mutable.
    pub fn step_mut(&mut self, node: NodeId) -> Result<&mut PlanStep<P>> {
        self.index.get(&node).and_then(|&at| self.steps.get_mut(at)).ok_or(Error::InvalidValue)
    }

    /// Replaces all operations by those of a plan with the same topology. `fits(old, new)` returns the reason if an operation
    /// cannot be replaced. Nothing changes on failure.
    pub fn update<R>(
        &mut self,
        new: &Self,
        fits: impl Fn(&P, &P) -> std::result::Result<(), R>,
    ) -> std::result::Result<(), UpdateMismatch<R>> {
        let all = 0..self.steps.len();
        self.replace(all, new, fits)
    }

    /// As [`ExecPlan::update`], for the steps of one child graph node.
    pub fn update_child<R>(
        &mut self,
        node: NodeId,
        new: &Self,
        fits: impl Fn(&P, &P) -> std::result::Result<(), R>,
    ) -> std::result::Result<(), UpdateMismatch<R>> {
        let range = self.children.get(&node).cloned().ok_or(UpdateMismatch::Topology(None))?;
        self.replace(range, new, fits)
    }

    fn replace<R>(
        &mut self,
        range: Range<usize>,
        new: &Self,
        fits: impl Fn(&P, &P) -> std::result::Result<(), R>,
    ) -> std::result::Result<(), UpdateMismatch<R>> {
        let first = range.start;
        let old = &mut self.steps[range];
        for (mine, its) in old.iter().zip(&new.steps) {
            // A dependency before the range is the child graph's begin step, which a plan of the child alone does not have.
            let inside = mine.after.iter().filter_map(|&step| step.checked_sub(first));
            let same = mine.programmatic == its.programmatic && mine.payload.is_none() == its.payload.is_none();
            if !same || !inside.eq(its.after.iter().copied()) {
                return Err(UpdateMismatch::Topology(Some(its.node)));
            }
            if let (Some(old), Some(new)) = (&mine.payload, &its.payload) {
                fits(old, new).map_err(|reason| UpdateMismatch::Node(its.node, mine.node, reason))?;
            }
        }
        if old.len() != new.steps.len() {
            return Err(UpdateMismatch::Topology(new.steps.get(old.len()).map(|step| step.node)));
        }
        for (mine, its) in old.iter_mut().zip(&new.steps) {
            mine.payload.clone_from(&its.payload);
        }
        Ok(())
    }
}

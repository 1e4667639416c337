//! What instantiating makes of a graph.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{Graph, Payload};
use crate::error::{Error, Result};
use crate::handle::{GraphId, NodeId};

/// Graphs in graphs deeper than this are refused. (A graph cannot hold itself: adding a child copies it.)
const DEPTH: usize = 64;

/// A piece of a plan.
#[derive(Clone, Debug)]
pub struct PlanStep<P> {
    /// The node that it comes from.
    pub node: NodeId,
    /// What to do; nothing, where a child graph begins or ends.
    pub payload: Option<P>,
    /// Steps before this one that must be done.
    pub after: Vec<usize>,
    /// Disabled steps do nothing, but keep their place.
    pub enabled: bool,
}

/// A snapshot of a graph, each step after those that it waits for.
#[derive(Clone, Debug)]
pub struct ExecPlan<P> {
    steps: Vec<PlanStep<P>>,
    /// The step of each node; of a child graph node the one that begins it.
    index: BTreeMap<NodeId, usize>,
    /// The steps between beginning and end of each child graph node.
    children: BTreeMap<NodeId, Range<usize>>,
}

/// Why a plan cannot become another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpdateMismatch<R> {
    /// Other nodes or edges; the new graph's node where that shows, if there is one.
    Topology(Option<NodeId>),
    /// A node does something that its counterpart cannot become: the new node, the old one, the reason.
    Node(NodeId, NodeId, R),
}

impl<P: Payload> ExecPlan<P> {
    /// Lays a graph out. `graphs` gives the graphs of child nodes.
    pub fn new<'a>(graph: &'a Graph<P>, graphs: &dyn Fn(GraphId) -> Option<&'a Graph<P>>) -> Result<Self>
    where
        P: 'a,
    {
        let mut plan = Self { steps: Vec::new(), index: BTreeMap::new(), children: BTreeMap::new() };
        plan.lay(graph, &[], graphs, DEPTH)?;
        Ok(plan)
    }

    /// Appends a graph whose roots wait for `after`; gives the steps that nothing of it waits for.
    fn lay<'a>(
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
        // The step that ends each node: for a child graph that is not the one that begins it.
        let mut ends = BTreeMap::new();
        for id in graph.order() {
            let dependencies = graph.dependencies(id)?;
            let waits = match dependencies[..] {
                [] => after.to_vec(),
                _ => dependencies.iter().filter_map(|node| ends.get(node).copied()).collect(),
            };
            let payload = graph.payload(id)?;
            let begin = self.push(id, payload.child().is_none().then(|| payload.clone()), waits);
            self.index.insert(id, begin);
            let end = match payload.child() {
                None => begin,
                Some(child) => {
                    let child = graphs(child).ok_or(Error::InvalidValue)?;
                    let mut last = self.lay(child, &[begin], graphs, depth)?;
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
        self.steps.push(PlanStep { node, payload, after, enabled: true });
        self.steps.len() - 1
    }

    /// All steps, in an order in which they may run.
    pub fn steps(&self) -> &[PlanStep<P>] {
        &self.steps
    }

    /// The step of a node, which may be in a child graph.
    pub fn step(&self, node: NodeId) -> Result<&PlanStep<P>> {
        self.index.get(&node).and_then(|&at| self.steps.get(at)).ok_or(Error::InvalidValue)
    }

    /// The step of a node, to be changed.
    pub fn step_mut(&mut self, node: NodeId) -> Result<&mut PlanStep<P>> {
        self.index.get(&node).and_then(|&at| self.steps.get_mut(at)).ok_or(Error::InvalidValue)
    }

    /// Takes over what the steps of a plan of the same shape do. `fits(old, new)` says why a node cannot. Nothing changes on failure.
    pub fn update<R>(
        &mut self,
        new: &Self,
        fits: impl Fn(&P, &P) -> std::result::Result<(), R>,
    ) -> std::result::Result<(), UpdateMismatch<R>> {
        let all = 0..self.steps.len();
        self.replace(all, new, fits)
    }

    /// The same for the steps of one child graph node.
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
            // What lies before the range is the step that begins the child graph: in a plan of its own that is none.
            let inside = mine.after.iter().filter_map(|&step| step.checked_sub(first));
            if !inside.eq(its.after.iter().copied()) || mine.payload.is_none() != its.payload.is_none() {
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

//! Creation and editing of graphs.

use super::{DeferredRelease, GraphEntry, GraphNode, Graphs};
use crate::engine::{Edge, EdgeData, Graph};
use crate::error::{Error, Result};
use crate::handle::{GraphId, NodeId};

impl Graphs {
    /// `cuGraphCreate`
    pub fn create(&mut self) -> GraphId {
        let id = self.new_id();
        self.graphs.insert(GraphEntry { id, ..GraphEntry::default() })
    }

    /// `cuGraphDestroy`: also destroys the graphs that its child nodes own.
    pub fn destroy(&mut self, graph: GraphId) -> Result<DeferredRelease> {
        if self.entry(graph)?.owned {
            return Err(Error::InvalidValue);
        }
        let mut deferred = DeferredRelease::default();
        self.drop_graph(graph, &mut deferred);
        Ok(deferred)
    }

    fn drop_graph(&mut self, graph: GraphId, deferred: &mut DeferredRelease) {
        let Ok(entry) = self.graphs.remove(graph) else { return };
        for (id, node) in entry.graph.iter() {
            // Cannot fail: every node of a graph is in the table.
            let _ = self.nodes.remove(id);
            self.drop_node(node, deferred);
        }
        for (object, count) in entry.objects {
            deferred.calls.extend(self.drop_references(object, count));
        }
    }

    fn drop_node(&mut self, node: &GraphNode, deferred: &mut DeferredRelease) {
        match node {
            GraphNode::Child(child) => self.drop_graph(*child, deferred),
            GraphNode::Alloc(memory) => deferred.memory.extend(self.drop_use(memory.address)),
            _ => {}
        }
    }

    /// Adds a node that depends on `after`.
    pub fn add(&mut self, graph: GraphId, after: &[NodeId], node: GraphNode) -> Result<NodeId> {
        let entry = self.graphs.get_mut(graph)?;
        let id = self.nodes.reserve();
        entry.graph.add(id, node, after)?;
        self.nodes.insert_reserved(id, graph);
        Ok(id)
    }

    /// `cuGraphAddChildGraphNode`: the node owns a copy of the graph.
    pub fn add_child(&mut self, graph: GraphId, after: &[NodeId], child: GraphId) -> Result<NodeId> {
        self.entry(graph)?;
        let copy = self.copy(child)?;
        self.add_owned_child(graph, after, copy)
    }

    /// Adds a child node that takes ownership of a graph.
    pub(super) fn add_owned_child(&mut self, graph: GraphId, after: &[NodeId], child: GraphId) -> Result<NodeId> {
        self.graphs.get_mut(child)?.owned = true;
        let added = self.add(graph, after, GraphNode::Child(child));
        if added.is_err() {
            // The copy holds neither memory nor launches yet, so there is nothing to wait for.
            self.drop_graph(child, &mut DeferredRelease::default());
        }
        added
    }

    /// `cuGraphDestroyNode`. Fails for memory nodes, as in CUDA.
    pub fn destroy_node(&mut self, node: NodeId) -> Result<DeferredRelease> {
        let graph = self.graph_of(node)?;
        let mut deferred = DeferredRelease::default();
        if matches!(self.node(node)?, GraphNode::Alloc(_) | GraphNode::Free(_)) {
            return Err(Error::NotSupported);
        }
        let payload = self.graphs.get_mut(graph)?.graph.remove(node)?;
        self.nodes.remove(node)?;
        self.drop_node(&payload, &mut deferred);
        Ok(deferred)
    }

    /// `cuGraphClone`. Fails for graphs with memory nodes, because their memory has a single owner.
    pub fn copy(&mut self, graph: GraphId) -> Result<GraphId> {
        let entry = self.entry(graph)?;
        if entry.graph.iter().any(|(_, node)| matches!(node, GraphNode::Alloc(_) | GraphNode::Free(_))) {
            return Err(Error::NotSupported);
        }
        let objects = entry.objects.clone();
        let Self { graphs, nodes, .. } = self;
        let (mut copy, names) = graphs.get(graph)?.graph.copy(|| nodes.reserve());
        for (_, node) in copy.iter_mut() {
            if let GraphNode::Child(child) = node {
                let inner = self.copy(*child)?;
                self.graphs.get_mut(inner)?.owned = true;
                *child = inner;
            }
        }
        let id = self.new_id();
        for (&object, &count) in &objects {
            self.add_references(object, count)?;
        }
        let made = self.graphs.insert(GraphEntry {
            graph: copy,
            id,
            owned: false,
            copied: Some((graph, names.clone())),
            objects,
        });
        for node in names.into_values() {
            self.nodes.insert_reserved(node, made);
        }
        Ok(made)
    }

    /// `cuGraphNodeFindInClone`
    pub fn find_in_clone(&self, original: NodeId, clone: GraphId) -> Result<NodeId> {
        let (from, names) = self.entry(clone)?.copied.as_ref().ok_or(Error::InvalidValue)?;
        if let Some(&found) = names.get(&original) {
            // The node may have been destroyed since.
            return self.get(clone)?.payload(found).map(|_| found);
        }
        // The node may be in the graph of a child node, which the clone has copied.
        let inner =
            self.get(*from).into_iter().flat_map(Graph::iter).filter(|(_, node)| matches!(node, GraphNode::Child(_)));
        let inner = inner.filter_map(|(id, _)| match self.node(*names.get(&id)?).ok()? {
            GraphNode::Child(child) => Some(*child),
            _ => None,
        });
        inner.into_iter().find_map(|child| self.find_in_clone(original, child).ok()).ok_or(Error::InvalidValue)
    }

    /// `cuGraphAddDependencies`
    pub fn connect(&mut self, graph: GraphId, edges: &[(Edge, EdgeData)]) -> Result<()> {
        let graph = &mut self.graphs.get_mut(graph)?.graph;
        let is_kernel = |node| graph.payload(node).is_ok_and(|node| matches!(node, GraphNode::Kernel(_)));
        if !edges.iter().all(|&((from, to), data)| data.is_valid(is_kernel(from) && is_kernel(to))) {
            return Err(Error::InvalidValue);
        }
        graph.connect(&edges.iter().map(|&(edge, _)| edge).collect::<Vec<_>>())?;
        edges.iter().for_each(|&(edge, data)| graph.set_edge_data(edge, data));
        Ok(())
    }

    /// `cuGraphRemoveDependencies`
    pub fn disconnect(&mut self, graph: GraphId, edges: &[(Edge, EdgeData)]) -> Result<()> {
        let graph = &mut self.graphs.get_mut(graph)?.graph;
        if !edges.iter().all(|&(edge, data)| graph.edge_data(edge) == data) {
            return Err(Error::InvalidValue);
        }
        graph.disconnect(&edges.iter().map(|&(edge, _)| edge).collect::<Vec<_>>())
    }

    /// Replaces a node's operation by one of the same kind.
    pub fn set_node(&mut self, node: NodeId, new: GraphNode) -> Result<()> {
        let graph = self.graph_of(node)?;
        let payload = self.graphs.get_mut(graph)?.graph.payload_mut(node)?;
        if payload.kind() != new.kind() || matches!(new, GraphNode::Child(_) | GraphNode::Alloc(_) | GraphNode::Free(_))
        {
            return Err(Error::InvalidValue);
        }
        *payload = new;
        Ok(())
    }

    /// The graph and the graphs of its child nodes in the DOT language.
    pub fn dot(&self, graph: GraphId) -> Result<String> {
        let mut text = String::from("digraph dot {\n");
        self.dot_part(graph, &mut text)?;
        text.push_str("}\n");
        Ok(text)
    }

    fn dot_part(&self, graph: GraphId, text: &mut String) -> Result<()> {
        use crate::handle::Handle;
        let entry = self.entry(graph)?;
        let name = |node: NodeId| format!("\"graph_{}_node_{:x}\"", entry.id, node.raw() >> 4 & 0xff_ffff);
        text.push_str(&format!("subgraph cluster_{} {{\nlabel=\"graph_{}\"\n", entry.id, entry.id));
        for (id, node) in entry.graph.iter() {
            text.push_str(&format!(
                "{} [shape=\"rectangle\" label=\"{}\"];\n",
                name(id),
                node.label().replace('"', "'")
            ));
        }
        for (from, to) in entry.graph.edges() {
            text.push_str(&format!("{} -> {};\n", name(from), name(to)));
        }
        for (_, node) in entry.graph.iter() {
            if let GraphNode::Child(child) = node {
                self.dot_part(*child, text)?;
            }
        }
        text.push_str("}\n");
        Ok(())
    }
}

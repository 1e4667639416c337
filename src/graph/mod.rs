//! Compute graphs: an arena of tensors, and the nodes that compute some of these tensors, in execution order.
//!
//! Only ops that compute are nodes; a view is a tensor inside another tensor's memory. [`Builder`] builds graphs in process,
//! and [`validate::import_untrusted`] imports graphs from peers. Both obey the rules of [`validate::check`], on which kernels
//! rely.
//!
//! Start with this file. `builder.rs` and `validate.rs` create graphs, `overlap.rs` decides which tensors may share bytes,
//! `fuse.rs` combines neighbouring nodes into fused kernels, and `ranges.rs` has sets of byte ranges. Scheduling of graphs over
//! several devices is in `sched/`, and shape rules are in `ops/`.

mod builder;
pub(crate) mod fuse;
mod overlap;
mod ranges;
pub mod validate;

pub use builder::{BuildError, Builder, NodeError};
pub(crate) use builder::{FOREIGN, sources};
pub(crate) use overlap::{Overlap, overlap};
pub(crate) use ranges::ByteRangeSet;

use crate::ops::{MAX_SRC, NodeView, Op, Sources};
use crate::tensor::TensorDesc;
use std::collections::HashMap;
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

/// The sources of an op that has none.
pub const NO_SOURCES: [TensorId; 0] = [];

/// A tensor of a graph. A [`Builder`] refuses the id of another graph.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct TensorId {
    /// Index in the arena of the graph.
    index: u32,
    graph: GraphNumber,
}

impl TensorId {
    /// Index in the arena of its graph.
    pub(crate) fn index(self) -> usize {
        self.index as usize
    }
}

/// Number of a graph within the process: each builder takes the next one. A graph from a peer, whose ids never leave it, has the first
/// one. Numbers repeat after 2^32 graphs. They are not zero so that an `Option` of an id takes no more memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
struct GraphNumber(NonZeroU32);

impl GraphNumber {
    const PEER: GraphNumber = GraphNumber(NonZeroU32::MIN);

    fn next() -> GraphNumber {
        static NEXT: AtomicU32 = AtomicU32::new(2);
        GraphNumber(NonZeroU32::new(NEXT.fetch_add(1, Ordering::Relaxed)).unwrap_or(NonZeroU32::MAX))
    }
}

/// The address of a tensor's first byte: `offset` bytes into the memory that is bound to `slot` when the graph runs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SlotOffset {
    /// Index into the bindings of a run.
    pub slot: u32,
    /// Bytes from the start of the bound region.
    pub offset: usize,
}

/// A tensor of a graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Type, shape and strides.
    pub desc: TensorDesc,
    /// Its memory; `None` if it has not been placed yet.
    pub place: Option<SlotOffset>,
    /// Number of ops, including view ops, that read the tensor in the whole graph of the client. `None` if the number is
    /// unknown, or if the tensor is an output, which may be read after the run. A fused kernel may skip the write of a result
    /// that has one reader.
    pub use_count: Option<u32>,
    /// For a view: the tensor that it shows. Set only if no op reads a view between the two.
    pub view_of: Option<TensorId>,
}

/// One computation: `dst = op(srcs)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// The op with its parameters.
    pub op: Op,
    /// The tensor that the node writes.
    pub dst: TensorId,
    /// The tensors that the node reads, by position.
    pub srcs: [Option<TensorId>; MAX_SRC],
}

/// A graph: tensors, nodes in execution order, and the size of the memory that each slot needs. It equals its copies only.
#[derive(Clone, Debug, PartialEq)]
pub struct Graph {
    number: GraphNumber,
    tensors: Vec<Tensor>,
    nodes: Vec<Node>,
    slots: Vec<usize>,
}

impl Graph {
    fn new(number: GraphNumber) -> Graph {
        Graph { number, tensors: Vec::new(), nodes: Vec::new(), slots: Vec::new() }
    }

    /// The tensor with this id. The id of another graph gives the tensor with its index, so that graphs that are built alike have
    /// each other's ids: `None` or an unrelated tensor, never undefined behaviour, if they are not.
    pub fn tensor(&self, id: TensorId) -> Option<&Tensor> {
        self.tensors.get(id.index())
    }

    /// As [`Graph::tensor`], but `None` for the id of another graph.
    fn own(&self, id: TensorId) -> Option<&Tensor> {
        self.tensor(id).filter(|_| id.graph == self.number)
    }

    /// The id of the tensor at an index of [`Graph::tensors`].
    pub(crate) fn id(&self, index: usize) -> TensorId {
        TensorId { index: index as u32, graph: self.number }
    }

    /// The id of the tensor that is added next.
    fn next_id(&self) -> TensorId {
        self.id(self.tensors.len())
    }

    /// All tensors, in order of their ids.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The nodes, in execution order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// By slot: bytes that the bound memory must have.
    pub fn slot_sizes(&self) -> &[usize] {
        &self.slots
    }

    /// The view of a node that shape rules and devices take; `None` if the node refers to tensors that the graph lacks.
    pub fn node_view<'a>(&'a self, node: &'a Node) -> Option<NodeView<'a>> {
        let dst = &self.tensor(node.dst)?.desc;
        let (mut srcs, mut starts) = ([None; MAX_SRC], [None; MAX_SRC]);
        for ((src, start), id) in srcs.iter_mut().zip(&mut starts).zip(node.srcs) {
            if let Some(id) = id {
                let tensor = self.tensor(id)?;
                *src = Some(&tensor.desc);
                *start = tensor.place.map(|place| (place.slot, place.offset));
            }
        }
        let operands = node.srcs.into_iter().flatten().chain([node.dst]);
        let fits = |t: &Tensor| t.place.is_none_or(|place| t.desc.is_aligned_at(place.offset));
        let aligned = operands.into_iter().all(|id| self.tensor(id).is_none_or(fits));
        let srcs = Sources::new(node.op.code(), &srcs).with_starts(starts);
        Some(NodeView { op: &node.op, dst, srcs, aligned })
    }

    /// The same graph with other places of some tensors. A place may be in a slot after the graph's slots, which the caller binds.
    pub(crate) fn with_places(mut self, places: impl IntoIterator<Item = (TensorId, SlotOffset)>) -> Graph {
        for (id, place) in places {
            if let Some(tensor) = self.tensors.get_mut(id.index()) {
                tensor.place = Some(place);
            }
        }
        self
    }

    /// The same graph with slots of these sizes.
    pub(crate) fn with_slots(self, slots: Vec<usize>) -> Graph {
        Graph { slots, ..self }
    }

    /// By tensor id: how many node sources are this tensor, or a view of it.
    pub(crate) fn reader_counts(&self) -> Vec<u32> {
        let mut readers = vec![0u32; self.tensors.len()];
        for id in self.nodes.iter().flat_map(|node| node.srcs).flatten() {
            for id in [Some(id), self.tensor(id).and_then(|t| t.view_of)].into_iter().flatten() {
                if let Some(count) = readers.get_mut(id.index()) {
                    *count = count.saturating_add(1);
                }
            }
        }
        readers
    }

    /// The subgraph of consecutive nodes, with only the tensors that these nodes use. `place` assigns each tensor to one of
    /// `slots` (given by size). `readers` is [`Graph::reader_counts`] of the whole graph: a tensor that is also read outside of
    /// the subgraph loses its use count, so that a fused kernel does not skip its write.
    pub(crate) fn subgraph(
        &self,
        nodes: Range<usize>,
        readers: &[u32],
        slots: Vec<usize>,
        mut place: impl FnMut(&Tensor) -> Option<SlotOffset>,
    ) -> Graph {
        let (mut subgraph, mut new_ids) = (Graph::new(self.number).with_slots(slots), HashMap::new());
        let mut old_ids = Vec::new();
        let mut renumber = |id: TensorId| {
            *new_ids.entry(id).or_insert_with(|| {
                old_ids.push(id);
                self.id(old_ids.len() - 1)
            })
        };
        for node in self.nodes.get(nodes).unwrap_or_default() {
            let (dst, srcs) = (renumber(node.dst), node.srcs.map(|id| id.map(&mut renumber)));
            subgraph.nodes.push(Node { op: node.op.clone(), dst, srcs });
        }
        // Exact capacities: a graph may have many short subgraphs, which live as long as their programs.
        subgraph.nodes.shrink_to_fit();
        subgraph.tensors.reserve_exact(old_ids.len());
        for tensor in old_ids.iter().filter_map(|&old| self.tensor(old)) {
            let view_of = tensor.view_of.and_then(|of| new_ids.get(&of).copied());
            subgraph.tensors.push(Tensor { place: place(tensor), view_of, ..tensor.clone() });
        }
        let inside = subgraph.reader_counts();
        for ((tensor, old), inside) in subgraph.tensors.iter_mut().zip(&old_ids).zip(inside) {
            if readers.get(old.index()) != Some(&inside) {
                tensor.use_count = None;
            }
        }
        subgraph
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::unary::Unary;
    use crate::tensor::DType;

    /// The write of a result may be skipped only if all of its readers, including readers through views, are in the same
    /// subgraph.
    #[test]
    fn a_subgraph_keeps_use_counts_only_without_outside_readers() {
        let mut b = Builder::new();
        let x = b.leaf(DType::F32, [8, 1, 1, 1]).unwrap();
        let y = b.node(Unary::Sqr, &[Some(x)]).unwrap();
        let desc = b.tensor(y).unwrap().desc;
        let view = b.view(y, desc, 0).unwrap();
        let z = b.node(Unary::Sqr, &[Some(view)]).unwrap();
        b.node(Unary::Sqr, &[Some(z)]).unwrap();
        for id in [y, view, z] {
            b.set_use_count(id, 1).unwrap();
        }
        let graph = b.build();
        let part = |nodes| {
            graph.subgraph(nodes, &graph.reader_counts(), vec![graph.slot_sizes()[0] + 4096], |t| {
                t.place.map(|p| SlotOffset { offset: p.offset + 4096, ..p })
            })
        };
        let uses =
            |part: &Graph| part.nodes().iter().map(|n| part.tensor(n.dst).unwrap().use_count).collect::<Vec<_>>();
        assert_eq!(uses(&part(0..3)), [Some(1), Some(1), None]);
        assert_eq!(uses(&part(0..2)), [Some(1), None], "the reader of the second result is outside");
        assert_eq!(uses(&part(0..1)), [None], "the node that reads a view of the first result is outside");
        let last = part(1..3);
        assert_eq!((last.tensors().len(), last.tensors()[1].view_of), (3, None), "only tensors of its nodes");
        assert_eq!(last.tensors()[0].place.unwrap().offset, 4096 + graph.tensor(z).unwrap().place.unwrap().offset);
        let first = part(0..2);
        assert_eq!(first.tensors()[3].view_of, Some(first.nodes()[0].dst));
        assert!(validate::check(&part(0..3)).is_ok());
    }
}

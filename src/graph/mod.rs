//! Compute graphs: an arena of tensors and the nodes that compute some of them, in the order they run.
//!
//! Only ops that compute are nodes; a view is a tensor that lies inside another one's memory. A graph comes from
//! [`Builder`] or, when it comes from outside, through [`validate`]; both end at the same door
//! ([`validate::check`]), after which kernels trust it.

mod builder;
pub(crate) mod fuse;
mod overlap;
mod ranges;
pub mod validate;

pub use builder::{BuildError, Builder};
pub(crate) use overlap::{Overlap, overlap};
pub(crate) use ranges::ByteRangeSet;

use crate::ops::{MAX_SRC, NodeView, Op, Sources};
use crate::tensor::TensorDesc;
use std::collections::HashMap;
use std::ops::Range;

/// Index of a tensor in its graph's arena.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct TensorId(pub(crate) u32);

/// Where a tensor's first byte lies: `offset` bytes into the memory bound to `slot` when the graph runs.
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
    /// Its memory; `None` while nobody has placed it.
    pub place: Option<SlotOffset>,
    /// How many ops read it in the whole graph of whoever made it, views counted as ops; `None` where that is unknown or
    /// it is an output, so that anyone may read it later. A device may leave out a result that its one reader does not
    /// need in memory.
    pub use_count: Option<u32>,
    /// The tensor whose values a view re-describes, where no other op reads what lies between the two.
    pub view_of: Option<TensorId>,
}

/// One computation: `dst = op(srcs)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// What is computed.
    pub op: Op,
    /// The tensor it writes.
    pub dst: TensorId,
    /// The tensors it reads, by position.
    pub srcs: [Option<TensorId>; MAX_SRC],
}

/// A graph: tensors, nodes in execution order, and the size of the memory that each slot needs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    tensors: Vec<Tensor>,
    nodes: Vec<Node>,
    slots: Vec<usize>,
}

impl Graph {
    /// The tensor of an id. Ids of another graph give `None` or an unrelated tensor, never undefined behaviour.
    pub fn tensor(&self, id: TensorId) -> Option<&Tensor> {
        self.tensors.get(id.0 as usize)
    }

    /// All tensors, in order of their ids.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The nodes, in the order they run.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Bytes that each slot's region must have.
    pub fn slot_sizes(&self) -> &[usize] {
        &self.slots
    }

    /// A node as shape rules and devices see it; `None` when it names tensors that are not here.
    pub fn node_view<'a>(&'a self, node: &'a Node) -> Option<NodeView<'a>> {
        let dst = &self.tensor(node.dst)?.desc;
        let mut srcs = [None; MAX_SRC];
        for (slot, id) in srcs.iter_mut().zip(node.srcs) {
            if let Some(id) = id {
                *slot = Some(&self.tensor(id)?.desc);
            }
        }
        let operands = node.srcs.into_iter().flatten().chain([node.dst]);
        let fits = |t: &Tensor| t.place.is_none_or(|place| t.desc.is_aligned_at(place.offset));
        let aligned = operands.into_iter().all(|id| self.tensor(id).is_none_or(fits));
        Some(NodeView { op: &node.op, dst, srcs: Sources::new(node.op.code(), &srcs), aligned })
    }

    /// With slots of these sizes.
    pub(crate) fn with_slots(self, slots: Vec<usize>) -> Graph {
        Graph { slots, ..self }
    }

    /// How many sources of nodes each tensor is, itself or through a view that names it; by id.
    pub(crate) fn reader_counts(&self) -> Vec<u32> {
        let mut readers = vec![0u32; self.tensors.len()];
        for id in self.nodes.iter().flat_map(|node| node.srcs).flatten() {
            for id in [Some(id), self.tensor(id).and_then(|t| t.view_of)].into_iter().flatten() {
                if let Some(count) = readers.get_mut(id.0 as usize) {
                    *count = count.saturating_add(1);
                }
            }
        }
        readers
    }

    /// The graph of some consecutive nodes with only the tensors that they name, which `place` puts into slots of these
    /// sizes. A tensor that other nodes read too, by the [`Graph::readers`] of all, is one that anyone may read.
    pub(crate) fn subgraph(
        &self,
        nodes: Range<usize>,
        readers: &[u32],
        slots: Vec<usize>,
        mut place: impl FnMut(&Tensor) -> Option<SlotOffset>,
    ) -> Graph {
        let (mut part, mut ids) = (Graph { slots, ..Graph::default() }, HashMap::new());
        let mut olds = Vec::new();
        let mut renamed = |id: TensorId| {
            *ids.entry(id).or_insert_with(|| {
                olds.push(id);
                TensorId(olds.len() as u32 - 1)
            })
        };
        for node in self.nodes.get(nodes).unwrap_or_default() {
            let (dst, srcs) = (renamed(node.dst), node.srcs.map(|id| id.map(&mut renamed)));
            part.nodes.push(Node { op: node.op.clone(), dst, srcs });
        }
        // Parts can be many and short, and live as long as their programs.
        part.nodes.shrink_to_fit();
        part.tensors.reserve_exact(olds.len());
        for tensor in olds.iter().filter_map(|&old| self.tensor(old)) {
            let view_of = tensor.view_of.and_then(|of| ids.get(&of).copied());
            part.tensors.push(Tensor { place: place(tensor), view_of, ..tensor.clone() });
        }
        let inside = part.reader_counts();
        for ((tensor, old), inside) in part.tensors.iter_mut().zip(&olds).zip(inside) {
            if readers.get(old.0 as usize) != Some(&inside) {
                tensor.use_count = None;
            }
        }
        part
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::unary::Unary;
    use crate::tensor::DType;

    /// A result may be left out where all that read it are in its part, also through views, and only there.
    #[test]
    fn a_part_says_who_else_reads_its_tensors() {
        let mut b = Builder::new();
        let x = b.leaf(DType::F32, [8, 1, 1, 1]).unwrap();
        let y = b.node(Unary::Sqr, &[Some(x)]).unwrap();
        let desc = b.tensor(y).unwrap().desc;
        let seen = b.view(y, desc, 0).unwrap();
        let z = b.node(Unary::Sqr, &[Some(seen)]).unwrap();
        b.node(Unary::Sqr, &[Some(z)]).unwrap();
        for id in [y, seen, z] {
            b.set_use_count(id, 1).unwrap();
        }
        let graph = b.build().unwrap();
        let part = |nodes| {
            graph.subgraph(nodes, &graph.reader_counts(), vec![graph.slot_sizes()[0] + 4096], |t| {
                t.place.map(|p| SlotOffset { offset: p.offset + 4096, ..p })
            })
        };
        let uses =
            |part: &Graph| part.nodes().iter().map(|n| part.tensor(n.dst).unwrap().use_count).collect::<Vec<_>>();
        assert_eq!(uses(&part(0..3)), [Some(1), Some(1), None]);
        assert_eq!(uses(&part(0..2)), [Some(1), None], "the reader of the second is elsewhere");
        assert_eq!(uses(&part(0..1)), [None], "the one that reads the first as a view is elsewhere");
        let last = part(1..3);
        assert_eq!((last.tensors().len(), last.tensors()[1].view_of), (3, None), "only what its nodes name");
        assert_eq!(last.tensors()[0].place.unwrap().offset, 4096 + graph.tensor(z).unwrap().place.unwrap().offset);
        let first = part(0..2);
        assert_eq!(first.tensors()[3].view_of, Some(first.nodes()[0].dst));
        assert!(validate::check(&part(0..3)).is_ok());
    }
}

//! Which results a fused kernel need not write.

use super::order::written;
use super::{Candidate, Graph, Overlap, TensorId, overlap};

/// Limit of the tensors that are followed from one to the next by `Lifetimes::is_dead_after`.
const MAX_CHAIN: usize = 16;

/// By tensor id: who writes and reads a tensor.
pub(super) struct Lifetimes {
    /// See [`Graph::reader_counts`].
    pub(super) readers: Vec<u32>,
    /// The node that computes it, by index; `None` for leaves and views.
    producer: Vec<Option<usize>>,
    /// The last node that reads it or a view of it, by index.
    last_reader: Vec<Option<usize>>,
}

impl Lifetimes {
    pub(super) fn of(graph: &Graph) -> Lifetimes {
        let tensors = graph.tensors().len();
        let (mut producer, mut last_reader) = (vec![None; tensors], vec![None; tensors]);
        for (index, node) in graph.nodes().iter().enumerate() {
            for src in node.srcs.into_iter().flatten() {
                for id in [Some(src), graph.tensor(src).and_then(|t| t.view_of)].into_iter().flatten() {
                    if let Some(last) = last_reader.get_mut(id.index()) {
                        *last = Some(index);
                    }
                }
            }
            if let Some(first) = producer.get_mut(node.dst.index()) {
                *first = Some(index);
            }
        }
        Lifetimes { readers: graph.reader_counts(), producer, last_reader }
    }

    /// Whether all readers of a tensor are in this graph and not after node `index`. This also holds for the tensor that it is a view
    /// of, and for the one in whose place it was computed: their bytes are the same. Leaves are never dead.
    fn is_dead_after(&self, graph: &Graph, id: TensorId, index: usize) -> bool {
        let mut id = id;
        for _ in 0..MAX_CHAIN {
            let at = id.index();
            let Some(tensor) = graph.tensor(id) else { return false };
            let here = tensor.use_count.is_some() && tensor.use_count.as_ref() == self.readers.get(at);
            let last = self.last_reader.get(at).copied().flatten();
            if !here || last.is_some_and(|last| last > index) {
                return false;
            }
            id = match tensor.view_of {
                Some(viewed) => viewed,
                None => {
                    let producer = self.producer.get(at).copied().flatten();
                    let Some(node) = producer.and_then(|producer| graph.nodes().get(producer)) else { return false };
                    let shares =
                        |src: &TensorId| graph.tensor(*src).is_some_and(|s| overlap(s, tensor) != Overlap::Disjoint);
                    let Some(source) = node.srcs.into_iter().flatten().find(shares) else { return true };
                    source
                }
            };
        }
        false
    }
}

impl Candidate<'_> {
    /// Whether a node of the graph computes the tensor, or the one that it is a view of.
    pub(super) fn is_computed(&self, id: TensorId) -> bool {
        let viewed = self.graph.tensor(id).and_then(|tensor| tensor.view_of);
        let producer = |id: TensorId| self.lifetimes.producer.get(id.index()).copied().flatten();
        producer(viewed.unwrap_or(id)).or(producer(id)).is_some()
    }

    /// Whether the write of node `k`'s result can be elided, because only one node of the pattern reads it, as `reader`. The result must
    /// not be an output, must have no other reader in this graph or in the client's whole graph, and `reader` must be the
    /// result itself or a view of exactly its bytes.
    pub(super) fn is_elidable(&self, k: usize, reader: TensorId) -> bool {
        let id = self.nodes[k].dst;
        let (Some(result), Some(read)) = (self.graph.tensor(id), self.graph.tensor(reader)) else { return false };
        let readers = &self.lifetimes.readers;
        let only = |id: TensorId, uses: Option<u32>| uses == Some(1) && readers.get(id.index()) == Some(&1);
        let viewed = || {
            let packed = result.desc.is_contiguous() && read.desc.is_contiguous();
            let same = result.place == read.place && result.desc.dtype() == read.desc.dtype();
            let all = result.desc.elements() == read.desc.elements();
            read.view_of == Some(id) && only(reader, read.use_count) && packed && same && all
        };
        only(id, result.use_count) && (reader == id || viewed()) && self.has_own_memory(k)
    }

    /// Whether no node of the pattern finds the result of node `k` under another name, so that it makes no difference if the memory of
    /// the result keeps its old content. Allocators give a result the memory of operands that nothing reads any more (also in place), and
    /// give its memory to the results of nodes that run after its last reader.
    pub(super) fn has_own_memory(&self, k: usize) -> bool {
        let id = self.nodes[k].dst;
        let is_of = |other: TensorId, of: TensorId| {
            other == of || self.graph.tensor(other).is_some_and(|t| t.view_of == Some(of))
        };
        let mut reads = self.nodes.iter().map(|node| node.srcs.into_iter().flatten());
        let Some(last) = reads.rposition(|mut srcs| srcs.any(|src| is_of(src, id))) else { return false };
        let touches = |other: TensorId| !is_of(other, id) && !self.disjoint(other, id);
        // A result on the same bytes that the kernel writes, since no node of the pattern reads it.
        let written_over = self.nodes[last..].iter().map(|node| node.dst).any(|result| {
            let mut reads = self.nodes.iter().flat_map(|node| node.srcs.into_iter().flatten());
            self.overlap(result, id) == Some(Overlap::Exact) && !reads.any(|src| is_of(src, result))
        });
        let dead = |other: TensorId| written_over || self.lifetimes.is_dead_after(self.graph, other, self.indices[k]);
        // Results that come after the last reader, in the same memory.
        let is_later = |other: TensorId, j: usize| (last..j).any(|j| is_of(other, self.nodes[j].dst));
        self.nodes.iter().enumerate().all(|(j, node)| {
            let mut reads = node.srcs.into_iter().flatten();
            let apart = |result| !touches(result) || j >= last || (j < k && dead(result));
            reads.all(|src| !touches(src) || (j <= k && dead(src)) || is_later(src, j)) && written(node).all(apart)
        })
    }
}

#[cfg(test)]
mod tests;

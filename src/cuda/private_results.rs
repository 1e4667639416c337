//! Private results: results of products, and of the ADDs behind them (biases), that lie in the program's scratch memory instead of the client's.
//!
//! An allocator gives a result the memory of one that nothing reads any more. In a layer of llama.cpp, the product of the values lies
//! where that of the queries was, which ROPE has read. It could not run before this ROPE, and therefore not together with the
//! product of the queries. In memory of its own, it can. As an elided result, a private one is never written to the client's memory, so
//! all its readers must be known.

use super::columns::{ALIGNMENT, place_by_lifetime};
use crate::graph::fuse::{MAX_LOOKAHEAD, operands, written};
use crate::graph::{Graph, Node, Overlap, SlotOffset, Tensor, TensorId, overlap};
use crate::ops::OpCode;
use std::collections::{HashMap, HashSet};
use std::ops::{Range, RangeInclusive};

/// Limit of a private result in bytes: those of a few tokens. With more, products are not fused.
const MAX_BYTES: usize = 256 << 10;

/// Limits of all private results of a program, in number and bytes; the number bounds the time of a search. A graph with more bytes has
/// none. A model with 128 layers has 256 results, 512 with biases, of which a few are alive at a time.
const MAX_RESULTS: usize = 512;
const MAX_TOTAL: u64 = 16 << 20;

/// Limit of the nodes that all searches visit. A graph beyond it has no private results.
const MAX_VISITS: usize = 1 << 22;

/// The graph with its private results in an additional slot, which is scratch memory, and the bytes of that slot. `None` if there are none.
pub(super) fn with_private_results(graph: &Graph) -> Option<(Graph, u64)> {
    let blocked = results_blocked_by_memory(graph);
    if blocked.is_empty() || blocked.len().min(MAX_RESULTS).saturating_mul(graph.nodes().len()) > MAX_VISITS {
        return None;
    }
    let users = Users::of(graph);
    let private: Vec<_> = blocked
        .into_iter()
        .take(MAX_RESULTS)
        .filter_map(|index| {
            let id = graph.nodes().get(index)?.dst;
            Some((id, index.saturating_sub(MAX_LOOKAHEAD)..=users.last_reader_of_internal(graph, id, index)?))
        })
        .collect();
    // A result that moves ahead is written earlier, hence the longer lifetimes. Other moves are refused, as in the client's memory.
    let bytes = |id: TensorId| graph.tensor(id).map_or(0, |t| t.desc.extent() as u64);
    let parts: Vec<(RangeInclusive<usize>, u64)> =
        private.iter().map(|(id, alive)| (alive.clone(), bytes(*id))).collect();
    let (offsets, end) = place_by_lifetime(&parts, 0);
    let slot = u32::try_from(graph.slot_sizes().len()).ok()?;
    let mut places = Vec::new();
    for ((id, _), offset) in private.iter().zip(offsets) {
        let from = graph.tensor(*id)?.place?.offset;
        for id in users.views.get(id).into_iter().flatten().chain([id]) {
            let within = graph.tensor(*id)?.place?.offset.checked_sub(from)?;
            places.push((*id, SlotOffset { slot, offset: usize::try_from(offset).ok()? + within }));
        }
    }
    (!places.is_empty() && end <= MAX_TOTAL)
        .then(|| (graph.clone().with_places(places), end.next_multiple_of(ALIGNMENT)))
}

/// The products, and the ADDs behind products, by index, that cannot run together with an earlier product of the same columns
/// only because of the memory of their results.
fn results_blocked_by_memory(graph: &Graph) -> Vec<usize> {
    let nodes = graph.nodes();
    let is_product = |node: &Node| node.op.code() == OpCode::MulMat;
    let mut blocked = Vec::new();
    for (index, node) in nodes.iter().enumerate().filter(|(_, node)| is_product(node)) {
        let start = index.saturating_sub(MAX_LOOKAHEAD);
        let same_columns = |other: &Node| is_product(other) && other.srcs[1] == node.srcs[1];
        let Some(first) = nodes[start..index].iter().position(same_columns).map(|first| start + first) else {
            continue;
        };
        let adds = |other: &Node| other.op.code() == OpCode::Add && other.srcs[0] == Some(node.dst);
        let sum = nodes[index + 1..].iter().take(MAX_LOOKAHEAD).position(adds).map(|at| index + 1 + at);
        blocked.extend([Some(index), sum].into_iter().flatten().filter(|&last| {
            let [Some(result), Some(columns)] =
                [nodes.get(last).map(|node| node.dst), node.srcs[1]].map(|id| graph.tensor(id?))
            else {
                return false;
            };
            let touches = |id: TensorId| graph.tensor(id).is_some_and(|t| overlap(t, result) != Overlap::Disjoint);
            // The sum may lie on its own product.
            let mut between = (first..last).filter(|&other| other != index);
            let is_taken = between.any(|other| operands(&nodes[other]).any(touches));
            is_taken && result.desc.extent() <= MAX_BYTES && overlap(columns, result) == Overlap::Disjoint
        }));
    }
    blocked
}

/// By tensor: the nodes that read it, and its views.
struct Users {
    /// The nodes that read a tensor directly, by index, in order.
    reading: HashMap<TensorId, Vec<usize>>,
    /// The views of a tensor that nodes use.
    views: HashMap<TensorId, Vec<TensorId>>,
}

impl Users {
    fn of(graph: &Graph) -> Users {
        let (mut reading, mut views, mut seen) = (HashMap::new(), HashMap::new(), HashSet::new());
        let viewed = |id: TensorId| graph.tensor(id).and_then(|t| t.view_of);
        for (index, node) in graph.nodes().iter().enumerate() {
            for id in node.srcs.into_iter().flatten() {
                reading.entry(id).or_insert_with(Vec::new).push(index);
            }
            for id in operands(node) {
                if let Some(of) = viewed(id)
                    && seen.insert(id)
                {
                    views.entry(of).or_insert_with(Vec::new).push(id);
                }
            }
        }
        Users { reading, views }
    }

    /// The last node that reads the result of node `index` or a view of it, if the result is internal: if all its readers in the
    /// client's whole graph are nodes behind `index`, which find in it what this node wrote.
    fn last_reader_of_internal(&self, graph: &Graph, id: TensorId, index: usize) -> Option<usize> {
        let views = self.views.get(&id).map_or(&[][..], Vec::as_slice);
        let reading = |id: &TensorId| self.reading.get(id).map_or(&[][..], Vec::as_slice);
        // A view is one use of its tensor. The uses of deeper views are not known here, and make the numbers differ.
        let only_here = |id: &TensorId, uses: usize| {
            graph.tensor(*id).and_then(|t| t.use_count).is_some_and(|count| usize::try_from(count) == Ok(uses))
        };
        let known = only_here(&id, reading(&id).len() + views.len())
            && views.iter().all(|view| only_here(view, reading(view).len()))
            && graph.tensor(id).is_some_and(|t| t.view_of.is_none() && t.desc.is_contiguous());
        // A client says of what a tensor is a view, and where it lies: the two need not agree.
        if !known || !views.iter().all(|view| lies_within(graph, *view, id)) {
            return None;
        }
        let all = || views.iter().chain([&id]).flat_map(reading).copied();
        let last = all().max()?;
        (all().all(|reader| reader > index) && !has_another_name(graph, id, index..last)).then_some(last)
    }
}

/// Whether all bytes of a tensor are bytes of another one.
fn lies_within(graph: &Graph, inner: TensorId, outer: TensorId) -> bool {
    let [Some(inner), Some(outer)] = [inner, outer].map(|id| graph.tensor(id)) else { return false };
    let (Some(at), Some(from)) = (inner.place, outer.place) else { return false };
    let end = |place: SlotOffset, tensor: &Tensor| place.offset.checked_add(tensor.desc.extent());
    let is_inside = end(at, inner).zip(end(from, outer)).is_some_and(|(inner, outer)| inner <= outer);
    at.slot == from.slot && at.offset >= from.offset && is_inside
}

/// Whether nodes use the result of node `alive.start` as a tensor that is not a view of it: one writes its bytes before the last
/// reader, node `alive.end`, or one reads or keeps bytes that no node has written since.
fn has_another_name(graph: &Graph, id: TensorId, alive: Range<usize>) -> bool {
    let Some(result) = graph.tensor(id) else { return true };
    let touches = |id: TensorId| graph.tensor(id).is_none_or(|t| overlap(t, result) != Overlap::Disjoint);
    let mut since = HashSet::from([id]);
    graph.nodes().iter().enumerate().skip(alive.start + 1).any(|(index, node)| {
        let is_known = |id: &TensorId| {
            since.contains(id) || graph.tensor(*id).and_then(|t| t.view_of).is_some_and(|of| since.contains(&of))
        };
        let is_read = node.srcs.iter().flatten().any(|id| !is_known(id) && touches(*id));
        // SET_ROWS keeps the rows that it does not write, and a result with gaps the bytes between its rows: both must find there what
        // the product has written.
        let keeps = |id: TensorId| {
            node.op.keeps_rest() || graph.tensor(id).is_none_or(|t| t.desc.extent() != t.desc.dense_bytes())
        };
        let is_written = written(node).any(|id| touches(id) && (index < alive.end || keeps(id)));
        since.extend(written(node));
        is_read || is_written
    })
}

#[cfg(test)]
mod tests;

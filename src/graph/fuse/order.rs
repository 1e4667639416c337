//! Which nodes may run earlier than in the order of the graph.

use super::{Graph, Node, Overlap, TensorId, overlap};

/// Whether a node may run ahead of the nodes `between`: none of them writes what the node reads or writes, and none reads what it
/// writes. Tensors are compared by their memory, since allocators reuse the memory of results whose last reader has run.
pub(super) fn can_move_ahead<'a>(graph: &Graph, node: &Node, between: impl Iterator<Item = &'a Node>) -> bool {
    let touches = |a: TensorId, b: TensorId| match (graph.tensor(a), graph.tensor(b)) {
        (Some(a), Some(b)) => overlap(a, b) != Overlap::Disjoint,
        _ => true,
    };
    between.into_iter().all(|other| {
        let read_after_write = written(other).any(|result| operands(node).any(|id| touches(id, result)));
        let write_after_read = || written(node).any(|result| operands(other).any(|id| touches(id, result)));
        !read_after_write && !write_after_read()
    })
}

/// The tensors that a node writes: its result, and the sources that it updates.
pub(crate) fn written(node: &Node) -> impl Iterator<Item = TensorId> {
    let updated = node.srcs.iter().enumerate().filter(|&(i, _)| node.op.updates(i));
    updated.filter_map(|(_, id)| *id).chain([node.dst])
}

/// The tensors that a node reads or writes.
pub(crate) fn operands(node: &Node) -> impl Iterator<Item = TensorId> {
    node.srcs.iter().copied().flatten().chain([node.dst])
}

//! Op fusion: runs several nodes as one kernel, e.g. a norm with the operations after it (epilogue fusion). This saves kernel
//! launches or barriers, and the write and re-read of intermediate rows.
//!
//! All devices share one table of patterns. A pattern lists the ops of nodes, how each node depends on those before it, and a
//! function that checks their operands: it returns the fused op with its operands, or `None` if the nodes must run one by one.
//! The device then provides a kernel for the fused op, or declines. A fused kernel writes all results of its nodes except for
//! elided results: these have no other reader (see `Candidate::is_elidable`), so the kernel does
//! not write them, and their memory keeps its old content. Each pattern checks which operands and results may overlap.
//!
//! The nodes of a match need not be neighbours: the kernel runs at the place of the first node, and the others move ahead of
//! the nodes between (`order`). llama.cpp, for example, sends the products of queries, values and keys with a ROPE between.

mod elision;
mod moe;
mod order;
mod patterns;

use super::{Graph, Node, Overlap, TensorId, overlap};
use crate::ops::binary::Binary;
use crate::ops::glu::GluKind;
use crate::ops::mul_mat::MulMat;
use crate::ops::norm::Norm;
use crate::ops::rope::Rope;
use crate::ops::softmax::SoftMax;
use crate::ops::{NodeView, Op, OpCode, Sources};
use crate::tensor::DType::F32;
use crate::tensor::TensorDesc;
use elision::Lifetimes;
use order::can_move_ahead;
pub(crate) use order::{operands, written};
pub(crate) use patterns::FUSION_PATTERNS;

/// How many nodes beyond the first one are searched for the other nodes of a pattern. A layer of a llama model has 25 nodes.
pub(crate) const MAX_LOOKAHEAD: usize = 32;

/// A kernel with its operands, for one node or several fused nodes.
pub(crate) struct KernelCall<K> {
    /// Op code of the (first) node, for error messages.
    pub(crate) code: OpCode,
    pub(crate) kernel: K,
    pub(crate) dst: TensorId,
    /// Operands in the kernel's order. Includes further results, if the kernel has some.
    pub(crate) srcs: Vec<Option<TensorId>>,
    /// The nodes that the kernel runs, by their index in the graph. They could also run one by one, in this order, at this point.
    pub(crate) nodes: Vec<usize>,
}

/// The computation of a fused kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum FusedOp {
    /// A norm fused with its neighbours. Sources: 0 is x (or 0 and 1 are the summands of the residual), and the rest is as in
    /// [`NormFusion`].
    Norm { op: Norm, fusion: NormFusion },
    /// ROPE followed by SET_ROWS into a KV cache: all heads of a token become one cache row of `row` elements. Sources: x,
    /// positions, optional factors, row indices.
    RopeSetRows { op: Rope, row: usize },
    /// ROPE of queries and of keys with the same parameters and positions, SET_ROWS of the keys as in `RopeSetRows`, and SET_ROWS
    /// of values if `values` holds. Sources: queries, positions, optional factors, keys, their row indices and cache, values, their
    /// row indices and cache. With `norms` (the eps of both), RMS_NORM of each head and MUL by weights come before both ROPEs; there
    /// are no factors then, source 2 has the weights of the queries and source 9 those of the keys.
    RopeCache { op: Rope, row: usize, values: bool, norms: Option<[f32; 2]> },
    /// The router of a mixture of experts: SOFT_MAX of logits, ARGSORT, GET_ROWS of the `used` largest probabilities, SUM_ROWS, CLAMP
    /// of the sums if there are bounds, and DIV of the probabilities by the sums. Sources: logits, then the results of these nodes
    /// except for the last one; without CLAMP, source 5 is absent. All are contiguous.
    Route { op: SoftMax, used: usize, bounds: Option<[f32; 2]> },
    /// The weighted sum of the results of a token's experts: MUL by the weights, and ADDs of the products in order. Sources: results
    /// `[n, used, tokens]` and weights `[1, used, tokens]`.
    ExpertSum,
    /// Up to three MUL_MAT of the same columns (queries, keys and values) with weights of one type and row length. If `biased`, an ADD
    /// of a vector follows each, and a single product is fused, too. Sources: the weights of the first product, the columns, then
    /// weights and result of each other product, then the vectors.
    Products { product: MulMat, biased: bool },
    /// Two MUL_MAT of the same columns, whose results are the operands of a GLU. Sources: the weights of the gate, the columns, the
    /// weights of the other operand.
    GatedProduct(GatedProduct),
}

/// Parameters of [`FusedOp::GatedProduct`]. The result may lie on the columns, so a kernel must have read all of them before it writes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct GatedProduct {
    /// The op of the products. Source 3 has the ids of MUL_MAT_ID.
    pub(crate) product: MulMat,
    pub(crate) kind: GluKind,
}

/// The ops fused with a norm (prologue fusion and epilogue fusion). Their sources and results are F32 with dense rows.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub(crate) struct NormFusion {
    /// Before the norm: `x = a + b`, the residual sum, is normalised and also written to operand 2. All three have the same
    /// shape.
    pub(crate) residual: bool,
    /// After the norm: multiplication by source 3, broadcast over the rows.
    pub(crate) weight: bool,
    /// After the multiplication: addition of source 4, broadcast over the rows.
    pub(crate) bias: bool,
}

/// A match of a pattern: nodes that can run as one kernel.
pub(crate) struct FusionMatch {
    fused: FusedOp,
    dst: TensorId,
    srcs: Vec<Option<TensorId>>,
}

/// A row of the pattern table.
pub(crate) struct FusionPattern {
    /// The ops of the nodes, in order, each with its link to the nodes before it. The link of the first one is not used.
    ops: &'static [(OpCode, Link)],
    find: fn(&Candidate<'_>) -> Option<FusionMatch>,
}

/// How a node of a pattern depends on the nodes before it. The first node that fits is taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Link {
    /// It reads the result of the node before, or a view of it.
    ReadsResult,
    /// Its source 1 is that of the first node (the columns of products, the positions of ROPE), and its source 0 has the same type.
    SameSource1,
    /// Any node with the op.
    Any,
}

/// Kernel selection: passes the kernel calls of a graph to `emit`, in execution order. Nodes that match a pattern of `table`
/// are fused if `fuse` returns a kernel; it gets the fused op and a view of the main op with the fused operands. All other
/// nodes get the kernel of `select`.
///
/// # Errors
/// The device has no kernel for a node; errors of `emit`.
pub(crate) fn select_kernels<K, U, E: From<U>>(
    graph: &Graph,
    table: &[FusionPattern],
    select: impl Fn(&NodeView<'_>) -> Result<K, U>,
    fuse: impl Fn(&FusedOp, &NodeView<'_>) -> Option<K>,
    mut emit: impl FnMut(KernelCall<K>) -> Result<(), E>,
) -> Result<(), E> {
    let lifetimes = Lifetimes::of(graph);
    let mut done = vec![false; graph.nodes().len()];
    let (mut ahead, mut rest) = (None, 0..graph.nodes().len());
    while let Some(first) = ahead.take().or_else(|| rest.find(|&index| !done[index])) {
        let node = &graph.nodes()[first];
        let waiting = Waiting { start: rest.start, done: &done };
        // `node_view` is never `None` here: `validate::check` ensures that nodes refer to the graph's own tensors.
        let Some(view) = graph.node_view(node) else { return Ok(()) };
        let kernel = select(&view)?;
        let fused = table.iter().filter(|pattern| pattern.starts_with(node.op.code())).find_map(|pattern| {
            let indices = pattern.find_nodes(graph, first, &waiting)?;
            let nodes: Vec<_> = indices.iter().map(|&index| &graph.nodes()[index]).collect();
            // Fuse only nodes that could also run alone. Otherwise a graph with a node that the device reports as unsupported
            // would run or fail depending on the node's neighbours.
            if !nodes.iter().all(|n| graph.node_view(n).is_some_and(|n| select(&n).is_ok())) {
                return None;
            }
            let found = (pattern.find)(&Candidate { graph, nodes: &nodes, indices: &indices, lifetimes: &lifetimes })?;
            let kernel = found.kernel(graph, &fuse)?;
            let (dst, srcs) = (found.dst, found.srcs);
            Some(KernelCall { code: node.op.code(), kernel, dst, srcs, nodes: indices })
        });
        let call = fused.unwrap_or_else(|| {
            let used = node.srcs.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
            let srcs = node.srcs[..used].to_vec();
            KernelCall { code: node.op.code(), kernel, dst: node.dst, srcs, nodes: vec![first] }
        });
        call.nodes.iter().for_each(|&index| done[index] = true);
        emit(call)?;
        ahead = find_product_of_same_columns(graph, first, &Waiting { start: rest.start, done: &done });
    }
    Ok(())
}

/// A MUL_MAT of the same columns as MUL_MAT `first` that can run next. Products of queries, keys and values follow each other then,
/// also with weights of several types, and the nodes after them can be fused.
fn find_product_of_same_columns(graph: &Graph, first: usize, waiting: &Waiting<'_>) -> Option<usize> {
    let node = graph.nodes().get(first).filter(|node| node.op.code() == OpCode::MulMat)?;
    let fits = |other: &Node| other.op.code() == OpCode::MulMat && other.srcs[1] == node.srcs[1];
    waiting.find_movable(graph, &[first], fits)
}

/// The nodes that do not run yet.
struct Waiting<'a> {
    /// All nodes before this one run before.
    start: usize,
    /// By index: whether the node runs before.
    done: &'a [bool],
}

impl Waiting<'_> {
    /// The first node after the last one of `found` that fits, and can run ahead of all others except for `found`.
    fn find_movable(&self, graph: &Graph, found: &[usize], fits: impl Fn(&Node) -> bool) -> Option<usize> {
        let end = graph.nodes().len().min(self.start + MAX_LOOKAHEAD);
        (found.last()? + 1..end).find(|&index| {
            let between = || (self.start..index).filter(|between| !self.done[*between] && !found.contains(between));
            !self.done[index]
                && fits(&graph.nodes()[index])
                && can_move_ahead(graph, &graph.nodes()[index], between().map(|between| &graph.nodes()[between]))
        })
    }
}

impl FusionPattern {
    fn starts_with(&self, code: OpCode) -> bool {
        self.ops.first().is_some_and(|&(first, _)| first == code)
    }

    /// The nodes of the pattern from node `first` on, by index. Each can run next.
    fn find_nodes(&self, graph: &Graph, first: usize, waiting: &Waiting<'_>) -> Option<Vec<usize>> {
        let mut found = vec![first];
        for &(code, link) in self.ops.get(1..)? {
            let [first, last] = [first, *found.last()?].map(|index| &graph.nodes()[index]);
            let fits = |node: &Node| node.op.code() == code && link.holds(graph, first, last, node);
            found.push(waiting.find_movable(graph, &found, fits)?);
        }
        Some(found)
    }
}

impl Link {
    fn holds(self, graph: &Graph, first: &Node, last: &Node, node: &Node) -> bool {
        match self {
            Link::Any => true,
            Link::ReadsResult => node.srcs.iter().flatten().any(|&src| {
                src == last.dst || graph.tensor(src).is_some_and(|tensor| tensor.view_of == Some(last.dst))
            }),
            Link::SameSource1 => {
                let dtype = |node: &Node| Some(graph.tensor(node.srcs[0]?)?.desc.dtype());
                node.srcs[1] == first.srcs[1] && dtype(node) == dtype(first)
            }
        }
    }
}

impl FusionMatch {
    fn kernel<K>(&self, graph: &Graph, fuse: impl Fn(&FusedOp, &NodeView<'_>) -> Option<K>) -> Option<K> {
        let desc = |id: TensorId| graph.tensor(id).map(|t| &t.desc);
        let op = match self.fused {
            FusedOp::Norm { op, .. } => Op::Norm(op),
            FusedOp::RopeSetRows { op, .. } | FusedOp::RopeCache { op, .. } => Op::Rope(op),
            FusedOp::Route { op, .. } => Op::SoftMax(op),
            FusedOp::ExpertSum => Op::Binary(Binary::Mul),
            FusedOp::Products { product, .. } | FusedOp::GatedProduct(GatedProduct { product, .. }) => {
                Op::MulMat(product)
            }
        };
        let srcs: Vec<_> = self.srcs.iter().map(|id| id.and_then(desc)).collect();
        let placed = |id: TensorId| {
            graph.tensor(id).is_none_or(|t| t.place.is_none_or(|place| t.desc.is_aligned_at(place.offset)))
        };
        let aligned = self.srcs.iter().flatten().chain([&self.dst]).all(|&id| placed(id));
        let view = NodeView { op: &op, dst: desc(self.dst)?, srcs: Sources::new(op.code(), &srcs), aligned };
        fuse(&self.fused, &view)
    }
}

/// A candidate for fusion: nodes with the ops of a pattern, of which the later ones can move ahead to the first one.
struct Candidate<'a> {
    graph: &'a Graph,
    nodes: &'a [&'a Node],
    /// Their indices in the graph.
    indices: &'a [usize],
    lifetimes: &'a Lifetimes,
}

impl<'a> Candidate<'a> {
    fn desc(&self, id: TensorId) -> Option<&'a TensorDesc> {
        self.graph.tensor(id).map(|t| &t.desc)
    }

    /// Source `i` of node `k`.
    fn src(&self, k: usize, i: usize) -> Option<TensorId> {
        self.nodes.get(k)?.srcs[i]
    }

    /// Whether two tensors share no byte.
    fn disjoint(&self, a: TensorId, b: TensorId) -> bool {
        self.overlap(a, b) == Some(Overlap::Disjoint)
    }

    /// Whether two contiguous tensors are the same bytes, whatever their shapes are.
    fn same_bytes(&self, a: TensorId, b: TensorId) -> bool {
        let (Some(a), Some(b)) = (self.graph.tensor(a), self.graph.tensor(b)) else { return false };
        let contiguous = a.desc.is_contiguous() && b.desc.is_contiguous();
        a.place == b.place && contiguous && a.desc.dtype() == b.desc.dtype() && a.desc.elements() == b.desc.elements()
    }

    /// Whether two tensors share no byte, or coincide row by row. In both cases a kernel that works row by row may write a row
    /// of one tensor after it has read the same row of the other tensor.
    fn disjoint_or_in_place(&self, a: TensorId, b: TensorId) -> bool {
        matches!(self.overlap(a, b), Some(Overlap::Disjoint | Overlap::Exact))
    }

    fn overlap(&self, a: TensorId, b: TensorId) -> Option<Overlap> {
        Some(overlap(self.graph.tensor(a)?, self.graph.tensor(b)?))
    }

    fn is_f32_rows(&self, id: TensorId) -> bool {
        self.desc(id).is_some_and(|t| t.dtype() == F32 && t.rows_dense())
    }
}

#[cfg(test)]
mod tests;

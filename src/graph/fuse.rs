//! Op fusion: runs neighbouring nodes as one kernel, e.g. a norm with the operations behind it (epilogue fusion). This saves
//! kernel launches or barriers, and the write and re-read of intermediate rows.
//!
//! All devices share one table of patterns. A pattern lists the ops of consecutive nodes and a function that checks their
//! operands: it returns the fused op with its operands, or `None` if the nodes must run one by one. The device then provides a
//! kernel for the fused op, or declines. A fused kernel reads and writes the same tensors as its nodes, row by row, except for
//! elided results: these have no other reader (see `Candidate::is_elidable`), so the kernel does not write them, and their
//! memory keeps its old content.

use super::{Graph, Node, Overlap, TensorId, overlap};
use crate::ops::norm::Norm;
use crate::ops::rope::Rope;
use crate::ops::{NodeView, Op, OpCode, Sources};
use crate::tensor::DType::F32;
use crate::tensor::TensorDesc;

/// A kernel with its operands, for one node or several fused nodes.
pub(crate) struct KernelCall<K> {
    /// Op code of the (first) node, for error messages.
    pub(crate) code: OpCode,
    pub(crate) kernel: K,
    pub(crate) dst: TensorId,
    /// Operands in the kernel's order. Includes a second result, if the kernel has one.
    pub(crate) srcs: Vec<Option<TensorId>>,
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
    ops: &'static [OpCode],
    find: fn(&Candidate<'_>) -> Option<FusionMatch>,
}

/// All patterns. The first match wins, so a longer pattern comes before a shorter one with the same first op.
pub(crate) const FUSION_PATTERNS: &[FusionPattern] = &[
    FusionPattern { ops: &[OpCode::Add, OpCode::RmsNorm, OpCode::Mul, OpCode::Add], find: norm },
    FusionPattern { ops: &[OpCode::Add, OpCode::Norm, OpCode::Mul, OpCode::Add], find: norm },
    FusionPattern { ops: &[OpCode::Add, OpCode::RmsNorm, OpCode::Mul], find: norm },
    FusionPattern { ops: &[OpCode::Add, OpCode::Norm, OpCode::Mul], find: norm },
    FusionPattern { ops: &[OpCode::Add, OpCode::RmsNorm], find: norm },
    FusionPattern { ops: &[OpCode::Add, OpCode::Norm], find: norm },
    FusionPattern { ops: &[OpCode::RmsNorm, OpCode::Mul, OpCode::Add], find: norm },
    FusionPattern { ops: &[OpCode::Norm, OpCode::Mul, OpCode::Add], find: norm },
    FusionPattern { ops: &[OpCode::RmsNorm, OpCode::Mul], find: norm },
    FusionPattern { ops: &[OpCode::Norm, OpCode::Mul], find: norm },
    FusionPattern { ops: &[OpCode::Rope, OpCode::SetRows], find: rope_set_rows },
];

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
    let readers = graph.reader_counts();
    let mut rest = graph.nodes();
    while let Some(node) = rest.first() {
        // `node_view` is never `None` here: `validate::check` ensures that nodes refer to the graph's own tensors.
        let Some(view) = graph.node_view(node) else { return Ok(()) };
        let kernel = select(&view)?;
        let fused = table.iter().find_map(|pattern| {
            let nodes = rest.get(..pattern.ops.len())?;
            let fits = nodes.iter().zip(pattern.ops).all(|(node, &op)| node.op.code() == op);
            let candidate = Candidate { graph, nodes, readers: &readers };
            // Fuse only nodes that could also run alone. Otherwise a graph with a node that the device reports as unsupported
            // would run or fail depending on the node's neighbours.
            let supported = || nodes.iter().all(|n| graph.node_view(n).is_some_and(|n| select(&n).is_ok()));
            let found = (fits && supported()).then(|| (pattern.find)(&candidate)).flatten()?;
            let kernel = found.kernel(graph, &fuse)?;
            Some((nodes.len(), KernelCall { code: node.op.code(), kernel, dst: found.dst, srcs: found.srcs }))
        });
        let (taken, call) = fused.unwrap_or_else(|| {
            let used = node.srcs.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
            (1, KernelCall { code: node.op.code(), kernel, dst: node.dst, srcs: node.srcs[..used].to_vec() })
        });
        emit(call)?;
        rest = &rest[taken..];
    }
    Ok(())
}

impl FusionMatch {
    fn kernel<K>(&self, graph: &Graph, fuse: impl Fn(&FusedOp, &NodeView<'_>) -> Option<K>) -> Option<K> {
        let desc = |id: TensorId| graph.tensor(id).map(|t| &t.desc);
        let op = match self.fused {
            FusedOp::Norm { op, .. } => Op::Norm(op),
            FusedOp::RopeSetRows { op, .. } => Op::Rope(op),
        };
        let srcs: Vec<_> = self.srcs.iter().map(|id| id.and_then(desc)).collect();
        let view = NodeView { op: &op, dst: desc(self.dst)?, srcs: Sources::new(op.code(), &srcs), aligned: true };
        fuse(&self.fused, &view)
    }
}

/// A candidate for fusion: consecutive nodes with the ops of a pattern.
struct Candidate<'a> {
    graph: &'a Graph,
    nodes: &'a [Node],
    /// Reader counts of all tensors of the graph: see [`Graph::reader_counts`].
    readers: &'a [u32],
}

impl<'a> Candidate<'a> {
    fn desc(&self, id: TensorId) -> Option<&'a TensorDesc> {
        self.graph.tensor(id).map(|t| &t.desc)
    }

    /// Source `i` of node `k`.
    fn src(&self, k: usize, i: usize) -> Option<TensorId> {
        self.nodes.get(k)?.srcs[i]
    }

    /// Whether the write of node `k`'s result can be elided, because only the next node reads it, as `reader`. The result must
    /// not be an output, must have no other reader in this graph or in the client's whole graph, and `reader` must be the
    /// result itself or a view of exactly its bytes.
    fn is_elidable(&self, k: usize, reader: TensorId) -> bool {
        let id = self.nodes[k].dst;
        let (Some(result), Some(read)) = (self.graph.tensor(id), self.graph.tensor(reader)) else { return false };
        let only = |id: TensorId, uses: Option<u32>| uses == Some(1) && self.readers.get(id.0 as usize) == Some(&1);
        let viewed = || {
            let packed = result.desc.is_contiguous() && read.desc.is_contiguous();
            let same = result.place == read.place && result.desc.dtype() == read.desc.dtype();
            let all = result.desc.elements() == read.desc.elements();
            read.view_of == Some(id) && only(reader, read.use_count) && packed && same && all
        };
        only(id, result.use_count) && (reader == id || viewed())
    }

    /// Whether two tensors share no byte.
    fn disjoint(&self, a: TensorId, b: TensorId) -> bool {
        self.overlap(a, b) == Some(Overlap::Disjoint)
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

/// Matches a norm with an optional ADD before it (the residual, which is written too), an optional MUL by weights after it, and
/// an optional ADD of a bias after that. The results of the norm and of the MUL are elided if another node follows.
fn norm(c: &Candidate<'_>) -> Option<FusionMatch> {
    let k = c.nodes.iter().position(|node| matches!(node.op, Op::Norm(_)))?;
    let Op::Norm(op) = c.nodes[k].op else { return None };
    let fusion = NormFusion { residual: k > 0, weight: c.nodes.len() > k + 1, bias: c.nodes.len() > k + 2 };
    let dst = c.nodes.last()?.dst;
    let mut srcs = vec![None; 5];
    if fusion.residual {
        let (a, b, sum) = residual_add(c)?;
        srcs[..3].copy_from_slice(&[Some(a), Some(b), Some(sum)]);
    } else {
        srcs[0] = c.src(k, 0);
    }
    let rows = srcs.iter().flatten().all(|&src| c.disjoint_or_in_place(dst, src));
    if fusion.weight {
        srcs[3] = Some(row_broadcast_operand(c, k).filter(|&w| c.disjoint(dst, w))?);
    }
    if fusion.bias {
        srcs[4] = Some(row_broadcast_operand(c, k + 1).filter(|&bias| c.disjoint_or_in_place(dst, bias))?);
    }
    let disjoint = !fusion.residual || srcs[3..].iter().flatten().all(|&src| c.disjoint(c.nodes[0].dst, src));
    let fits = rows && disjoint && c.is_f32_rows(dst);
    fits.then_some(FusionMatch { fused: FusedOp::Norm { op, fusion }, dst, srcs })
}

/// Summands and result of the ADD at node 0, if it has no broadcast and node 1 normalises its result.
fn residual_add(c: &Candidate<'_>) -> Option<(TensorId, TensorId, TensorId)> {
    let (a, b, sum) = (c.src(0, 0)?, c.src(0, 1)?, c.nodes[0].dst);
    let same = c.desc(a)?.ne() == c.desc(b)?.ne() && c.src(1, 0) == Some(sum);
    (same && [a, b, sum].iter().all(|&id| c.is_f32_rows(id))).then_some((a, b, sum))
}

/// The other operand of node `k + 1`, which combines it row by row with the result of node `k`. `None` if the operands do not
/// match, or if the result of node `k` cannot be elided.
fn row_broadcast_operand(c: &Candidate<'_>, k: usize) -> Option<TensorId> {
    let (x, other) = (c.src(k + 1, 0)?, c.src(k + 1, 1)?);
    let ne = c.desc(x)?.ne();
    let whole = ne == c.desc(c.nodes[k].dst)?.ne() && ne[0] == c.desc(other)?.ne()[0];
    (whole && c.is_f32_rows(other) && c.is_elidable(k, x)).then_some(other)
}

/// Matches ROPE of new keys followed by SET_ROWS of all heads of a token as one cache row. The rotated keys are elided.
fn rope_set_rows(c: &Candidate<'_>) -> Option<FusionMatch> {
    let Op::Rope(op) = c.nodes[0].op else { return None };
    let (x, positions, factors) = (c.src(0, 0)?, c.src(0, 1)?, c.src(0, 2));
    let (rows, ids, cache) = (c.src(1, 0)?, c.src(1, 1)?, c.nodes[1].dst);
    let [d, heads, tokens, batches] = c.desc(x)?.ne();
    let row = d.checked_mul(heads)?;
    let shapes = batches == 1 && c.desc(rows)?.ne() == [row, tokens, 1, 1] && c.desc(ids)?.ne() == [tokens, 1, 1, 1];
    let disjoint = [Some(x), Some(positions), factors].into_iter().flatten().all(|src| c.disjoint(cache, src));
    let fits = shapes && disjoint && c.is_elidable(0, rows);
    let srcs = vec![Some(x), Some(positions), factors, Some(ids)];
    fits.then_some(FusionMatch { fused: FusedOp::RopeSetRows { op, row }, dst: cache, srcs })
}

//! Neighbouring nodes that run as one: fewer launches or barriers, and rows that are not written between them only to be
//! read again.
//!
//! One table of patterns for all devices. A row of it names the ops of consecutive nodes, and a function that looks closer:
//! it returns what the fused kernel computes with its operands, or `None` where the nodes must run one by one. The device
//! then gives a kernel for it, or declines. A fused step reads and writes what its nodes do, row by row, except for results
//! that it passes on: nobody else reads those (see [`Candidate::passes_on`]), and their memory keeps what was there.

use super::{Graph, Node, Overlap, TensorId, overlap};
use crate::ops::norm::Norm;
use crate::ops::rope::Rope;
use crate::ops::{NodeView, Op, OpCode, Sources};
use crate::tensor::DType::F32;
use crate::tensor::TensorDesc;

/// One kernel with its operands: a node or several.
pub(crate) struct KernelCall<K> {
    /// The (first) node's op, for messages.
    pub(crate) code: OpCode,
    pub(crate) kernel: K,
    pub(crate) dst: TensorId,
    /// As the kernel counts them. A second result is among them.
    pub(crate) srcs: Vec<Option<TensorId>>,
}

/// What a fused kernel computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum FusedOp {
    /// A norm with its neighbours. Sources: x, or the summands a and b; the others as [`Around`] says.
    Norm { op: Norm, fusion: NormFusion },
    /// ROPE whose result becomes rows of a cache, all heads of a token one row of `row` elements. Sources: x, positions,
    /// factors or nothing, row numbers.
    RopeSetRows { op: Rope, row: usize },
}

/// What a kernel does beside its norm, with sources of their own: they and the result are F32 with dense rows.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub(crate) struct NormFusion {
    /// `x = a + b` is what is normed; it is written to "source" 2. All three have one shape.
    pub(crate) residual: bool,
    /// The norm is multiplied by source 3, whose rows repeat.
    pub(crate) weight: bool,
    /// Source 4, whose rows repeat, is added to the product.
    pub(crate) bias: bool,
}

/// Nodes that run as one.
pub(crate) struct FusionMatch {
    fused: FusedOp,
    dst: TensorId,
    srcs: Vec<Option<TensorId>>,
}

/// A row of the table.
pub(crate) struct FusionPattern {
    ops: &'static [OpCode],
    find: fn(&Candidate<'_>) -> Option<FusionMatch>,
}

/// All patterns; of those that begin with the same op, the longest first.
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

/// Gives the steps of a graph to `take`, in order, with nodes fused by the patterns of `table` where `fuse` has a kernel for
/// them (it sees the main op with the fused operands), and kernels of `select` for the others.
///
/// # Errors
/// When the device has no kernel for a node; those of `take`.
pub(crate) fn select_kernels<K, U, E: From<U>>(
    graph: &Graph,
    table: &[FusionPattern],
    select: impl Fn(&NodeView<'_>) -> Result<K, U>,
    fuse: impl Fn(&FusedOp, &NodeView<'_>) -> Option<K>,
    mut take: impl FnMut(KernelCall<K>) -> Result<(), E>,
) -> Result<(), E> {
    let readers = graph.reader_counts();
    let mut rest = graph.nodes();
    while let Some(node) = rest.first() {
        // A graph's nodes name its own tensors: `validate` has seen to it.
        let Some(view) = graph.node_view(node) else { return Ok(()) };
        let kernel = select(&view)?;
        let fused = table.iter().find_map(|pattern| {
            let nodes = rest.get(..pattern.ops.len())?;
            let fits = nodes.iter().zip(pattern.ops).all(|(node, &op)| node.op.code() == op);
            let candidate = Candidate { graph, nodes, readers: &readers };
            // A node that could not run by itself is not run in company either: the answers to "do you support this" hold.
            let all = || nodes.iter().all(|n| graph.node_view(n).is_some_and(|n| select(&n).is_ok()));
            let found = (fits && all()).then(|| (pattern.find)(&candidate)).flatten()?;
            let kernel = found.kernel(graph, &fuse)?;
            Some((nodes.len(), KernelCall { code: node.op.code(), kernel, dst: found.dst, srcs: found.srcs }))
        });
        let (taken, step) = fused.unwrap_or_else(|| {
            let used = node.srcs.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
            (1, KernelCall { code: node.op.code(), kernel, dst: node.dst, srcs: node.srcs[..used].to_vec() })
        });
        take(step)?;
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

/// Consecutive nodes with the ops of a pattern.
struct Candidate<'a> {
    graph: &'a Graph,
    nodes: &'a [Node],
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

    /// Whether the result of node `k` is for the next node alone, which reads it as `reader`: no output, no other reader
    /// in the whole graph of whoever made it, none in this one, and `reader` is it or a view of just its bytes.
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
    fn apart(&self, a: TensorId, b: TensorId) -> bool {
        self.overlap(a, b) == Some(Overlap::Disjoint)
    }

    /// Whether two tensors share no byte, or each row of the one lies on the same row of the other: a kernel may write the
    /// row when it has read it.
    fn row_by_row(&self, a: TensorId, b: TensorId) -> bool {
        matches!(self.overlap(a, b), Some(Overlap::Disjoint | Overlap::Exact))
    }

    fn overlap(&self, a: TensorId, b: TensorId) -> Option<Overlap> {
        Some(overlap(self.graph.tensor(a)?, self.graph.tensor(b)?))
    }

    fn is_f32_rows(&self, id: TensorId) -> bool {
        self.desc(id).is_some_and(|t| t.dtype() == F32 && t.rows_dense())
    }
}

/// A norm; before it perhaps an ADD, whose sum is written (it is the residual); behind it perhaps a MUL by weights, and
/// behind that an ADD: then the norm, or the product, is passed on.
fn norm(c: &Candidate<'_>) -> Option<FusionMatch> {
    let k = c.nodes.iter().position(|node| matches!(node.op, Op::Norm(_)))?;
    let Op::Norm(op) = c.nodes[k].op else { return None };
    let around = NormFusion { residual: k > 0, weight: c.nodes.len() > k + 1, bias: c.nodes.len() > k + 2 };
    let dst = c.nodes.last()?.dst;
    let mut srcs = vec![None; 5];
    if around.residual {
        let (a, b, sum) = residual_add(c)?;
        srcs[..3].copy_from_slice(&[Some(a), Some(b), Some(sum)]);
    } else {
        srcs[0] = c.src(k, 0);
    }
    let rows = srcs.iter().flatten().all(|&src| c.row_by_row(dst, src));
    if around.weight {
        srcs[3] = Some(row_broadcast_operand(c, k).filter(|&w| c.apart(dst, w))?);
    }
    if around.bias {
        srcs[4] = Some(row_broadcast_operand(c, k + 1).filter(|&plus| c.row_by_row(dst, plus))?);
    }
    let apart = !around.residual || srcs[3..].iter().flatten().all(|&src| c.apart(c.nodes[0].dst, src));
    let fits = rows && apart && c.is_f32_rows(dst);
    fits.then_some(FusionMatch { fused: FusedOp::Norm { op, fusion: around }, dst, srcs })
}

/// Summands and result of an ADD without broadcast at node 0 whose result node 1 norms.
fn residual_add(c: &Candidate<'_>) -> Option<(TensorId, TensorId, TensorId)> {
    let (a, b, sum) = (c.src(0, 0)?, c.src(0, 1)?, c.nodes[0].dst);
    let same = c.desc(a)?.ne() == c.desc(b)?.ne() && c.src(1, 0) == Some(sum);
    (same && [a, b, sum].iter().all(|&id| c.is_f32_rows(id))).then_some((a, b, sum))
}

/// What the node behind node `k` combines with its result, row by row: the result is passed on.
fn row_broadcast_operand(c: &Candidate<'_>, k: usize) -> Option<TensorId> {
    let (x, other) = (c.src(k + 1, 0)?, c.src(k + 1, 1)?);
    let ne = c.desc(x)?.ne();
    let whole = ne == c.desc(c.nodes[k].dst)?.ne() && ne[0] == c.desc(other)?.ne()[0];
    (whole && c.is_f32_rows(other) && c.is_elidable(k, x)).then_some(other)
}

/// ROPE of new keys, SET_ROWS of all heads of a token as one row of the cache: the turned keys are passed on.
fn rope_set_rows(c: &Candidate<'_>) -> Option<FusionMatch> {
    let Op::Rope(op) = c.nodes[0].op else { return None };
    let (x, positions, factors) = (c.src(0, 0)?, c.src(0, 1)?, c.src(0, 2));
    let (rows, ids, cache) = (c.src(1, 0)?, c.src(1, 1)?, c.nodes[1].dst);
    let [d, heads, tokens, batches] = c.desc(x)?.ne();
    let row = d.checked_mul(heads)?;
    let shapes = batches == 1 && c.desc(rows)?.ne() == [row, tokens, 1, 1] && c.desc(ids)?.ne() == [tokens, 1, 1, 1];
    let apart = [Some(x), Some(positions), factors].into_iter().flatten().all(|src| c.apart(cache, src));
    let fits = shapes && apart && c.is_elidable(0, rows);
    let srcs = vec![Some(x), Some(positions), factors, Some(ids)];
    fits.then_some(FusionMatch { fused: FusedOp::RopeSetRows { op, row }, dst: cache, srcs })
}

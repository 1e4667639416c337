//! Neighbouring nodes that run as one: fewer barriers, and rows that stay in the cache between them.
//!
//! One table of patterns. A row of it names the ops of consecutive nodes, and a function that looks closer: it returns
//! the fused kernel with its operands, or `None` where the nodes must run one by one. A fused step reads and writes what
//! its nodes do, row by row, except for results that it passes on: nobody else reads those (see
//! [`Candidate::passes_on`]), and their memory keeps what was there.

use super::ops::{Kernel, norm, rope};
use crate::device::{DeviceError, Unsupported};
use crate::graph::{Graph, Node, Overlap, TensorId, overlap};
use crate::ops::{NodeView, Op, OpCode};
use crate::tensor::DType::F32;
use crate::tensor::TensorDesc;
use crate::tensor::quant::quantiser;

/// One kernel with its operands: a node or several.
pub(super) struct Step {
    /// The (first) node's op, for messages.
    pub(super) code: OpCode,
    pub(super) kernel: Kernel,
    pub(super) dst: TensorId,
    /// As the kernel counts them. A second result is among them.
    pub(super) srcs: Vec<Option<TensorId>>,
}

/// A row of the table.
pub(super) struct Pattern {
    ops: &'static [OpCode],
    fuse: fn(&Candidate<'_>) -> Option<Step>,
}

/// All patterns; of those that begin with the same op, the longest first.
pub(super) const TABLE: &[Pattern] = &[
    Pattern { ops: &[OpCode::Add, OpCode::RmsNorm, OpCode::Mul], fuse: add_norm_mul },
    Pattern { ops: &[OpCode::Add, OpCode::RmsNorm], fuse: add_norm },
    Pattern { ops: &[OpCode::RmsNorm, OpCode::Mul], fuse: norm_mul },
    Pattern { ops: &[OpCode::Rope, OpCode::SetRows], fuse: rope_set_rows },
];

/// Gives the steps of a graph to `take`, in order, with nodes fused by the patterns of `table` and kernels of `select` for
/// the others.
///
/// # Errors
/// When the device has no kernel for a node; those of `take`.
pub(super) fn steps(
    graph: &Graph,
    table: &[Pattern],
    select: impl Fn(&NodeView<'_>) -> Result<Kernel, Unsupported>,
    mut take: impl FnMut(Step) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    let readers = graph.readers();
    let mut rest = graph.nodes();
    while let Some(node) = rest.first() {
        let view = graph.view(node).ok_or(DeviceError::Misuse("a node of another graph"))?;
        let kernel = select(&view)?;
        let fused = table.iter().find_map(|pattern| {
            let nodes = rest.get(..pattern.ops.len())?;
            let fits = nodes.iter().zip(pattern.ops).all(|(node, &op)| node.op.code() == op);
            let candidate = Candidate { graph, nodes, readers: &readers };
            // A node that could not run by itself is not run in company either: the answers to "do you support this" hold.
            let all = || nodes.iter().all(|n| graph.view(n).is_some_and(|n| select(&n).is_ok()));
            (fits && all()).then(|| (pattern.fuse)(&candidate)).flatten().map(|step| (nodes.len(), step))
        });
        let (taken, step) = fused.unwrap_or_else(|| {
            let used = node.srcs.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
            (1, Step { code: node.op.code(), kernel, dst: node.dst, srcs: node.srcs[..used].to_vec() })
        });
        take(step)?;
        rest = &rest[taken..];
    }
    Ok(())
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
    fn passes_on(&self, k: usize, reader: TensorId) -> bool {
        let id = self.nodes[k].dst;
        let (Some(result), Some(read)) = (self.graph.tensor(id), self.graph.tensor(reader)) else { return false };
        let only = |id: TensorId, uses: Option<u32>| uses == Some(1) && self.readers.get(id.0 as usize) == Some(&1);
        let viewed = || {
            let packed = result.desc.is_contiguous() && read.desc.is_contiguous();
            let same = result.place == read.place && result.desc.dtype() == read.desc.dtype();
            let all = result.desc.elements() == read.desc.elements();
            read.view_of == Some(id) && only(reader, read.uses) && packed && same && all
        };
        only(id, result.uses) && (reader == id || viewed())
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

/// RMS_NORM, MUL by weights: the norm is passed on.
fn norm_mul(c: &Candidate<'_>) -> Option<Step> {
    let x = c.src(0, 0)?;
    let (dst, w) = scaled(c, 0)?;
    let srcs = vec![Some(x), None, None, Some(w)];
    normed(c, 0, x, norm::Around { add: false, mul: true }, dst, srcs)
}

/// ADD, RMS_NORM: both results are written.
fn add_norm(c: &Candidate<'_>) -> Option<Step> {
    let (a, b, sum) = summed(c)?;
    let dst = c.nodes[1].dst;
    let fits = [a, b, sum].iter().all(|&src| c.row_by_row(dst, src)) && c.is_f32_rows(dst);
    let around = norm::Around { add: true, mul: false };
    fits.then(|| normed(c, 1, a, around, dst, vec![Some(a), Some(b), Some(sum)])).flatten()
}

/// ADD, RMS_NORM, MUL by weights: the sum is written (it is the residual), the norm is passed on.
fn add_norm_mul(c: &Candidate<'_>) -> Option<Step> {
    let (a, b, sum) = summed(c)?;
    let (dst, w) = scaled(c, 1)?;
    let fits = [a, b, sum].iter().all(|&src| c.row_by_row(dst, src)) && c.apart(sum, w);
    let around = norm::Around { add: true, mul: true };
    fits.then(|| normed(c, 1, a, around, dst, vec![Some(a), Some(b), Some(sum), Some(w)])).flatten()
}

/// Summands and result of an ADD without broadcast at node 0 whose result node 1 norms.
fn summed(c: &Candidate<'_>) -> Option<(TensorId, TensorId, TensorId)> {
    let (a, b, sum) = (c.src(0, 0)?, c.src(0, 1)?, c.nodes[0].dst);
    let same = c.desc(a)?.ne() == c.desc(b)?.ne() && c.src(1, 0) == Some(sum);
    (same && [a, b, sum].iter().all(|&id| c.is_f32_rows(id))).then_some((a, b, sum))
}

/// Destination and weights of the MUL after the norm at node `k`.
fn scaled(c: &Candidate<'_>, k: usize) -> Option<(TensorId, TensorId)> {
    let (x, y, w, dst) = (c.src(k, 0)?, c.src(k + 1, 0)?, c.src(k + 1, 1)?, c.nodes[k + 1].dst);
    let whole = c.desc(w)?.ne()[0] == c.desc(x)?.ne()[0];
    let fits = whole && c.is_f32_rows(w) && c.is_f32_rows(dst) && c.row_by_row(dst, x) && c.apart(dst, w);
    (fits && c.passes_on(k, y)).then_some((dst, w))
}

/// The step for the norm at node `k`, over rows like those of `x`.
fn normed(
    c: &Candidate<'_>,
    k: usize,
    x: TensorId,
    around: norm::Around,
    dst: TensorId,
    srcs: Vec<Option<TensorId>>,
) -> Option<Step> {
    let (desc, Op::Norm(op)) = (c.desc(x)?, &c.nodes[k].op) else { return None };
    let kernel = (desc.ne()[0] <= norm::KEPT).then(|| norm::kernel(*op, desc, around))?;
    Some(Step { code: c.nodes[0].op.code(), kernel, dst, srcs })
}

/// ROPE of new keys, SET_ROWS of all heads of a token as one row of the cache: the turned keys are passed on.
fn rope_set_rows(c: &Candidate<'_>) -> Option<Step> {
    let Op::Rope(op) = c.nodes[0].op else { return None };
    let (x, positions, factors) = (c.src(0, 0)?, c.src(0, 1)?, c.src(0, 2));
    let (rows, ids, cache) = (c.src(1, 0)?, c.src(1, 1)?, c.nodes[1].dst);
    let ([d, heads, tokens, batches], into) = (c.desc(x)?.ne(), c.desc(cache)?);
    let row = d.checked_mul(heads).filter(|&n| n <= norm::KEPT)?;
    let shapes = batches == 1 && c.desc(rows)?.ne() == [row, tokens, 1, 1] && c.desc(ids)?.ne() == [tokens, 1, 1, 1];
    let types = c.desc(x)?.dtype() == F32 && quantiser(into.dtype()).is_some();
    let apart = [Some(x), Some(positions), factors].into_iter().flatten().all(|src| c.apart(cache, src));
    let fits = shapes && types && apart && c.passes_on(0, rows);
    fits.then(|| Step {
        code: OpCode::Rope,
        kernel: rope::onto_rows(op, c.desc(x).map_or(0, TensorDesc::elements), row),
        dst: cache,
        srcs: vec![Some(x), Some(positions), factors, Some(ids)],
    })
}

#[cfg(test)]
mod tests;

//! The table of fusion patterns, and the functions that check the operands of a match.

use super::Link::{Any, ReadsResult, SameSource1};
use super::{Candidate, FusedOp, FusionMatch, FusionPattern, GatedProduct, Link, NormFusion, moe};
use crate::graph::TensorId;
use crate::ops::norm::Norm;
use crate::ops::{Op, OpCode};

const ADD: (OpCode, Link) = (OpCode::Add, ReadsResult);
const ARGSORT: (OpCode, Link) = (OpCode::Argsort, ReadsResult);
const CLAMP: (OpCode, Link) = (OpCode::Clamp, ReadsResult);
const DIV: (OpCode, Link) = (OpCode::Div, ReadsResult);
const GLU: (OpCode, Link) = (OpCode::Glu, ReadsResult);
const GET_ROWS: (OpCode, Link) = (OpCode::GetRows, ReadsResult);
const MUL: (OpCode, Link) = (OpCode::Mul, ReadsResult);
const NORM: (OpCode, Link) = (OpCode::Norm, ReadsResult);
const RMS_NORM: (OpCode, Link) = (OpCode::RmsNorm, ReadsResult);
const ROPE: (OpCode, Link) = (OpCode::Rope, ReadsResult);
const SET_ROWS: (OpCode, Link) = (OpCode::SetRows, ReadsResult);
const SOFT_MAX: (OpCode, Link) = (OpCode::SoftMax, ReadsResult);
const SUM_ROWS: (OpCode, Link) = (OpCode::SumRows, ReadsResult);

const ANY_RMS_NORM: (OpCode, Link) = (OpCode::RmsNorm, Any);
const ANY_SET_ROWS: (OpCode, Link) = (OpCode::SetRows, Any);
/// A product of the same columns as the first node.
const MUL_MAT: (OpCode, Link) = (OpCode::MulMat, SameSource1);
const MUL_MAT_ID: (OpCode, Link) = (OpCode::MulMatId, SameSource1);
/// ROPE with the same positions as the first node.
const SAME_ROPE: (OpCode, Link) = (OpCode::Rope, SameSource1);

/// All patterns. The first match wins, so a longer pattern comes before a shorter one with the same first op.
pub(crate) const FUSION_PATTERNS: &[FusionPattern] = &[
    FusionPattern { ops: &[RMS_NORM, MUL, ROPE, ANY_RMS_NORM, MUL, ROPE, SET_ROWS, ANY_SET_ROWS], find: rope_cache },
    FusionPattern { ops: &[RMS_NORM, MUL, ROPE, ANY_RMS_NORM, MUL, ROPE, SET_ROWS], find: rope_cache },
    FusionPattern { ops: &[ADD, RMS_NORM, MUL, ADD], find: norm },
    FusionPattern { ops: &[ADD, NORM, MUL, ADD], find: norm },
    FusionPattern { ops: &[ADD, RMS_NORM, MUL], find: norm },
    FusionPattern { ops: &[ADD, NORM, MUL], find: norm },
    FusionPattern { ops: &[ADD, RMS_NORM], find: norm },
    FusionPattern { ops: &[ADD, NORM], find: norm },
    FusionPattern { ops: &[RMS_NORM, MUL, ADD], find: norm },
    FusionPattern { ops: &[NORM, MUL, ADD], find: norm },
    FusionPattern { ops: &[RMS_NORM, MUL], find: norm },
    FusionPattern { ops: &[NORM, MUL], find: norm },
    FusionPattern { ops: &[SOFT_MAX, ARGSORT, GET_ROWS, SUM_ROWS, CLAMP, DIV], find: moe::route },
    FusionPattern { ops: &[SOFT_MAX, ARGSORT, GET_ROWS, SUM_ROWS, DIV], find: moe::route },
    // Eight, six, four and two experts.
    FusionPattern { ops: &[MUL, ADD, ADD, ADD, ADD, ADD, ADD, ADD], find: moe::expert_sum },
    FusionPattern { ops: &[MUL, ADD, ADD, ADD, ADD, ADD], find: moe::expert_sum },
    FusionPattern { ops: &[MUL, ADD, ADD, ADD], find: moe::expert_sum },
    FusionPattern { ops: &[MUL, ADD], find: moe::expert_sum },
    FusionPattern { ops: &[ROPE, SAME_ROPE, SET_ROWS, ANY_SET_ROWS], find: rope_cache },
    FusionPattern { ops: &[ROPE, SAME_ROPE, SET_ROWS], find: rope_cache },
    FusionPattern { ops: &[ROPE, SET_ROWS], find: rope_set_rows },
    FusionPattern { ops: &[MUL_MAT, MUL_MAT, GLU], find: gated_product },
    FusionPattern { ops: &[MUL_MAT_ID, MUL_MAT_ID, GLU], find: gated_product },
    // Before longer patterns of products alone, which would leave each bias to a launch of its own.
    FusionPattern { ops: &[MUL_MAT, ADD, MUL_MAT, ADD, MUL_MAT, ADD], find: products },
    FusionPattern { ops: &[MUL_MAT, ADD, MUL_MAT, ADD], find: products },
    FusionPattern { ops: &[MUL_MAT, ADD], find: products },
    FusionPattern { ops: &[MUL_MAT, MUL_MAT, MUL_MAT], find: products },
    FusionPattern { ops: &[MUL_MAT, MUL_MAT], find: products },
];

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
    (whole && c.is_f32_rows(x) && c.is_f32_rows(other) && c.is_elidable(k, x)).then_some(other)
}

/// Matches ROPE of new keys followed by SET_ROWS of all heads of a token as one cache row. The rotated keys are elided.
fn rope_set_rows(c: &Candidate<'_>) -> Option<FusionMatch> {
    rope_set_rows_at(c, 0)
}

/// As `rope_set_rows`, from node `k` of the candidate on.
fn rope_set_rows_at(c: &Candidate<'_>, k: usize) -> Option<FusionMatch> {
    let Op::Rope(op) = c.nodes[k].op else { return None };
    let (x, positions, factors) = (c.src(k, 0)?, c.src(k, 1)?, c.src(k, 2));
    let (rows, ids, cache) = (c.src(k + 1, 0)?, c.src(k + 1, 1)?, c.nodes[k + 1].dst);
    let [d, heads, tokens, batches] = c.desc(x)?.ne();
    let row = d.checked_mul(heads)?;
    let shapes = batches == 1 && c.desc(rows)?.ne() == [row, tokens, 1, 1] && c.desc(ids)?.ne() == [tokens, 1, 1, 1];
    let disjoint = [Some(x), Some(positions), factors].into_iter().flatten().all(|src| c.disjoint(cache, src));
    let fits = shapes && disjoint && c.is_elidable(k, rows);
    let srcs = vec![Some(x), Some(positions), factors, Some(ids)];
    fits.then_some(FusionMatch { fused: FusedOp::RopeSetRows { op, row }, dst: cache, srcs })
}

/// RMS_NORM at node `k`, and MUL by weights that are the same for all rows, whose result node `k + 2` reads: the source, the weights,
/// and eps. Both results are elided.
fn head_norm(c: &Candidate<'_>, k: usize) -> Option<(TensorId, TensorId, f32)> {
    let Op::Norm(Norm::RmsNorm { eps }) = c.nodes[k].op else { return None };
    let (x, read) = (c.src(k, 0)?, c.src(k + 2, 0)?);
    let weights = row_broadcast_operand(c, k).filter(|_| c.is_elidable(k + 1, read))?;
    let shapes = c.desc(x)?.ne() == c.desc(read)?.ne() && c.desc(weights)?.ne() == [c.desc(x)?.ne()[0], 1, 1, 1];
    (shapes && c.is_f32_rows(x)).then_some((x, weights, eps))
}

/// Matches ROPE of queries, and what `rope_set_rows` matches for keys with the same positions, and SET_ROWS of values with one row for
/// each token if there is another node; and norms before both ROPEs. All run at the same time, so results may lie on no other
/// operand.
fn rope_cache(c: &Candidate<'_>) -> Option<FusionMatch> {
    let norms = if matches!(c.nodes[0].op, Op::Norm(_)) { Some([head_norm(c, 0)?, head_norm(c, 3)?]) } else { None };
    // The nodes of the queries' ROPE and of the keys' ROPE, which the nodes of SET_ROWS follow.
    let [at_q, at_k] = if norms.is_some() { [2, 5] } else { [0, 1] };
    let keys = rope_set_rows_at(c, at_k)?;
    let FusedOp::RopeSetRows { op, row } = keys.fused else { return None };
    let (mut q, mut k, y, mut factors) = (c.src(at_q, 0)?, c.src(at_k, 0)?, c.nodes[at_q].dst, c.src(at_q, 2));
    let same = c.nodes[at_q].op == c.nodes[at_k].op && c.src(at_q, 1) == c.src(at_k, 1) && factors == c.src(at_k, 2);
    if !same || (norms.is_some() && factors.is_some()) {
        return None;
    }
    if let Some([(x, weights, _), (of_keys, ..)]) = norms {
        (q, k, factors) = (x, of_keys, Some(weights));
    }
    let [d, _, tokens, batches] = c.desc(q)?.ne();
    let [key_width, _, key_tokens, _] = c.desc(k)?.ne();
    if batches != 1 || [d, tokens] != [key_width, key_tokens] {
        return None;
    }
    let mut srcs = vec![Some(q), c.src(at_q, 1), factors, Some(k), c.src(at_k + 1, 1), Some(keys.dst)];
    let values = c.nodes.get(at_k + 2);
    match values {
        Some(node) => {
            let (v, ids) = (node.srcs[0]?, node.srcs[1]?);
            if c.desc(v)?.ne()[1..] != [tokens, 1, 1] || c.desc(ids)?.ne() != [tokens, 1, 1, 1] {
                return None;
            }
            srcs.extend([Some(v), Some(ids), Some(node.dst)]);
        }
        None => srcs.extend([None; 3]),
    }
    srcs.extend(norms.map(|[_, (_, weights, _)]| Some(weights)));
    let results = [Some(y), Some(keys.dst), values.map(|node| node.dst)];
    let read = |i: &usize| ![5, 8].contains(i);
    let apart = results.iter().flatten().enumerate().all(|(n, &result)| {
        let from_sources = srcs.iter().enumerate().filter(|(i, _)| read(i)).all(|(i, src)| {
            // The queries may be rotated in place.
            let may_share =
                |src| if n == 0 && i == 0 { c.disjoint_or_in_place(result, src) } else { c.disjoint(result, src) };
            src.is_none_or(may_share)
        });
        from_sources && results[..n].iter().flatten().all(|&other| c.disjoint(result, other))
    });
    let norms = norms.map(|of| of.map(|(_, _, eps)| eps));
    let fused = FusedOp::RopeCache { op, row, values: values.is_some(), norms };
    apart.then_some(FusionMatch { fused, dst: y, srcs })
}

/// Matches up to three products of the same columns with weights of one type, and an ADD of a vector after each or after none. No
/// result may lie on another, on weights or on a vector. Products are elided if an ADD follows.
fn products(c: &Candidate<'_>) -> Option<FusionMatch> {
    let Op::MulMat(product) = c.nodes[0].op else { return None };
    let (weights, columns) = (c.src(0, 0)?, c.src(0, 1)?);
    let biased = c.nodes.get(1).is_some_and(|node| node.op.code() == OpCode::Add);
    let (mut results, mut srcs, mut biases) = (Vec::new(), Vec::new(), Vec::new());
    for k in (0..c.nodes.len()).step_by(1 + usize::from(biased)) {
        let other = c.src(k, 0)?;
        if c.desc(other)?.ne()[0] != c.desc(weights)?.ne()[0] {
            return None;
        }
        if biased {
            biases.push(vector_added_to(c, k)?);
        }
        results.push(c.nodes[k + usize::from(biased)].dst);
        srcs.extend([other, results[results.len() - 1]]);
    }
    let dst = results[0];
    srcs[1] = columns;
    srcs.extend(biases);
    let mut read = srcs.iter().filter(|src| !results.contains(src));
    let apart = read.all(|&src| results.iter().all(|&result| c.disjoint(result, src)))
        && results.iter().enumerate().all(|(k, &a)| results[..k].iter().all(|&b| c.disjoint(a, b)));
    let srcs = srcs.into_iter().map(Some).collect();
    apart.then_some(FusionMatch { fused: FusedOp::Products { product, biased }, dst, srcs })
}

/// The vector that node `k + 1` adds to each column of the result of node `k`, which is elided. A result of another node is none: with
/// one token a residual looks like a vector, and its ADD is fused with the norm after it. A residual that another graph has computed
/// passes, and the norm has one operation less then.
fn vector_added_to(c: &Candidate<'_>, k: usize) -> Option<TensorId> {
    let vector = row_broadcast_operand(c, k)?;
    let result = c.nodes[k + 1].dst;
    let shapes = c.desc(vector)?.ne()[1..] == [1, 1, 1] && c.desc(result)?.ne() == c.desc(c.nodes[k].dst)?.ne();
    (shapes && c.is_f32_rows(result) && !c.is_computed(vector)).then_some(vector)
}

/// Matches two products of the same columns, whose results are the operands of a GLU and are elided.
fn gated_product(c: &Candidate<'_>) -> Option<FusionMatch> {
    let (Op::MulMat(product), Op::Glu(glu)) = (&c.nodes[0].op, &c.nodes[2].op) else { return None };
    let (gate, up, dst) = (c.src(2, 0)?, c.src(2, 1)?, c.nodes[2].dst);
    // The products come in either order.
    let (first, second) = if c.is_elidable(0, gate) { (0, 1) } else { (1, 0) };
    let same = c.desc(c.src(0, 0)?)?.ne() == c.desc(c.src(1, 0)?)?.ne() && c.src(0, 2) == c.src(1, 2);
    let whole = c.desc(gate)?.ne() == c.desc(dst)?.ne() && c.desc(dst)?.ne() == c.desc(c.nodes[0].dst)?.ne();
    let floats = [gate, up, dst].into_iter().all(|id| c.is_f32_rows(id));
    if !(same && whole && floats && c.is_elidable(first, gate) && c.is_elidable(second, up)) {
        return None;
    }
    let (columns, ids) = (c.src(0, 1)?, c.src(0, 2));
    let srcs = vec![c.src(first, 0), Some(columns), c.src(second, 0), ids];
    let apart = [srcs[0], srcs[2], ids].into_iter().flatten().all(|src| c.disjoint(dst, src));
    let fused = FusedOp::GatedProduct(GatedProduct { product: *product, kind: glu.kind });
    apart.then_some(FusionMatch { fused, dst, srcs })
}

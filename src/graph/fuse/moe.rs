//! Patterns of a mixture of experts, as llama.cpp builds it: the router, and the weighted sum of the experts' results.

use super::{Candidate, FusedOp, FusionMatch};
use crate::graph::{SlotOffset, TensorId};
use crate::ops::Op;
use crate::ops::sort::Sort;
use crate::ops::unary::Unary;
use crate::tensor::DType::{F32, I32};

/// Matches SOFT_MAX, ARGSORT, GET_ROWS, SUM_ROWS, an optional CLAMP, and DIV. The kernel writes all results, token by token.
pub(super) fn route(c: &Candidate<'_>) -> Option<FusionMatch> {
    let last = c.nodes.len() - 1;
    let (Op::SoftMax(op), Op::Sort(sort)) = (&c.nodes[0].op, &c.nodes[1].op) else { return None };
    let bounds = match c.nodes[last - 1].op {
        Op::Unary(Unary::Clamp { min, max }) => Some([min, max]),
        _ => None,
    };
    let plain = c.src(0, 1).is_none() && c.src(0, 2).is_none() && *sort == Sort::Argsort { descending: true };
    let [logits, p, ids, w, sum] = [c.src(0, 0)?, c.nodes[0].dst, c.nodes[1].dst, c.nodes[2].dst, c.nodes[3].dst];
    let (clamped, y) = (bounds.map(|_| c.nodes[4].dst), c.nodes[last].dst);
    let [experts, tokens, 1, 1] = c.desc(logits)?.ne() else { return None };
    let [1, used, _, 1] = c.desc(w)?.ne() else { return None };
    // Operands that are views: the probabilities as rows of one, the first ids of each token, the weights as rows.
    let (table, list) = (c.src(2, 0)?, c.src(2, 1)?);
    let (divided, divisor) = (c.src(last, 0)?, c.src(last, 1)?);
    let (first_ids, all_ids) = (c.graph.tensor(list)?, c.graph.tensor(ids)?);
    // The list is a view of memory that may be longer than the ids.
    let lists = used <= experts
        && first_ids.place == all_ids.place
        && first_ids.desc.ne() == [used, tokens, 1, 1]
        && (tokens == 1 || first_ids.desc.nb()[1] == all_ids.desc.nb()[1])
        && first_ids.desc.nb()[0] == I32.block_bytes();
    let shapes = lists
        && c.src(1, 0) == Some(p)
        && (c.same_bytes(table, p) && c.desc(table)?.ne() == [1, experts, tokens, 1])
        && c.desc(w)?.ne() == [1, used, tokens, 1]
        && (c.same_bytes(c.src(3, 0)?, w) && c.desc(c.src(3, 0)?)?.ne() == [used, tokens, 1, 1])
        && c.same_bytes(divided, w)
        && (c.same_bytes(divisor, clamped.unwrap_or(sum)) && c.desc(divisor)?.ne() == [1, tokens, 1, 1])
        && c.desc(sum)?.ne() == [1, tokens, 1, 1]
        && (bounds.is_none() || c.same_bytes(c.src(4, 0)?, sum))
        && c.desc(y)?.ne() == [used, tokens, 1, 1];
    let all: Vec<_> =
        [Some(logits), Some(p), Some(ids), Some(w), Some(sum), clamped, Some(y)].into_iter().flatten().collect();
    let typed =
        all.iter().all(|&id| c.desc(id).is_some_and(|t| t.is_contiguous() && (t.dtype() == F32) == (id != ids)));
    // In place, each warp has read a token's part before it writes it.
    let in_place = [(logits, p), (w, y), (sum, clamped.unwrap_or(sum))];
    let may_share = |a: TensorId, b: TensorId| c.disjoint(a, b) || (in_place.contains(&(a, b)) && c.same_bytes(a, b));
    let apart = (0..all.len()).all(|b| (0..b).all(|a| may_share(all[a], all[b])));
    let srcs = vec![Some(logits), Some(p), Some(ids), Some(w), Some(sum), clamped];
    let fused = FusedOp::Route { op: *op, used, bounds };
    (plain && shapes && typed && apart).then_some(FusionMatch { fused, dst: y, srcs })
}

/// Matches MUL of the experts' results `[n, used, tokens]` by their weights `[1, used, tokens]`, and the ADDs of all products of a
/// token, in order. Products and partial sums are elided.
pub(super) fn expert_sum(c: &Candidate<'_>) -> Option<FusionMatch> {
    let (x, w, product, dst) = (c.src(0, 0)?, c.src(0, 1)?, c.nodes[0].dst, c.nodes.last()?.dst);
    let [n, used, tokens, 1] = c.desc(x)?.ne() else { return None };
    let shapes = used == c.nodes.len()
        && c.desc(product)?.ne() == [n, used, tokens, 1]
        && c.desc(w)?.ne() == [1, used, tokens, 1]
        && c.desc(dst)?.ne() == [n, tokens, 1, 1];
    let contiguous =
        [x, w, product, dst].into_iter().all(|id| c.desc(id).is_some_and(|t| t.is_contiguous() && t.dtype() == F32));
    let all = c.graph.tensor(product)?;
    let only = all.use_count == u32::try_from(used).ok()
        && c.lifetimes.readers.get(product.index()).copied() == u32::try_from(used).ok()
        && c.has_own_memory(0);
    // The products of an expert: a view with one reader.
    let is_part = |id: TensorId, expert: usize| {
        let Some(view) = c.graph.tensor(id) else { return false };
        let place = all.place.map(|place| SlotOffset { offset: place.offset + expert * all.desc.nb()[1], ..place });
        view.view_of == Some(product)
            && view.place == place
            && view.desc.dtype() == F32
            && view.desc.ne() == [n, tokens, 1, 1]
            && view.desc.nb()[0] == all.desc.nb()[0]
            && (tokens == 1 || view.desc.nb()[1] == all.desc.nb()[2])
            && view.use_count == Some(1)
    };
    let parts = (1..used).all(|k| {
        let (Some(a), Some(b)) = (c.src(k, 0), c.src(k, 1)) else { return false };
        let first = if k == 1 { is_part(a, 0) } else { a == c.nodes[k - 1].dst && c.is_elidable(k - 1, a) };
        first && is_part(b, k) && c.is_f32_rows(c.nodes[k].dst)
    });
    let apart = c.disjoint(dst, x) && c.disjoint(dst, w);
    let fits = shapes && contiguous && only && parts && apart;
    fits.then(|| FusionMatch { fused: FusedOp::ExpertSum, dst, srcs: vec![Some(x), Some(w)] })
}

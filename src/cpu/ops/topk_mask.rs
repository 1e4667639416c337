//! TOP_K_MASK: each row is filled with -inf; then the kept cells are copied from the mask.

use super::{CHUNK, Kernel, bounded, rows_per_chunk, unsupported_types};
use crate::cpu::memory::View;
use crate::cpu::pool::KernelContext;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::topk_mask::TopkMask;
use crate::tensor::DType::{F16, F32};

/// Most kept cells of a row, which are copied one by one.
const MAX_KEPT: usize = 1 << 22;

/// Indices that are read at a time.
const INDEX_BATCH: usize = 256;

pub(super) fn select(node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let score = node.srcs.get(TopkMask::SCORE);
    if !matches!(node.dst.dtype(), F16 | F32) || score.is_some_and(|score| score.dtype() != F32) {
        return Err(unsupported_types(node));
    }
    let length = |i, dimension: usize| node.srcs.get(i).map(|t| t.ne()[dimension]);
    let cells = length(TopkMask::TOP_K, 0).unwrap_or(0).saturating_mul(length(TopkMask::BLOCKS, 0).unwrap_or(1));
    let kept = cells.saturating_add(length(TopkMask::EXTRA, 0).unwrap_or(0));
    bounded(node.op.code(), "kept cells of a row", kept, MAX_KEPT)?;
    // A kept cell costs as much as several elements that are filled.
    let kept = kept.saturating_mul(8);
    let cost = node.dst.elements().saturating_add(kept.saturating_mul(node.dst.rows()));
    Ok(Kernel::new(cost, topk_mask).with_parts(node.dst.rows()))
}

fn topk_mask(ctx: &mut KernelContext<'_>) {
    let (dst, mask, top_k) = (ctx.dst(), ctx.src(TopkMask::MASK), ctx.src(TopkMask::TOP_K));
    let [score, blocks, extra] =
        [TopkMask::SCORE, TopkMask::BLOCKS, TopkMask::EXTRA].map(|source| ctx.optional_src(source));
    let (n_kv, m) = (dst.ne()[0], mask.ne());
    if dst.desc().is_empty() {
        return;
    }
    let picks = blocks.map(|blocks| blocks.ne()[1]).or_else(|| score.map(|score| score.ne()[0])).unwrap_or(n_kv);
    let nothing = [f32::NEG_INFINITY; CHUNK];
    for rows in ctx.chunks(dst.desc().rows(), rows_per_chunk(dst.desc(), CHUNK)) {
        for r in rows {
            let row = dst.desc().row_index(r);
            let at = |i0| [i0, row[0], row[1], row[2]];
            for start in (0..n_kv).step_by(CHUNK) {
                dst.store(at(start), &nothing[..CHUNK.min(n_kv - start)]);
            }
            let keep = |cell: i64| {
                if let Some(cell) = below(cell, n_kv) {
                    dst.copy(at(cell), &mask, [cell, row[0] % m[1], row[1] % m[2], row[2] % m[3]], 1);
                }
            };
            for_each_index(&top_k, row, |pick| {
                let Some(pick) = below(pick, picks) else { return };
                let counts = score.is_none_or(|score| {
                    let mut value = [0.0];
                    score.load(at(pick), &mut value);
                    value[0] > f32::NEG_INFINITY
                });
                match &blocks {
                    _ if !counts => {}
                    Some(blocks) => for_each_index(blocks, [pick, 0, 0], keep),
                    None => keep(pick as i64),
                }
            });
            if let Some(extra) = &extra {
                for_each_index(extra, row, keep);
            }
        }
    }
}

/// The index, if it is one of `0..count`.
fn below(index: i64, count: usize) -> Option<usize> {
    usize::try_from(index).ok().filter(|&index| index < count)
}

/// Calls `each` with the indices of a row.
fn for_each_index(t: &View<'_>, [i1, i2, i3]: [usize; 3], mut each: impl FnMut(i64)) {
    let (n, mut found) = (t.ne()[0], [0; INDEX_BATCH]);
    for start in (0..n).step_by(INDEX_BATCH) {
        let found = &mut found[..INDEX_BATCH.min(n - start)];
        t.indices([start, i1, i2, i3], found);
        found.iter().for_each(|&index| each(index));
    }
}

//! DIAG, DIAG_MASK_INF, DIAG_MASK_ZERO, TRI: a range of each row is copied, the rest is filled.

use super::{CHUNK, Kernel, RowPieces, unsupported_types};
use crate::cpu::pool::KernelContext;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::diag::{Diag, Triangle};
use std::ops::Range;

pub(super) fn select(op: Diag, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    if !node.dst.dtype().is_float() {
        return Err(unsupported_types(node));
    }
    Ok(Kernel::new(node.dst.elements(), move |w| diag(w, op)))
}

/// The elements of row `i1` that dst takes from the source.
fn kept(op: Diag, i1: usize, n: usize) -> Range<usize> {
    let behind = n.min(i1.saturating_add(1));
    match op {
        Diag::Diag => i1..behind,
        Diag::MaskInf { n_past } | Diag::MaskZero { n_past } => 0..n.min(behind.saturating_add(n_past as usize)),
        Diag::Tri(Triangle::UpperWithDiagonal) => i1..n,
        Diag::Tri(Triangle::Upper) => behind..n,
        Diag::Tri(Triangle::LowerWithDiagonal) => 0..behind,
        Diag::Tri(Triangle::Lower) => 0..i1,
    }
}

fn diag(ctx: &mut KernelContext<'_>, op: Diag) {
    let (dst, src) = (ctx.dst(), ctx.src(0));
    let row = dst.ne()[0];
    let in_place = dst.starts_with(&src);
    let filler = [if let Diag::MaskInf { .. } = op { f32::NEG_INFINITY } else { 0.0 }; CHUNK];
    RowPieces::new(dst.desc()).share(ctx, |i, n| {
        let (kept, at) = (kept(op, i[1], row), |i0| [i0, i[1], i[2], i[3]]);
        let (end, first) = (i[0] + n, kept.start.clamp(i[0], i[0] + n));
        let last = kept.end.clamp(first, end);
        dst.store(at(i[0]), &filler[..first - i[0]]);
        if !in_place {
            let from = if op == Diag::Diag { 0 } else { i[1] };
            dst.copy(at(first), &src, [first, from, i[2], i[3]], last - first);
        }
        dst.store(at(last), &filler[..end - last]);
    });
}

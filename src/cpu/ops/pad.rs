//! PAD, PAD_REFLECT_1D, ROLL: runs along dimension 0 are copied from shifted indices.

use super::{CHUNK, Kernel, RowPieces, unsupported_types};
use crate::cpu::pool::KernelContext;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::pad::Pad;
use crate::tensor::DIMS;

pub(super) fn select(op: Pad, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let dtype = node.dst.dtype();
    // A rotation only copies bytes.
    let runs = if let Pad::Roll { .. } = op { !dtype.is_block() } else { dtype.is_float() };
    if !runs {
        return Err(unsupported_types(node));
    }
    let cost = node.dst.elements();
    Ok(match op {
        Pad::Pad { before, circular: false, .. } => Kernel::new(cost, move |w| pad(w, before)),
        Pad::Pad { before, circular: true, .. } => Kernel::new(cost.saturating_mul(2), move |w| rotate(w, before)),
        Pad::Roll { shifts } => Kernel::new(cost, move |w| rotate(w, shifts)),
        Pad::Reflect { before, .. } => Kernel::new(cost, move |w| reflect(w, before as usize)).with_local(CHUNK),
    })
}

fn pad(ctx: &mut KernelContext<'_>, before: [i32; DIMS]) {
    let (dst, src) = (ctx.dst(), ctx.src(0));
    let zeros = [0.0; CHUNK];
    let ne = src.ne();
    RowPieces::new(dst.desc()).share(ctx, |i, n| {
        // The index in the source; `None` outside.
        let index = |d: usize| {
            let j = i64::try_from(i[d]).ok()?.checked_sub(i64::from(before[d]))?;
            usize::try_from(j).ok().filter(|&j| j < ne[d])
        };
        let (Some(j1), Some(j2), Some(j3)) = (index(1), index(2), index(3)) else { return dst.store(i, &zeros[..n]) };
        // The first element of the piece in the source, which may lie in front of it.
        let start = i[0] as i64 - i64::from(before[0]);
        let first = (-start).clamp(0, n as i64) as usize;
        let last = (ne[0] as i64 - start).clamp(first as i64, n as i64) as usize;
        let at = |k: usize| [i[0] + k, i[1], i[2], i[3]];
        dst.store(i, &zeros[..first]);
        if first < last {
            dst.copy(at(first), &src, [(start + first as i64) as usize, j1, j2, j3], last - first);
        }
        dst.store(at(last), &zeros[..n - last]);
    });
}

fn rotate(ctx: &mut KernelContext<'_>, shifts: [i32; DIMS]) {
    let (dst, src) = (ctx.dst(), ctx.src(0));
    let ne = src.ne();
    RowPieces::new(dst.desc()).share(ctx, |i, n| {
        let wrap = |d: usize, i: usize| (i as i64 - i64::from(shifts[d])).rem_euclid(ne[d] as i64) as usize;
        let (j1, j2, j3) = (wrap(1, i[1]), wrap(2, i[2]), wrap(3, i[3]));
        let (mut done, mut j0) = (0, wrap(0, i[0]));
        while done < n {
            let run = (n - done).min(ne[0] - j0);
            dst.copy([i[0] + done, i[1], i[2], i[3]], &src, [j0, j1, j2, j3], run);
            (done, j0) = (done + run, 0);
        }
    });
}

fn reflect(ctx: &mut KernelContext<'_>, before: usize) {
    let (dst, src, buffer) = (ctx.dst(), ctx.src(0), ctx.take_local_scratch());
    let row = src.ne()[0];
    RowPieces::new(dst.desc()).share(ctx, |i, n| {
        let at = |i0| [i0, i[1], i[2], i[3]];
        let end = i[0] + n;
        let (first, last) = (before.clamp(i[0], end), (before + row).clamp(i[0], end));
        // In front of the row, element k of dst is element `before - k` of the source.
        let values = &mut buffer[..first - i[0]];
        src.load(at((before + 1).saturating_sub(first)), values);
        values.reverse();
        dst.store(at(i[0]), values);
        dst.copy(at(first), &src, at(first.saturating_sub(before)), last - first);
        // After it, element `2 (row - 1) + before - k`.
        let values = &mut buffer[..end - last];
        src.load(at((2 * row + before).saturating_sub(1 + end)), values);
        values.reverse();
        dst.store(at(last), values);
    });
}

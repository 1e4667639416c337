//! SET and ACC: a copy of a, unless dst lies on it, then b into the region.

use super::{CHUNK, Kernel, RowPieces, math, unsupported_types};
use crate::cpu::pool::KernelContext;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::assign::Assign;
use crate::tensor::DType::F32;
use crate::tensor::TensorDesc;

pub(super) fn select(op: Assign, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let (Some(b), dtype) = (node.srcs.get(1), node.dst.dtype()) else { return Err(unsupported_types(node)) };
    if dtype.is_block() || (op.accumulate && dtype != F32) {
        return Err(unsupported_types(node));
    }
    let region = op.region(b).ok_or_else(|| unsupported_types(node))?;
    let offset = usize::try_from(op.offset).map_err(|_| unsupported_types(node))?;
    let cost = node.dst.elements().saturating_add(b.elements());
    let kernel = Kernel::new(cost, move |w| assign(w, op.accumulate, offset, &region));
    Ok(kernel.with_local(3 * CHUNK).with_syncs(1))
}

fn assign(ctx: &mut KernelContext<'_>, accumulate: bool, offset: usize, region: &TensorDesc) {
    let (dst, a, b) = (ctx.dst(), ctx.src(0), ctx.src(1));
    if !dst.starts_with(&a) {
        RowPieces::new(dst.desc()).share(ctx, |i, n| dst.copy(i, &a, i, n));
    }
    ctx.sync();
    if b.desc().is_empty() {
        return;
    }
    let to = dst.part(offset, region);
    let [x, y, sum, ..] = ctx.take_local_scratch().as_chunks_mut::<CHUNK>().0 else { return };
    RowPieces::new(region).share(ctx, |i, n| {
        if accumulate {
            to.load(i, &mut x[..n]);
            math::add(&mut sum[..n], &x[..n], b.fetch(i, &mut y[..n]));
            to.store(i, &sum[..n]);
        } else {
            to.copy(i, &b, i, n);
        }
    });
}

//! MUL_MAT and MUL_MAT_ID.

mod columns;
mod exact;
mod fast;

use super::{Kernel, Path, takes_strips, types, unsupported};
use crate::cpu::pool::Work;
use crate::cpu::simd::Kernels;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::mul_mat::MulMat;
use crate::tensor::DType;
use crate::tensor::quant::dequantiser;
use columns::Columns;

pub(super) fn select(op: MulMat, node: &NodeView<'_>, path: Path) -> Result<Kernel, Unsupported> {
    let (Some(a), Some(b)) = (node.srcs.get(0), node.srcs.get(1)) else { return Err(types(node)) };
    let rounded = a.dtype().is_float() && b.dtype().is_float();
    if dequantiser(a.dtype()).is_none() || !(b.dtype() == DType::F32 || rounded) {
        return Err(types(node));
    }
    // One element of a meets each column in about a quarter of the time that an element-wise op takes for its own.
    let cost = node.dst.elements().saturating_mul(a.ne()[0]) / 4;
    let routing = match (op.by_id, node.srcs.get(2)) {
        (false, _) => 0,
        (true, Some(ids)) => columns::routing_words(a, ids),
        (true, None) => return Err(unsupported(node.op.code(), "no ids")),
    };
    let vector = match path {
        Path::Exact => None,
        Path::Fast => Kernels::of(a.dtype()),
    };
    let Some(kernels) = vector else {
        let kernel = Kernel::new(cost, move |work| {
            let (scratch, words) = work.take_local().split_at_mut(exact::SCRATCH);
            if let Some(columns) = groups(op, work, bytemuck::cast_slice_mut(words)) {
                exact::run(work, &columns, scratch);
            }
        });
        return Ok(kernel.with_local(exact::SCRATCH + routing));
    };
    // Rows of b that one matrix of a meets, at most.
    let columns = if op.by_id { b.rows() } else { b.rows() / (a.ne()[2] * a.ne()[3]).max(1) };
    let plan = fast::Plan::new(kernels, a, b, columns);
    let kernel = Kernel::new(cost, move |work| {
        let (scratch, words) = work.take_local().split_at_mut(plan.local());
        plan.run(work, scratch, || groups(op, work, bytemuck::cast_slice_mut(words)));
    });
    let kernel = kernel.with_local(plan.local().saturating_add(routing)).with_syncs(plan.syncs());
    let kernel = kernel.with_shared(plan.shared());
    let kernel = if plan.shared() > 0 { kernel.with_columns(kernels.packing()) } else { kernel };
    Ok(if takes_strips(a, path) { kernel.wants_strips() } else { kernel })
}

/// The node's groups; `None` when it has failed.
fn groups<'a>(op: MulMat, work: &Work<'_>, words: &'a mut [u32]) -> Option<Columns<'a>> {
    if op.by_id { Columns::routed(work, words) } else { Some(Columns::planes(work.src(0).desc(), work.src(1).desc())) }
}

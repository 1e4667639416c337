//! MUL_MAT and MUL_MAT_ID (GEMM): `fast` uses SIMD micro-kernels, `exact` is the f64 reference, `rhs_groups` assigns columns
//! of b to matrices of a.

mod exact;
mod fast;
mod rhs_groups;

use super::{Kernel, MathMode, bounded, empty_sum, packs_into_panels, unsupported, unsupported_types};
use crate::cpu::pool::KernelContext;
use crate::cpu::simd::GemmKernels;
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::mul_mat::MulMat;
use crate::tensor::DType;
use crate::tensor::quant::dequantiser;
use rhs_groups::RhsGroups;

/// Most ids of a MUL_MAT_ID: they are sorted at once, in each turn of the device that the node takes. 32,768 tokens with eight
/// experts.
const MAX_IDS: usize = 1 << 18;

/// Most elements of a row. A unit has dozens of rows, which it may have to convert. No context of a model has more positions, over
/// which attention sums its values.
const MAX_ROW: usize = 1 << 21;

/// Cost of sorting one id.
const ID_COST: usize = 32;

pub(super) fn select(op: MulMat, node: &NodeView<'_>, math_mode: MathMode) -> Result<Kernel, Unsupported> {
    let (Some(a), Some(b)) = (node.srcs.get(0), node.srcs.get(1)) else { return Err(unsupported_types(node)) };
    let both_float = a.dtype().is_float() && b.dtype().is_float();
    if dequantiser(a.dtype()).is_none() || !(b.dtype() == DType::F32 || both_float || b.dtype() == a.dtype().partner())
    {
        return Err(unsupported_types(node));
    }
    if a.is_empty() {
        return Ok(empty_sum(node));
    }
    bounded(node.op.code(), "elements of a row", a.ne()[0], MAX_ROW)?;
    // Cost: one element of a takes a quarter of the time of an element-wise op per column.
    let mut cost = node.dst.elements().saturating_mul(a.ne()[0]) / 4;
    let routing_words = match (op.by_id, node.srcs.get(2)) {
        (false, _) => 0,
        (true, Some(ids)) if ids.elements() > MAX_IDS => {
            let reason = format!("{} expert ids, {MAX_IDS} at most", ids.elements());
            return Err(unsupported(node.op.code(), reason));
        }
        (true, Some(ids)) => {
            cost = cost.saturating_add(ids.elements() * ID_COST);
            rhs_groups::routing_words(a, ids)
        }
        (true, None) => return Err(unsupported(node.op.code(), "the source of expert ids is missing")),
    };
    let kernels = match math_mode {
        MathMode::Exact => None,
        MathMode::Fast => GemmKernels::of(a.dtype()),
    };
    let Some(kernels) = kernels else {
        let kernel = Kernel::new(cost, move |ctx| {
            let (scratch, words) = ctx.take_local_scratch().split_at_mut(exact::SCRATCH);
            if let Some(groups) = groups(op, ctx, bytemuck::cast_slice_mut(words)) {
                exact::run(ctx, &groups, scratch);
            }
        });
        return Ok(kernel.with_local(exact::SCRATCH + routing_words));
    };
    // Most columns of one matrix of a.
    let columns = if op.by_id { b.rows() } else { b.rows() / (a.ne()[2] * a.ne()[3]).max(1) };
    let plan = fast::GemmPlan::new(kernels, a, b, columns);
    let kernel = Kernel::new(cost, move |ctx| {
        let (scratch, words) = ctx.take_local_scratch().split_at_mut(plan.local());
        plan.run(ctx, scratch, || groups(op, ctx, bytemuck::cast_slice_mut(words)));
    });
    let kernel = kernel.with_local(plan.local().saturating_add(routing_words)).with_syncs(plan.syncs());
    let kernel = kernel.with_shared(plan.shared());
    let kernel = if plan.shared() > 0 { kernel.with_packed_rhs(kernels.packing()) } else { kernel };
    Ok(if packs_into_panels(a, math_mode) { kernel.prefers_panels() } else { kernel })
}

/// The groups of the node; `None` if the run has failed because of invalid ids.
fn groups<'a>(op: MulMat, ctx: &KernelContext<'_>, words: &'a mut [u32]) -> Option<RhsGroups<'a>> {
    if !op.by_id {
        return Some(RhsGroups::planes(ctx.src(0).desc(), ctx.src(1).desc()));
    }
    RhsGroups::routed(ctx, words)
}

//! CPU kernels of fused nodes (epilogue fusion): see [`crate::graph::fuse`] for the patterns.

use super::ops::{Kernel, norm, rope};
use crate::graph::fuse::FusedOp;
use crate::ops::NodeView;
use crate::tensor::DType::F32;
use crate::tensor::quant::quantiser;

/// The kernel of a fused step; `None` if the CPU has none for these types and row lengths.
pub(super) fn kernel(fused: &FusedOp, view: &NodeView<'_>) -> Option<Kernel> {
    let x = view.srcs.get(0)?;
    match *fused {
        FusedOp::Norm { op, fusion } => (x.ne()[0] <= norm::MAX_BUFFERED_ROW).then(|| norm::kernel(op, x, fusion)),
        FusedOp::RopeSetRows { op, row } => {
            let types = x.dtype() == F32 && quantiser(view.dst.dtype()).is_some();
            (types && row <= norm::MAX_BUFFERED_ROW).then(|| rope::kernel_with_set_rows(op, x.elements(), row))
        }
        // What is left of a launch's cost on a CPU is a barrier.
        FusedOp::RopeCache { .. } | FusedOp::Route { .. } | FusedOp::ExpertSum => None,
        // Products of the same columns share their packed columns (`packed_rhs_reuse`).
        FusedOp::Products { .. } | FusedOp::GatedProduct(_) => None,
    }
}

#[cfg(test)]
mod tests;

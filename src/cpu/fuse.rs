//! The CPU's kernels for neighbouring nodes that run as one: see [`crate::graph::fuse`].

use super::ops::{Kernel, norm, rope};
use crate::graph::fuse::FusedOp;
use crate::ops::NodeView;
use crate::tensor::DType::F32;
use crate::tensor::quant::quantiser;

/// The kernel for a fused step, where there is one.
pub(super) fn kernel(fused: &FusedOp, view: &NodeView<'_>) -> Option<Kernel> {
    let x = view.srcs.get(0)?;
    match *fused {
        FusedOp::Norm { op, fusion: around } => (x.ne()[0] <= norm::KEPT).then(|| norm::kernel(op, x, around)),
        FusedOp::RopeSetRows { op, row } => {
            let types = x.dtype() == F32 && quantiser(view.dst.dtype()).is_some();
            (types && row <= norm::KEPT).then(|| rope::onto_rows(op, x.elements(), row))
        }
    }
}

#[cfg(test)]
mod tests;

//! Convolutions: `gemm` computes them and their transposes as products of kernels and patches, `depthwise` convolutions whose
//! channels have kernels of their own. `image` describes how images lie in tensors, also for IM2COL.

mod depthwise;
mod gemm;
pub(super) mod image;

use super::{Kernel, MathMode, bounded, empty_sum, unsupported_types};
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::conv::Conv;
use crate::tensor::DType::{F16, F32};

/// Most elements of a kernel for one output.
const MAX_TAPS: usize = 1 << 18;

pub(super) fn select(op: Conv, node: &NodeView<'_>, math_mode: MathMode) -> Result<Kernel, Unsupported> {
    let (Some(kernel), Some(image)) = (node.srcs.get(Conv::KERNEL), node.srcs.get(Conv::IMAGE)) else {
        return Err(unsupported_types(node));
    };
    if !matches!(kernel.dtype(), F16 | F32) || image.dtype() != F32 || node.dst.dtype() != F32 {
        return Err(unsupported_types(node));
    }
    if node.dst.is_empty() {
        return Ok(Kernel::new(0, |_| ()));
    }
    if kernel.is_empty() || image.is_empty() {
        return Ok(empty_sum(node));
    }
    let [kw, kh, k2, k3] = kernel.ne();
    let depth = match op {
        Conv::Conv2d { .. } => k2,
        Conv::Conv3d { channels, .. } => k2.saturating_mul(channels as usize),
        Conv::Conv2dDw { .. } => 1,
        Conv::Transpose1d { .. } => k2.div_ceil(kh.max(1)),
        Conv::Transpose2d { .. } => k3,
    };
    bounded(node.op.code(), "taps for an output", kw.saturating_mul(kh).saturating_mul(depth), MAX_TAPS)?;
    Ok(match op {
        Conv::Conv2dDw { axes } => depthwise::kernel(axes, kernel, image, node.dst),
        _ => gemm::kernel(op, kernel, image, node.dst, math_mode),
    })
}

//! Convolutions: `gemm` computes them and their transposes as products of kernels and patches, `depthwise` those whose
//! channels have kernels of their own. `image` describes how images lie in tensors, also for IM2COL.

mod depthwise;
mod gemm;
pub(super) mod image;

use super::{Kernel, MathMode, unsupported_types};
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::conv::Conv;
use crate::tensor::DType::{F16, F32};

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
    Ok(match op {
        Conv::Conv2dDw { axes } => depthwise::kernel(axes, kernel, image, node.dst),
        _ => gemm::kernel(op, kernel, image, node.dst, math_mode),
    })
}

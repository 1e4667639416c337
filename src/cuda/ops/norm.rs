//! kernels/norm.cu.

use super::{Kernel, On, Unsupported};
use crate::ops::norm::Norm;

pub(super) fn select(_op: Norm, on: &On<'_>) -> Result<Kernel, Unsupported> {
    Err(on.types())
}

/// The kernel for a norm with its neighbours: see [`crate::graph::fuse::Fused::Norm`] for the operands.
pub(super) fn fused(_op: Norm, _add: bool, _mul: bool, _on: &On<'_>) -> Option<Kernel> {
    None
}

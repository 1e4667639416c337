//! kernels/rope.cu.

use super::{Kernel, On, Unsupported};
use crate::ops::rope::Rope;

pub(super) fn select(_op: Rope, on: &On<'_>) -> Result<Kernel, Unsupported> {
    Err(on.types())
}

/// The kernel for ROPE into rows of a cache: see [`crate::graph::fuse::Fused::RopeSetRows`] for the operands.
pub(super) fn fused(_op: Rope, _row: usize, _on: &On<'_>) -> Option<Kernel> {
    None
}

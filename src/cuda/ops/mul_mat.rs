//! kernels/mul_mat.cu.

use super::{Kernel, On, Unsupported};
use crate::ops::mul_mat::MulMat;

pub(super) fn select(_op: MulMat, on: &On<'_>) -> Result<Kernel, Unsupported> {
    Err(on.types())
}

//! kernels/softmax.cu.

use super::{Kernel, On, Unsupported};
use crate::ops::softmax::SoftMax;

pub(super) fn select(_op: SoftMax, on: &On<'_>) -> Result<Kernel, Unsupported> {
    Err(on.types())
}

//! kernels/reduce.cu.

use super::{Kernel, On, Unsupported};
use crate::ops::reduce::Reduce;

pub(super) fn select(_op: Reduce, on: &On<'_>) -> Result<Kernel, Unsupported> {
    Err(on.types())
}

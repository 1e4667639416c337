//! kernels/sort.cu.

use super::{Kernel, On, Unsupported};
use crate::ops::sort::Sort;

pub(super) fn select(_op: Sort, on: &On<'_>) -> Result<Kernel, Unsupported> {
    Err(on.types())
}

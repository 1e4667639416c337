//! kernels/concat.cu.

use super::{Kernel, On, Unsupported};
use crate::ops::concat::Concat;

pub(super) fn select(_op: Concat, on: &On<'_>) -> Result<Kernel, Unsupported> {
    Err(on.types())
}

//! kernels/rows.cu.

use super::{Kernel, On, Unsupported};
use crate::ops::rows::Rows;

pub(super) fn select(_op: Rows, on: &On<'_>) -> Result<Kernel, Unsupported> {
    Err(on.types())
}

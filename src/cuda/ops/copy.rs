//! kernels/copy.cu.

use super::{Kernel, On, Unsupported};
use crate::ops::copy::Copy;

pub(super) fn select(_op: Copy, on: &On<'_>) -> Result<Kernel, Unsupported> {
    Err(on.types())
}

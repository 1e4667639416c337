//! kernels/binary.cu.

use super::{Kernel, On, Unsupported};
use crate::ops::binary::Binary;

pub(super) fn select(_op: Binary, on: &On<'_>) -> Result<Kernel, Unsupported> {
    Err(on.types())
}

//! kernels/glu.cu.

use super::{Kernel, On, Unsupported};
use crate::ops::glu::Glu;

pub(super) fn select(_op: Glu, on: &On<'_>) -> Result<Kernel, Unsupported> {
    Err(on.types())
}

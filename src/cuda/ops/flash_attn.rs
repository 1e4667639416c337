//! kernels/flash_attn.cu.

use super::{Kernel, On, Unsupported};
use crate::ops::flash_attn::FlashAttn;

pub(super) fn select(_op: FlashAttn, on: &On<'_>) -> Result<Kernel, Unsupported> {
    Err(on.types())
}

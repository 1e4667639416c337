//! Expansions of rows to 8-bit codes for NEON, by [`crate::tensor::quant::expand`].

use crate::tensor::quant::expand::{Expand, Expanded, expand_superblock};

/// Expands 256 elements of `B`.
///
/// # Safety
/// Always safe to call; unsafe as the expansions of other architectures are.
#[inline(always)]
pub(super) unsafe fn expand<B: Expand<N>, const N: usize>(bytes: &[u8], out: &mut Expanded) {
    expand_superblock::<B, N>(bytes, out);
}

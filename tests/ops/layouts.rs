//! Memory layouts of tensors in tests.

use fanout::tensor::{DType, TensorDesc};

/// Number of kinds of [`layout`].
pub const LAYOUTS: usize = 4;

/// A layout of a type without blocks: of kind 0 contiguous, 1 with gaps after rows and planes, 2 with dimension 2 fastest
/// (channels first), 3 with dimensions 0 and 1 exchanged.
pub fn layout(dtype: DType, ne: [usize; 4], kind: usize) -> TensorDesc {
    let size = dtype.block_bytes();
    let order = match kind {
        2 => [2, 0, 1, 3],
        3 => [1, 0, 2, 3],
        _ => [0, 1, 2, 3],
    };
    let (mut nb, mut next) = ([0; 4], size);
    for d in order {
        nb[d] = next;
        next *= ne[d];
        if kind == 1 {
            next += size * (1 + d);
        }
    }
    TensorDesc::strided(dtype, ne, nb).unwrap()
}

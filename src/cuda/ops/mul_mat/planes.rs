//! The planes of a product: matrices of a and b that are multiplied with each other, and their strides.

use super::super::{NodeOnGpu, Shape, Unsupported};
use crate::tensor::TensorDesc;

/// Stride of a dimension in bytes; 0 if the dimension has one element, whose stride is arbitrary. The kernel derives the
/// alignment of rows from the strides.
pub(super) fn stride(shape: &Shape, dim: usize) -> u64 {
    if shape.ne[dim] == 1 { 0 } else { shape.nb[dim] }
}

/// Columns and planes of b. `shared` consecutive planes use the same plane of a (grouped queries).
pub(in super::super) struct Planes {
    pub(in super::super) n: u32,
    pub(super) counts: [u32; 2],
    pub(super) shared: [u32; 2],
    /// Strides in bytes of columns, planes of dimension 2, and planes of dimension 3.
    pub(super) b: [u64; 3],
    pub(super) dst: [u64; 3],
}

impl Planes {
    /// Planes of `b`, once it is in scratch memory: converted columns are contiguous.
    pub(in super::super) fn of_scratch(
        a: &TensorDesc,
        b: &TensorDesc,
        on: &NodeOnGpu<'_>,
    ) -> Result<Planes, Unsupported> {
        Planes::of(a, &super::scratch_shape(&on.shape(b)?, 16), on)
    }

    /// Planes of columns `b`, folded as far as possible.
    pub(super) fn of(a: &TensorDesc, b: &Shape, on: &NodeOnGpu<'_>) -> Result<Planes, Unsupported> {
        let (dst, [_, _, a2, a3]) = (on.shape(on.dst())?, on.shape(a)?.ne);
        let [_, n, b2, b3] = b.ne;
        let mut planes = Planes {
            n,
            counts: [b2, b3],
            shared: [b2 / a2, b3 / a3],
            b: [1, 2, 3].map(|dim| stride(b, dim)),
            dst: [1, 2, 3].map(|dim| stride(&dst, dim)),
        };
        planes.fold(0);
        if planes.counts[0] == 1 {
            planes.fold(1);
        }
        Ok(planes)
    }

    /// Number of planes.
    pub(super) fn count(&self, on: &NodeOnGpu<'_>) -> Result<u32, Unsupported> {
        let [b2, b3] = self.counts;
        b2.checked_mul(b3).ok_or_else(|| on.unsupported("2^32 or more planes"))
    }

    /// Folds the planes that share a plane of a into more columns of one plane, if their strides are even. a is then read once
    /// for more columns.
    fn fold(&mut self, dim: usize) {
        let shared = self.shared[dim];
        let even = |nb: &[u64; 3]| nb[dim + 1] == u64::from(self.n) * nb[0];
        let folded = self.n.checked_mul(shared).filter(|&n| i32::try_from(n).is_ok());
        let (Some(n), true) = (folded, self.n == 1 || (even(&self.b) && even(&self.dst))) else { return };
        for nb in [&mut self.b, &mut self.dst] {
            if self.n == 1 {
                nb[0] = nb[dim + 1];
            }
            nb[dim + 1] *= u64::from(shared);
        }
        self.counts[dim] /= shared;
        self.shared[dim] = 1;
        self.n = n;
    }
}

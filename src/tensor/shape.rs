//! Shapes as callers write them.

use super::DIMS;

/// Element counts of a tensor, fastest dimension first: from an array of at most four numbers. Those that are left out are 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape([usize; DIMS]);

impl Shape {
    /// The counts of all four dimensions.
    pub fn ne(self) -> [usize; DIMS] {
        self.0
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(counts: [usize; N]) -> Shape {
        const { assert!(N <= DIMS, "a tensor has at most four dimensions") };
        let mut ne = [1; DIMS];
        ne[..N].copy_from_slice(&counts);
        Shape(ne)
    }
}

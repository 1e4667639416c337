//! Shapes as callers write them.

use super::DIMS;

/// Element counts of a tensor, fastest dimension first: from an array of one to four numbers. Those that are left out are 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape([usize; DIMS]);

impl Shape {
    /// The counts of all four dimensions.
    pub fn ne(self) -> [usize; DIMS] {
        self.0
    }
}

macro_rules! from_arrays {
    ($($n:literal)*) => {$(
        impl From<[usize; $n]> for Shape {
            fn from(counts: [usize; $n]) -> Shape {
                let mut ne = [1; DIMS];
                ne[..$n].copy_from_slice(&counts);
                Shape(ne)
            }
        }
    )*};
}

from_arrays!(1 2 3 4);

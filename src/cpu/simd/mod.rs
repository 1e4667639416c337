//! Hot inner loops in the widest instructions that the processor has, chosen at run time.

pub(crate) mod vec;

//! What fanout's benchmarks share: the cases that they time, with their inputs.

pub mod cases;

//! Tests of the passes together.

mod golden;
pub(super) mod graphs;

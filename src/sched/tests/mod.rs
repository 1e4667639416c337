//! Tests of the passes together.

pub(super) mod graphs;

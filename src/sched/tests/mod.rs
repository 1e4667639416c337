//! Tests of the planning passes together: golden plans, and the test graphs that other tests of the scheduler share.

mod golden;
pub(super) mod graphs;

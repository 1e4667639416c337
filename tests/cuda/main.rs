//! Tests of the CUDA device on emulated GPUs (crates/cudaemu).
//!
//! `sweep` compares every variant of every kernel with the CPU; `counts` checks memory traffic by the emulator's counters;
//! `queue`, `pinned`, `abort` and `teardown` test the contract of queues, memory, aborts and dropped handles; `segments` tests
//! how programs are cut by time, `modules` their compilation, `packed` repacked weights, `fused_products` products in one launch, `launches` the launches of a layer, `hardware`
//! what a real GPU does and an ideal one does not, `driver_errors` calls that fail, `programmatic` programmatic dependent launch, `turns` how sessions take turns,
//! `sampling` samplers, `scratch` scratch memory of several sizes; `pipeline`, `sched` and `tensor_group` test several devices. Open `fixture` first.
//! `FANOUT_TEST_GPU=1 cargo test --test cuda sweep -- --nocapture` runs the sweep on a real GPU; the other tests need the
//! emulator's settings and counters.
#![allow(missing_docs, unreachable_pub, clippy::unwrap_used, clippy::panic)] // a failed unwrap fails the test

mod abort;
mod counts;
mod driver_errors;
mod fixture;
mod fused_products;
mod hardware;
mod launches;
mod modules;
mod packed;
mod pinned;
mod pipeline;
mod programmatic;
mod queue;
mod sampling;
mod sched;
mod scratch;
mod segments;
mod sweep;
mod teardown;
mod tensor_group;
mod turns;

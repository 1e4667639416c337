//! The CUDA device on emulated GPUs: every variant of every kernel against the CPU, and what only counters can show.
#![allow(missing_docs, unreachable_pub, clippy::unwrap_used, clippy::panic)] // a test says what it needs by failing

mod counts;
mod ends;
mod pinned;
mod pipeline;
mod queue;
mod rig;
mod sched;
mod sweep;

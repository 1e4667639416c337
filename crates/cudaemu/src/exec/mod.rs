//! The executor: runs warps, blocks and grids. Open `warp.rs` first.
//!
//! Worker threads share a grid's blocks (`grid`). A block runs its warps in turn until each of them waits at a barrier or has
//! exited (`block`). A warp executes an instruction for all its lanes at once (`warp`). Where lanes diverge, the group with the
//! deepest call and then the smallest program counter runs first, so that the groups reconverge (`divergence`).

mod barrier;
mod block;
mod builtins;
mod calls;
mod divergence;
mod grid;
mod launch;
mod warp;
mod worker;

#[cfg(test)]
mod tests;

pub use grid::run_grid;
pub use launch::{ExecutorConfig, Launch, LaunchOutcome, Profile};

use worker::Worker;

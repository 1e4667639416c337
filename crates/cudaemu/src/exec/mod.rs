//! The executor: warps, blocks, grids.
//!
//! A grid's blocks are spread over threads ([`grid`]); a block runs its warps in turn until each waits at a barrier or ends
//! ([`block`]); a warp executes an instruction for all its lanes at once, and where lanes part, the group with the
//! deepest call and then the smallest program counter goes first, so that they meet again ([`warp`]).

mod barrier;
mod block;
mod builtins;
mod calls;
mod divergence;
mod grid;
mod launch;
mod printf;
mod warp;
mod worker;

#[cfg(test)]
mod tests;

pub use grid::run_grid;
pub use launch::{ExecutorConfig, Launch, LaunchOutcome, PrintSink, Profile};

use worker::Worker;

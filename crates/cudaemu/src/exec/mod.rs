//! The machine: registers, warps, blocks, grids, and the checked way to each memory.
//!
//! A grid's blocks are spread over threads ([`grid`]); a block runs its warps in turn until each waits at a barrier or ends
//! ([`block`]); a warp executes an instruction for all its lanes at once, and where lanes part, the group with the
//! deepest call and then the smallest program counter goes first, so that they meet again ([`warp`]).

#[cfg(test)]
mod access_tests;
mod async_copy;
mod barrier;
mod block;
mod builtins;
mod calls;
mod counts;
mod cx;
mod global;
mod grid;
mod groups;
mod launch;
mod local;
mod printf;
mod registers;
#[cfg(test)]
pub(crate) mod rig;
mod shared;
mod warp;
mod worker;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod timing;

pub use async_copy::AsyncCopies;
pub use counts::{Counts, Traffic};
pub use cx::{Addresses, Console, Cx, Window};
pub use global::Global;
pub use grid::run;
pub use launch::{Launch, Machine, Outcome, Profile, Sink};
pub use local::Local;
pub use registers::{LANES, Lane, Lanes, Registers, each};
pub use shared::Shared;

use worker::Worker;

/// Where the windows of shared, local and param memory lie in the generic address space: above all host and device
/// addresses, and aligned so that the low 32 bits are the offset.
pub mod window {
    /// Shared memory of the block.
    pub const SHARED: u64 = 0x0001_0000_0000_0000;
    /// Local memory of the thread.
    pub const LOCAL: u64 = 0x0002_0000_0000_0000;
    /// The kernel's parameter block.
    pub const PARAM: u64 = 0x0004_0000_0000_0000;
    /// Bytes of each window.
    pub const BYTES: u64 = 1 << 32;
}

//! The library on devices of this process: the way into a graph, the device contract, the registry.
//!
//! One binary for subjects that need neither a process nor an allocator of their own: each binary links all of fanout.
#![allow(missing_docs, unreachable_pub, clippy::unwrap_used, clippy::panic)] // a test says what it needs by failing

mod device;
mod graph;
mod registry;

//! Fuzz test of graphs: no graph of a peer can crash a device, hang it, or write outside of its destinations. `fuzz_generator`
//! builds valid graphs of each op from a seed, `mutation` corrupts them, `mutated_graphs` validates and runs them, and
//! `kernel_arguments` runs single nodes on an emulated GPU, `fused_kernels` groups of nodes.
//! `crates/hostile-client` tests a server with streams of messages.
#![allow(clippy::panic)] // helper functions report a failed test by a panic

mod fused_kernels;
mod fuzz_generator;
mod kernel_arguments;
mod mutated_graphs;
mod mutation;

/// Reads a number from an environment variable, for longer runs by hand.
fn env_number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|e| panic!("{name}: {e}")))
}

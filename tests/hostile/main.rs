//! No graph of a peer can crash, hang or corrupt: seeded graphs of every op, valid and corrupted. `crates/hostile-client` does the
//! same with streams of messages.
#![allow(clippy::panic)] // how a helper says that a test has failed

mod kernels;
mod maker;
mod mutate;

/// A number from the environment, for longer runs by hand.
fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|e| panic!("{name}: {e}")))
}

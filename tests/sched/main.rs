//! The scheduler over devices of the tests' own.
#![allow(missing_docs, unreachable_pub, clippy::unwrap_used, clippy::panic)] // a test says what it needs by failing

mod devices;
mod experts;
#[path = "../common/gated.rs"]
mod gated;
#[path = "../common/island.rs"]
mod island;
mod islands;
mod lost;
mod mistakes;
mod order;
mod pipeline;
mod relayed;
mod servers;
#[path = "../common/sim.rs"]
mod sim;
#[path = "../common/slow.rs"]
mod slow;

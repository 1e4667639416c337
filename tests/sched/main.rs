//! The scheduler over devices of the tests' own.
#![allow(missing_docs, unreachable_pub, clippy::unwrap_used, clippy::panic)] // a test says what it needs by failing

mod devices;
mod experts;
mod islands;
mod lost;
mod mistakes;
mod order;
mod pipeline;
mod relayed;
mod servers;

//! Devices over the network, by ggml's RPC protocol.
//!
//! `wire` encodes messages without IO, `transport` moves bytes without knowing messages, and `connection` is what a client, a
//! server and the links between servers share on top of the two.

mod adaptive_spin;
#[cfg(feature = "client")]
pub mod client;
mod connection;
mod fault;
#[cfg(feature = "server")]
pub mod server;
#[cfg(all(feature = "server", feature = "client"))]
#[cfg(test)]
mod tests;
mod transport;
pub mod wire;

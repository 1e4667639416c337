//! Devices over the network, by ggml's RPC protocol.
//!
//! `wire` knows bytes and no sockets; whoever moves the bytes lives beside it.

#[cfg(feature = "client")]
pub mod client;
mod fault;
mod hunch;
#[cfg(feature = "server")]
pub mod server;
mod socket;
pub mod wire;

//! RPC: devices over the network, by ggml's RPC protocol and fanout's extensions of it.
//!
//! - `wire` encodes and decodes messages, without I/O. Start there to see what is sent.
//! - `transport` moves bytes and does not interpret them: TCP, deadlines, typed errors.
//! - `connection` is shared by clients, servers and peer connections (server to server): handshake, buffered writer, reply reader,
//!   heartbeat.
//! - `fault` converts errors of devices to and from their form on the wire.
//! - `client` presents the devices of a server as devices of this process; `server` offers the devices of this process to
//!   clients.
//! - `status` is the state of a server, as its operator sees it.
//! - `relay` lets clients without TLS use servers that demand keys.
//!
//! `docs/protocol.md` specifies the extensions.

#[cfg(feature = "client")]
pub mod client;
mod connection;
mod fault;
#[cfg(all(feature = "server", feature = "client"))]
#[cfg(test)]
mod histories;
pub mod keys;
#[cfg(all(feature = "server", feature = "client"))]
pub mod relay;
#[cfg(feature = "server")]
pub mod server;
#[cfg(any(feature = "server", feature = "client"))]
pub mod status;
#[cfg(all(feature = "server", feature = "client"))]
#[cfg(test)]
mod tests;
mod transport;
#[doc(hidden)] // the types of messages may change with any version of the protocol
pub mod wire;

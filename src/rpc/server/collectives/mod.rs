//! Collectives of protocol 8.0: two servers add tensors over a connection of their own, on the request of a client of both.
//!
//! ```text
//! rendezvous     COMM_INIT: rank 0 listens and rank 1 connects; deadlines and allow-list
//! address_claim  one client at a time per address, so that the servers of two clients are not mixed up
//! comm_link      the connection of one device to the other server, and what it was opened for
//! exchange       sends and receives at the same time, chunk by chunk, in one thread
//! reduction      COMM_ALLREDUCE: reads the tensor from its device, exchanges it, and adds what was received on the device
//! ```
//!
//! The protocol of the connection is llama.cpp's: 24 bytes of capabilities in each direction, and then the elements of each
//! tensor, without a header. There is no authentication, no session id and no version: the allow-list ([`PeerAllowlist`]) is
//! the only protection, and without a list nothing listens and nothing is dialled.
//!
//! Not here: the requests, which `ggml::collectives` serves. Start reading at `reduction.rs`.
//!
//! [`PeerAllowlist`]: super::peers::PeerAllowlist

mod address_claim;
mod comm_link;
mod exchange;
mod reduction;
mod rendezvous;

pub(super) use super::peers::COMM_PORT_OFFSET;
pub(super) use address_claim::AddressClaim;
pub(super) use comm_link::{CommLink, LinkRequest};
pub(super) use exchange::ExchangeError;
pub(super) use reduction::{MAX_HOST_BYTES, ReduceError, Reducer, ReductionTarget};
pub(super) use rendezvous::{Rendezvous, RendezvousError, RendezvousTimeouts, dial};

/// Rank of the server that listens.
pub(super) const LISTENING_RANK: u32 = 0;

/// Rank of the server that connects.
pub(super) const CONNECTING_RANK: u32 = 1;

/// How long a wait may run before it checks whether the client has hung up.
const WATCH_INTERVAL: std::time::Duration = std::time::Duration::from_millis(20);

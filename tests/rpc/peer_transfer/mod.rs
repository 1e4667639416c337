//! Copies from server to server: transfer tokens, their validity and limits, and the peer allow-list.
//!
//! `sending` tests the source server, `receiving` the destination server. `support` has the client requests and a fake peer.

mod receiving;
mod sending;
mod support;

pub(crate) use support::{FakeServer, FakeServerConnection, config_with_peers};

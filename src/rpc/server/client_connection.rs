//! The connection to a client, as the session core and its front ends use it.

pub(super) use super::connection::Connection;
pub(super) use super::outgoing::Outgoing as Writer;
pub(super) use crate::rpc::transport::TransportError;

//! The connection to a client, as the session core and its front ends use it.
//!
//! The only file above the sockets that names their types, so that another transport changes nothing else here.

pub(super) use super::connection::{Broken as TransportError, Connection};
pub(super) use super::outgoing::Outgoing as Writer;

//! Where a server listens, and why it may not.

use std::io;

use thiserror::Error;

use crate::rpc::transport::{self, Listen, ListenError};

/// A place where a server cannot listen.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BindError {
    /// The host has no address.
    #[error("{host}: not an address or host name of this machine: {source}")]
    Host {
        /// What was asked for.
        host: String,
        /// The resolver's word.
        source: io::Error,
    },
    /// The system refused: taken, or not ours.
    #[error("cannot listen on {addr}: {source}")]
    Listen {
        /// The address, as messages show it.
        addr: String,
        /// The system's word.
        source: io::Error,
    },
    /// The folder of the cache cannot be used.
    #[error("the cache's folder {dir}: {source}")]
    Cache {
        /// The folder.
        dir: String,
        /// The system's word.
        source: io::Error,
    },
    /// A server that may be dialled has no address.
    #[error("--peer {peer}: no such host: {source}")]
    Peer {
        /// As it was given.
        peer: String,
        /// The resolver's word.
        source: io::Error,
    },
    /// The folder of the models cannot be read.
    #[error("the models' folder {dir}: {source}")]
    Models {
        /// The folder.
        dir: String,
        /// The system's word.
        source: io::Error,
    },
    /// Nothing to serve.
    #[error("a server needs at least one device")]
    NoDevice,
}

/// Listens where a configuration says.
pub(super) fn listen(host: &str, port: u16) -> Result<Box<dyn Listen>, BindError> {
    transport::listen(host, port).map_err(|e| match e {
        ListenError::Host(source) => BindError::Host { host: host.to_owned(), source },
        ListenError::Address { addr, source } => BindError::Listen { addr: addr.to_string(), source },
    })
}

//! The errors of [`Server::bind`](super::Server::bind), and the listener on a host and port.

use std::io;

use thiserror::Error;

use crate::rpc::transport::{self, Listen, ListenError};

/// Why a server could not be started.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BindError {
    /// The host name cannot be resolved.
    #[error("{host}: not an address or host name of this machine: {source}")]
    Host {
        /// The host, as configured.
        host: String,
        /// The resolver's error.
        source: io::Error,
    },
    /// The system refused to listen: the address is in use, or does not belong to this machine.
    #[error("cannot listen on {addr}: {source}")]
    Listen {
        /// The address and port.
        addr: String,
        /// The system's error.
        source: io::Error,
    },
    /// The folder of the tensor cache cannot be used.
    #[error("cannot use the cache folder {dir}: {source}")]
    Cache {
        /// The folder.
        dir: String,
        /// The system's error.
        source: io::Error,
    },
    /// The host name of a peer cannot be resolved.
    #[error("--peer {peer}: cannot resolve the host name: {source}")]
    Peer {
        /// The peer, as configured.
        peer: String,
        /// The resolver's error.
        source: io::Error,
    },
    /// The folder of the models (GGUF files) cannot be read.
    #[error("cannot read the models folder {dir}: {source}")]
    Models {
        /// The folder.
        dir: String,
        /// The system's error.
        source: io::Error,
    },
    /// The list of devices is empty.
    #[error("a server needs at least one device")]
    NoDevice,
}

/// Listens on `host` and `port`.
pub(super) fn open_listener(host: &str, port: u16) -> Result<Box<dyn Listen>, BindError> {
    transport::listen(host, port).map_err(|e| match e {
        ListenError::Host(source) => BindError::Host { host: host.to_owned(), source },
        ListenError::Address { addr, source } => BindError::Listen { addr: addr.to_string(), source },
    })
}

//! The errors of [`Server::bind`](super::Server::bind), and the listeners on its addresses.

use std::fmt;
use std::io;
use std::net::SocketAddr;

use thiserror::Error;

use super::versions::{ListenAddress, ServedVersion, VersionPolicy};
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
    /// The list of addresses is empty.
    #[error("a server needs at least one address to listen on")]
    NoAddress,
    /// An address has no version, and [`Config::protocol`](super::Config::protocol) is empty.
    #[error("a server needs at least one version of the protocol")]
    NoVersion,
}

/// An address on which a server listens, with the versions of the protocol that it answers there.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListenerInfo {
    /// The IP address and the actual port.
    pub addr: SocketAddr,
    /// The versions, in the order in which they are tried with a client whose version is unknown.
    pub versions: Vec<ServedVersion>,
}

impl fmt::Display for ListenerInfo {
    /// For example `127.0.0.1:50052 (protocol 8.0, else 7.0; 3.x; gen0)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (protocol {})", self.addr, self.versions_text())
    }
}

impl ListenerInfo {
    /// The versions, for users: `8.0, else 7.0; 3.x; gen0`.
    pub(super) fn versions_text(&self) -> String {
        // Versions with the HELLO of 4.0 and later are tried one after the other; the others show themselves.
        let (tried, shown): (Vec<_>, Vec<_>) = self.versions.iter().partition(|version| version.is_tried());
        let names = |versions: &[&ServedVersion], between| {
            versions.iter().map(ToString::to_string).collect::<Vec<_>>().join(between)
        };
        let groups = [names(&tried, ", else "), names(&shown, "; ")];
        let groups: Vec<_> = groups.into_iter().filter(|group| !group.is_empty()).collect();
        groups.join("; ")
    }
}

/// A listener, and how it chooses the version that it answers.
pub(super) type VersionedListener = (Box<dyn Listen>, VersionPolicy);

/// Listens on all of `addresses`. `order`: the versions of addresses without one.
pub(super) fn open_listeners(
    addresses: &[ListenAddress],
    order: &[ServedVersion],
) -> Result<Vec<VersionedListener>, BindError> {
    let open = |address: &ListenAddress| {
        let policy = VersionPolicy::new(address.version(), order).ok_or(BindError::NoVersion)?;
        Ok((open_listener(address.host(), address.port())?, policy))
    };
    addresses.iter().map(open).collect()
}

/// Listens on `host` and `port`.
fn open_listener(host: &str, port: u16) -> Result<Box<dyn Listen>, BindError> {
    transport::listen(host, port).map_err(|e| match e {
        ListenError::Host(source) => BindError::Host { host: host.to_owned(), source },
        ListenError::Address { addr, source } => BindError::Listen { addr: addr.to_string(), source },
    })
}

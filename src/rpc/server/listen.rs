//! The errors of [`Server::bind`](super::Server::bind), and the listeners on its addresses.

use std::fmt;
use std::io;
use std::net::SocketAddr;

use thiserror::Error;

use super::versions::{ListenAddress, ServedVersion, VersionPolicy};
use crate::rpc::transport::{self, BoundSocket, Listen, ListenError};

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
    /// Sockets that another process has bound cannot be taken over.
    #[error("cannot take over the listening sockets: {source}")]
    Sockets {
        /// What is wrong with them, or why they have not arrived.
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

impl ListenAddress {
    /// A listening socket on this address, for [`Server::bind_sockets`](super::Server::bind_sockets). Connections wait in the
    /// system's queue until a server accepts them, and while one server follows another.
    ///
    /// # Errors
    /// [`BindError::Host`] and [`BindError::Listen`].
    pub fn bind(&self) -> Result<BoundSocket, BindError> {
        transport::bind(self.host(), self.port()).map_err(|e| match e {
            ListenError::Host(source) => BindError::Host { host: self.host().to_owned(), source },
            ListenError::Address { addr, source } => BindError::Listen { addr: addr.to_string(), source },
        })
    }
}

/// The listeners of `addresses` on the sockets that `sockets` returns in the same order. `order`: the versions of addresses
/// without one.
pub(super) fn open_listeners(
    addresses: &[ListenAddress],
    order: &[ServedVersion],
    sockets: impl FnOnce() -> Result<Vec<BoundSocket>, BindError>,
) -> Result<Vec<VersionedListener>, BindError> {
    let policy = |address: &ListenAddress| VersionPolicy::new(address.version(), order).ok_or(BindError::NoVersion);
    let policies = addresses.iter().map(policy).collect::<Result<Vec<_>, _>>()?;
    let sockets = sockets()?;
    if sockets.len() != policies.len() {
        let reason = format!("{} sockets for {} addresses", sockets.len(), policies.len());
        return Err(BindError::Sockets { source: io::Error::new(io::ErrorKind::InvalidInput, reason) });
    }
    let listener = |socket| transport::listen_on(socket, None).map_err(|source| BindError::Sockets { source });
    sockets.into_iter().zip(policies).map(|(socket, policy)| Ok((listener(socket)?, policy))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_address_needs_a_socket() {
        let (address, order) = (ListenAddress::new("127.0.0.1", 0), ["8".parse().unwrap()]);
        for (count, fits) in [(0, false), (1, true), (2, false)] {
            let sockets = || (0..count).map(|_| address.bind()).collect();
            let opened = open_listeners(std::slice::from_ref(&address), &order, sockets);
            assert_eq!(opened.is_ok(), fits, "{count}");
            assert!(fits || matches!(opened, Err(BindError::Sockets { .. })), "{count}");
        }
    }
}

//! The errors of [`Server::bind`](super::Server::bind), and the listeners on its addresses.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};

use thiserror::Error;

use super::allowed_keys::ServerKeysError;
use super::ip_network::IpNetwork;
use super::limits::Config;
use super::versions::{ListenAddress, ServedVersion, VersionPolicy};
use crate::io_hint::io_hint;
use crate::rpc::transport::{self, BoundSocket, Listen, ListenError, PeerAddr};

/// Why a server could not be started.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BindError {
    /// The host name cannot be resolved.
    #[error(
        "{host:?}: not an address or host name of this machine: {error}; give one without a port (ip addr lists the addresses), or \
         0.0.0.0 for all addresses"
    )]
    Host {
        /// The host, as configured.
        host: String,
        /// The resolver's error.
        error: io::Error,
    },
    /// The system refused to listen: the address is in use, or does not belong to this machine.
    #[error("cannot listen on {addr}: {error}{}", listen_hint(.error))]
    Listen {
        /// The address and port.
        addr: String,
        /// The system's error.
        error: io::Error,
    },
    /// Sockets that another process has bound cannot be taken over.
    #[error("cannot take over the listening sockets: {error}")]
    Sockets {
        /// What is wrong with them, or why they have not arrived.
        error: io::Error,
    },
    /// The folder of the tensor cache cannot be used.
    #[error("cannot use the cache folder {dir}: {error}{}", io_hint(.error))]
    Cache {
        /// The folder.
        dir: String,
        /// The system's error.
        error: io::Error,
    },
    /// The host name of a peer cannot be resolved.
    #[error("--peer {peer}: cannot resolve the host name: {error}; check the spelling, or give its IP address")]
    Peer {
        /// The peer, as configured.
        peer: String,
        /// The resolver's error.
        error: io::Error,
    },
    /// A peer has a key or a certificate, and this server has none to prove to it.
    #[error(
        "--peer {peer}: each end proves the same: a key (--key, --allow-keys), or with =cert a certificate (--cert, --key, --ca)"
    )]
    PeerKey {
        /// The peer, as configured.
        peer: String,
    },
    /// The folder of the models (GGUF files) cannot be read.
    #[error("cannot read the models folder {dir}: {error}{}", io_hint(.error))]
    Models {
        /// The folder.
        dir: String,
        /// The system's error.
        error: io::Error,
    },
    /// Other machines can reach an address, and neither keys, nor [`Config::allow`], nor [`Config::insecure`] protect or permit
    /// it.
    #[error(
        "{addr} can be reached from other machines and has no TLS, so anyone who reaches it can use the devices: give keys \
         (--key, --allow-keys) and leave out =plain, or the addresses of the clients (--allow), or --insecure if all of the \
         network is trusted"
    )]
    Insecure {
        /// The address and port.
        addr: SocketAddr,
    },
    /// The list of allowed keys cannot be used with this server: it names a device that the server does not have.
    #[error("--allow-keys: {0}")]
    Keys(ServerKeysError),
    /// The list of devices is empty.
    #[error("a server needs at least one device")]
    NoDevice,
    /// The list of addresses is empty, or has only addresses for HTTP.
    #[error("a server needs at least one address to listen on")]
    NoAddress,
    /// An address has no version, and [`Config::protocol`](super::Config::protocol) is empty.
    #[error("a server needs at least one version of the protocol")]
    NoVersion,
}

/// What a user can do if the system refuses to listen.
fn listen_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "; ports below 1024 need root or CAP_NET_BIND_SERVICE: choose a port from 1024 on"
        }
        _ => io_hint(error),
    }
}

/// An address on which a server listens, with the versions of the protocol that it answers there.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListenerInfo {
    /// The IP address and the actual port.
    pub addr: SocketAddr,
    /// The versions, in the order in which they are tried with a client whose version is unknown.
    pub versions: Vec<ServedVersion>,
    /// Whether clients have to connect over TLS, with an allowed key.
    pub tls: bool,
    /// The networks whose clients may connect; empty: all.
    pub allowed: Vec<IpNetwork>,
    /// Whether the state of the server is shown there over HTTP.
    pub http: bool,
}

impl From<ServerKeysError> for BindError {
    fn from(error: ServerKeysError) -> BindError {
        BindError::Keys(error)
    }
}

impl fmt::Display for ListenerInfo {
    /// For example `127.0.0.1:50052 (protocol 8.0, else 7.0; 3.x; gen0)`, or `10.0.0.5:50052 (TLS, protocol 8.0)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.versions.is_empty(), self.tls) {
            (true, _) => write!(f, "{} (HTTP", self.addr)?,
            (false, true) => write!(f, "{} (TLS, protocol {}", self.addr, self.versions_text())?,
            (false, false) => write!(f, "{} (protocol {}", self.addr, self.versions_text())?,
        }
        if !self.allowed.is_empty() {
            write!(f, "; clients of {}", self.allowed_text())?;
        }
        f.write_str(")")
    }
}

impl ListenerInfo {
    /// The networks whose clients may connect, for users: `10.0.0.0/24, 10.0.1.7`.
    pub fn allowed_text(&self) -> String {
        self.allowed.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    }

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

/// A listener, and how it serves its clients.
pub(super) struct ServedListener {
    pub(super) listener: Box<dyn Listen>,
    /// How it chooses the version that it answers.
    pub(super) policy: VersionPolicy,
    /// Whether clients have to connect over TLS.
    pub(super) tls: bool,
    pub(super) clients: AllowedClients,
    pub(super) http: HttpUse,
}

/// Whether a listener serves HTTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HttpUse {
    No,
    /// Beside ggml's protocol.
    Shared,
    /// No other protocol.
    Only,
}

/// The clients that may connect to a listener, by their addresses.
#[derive(Clone, Debug, Default)]
pub(super) struct AllowedClients {
    /// Empty: all.
    networks: Vec<IpNetwork>,
    /// Whether the listener has an address of loopback, to which clients of loopback may always connect.
    on_loopback: bool,
}

impl AllowedClients {
    pub(super) fn networks(&self) -> &[IpNetwork] {
        &self.networks
    }

    /// Whether the client at `peer` may connect. Clients without an IP address may, unless there is a list.
    pub(super) fn permits(&self, peer: PeerAddr) -> bool {
        let permits_ip = |ip: IpAddr| {
            (self.on_loopback && ip.to_canonical().is_loopback())
                || self.networks.iter().any(|network| network.contains(ip))
        };
        self.networks.is_empty() || peer.ip().is_some_and(permits_ip)
    }
}

impl ListenAddress {
    /// A listening socket on this address, for [`Server::bind_sockets`](super::Server::bind_sockets). Connections wait in the
    /// system's queue until a server accepts them, and while one server follows another.
    ///
    /// # Errors
    /// [`BindError::Host`] and [`BindError::Listen`].
    pub fn bind(&self) -> Result<BoundSocket, BindError> {
        transport::bind(self.host(), self.port()).map_err(|e| match e {
            ListenError::Host(error) => BindError::Host { host: self.host().to_owned(), error },
            ListenError::Address { addr, error } => BindError::Listen { addr: addr.to_string(), error },
        })
    }
}

/// The listeners of `addresses` on the sockets that `sockets` returns in the same order.
///
/// # Errors
/// [`BindError`], also if an address is not protected.
pub(super) fn open_listeners(
    addresses: &[ListenAddress],
    config: &Config,
    sockets: impl FnOnce() -> Result<Vec<BoundSocket>, BindError>,
) -> Result<Vec<ServedListener>, BindError> {
    if addresses.iter().all(ListenAddress::is_http_only) {
        return Err(BindError::NoAddress);
    }
    let policy = |address: &ListenAddress| match address.is_http_only() {
        true => Ok(VersionPolicy::none()),
        false => VersionPolicy::new(address.version(), &config.protocol).ok_or(BindError::NoVersion),
    };
    let policies = addresses.iter().map(policy).collect::<Result<Vec<_>, _>>()?;
    let sockets = sockets()?;
    if sockets.len() != policies.len() {
        let reason = format!("{} sockets for {} addresses", sockets.len(), policies.len());
        return Err(BindError::Sockets { error: io::Error::new(io::ErrorKind::InvalidInput, reason) });
    }
    let listener = |(address, (socket, policy)): (&ListenAddress, _)| {
        let keys = config.keys.as_ref().filter(|_| !address.plain() && !address.is_http_only());
        let tls = keys.map(|keys| keys.tls.clone());
        let is_tls = tls.is_some();
        let listener = transport::listen_on(socket, tls).map_err(|error| BindError::Sockets { error })?;
        let networks = match address.allowed() {
            [] if is_tls => &[],
            [] => &config.allow[..],
            own => own,
        };
        let addr = listener.local_addr().ip();
        let on_loopback = addr.is_some_and(|addr| addr.ip().to_canonical().is_loopback());
        // What HTTP shows to other machines is no secret, and nothing can be changed.
        if let Some(addr) = addr
            && !(address.is_http_only() || is_tls || !networks.is_empty() || config.insecure || on_loopback)
        {
            return Err(BindError::Insecure { addr });
        }
        let clients = AllowedClients { networks: networks.to_vec(), on_loopback };
        let http = match (address.is_http_only(), config.http && config.keys.is_none()) {
            (true, _) => HttpUse::Only,
            (false, true) => HttpUse::Shared,
            (false, false) => HttpUse::No,
        };
        Ok(ServedListener { listener, policy, tls: is_tls, clients, http })
    };
    addresses.iter().zip(sockets.into_iter().zip(policies)).map(listener).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_address_needs_a_socket() {
        let (address, config) = (ListenAddress::new("127.0.0.1", 0), Config::default());
        for (count, fits) in [(0, false), (1, true), (2, false)] {
            let sockets = || (0..count).map(|_| address.bind()).collect();
            let opened = open_listeners(std::slice::from_ref(&address), &config, sockets);
            assert_eq!(opened.is_ok(), fits, "{count}");
            assert!(fits || matches!(opened, Err(BindError::Sockets { .. })), "{count}");
        }
    }

    #[test]
    fn an_address_that_others_can_reach_needs_keys_or_consent() {
        for (address, insecure, allow, fits) in [
            ("127.0.0.1:0", false, None, true),
            ("0.0.0.0:0", false, None, false),
            ("0.0.0.0:0", true, None, true),
            ("0.0.0.0:0", false, Some("10.0.0.0/24"), true),
            ("0.0.0.0:0=7,allow:10.0.0.0/24", false, None, true),
        ] {
            let allow = allow.iter().map(|network| network.parse().unwrap()).collect();
            let config = Config::default().with_insecure(insecure).with_allow(allow);
            let listen: ListenAddress = address.parse().unwrap();
            let opened = open_listeners(std::slice::from_ref(&listen), &config, || Ok(vec![listen.bind()?]));
            assert_eq!(opened.is_ok(), fits, "{address}, {insecure}");
            assert!(fits || matches!(opened, Err(BindError::Insecure { .. })), "{address}, {insecure}");
        }
    }

    #[test]
    fn only_clients_of_the_networks_may_connect() {
        let peer = |ip: &str| PeerAddr::Ip((ip.parse::<IpAddr>().unwrap(), 40_000).into());
        for (networks, on_loopback, ip, want) in [
            (&[][..], false, "10.0.0.5", true),
            (&["10.0.0.0/24"], false, "10.0.0.5", true),
            (&["10.0.0.0/24"], false, "::ffff:10.0.0.5", true),
            (&["10.0.0.0/24"], false, "10.0.1.5", false),
            (&["10.0.0.0/24", "10.0.1.5"], false, "10.0.1.5", true),
            (&["10.0.0.0/24"], false, "127.0.0.1", false),
            (&["10.0.0.0/24"], true, "127.0.0.1", true),
            (&["10.0.0.0/24"], true, "::ffff:127.0.0.1", true),
            (&["10.0.0.0/24"], true, "10.0.1.5", false),
        ] {
            let networks = networks.iter().map(|network| network.parse().unwrap()).collect();
            let clients = AllowedClients { networks, on_loopback };
            assert_eq!(clients.permits(peer(ip)), want, "{clients:?}, {ip}");
        }
    }
}

//! Allow-list of the servers that this server may dial, and that may connect to it for collectives. Only the operator
//! configures it (`--peer`); clients cannot change it.
//!
//! Names are resolved once, when the server starts. A client's address is compared with the entries as text or as an IP
//! address, so a client can neither make the server query a name server for a name of its choice, nor gain by a name whose
//! address changes between the check and the connection (DNS rebinding).

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use thiserror::Error;

use super::peer_trust::{PeerTrust, Purpose};
use crate::rpc::server::ip_network::IpNetwork;
use crate::rpc::server::versions::ListenAddress;
use crate::rpc::transport::tls::{ClientTls, Proof};
use crate::rpc::transport::{Address, ResolveError, resolve};

/// Limit of the length of an address that a client may send: a host name of 253 bytes, a colon and a port.
pub(in crate::rpc::server) const MAX_ADDRESS_BYTES: usize = 253 + 6;

/// Difference between the port of rank 0's endpoint and the port on which it listens for rank 1: llama.cpp's clients compute
/// it.
pub(in crate::rpc::server) const COMM_PORT_OFFSET: u16 = 1000;

/// An entry of the allow-list as configured: a host or a network such as `10.0.0.0/24`, and `:PORT`, or `:*` for any port. A
/// host is an IP address or a name. Without a port, it is 50052. After `=`: the key that the server must prove, `cert` for a
/// certificate of this server's CA, or `plain-collectives` if only collectives are permitted, which are not encrypted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    host: Host,
    port: Port,
    trust: PeerTrust,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Host {
    Name(String),
    Net(IpNetwork),
}

/// The ports of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Port {
    One(u16),
    Any,
}

impl Port {
    fn parse(text: &str) -> Option<Port> {
        if text == "*" { Some(Port::Any) } else { parse_port(text).map(Port::One) }
    }

    /// Whether a server on the entry's port may be dialled on `port`. Rank 0 of collectives listens above its server's port, or
    /// on a port that the operators have agreed on (`--comm-port`).
    fn permits(self, port: u16, purpose: Purpose) -> bool {
        match self {
            Port::Any => true,
            Port::One(own) if own == port => true,
            Port::One(own) => purpose == Purpose::Collectives && own.checked_add(COMM_PORT_OFFSET) == Some(port),
        }
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Port::One(port) => port.fmt(f),
            Port::Any => f.write_str("*"),
        }
    }
}

/// A text that is not a valid [`Peer`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "expected a server such as 10.0.0.5:50052, gpu-2, gpu-2:50053, [fd00::5]:50053, 10.0.0.0/24, 10.0.0.0/24:50053 or gpu-2:* \
     (any port), with =ed25519:… for its key, =cert or =plain-collectives, got {0:?}"
)]
pub struct ParsePeerError(String);

impl FromStr for Peer {
    type Err = ParsePeerError;

    fn from_str(text: &str) -> Result<Peer, ParsePeerError> {
        Peer::parse(text).ok_or_else(|| ParsePeerError(text.to_owned()))
    }
}

impl Peer {
    /// Whether the servers of the entry must prove a key, so that this server needs one, too.
    pub fn demands_key(&self) -> bool {
        matches!(self.trust, PeerTrust::Key(_))
    }

    /// Whether the servers of the entry must prove a certificate, so that this server needs one, too.
    pub fn demands_certificate(&self) -> bool {
        self.trust == PeerTrust::Certificate
    }

    fn parse(text: &str) -> Option<Peer> {
        let (text, trust) = match text.split_once('=') {
            Some((text, trust)) => (text, PeerTrust::parse(trust)?),
            None => (text, PeerTrust::Plain),
        };
        let (host, port) = Peer::parse_address(text)?;
        Some(Peer { host, port, trust })
    }

    fn parse_address(text: &str) -> Option<(Host, Port)> {
        let default = Port::One(ListenAddress::DEFAULT_PORT);
        let single = |addr: IpAddr| Host::Net(IpNetwork::single_address(addr));
        if let Some(slash) = text.find('/') {
            // A colon before the slash is one of IPv6.
            let (network, port) = match text.rsplit_once(':') {
                Some((network, port)) if network.len() > slash => (network, Port::parse(port)?),
                _ => (text, default),
            };
            return Some((Host::Net(network.parse().ok()?), port));
        }
        if let Ok(addr) = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text).parse() {
            return Some((single(addr), default));
        }
        let (host, port) = match split_host_port(text) {
            Some((host, port)) => (host, Port::parse(port)?),
            None => (text, default),
        };
        let host = match host.parse() {
            Ok(addr) => single(addr),
            Err(_) if is_host_name(host) => Host::Name(host.to_owned()),
            Err(_) => return None,
        };
        Some((host, port))
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Name(name) => f.write_str(name)?,
            Host::Net(net) if net.is_single_address() && net.addr().is_ipv6() => write!(f, "[{net}]")?,
            Host::Net(net) => net.fmt(f)?,
        }
        write!(f, ":{}{}", self.port, self.trust)
    }
}

/// Splits `host:port`; the brackets around an IPv6 address are removed.
fn split_host_port(text: &str) -> Option<(&str, &str)> {
    let (host, port) = text.rsplit_once(':')?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    match bare {
        Some(bare) => bare.parse::<IpAddr>().is_ok_and(|addr| addr.is_ipv6()).then_some((bare, port)),
        None => (!host.contains(':')).then_some((host, port)),
    }
}

fn parse_port(text: &str) -> Option<u16> {
    text.parse().ok().filter(|&port| port > 0 && !text.starts_with('+'))
}

fn is_host_name(host: &str) -> bool {
    let letter = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
    !host.is_empty() && host.bytes().all(letter)
}

/// Allow-list of the servers that this server may dial.
#[derive(Debug, Default)]
pub(in crate::rpc::server) struct PeerAllowlist {
    entries: Vec<AllowlistEntry>,
    /// This server's key or certificate, if it has one.
    proof: Option<Proof>,
}

/// Where to dial another server for transfers, and how.
pub(super) struct PeerTargets {
    /// At least one.
    pub(super) addresses: Vec<Address>,
    /// `None`: without TLS.
    pub(super) tls: Option<ClientTls>,
}

#[derive(Debug)]
struct AllowlistEntry {
    hosts: ListedHosts,
    port: Port,
    trust: PeerTrust,
}

#[derive(Debug)]
enum ListedHosts {
    Net(IpNetwork),
    /// A name, and its addresses when the server started, with a port that does not count.
    Name(String, Vec<Address>),
}

impl ListedHosts {
    fn contains(&self, ip: IpAddr) -> bool {
        match self {
            ListedHosts::Net(net) => net.contains(ip),
            ListedHosts::Name(_, addresses) => {
                addresses.iter().filter_map(Address::ip).any(|addr| IpNetwork::single_address(addr.ip()).contains(ip))
            }
        }
    }

    /// The addresses of a host that a client names: by an IP address, or by the very name of the entry.
    fn addresses(&self, host: &str, port: u16) -> Vec<Address> {
        if let Ok(ip) = host.parse() {
            return if self.contains(ip) { vec![Address::Tcp(SocketAddr::new(ip, port))] } else { Vec::new() };
        }
        let with_port = |addr: &Address| match addr.ip() {
            Some(mut addr) => {
                addr.set_port(port);
                Address::Tcp(addr)
            }
            None => addr.clone(),
        };
        match self {
            ListedHosts::Name(name, addresses) if name.eq_ignore_ascii_case(host) => {
                addresses.iter().map(with_port).collect()
            }
            _ => Vec::new(),
        }
    }
}

impl PeerAllowlist {
    /// Resolves the host names of `peers`. `proof`: this server's key or certificate, if it has one.
    ///
    /// # Errors
    /// The first peer without an address, with the resolver's error.
    pub(in crate::rpc::server) fn resolve(
        peers: &[Peer],
        proof: Option<Proof>,
    ) -> Result<PeerAllowlist, (&Peer, io::Error)> {
        Ok(PeerAllowlist { proof, ..PeerAllowlist::resolve_by(peers, resolve)? })
    }

    /// As [`PeerAllowlist::resolve`], with any resolver of `host:port`.
    fn resolve_by(
        peers: &[Peer],
        mut resolver: impl FnMut(&str) -> Result<Vec<Address>, ResolveError>,
    ) -> Result<PeerAllowlist, (&Peer, io::Error)> {
        let mut entries = Vec::new();
        for peer in peers {
            let hosts = match &peer.host {
                Host::Net(net) => ListedHosts::Net(*net),
                Host::Name(name) => {
                    // The resolver needs a port.
                    let port = if let Port::One(port) = peer.port { port } else { ListenAddress::DEFAULT_PORT };
                    let addresses = resolver(&format!("{name}:{port}")).map_err(|e| match e {
                        ResolveError::Name => (peer, io::ErrorKind::InvalidInput.into()),
                        ResolveError::Host(e) => (peer, e),
                    })?;
                    ListedHosts::Name(name.clone(), addresses)
                }
            };
            entries.push(AllowlistEntry { hosts, port: peer.port, trust: peer.trust });
        }
        Ok(PeerAllowlist { entries, proof: None })
    }

    /// Whether the list is empty: no server may be dialled.
    pub(in crate::rpc::server) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether bytes may be sent to another server.
    pub(in crate::rpc::server) fn permits_transfers(&self) -> bool {
        self.entries.iter().any(|entry| entry.trust.permits(Purpose::Transfers, self.proof.is_some(), false))
    }

    /// Whether a server at an IP address may connect to this one for collectives. The ports of the list do not count: an
    /// outgoing connection has any port.
    pub(in crate::rpc::server) fn permits_incoming(&self, addr: IpAddr) -> bool {
        let mut entries = self.entries.iter().filter(|entry| entry.hosts.contains(addr));
        entries.any(|entry| self.permits(entry, Purpose::Collectives, addr))
    }

    /// Whether this server may wait at `own` for a server that starts collectives. On loopback, only this machine connects.
    pub(in crate::rpc::server) fn permits_collectives_at(&self, own: IpAddr) -> bool {
        self.entries.iter().any(|entry| self.permits(entry, Purpose::Collectives, own))
    }

    fn permits(&self, entry: &AllowlistEntry, purpose: Purpose, addr: IpAddr) -> bool {
        entry.trust.permits(purpose, self.proof.is_some(), addr.to_canonical().is_loopback())
    }

    /// The addresses of `host:port` to which bytes may be sent, and what a server there must prove. Resolves nothing.
    ///
    /// # Errors
    /// The reason, as a text for the client that sent the address.
    pub(super) fn transfer_targets(&self, address: &str) -> Result<PeerTargets, String> {
        let addresses = self.permitted(address, Purpose::Transfers)?;
        let demands = self.demands_of(&addresses);
        if demands.is_empty() {
            return Ok(PeerTargets { addresses, tls: None });
        }
        let key = |demand: &PeerTrust| if let PeerTrust::Key(key) = demand { Some(*key) } else { None };
        let keys: Option<Vec<_>> = demands.iter().map(key).collect();
        let is_certified = demands.iter().all(|demand| *demand == PeerTrust::Certificate);
        let tls = match (&self.proof, keys) {
            (Some(Proof::Key(credentials)), Some(keys)) => ClientTls::new(credentials, &keys),
            // The name or address of the entry: `permitted` has found it.
            (Some(Proof::Certificate(certificate)), _) if is_certified => {
                ClientTls::with_certificate(certificate, split_host_port(address).map_or("", |(host, _)| host))
            }
            _ => {
                return Err(
                    "its --peer flags demand what this server does not have: KEY a key, =cert a certificate".to_owned()
                );
            }
        };
        Ok(PeerTargets { addresses, tls: Some(tls.map_err(|e| format!("TLS: {e}"))?) })
    }

    /// What all entries demand that list one of `addresses`: a client that names a host in another way must not get a
    /// connection that demands less.
    pub(super) fn demands_of(&self, addresses: &[Address]) -> Vec<PeerTrust> {
        let lists = |entry: &AllowlistEntry| {
            let mut addresses = addresses.iter().filter_map(Address::ip);
            addresses.any(|at| entry.hosts.contains(at.ip()) && entry.port.permits(at.port(), Purpose::Transfers))
        };
        let listed = self.entries.iter().filter(|entry| entry.trust.demands_tls() && lists(entry));
        listed.map(|entry| entry.trust).collect()
    }

    /// The addresses of `host:port` that may be dialled for collectives; at least one. Resolves nothing.
    ///
    /// # Errors
    /// The reason, for the log.
    pub(in crate::rpc::server) fn collective_targets(&self, address: &str) -> Result<Vec<Address>, String> {
        self.permitted(address, Purpose::Collectives)
    }

    /// The addresses of `host:port` that may be dialled; at least one.
    fn permitted(&self, address: &str, purpose: Purpose) -> Result<Vec<Address>, String> {
        if self.is_empty() {
            return Err("this server may not dial other servers: it was started without --peer".to_owned());
        }
        let parts = Some(address).filter(|address| address.len() <= MAX_ADDRESS_BYTES).and_then(split_host_port);
        let (host, port) = parts
            .filter(|(host, _)| host.parse::<IpAddr>().is_ok() || is_host_name(host))
            .and_then(|(host, port)| Some((host, parse_port(port)?)))
            .ok_or("expected an address such as 10.0.0.5:50052")?;
        // 0.0.0.0 leads to this machine, by an address that no entry describes.
        if host.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_unspecified()) {
            return Err("0.0.0.0 and :: are no addresses of a server".to_owned());
        }
        let mut needs_consent = false;
        for entry in self.entries.iter().filter(|entry| entry.port.permits(port, purpose)) {
            let mut addresses = entry.hosts.addresses(host, port);
            let listed = addresses.len();
            // An address without an IP address is one of this process.
            let ip = |at: &Address| at.ip().map_or(IpAddr::from([127, 0, 0, 1]), |at| at.ip());
            addresses.retain(|at| self.permits(entry, purpose, ip(at)));
            if !addresses.is_empty() {
                return Ok(addresses);
            }
            needs_consent |= listed > 0 && purpose == Purpose::Collectives;
        }
        Err(if needs_consent { UNENCRYPTED.to_owned() } else { UNLISTED.to_owned() })
    }
}

/// Why an address is not dialled that no entry lists.
const UNLISTED: &str = "this server may not dial it: none of its --peer flags names it";

/// Why a server with keys starts no collectives with another machine.
pub(in crate::rpc::server) const UNENCRYPTED: &str =
    "collectives are not encrypted, and this server has keys: permit them by --peer HOST=plain-collectives";

/// The address as error messages show it; an address beyond the length limit is replaced, because clients choose its length.
pub(super) fn displayable_address(address: &str) -> &str {
    if address.len() <= MAX_ADDRESS_BYTES { address } else { "an address that is too long" }
}

#[cfg(test)]
mod tests;

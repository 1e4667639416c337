//! Allow-list of the servers that this server may dial, and that may connect to it for collectives. Only the operator configures it (`--peer`); clients cannot change it.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use thiserror::Error;

use crate::rpc::transport::{Address, ResolveError, resolve};

/// Limit of the length of an address that a client may send: a host name of 253 bytes, a colon and a port.
const MAX_ADDRESS_BYTES: usize = 253 + 6;

/// An entry of the allow-list as configured: `HOST`, `HOST:PORT`, or a network such as `10.0.0.0/24`. A host is an IP address
/// or a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    host: Host,
    /// `None`: any port.
    port: Option<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Host {
    Name(String),
    Net(IpNetwork),
}

/// An IP network: all addresses whose first `bits` bits equal those of `addr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct IpNetwork {
    addr: IpAddr,
    bits: u32,
}

impl IpNetwork {
    fn single_address(addr: IpAddr) -> IpNetwork {
        IpNetwork { addr, bits: address_bits(addr) }
    }

    /// Whether the network contains `addr`. An IPv4-mapped IPv6 address counts as its IPv4 address.
    fn contains(&self, addr: IpAddr) -> bool {
        match (self.addr, addr.to_canonical()) {
            (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() >= self.bits,
            (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() >= self.bits,
            _ => false,
        }
    }
}

fn address_bits(addr: IpAddr) -> u32 {
    if addr.is_ipv4() { 32 } else { 128 }
}

/// A text that is not a valid [`Peer`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("expected a server such as 10.0.0.5:50052, gpu-2, gpu-2:50052, [fd00::5]:50052 or 10.0.0.0/24, got {0:?}")]
pub struct ParsePeerError(String);

impl FromStr for Peer {
    type Err = ParsePeerError;

    fn from_str(text: &str) -> Result<Peer, ParsePeerError> {
        let parse_error = || ParsePeerError(text.to_owned());
        let net = |addr: IpAddr| Host::Net(IpNetwork::single_address(addr.to_canonical()));
        if let Some((addr, bits)) = text.split_once('/') {
            let addr: IpAddr = addr.parse().map_err(|_| parse_error())?;
            let bits = bits
                .parse()
                .ok()
                .filter(|&bits| bits <= address_bits(addr) && !text.contains('+'))
                .ok_or_else(parse_error)?;
            return Ok(Peer { host: Host::Net(IpNetwork { addr, bits }), port: None });
        }
        if let Ok(addr) = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text).parse() {
            return Ok(Peer { host: net(addr), port: None });
        }
        let (host, port) = match split_host_port(text) {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        };
        let host = match host.parse() {
            Ok(addr) => net(addr),
            Err(_) if is_host_name(host) => Host::Name(host.to_owned()),
            Err(_) => return Err(parse_error()),
        };
        Ok(Peer { host, port })
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.host, self.port) {
            (Host::Name(name), Some(port)) => write!(f, "{name}:{port}"),
            (Host::Name(name), None) => f.write_str(name),
            (Host::Net(net), Some(port)) => write!(f, "{}", SocketAddr::new(net.addr, port)),
            (Host::Net(IpNetwork { addr, bits }), None) if *bits == address_bits(*addr) => write!(f, "{addr}"),
            (Host::Net(IpNetwork { addr, bits }), None) => write!(f, "{addr}/{bits}"),
        }
    }
}

/// Splits `host:port`; the brackets around an IPv6 address are removed.
fn split_host_port(text: &str) -> Option<(&str, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let port = port.parse().ok().filter(|&port| port > 0 && text.as_bytes().last().is_some_and(u8::is_ascii_digit))?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    match bare {
        Some(bare) => bare.parse::<IpAddr>().is_ok_and(|addr| addr.is_ipv6()).then_some((bare, port)),
        None => (!host.contains(':')).then_some((host, port)),
    }
}

fn is_host_name(host: &str) -> bool {
    let letter = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
    !host.is_empty() && host.bytes().all(letter)
}

/// Allow-list of the servers that this server may dial. Host names are resolved once, when the server starts.
#[derive(Debug, Default)]
pub(in crate::rpc::server) struct PeerAllowlist(Vec<AllowlistEntry>);

#[derive(Debug)]
enum AllowlistEntry {
    /// A network of IP addresses; a port, or `None` for any port.
    Net(IpNetwork, Option<u16>),
    /// A single address of a transport without IP addresses.
    Exact(Address),
}

impl AllowlistEntry {
    fn matches(&self, addr: &Address) -> bool {
        match (self, addr.ip()) {
            (AllowlistEntry::Net(net, port), Some(ip)) => {
                port.is_none_or(|port| port == ip.port()) && net.contains(ip.ip())
            }
            (AllowlistEntry::Exact(only), None) => only == addr,
            _ => false,
        }
    }
}

impl PeerAllowlist {
    /// Resolves the host names of `peers`.
    ///
    /// # Errors
    /// The first peer without an address, with the resolver's error.
    pub(in crate::rpc::server) fn resolve(peers: &[Peer]) -> Result<PeerAllowlist, (&Peer, io::Error)> {
        let mut list = Vec::new();
        for peer in peers {
            match &peer.host {
                Host::Net(net) => list.push(AllowlistEntry::Net(*net, peer.port)),
                Host::Name(name) => {
                    // The resolver needs a port; its value does not matter.
                    let addresses = resolve(&format!("{name}:{}", peer.port.unwrap_or(0))).map_err(|e| match e {
                        ResolveError::Name => (peer, io::ErrorKind::InvalidInput.into()),
                        ResolveError::Host(e) => (peer, e),
                    })?;
                    list.extend(addresses.into_iter().map(|addr| match addr.ip() {
                        Some(ip) => AllowlistEntry::Net(IpNetwork::single_address(ip.ip().to_canonical()), peer.port),
                        None => AllowlistEntry::Exact(addr),
                    }));
                }
            }
        }
        Ok(PeerAllowlist(list))
    }

    /// Whether the list is empty: no server may be dialled.
    pub(in crate::rpc::server) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a server at an IP address may connect to this one. The ports of the list do not count: an outgoing connection has
    /// any port.
    pub(in crate::rpc::server) fn permits_incoming(&self, addr: IpAddr) -> bool {
        self.0.iter().any(|entry| matches!(entry, AllowlistEntry::Net(net, _) if net.contains(addr)))
    }

    fn permits(&self, addr: &Address) -> bool {
        self.0.iter().any(|entry| entry.matches(addr))
    }

    /// Checks that the list is not empty and that `address` is well-formed. Does not resolve names.
    ///
    /// # Errors
    /// The reason, as a text for the client that sent the address.
    pub(in crate::rpc::server) fn check_address(&self, address: &str) -> Result<(), String> {
        if self.is_empty() {
            return Err("this server may not dial other servers: it was started without --peer".to_owned());
        }
        let parts = Some(address).filter(|address| address.len() <= MAX_ADDRESS_BYTES).and_then(split_host_port);
        let valid = parts.filter(|(host, _)| host.parse::<IpAddr>().is_ok() || is_host_name(host));
        valid.map(drop).ok_or_else(invalid_address)
    }

    /// Resolves `host:port` and returns the permitted addresses. The caller dials exactly these addresses and does not
    /// resolve the name again. Otherwise a malicious name server could return a permitted address for the check and another
    /// address for the connection (DNS rebinding).
    ///
    /// # Errors
    /// The reason, as a text for the client that sent the address.
    pub(in crate::rpc::server) fn resolve_permitted(&self, address: &str) -> Result<Vec<Address>, String> {
        self.check_address(address)?;
        let mut addresses = resolve(address).map_err(|e| match e {
            ResolveError::Name => invalid_address(),
            ResolveError::Host(e) => format!("no such host: {e}"),
        })?;
        addresses.retain(|addr| self.permits(addr));
        if addresses.is_empty() {
            return Err("this server may not dial it: none of its --peer flags names it".to_owned());
        }
        Ok(addresses)
    }
}

fn invalid_address() -> String {
    "expected an address such as 10.0.0.5:50052".to_owned()
}

/// The address as error messages show it; an address beyond the length limit is replaced, because clients choose its length.
pub(super) fn displayable_address(address: &str) -> &str {
    if address.len() <= MAX_ADDRESS_BYTES { address } else { "an address that is too long" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_parses_hosts_and_networks() {
        for (text, want) in [
            ("10.0.0.5", Some("10.0.0.5")),
            ("10.0.0.5:50052", Some("10.0.0.5:50052")),
            ("10.0.0.0/24", Some("10.0.0.0/24")),
            ("0.0.0.0/0", Some("0.0.0.0/0")),
            ("::1", Some("::1")),
            ("[::1]", Some("::1")),
            ("[fd00::5]:50052", Some("[fd00::5]:50052")),
            ("fd00::/8", Some("fd00::/8")),
            ("::ffff:10.0.0.5", Some("10.0.0.5")),
            ("gpu-2", Some("gpu-2")),
            ("gpu-2.lan:50052", Some("gpu-2.lan:50052")),
            ("", None),
            (":50052", None),
            ("gpu-2:", None),
            ("gpu-2:0", None),
            ("gpu-2:65536", None),
            ("gpu 2", None),
            ("10.0.0.0/33", None),
            ("10.0.0.0/+8", None),
            ("10.0.0.0/", None),
            ("gpu-2/24", None),
            ("[10.0.0.5]:1", None),
            ("a:b:1", None),
        ] {
            assert_eq!(text.parse::<Peer>().ok().map(|peer| peer.to_string()).as_deref(), want, "{text:?}");
        }
    }

    #[test]
    fn address_is_permitted_if_a_peer_contains_it() {
        let list = |peers: &[&str]| {
            let peers: Vec<Peer> = peers.iter().map(|peer| peer.parse().unwrap()).collect();
            PeerAllowlist::resolve(&peers).unwrap()
        };
        for (peers, address, want) in [
            (&["10.0.0.0/24"][..], "10.0.0.255:1", true),
            (&["10.0.0.77/24"], "10.0.0.1:1", true),
            (&["10.0.0.0/24"], "10.0.1.0:1", false),
            (&["10.0.0.0/24"], "[::ffff:10.0.0.9]:1", true),
            (&["10.0.0.0/24"], "[::a00:9]:1", false),
            (&["0.0.0.0/0"], "1.2.3.4:1", true),
            (&["0.0.0.0/0"], "[::1]:1", false),
            (&["fd00::/8"], "[fdff::1]:1", true),
            (&["10.0.0.5:7"], "10.0.0.5:7", true),
            (&["10.0.0.5:7"], "10.0.0.5:8", false),
            (&["10.0.0.5:7", "10.0.0.5:8"], "10.0.0.5:8", true),
            (&["localhost:7"], "127.0.0.1:7", true),
            (&["127.0.0.0/8", "::1"], "localhost:7", true),
            (&["10.0.0.5"], "127.0.0.1:7", false),
            (&["10.0.0.5"], "10.0.0.5", false),
            (&["10.0.0.5"], "10.0.0.5:0", false),
            (&["10.0.0.5"], "", false),
            (&["0.0.0.0/0"], "10.0.0.5\n:7", false),
            (&["0.0.0.0/0"], "\u{fffd}:7", false),
        ] {
            assert_eq!(list(peers).resolve_permitted(address).is_ok(), want, "{peers:?}: {address}");
        }
        let long = "a".repeat(1000) + ":1";
        assert!(list(&["10.0.0.5"]).resolve_permitted(&long).is_err() && displayable_address(&long).len() < 100);
        assert!(list(&[]).resolve_permitted("127.0.0.1:1").unwrap_err().contains("--peer"));
    }

    #[test]
    fn host_of_an_incoming_connection_is_permitted_on_any_port() {
        let list = |peer: &str| PeerAllowlist::resolve(&[peer.parse().unwrap()]).unwrap();
        for (peer, host, want) in [
            ("10.0.0.5:7", "10.0.0.5", true),
            ("10.0.0.5:7", "10.0.0.6", false),
            ("10.0.0.0/24", "::ffff:10.0.0.9", true),
            ("localhost", "127.0.0.1", true),
            ("memory:7", "127.0.0.1", false),
        ] {
            assert_eq!(list(peer).permits_incoming(host.parse().unwrap()), want, "{peer}: {host}");
        }
        assert!(!PeerAllowlist::default().permits_incoming("127.0.0.1".parse().unwrap()));
    }

    /// An address of a transport without IP addresses matches only a peer with the same name, and no network.
    #[test]
    fn non_ip_address_is_permitted_by_exact_name_only() {
        let targets = |peer: &str| {
            let peers = [peer.parse::<Peer>().unwrap()];
            PeerAllowlist::resolve(&peers).unwrap().resolve_permitted("memory:7")
        };
        assert_eq!(targets("memory:7"), Ok(vec![Address::Memory(7)]));
        for peer in ["memory:8", "0.0.0.0/0", "::/0"] {
            assert!(targets(peer).unwrap_err().contains("none of its --peer flags names it"), "{peer}");
        }
    }
}

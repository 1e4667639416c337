//! Which servers this one may dial: what its operator has said, and nobody else.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use thiserror::Error;

use crate::rpc::transport::{Address, ResolveError, resolve};

/// The longest address that a client may ask for: a name of 253 bytes and a port.
const LONGEST: usize = 253 + 6;

/// Servers that this one may dial: `HOST`, `HOST:PORT`, or a network such as `10.0.0.0/24`. A host is an address or a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    host: Host,
    /// `None`: any.
    port: Option<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Host {
    Name(String),
    Net(Net),
}

/// Addresses whose first `bits` bits are those of `addr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Net {
    addr: IpAddr,
    bits: u32,
}

impl Net {
    fn one(addr: IpAddr) -> Net {
        Net { addr, bits: width(addr) }
    }

    /// IPv4 addresses that are written as IPv6 ones are IPv4 addresses.
    fn holds(&self, addr: IpAddr) -> bool {
        match (self.addr, addr.to_canonical()) {
            (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() >= self.bits,
            (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() >= self.bits,
            _ => false,
        }
    }
}

fn width(addr: IpAddr) -> u32 {
    if addr.is_ipv4() { 32 } else { 128 }
}

/// A text that names no peer.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("expected a server such as 10.0.0.5:50052, gpu-2, gpu-2:50052, [fd00::5]:50052 or 10.0.0.0/24, got {0:?}")]
pub struct BadPeer(String);

impl FromStr for Peer {
    type Err = BadPeer;

    fn from_str(text: &str) -> Result<Peer, BadPeer> {
        let bad = || BadPeer(text.to_owned());
        let net = |addr: IpAddr| Host::Net(Net::one(addr.to_canonical()));
        if let Some((addr, bits)) = text.split_once('/') {
            let addr: IpAddr = addr.parse().map_err(|_| bad())?;
            let bits = bits.parse().ok().filter(|&bits| bits <= width(addr) && !text.contains('+')).ok_or_else(bad)?;
            return Ok(Peer { host: Host::Net(Net { addr, bits }), port: None });
        }
        if let Ok(addr) = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text).parse() {
            return Ok(Peer { host: net(addr), port: None });
        }
        let (host, port) = match split(text) {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        };
        let host = match host.parse() {
            Ok(addr) => net(addr),
            Err(_) if is_name(host) => Host::Name(host.to_owned()),
            Err(_) => return Err(bad()),
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
            (Host::Net(Net { addr, bits }), None) if *bits == width(*addr) => write!(f, "{addr}"),
            (Host::Net(Net { addr, bits }), None) => write!(f, "{addr}/{bits}"),
        }
    }
}

/// `host:port` without the brackets around an IPv6 address.
fn split(text: &str) -> Option<(&str, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let port = port.parse().ok().filter(|&port| port > 0 && text.as_bytes().last().is_some_and(u8::is_ascii_digit))?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    match bare {
        Some(bare) => bare.parse::<IpAddr>().is_ok_and(|addr| addr.is_ipv6()).then_some((bare, port)),
        None => (!host.contains(':')).then_some((host, port)),
    }
}

fn is_name(host: &str) -> bool {
    let letter = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
    !host.is_empty() && host.bytes().all(letter)
}

/// Allow-list of the servers that this one may dial: the peers, with the addresses that their names had when the server started.
#[derive(Debug, Default)]
pub(in crate::rpc::server) struct PeerList(Vec<Allowed>);

#[derive(Debug)]
enum Allowed {
    /// IP addresses, at one port or at any.
    Net(Net, Option<u16>),
    /// An address of a transport without IP addresses.
    Exactly(Address),
}

impl Allowed {
    fn admits(&self, addr: &Address) -> bool {
        match (self, addr.ip()) {
            (Allowed::Net(net, port), Some(ip)) => port.is_none_or(|port| port == ip.port()) && net.holds(ip.ip()),
            (Allowed::Exactly(only), None) => only == addr,
            _ => false,
        }
    }
}

impl PeerList {
    /// Looks the names up.
    ///
    /// # Errors
    /// The first peer that has no address, with the resolver's error.
    pub(in crate::rpc::server) fn resolve(peers: &[Peer]) -> Result<PeerList, (&Peer, io::Error)> {
        let mut list = Vec::new();
        for peer in peers {
            match &peer.host {
                Host::Net(net) => list.push(Allowed::Net(*net, peer.port)),
                Host::Name(name) => {
                    // Any port serves to look a name up.
                    let found = resolve(&format!("{name}:{}", peer.port.unwrap_or(0))).map_err(|e| match e {
                        ResolveError::Name => (peer, io::ErrorKind::InvalidInput.into()),
                        ResolveError::Host(e) => (peer, e),
                    })?;
                    list.extend(found.into_iter().map(|addr| match addr.ip() {
                        Some(ip) => Allowed::Net(Net::one(ip.ip().to_canonical()), peer.port),
                        None => Allowed::Exactly(addr),
                    }));
                }
            }
        }
        Ok(PeerList(list))
    }

    /// Whether no server may be dialled.
    pub(in crate::rpc::server) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn allows(&self, addr: &Address) -> bool {
        self.0.iter().any(|allowed| allowed.admits(addr))
    }

    /// Checks that any server may be dialled, and that `address` has the form of an address. Looks nothing up.
    ///
    /// # Errors
    /// Why not, for the client that sent the address.
    pub(super) fn admits(&self, address: &str) -> Result<(), String> {
        if self.is_empty() {
            return Err("this server dials no other one: it was started without --peer".to_owned());
        }
        let parts = Some(address).filter(|address| address.len() <= LONGEST).and_then(split);
        parts.map(drop).ok_or_else(bad_address)
    }

    /// The addresses to dial for `host:port`. This is the only look-up, so the addresses that are checked are those that are
    /// dialled: a name server cannot answer the check with one address and the connection with another.
    ///
    /// # Errors
    /// Why there are none, for the client that sent the address.
    pub(super) fn targets(&self, address: &str) -> Result<Vec<Address>, String> {
        self.admits(address)?;
        let mut found = resolve(address).map_err(|e| match e {
            ResolveError::Name => bad_address(),
            ResolveError::Host(e) => format!("no such host: {e}"),
        })?;
        found.retain(|addr| self.allows(addr));
        if found.is_empty() {
            return Err("this server may not dial it: none of its --peer flags names it".to_owned());
        }
        Ok(found)
    }
}

fn bad_address() -> String {
    "expected an address such as 10.0.0.5:50052".to_owned()
}

/// An address as messages show it: a client may send a longer text than anyone wants to read.
pub(super) fn shown(address: &str) -> &str {
    if address.len() <= LONGEST { address } else { "an address that is too long" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_hosts_and_networks() {
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
    fn an_address_is_dialled_when_a_peer_holds_it() {
        let list = |peers: &[&str]| {
            let peers: Vec<Peer> = peers.iter().map(|peer| peer.parse().unwrap()).collect();
            PeerList::resolve(&peers).unwrap()
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
        ] {
            assert_eq!(list(peers).targets(address).is_ok(), want, "{peers:?}: {address}");
        }
        let long = "a".repeat(1000) + ":1";
        assert!(list(&["10.0.0.5"]).targets(&long).is_err() && shown(&long).len() < 100);
        assert!(list(&[]).targets("127.0.0.1:1").unwrap_err().contains("--peer"));
    }

    /// An address without an IP address is dialled when a peer names it; networks do not hold it.
    #[test]
    fn an_address_of_another_transport_is_dialled_by_its_name_alone() {
        let targets = |peer: &str| {
            let peers = [peer.parse::<Peer>().unwrap()];
            PeerList::resolve(&peers).unwrap().targets("memory:7")
        };
        assert_eq!(targets("memory:7"), Ok(vec![Address::Memory(7)]));
        for peer in ["memory:8", "0.0.0.0/0", "::/0"] {
            assert!(targets(peer).unwrap_err().contains("none of its --peer flags names it"), "{peer}");
        }
    }
}

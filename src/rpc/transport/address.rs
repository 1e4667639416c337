//! Addresses of connections, and the resolution of `host:port`.

use crate::poison::Unpoisoned;
use std::collections::HashSet;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::sync::Mutex;

use crate::rpc::keys::Identity;

/// An allowed key or certificate and its name. They live as long as the process, so that addresses of peers can be copied;
/// there are no more of them than the lists of allowed keys have had, and than the names of certificates that a server without
/// a list remembers.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct KeyName(&'static (Identity, String));

impl KeyName {
    pub(crate) fn new(identity: impl Into<Identity>, name: &str) -> KeyName {
        static NAMES: Mutex<Option<HashSet<&'static (Identity, String)>>> = Mutex::new(None);
        let mut names = NAMES.lock().unpoisoned();
        let names = names.get_or_insert_default();
        let named = (identity.into(), name.to_owned());
        if let Some(known) = names.get(&named) {
            return KeyName(known);
        }
        let named: &'static _ = Box::leak(Box::new(named));
        names.insert(named);
        KeyName(named)
    }

    pub(crate) fn identity(self) -> &'static Identity {
        &self.0.0
    }
}

impl fmt::Display for KeyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.1)
    }
}

impl fmt::Debug for KeyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.1)
    }
}

/// Address of a peer, for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerAddr {
    Ip(SocketAddr),
    /// A peer that has proved an allowed key or certificate.
    Key(SocketAddr, KeyName),
    /// An in-memory peer, by the number of its connection.
    #[cfg(test)]
    Local(u64),
}

impl PeerAddr {
    /// The IP address; `None` for an in-memory peer.
    pub(crate) fn ip(&self) -> Option<IpAddr> {
        match self {
            PeerAddr::Ip(addr) | PeerAddr::Key(addr, _) => Some(addr.ip()),
            #[cfg(test)]
            PeerAddr::Local(_) => None,
        }
    }
}

impl fmt::Display for PeerAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PeerAddr::Ip(addr) => addr.fmt(f),
            PeerAddr::Key(addr, name) => write!(f, "{addr} ({name})"),
            #[cfg(test)]
            PeerAddr::Local(number) => write!(f, "local#{number}"),
        }
    }
}

/// An address to dial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    Tcp(SocketAddr),
    /// An in-memory listener of this process, by its number.
    #[cfg(test)]
    Memory(u64),
}

impl Address {
    /// The IP address and port; `None` for an in-memory address.
    pub(crate) fn ip(&self) -> Option<SocketAddr> {
        match self {
            Address::Tcp(addr) => Some(*addr),
            #[cfg(test)]
            Address::Memory(_) => None,
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(addr) => addr.fmt(f),
            #[cfg(test)]
            Address::Memory(number) => write!(f, "memory:{number}"),
        }
    }
}

/// Why an endpoint could not be resolved to addresses.
#[derive(Debug)]
pub(crate) enum ResolveError {
    /// The text is not of the form `host:port`.
    Name,
    /// The host name does not resolve; contains the resolver's error.
    Host(io::Error),
}

/// Resolves `host:port`; an IPv6 address is given in brackets.
pub(crate) fn resolve(endpoint: &str) -> Result<Vec<Address>, ResolveError> {
    #[cfg(test)]
    if let Some(number) = endpoint.strip_prefix("memory:").and_then(|number| number.parse().ok()) {
        return Ok(vec![Address::Memory(number)]);
    }
    if !is_host_and_port(endpoint) {
        return Err(ResolveError::Name);
    }
    let addrs = endpoint.to_socket_addrs().map_err(ResolveError::Host)?;
    Ok(addrs.map(Address::Tcp).collect())
}

/// Whether the text is of the form `host:port`, with an IPv6 address in brackets.
pub(crate) fn is_host_and_port(text: &str) -> bool {
    let host_and_port =
        |(host, port): (&str, &str)| !host.is_empty() && !host.contains([':', '[', ']']) && port.parse::<u16>().is_ok();
    text.parse::<SocketAddr>().is_ok() || text.rsplit_once(':').is_some_and(host_and_port)
}

/// `text` as `host:port`, with `default` if it has no port. A number alone is no host, because it is rather a port than an IPv4
/// address. An IPv6 address needs brackets: in `fd00::5:50052` the port would be a part of it. `None`: `text` is not of that form.
pub(crate) fn with_default_port(text: &str, default: u16) -> Option<String> {
    let with_port = format!("{text}:{default}");
    let endpoint = [text, &with_port].into_iter().find(|endpoint| is_host_and_port(endpoint))?;
    let is_number = endpoint.rsplit_once(':').is_some_and(|(host, _)| host.parse::<u64>().is_ok());
    (!is_number).then(|| endpoint.to_owned())
}

/// For an endpoint that lacks its port or its host: a text that says so, with an example. Empty for other texts.
pub(crate) fn missing_port_hint(endpoint: &str) -> String {
    let unbracketed = endpoint.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(endpoint);
    // A link-local address may name its interface: fe80::1%eth0.
    let address = unbracketed.split_once('%').map_or(unbracketed, |(address, _)| address);
    if address.parse::<Ipv6Addr>().is_ok() {
        return format!(": the port is missing, as in [{unbracketed}]:50052");
    }
    let host = endpoint.strip_suffix(':').unwrap_or(endpoint);
    let is_name = host.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c));
    if !is_name || host.is_empty() {
        String::new()
    } else if host.parse::<u64>().is_ok() {
        format!(": the host is missing, as in 127.0.0.1:{host}")
    } else {
        format!(": the port is missing, as in {host}:50052")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_a_host_and_a_port() {
        for name in ["a:1", "10.0.0.5:50052", "[::1]:50052", "[fe80::1%2]:7", "node-7.lan:65535"] {
            assert!(is_host_and_port(name), "{name:?}");
        }
        for name in
            ["", "a", ":1", "a:", "a:b", "a:65536", "1.2.3.4", "::1", "::1:50052", "[::1]", "[::1]:", "[a]:1", "[::1:1"]
        {
            assert!(!is_host_and_port(name), "{name:?}");
        }
    }

    #[test]
    fn endpoints_without_a_port_get_the_default() {
        for (text, want) in [
            ("gpu-1", Some("gpu-1:7")),
            ("gpu-1:8", Some("gpu-1:8")),
            ("fd00::5", None),
            ("[fd00::5]", Some("[fd00::5]:7")),
            ("[fd00::5]:8", Some("[fd00::5]:8")),
            ("", None),
            ("50052", None),
            ("50052:1", None),
            ("a:b", None),
            ("http://gpu-1", None),
        ] {
            assert_eq!(with_default_port(text, 7).as_deref(), want, "{text:?}");
        }
    }

    #[test]
    fn hosts_without_a_port_get_an_example() {
        for (endpoint, want) in [
            ("localhost", ": the port is missing, as in localhost:50052"),
            ("10.0.0.5", ": the port is missing, as in 10.0.0.5:50052"),
            ("node-7.lan:", ": the port is missing, as in node-7.lan:50052"),
            ("::1", ": the port is missing, as in [::1]:50052"),
            ("[fd00::5]", ": the port is missing, as in [fd00::5]:50052"),
            ("fd00::", ": the port is missing, as in [fd00::]:50052"),
            ("[::]", ": the port is missing, as in [::]:50052"),
            ("fe80::1%eth0", ": the port is missing, as in [fe80::1%eth0]:50052"),
            ("50052", ": the host is missing, as in 127.0.0.1:50052"),
            ("", ""),
            ("a:b", ""),
            ("host:70000", ""),
            (":50052", ""),
        ] {
            assert_eq!(missing_port_hint(endpoint), want, "{endpoint:?}");
        }
    }
}

//! An address to listen on, as text: `[HOST:]PORT`, or `[HOST:]PORT=ITEMS` with any of `plain`, a version and `allow:NETWORK`,
//! separated by commas.

use std::fmt;
use std::net::SocketAddrV6;
use std::str::FromStr;

use thiserror::Error;

use super::{ParseVersionError, ServedVersion};
use crate::rpc::server::ip_network::{IpNetwork, ParseNetworkError};
use crate::rpc::wire;

/// An address on which a server listens, and the version that it answers there.
///
/// Parsed from `[HOST:]PORT[=VERSION]`: `50052`, `0.0.0.0:50052`, `gpu-2:50053=7`, `[fd00::5]:50052=8.0`. `plain`, beside the
/// version or alone, marks an address without TLS: `50053=plain`, `50053=plain,7`. `allow:NETWORK`, once or several times, names
/// the clients that may connect: `50053=plain,7,allow:10.0.0.0/24`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenAddress {
    /// `None`: the default host.
    host: Option<String>,
    port: u16,
    /// `None`: the versions of [`Config::protocol`](super::super::Config::protocol).
    version: Option<ServedVersion>,
    plain: bool,
    /// The clients' addresses that may connect; empty: those that the server allows.
    allowed: Vec<IpNetwork>,
    http_only: bool,
}

/// What marks an address without TLS.
const PLAIN: &str = "plain";

/// What precedes a network of clients.
const ALLOW: &str = "allow:";

impl ListenAddress {
    /// Host of an address that is parsed without one, unless [`ListenAddress::or_host`] gives another: only this machine's
    /// clients can connect.
    pub const DEFAULT_HOST: &'static str = "127.0.0.1";

    /// Port of `rpc-server` if no option gives one, and of a [`Peer`](super::super::Peer) without a port.
    pub const DEFAULT_PORT: u16 = wire::DEFAULT_PORT;

    /// `host` (an IPv4 or IPv6 address, or a host name) and `port` (0: any free port), for the versions of
    /// [`Config::protocol`](super::super::Config::protocol).
    pub fn new(host: &str, port: u16) -> ListenAddress {
        ListenAddress {
            host: Some(host.to_owned()),
            port,
            version: None,
            plain: false,
            allowed: Vec::new(),
            http_only: false,
        }
    }

    /// The same, where only `version` is answered.
    #[must_use]
    pub fn with_version(self, version: ServedVersion) -> ListenAddress {
        ListenAddress { version: Some(version), ..self }
    }

    /// The same, on `host` if the address has no host.
    #[must_use]
    pub fn or_host(self, host: &str) -> ListenAddress {
        ListenAddress { host: self.host.or_else(|| Some(host.to_owned())), ..self }
    }

    /// The same, without TLS, also if the server has keys.
    #[must_use]
    pub fn with_plain(self) -> ListenAddress {
        ListenAddress { plain: true, ..self }
    }

    /// The same, where the state of the server is shown over HTTP, and no other protocol is served.
    #[must_use]
    pub fn for_http(self) -> ListenAddress {
        ListenAddress { http_only: true, ..self }
    }

    /// Whether only HTTP is served.
    pub fn is_http_only(&self) -> bool {
        self.http_only
    }

    /// Whether clients connect without TLS, also if the server has keys.
    pub fn plain(&self) -> bool {
        self.plain
    }

    /// The same, where only clients of these networks may connect; with none, those that [`Config::allow`] has.
    ///
    /// [`Config::allow`]: super::super::Config::allow
    #[must_use]
    pub fn with_allowed(self, allowed: Vec<IpNetwork>) -> ListenAddress {
        ListenAddress { allowed, ..self }
    }

    /// The networks whose clients may connect. If there are none, the networks of [`Config::allow`](super::super::Config::allow).
    pub fn allowed(&self) -> &[IpNetwork] {
        &self.allowed
    }

    /// The host.
    pub fn host(&self) -> &str {
        self.host.as_deref().unwrap_or(ListenAddress::DEFAULT_HOST)
    }

    /// The port; 0: any free port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The only version that is answered there; `None`: the versions of [`Config::protocol`](super::super::Config::protocol).
    pub fn version(&self) -> Option<ServedVersion> {
        self.version
    }
}

/// A text that is not a valid [`ListenAddress`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ParseListenError {
    /// The part before `=VERSION` is no port, and no host and port.
    #[error("expected an address such as 50052, 0.0.0.0:50052, [fd00::5]:50052 or 50053=7, got {0:?}")]
    Address(String),
    /// The version is unknown.
    #[error(transparent)]
    Version(#[from] ParseVersionError),
    /// What follows `allow:` is no network.
    #[error(transparent)]
    Network(#[from] ParseNetworkError),
    /// `plain` or a version is given twice.
    #[error("{0:?}: `plain` and a version may each be given once")]
    Repeated(String),
}

impl FromStr for ListenAddress {
    type Err = ParseListenError;

    fn from_str(text: &str) -> Result<ListenAddress, ParseListenError> {
        let (address, items) = text.split_once('=').map_or((text, None), |(address, items)| (address, Some(items)));
        let (host, port) = split_host_and_port(address).ok_or_else(|| ParseListenError::Address(text.to_owned()))?;
        let (mut version, mut plain, mut allowed) = (None, false, Vec::new());
        for item in items.into_iter().flat_map(|items| items.split(',')) {
            let is_repeated = if let Some(network) = item.strip_prefix(ALLOW) {
                allowed.push(network.parse()?);
                false
            } else if item == PLAIN {
                std::mem::replace(&mut plain, true)
            } else {
                version.replace(item.parse()?).is_some()
            };
            if is_repeated {
                return Err(ParseListenError::Repeated(text.to_owned()));
            }
        }
        Ok(ListenAddress { host: host.map(str::to_owned), port, version, plain, allowed, http_only: false })
    }
}

/// Splits `[HOST:]PORT`. The brackets around an IPv6 address are removed.
fn split_host_and_port(text: &str) -> Option<(Option<&str>, u16)> {
    // `parse` alone accepts a leading `+`.
    let port = |text: &str| text.parse().ok().filter(|_| text.bytes().all(|b| b.is_ascii_digit()));
    let Some((host, digits)) = text.rsplit_once(':') else { return Some((None, port(text)?)) };
    let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(bare) => text.parse::<SocketAddrV6>().is_ok().then_some(bare)?,
        None => (!host.is_empty() && !host.contains([':', '[', ']']) && !host.contains(char::is_whitespace))
            .then_some(host)?,
    };
    Some((Some(host), port(digits)?))
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Some(host) if host.contains(':') && !host.starts_with('[') => write!(f, "[{host}]:")?,
            Some(host) => write!(f, "{host}:")?,
            None => {}
        }
        write!(f, "{}", self.port)?;
        let items = [self.plain.then(|| PLAIN.to_owned()), self.version.map(|version| version.to_string())];
        let items = items.into_iter().flatten().chain(self.allowed.iter().map(|network| format!("{ALLOW}{network}")));
        let items = items.collect::<Vec<_>>().join(",");
        if items.is_empty() { Ok(()) } else { write!(f, "={items}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_port_with_an_optional_host_and_version() {
        use ServedVersion::{V7_0, V8_0};
        for (text, host, port, version) in [
            ("50052", None, 50052, None),
            ("0", None, 0, None),
            ("50053=7", None, 50053, Some(V7_0)),
            ("50053=plain", None, 50053, None),
            ("0.0.0.0:1=plain,7.0", Some("0.0.0.0"), 1, Some(V7_0)),
            ("0.0.0.0:50052", Some("0.0.0.0"), 50052, None),
            ("gpu-2.lan:65535=8.0.1", Some("gpu-2.lan"), 65535, Some(V8_0)),
            ("[::1]:50052", Some("::1"), 50052, None),
            ("[fe80::1%2]:7=7.0", Some("fe80::1%2"), 7, Some(V7_0)),
        ] {
            let plain = text.contains(PLAIN);
            let want = ListenAddress {
                host: host.map(str::to_owned),
                port,
                version,
                plain,
                allowed: Vec::new(),
                http_only: false,
            };
            let got: ListenAddress = text.parse().unwrap();
            assert_eq!(got, want, "{text}");
            assert_eq!(got.to_string().parse(), Ok(want), "{text}");
            assert_eq!(got.host(), host.unwrap_or("127.0.0.1"), "{text}");
            assert_eq!(got.or_host("::").host(), host.unwrap_or("::"), "{text}");
        }
        for text in [
            "",
            "=7",
            ":1",
            "a",
            "a:",
            "a:b",
            "a:65536",
            "65536",
            "-1",
            "+1",
            "a:+1",
            "1.2.3.4",
            "::1",
            "::1:50052",
            "[::1]",
            "[::1]:",
            "[a]:1",
            "[::1]1",
            "[1.2.3.4]:1",
            "a b:1",
            "50052 ",
        ] {
            let error = text.parse::<ListenAddress>().unwrap_err();
            assert_eq!(error, ParseListenError::Address(text.to_owned()), "{text}");
        }
        for text in ["50052=", "50052=9", "a:1=7.5", "1=7=8x", "1=plain,", "1=,plain", "1=Plain"] {
            assert!(matches!(text.parse::<ListenAddress>(), Err(ParseListenError::Version(_))), "{text}");
        }
        for text in ["1=7,8", "1=plain,plain", "1=plain,7,plain", "1=7,7"] {
            assert_eq!(text.parse::<ListenAddress>(), Err(ParseListenError::Repeated(text.to_owned())), "{text}");
        }
    }

    #[test]
    fn an_address_may_name_the_networks_of_its_clients() {
        for (text, shown) in [
            ("50053=allow:10.0.0.0/24", "50053=allow:10.0.0.0/24"),
            (
                "0.0.0.0:50053=allow:10.0.0.7,7,plain,allow:fd00::/8",
                "0.0.0.0:50053=plain,7.0,allow:10.0.0.7,allow:fd00::/8",
            ),
        ] {
            let address: ListenAddress = text.parse().unwrap();
            assert_eq!(address.to_string(), shown);
            assert_eq!(shown.parse(), Ok(address), "{text}");
        }
        for text in ["1=allow:", "1=allow:7", "1=allow:10.0.0.0/33", "1=plain,allow:gpu-2"] {
            assert!(matches!(text.parse::<ListenAddress>(), Err(ParseListenError::Network(_))), "{text}");
        }
    }
}

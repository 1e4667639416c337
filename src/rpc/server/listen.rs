//! Sockets: where a server listens, and how accepted connections behave.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use thiserror::Error;

/// Connections that the system holds for us before we accept them.
const BACKLOG: i32 = 1024;

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
        /// The address.
        addr: SocketAddr,
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

/// Listens on a host, given as IPv4 or IPv6 address or as a name. Of a name's addresses the IPv4 ones come first:
/// llama.cpp's clients know no others. Port 0: the system picks one.
pub(super) fn listen(host: &str, port: u16) -> Result<TcpListener, BindError> {
    let failed = |source| BindError::Host { host: host.to_owned(), source };
    let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    let mut addrs: Vec<_> = (bare, port).to_socket_addrs().map_err(failed)?.collect();
    addrs.sort_by_key(SocketAddr::is_ipv6);
    let mut last = None;
    for addr in addrs {
        match open(addr) {
            Ok(listener) => return Ok(listener),
            Err(source) => last = last.or(Some(BindError::Listen { addr, source })),
        }
    }
    Err(last.unwrap_or_else(|| failed(io::ErrorKind::NotFound.into())))
}

fn open(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    if addr.is_ipv6() {
        // `::` serves IPv4 too.
        socket.set_only_v6(false)?;
    }
    // A restarted server need not wait until the old one's connections are forgotten. Elsewhere the option would let
    // two servers share a port.
    #[cfg(unix)]
    socket.set_reuse_address(true)?;
    socket.bind(&addr.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// What every accepted connection gets: small messages leave at once, and a peer that is gone is noticed in the end.
pub(super) fn configure(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new().with_time(Duration::from_secs(60)).with_interval(Duration::from_secs(15));
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
}

/// Where a listener at `addr` can be reached from this machine.
pub(super) fn reachable(mut addr: SocketAddr) -> SocketAddr {
    if addr.ip().is_unspecified() {
        addr.set_ip(match addr.ip() {
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    addr
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_addresses_or_names() {
        for host in ["127.0.0.1", "localhost"] {
            let addr = listen(host, 0).unwrap().local_addr().unwrap();
            assert!(addr.ip().is_loopback() && addr.port() != 0, "{host}: {addr}");
        }
        assert!(matches!(listen("host name", 0), Err(BindError::Host { .. })));
        // TEST-NET-1 of RFC 5737: nobody's address.
        assert!(matches!(listen("192.0.2.1", 0), Err(BindError::Listen { .. })));
    }

    #[test]
    fn a_port_is_served_once() {
        let first = listen("127.0.0.1", 0).unwrap();
        let port = first.local_addr().unwrap().port();
        assert!(matches!(listen("127.0.0.1", port), Err(BindError::Listen { .. })));
    }

    #[test]
    fn ipv6_where_the_machine_has_it() {
        if TcpListener::bind("[::1]:0").is_err() {
            return;
        }
        for host in ["::1", "[::1]", "::"] {
            let listener = listen(host, 0).unwrap();
            let addr = listener.local_addr().unwrap();
            TcpStream::connect(reachable(addr)).unwrap();
            if host == "::" {
                TcpStream::connect((Ipv4Addr::LOCALHOST, addr.port())).unwrap();
            }
        }
    }
}

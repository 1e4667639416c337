//! Connections over TCP, on non-blocking sockets.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use super::poll;
use super::{
    Address, Connection, Deadline, DialError, Interest, Listen, ListenError, PeerAddr, Transport, TransportError,
};

/// Connections that the system holds for a listener before they are accepted.
const BACKLOG: i32 = 1024;

/// The longest that a thread which wakes a listener may take.
const WAKE: Duration = Duration::from_secs(1);

/// A TCP socket.
#[derive(Debug)]
struct Tcp {
    stream: TcpStream,
    peer: SocketAddr,
}

impl Tcp {
    /// Sets a connected socket up: attempts never block, small messages leave at once, and a peer whose machine is gone is
    /// noticed in the end also where nothing is due for long.
    fn new(stream: TcpStream, peer: SocketAddr) -> io::Result<Tcp> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let keepalive = TcpKeepalive::new().with_time(Duration::from_secs(60)).with_interval(Duration::from_secs(15));
        SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
        Ok(Tcp { stream, peer })
    }
}

/// One attempt: `None` where it would block.
fn attempt<T>(mut work: impl FnMut() -> io::Result<T>) -> Result<Option<T>, TransportError> {
    loop {
        match work() {
            Ok(done) => return Ok(Some(done)),
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(TransportError::system(e)),
        }
    }
}

/// A gathered write that raises no SIGPIPE where the peer is gone: the standard library's `write` does not, its
/// `write_vectored` does on Linux, and a program that has given the signal its default back would die of it.
#[cfg(target_os = "linux")]
fn write_vectored(stream: &TcpStream, parts: &[IoSlice<'_>]) -> io::Result<usize> {
    use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
    Ok(sendmsg(stream, parts, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)?)
}

/// Elsewhere sockets are set up so that none is raised, or there is no such signal.
#[cfg(not(target_os = "linux"))]
fn write_vectored(mut stream: &TcpStream, parts: &[IoSlice<'_>]) -> io::Result<usize> {
    stream.write_vectored(parts)
}

impl Transport for Tcp {
    fn try_read(&self, dst: &mut [u8]) -> Result<Option<usize>, TransportError> {
        attempt(|| (&self.stream).read(dst))
    }

    fn try_write(&self, src: &[IoSlice<'_>]) -> Result<Option<usize>, TransportError> {
        attempt(|| match src {
            [one] => (&self.stream).write(one),
            many => write_vectored(&self.stream, many),
        })
    }

    fn wait(&self, interest: Interest, deadline: &Deadline) -> Result<bool, TransportError> {
        poll::wait(&self.stream, interest, deadline)
    }

    /// Asks the system with `poll`, which takes no lock: a peek at the bytes would take the socket's, for which a sender would
    /// have to wait.
    fn readable(&self) -> bool {
        poll::readable(&self.stream)
    }

    fn try_finish(&self) -> Result<bool, TransportError> {
        self.stream.shutdown(Shutdown::Write).map_err(TransportError::system)?;
        Ok(true)
    }

    fn abort(&self) {
        // Fails where the peer was faster.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    fn peer(&self) -> PeerAddr {
        PeerAddr::Ip(self.peer)
    }
}

/// Connects to an address.
pub(super) fn connect(addr: SocketAddr, timeout: Duration) -> Result<Connection, DialError> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    socket.connect_timeout(&addr.into(), timeout)?;
    let stream = TcpStream::from(socket);
    // Where nobody listens on a port of this machine that the system also gives to those that connect, it may give it to this
    // very socket, which is then connected to itself.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(DialError::OwnSocket);
    }
    Ok(Connection::new(Tcp::new(stream, addr)?))
}

/// A listening TCP socket.
#[derive(Debug)]
pub(super) struct Listener {
    socket: TcpListener,
    addr: SocketAddr,
}

/// Listens on a host. Of a name's addresses the IPv4 ones come first: llama.cpp's clients know no others.
pub(super) fn listen(host: &str, port: u16) -> Result<Listener, ListenError> {
    let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    let mut addrs: Vec<_> = (bare, port).to_socket_addrs().map_err(ListenError::Host)?.collect();
    addrs.sort_by_key(SocketAddr::is_ipv6);
    let mut last = None;
    for addr in addrs {
        match open(addr) {
            Ok(socket) => {
                let addr = socket.local_addr().map_err(ListenError::Host)?;
                return Ok(Listener { socket, addr });
            }
            Err(source) => last = last.or(Some(ListenError::Address { addr: Address::Tcp(addr), source })),
        }
    }
    Err(last.unwrap_or_else(|| ListenError::Host(ErrorKind::NotFound.into())))
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
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

impl Listen for Listener {
    fn accept(&self, deadline: &Deadline) -> Result<Option<Connection>, TransportError> {
        loop {
            match attempt(|| self.socket.accept()) {
                // Setting a socket up fails where its client is gone already.
                Ok(Some((stream, peer))) => return Ok(Tcp::new(stream, peer).ok().map(Connection::new)),
                // The client was gone before it was accepted.
                Err(TransportError::Reset(_)) => return Ok(None),
                Err(e) => return Err(e),
                Ok(None) => {}
            }
            if !poll::wait(&self.socket, Interest::Read, deadline)? {
                return Ok(None);
            }
        }
    }

    fn local_addr(&self) -> Address {
        Address::Tcp(self.addr)
    }

    fn waker(&self) -> Box<dyn Fn() + Send + Sync> {
        let addr = reachable(self.addr);
        // Where nothing can connect, the listener is not waiting.
        Box::new(move || _ = connect(addr, WAKE))
    }
}

/// Where a listener at `addr` can be reached from this machine.
fn reachable(mut addr: SocketAddr) -> SocketAddr {
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
            let addr = listen(host, 0).unwrap().addr;
            assert!(addr.ip().is_loopback() && addr.port() != 0, "{host}: {addr}");
        }
        assert!(matches!(listen("host name", 0), Err(ListenError::Host(_))));
        // TEST-NET-1 of RFC 5737: nobody's address.
        assert!(matches!(listen("192.0.2.1", 0), Err(ListenError::Address { .. })));
    }

    #[test]
    fn a_port_is_served_once() {
        let first = listen("127.0.0.1", 0).unwrap();
        let port = first.addr.port();
        assert!(matches!(listen("127.0.0.1", port), Err(ListenError::Address { .. })));
    }

    #[test]
    fn ipv6_where_the_machine_has_it() {
        if TcpListener::bind("[::1]:0").is_err() {
            return;
        }
        for host in ["::1", "[::1]", "::"] {
            let listener = listen(host, 0).unwrap();
            let addr = listener.addr;
            TcpStream::connect(reachable(addr)).unwrap();
            if host == "::" {
                TcpStream::connect((Ipv4Addr::LOCALHOST, addr.port())).unwrap();
            }
        }
    }

    #[test]
    fn a_listener_waits_no_longer_than_its_deadline_and_is_woken_from_elsewhere() {
        let listener = listen("127.0.0.1", 0).unwrap();
        assert!(listener.accept(&Deadline::after(Duration::from_millis(1))).unwrap().is_none());
        listener.waker()();
        assert!(listener.accept(&Deadline::after(Duration::from_secs(30))).unwrap().is_some());
    }
}

//! TCP transport on non-blocking sockets.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use super::poll;
use super::tls::{ClientTls, ServerTls, TlsTransport};
use super::{
    Address, BoundSocket, Connection, Deadline, DialError, Interest, Listen, ListenError, PeerAddr, Transport,
    TransportError,
};

/// Listen backlog: connections that the system queues before they are accepted.
const BACKLOG: i32 = 1024;

/// Timeout of the connection that wakes a listener.
const WAKE_TIMEOUT: Duration = Duration::from_secs(1);

/// Finds a peer whose machine has vanished within 2 minutes: after 60 s without traffic, four probes that are 15 s apart.
const KEEPALIVE: TcpKeepalive =
    TcpKeepalive::new().with_time(Duration::from_secs(60)).with_interval(Duration::from_secs(15)).with_retries(4);

/// A TCP socket.
#[derive(Debug)]
pub(super) struct TcpTransport {
    stream: TcpStream,
    peer: SocketAddr,
}

impl TcpTransport {
    /// Configures a connected socket: non-blocking, TCP_NODELAY so that small messages are sent at once, and TCP keepalive so
    /// that the loss of the peer's machine is detected even if no reply is outstanding.
    fn new(stream: TcpStream, peer: SocketAddr) -> io::Result<TcpTransport> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        SockRef::from(&stream).set_tcp_keepalive(&KEEPALIVE)?;
        Ok(TcpTransport { stream, peer })
    }
}

/// Two connected sockets.
#[cfg(test)]
pub(super) fn socket_pair() -> (TcpTransport, TcpTransport) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, peer) = listener.accept().unwrap();
    let local = near.peer_addr().unwrap();
    (TcpTransport::new(near, local).unwrap(), TcpTransport::new(far, peer).unwrap())
}

/// Makes one attempt. `None`: it would block.
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

/// A gathered write that raises no SIGPIPE after the peer has closed the connection. The standard library's `write` suppresses
/// the signal; its `write_vectored` does not on Linux, and would kill a program that has restored the signal's default action.
#[cfg(target_os = "linux")]
fn write_vectored(stream: &TcpStream, parts: &[IoSlice<'_>]) -> io::Result<usize> {
    use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
    Ok(sendmsg(stream, parts, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)?)
}

/// On other systems sockets are configured to raise no SIGPIPE, or the signal does not exist.
#[cfg(not(target_os = "linux"))]
fn write_vectored(mut stream: &TcpStream, parts: &[IoSlice<'_>]) -> io::Result<usize> {
    stream.write_vectored(parts)
}

impl Transport for TcpTransport {
    fn try_read(&self, dst: &mut [u8]) -> Result<Option<usize>, TransportError> {
        attempt(|| (&self.stream).read(dst))
    }

    fn try_write(&self, src: &[IoSlice<'_>]) -> Result<Option<usize>, TransportError> {
        attempt(|| match src {
            [one] => (&self.stream).write(one),
            parts => write_vectored(&self.stream, parts),
        })
    }

    fn wait(&self, interest: Interest, deadline: &Deadline) -> Result<bool, TransportError> {
        poll::wait(&self.stream, interest, deadline)
    }

    /// Uses `poll`, which takes no lock: peeking at the data would take the socket's lock and make a sender wait.
    fn readable(&self) -> bool {
        poll::readable(&self.stream)
    }

    fn hung_up(&self) -> bool {
        poll::hung_up(&self.stream)
    }

    /// TCP_USER_TIMEOUT. Without it, keepalive probes nothing while sent bytes are not acknowledged, and the system retries
    /// these for a quarter of an hour. It takes the place of the number of keepalive probes.
    fn set_loss_timeout(&self, timeout: Duration) {
        // Fails if the peer has already closed the connection, which the next read reports.
        #[cfg(any(target_os = "linux", target_os = "android"))]
        let _ = SockRef::from(&self.stream).set_tcp_user_timeout(Some(timeout));
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        let _ = timeout;
    }

    fn try_finish(&self) -> Result<bool, TransportError> {
        self.stream.shutdown(Shutdown::Write).map_err(TransportError::system)?;
        Ok(true)
    }

    fn abort(&self) {
        // Fails if the peer has already closed the connection.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    fn peer(&self) -> PeerAddr {
        PeerAddr::Ip(self.peer)
    }

    fn local_addr(&self) -> Option<SocketAddr> {
        self.stream.local_addr().ok()
    }
}

/// Connects to an address.
pub(super) fn connect(addr: SocketAddr, timeout: Duration, tls: Option<&ClientTls>) -> Result<Connection, DialError> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    socket.connect_timeout(&addr.into(), timeout)?;
    let stream = TcpStream::from(socket);
    // Self-connection: a local port without a listener may lie in the range of ephemeral ports. The system may then choose the
    // same port for this socket and connect it to itself.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(DialError::OwnSocket);
    }
    let transport = TcpTransport::new(stream, addr)?;
    match tls {
        None => Ok(Connection::new(transport)),
        Some(tls) => {
            TlsTransport::client(transport, tls).map(Connection::new).map_err(|e| DialError::Tls(e.to_string()))
        }
    }
}

/// A listening TCP socket.
#[derive(Debug)]
pub(super) struct Listener {
    socket: TcpListener,
    addr: SocketAddr,
    tls: Option<ServerTls>,
}

/// A listening socket on a host. The IPv4 addresses of a name are tried first, because llama.cpp's clients support no others.
pub(super) fn bind(host: &str, port: u16) -> Result<BoundSocket, ListenError> {
    let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    let mut addrs: Vec<_> = (bare, port).to_socket_addrs().map_err(ListenError::Host)?.collect();
    addrs.sort_by_key(SocketAddr::is_ipv6);
    let mut last = None;
    for addr in addrs {
        match bind_at(addr) {
            Ok(socket) => return Ok(socket),
            Err(e) => last = last.or(Some(e)),
        }
    }
    Err(last.unwrap_or_else(|| ListenError::Host(ErrorKind::NotFound.into())))
}

/// A listening socket on one address of this machine.
pub(super) fn bind_at(addr: SocketAddr) -> Result<BoundSocket, ListenError> {
    let socket = open(addr).map(BoundSocket);
    socket.map_err(|error| ListenError::Address { addr: Address::Tcp(addr), error })
}

fn open(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    if addr.is_ipv6() {
        // `::` accepts IPv4 connections, too.
        socket.set_only_v6(false)?;
    }
    // SO_REUSEADDR: a restarted server does not have to wait for the TIME_WAIT of the old connections. On other systems the
    // option would let two servers share a port.
    #[cfg(unix)]
    socket.set_reuse_address(true)?;
    socket.bind(&addr.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

impl Listener {
    pub(super) fn new(BoundSocket(socket): BoundSocket, tls: Option<ServerTls>) -> io::Result<Listener> {
        Ok(Listener { addr: socket.local_addr()?, socket, tls })
    }

    /// The connection of an accepted socket. `None`: the client has already disconnected.
    fn connection(&self, stream: TcpStream, peer: SocketAddr) -> Option<Connection> {
        let transport = TcpTransport::new(stream, peer).ok()?;
        match &self.tls {
            None => Some(Connection::new(transport)),
            Some(tls) => TlsTransport::server(transport, tls).ok().map(Connection::new),
        }
    }
}

impl Listen for Listener {
    fn accept(&self, deadline: &Deadline) -> Result<Option<Connection>, TransportError> {
        loop {
            match attempt(|| self.socket.accept()) {
                // Configuring the socket fails if the client has already disconnected.
                Ok(Some((stream, peer))) => return Ok(self.connection(stream, peer)),
                // The client disconnected before it was accepted.
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
        let addr = loopback_addr(self.addr);
        // If the connection fails, no thread waits in `accept`.
        Box::new(move || _ = connect(addr, WAKE_TIMEOUT, None))
    }
}

/// The address at which this machine reaches a listener at `addr`: the loopback address for an unspecified one.
fn loopback_addr(mut addr: SocketAddr) -> SocketAddr {
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
    fn a_host_may_be_an_address_or_a_name() {
        for host in ["127.0.0.1", "localhost"] {
            let addr = bind(host, 0).unwrap().0.local_addr().unwrap();
            assert!(addr.ip().is_loopback() && addr.port() != 0, "{host}: {addr}");
        }
        assert!(matches!(bind("host name", 0), Err(ListenError::Host(_))));
        // TEST-NET-1 of RFC 5737: an address that no machine has.
        assert!(matches!(bind("192.0.2.1", 0), Err(ListenError::Address { .. })));
    }

    #[test]
    fn a_second_listener_on_the_same_port_fails() {
        let first = bind("127.0.0.1", 0).unwrap();
        let port = first.0.local_addr().unwrap().port();
        assert!(matches!(bind("127.0.0.1", port), Err(ListenError::Address { .. })));
    }

    #[test]
    fn listens_on_ipv6_if_the_machine_has_it() {
        if TcpListener::bind("[::1]:0").is_err() {
            return;
        }
        for host in ["::1", "[::1]", "::"] {
            let listener = bind(host, 0).unwrap();
            let addr = listener.0.local_addr().unwrap();
            TcpStream::connect(loopback_addr(addr)).unwrap();
            if host == "::" {
                TcpStream::connect((Ipv4Addr::LOCALHOST, addr.port())).unwrap();
            }
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_vanished_peer_is_found_by_keepalive_and_by_the_loss_timeout() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let transport = TcpTransport::new(TcpStream::connect(addr).unwrap(), addr).unwrap();
        let socket = SockRef::from(&transport.stream);
        assert!(socket.keepalive().unwrap());
        let (time, interval) = (socket.tcp_keepalive_time().unwrap(), socket.tcp_keepalive_interval().unwrap());
        assert_eq!(time + interval * socket.tcp_keepalive_retries().unwrap(), Duration::from_secs(120));
        assert_eq!(socket.tcp_user_timeout().unwrap(), None);
        transport.set_loss_timeout(Duration::from_secs(130));
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(Duration::from_secs(130)));
    }

    #[test]
    fn accept_ends_at_its_deadline_and_by_its_waker() {
        let listener = Listener::new(bind("127.0.0.1", 0).unwrap(), None).unwrap();
        assert!(listener.accept(&Deadline::after(Duration::from_millis(1))).unwrap().is_none());
        listener.waker()();
        assert!(listener.accept(&Deadline::after(Duration::from_secs(30))).unwrap().is_some());
    }
}

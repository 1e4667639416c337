//! Listening sockets that outlive the server that accepts on them: a supervisor binds them and sends them to each worker.

use std::net::TcpListener;

/// A socket that listens on an address of this machine. The system queues the connections of clients until a server accepts
/// them.
#[derive(Debug)]
pub struct BoundSocket(pub(super) TcpListener);

#[cfg(unix)]
impl std::os::fd::AsFd for BoundSocket {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// For descriptors that another process has sent.
#[cfg(unix)]
impl TryFrom<std::os::fd::OwnedFd> for BoundSocket {
    type Error = std::io::Error;

    /// # Errors
    /// The descriptor is not a listening TCP socket.
    fn try_from(descriptor: std::os::fd::OwnedFd) -> std::io::Result<BoundSocket> {
        use std::io::{Error, ErrorKind};
        let socket = socket2::Socket::from(descriptor);
        // Apple's systems cannot report whether a socket listens; there the first `accept` fails.
        #[cfg(not(target_vendor = "apple"))]
        let listens = rustix::net::sockopt::socket_acceptconn(&socket)?;
        #[cfg(target_vendor = "apple")]
        let listens = true;
        let is_ip = socket.local_addr()?.as_socket().is_some();
        if !listens || !is_ip || socket.r#type()? != socket2::Type::STREAM {
            return Err(Error::new(ErrorKind::InvalidInput, "the descriptor is not a listening TCP socket"));
        }
        // Non-blocking mode belongs to the open socket, which other processes share; a server's `accept` relies on it.
        socket.set_nonblocking(true)?;
        Ok(BoundSocket(socket.into()))
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::net::{TcpStream, UdpSocket};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixListener;

    #[test]
    fn only_listening_tcp_sockets_are_taken_over() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let path = std::env::temp_dir().join(format!("fanout-bound-socket-{}", std::process::id()));
        let local = UnixListener::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let others: [OwnedFd; 4] = [
            stream.into(),
            local.into(),
            UdpSocket::bind("127.0.0.1:0").unwrap().into(),
            std::io::pipe().unwrap().0.into(),
        ];
        for other in others {
            let shown = format!("{other:?}");
            assert!(BoundSocket::try_from(other).is_err(), "{shown}");
        }
        let addr = listener.local_addr().unwrap();
        let taken = BoundSocket::try_from(OwnedFd::from(listener)).unwrap();
        assert_eq!(taken.0.local_addr().unwrap(), addr);
    }
}

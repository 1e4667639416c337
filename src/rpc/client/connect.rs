//! From a name to a connection whose server speaks our version.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use thiserror::Error;

use super::Options;
use crate::device::DeviceError;
use crate::rpc::wire::ext::Greeting;
use crate::rpc::wire::{
    Command, Hello, PROTOCOL_VERSION, RESPONSE_HEADER, Request, Response, ResponseHeader, Version, WireError,
};

/// The longest reply to a HELLO: version, padding and capabilities.
const HELLO_REPLY: usize = 28;

/// Why there is no connection to a server.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// A text that names no endpoint.
    #[error("expected an endpoint such as 10.0.0.5:50052, got {0:?}")]
    Name(String),
    /// The host's name is not known.
    #[error("{endpoint}: no such host: {source}")]
    Host {
        /// As it was given.
        endpoint: String,
        /// The resolver's word.
        source: io::Error,
    },
    /// Nobody answers there.
    #[error("cannot connect to {endpoint}: {source}; is a server running there, on that port?")]
    Connect {
        /// As it was given.
        endpoint: String,
        /// The system's word.
        source: io::Error,
    },
    /// Something answers, and not as a server of this protocol does.
    #[error("{endpoint} does not answer as an RPC server of version {PROTOCOL_VERSION}: {reason}")]
    Handshake {
        /// As it was given.
        endpoint: String,
        /// What was seen.
        reason: String,
    },
    /// A server of another version.
    #[error("{endpoint} speaks version {theirs} of the RPC protocol, this client {PROTOCOL_VERSION}: update {}", older(*.theirs))]
    Version {
        /// As it was given.
        endpoint: String,
        /// Its version.
        theirs: Version,
    },
    /// It was lost, or said something impossible, when it was asked for its devices.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

fn older(theirs: Version) -> &'static str {
    if (theirs.major, theirs.minor) > (PROTOCOL_VERSION.major, PROTOCOL_VERSION.minor) {
        "this client"
    } else {
        "the server"
    }
}

/// Connects and shakes hands. A fanout server introduces itself.
pub(super) fn connect(endpoint: &str, options: &Options) -> Result<(TcpStream, Option<Greeting>), ConnectError> {
    let until = Instant::now() + options.connect_timeout;
    let named = endpoint.rsplit_once(':').filter(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    named.ok_or_else(|| ConnectError::Name(endpoint.to_owned()))?;
    let addrs = endpoint.to_socket_addrs();
    let addrs = addrs.map_err(|source| ConnectError::Host { endpoint: endpoint.to_owned(), source })?;
    let mut last = io::Error::from(ErrorKind::AddrNotAvailable);
    for addr in addrs {
        match open(addr, until) {
            Ok(mut stream) => {
                let greeting = handshake(endpoint, &mut stream, until, options.connect_timeout)?;
                return Ok((stream, greeting));
            }
            Err(e) => last = e,
        }
    }
    Err(ConnectError::Connect { endpoint: endpoint.to_owned(), source: last })
}

fn open(addr: SocketAddr, until: Instant) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    socket.connect_timeout(&addr.into(), left(until)?)?;
    let stream = TcpStream::from(socket);
    stream.set_nodelay(true)?;
    // Where no reply is due for long, a server that is gone is noticed too.
    let keepalive = TcpKeepalive::new().with_time(Duration::from_secs(60)).with_interval(Duration::from_secs(15));
    SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
    Ok(stream)
}

/// What is left until then; an error when that is nothing, because the system takes no timeout of zero.
pub(super) fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

fn handshake(
    endpoint: &str,
    stream: &mut TcpStream,
    until: Instant,
    patience: Duration,
) -> Result<Option<Greeting>, ConnectError> {
    let failed = |reason: String| ConnectError::Handshake { endpoint: endpoint.to_owned(), reason };
    let io = |e: io::Error| {
        failed(match e.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => format!(
                "no reply to HELLO within {patience:?}; it may be busy with another client, which llama.cpp's servers take \
                 one at a time"
            ),
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => {
                "it closed the connection on HELLO; it may be older than version 1.0, or its log says why".to_owned()
            }
            _ => e.to_string(),
        })
    };
    let wire = |e: WireError| failed(e.to_string());
    let mut out = Vec::new();
    Request::Hello(Hello { conn_caps: Some([0; 24]) }).encode(&mut out);
    stream.set_write_timeout(Some(left(until).map_err(io)?)).map_err(io)?;
    stream.write_all(&out).map_err(io)?;
    let mut header = [0; RESPONSE_HEADER];
    read(stream, &mut header, until).map_err(io)?;
    let size = ResponseHeader::decode(&header).size;
    let size = Command::Hello.response_size(size, HELLO_REPLY as u64).map_err(wire)?;
    let mut body = [0; HELLO_REPLY];
    let body = body.get_mut(..size).ok_or_else(|| failed("a reply that is too long".to_owned()))?;
    read(stream, body, until).map_err(io)?;
    let Response::Hello(reply) = Response::decode(Command::Hello, body).map_err(wire)? else {
        return Err(DeviceError::Bug("the decoder took one reply for another".to_owned()).into());
    };
    if !PROTOCOL_VERSION.accepts(reply.version) {
        return Err(ConnectError::Version { endpoint: endpoint.to_owned(), theirs: reply.version });
    }
    if reply.conn_caps.is_none() {
        return Err(failed("a reply to HELLO as before version 4.0".to_owned()));
    }
    Ok(Greeting::from_byte(reply.greeting))
}

/// Fills `buf` until then, however slowly its bytes drip.
pub(super) fn read(stream: &mut TcpStream, mut buf: &mut [u8], until: Instant) -> io::Result<()> {
    while !buf.is_empty() {
        stream.set_read_timeout(Some(left(until)?))?;
        match stream.read(buf) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => buf = &mut buf[n..],
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

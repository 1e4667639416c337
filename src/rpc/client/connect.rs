//! From a name to a connection whose server speaks a version that we speak too.

use std::io::{self, ErrorKind, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use thiserror::Error;

use super::Options;
use crate::device::DeviceError;
use crate::rpc::socket::{left, read};
use crate::rpc::wire::ext::{Greeting, State};
use crate::rpc::wire::{
    Command, Dialect, GetAlignment, Hello, HelloForm, PROTOCOL_VERSION, RESPONSE_HEADER, Request, Response,
    ResponseHeader, SERVED, Version, WireError,
};

/// The pause after the first attempt to connect; each is twice the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// The longest of them.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// The longest reply to a HELLO: version, padding and capabilities.
const HELLO_REPLY: usize = 28;

/// Why there is no connection to a server.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// A text that names no endpoint.
    #[error("expected an endpoint such as 10.0.0.5:50052 or [fd00::5]:50052, got {0:?}")]
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
    /// The server takes nobody now: it has as many clients as it may have.
    #[error(
        "{endpoint} is full: it has as many clients as it takes (rpc-server --max-connections); try again when one has \
         left, or use another server"
    )]
    Full {
        /// As it was given.
        endpoint: String,
    },
    /// The server takes nobody any more.
    #[error("{endpoint} is about to end and takes no more clients; use another server, or try again when it is back")]
    Draining {
        /// As it was given.
        endpoint: String,
    },
    /// Something takes connections, and does not answer.
    #[error(
        "{endpoint}: no reply to {command} within {patience:?}; it may be busy with another client, which llama.cpp's servers \
         take one at a time"
    )]
    Silent {
        /// As it was given.
        endpoint: String,
        /// What it was asked.
        command: &'static str,
        /// How long it had for it.
        patience: Duration,
    },
    /// Something takes connections, and closes them.
    #[error("{endpoint} closed the connection on {tried}; its log says why")]
    Closed {
        /// As it was given.
        endpoint: String,
        /// What was said to it, each time on a new connection.
        tried: &'static str,
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
    #[error("{endpoint} speaks version {theirs} of the RPC protocol, this client {SERVED}: update {}", older(*.theirs))]
    Version {
        /// As it was given.
        endpoint: String,
        /// Its version.
        theirs: Version,
    },
    /// It was lost, or said something impossible, when it was asked for its devices.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// It has been tried for [`Options::retry`].
    #[error("{last}; {attempts} attempts in {elapsed:.1?}")]
    GivenUp {
        /// How often.
        attempts: u32,
        /// For how long.
        elapsed: Duration,
        /// Why not, the last time.
        last: Box<ConnectError>,
    },
}

impl ConnectError {
    /// What it means that a server's answer to `command` could not be had.
    pub(super) fn unheard(endpoint: &str, command: &'static str, patience: Duration, e: &io::Error) -> ConnectError {
        use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, TimedOut, UnexpectedEof, WouldBlock};
        let endpoint = endpoint.to_owned();
        match e.kind() {
            WouldBlock | TimedOut => ConnectError::Silent { endpoint, command, patience },
            UnexpectedEof | ConnectionReset | ConnectionAborted | BrokenPipe => {
                ConnectError::Closed { endpoint, tried: command }
            }
            _ => ConnectError::Handshake { endpoint, reason: format!("{command}: {e}") },
        }
    }

    /// Whether it may be another time, with everything as it is.
    fn passes(&self) -> bool {
        use ConnectError::{Closed, Connect, Device, Draining, Full, Host, Silent};
        match self {
            // Where containers come and go, a name is away while its server is.
            Host { .. } => true,
            Connect { .. } | Full { .. } | Draining { .. } | Silent { .. } | Closed { .. } => true,
            Device(e) => matches!(e, DeviceError::Lost { .. }),
            _ => false,
        }
    }
}

fn older(theirs: Version) -> &'static str {
    if (theirs.major, theirs.minor) > (PROTOCOL_VERSION.major, PROTOCOL_VERSION.minor) {
        "this client"
    } else {
        "the server"
    }
}

/// Makes attempts until one succeeds, or fails for good, or `retry` has passed: then with the last one's reason.
pub(super) fn again<T>(
    retry: Duration,
    mut attempt: impl FnMut() -> Result<T, ConnectError>,
) -> Result<T, ConnectError> {
    let start = Instant::now();
    let mut pause = FIRST_PAUSE;
    let mut attempts = 1;
    loop {
        let last = match attempt() {
            Err(e) if e.passes() && !retry.is_zero() => e,
            done => return done,
        };
        // Clients that a server has lost all at once do not come back all at once.
        let next = pause.mul_f64(0.75 + 0.5 * fastrand::f64());
        let elapsed = start.elapsed();
        let left = retry.saturating_sub(elapsed);
        if left.is_zero() {
            return Err(ConnectError::GivenUp { attempts, elapsed, last: Box::new(last) });
        }
        log::debug!("{last}; trying again in {next:.1?}");
        std::thread::sleep(next.min(left));
        pause = (2 * pause).min(LONGEST_PAUSE);
        attempts += 1;
    }
}

/// Whether a text is `host:port`, with an IPv6 address in brackets.
fn is_endpoint(text: &str) -> bool {
    let host_and_port =
        |(host, port): (&str, &str)| !host.is_empty() && !host.contains([':', '[', ']']) && port.parse::<u16>().is_ok();
    text.parse::<SocketAddr>().is_ok() || text.rsplit_once(':').is_some_and(host_and_port)
}

/// A server that takes us.
pub(super) struct Met {
    pub(super) stream: TcpStream,
    pub(super) dialect: &'static Dialect,
    pub(super) version: Version,
    /// The revision of the extensions, from a server of fanout's.
    pub(super) revision: Option<u8>,
    /// Bytes that were sent and received so far.
    pub(super) passed: (u64, u64),
}

/// What a handshake brings: how the server speaks, its version, its greeting, and bytes that were sent and received.
type Hands = (&'static Dialect, Version, Option<Greeting>, (u64, u64));

/// Connects and shakes hands, once.
pub(super) fn connect(endpoint: &str, options: &Options) -> Result<Met, ConnectError> {
    let until = Instant::now() + options.connect_timeout;
    if !is_endpoint(endpoint) {
        return Err(ConnectError::Name(endpoint.to_owned()));
    }
    let addrs = endpoint.to_socket_addrs();
    let addrs = addrs.map_err(|source| ConnectError::Host { endpoint: endpoint.to_owned(), source })?;
    let addrs: Vec<_> = addrs.collect();
    let mut last = io::Error::from(ErrorKind::AddrNotAvailable);
    for (addr, others) in addrs.iter().zip((1..=addrs.len() as u32).rev()) {
        // An address that nobody answers at leaves time for the others.
        match left(until).and_then(|left| open(*addr, left / others)) {
            Ok(stream) => return meet(endpoint, *addr, stream, (until, options.connect_timeout)),
            Err(e) => last = e,
        }
    }
    Err(ConnectError::Connect { endpoint: endpoint.to_owned(), source: last })
}

fn open(addr: SocketAddr, patience: Duration) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    socket.connect_timeout(&addr.into(), patience)?;
    let stream = TcpStream::from(socket);
    // Where nobody listens on a port of this machine that the system also gives to those that connect, it may give it to this
    // very socket, which is then connected to itself.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(ErrorKind::ConnectionRefused.into());
    }
    stream.set_nodelay(true)?;
    // Where no reply is due for long, a server that is gone is noticed too.
    let keepalive = TcpKeepalive::new().with_time(Duration::from_secs(60)).with_interval(Duration::from_secs(15));
    SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
    Ok(stream)
}

/// Finds out how the server speaks. It closes the connection on what its version does not know: then there is another one,
/// to say the same as the versions before did.
fn meet(endpoint: &str, addr: SocketAddr, stream: TcpStream, time: (Instant, Duration)) -> Result<Met, ConnectError> {
    let mut stream = stream;
    let forms = [
        (HelloForm::Caps, "HELLO, and takes no other"),
        (HelloForm::Empty, "HELLO, with its body and without, and takes no other"),
        (HelloForm::Absent, "HELLO, with its body and without, and on the first request of versions before HELLO"),
    ];
    let mut closed_on = "HELLO";
    for (form, tried) in forms {
        match handshake(endpoint, &stream, form, time) {
            Err(ConnectError::Closed { .. }) => closed_on = tried,
            Err(e) => return Err(e),
            // It knows the first form: it has closed that connection because it was full, say, or about to end.
            Ok((dialect, ..)) if form == HelloForm::Empty && dialect.hello() == HelloForm::Caps => {
                closed_on = "HELLO";
                break;
            }
            Ok((dialect, version, greeting, passed)) => {
                let revision = greeting.map(|greeting| greeting.revision);
                return Ok(Met { stream, dialect, version, revision, passed });
            }
        }
        if form != HelloForm::Absent {
            let Ok(next) = left(time.0).and_then(|left| open(addr, left)) else { break };
            stream = next;
        }
    }
    Err(ConnectError::Closed { endpoint: endpoint.to_owned(), tried: closed_on })
}

fn handshake(
    endpoint: &str,
    mut stream: &TcpStream,
    form: HelloForm,
    (until, patience): (Instant, Duration),
) -> Result<Hands, ConnectError> {
    let named = || endpoint.to_owned();
    let failed = |reason: String| ConnectError::Handshake { endpoint: named(), reason };
    let io = |e: io::Error| ConnectError::unheard(endpoint, "HELLO", patience, &e);
    let wire = |e: WireError| failed(e.to_string());
    let mut out = Vec::new();
    let command = match form {
        HelloForm::Caps | HelloForm::Empty => {
            let conn_caps = (form == HelloForm::Caps).then_some([0; 24]);
            Request::Hello(Hello { conn_caps }).encode(&mut out);
            Command::Hello
        }
        HelloForm::Absent => {
            let first = Request::GetAlignment(GetAlignment { device: 0 });
            Dialect::FIRST.encode(&first, &mut out).map_err(|e| DeviceError::Bug(e.to_string()))?;
            Command::GetAlignment
        }
    };
    stream.set_write_timeout(Some(left(until).map_err(io)?)).map_err(io)?;
    stream.write_all(&out).map_err(io)?;
    let mut header = [0; RESPONSE_HEADER];
    read(stream, &mut header, until).map_err(io)?;
    let size = ResponseHeader::decode(&header).size;
    let size = command.response_size(size, HELLO_REPLY as u64).map_err(wire)?;
    let mut body = [0; HELLO_REPLY];
    let body = body.get_mut(..size).ok_or_else(|| failed("a reply that is too long".to_owned()))?;
    read(stream, body, until).map_err(io)?;
    let passed = (out.len() as u64, (RESPONSE_HEADER + size) as u64);
    let reply = match Response::decode(command, body).map_err(wire)? {
        Response::Hello(reply) => reply,
        // Any answer shows that it knows the request.
        _ => return Ok((Dialect::FIRST, Version { major: 0, minor: 0, patch: 0 }, None, passed)),
    };
    let Some(dialect) = Dialect::of(reply.version) else {
        return Err(ConnectError::Version { endpoint: endpoint.to_owned(), theirs: reply.version });
    };
    if form == HelloForm::Caps && reply.conn_caps.is_none() && dialect.hello() == HelloForm::Caps {
        return Err(failed("a reply to HELLO as before version 4.0".to_owned()));
    }
    let greeting = Greeting::from_byte(reply.greeting).filter(|_| dialect.is_current());
    match greeting.map_or(State::Ready, |greeting| greeting.state) {
        State::Ready => Ok((dialect, reply.version, greeting, passed)),
        State::Full => Err(ConnectError::Full { endpoint: named() }),
        State::Draining => Err(ConnectError::Draining { endpoint: named() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_a_host_and_a_port() {
        for name in ["a:1", "10.0.0.5:50052", "[::1]:50052", "[fe80::1%2]:7", "node-7.lan:65535"] {
            assert!(is_endpoint(name), "{name:?}");
        }
        for name in
            ["", "a", ":1", "a:", "a:b", "a:65536", "1.2.3.4", "::1", "::1:50052", "[::1]", "[::1]:", "[a]:1", "[::1:1"]
        {
            assert!(!is_endpoint(name), "{name:?}");
        }
    }

    #[test]
    fn what_passes_is_tried_again_and_what_does_not_is_not() {
        let endpoint = || "a:1".to_owned();
        let mut left = 3;
        let done = again(Duration::from_secs(30), || {
            left -= 1;
            if left == 0 { Ok(7) } else { Err(ConnectError::Closed { endpoint: endpoint(), tried: "HELLO" }) }
        });
        assert!(matches!(done, Ok(7)));
        let mut attempts = 0;
        let unknown = |endpoint| ConnectError::Host { endpoint, source: ErrorKind::NotFound.into() };
        let mut fail = |retry: u64, error: fn(String) -> ConnectError| {
            attempts = 0;
            let done: Result<(), _> = again(Duration::from_millis(retry), || {
                attempts += 1;
                Err(error(endpoint()))
            });
            (attempts, done.unwrap_err().to_string())
        };
        let (attempts, told) = fail(10_000, ConnectError::Name);
        assert!(attempts == 1 && !told.contains("attempts"), "{told}");
        let (attempts, told) = fail(0, |endpoint| ConnectError::Full { endpoint });
        assert!(attempts == 1 && !told.contains("attempts"), "{told}");
        let (attempts, told) = fail(200, unknown);
        assert!(attempts > 1 && told.starts_with("a:1: no such host") && told.contains("attempts in"), "{told}");
        let (attempts, told) = fail(200, |endpoint| ConnectError::Draining { endpoint });
        assert!((2..=5).contains(&attempts), "after 50 ms, then 100, and at the end: {attempts}");
        assert!(
            told.starts_with("a:1 is about to end") && told.contains(&format!("; {attempts} attempts in ")),
            "{told}"
        );
    }
}

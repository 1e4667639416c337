//! Connection setup: resolves the endpoint, dials it, and negotiates a protocol version that both ends support. Transient
//! failures are retried with exponential backoff and jitter.

use std::io;
use std::time::{Duration, Instant};

use thiserror::Error;

use super::Options;
use crate::device::DeviceError;
use crate::rpc::connection::{Handshake, HandshakeError, ServerHello};
use crate::rpc::transport::tls::{ClientTls, Credentials};
use crate::rpc::transport::{
    Address, Connection, Deadline, DialError, ResolveError, TransportError, dial_with, missing_port_hint, resolve,
    with_default_port,
};
use crate::rpc::wire::{
    CAPS_BYTES, DEFAULT_PORT, GetAlignment, HelloForm, PROTOCOL_VERSION, Request, Response, RpcCommand,
    SUPPORTED_VERSIONS, Version, VersionCodec, WireError,
};

/// Backoff after the first failed attempt; it doubles with each further attempt.
const FIRST_BACKOFF: Duration = Duration::from_millis(50);

/// Upper limit of the backoff.
const MAX_BACKOFF: Duration = Duration::from_secs(2);

/// For messages: the requests on which a server that accepts no form of HELLO closed its connections.
const CLOSED_ON_BOTH: &str = "HELLO, with its body and without, and accepts no further connection";

/// Why a connection to a server could not be established.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The text is not of the form `host:port`.
    #[error("expected an endpoint such as 10.0.0.5:50052 or [fd00::5]:50052, got {name:?}{hint}", name = .0, hint = missing_port_hint(.0))]
    Name(String),
    /// The host name does not resolve.
    #[error("{endpoint}: no such host: {error}; check the spelling, or give its IP address")]
    Host {
        /// The endpoint, as given to the client.
        endpoint: String,
        /// The resolver's error.
        error: io::Error,
    },
    /// None of the endpoint's addresses accepts the connection.
    #[error("cannot connect to {endpoint}: {error}; is a server running there, on that port?")]
    Connect {
        /// The endpoint, as given to the client.
        endpoint: String,
        /// Error of the last address that was tried.
        error: DialError,
    },
    /// The server has reached its limit of clients.
    #[error(
        "{endpoint} is full: it has as many clients as it allows, in all or of this key or address (max-connections and \
         max-connections-per-address in its --limits); try again when one has disconnected, or use another server"
    )]
    Full {
        /// The endpoint, as given to the client.
        endpoint: String,
    },
    /// The server is draining: it finishes its current clients and accepts no more.
    #[error("{endpoint} is about to end and accepts no more clients; use another server, or retry after its restart")]
    Draining {
        /// The endpoint, as given to the client.
        endpoint: String,
    },
    /// The endpoint accepted the connection but did not reply in time.
    #[error(
        "{endpoint}: no reply to {command} within {timeout:?}; it may be busy with another client, as llama.cpp's servers \
         serve one at a time: try again later, or check the port"
    )]
    Silent {
        /// The endpoint, as given to the client.
        endpoint: String,
        /// The request that got no reply.
        command: &'static str,
        /// How long the client waited for the reply.
        timeout: Duration,
    },
    /// The endpoint accepted the connection and closed it during the handshake.
    #[error(
        "{endpoint} closed the connection on {tried}; see its log for the reason: it may demand keys or certificates, or \
         another program has that port"
    )]
    Closed {
        /// The endpoint, as given to the client.
        endpoint: String,
        /// The requests that were tried, each on a new connection.
        tried: &'static str,
    },
    /// The endpoint replied, but not as a server of this protocol.
    #[error("{endpoint} did not reply as an RPC server of version {PROTOCOL_VERSION}: {reason}")]
    Handshake {
        /// The endpoint, as given to the client.
        endpoint: String,
        /// How the reply violates the protocol.
        reason: String,
    },
    /// The endpoint speaks another protocol, such as HTTP or SSH.
    #[error(
        "{endpoint} is no RPC server: its reply begins with {start:?}, so another program has that port: check the port"
    )]
    OtherProtocol {
        /// The endpoint, as given to the client.
        endpoint: String,
        /// The first bytes of the reply.
        start: String,
    },
    /// One end does not trust the other: it has another key, or does not use TLS.
    #[error("{endpoint}: {reason}")]
    Trust {
        /// The endpoint, as given to the client.
        endpoint: String,
        /// What is wrong, and with whose key.
        reason: String,
    },
    /// The server has a version that this client does not support.
    #[error("{endpoint} has version {theirs} of the RPC protocol, this client {SUPPORTED_VERSIONS}: update {}", side_to_update(*.theirs))]
    Version {
        /// The endpoint, as given to the client.
        endpoint: String,
        /// The server's version.
        theirs: Version,
    },
    /// The server was lost or sent an invalid reply while the client listed its devices, or this process could not start a
    /// thread for the connection.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Every attempt within [`Options::retry`] failed.
    #[error("{last}; {attempts} attempts in {elapsed:.1?}")]
    GivenUp {
        /// Number of attempts.
        attempts: u32,
        /// Time from the first attempt to the end of the last one.
        elapsed: Duration,
        /// Error of the last attempt.
        last: Box<ConnectError>,
    },
}

impl ConnectError {
    /// Maps a transport error during the wait for a reply to `command` to a [`ConnectError`].
    pub(super) fn no_reply(
        endpoint: &str,
        command: &'static str,
        timeout: Duration,
        e: &TransportError,
    ) -> ConnectError {
        let endpoint = endpoint.to_owned();
        match e {
            TransportError::TimedOut { .. } => ConnectError::Silent { endpoint, command, timeout },
            TransportError::Closed | TransportError::Reset(_) => ConnectError::Closed { endpoint, tried: command },
            TransportError::Tls(e) => ConnectError::Trust { endpoint, reason: e.to_string() },
            TransportError::Io(e) => ConnectError::Handshake { endpoint, reason: format!("{command}: {e}") },
        }
    }

    /// Whether a retry may succeed without any change of configuration.
    pub fn is_transient(&self) -> bool {
        use ConnectError::{Closed, Connect, Device, Draining, Full, GivenUp, Host, Silent};
        match self {
            // In container networks a host name resolves only while its container runs.
            Host { .. } => true,
            Connect { .. } | Full { .. } | Draining { .. } | Silent { .. } | Closed { .. } => true,
            Device(e) => matches!(e, DeviceError::ConnectionLost { .. } | DeviceError::Exhausted { .. }),
            GivenUp { last, .. } => last.is_transient(),
            _ => false,
        }
    }
}

fn side_to_update(theirs: Version) -> &'static str {
    if (theirs.major, theirs.minor) > (PROTOCOL_VERSION.major, PROTOCOL_VERSION.minor) {
        "this client"
    } else {
        "the server"
    }
}

/// The endpoint of a server that a user names: `host:port`, with the default port 50052 if `text` has none. An IPv6 address has
/// brackets. `None`: `text` is not of that form.
pub fn endpoint_with_port(text: &str) -> Option<String> {
    with_default_port(text, DEFAULT_PORT)
}

/// Retries `attempt` with exponential backoff until it succeeds, fails permanently, or `retry` has passed. In the last case the
/// error contains the error of the last attempt.
pub(super) fn retry_with_backoff<T>(
    retry: Duration,
    mut attempt: impl FnMut() -> Result<T, ConnectError>,
) -> Result<T, ConnectError> {
    let start = Instant::now();
    let mut pause = FIRST_BACKOFF;
    let mut attempts = 1;
    loop {
        let last = match attempt() {
            Err(e) if e.is_transient() && !retry.is_zero() => e,
            done => return done,
        };
        // Jitter of +-25 %: clients that were disconnected at the same moment do not reconnect at the same moment.
        let next = pause.mul_f64(0.75 + 0.5 * fastrand::f64());
        let elapsed = start.elapsed();
        let remaining = retry.saturating_sub(elapsed);
        if remaining.is_zero() {
            return Err(ConnectError::GivenUp { attempts, elapsed, last: Box::new(last) });
        }
        log::debug!("{last}; trying again in {next:.1?}");
        std::thread::sleep(next.min(remaining));
        pause = (2 * pause).min(MAX_BACKOFF);
        attempts += 1;
    }
}

/// A server that accepts this client, before the handshake of the extensions.
pub(super) struct AcceptedHandshake {
    pub(super) handshake: Handshake,
    pub(super) server: ServerHello,
}

/// Makes one attempt to connect, including the version handshake.
pub(super) fn connect(endpoint: &str, options: &Options) -> Result<AcceptedHandshake, ConnectError> {
    let deadline = Deadline::after(options.connect_timeout);
    let named = || endpoint.to_owned();
    let targets = resolve(endpoint).map_err(|e| match e {
        ResolveError::Name => ConnectError::Name(named()),
        ResolveError::Host(error) => ConnectError::Host { endpoint: named(), error },
    })?;
    let tls = tls(endpoint, options).map_err(|reason| ConnectError::Trust { endpoint: named(), reason })?;
    let (addr, connection) = dial_with(&targets, &deadline, tls.as_ref())
        .map_err(|(_, error)| ConnectError::Connect { endpoint: named(), error })?;
    let redial = |addr: &Address| {
        dial_with(std::slice::from_ref(addr), &deadline, tls.as_ref()).ok().map(|(_, connection)| connection)
    };
    negotiate_version(endpoint, addr, Handshake::new(connection), &redial, &deadline)
}

/// TLS, if `options` have a certificate or keys of servers.
fn tls(endpoint: &str, options: &Options) -> Result<Option<ClientTls>, String> {
    if let Some(certificate) = &options.certificate {
        if options.key.is_some() || !options.server_keys.is_empty() {
            return Err("a client proves a certificate or a key, not both".to_owned());
        }
        let host = endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host).trim_matches(['[', ']']);
        return ClientTls::with_certificate(certificate, host).map(Some).map_err(|e| format!("TLS: {e}"));
    }
    if options.server_keys.is_empty() {
        return Ok(None);
    }
    let key = options.key.as_ref().ok_or("a server with a key demands one of this client, too")?;
    let credentials = Credentials::of_key(key);
    let tls = credentials.and_then(|credentials| ClientTls::new(&credentials, &options.server_keys));
    tls.map(Some).map_err(|e| format!("TLS: {e}"))
}

/// Negotiates the protocol version by trying the forms of HELLO, newest first. A server closes the connection on a request that
/// its version does not have, so each further form is tried on a new connection.
fn negotiate_version(
    endpoint: &str,
    addr: Address,
    mut handshake: Handshake,
    redial: &dyn Fn(&Address) -> Option<Connection>,
    deadline: &Deadline,
) -> Result<AcceptedHandshake, ConnectError> {
    let forms = [
        (HelloForm::Caps, "HELLO, and accepts no second connection"),
        (HelloForm::Empty, CLOSED_ON_BOTH),
        (HelloForm::Absent, "HELLO, with its body and without, and on the first request of versions before HELLO"),
    ];
    let mut closed_on = "HELLO";
    for (form, tried) in forms {
        match hello(endpoint, &mut handshake, form, deadline) {
            Err(ConnectError::Closed { .. }) => closed_on = tried,
            Err(e) => return Err(e),
            // The server supports the first form, so it closed the first connection for another reason, such as being full or
            // draining.
            Ok(server) if form == HelloForm::Empty && server.codec.hello_form() == HelloForm::Caps => {
                closed_on = "HELLO";
                break;
            }
            Ok(_) if form == HelloForm::Empty => {
                drop(handshake);
                return retry_with_caps(endpoint, &addr, redial, deadline);
            }
            Ok(server) => return Ok(AcceptedHandshake { handshake, server }),
        }
        if form != HelloForm::Absent {
            let Some(next) = redial(&addr) else { break };
            handshake = Handshake::new(next);
        }
    }
    Err(ConnectError::Closed { endpoint: endpoint.to_owned(), tried: closed_on })
}

/// Connects to a server that accepts the HELLO without a body. A fanout server accepts both forms, so it may have closed the
/// first connection for another reason: the form with a body is tried once more, and preferred. The earlier connections must be
/// closed, because llama.cpp's servers serve one client at a time.
fn retry_with_caps(
    endpoint: &str,
    addr: &Address,
    redial: &dyn Fn(&Address) -> Option<Connection>,
    deadline: &Deadline,
) -> Result<AcceptedHandshake, ConnectError> {
    for form in [HelloForm::Caps, HelloForm::Empty] {
        let Some(connection) = redial(addr) else { break };
        let mut handshake = Handshake::new(connection);
        match hello(endpoint, &mut handshake, form, deadline) {
            Err(ConnectError::Closed { .. }) => {}
            done => return done.map(|server| AcceptedHandshake { handshake, server }),
        }
    }
    Err(ConnectError::Closed { endpoint: endpoint.to_owned(), tried: CLOSED_ON_BOTH })
}

fn hello(
    endpoint: &str,
    handshake: &mut Handshake,
    form: HelloForm,
    deadline: &Deadline,
) -> Result<ServerHello, ConnectError> {
    let named = || endpoint.to_owned();
    let failed = |reason: String| ConnectError::Handshake { endpoint: named(), reason };
    let connect_error = |e: HandshakeError| match e {
        HandshakeError::Transport(e) => ConnectError::no_reply(endpoint, "HELLO", deadline.timeout(), &e),
        HandshakeError::Version(theirs) => ConnectError::Version { endpoint: named(), theirs },
        HandshakeError::Full => ConnectError::Full { endpoint: named() },
        HandshakeError::Draining => ConnectError::Draining { endpoint: named() },
        HandshakeError::OtherProtocol(start) => ConnectError::OtherProtocol { endpoint: named(), start },
        other => failed(other.to_string()),
    };
    if form == HelloForm::Absent {
        let mut out = Vec::new();
        let first = Request::GetAlignment(GetAlignment { device: 0 });
        VersionCodec::Gen0.encode(&first, &mut out).map_err(|e| DeviceError::Bug(e.to_string()))?;
        let body = handshake.request(&out, RpcCommand::GetAlignment, deadline).map_err(connect_error)?;
        // Any valid reply shows that the server supports the request.
        Response::decode(RpcCommand::GetAlignment, &body).map_err(|e: WireError| failed(e.to_string()))?;
        let version = Version { major: 0, minor: 0, patch: 0 };
        return Ok(ServerHello { codec: VersionCodec::Gen0, version, revision: None });
    }
    handshake.hello((form == HelloForm::Caps).then_some([0; CAPS_BYTES]), deadline).map_err(connect_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transient_errors_are_retried_and_permanent_errors_are_not() {
        let endpoint = || "a:1".to_owned();
        let mut attempts_left = 3;
        let done = retry_with_backoff(Duration::from_secs(30), || {
            attempts_left -= 1;
            if attempts_left == 0 { Ok(7) } else { Err(ConnectError::Closed { endpoint: endpoint(), tried: "HELLO" }) }
        });
        assert!(matches!(done, Ok(7)));
        let mut attempts = 0;
        let unknown = |endpoint| ConnectError::Host { endpoint, error: io::ErrorKind::NotFound.into() };
        let mut fail = |retry: u64, error: fn(String) -> ConnectError| {
            attempts = 0;
            let done: Result<(), _> = retry_with_backoff(Duration::from_millis(retry), || {
                attempts += 1;
                Err(error(endpoint()))
            });
            (attempts, done.unwrap_err().to_string())
        };
        let trust = |endpoint| ConnectError::Trust { endpoint, reason: "it has another key".to_owned() };
        let version = |endpoint| ConnectError::Version { endpoint, theirs: Version { major: 99, ..PROTOCOL_VERSION } };
        for permanent in [ConnectError::Name as fn(String) -> ConnectError, trust, version] {
            let (attempts, message) = fail(10_000, permanent);
            assert!(attempts == 1 && !message.contains("attempts"), "{message}");
        }
        let (attempts, message) = fail(0, |endpoint| ConnectError::Full { endpoint });
        assert!(attempts == 1 && !message.contains("attempts"), "{message}");
        let (attempts, message) = fail(200, unknown);
        assert!(
            attempts > 1 && message.starts_with("a:1: no such host") && message.contains("attempts in"),
            "{message}"
        );
        let no_thread =
            |_| DeviceError::thread_spawn_failed("that reads replies", &io::ErrorKind::WouldBlock.into()).into();
        let (attempts, message) = fail(200, no_thread);
        assert!(attempts > 1 && message.contains("threads") && !message.contains("cannot connect"), "{message}");
        let (attempts, message) = fail(200, |endpoint| ConnectError::Draining { endpoint });
        assert!(
            (2..=5).contains(&attempts),
            "backoffs of 50 ms and 100 ms within 200 ms allow 2 to 5 attempts, not {attempts}"
        );
        assert!(
            message.starts_with("a:1 is about to end") && message.contains(&format!("; {attempts} attempts in ")),
            "{message}"
        );
    }
}

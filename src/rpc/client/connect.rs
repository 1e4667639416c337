//! From a name to a connection whose server speaks a version that we speak too.

use std::io;
use std::time::{Duration, Instant};

use thiserror::Error;

use super::Options;
use crate::device::DeviceError;
use crate::rpc::connection::{Handshake, HandshakeError, ServerHello};
use crate::rpc::transport::{Address, Deadline, DialError, ResolveError, TransportError, dial, resolve};
use crate::rpc::wire::{
    Command, Dialect, GetAlignment, HelloForm, PROTOCOL_VERSION, Request, Response, SERVED, Version, WireError,
};

/// The pause after the first attempt to connect; each is twice the one before.
const FIRST_BACKOFF: Duration = Duration::from_millis(50);

/// The longest of them.
const MAX_BACKOFF: Duration = Duration::from_secs(2);

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
        /// Why the last of its addresses cannot be reached.
        source: DialError,
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
        "{endpoint}: no reply to {command} within {timeout:?}; it may be busy with another client, which llama.cpp's servers \
         take one at a time"
    )]
    Silent {
        /// As it was given.
        endpoint: String,
        /// What it was asked.
        command: &'static str,
        /// How long it had for it.
        timeout: Duration,
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
    #[error("{endpoint} speaks version {theirs} of the RPC protocol, this client {SERVED}: update {}", side_to_update(*.theirs))]
    Version {
        /// As it was given.
        endpoint: String,
        /// Its version.
        theirs: Version,
    },
    /// The server was lost, or its reply made no sense, when the client listed its devices; or this machine has no thread for the
    /// connection.
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
    pub(super) fn no_reply(
        endpoint: &str,
        command: &'static str,
        patience: Duration,
        e: &TransportError,
    ) -> ConnectError {
        let endpoint = endpoint.to_owned();
        match e {
            TransportError::TimedOut { .. } => ConnectError::Silent { endpoint, command, timeout: patience },
            TransportError::Closed | TransportError::Reset(_) => ConnectError::Closed { endpoint, tried: command },
            TransportError::Io(e) => ConnectError::Handshake { endpoint, reason: format!("{command}: {e}") },
        }
    }

    /// Whether it may be another time, with everything as it is.
    fn is_transient(&self) -> bool {
        use ConnectError::{Closed, Connect, Device, Draining, Full, Host, Silent};
        match self {
            // Where containers come and go, a name is away while its server is.
            Host { .. } => true,
            Connect { .. } | Full { .. } | Draining { .. } | Silent { .. } | Closed { .. } => true,
            Device(e) => matches!(e, DeviceError::Lost { .. } | DeviceError::Exhausted { .. }),
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

/// Makes attempts until one succeeds, or fails for good, or `retry` has passed: then with the last one's reason.
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
        // Clients that a server has lost all at once do not come back all at once.
        let next = pause.mul_f64(0.75 + 0.5 * fastrand::f64());
        let elapsed = start.elapsed();
        let left = retry.saturating_sub(elapsed);
        if left.is_zero() {
            return Err(ConnectError::GivenUp { attempts, elapsed, last: Box::new(last) });
        }
        log::debug!("{last}; trying again in {next:.1?}");
        std::thread::sleep(next.min(left));
        pause = (2 * pause).min(MAX_BACKOFF);
        attempts += 1;
    }
}

/// A server that accepts this client, before GREET.
pub(super) struct AcceptedHandshake {
    pub(super) handshake: Handshake,
    pub(super) server: ServerHello,
}

/// Connects and shakes hands, once.
pub(super) fn connect(endpoint: &str, options: &Options) -> Result<AcceptedHandshake, ConnectError> {
    let deadline = Deadline::after(options.connect_timeout);
    let named = || endpoint.to_owned();
    let targets = resolve(endpoint).map_err(|e| match e {
        ResolveError::Name => ConnectError::Name(named()),
        ResolveError::Host(source) => ConnectError::Host { endpoint: named(), source },
    })?;
    let (addr, connection) =
        dial(&targets, &deadline).map_err(|(_, source)| ConnectError::Connect { endpoint: named(), source })?;
    negotiate_version(endpoint, addr, Handshake::new(connection), &deadline)
}

/// Finds out how the server speaks. It closes the connection on what its version does not know: then there is another one,
/// to say the same as the versions before did.
fn negotiate_version(
    endpoint: &str,
    addr: Address,
    mut handshake: Handshake,
    deadline: &Deadline,
) -> Result<AcceptedHandshake, ConnectError> {
    let forms = [
        (HelloForm::Caps, "HELLO, and takes no other"),
        (HelloForm::Empty, "HELLO, with its body and without, and takes no other"),
        (HelloForm::Absent, "HELLO, with its body and without, and on the first request of versions before HELLO"),
    ];
    let mut closed_on = "HELLO";
    for (form, tried) in forms {
        match hello(endpoint, &mut handshake, form, deadline) {
            Err(ConnectError::Closed { .. }) => closed_on = tried,
            Err(e) => return Err(e),
            // It knows the first form: it has closed that connection because it was full, say, or about to end.
            Ok(server) if form == HelloForm::Empty && server.dialect.hello() == HelloForm::Caps => {
                closed_on = "HELLO";
                break;
            }
            Ok(server) => return Ok(AcceptedHandshake { handshake, server }),
        }
        if form != HelloForm::Absent {
            let Ok((_, next)) = dial(std::slice::from_ref(&addr), deadline) else { break };
            handshake = Handshake::new(next);
        }
    }
    Err(ConnectError::Closed { endpoint: endpoint.to_owned(), tried: closed_on })
}

fn hello(
    endpoint: &str,
    handshake: &mut Handshake,
    form: HelloForm,
    deadline: &Deadline,
) -> Result<ServerHello, ConnectError> {
    let named = || endpoint.to_owned();
    let failed = |reason: String| ConnectError::Handshake { endpoint: named(), reason };
    let wrong = |e: HandshakeError| match e {
        HandshakeError::Transport(e) => ConnectError::no_reply(endpoint, "HELLO", deadline.given(), &e),
        HandshakeError::Version(theirs) => ConnectError::Version { endpoint: named(), theirs },
        HandshakeError::Full => ConnectError::Full { endpoint: named() },
        HandshakeError::Draining => ConnectError::Draining { endpoint: named() },
        other => failed(other.to_string()),
    };
    if form == HelloForm::Absent {
        let mut out = Vec::new();
        let first = Request::GetAlignment(GetAlignment { device: 0 });
        Dialect::FIRST.encode(&first, &mut out).map_err(|e| DeviceError::Bug(e.to_string()))?;
        let body = handshake.request(&out, Command::GetAlignment, deadline).map_err(wrong)?;
        // Any answer shows that it knows the request.
        Response::decode(Command::GetAlignment, &body).map_err(|e: WireError| failed(e.to_string()))?;
        let version = Version { major: 0, minor: 0, patch: 0 };
        return Ok(ServerHello { dialect: Dialect::FIRST, version, revision: None });
    }
    handshake.hello((form == HelloForm::Caps).then_some([0; 24]), deadline).map_err(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_passes_is_tried_again_and_what_does_not_is_not() {
        let endpoint = || "a:1".to_owned();
        let mut left = 3;
        let done = retry_with_backoff(Duration::from_secs(30), || {
            left -= 1;
            if left == 0 { Ok(7) } else { Err(ConnectError::Closed { endpoint: endpoint(), tried: "HELLO" }) }
        });
        assert!(matches!(done, Ok(7)));
        let mut attempts = 0;
        let unknown = |endpoint| ConnectError::Host { endpoint, source: io::ErrorKind::NotFound.into() };
        let mut fail = |retry: u64, error: fn(String) -> ConnectError| {
            attempts = 0;
            let done: Result<(), _> = retry_with_backoff(Duration::from_millis(retry), || {
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
        let no_thread = |_| DeviceError::no_thread("that reads replies", &io::ErrorKind::WouldBlock.into()).into();
        let (attempts, told) = fail(200, no_thread);
        assert!(attempts > 1 && told.contains("threads") && !told.contains("cannot connect"), "{told}");
        let (attempts, told) = fail(200, |endpoint| ConnectError::Draining { endpoint });
        assert!((2..=5).contains(&attempts), "after 50 ms, then 100, and at the end: {attempts}");
        assert!(
            told.starts_with("a:1 is about to end") && told.contains(&format!("; {attempts} attempts in ")),
            "{told}"
        );
    }
}

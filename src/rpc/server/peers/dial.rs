//! Dialling another server: connects, over TLS if the list demands it, then completes HELLO and HELLO_EXT, so that the
//! connection has fanout's extensions.

use super::peer_allowlist::PeerTargets;
use crate::rpc::connection::{Handshake, HandshakeError};
use crate::rpc::transport::tls::TlsError;
use crate::rpc::transport::{self, Deadline, TransportError};
use crate::rpc::wire::CAPS_BYTES;
use crate::rpc::wire::ext::REVISION;

/// Why a server could not be dialled.
pub(super) struct DialFailure {
    /// A text about the remote server, for the client.
    pub(super) why: String,
    /// What is wrong with a key, for the log.
    pub(super) distrust: Option<String>,
}

impl From<String> for DialFailure {
    fn from(why: String) -> DialFailure {
        DialFailure { why, distrust: None }
    }
}

impl From<HandshakeError> for DialFailure {
    fn from(e: HandshakeError) -> DialFailure {
        let distrust = match &e {
            HandshakeError::Transport(TransportError::Tls(e)) => Some(e.to_string()),
            _ => None,
        };
        DialFailure { why: describe_handshake_error(&e), distrust }
    }
}

/// Connects to the first of `targets` that accepts a connection, and completes HELLO and HELLO_EXT.
///
/// # Errors
/// [`DialFailure`].
pub(super) fn dial(targets: &PeerTargets, deadline: &Deadline) -> Result<Handshake, DialFailure> {
    let dialled = transport::dial_with(&targets.addresses, deadline, targets.tls.as_ref());
    let (_, connection) = dialled.map_err(|(addr, e)| match addr {
        Some(addr) => format!("cannot connect to {addr}: {e}; is a server running there, on that port?"),
        None => "the name has no address".to_owned(),
    })?;
    let mut handshake = Handshake::new(connection);
    exchange_hello(&mut handshake, deadline)?;
    Ok(handshake)
}

fn exchange_hello(handshake: &mut Handshake, deadline: &Deadline) -> Result<(), DialFailure> {
    // In other protocol versions, the byte that offers the extensions is padding of any value, and HELLO_EXT ends the
    // connection.
    if !handshake.hello(Some([0; CAPS_BYTES]), deadline)?.supports_extensions() {
        return Err(not_a_server().into());
    }
    Ok(handshake.hello_ext(deadline).map(drop)?)
}

fn not_a_server() -> String {
    format!("it is no fanout server with revision {REVISION} of the extensions")
}

/// A text for the client. It quotes nothing that was read: what listens there may be another service, whose first bytes are no
/// business of the client.
fn describe_handshake_error(e: &HandshakeError) -> String {
    match e {
        HandshakeError::Transport(TransportError::TimedOut { .. }) => "no reply in time".to_owned(),
        HandshakeError::Transport(TransportError::Closed) => "it closed the connection".to_owned(),
        HandshakeError::Transport(e) => describe_transport_error(e),
        HandshakeError::Full => "it is full: it has as many clients as it allows".to_owned(),
        HandshakeError::Draining => "it is about to end and accepts no more clients".to_owned(),
        HandshakeError::OtherProtocol(_)
        | HandshakeError::TooLong { .. }
        | HandshakeError::Version(_)
        | HandshakeError::Wire(_)
        | HandshakeError::OtherReply
        | HandshakeError::ShortHello => not_a_server(),
    }
}

/// A text for the client about a connection to another server that has failed. It quotes nothing that was read.
pub(in crate::rpc::server) fn describe_transport_error(e: &TransportError) -> String {
    match e {
        TransportError::Tls(e) => describe_tls_error(e).to_owned(),
        TransportError::Reset(e) | TransportError::Io(e) => e.to_string(),
        TransportError::Closed | TransportError::TimedOut { .. } => e.to_string(),
    }
}

fn describe_tls_error(e: &TlsError) -> &'static str {
    match e {
        TlsError::WrongKey(_) => "it proves another key than this server's --peer names",
        TlsError::KeyNotAllowed => "it does not allow this server's key (its --allow-keys)",
        TlsError::KeyRevoked => "it has revoked this server's key (its --allow-keys)",
        TlsError::Certificate(fault) => fault.without_quotes(),
        TlsError::OtherProof => "one of the two servers uses raw keys, and the other one certificates",
        TlsError::PlainServer => "it does not use TLS at this address, and this server's --peer names a key for it",
        TlsError::ClosedInHandshake => {
            "it closed the connection during the TLS handshake; it may not use TLS at this address: its log has the reason"
        }
        _ => "TLS has failed; this server's log has the reason",
    }
}

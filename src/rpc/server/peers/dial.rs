//! Dialling another server: connects, then completes HELLO and HELLO_EXT, so that the connection has fanout's extensions.

use crate::rpc::connection::{Handshake, HandshakeError};
use crate::rpc::transport::{self, Address, Deadline, TransportError};
use crate::rpc::wire::CAPS_BYTES;
use crate::rpc::wire::ext::REVISION;

/// Connects to the first of `targets` that accepts a connection, and completes HELLO and HELLO_EXT.
///
/// # Errors
/// The reason, as a text about the remote server.
pub(super) fn dial(targets: &[Address], deadline: &Deadline) -> Result<Handshake, String> {
    let (_, connection) = transport::dial(targets, deadline).map_err(|(addr, e)| match addr {
        Some(addr) => format!("cannot connect to {addr}: {e}; is a server running there, on that port?"),
        None => "the name has no address".to_owned(),
    })?;
    let mut handshake = Handshake::new(connection);
    exchange_hello(&mut handshake, deadline)?;
    Ok(handshake)
}

fn exchange_hello(handshake: &mut Handshake, deadline: &Deadline) -> Result<(), String> {
    // In other protocol versions, the byte that offers the extensions is padding of any value, and HELLO_EXT ends the
    // connection.
    if !handshake.hello(Some([0; CAPS_BYTES]), deadline).map_err(describe_handshake_error)?.supports_extensions() {
        return Err(not_a_server());
    }
    handshake.hello_ext(deadline).map(drop).map_err(describe_handshake_error)
}

fn not_a_server() -> String {
    format!("it is no fanout server with revision {REVISION} of the extensions")
}

/// A text for the client. It quotes nothing that was read: what listens there may be another service, whose first bytes are no
/// business of the client.
fn describe_handshake_error(e: HandshakeError) -> String {
    match e {
        HandshakeError::Transport(TransportError::TimedOut { .. }) => "no reply in time".to_owned(),
        HandshakeError::Transport(TransportError::Closed) => "it closed the connection".to_owned(),
        HandshakeError::Transport(TransportError::Reset(e) | TransportError::Io(e)) => e.to_string(),
        // Written by this end, or fixed texts of TLS.
        HandshakeError::Transport(TransportError::Tls(e)) => e.to_string(),
        HandshakeError::Full => "it is full: it has as many clients as it allows".to_owned(),
        HandshakeError::Draining => "it is about to end and accepts no more clients".to_owned(),
        HandshakeError::TooLong { .. }
        | HandshakeError::Version(_)
        | HandshakeError::Wire(_)
        | HandshakeError::OtherReply
        | HandshakeError::ShortHello => not_a_server(),
    }
}

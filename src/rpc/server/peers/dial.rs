//! From an address that may be dialled to a connection whose server speaks the extensions.

use crate::rpc::connection::{Handshake, HandshakeError};
use crate::rpc::transport::{self, Address, Deadline, TransportError};
use crate::rpc::wire::ext::REVISION;

/// The first of some addresses that answers, after HELLO and GREET.
pub(super) fn dial(targets: &[Address], deadline: &Deadline) -> Result<Handshake, String> {
    let (_, connection) = transport::dial(targets, deadline).map_err(|(addr, e)| match addr {
        Some(addr) => format!("cannot connect to {addr}: {e}; is a server running there, on that port?"),
        None => "it has no address".to_owned(),
    })?;
    let mut handshake = Handshake::new(connection);
    greet(&mut handshake, deadline)?;
    Ok(handshake)
}

fn greet(handshake: &mut Handshake, deadline: &Deadline) -> Result<(), String> {
    // A server of an older version may have anything in the byte of the greeting, and closes the connection on GREET.
    if !handshake.hello(Some([0; 24]), deadline).map_err(wrong)?.supports_extensions() {
        return Err(format!("it is no fanout server of revision {REVISION}"));
    }
    handshake.hello_ext(deadline).map(drop).map_err(wrong)
}

fn wrong(e: HandshakeError) -> String {
    match e {
        HandshakeError::Transport(TransportError::TimedOut { .. }) => "no reply in time".to_owned(),
        HandshakeError::Transport(TransportError::Closed) => "it closed the connection".to_owned(),
        HandshakeError::Transport(TransportError::Reset(e) | TransportError::Io(e)) => e.to_string(),
        HandshakeError::TooLong { size, limit } => {
            format!("it answers with {size} bytes where at most {limit} are expected")
        }
        HandshakeError::Full => "it has as many clients as it may".to_owned(),
        HandshakeError::Draining => "it takes no more clients".to_owned(),
        e @ HandshakeError::Version(_) => e.to_string(),
        e @ (HandshakeError::Wire(_) | HandshakeError::OtherReply | HandshakeError::ShortHello) => {
            format!("it does not answer as a server does: {e}")
        }
    }
}

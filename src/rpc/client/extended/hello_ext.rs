//! GREET: the first message of the extensions, still answered in a frame of 7.0.

use std::time::Duration;

use super::super::connect::ConnectError;
use crate::rpc::connection::{Handshake, HandshakeError};
use crate::rpc::transport::Deadline;
use crate::rpc::wire::ext::{ExtCommand, GreetReply};

/// The least that a server must take in one message, and bring in one read: less is of no use.
pub(in super::super) const MIN_MESSAGE_LIMIT_BYTES: u64 = 4 << 10;

/// Introduces this client to a server that speaks the extensions.
pub(in super::super) fn hello_ext(
    endpoint: &str,
    handshake: &mut Handshake,
    patience: Duration,
) -> Result<GreetReply, ConnectError> {
    let failed = |reason: String| ConnectError::Handshake { endpoint: endpoint.to_owned(), reason };
    let reply = handshake.hello_ext(&Deadline::after(patience)).map_err(|e| match e {
        HandshakeError::Transport(e) => ConnectError::no_reply(endpoint, ExtCommand::Greet.name(), patience, &e),
        HandshakeError::TooLong { size, limit } => {
            failed(format!("it answered GREET with {size} bytes, at most {limit} are possible"))
        }
        HandshakeError::Wire(e) => failed(format!("it answered GREET with nonsense: {e}")),
        HandshakeError::OtherReply => failed("it answered GREET as another command".to_owned()),
        // HELLO's errors.
        other => failed(other.to_string()),
    })?;
    if reply.devices.is_empty() || reply.max_message < MIN_MESSAGE_LIMIT_BYTES {
        let (devices, bytes) = (reply.devices.len(), reply.max_message);
        return Err(failed(format!("it has {devices} devices and takes messages of {bytes} bytes")));
    }
    Ok(reply)
}

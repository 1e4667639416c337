//! Handshake of the extensions: the client sends HELLO_EXT, the first message of the extensions, and receives the server's
//! self-description. The reply is the last one in a frame of 7.0.

use std::time::Duration;

use super::super::connect::ConnectError;
use crate::rpc::connection::{Handshake, HandshakeError};
use crate::rpc::transport::Deadline;
use crate::rpc::wire::ext::{ExtCommand, HelloExtReply};

/// Smallest limit of message and read size that a client accepts from a server.
pub(in super::super) const MIN_MESSAGE_LIMIT_BYTES: u64 = 4 << 10;

/// Sends HELLO_EXT to a server with the extensions, and validates its reply.
pub(in super::super) fn hello_ext(
    endpoint: &str,
    handshake: &mut Handshake,
    timeout: Duration,
) -> Result<HelloExtReply, ConnectError> {
    let failed = |reason: String| ConnectError::Handshake { endpoint: endpoint.to_owned(), reason };
    let reply = handshake.hello_ext(&Deadline::after(timeout)).map_err(|e| match e {
        HandshakeError::Transport(e) => ConnectError::no_reply(endpoint, ExtCommand::HelloExt.name(), timeout, &e),
        HandshakeError::TooLong { size, limit } => {
            failed(format!("it replied to HELLO_EXT with {size} bytes, expected at most {limit}"))
        }
        HandshakeError::Wire(e) => failed(format!("it sent an invalid reply to HELLO_EXT: {e}")),
        HandshakeError::OtherReply => failed("it replied to HELLO_EXT with the reply of another command".to_owned()),
        // Errors of HELLO.
        other => failed(other.to_string()),
    })?;
    if reply.devices.is_empty() || reply.max_message < MIN_MESSAGE_LIMIT_BYTES {
        let (devices, bytes) = (reply.devices.len(), reply.max_message);
        return Err(failed(format!("it offers {devices} devices and accepts messages of {bytes} bytes")));
    }
    Ok(reply)
}

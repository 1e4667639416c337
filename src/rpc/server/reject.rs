//! Rejection of a client that is not admitted: replies to its HELLO with the server's state (full or draining), then closes the
//! connection.

use std::time::Duration;

use super::handshake::{hello_form, hello_reply};
use super::http::is_http;
use super::versions::VersionChoice;
use crate::rpc::transport::{Connection, Deadline, TransportError};
use crate::rpc::wire::ext::ServerState;
use crate::rpc::wire::{CAPS_BYTES, Limits, REQUEST_HEADER, RequestHeader, RpcCommand};

/// Limit of the time from the accepted connection to its end.
const REJECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Replies to the client's HELLO with `state`, in the version that an admitted client would get. The end of the connection says
/// nothing about the client's version, so it is not reported. Any other first message gets no reply, and versions before 7.0
/// have no field for the state. A connection that begins with an HTTP request is returned, with the bytes that were read, if
/// `serves_http` holds; all others are logged by `log`.
///
/// # Errors
/// Errors of the transport: the connection is closed, or no complete HELLO arrived within [`REJECT_TIMEOUT`].
pub(super) fn reply_with_state(
    connection: Connection,
    versions: &VersionChoice<'_>,
    state: ServerState,
    serves_http: bool,
    log: impl FnOnce(),
) -> Result<Option<(Connection, Vec<u8>)>, TransportError> {
    let deadline = Deadline::after(REJECT_TIMEOUT);
    let (mut receiver, mut sender) = connection.split();
    let mut header = [0; REQUEST_HEADER];
    let read = receiver.read_exact(&mut header, &deadline);
    if read.is_ok() && serves_http && is_http(&header) {
        return Ok(Some((receiver.into_connection(), header.to_vec())));
    }
    // Before the reply and the end of the connection, so that a client that sees them finds the line in the log.
    log();
    read?;
    let limits = Limits { max_nodes: 0, max_tensors: 0, max_body: CAPS_BYTES as u64 };
    let header = RequestHeader::decode(&header).ok().filter(|header| header.command == RpcCommand::Hello);
    let Some(len) = header.and_then(|header| header.body_len(&limits).ok()) else { return Ok(None) };
    let mut body = [0; CAPS_BYTES];
    receiver.read_exact(body.get_mut(..len).unwrap_or_default(), &deadline)?;
    let answer = versions.answer(hello_form(len)).and_then(|version| hello_reply(version, state));
    let Some(answer) = answer else { return Ok(None) };
    let mut reply = Vec::new();
    answer.encode(&mut reply);
    sender.write_by(&reply, &deadline).map(|()| None)
}

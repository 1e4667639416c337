//! What a client hears that the server does not take: the server's state, where the client asks in time, and the end.

use std::time::Duration;

use super::handshake::{HELLO_BODY, hello_reply};
use crate::rpc::transport::{Connection, Deadline, TransportError};
use crate::rpc::wire::ext::State;
use crate::rpc::wire::{Command, Limits, REQUEST_HEADER, RequestHeader};

/// From the connection to its end.
const PATIENCE: Duration = Duration::from_secs(2);

/// Answers a HELLO, if one comes, with what keeps the server from taking the client.
pub(super) fn turn_away(connection: Connection, state: State) -> Result<(), TransportError> {
    let deadline = Deadline::after(PATIENCE);
    let (mut receiver, mut sender) = connection.split();
    let mut header = [0; REQUEST_HEADER];
    receiver.read_exact(&mut header, &deadline)?;
    let limits = Limits { max_nodes: 0, max_tensors: 0, max_body: HELLO_BODY as u64 };
    let header = RequestHeader::decode(&header).ok().filter(|header| header.command == Command::Hello);
    let Some(len) = header.and_then(|header| header.body_len(&limits).ok()) else { return Ok(()) };
    let mut body = [0; HELLO_BODY];
    receiver.read_exact(body.get_mut(..len).unwrap_or_default(), &deadline)?;
    let mut reply = Vec::new();
    hello_reply(len, state).encode(&mut reply);
    sender.write_by(&reply, &deadline)
}

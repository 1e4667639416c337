//! What a client hears that the server does not take: the server's state, where the client asks in time, and the end.

use std::time::Duration;

use crate::rpc::transport::{Connection, Deadline, TransportError};
use crate::rpc::wire::ext::{Greeting, REVISION, State};
use crate::rpc::wire::{Command, HelloReply, Limits, PROTOCOL_VERSION, REQUEST_HEADER, RequestHeader, Response};

/// From the connection to its end.
const PATIENCE: Duration = Duration::from_secs(2);

/// The longest body of a HELLO.
const HELLO: usize = 24;

/// Answers a HELLO, if one comes, with what keeps the server from taking the client.
pub(super) fn turn_away(connection: Connection, state: State) -> Result<(), TransportError> {
    let deadline = Deadline::after(PATIENCE);
    let (mut receiver, mut sender) = connection.split();
    let mut header = [0; REQUEST_HEADER];
    receiver.read_exact(&mut header, &deadline)?;
    let limits = Limits { max_nodes: 0, max_tensors: 0, max_body: HELLO as u64 };
    let header = RequestHeader::decode(&header).ok().filter(|header| header.command == Command::Hello);
    let Some(len) = header.and_then(|header| header.body_len(&limits).ok()) else { return Ok(()) };
    let mut body = [0; HELLO];
    receiver.read_exact(body.get_mut(..len).unwrap_or_default(), &deadline)?;
    // A client from before 4.0 knows the short form alone, and none of them is taken anyway.
    let conn_caps = (len > 0).then_some([0; 24]);
    let greeting = Greeting { revision: REVISION, state }.to_byte();
    let mut reply = Vec::new();
    Response::Hello(HelloReply { version: PROTOCOL_VERSION, conn_caps, greeting }).encode(&mut reply);
    sender.write_by(&reply, &deadline)
}

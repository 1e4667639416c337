//! What a client hears that the server does not take: the server's state, where the client asks in time, and the end.

use std::io::{self, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::rpc::socket;
use crate::rpc::wire::ext::{Greeting, REVISION, State};
use crate::rpc::wire::{Command, HelloReply, Limits, PROTOCOL_VERSION, REQUEST_HEADER, RequestHeader, Response};

/// From the connection to its end.
const PATIENCE: Duration = Duration::from_secs(2);

/// The longest body of a HELLO.
const HELLO: usize = 24;

/// Answers a HELLO, if one comes, with what keeps the server from taking the client.
pub(super) fn turn_away(stream: &TcpStream, state: State) -> io::Result<()> {
    let until = Instant::now() + PATIENCE;
    let mut header = [0; REQUEST_HEADER];
    socket::read(stream, &mut header, until)?;
    let limits = Limits { max_nodes: 0, max_tensors: 0, max_body: HELLO as u64 };
    let header = RequestHeader::decode(&header).ok().filter(|header| header.command == Command::Hello);
    let Some(len) = header.and_then(|header| header.body_len(&limits).ok()) else { return Ok(()) };
    let mut body = [0; HELLO];
    socket::read(stream, body.get_mut(..len).unwrap_or_default(), until)?;
    // A client from before 4.0 knows the short form alone, and none of them is taken anyway.
    let conn_caps = (len > 0).then_some([0; 24]);
    let greeting = Greeting { revision: REVISION, state }.to_byte();
    let mut reply = Vec::new();
    Response::Hello(HelloReply { version: PROTOCOL_VERSION, conn_caps, greeting }).encode(&mut reply);
    stream.set_write_timeout(Some(socket::left(until)?))?;
    (&*stream).write_all(&reply)
}

//! HELLO: the first message of every client. Its reply carries the server's state and the revision of the extension.

use super::frame;
use crate::rpc::server::client_connection::ClientConnection;
use crate::rpc::server::context::ServerContext;
use crate::rpc::server::session::failure::{Failure, SessionError};
use crate::rpc::server::session::request_error::RequestError;
use crate::rpc::wire::ext::{Greeting, REVISION, State};
use crate::rpc::wire::{Command, HelloReply, PROTOCOL_VERSION, REQUEST_HEADER, RequestHeader, Response};

/// Replies to the message with this header, which must be a HELLO, and ends the handshake.
pub(in crate::rpc::server) fn answer(
    server: &ServerContext,
    connection: &mut ClientConnection,
    header: [u8; REQUEST_HEADER],
    body: &mut Vec<u8>,
) -> Result<(), Failure> {
    let header = frame::decode(header)?;
    reply(server, connection, header, body).map_err(|e| Failure::new(Some(header.command.name()), e))
}

fn reply(
    server: &ServerContext,
    connection: &mut ClientConnection,
    header: RequestHeader,
    body: &mut Vec<u8>,
) -> Result<(), SessionError> {
    let len = header.body_len(&server.config.limits)?;
    if header.command != Command::Hello {
        return Err(RequestError::HelloFirst(header.command).into());
    }
    connection.body(len, body)?;
    connection.handshaken();
    // Clients from before 4.0 send an empty body, and know only the short reply.
    let current = len > 0;
    let conn_caps = current.then_some([0; 24]);
    let state = server.lifecycle.state();
    let greeting = Greeting { revision: REVISION, state }.to_byte();
    connection.send(&Response::Hello(HelloReply { version: PROTOCOL_VERSION, conn_caps, greeting }))?;
    match state {
        _ if !current => Err(RequestError::OldClient.into()),
        State::Ready => Ok(()),
        State::Full | State::Draining => Err(RequestError::Draining.into()),
    }
}

//! The handshake, which precedes the choice of a front end: HELLO is the first message of every client, and a client of the
//! extension sends GREET right after it. The reply to HELLO carries the server's state and the revision of the extension.

use thiserror::Error;

use super::client_connection::ClientConnection;
use super::context::ServerContext;
use super::session::failure::{Failure, SessionError};
use crate::rpc::wire::ext::{ExtCommand, Greeting, REVISION, State};
use crate::rpc::wire::{Command, HelloReply, PROTOCOL_VERSION, REQUEST_HEADER, RequestHeader, Response};

/// Bytes of a current HELLO's body, and of the capabilities in its reply. Clients from before 4.0 send an empty body.
pub(super) const HELLO_BODY: usize = 24;

/// What is wrong with a client's handshake: the client's fault.
#[derive(Debug, Error)]
pub(super) enum HandshakeError {
    #[error("expected HELLO as the first message, got {0}")]
    HelloFirst(Command),
    #[error("the connection has had its HELLO")]
    HelloAgain,
    #[error("it comes right after HELLO, and once")]
    GreetSecond,
    #[error("the client greets in revision {0} of the extensions, this server speaks {REVISION}")]
    Revision(u32),
    #[error("the client speaks a protocol before 4.0, this server {PROTOCOL_VERSION}: update llama.cpp there")]
    OldClient,
    #[error("this server is about to end and takes no more clients")]
    Draining,
}

impl From<HandshakeError> for SessionError {
    fn from(e: HandshakeError) -> SessionError {
        SessionError::refused(e)
    }
}

/// Decodes the header of one of ggml's requests. A GREET gets an error of its own: it was sent too early or too late.
pub(super) fn decode_header(header: [u8; REQUEST_HEADER]) -> Result<RequestHeader, Failure> {
    if header[0] == ExtCommand::Greet as u8 {
        return Err(Failure::new(Some(ExtCommand::Greet.name()), HandshakeError::GreetSecond));
    }
    RequestHeader::decode(&header).map_err(|e| Failure::new(None, e))
}

/// The reply to a HELLO with a body of `len` bytes. Clients from before 4.0 know only the short form.
pub(super) fn hello_reply(len: usize, state: State) -> Response<'static> {
    let conn_caps = (len > 0).then_some([0; HELLO_BODY]);
    let greeting = Greeting { revision: REVISION, state }.to_byte();
    Response::Hello(HelloReply { version: PROTOCOL_VERSION, conn_caps, greeting })
}

/// Replies to the message with this header, which must be a HELLO, and ends the time limit of the handshake.
pub(super) fn serve_hello(
    server: &ServerContext,
    connection: &mut ClientConnection,
    header: [u8; REQUEST_HEADER],
    body: &mut Vec<u8>,
) -> Result<(), Failure> {
    let header = decode_header(header)?;
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
        return Err(HandshakeError::HelloFirst(header.command).into());
    }
    connection.body(len, body)?;
    connection.handshaken();
    let state = server.lifecycle.state();
    connection.send(&hello_reply(len, state))?;
    match state {
        _ if len == 0 => Err(HandshakeError::OldClient.into()),
        State::Ready => Ok(()),
        State::Full | State::Draining => Err(HandshakeError::Draining.into()),
    }
}

//! Server side of the handshake, before a front end is chosen. HELLO is the first message of every client; its reply carries
//! the server's state and the revision of the extension. A client of the extension sends HELLO_EXT as its second message, which
//! the extended front end serves.

use thiserror::Error;

use super::client_connection::ClientConnection;
use super::context::ServerContext;
use super::session::failure::{SessionError, SessionFailure};
use super::versions::{ServedVersion, VersionChoice};
use crate::rpc::wire::ext::{ExtCommand, ExtensionOffer, REVISION, ServerState};
use crate::rpc::wire::{HelloReply, REQUEST_HEADER, RequestHeader, Response, RpcCommand};

/// Size of the body of a HELLO, and of the capabilities in its reply, in bytes. Clients of versions before 4.0 send an empty
/// body.
pub(super) const HELLO_BODY: usize = 24;

/// An invalid HELLO or HELLO_EXT. The client is at fault, except for [`HelloError::Draining`].
#[derive(Debug, Error)]
pub(super) enum HelloError {
    #[error("expected HELLO as the first message, got {0}")]
    ExpectedHello(RpcCommand),
    #[error("a second HELLO: the connection has had its HELLO")]
    RepeatedHello,
    #[error("expected right after HELLO, and once")]
    MisplacedHelloExt,
    #[error("the client requests revision {0} of the extensions, this server supports revision {REVISION}")]
    UnsupportedRevision(u32),
    #[error(
        "the client uses a protocol before 4.0, which this server does not support: update the llama.cpp of the client"
    )]
    OldClient,
    #[error("this server is about to end (draining) and accepts no more clients")]
    Draining,
}

impl From<HelloError> for SessionError {
    fn from(e: HelloError) -> SessionError {
        SessionError::front_end(e)
    }
}

/// Decodes the header of a request of ggml's protocol.
///
/// # Errors
/// An unknown command, or a HELLO_EXT, which was sent before HELLO or not directly after it.
pub(super) fn decode_header(header: [u8; REQUEST_HEADER]) -> Result<RequestHeader, SessionFailure> {
    if header[0] == ExtCommand::HelloExt as u8 {
        return Err(SessionFailure::new(Some(ExtCommand::HelloExt.name()), HelloError::MisplacedHelloExt));
    }
    RequestHeader::decode(&header).map_err(|e| SessionFailure::new(None, e))
}

/// The reply to a HELLO with a body of `len` bytes: `version` is answered. Clients of versions before 4.0 send no body and
/// expect no capabilities.
pub(super) fn hello_reply(len: usize, version: ServedVersion, state: ServerState) -> Response<'static> {
    let conn_caps = (len > 0).then_some([0; HELLO_BODY]);
    let extension_byte = ExtensionOffer { revision: REVISION, state }.to_byte();
    Response::Hello(HelloReply { version: version.in_reply(), conn_caps, extension_byte })
}

/// Reads and serves the first message, which must be HELLO. `header` is its header. Lifts the time limit of the handshake once
/// the message is complete. Returns the answered version.
pub(super) fn serve_hello(
    server: &ServerContext,
    connection: &mut ClientConnection,
    versions: &VersionChoice<'_>,
    header: [u8; REQUEST_HEADER],
    body: &mut Vec<u8>,
) -> Result<ServedVersion, SessionFailure> {
    let header = decode_header(header)?;
    reply_to_hello(server, connection, versions, header, body)
        .map_err(|e| SessionFailure::new(Some(header.command.name()), e))
}

fn reply_to_hello(
    server: &ServerContext,
    connection: &mut ClientConnection,
    versions: &VersionChoice<'_>,
    header: RequestHeader,
    body: &mut Vec<u8>,
) -> Result<ServedVersion, SessionError> {
    let len = header.body_len(&server.config.limits)?;
    if header.command != RpcCommand::Hello {
        return Err(HelloError::ExpectedHello(header.command).into());
    }
    connection.read_body(len, body)?;
    connection.end_handshake();
    let state = server.lifecycle.state();
    let version = versions.answer();
    connection.send_response(&hello_reply(len, version, state))?;
    match state {
        _ if len == 0 => Err(HelloError::OldClient.into()),
        ServerState::Ready => Ok(version),
        ServerState::Full | ServerState::Draining => Err(HelloError::Draining.into()),
    }
}

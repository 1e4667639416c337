//! Server side of the handshake, before a front end is chosen. HELLO is the first message of every client since 2025; from 7.0
//! on its reply carries the server's state and the revision of the extension. A client of the extension sends HELLO_EXT as its
//! second message, which the extended front end serves. A client of 2024 (gen0) sends no HELLO: its first message is a request.

use thiserror::Error;

use super::client_connection::{BodyBuffer, ClientConnection};
use super::context::ServerContext;
use super::session::failure::{SessionError, SessionFailure};
use super::versions::{ServedVersion, VersionChoice};
use crate::rpc::wire::ext::{ExtCommand, ExtensionOffer, REVISION, ServerState};
use crate::rpc::wire::{CAPS_BYTES, HelloForm, HelloReply, REQUEST_HEADER, RequestHeader, Response, RpcCommand};

/// How the first record of TLS begins: its type and the major version. No command that comes first has this number.
const TLS_HANDSHAKE: [u8; 2] = [22, 3];

/// An invalid HELLO or HELLO_EXT. The client is at fault, except for [`HelloError::Draining`].
#[derive(Debug, Error)]
pub(super) enum HelloError {
    #[error(
        "expected HELLO as the first message, got {0}; clients of 2024 send none, for them serve gen0 (--protocol)"
    )]
    ExpectedHello(RpcCommand),
    #[error("the client uses TLS, which this address does not (--listen …=plain, or no --key)")]
    Tls,
    #[error("a second HELLO: the connection has had its HELLO")]
    RepeatedHello,
    #[error("expected right after HELLO, and once")]
    MisplacedHelloExt,
    #[error("the client requests revision {0} of the extensions, this server supports revision {REVISION}")]
    UnsupportedRevision(u32),
    #[error(
        "the client's HELLO is that of {form}, and this address serves {served} (--listen, --protocol)",
        form = form_name(*.form)
    )]
    FormNotServed { form: HelloForm, served: String },
    #[error("this server is about to end (draining) and accepts no more clients")]
    Draining,
}

impl From<HelloError> for SessionError {
    fn from(e: HelloError) -> SessionError {
        SessionError::front_end(e)
    }
}

/// The versions with this form of HELLO, for messages.
const fn form_name(form: HelloForm) -> &'static str {
    match form {
        HelloForm::Caps => "protocol 4.0 and later",
        HelloForm::Empty => "protocols 1.0 to 3.6",
        HelloForm::Absent => "no HELLO, as in protocols before 1.0",
    }
}

/// The form of a HELLO with a body of `len` bytes.
pub(super) const fn hello_form(len: usize) -> HelloForm {
    if len == 0 { HelloForm::Empty } else { HelloForm::Caps }
}

/// Rejects a HELLO_EXT that was sent before HELLO or not directly after it.
///
/// # Errors
/// The header is that of a HELLO_EXT.
pub(super) fn reject_hello_ext(header: [u8; REQUEST_HEADER]) -> Result<(), SessionFailure> {
    if header[0] == ExtCommand::HelloExt as u8 {
        return Err(SessionFailure::new(Some(ExtCommand::HelloExt.name()), HelloError::MisplacedHelloExt));
    }
    Ok(())
}

/// The reply to a HELLO. `None`: clients of this version send no HELLO.
pub(super) fn hello_reply(version: ServedVersion, state: ServerState) -> Option<Response<'static>> {
    let caps = version.hello_form() == HelloForm::Caps;
    let offer = ExtensionOffer { revision: REVISION, state }.to_byte();
    Some(Response::Hello(HelloReply {
        version: version.in_reply()?,
        conn_caps: caps.then_some([0; CAPS_BYTES]),
        extension_byte: if version.offers_extensions() { offer } else { 0 },
    }))
}

/// How a client began its connection.
pub(super) enum Opening {
    /// With a HELLO, which was answered with this version.
    Hello(ServedVersion),
    /// With a request of a version without HELLO. The request is not yet served.
    WithoutHello(ServedVersion),
}

/// Reads and serves the first message, if it is HELLO. `header` is its header. Lifts the time limit of the handshake once the
/// message is complete.
///
/// # Errors
/// The listener serves no version that begins like this, or the server is draining.
pub(super) fn serve_hello(
    server: &ServerContext,
    connection: &mut ClientConnection,
    versions: &VersionChoice<'_>,
    header: [u8; REQUEST_HEADER],
    body: &mut BodyBuffer,
) -> Result<Opening, SessionFailure> {
    reject_hello_ext(header)?;
    if header[..2] == TLS_HANDSHAKE {
        return Err(SessionFailure::new(None, HelloError::Tls));
    }
    if let Some(version) = versions.answer(HelloForm::Absent)
        && version.has_command_number(header[0])
    {
        if server.lifecycle.state() != ServerState::Ready {
            return Err(SessionFailure::new(None, HelloError::Draining));
        }
        connection.end_handshake();
        return Ok(Opening::WithoutHello(version));
    }
    let header = RequestHeader::decode(&header).map_err(|e| SessionFailure::new(None, e))?;
    reply_to_hello(server, connection, versions, header, body)
        .map_err(|e| SessionFailure::new(Some(header.command.name()), e))
}

/// Replies to the client's first message, if it is a HELLO, with the state for which the client is rejected. Any other message
/// gets no reply. The caller closes the connection.
///
/// # Errors
/// Of the connection.
pub(super) fn reject_hello(
    server: &ServerContext,
    connection: &mut ClientConnection,
    versions: &VersionChoice<'_>,
    header: [u8; REQUEST_HEADER],
    body: &mut BodyBuffer,
    state: ServerState,
) -> Result<(), SessionFailure> {
    let header = RequestHeader::decode(&header).ok().filter(|header| header.command == RpcCommand::Hello);
    let Some(len) = header.and_then(|header| header.body_len(&server.config.limits).ok()) else { return Ok(()) };
    let replied: Result<(), SessionError> = (|| {
        connection.read_body(len, body)?;
        let reply = versions.answer(hello_form(len)).and_then(|version| hello_reply(version, state));
        reply.map_or(Ok(()), |reply| Ok(connection.send_response(&reply)?))
    })();
    replied.map_err(|e| SessionFailure::new(Some(RpcCommand::Hello.name()), e))
}

fn reply_to_hello(
    server: &ServerContext,
    connection: &mut ClientConnection,
    versions: &VersionChoice<'_>,
    header: RequestHeader,
    body: &mut BodyBuffer,
) -> Result<Opening, SessionError> {
    // Lengths of other requests depend on the client's version, which is unknown.
    if header.command != RpcCommand::Hello {
        return Err(HelloError::ExpectedHello(header.command).into());
    }
    let len = header.body_len(&server.config.limits)?;
    connection.read_body(len, body)?;
    connection.end_handshake();
    let state = server.lifecycle.state();
    let form = hello_form(len);
    let not_served = || HelloError::FormNotServed { form, served: versions.served() };
    let version = versions.answer(form).ok_or_else(not_served)?;
    connection.send_response(&hello_reply(version, state).ok_or_else(not_served)?)?;
    match state {
        ServerState::Ready => Ok(Opening::Hello(version)),
        ServerState::Full | ServerState::Draining => Err(HelloError::Draining.into()),
    }
}

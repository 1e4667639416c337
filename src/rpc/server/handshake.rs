//! Server side of the handshake, before a front end is chosen. HELLO is the first message of every client since 2025; from 7.0
//! on its reply carries the server's state and the revision of the extension. A client of the extension sends HELLO_EXT as its
//! second message, which the extended front end serves. A client of 2024 (gen0) sends no HELLO: its first message is a request.

use log::debug;
use thiserror::Error;

use super::admission::{Refusal, SessionPermit};
use super::client_connection::{BodyBuffer, ClientConnection};
use super::context::ServerContext;
use super::log_limits::LogKind;
use super::session::failure::{SessionError, SessionFailure};
use super::versions::{ServedVersion, VersionChoice};
use crate::rpc::wire::ext::{ExtCommand, ExtensionOffer, REVISION, ServerState};
use crate::rpc::wire::{
    CAPS_BYTES, HelloForm, HelloReply, REQUEST_HEADER, RequestHeader, Response, RpcCommand, WireError,
};

/// How the first record of TLS begins: its type and the major version. No command that comes first has this number.
const TLS_HANDSHAKE: [u8; 2] = [22, 3];

/// An invalid HELLO or HELLO_EXT. The client is at fault.
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

/// The failure of a header without a command of ggml's protocol, such as a HELLO_EXT before HELLO or not directly after it.
pub(super) fn unknown_command(header: [u8; REQUEST_HEADER], error: WireError) -> SessionFailure {
    if header[0] == ExtCommand::HelloExt as u8 {
        return SessionFailure::new(Some(ExtCommand::HelloExt.name()), HelloError::MisplacedHelloExt);
    }
    SessionFailure::new(None, error)
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

/// A client whose connection is a session now.
pub(super) struct Opening {
    /// The version by which it is served.
    pub(super) version: ServedVersion,
    /// The header of its first request, if the client has sent that instead of a HELLO.
    pub(super) first_request: Option<[u8; REQUEST_HEADER]>,
}

/// Reads and serves the first message, if it is HELLO. `header` is its header. Once the message is complete, the connection
/// becomes a session, and the time limit of the handshake is lifted. `None`: the server is full or draining, or refuses the client.
/// The reason is logged, and was sent if the client has sent a HELLO.
///
/// # Errors
/// The listener serves no version that begins like this.
pub(super) fn serve_hello(
    server: &ServerContext,
    connection: &mut ClientConnection,
    permit: &SessionPermit,
    versions: &VersionChoice<'_>,
    header: [u8; REQUEST_HEADER],
    body: &mut BodyBuffer,
) -> Result<Option<Opening>, SessionFailure> {
    if header[..2] == TLS_HANDSHAKE {
        return Err(SessionFailure::new(None, HelloError::Tls));
    }
    if let Some(version) = versions.answer(HelloForm::Absent)
        && version.has_command_number(header[0])
    {
        let state = begin_session(server, connection, permit).map_err(|e| SessionFailure::new(None, e))?;
        return Ok((state == ServerState::Ready).then_some(Opening { version, first_request: Some(header) }));
    }
    let header = RequestHeader::decode(&header).map_err(|e| unknown_command(header, e))?;
    reply_to_hello(server, connection, permit, versions, header, body)
        .map_err(|e| SessionFailure::new(Some(header.command.name()), e))
}

/// Makes the connection a session, or logs why the server refuses that. Returns the state that the client is sent. The log has
/// the line before that, so that a client that sees the reply or the end of its connection finds it there.
fn begin_session(
    server: &ServerContext,
    connection: &mut ClientConnection,
    permit: &SessionPermit,
) -> Result<ServerState, SessionError> {
    let peer = connection.peer();
    let (state, kind, reason) = match permit.begin(peer, connection.memory()) {
        Ok(()) => {
            connection.end_handshake();
            return Ok(ServerState::Ready);
        }
        // The log has a line about that.
        Err(Refusal::Closed) => return Ok(ServerState::Full),
        Err(Refusal::Draining) => {
            let reason = "this server is draining and accepts no more clients".to_owned();
            (ServerState::Draining, LogKind::RejectedDraining, reason)
        }
        Err(Refusal::Full(reason)) => (ServerState::Full, LogKind::RejectedFull, reason.to_string()),
        Err(Refusal::AfterFaults(remaining)) => {
            let minutes = remaining.as_secs().div_ceil(60);
            let reason = format!(
                "kernels of its key or address have made a device unusable more than once; it is refused for {minutes} min"
            );
            (ServerState::Full, LogKind::RejectedAfterFaults, reason)
        }
        Err(Refusal::FullMemory(reason)) => (ServerState::Full, LogKind::RejectedMemory, reason.to_string()),
    };
    server.logs.log(peer, kind, format_args!("{peer}: rejected: {reason}; connection closed"));
    Ok(state)
}

/// Replies to HELLO with the version and the server's state. Versions before 7.0 have no field for the state, and a client of a
/// version that is not served gets no reply.
fn reply_to_hello(
    server: &ServerContext,
    connection: &mut ClientConnection,
    permit: &SessionPermit,
    versions: &VersionChoice<'_>,
    header: RequestHeader,
    body: &mut BodyBuffer,
) -> Result<Option<Opening>, SessionError> {
    // Lengths of other requests depend on the client's version, which is unknown.
    if header.command != RpcCommand::Hello {
        return Err(HelloError::ExpectedHello(header.command).into());
    }
    let len = header.body_len(&server.config.limits)?;
    connection.read_body(len, body)?;
    let state = begin_session(server, connection, permit)?;
    let form = hello_form(len);
    let version = versions.answer(form);
    let reply = version.and_then(|version| hello_reply(version, state));
    match (state, version, reply) {
        (ServerState::Ready, Some(version), Some(reply)) => {
            connection.send_response(&reply)?;
            Ok(Some(Opening { version, first_request: None }))
        }
        (ServerState::Ready, ..) => Err(HelloError::FormNotServed { form, served: versions.served() }.into()),
        (ServerState::Full | ServerState::Draining, _, reply) => {
            // The log has the reason, also if the client has gone.
            if let Some(Err(e)) = reply.map(|reply| connection.send_response(&reply)) {
                debug!("{}: refused without a reply: {e}", connection.peer());
            }
            Ok(None)
        }
    }
}

//! Serves one connection from its first byte to its end: HELLO, then the front end that the client's second message chooses
//! (HELLO_EXT: [`extended`], anything else: [`ggml`]). A client of a version without HELLO goes to [`ggml`] at once. The end of
//! each session is logged only here.
//!
//! The second message also tells whether the answered version of the protocol is the client's: a client of another version
//! closes the connection instead. Clients of the extension work with each version, so HELLO_EXT tells nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use log::debug;

use super::client_connection::{BodyBuffer, ClientConnection, Timeouts};
use super::context::ServerContext;
use super::extended;
use super::ggml;
use super::handshake::{Opening, serve_hello};
use super::hangup_watch::{CancelOrder, SessionWatch};
use super::host_memory::SessionMemory;
use super::log_limits::LogKind;
use super::session::failure::{SessionEnd, SessionFailure};
use super::tenants::TenantPermit;
use super::versions::{VersionChoice, VersionPolicy};
use crate::rpc::transport;
use crate::rpc::wire::ext::ExtCommand;

/// Serves a connection to a listener with this policy to its end. All resources of the client are freed when this returns.
/// `handshake` counts the connection among the handshakes in flight; `memory` is the session's host memory.
pub(super) fn serve(
    server: &Arc<ServerContext>,
    connection: transport::Connection,
    handshake: TenantPermit,
    memory: Arc<SessionMemory>,
    policy: &VersionPolicy,
) {
    let peer = connection.peer();
    debug!("{peer}: connected");
    let watch = server.hangup_watch.add_session(connection.aborter());
    let waits = Arc::clone(&memory);
    let _canceller = watch.on_hangup(CancelOrder::Wait, move || waits.close());
    // A panic is a bug in fanout, triggered by this client's input. Other sessions must not end with it.
    let served =
        catch_unwind(AssertUnwindSafe(|| serve_requests(server, connection, handshake, memory, policy, &watch)));
    match served {
        Err(_) => {
            let text = format_args!("{peer}: bug in fanout: the session panicked; connection closed");
            server.logs.log(peer, LogKind::Panic, text);
        }
        Ok(Ok(SessionEnd::Closed)) => debug!("{peer}: disconnected"),
        Ok(Ok(SessionEnd::ClosedBeforeHello)) => debug!("{peer}: disconnected without a HELLO"),
        // A shutdown aborts every connection. That is not a failure of each client, so it is no warning.
        Ok(Err(_)) if server.lifecycle.is_stopping() => debug!("{peer}: closed by shutdown"),
        Ok(Err(failure)) if watch.has_hung_up() => debug!("{peer}: disconnected, and its work was aborted: {failure}"),
        Ok(Err(failure)) => {
            failure.log(&server.logs, LogKind::BadConnection, peer);
            failure.close();
        }
    }
}

fn serve_requests(
    server: &ServerContext,
    connection: transport::Connection,
    handshake: TenantPermit,
    memory: Arc<SessionMemory>,
    policy: &VersionPolicy,
    watch: &Arc<SessionWatch>,
) -> Result<SessionEnd, SessionFailure> {
    let config = &server.config;
    let peer = connection.peer();
    let versions = VersionChoice::new(policy, &server.version_probe, peer);
    let timeouts =
        Timeouts { handshake: config.handshake_timeout, stall: config.stall_timeout, idle: config.idle_timeout };
    let mut body = BodyBuffer::new(&memory);
    let mut connection = ClientConnection::new(connection, Arc::clone(watch), memory, handshake, timeouts);
    let Some(header) = connection.read_header().map_err(|e| SessionFailure::new(None, e))? else {
        return Ok(SessionEnd::ClosedBeforeHello);
    };
    let answered = match serve_hello(server, &mut connection, &versions, header, &mut body)? {
        Opening::Hello(version) => version,
        Opening::WithoutHello(version) => {
            return ggml::serve_session(server, connection, &versions, version, header, body);
        }
    };
    let Some(header) = connection.read_header().map_err(|e| SessionFailure::new(None, e))? else {
        // A shutdown closes the connections of clients, too.
        if !server.lifecycle.is_stopping() {
            if let Some(consequence) = versions.report_hang_up(answered) {
                server.logs.log(peer, LogKind::VersionHangUp, format_args!("{consequence}"));
            }
        }
        return Ok(SessionEnd::Closed);
    };
    if header[0] == ExtCommand::HelloExt as u8 && answered.offers_extensions() {
        extended::serve_session(server, connection, peer, header, body)
    } else {
        ggml::serve_session(server, connection, &versions, answered, header, body)
    }
}

//! Serves one connection from its first byte to its end: HELLO, then the front end that the client's second message chooses
//! (HELLO_EXT: [`extended`], anything else: [`ggml`]). A client of a version without HELLO goes to [`ggml`] at once. The end of
//! each session is logged only here: the failure, if there was one, and the audit line. A connection that begins with an HTTP request
//! goes to [`http`] instead.
//!
//! The second message also tells whether the answered version of the protocol is the client's: a client of another version
//! closes the connection instead. Clients of the extension work with each version, so HELLO_EXT tells nothing.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use log::debug;

use super::admission::SessionPermit;
use super::audit::SessionAudit;
use super::client_connection::{BodyBuffer, ClientConnection, Timeouts};
use super::context::ServerContext;
use super::counters::EndReason;
use super::extended;
use super::ggml;
use super::handshake::{Opening, serve_hello};
use super::hangup_watch::{CancelOrder, SessionWatch};
use super::host_memory::SessionMemory;
use super::http::{self, is_http};
use super::log_limits::LogKind;
use super::session::failure::SessionFailure;
use super::versions::{VersionChoice, VersionPolicy};
use crate::rpc::transport;
use crate::rpc::wire::ext::{ExtCommand, ServerState};

/// Serves a connection to a listener with this policy to its end. All resources of the client are freed when this returns.
/// `permit` counts the connection; `memory` is the session's host memory. A connection that begins with an HTTP request gives
/// them back, if `serves_http` holds.
pub(super) fn serve(
    server: &Arc<ServerContext>,
    connection: transport::Connection,
    (permit, memory): (SessionPermit, Arc<SessionMemory>),
    policy: &VersionPolicy,
    serves_http: bool,
) {
    let end = connection.aborter();
    debug!("{}: connected", end.peer());
    let watch = server.hangup_watch.add_session(connection.aborter());
    let audit = server.statistics.add_session(end.peer());
    permit.set_watch(&watch, &audit);
    let (waits, charged) = (Arc::clone(&memory), Arc::clone(&memory));
    let canceller = watch.on_hangup(CancelOrder::Wait, move || waits.close());
    // A panic is a bug in fanout, triggered by this client's input. Other sessions must not end with it.
    let served = catch_unwind(AssertUnwindSafe(|| {
        serve_requests(server, connection, (&permit, memory), (policy, serves_http), &watch, &audit)
    }));
    let peer = end.peer();
    // The end of the connection causes other errors too, which are not the reason.
    let eviction = charged.eviction();
    let is_evicted = eviction.is_some();
    drop(charged);
    let served = match (served, eviction) {
        (Ok(Ok(Served::Session) | Err(_)), Some(eviction)) => Ok(Err(SessionFailure::new(None, eviction))),
        (served, _) => served,
    };
    let (reason, failure) = match served {
        Ok(Ok(Served::Http(connection, received))) => {
            drop((canceller, watch, audit, permit));
            return http::serve(server, connection, received);
        }
        Err(_) => {
            let text = format_args!("{peer}: bug in fanout: the session panicked; connection closed");
            server.logs.log(peer, LogKind::Panic, text);
            (EndReason::Panic, None)
        }
        // A shutdown aborts every connection. That is not a failure of each client, so it is no warning.
        Ok(_) if server.lifecycle.is_stopping() => (reason_of_shutdown(server), None),
        // The log has a line about the key, or about the limit of handshakes.
        Ok(_) if permit.is_aborted() => (EndReason::KeyChanged, None),
        Ok(Ok(Served::Session)) if watch.has_hung_up() => (EndReason::ClientGone, None),
        Ok(Ok(Served::Session)) => (audit.reason_of_close(), None),
        Ok(Err(failure)) if watch.has_hung_up() && !is_evicted => {
            debug!("{peer}: disconnected, and its work was aborted: {failure}");
            (EndReason::ClientGone, None)
        }
        Ok(Err(failure)) => {
            let kind = if audit.is_session() { LogKind::SessionFailure } else { LogKind::BadConnection };
            failure.log(&server.logs, kind, peer);
            (failure.end_reason(), Some(failure))
        }
    };
    if audit.is_session() {
        let detail = failure.as_ref().map(|failure| failure as &dyn fmt::Display);
        audit.end_session(reason);
        server.logs.log(peer, LogKind::SessionEnd, format_args!("{}", audit.line(reason, detail)));
    } else {
        debug!("{peer}: disconnected without a HELLO");
    }
    // After the lines: a client that sees the end of its connection finds them in the log.
    if let Some(failure) = failure {
        failure.close();
    }
}

/// The reason of a session that the server has ended.
fn reason_of_shutdown(server: &ServerContext) -> EndReason {
    if server.lifecycle.state() == ServerState::Draining { EndReason::Drain } else { EndReason::Shutdown }
}

/// The kind of a connection.
enum Served {
    /// A session, or none of any protocol. It is over.
    Session,
    /// One for HTTP, with its bytes that were read.
    Http(transport::Connection, Vec<u8>),
}

fn serve_requests(
    server: &ServerContext,
    connection: transport::Connection,
    (permit, memory): (&SessionPermit, Arc<SessionMemory>),
    (policy, serves_http): (&VersionPolicy, bool),
    watch: &Arc<SessionWatch>,
    audit: &Arc<SessionAudit>,
) -> Result<Served, SessionFailure> {
    let config = &server.config;
    let timeouts =
        Timeouts { handshake: config.handshake_timeout, stall: config.stall_timeout, idle: config.idle_timeout };
    let mut body = BodyBuffer::new(&memory);
    let mut connection = ClientConnection::new(connection, Arc::clone(watch), memory, timeouts, audit);
    let Some(header) = connection.read_header().map_err(|e| SessionFailure::new(None, e))? else {
        return Ok(Served::Session);
    };
    let peer = connection.peer();
    if serves_http && is_http(&header) {
        let (connection, received) = connection.into_raw(header);
        return Ok(Served::Http(connection, received));
    }
    let versions = VersionChoice::new(policy, &server.version_probe, peer);
    let opening = serve_hello(server, &mut connection, permit, &versions, header, &mut body)?;
    let Some(Opening { version: answered, first_request }) = opening else { return Ok(Served::Session) };
    audit.begin_session(answered, peer);
    server.logs.log(peer, LogKind::SessionStart, format_args!("{}", audit.first_line()));
    let next = first_request.map_or_else(|| connection.read_header(), |header| Ok(Some(header)));
    let Some(header) = next.map_err(|e| SessionFailure::new(None, e))? else {
        // A shutdown closes the connections of clients, too, and so does a list that no longer allows their keys.
        if !server.lifecycle.is_stopping()
            && !permit.is_aborted()
            && let Some(consequence) = versions.report_hang_up(answered)
        {
            server.logs.log(peer, LogKind::VersionHangUp, format_args!("{consequence}"));
        }
        return Ok(Served::Session);
    };
    if header[0] == ExtCommand::HelloExt as u8 && answered.offers_extensions() {
        extended::serve_session(server, connection, peer, header, body)?;
    } else {
        ggml::serve_session(server, connection, &versions, answered, header, body)?;
    }
    Ok(Served::Session)
}

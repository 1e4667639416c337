//! Serves one connection from its first byte to its end: HELLO, then the front end that the client's second message chooses
//! (HELLO_EXT: [`extended`], anything else: [`ggml`]). The end of each session is logged only here.

use std::sync::Arc;

use log::debug;

use super::client_connection::ClientConnection;
use super::context::ServerContext;
use super::extended;
use super::ggml;
use super::handshake::serve_hello;
use super::session::failure::{SessionEnd, SessionFailure};
use crate::rpc::transport;
use crate::rpc::wire::ext::ExtCommand;

/// Serves a connection to its end. All resources of the client are freed when this returns.
pub(super) fn serve(server: &Arc<ServerContext>, connection: transport::Connection) {
    let peer = connection.peer();
    debug!("{peer}: connected");
    match serve_requests(server, connection) {
        Ok(SessionEnd::Closed) => debug!("{peer}: disconnected"),
        Ok(SessionEnd::ClosedBeforeHello) => debug!("{peer}: disconnected without a HELLO"),
        // A shutdown aborts every connection. That is not a failure of each client, so it is no warning.
        Err(_) if server.lifecycle.is_stopping() => debug!("{peer}: closed by shutdown"),
        Err(failure) => failure.log_and_close(peer),
    }
}

fn serve_requests(server: &ServerContext, connection: transport::Connection) -> Result<SessionEnd, SessionFailure> {
    let config = &server.config;
    let peer = connection.peer();
    let mut connection = ClientConnection::new(connection, config.handshake_timeout, config.stall_timeout);
    let mut body = Vec::new();
    let Some(header) = connection.read_header().map_err(|e| SessionFailure::new(None, e))? else {
        return Ok(SessionEnd::ClosedBeforeHello);
    };
    serve_hello(server, &mut connection, header, &mut body)?;
    let Some(header) = connection.read_header().map_err(|e| SessionFailure::new(None, e))? else {
        return Ok(SessionEnd::Closed);
    };
    if header[0] == ExtCommand::HelloExt as u8 {
        extended::serve_session(server, connection, peer, header, body)
    } else {
        ggml::serve_session(server, connection, peer, header, body)
    }
}

//! One connection from its first byte to its end: HELLO, then the front end that the client chose, then one place for failures.

use std::sync::Arc;

use log::debug;

use super::client_connection::ClientConnection;
use super::context::ServerContext;
use super::extended;
use super::ggml;
use super::handshake::serve_hello;
use super::session::failure::{End, Failure};
use crate::rpc::transport;
use crate::rpc::wire::ext::ExtCommand;

/// Serves a connection to its end. Everything that the client had is freed when this returns.
pub(super) fn serve(server: &Arc<ServerContext>, connection: transport::Connection) {
    let peer = connection.peer();
    debug!("{peer}: connected");
    match run(server, connection) {
        Ok(End::Closed) => debug!("{peer}: disconnected"),
        Ok(End::Silent) => debug!("{peer}: disconnected without a HELLO"),
        // The shutdown closes every connection, and has logged that once for all of them.
        Err(_) if server.lifecycle.is_stopping() => debug!("{peer}: closed by shutdown"),
        Err(failure) => failure.end(peer),
    }
}

fn run(server: &ServerContext, connection: transport::Connection) -> Result<End, Failure> {
    let config = &server.config;
    let peer = connection.peer();
    let mut connection = ClientConnection::new(connection, config.handshake_timeout, config.stall_timeout);
    let mut body = Vec::new();
    let Some(header) = connection.header().map_err(|e| Failure::new(None, e))? else { return Ok(End::Silent) };
    serve_hello(server, &mut connection, header, &mut body)?;
    let Some(header) = connection.header().map_err(|e| Failure::new(None, e))? else { return Ok(End::Closed) };
    if header[0] == ExtCommand::Greet as u8 {
        extended::run(server, connection, peer, header, body)
    } else {
        ggml::run(server, connection, peer, header, body)
    }
}

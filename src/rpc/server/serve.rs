//! One connection from its first byte to its end: HELLO, then the front end that the client chose, then one place for failures.

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use log::debug;

use super::client_connection::{Connection, TransportError};
use super::context::ServerContext;
use super::extended;
use super::ggml::{self, hello};
use super::listen;
use super::session::failure::{End, Failure};
use crate::rpc::wire::ext::ExtCommand;

/// Serves a connection to its end. Everything that the client had is freed when this returns.
pub(super) fn serve(server: &Arc<ServerContext>, stream: Arc<TcpStream>, peer: SocketAddr) {
    debug!("{peer}: connected");
    match run(server, stream, peer) {
        Ok(End::Closed) => debug!("{peer}: disconnected"),
        Ok(End::Silent) => debug!("{peer}: disconnected without a HELLO"),
        // The shutdown closes every connection, and has logged that once for all of them.
        Err(_) if server.lifecycle.is_stopping() => debug!("{peer}: closed by shutdown"),
        Err(failure) => failure.end(peer),
    }
}

fn run(server: &ServerContext, stream: Arc<TcpStream>, peer: SocketAddr) -> Result<End, Failure> {
    let config = &server.config;
    let mut connection = listen::configure(&stream)
        .and_then(|()| Connection::new(stream, config.handshake_timeout, config.stall_timeout))
        .map_err(|e| Failure::new(None, TransportError::Io(e)))?;
    let mut body = Vec::new();
    let Some(header) = connection.header().map_err(|e| Failure::new(None, e))? else { return Ok(End::Silent) };
    hello::answer(server, &mut connection, header, &mut body)?;
    let Some(header) = connection.header().map_err(|e| Failure::new(None, e))? else { return Ok(End::Closed) };
    if header[0] == ExtCommand::Greet as u8 {
        extended::run(server, connection, peer, header, body)
    } else {
        ggml::run(server, connection, peer, header, body)
    }
}

//! The one path for failures: bad requests, lost connections and failed devices all become a [`Failure`], which ends the session.
//!
//! A failure of one of the extension's queues is not one of these: the queue reports it, and the session goes on.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use log::warn;

use super::request_error::RequestError;
use crate::device::DeviceError;
use crate::graph::validate::GraphError;
use crate::rpc::server::client_connection::Writer;
use crate::rpc::transport::{PeerAddr, TransportError};
use crate::rpc::wire::WireError;
use crate::tensor::DescError;

/// Why a session cannot serve a request, by who is at fault.
#[derive(Debug, thiserror::Error)]
pub(in crate::rpc::server) enum SessionError {
    /// The client sent something that the session core cannot serve.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The client sent something that the handshake or its front end cannot serve: an error of theirs, for the log and the client.
    #[error(transparent)]
    Refused(Box<dyn Error + Send + Sync>),
    /// The connection is lost, or too slow.
    #[error("{}", connection_end(.0))]
    Transport(#[from] TransportError),
    /// A device failed at valid work.
    #[error("device: {0}")]
    Device(#[from] DeviceError),
}

impl SessionError {
    /// A request that the handshake or a front end cannot serve.
    pub(in crate::rpc::server) fn refused(e: impl Error + Send + Sync + 'static) -> SessionError {
        SessionError::Refused(Box::new(e))
    }
}

/// The end of a connection, in the words of the log.
fn connection_end(error: &TransportError) -> String {
    match error {
        TransportError::Closed => "the client went away in the middle of a message".to_owned(),
        other => other.to_string(),
    }
}

macro_rules! request_errors {
    ($($source:ty),*) => {$(
        impl From<$source> for SessionError {
            fn from(e: $source) -> SessionError {
                RequestError::from(e).into()
            }
        }
    )*};
}

request_errors!(WireError, DescError, GraphError);

/// A bug of ours: a decoder returned another request than its command says.
pub(in crate::rpc::server) fn decoder_bug() -> SessionError {
    DeviceError::Bug("the decoder took one command for another".to_owned()).into()
}

/// How a session ended that had no failure.
pub(in crate::rpc::server) enum End {
    /// The client closed the connection.
    Closed,
    /// The client closed it before its first message.
    Silent,
}

/// The failure that ended a session.
pub(in crate::rpc::server) struct Failure {
    /// The command that failed, where it is known.
    command: Option<&'static str>,
    error: SessionError,
    /// Where the client is notified. `None`: the protocol has no message for it.
    writer: Option<Arc<Writer>>,
}

impl Failure {
    /// A failure that the client is not notified of: ggml's protocol has no error reply.
    pub(in crate::rpc::server) fn new(command: Option<&'static str>, error: impl Into<SessionError>) -> Failure {
        Failure { command, error: error.into(), writer: None }
    }

    /// How a session ended whose client receives notifications, and which is served no longer. Several threads write to such a
    /// client: the first that could not has closed the connection, so its error comes before what the session's thread saw of that.
    pub(in crate::rpc::server) fn of_session(writer: Arc<Writer>, served: Result<(), Failure>) -> Result<End, Failure> {
        let failure = match (writer.given_up(), served) {
            (Some((command, error)), _) => Failure::new(Some(command), error),
            (None, Err(failure)) => failure,
            (None, Ok(())) => {
                writer.close();
                return Ok(End::Closed);
            }
        };
        Err(Failure { writer: Some(writer), ..failure })
    }

    /// Logs the failure, notifies the client where the protocol can and the connection still works, and closes the connection. A
    /// client that is not notified is closed by its last handle, which the caller drops.
    pub(in crate::rpc::server) fn end(self, peer: PeerAddr) {
        warn!("{peer}: {self}; connection closed");
        match (&self.writer, &self.error) {
            (Some(writer), SessionError::Transport(_)) => writer.close(),
            (Some(writer), _) => writer.refuse(&self.to_string()),
            (None, _) => {}
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { command, error, .. } = self;
        match command {
            Some(command) => write!(f, "{command}: {error}"),
            None => write!(f, "{error}"),
        }
    }
}

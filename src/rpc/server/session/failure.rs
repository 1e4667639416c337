//! Failures that end a session: invalid requests, lost connections and failed devices all become a [`SessionFailure`], which is
//! logged, sent to the client where the protocol can, and closes the connection.
//!
//! The failure of a queue of the extension is no session failure: the queue sends QUEUE_FAILED, and the session continues.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::request_error::RequestError;
use crate::device::{DeviceError, UploadError};
use crate::graph::validate::GraphError;
use crate::rpc::server::client_connection::{ClientWriter, NextRequestError, ReadBodyError};
use crate::rpc::server::counters::EndReason;
use crate::rpc::server::host_memory::HostMemoryError;
use crate::rpc::server::log_limits::{LogKind, LogLimits};
use crate::rpc::transport::{PeerAddr, TransportError};
use crate::rpc::wire::WireError;
use crate::tensor::DescError;

/// Why a session cannot serve a request. The variant identifies the party at fault: client, connection or device.
#[derive(Debug, thiserror::Error)]
pub(in crate::rpc::server) enum SessionError {
    /// A request that the session core rejects. The client is at fault.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// A request that the handshake or the front end rejects, with an error type of its own. The client is at fault.
    #[error(transparent)]
    FrontEnd(Box<dyn Error + Send + Sync>),
    /// The connection is lost, or a deadline has passed.
    #[error("{}", transport_text(.0))]
    Transport(#[from] TransportError),
    /// The client has sent no request for the idle timeout.
    #[error("{}", NextRequestError::Idle(*.0))]
    Idle(Duration),
    /// A limit of host memory is reached, and the protocol has no reply that says so.
    #[error(transparent)]
    HostMemory(#[from] HostMemoryError),
    /// A device failed while it served a valid request.
    #[error("device: {0}")]
    Device(#[from] DeviceError),
}

impl SessionError {
    /// An error of the handshake or of a front end.
    pub(in crate::rpc::server) fn front_end(e: impl Error + Send + Sync + 'static) -> SessionError {
        SessionError::FrontEnd(Box::new(e))
    }
}

impl From<NextRequestError> for SessionError {
    fn from(e: NextRequestError) -> SessionError {
        match e {
            NextRequestError::Idle(timeout) => SessionError::Idle(timeout),
            NextRequestError::Transport(e) => SessionError::Transport(e),
        }
    }
}

impl From<ReadBodyError> for SessionError {
    fn from(e: ReadBodyError) -> SessionError {
        match e {
            ReadBodyError::Transport(e) => SessionError::Transport(e),
            ReadBodyError::Memory(e) => SessionError::HostMemory(e),
        }
    }
}

impl From<UploadError<TransportError>> for SessionError {
    fn from(e: UploadError<TransportError>) -> SessionError {
        match e {
            UploadError::Source(e) => e.into(),
            UploadError::Device(e) => e.into(),
        }
    }
}

/// Text of a transport error in the log.
fn transport_text(error: &TransportError) -> String {
    match error {
        TransportError::Closed => "the client closed the connection in the middle of a message".to_owned(),
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

/// A bug in fanout: the decoder returned a request of another command than the header has.
pub(in crate::rpc::server) fn decoder_bug() -> SessionError {
    DeviceError::Bug("the decoder returned a request of another command than the header has".to_owned()).into()
}

/// The failure that ended a session.
pub(in crate::rpc::server) struct SessionFailure {
    /// Name of the command that failed, if it is known.
    command: Option<&'static str>,
    error: SessionError,
    /// Sends the reason to the client. `None`: the client's protocol has no message for it.
    writer: Option<Arc<ClientWriter>>,
}

impl SessionFailure {
    /// A failure that is not sent to the client, because ggml's protocol has no error reply.
    pub(in crate::rpc::server) fn new(command: Option<&'static str>, error: impl Into<SessionError>) -> SessionFailure {
        SessionFailure { command, error: error.into(), writer: None }
    }

    /// The end of a session of the extension. `served` is the result of the session's thread. Several threads write to the
    /// client. When a write fails, its thread records the error and closes the connection. The recorded error is the cause, so
    /// it takes precedence over the read error that the session's thread gets from the closed connection.
    pub(in crate::rpc::server) fn end_of_session(
        writer: Arc<ClientWriter>,
        served: Result<(), SessionFailure>,
    ) -> Result<(), SessionFailure> {
        let failure = match (writer.take_failure(), served) {
            (Some((command, error)), _) => SessionFailure::new(Some(command), error),
            (None, Err(failure)) => failure,
            (None, Ok(())) => {
                writer.close();
                return Ok(());
            }
        };
        Err(SessionFailure { writer: Some(writer), ..failure })
    }

    /// The reason of the session's end.
    pub(in crate::rpc::server) fn end_reason(&self) -> EndReason {
        match &self.error {
            SessionError::Request(_) | SessionError::FrontEnd(_) => EndReason::Violation,
            SessionError::Transport(TransportError::Closed) => EndReason::ClientGone,
            SessionError::Transport(TransportError::Reset(_)) => EndReason::ClientReset,
            SessionError::Transport(TransportError::TimedOut { .. }) | SessionError::Idle(_) => EndReason::Timeout,
            SessionError::Transport(TransportError::Tls(_) | TransportError::Io(_)) => EndReason::Connection,
            SessionError::HostMemory(_) => EndReason::HostMemory,
            SessionError::Device(_) => EndReason::Device,
        }
    }

    /// Logs the failure of a session, or of a connection that is none yet.
    pub(in crate::rpc::server) fn log(&self, logs: &LogLimits, kind: LogKind, peer: PeerAddr) {
        logs.log(peer, kind, format_args!("{peer}: {self}; connection closed"));
    }

    /// Sends the failure to the client, if the protocol has a message for it and the connection still works, and closes the
    /// connection. Without a writer, the connection is closed when the caller drops its last handle.
    pub(in crate::rpc::server) fn close(self) {
        match (&self.writer, &self.error) {
            (Some(writer), SessionError::Transport(_)) => writer.close(),
            (Some(writer), _) => writer.close_with_reason(&self.to_string()),
            (None, _) => {}
        }
    }
}

impl fmt::Display for SessionFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SessionFailure { command, error, .. } = self;
        match command {
            Some(command) => write!(f, "{command}: {error}"),
            None => write!(f, "{error}"),
        }
    }
}

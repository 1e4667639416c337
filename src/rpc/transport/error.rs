//! Typed errors of connections.

use std::io::{self, ErrorKind};
use std::time::Duration;

use thiserror::Error;

use super::Address;
use super::tls::TlsError;

/// Why a connection ended, or did not make progress in time.
#[derive(Debug, Error)]
pub(crate) enum TransportError {
    /// The stream ended within a message.
    #[error("the peer closed the connection in the middle of a message")]
    Closed,
    /// Both directions were ended, by the peer (its process was killed, or closed the socket with unread input) or by a thread
    /// of this process. Also when TCP keepalive finds that the peer's machine no longer responds.
    #[error("connection lost: {0}")]
    Reset(io::Error),
    /// No byte was transferred in time.
    #[error("stalled: {what} within {after:?}")]
    TimedOut { what: &'static str, after: Duration },
    /// The peer does not prove an allowed key, or breaks the rules of TLS.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Another error of the operating system.
    #[error("connection lost: {0}")]
    Io(io::Error),
}

impl TransportError {
    /// Classifies an error of the operating system.
    pub(super) fn system(e: io::Error) -> TransportError {
        use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, TimedOut};
        match e.kind() {
            BrokenPipe | ConnectionAborted | ConnectionReset | TimedOut => TransportError::Reset(e),
            _ => TransportError::Io(e),
        }
    }

    /// The error of a write after the end of the sending direction.
    pub(crate) fn cut() -> TransportError {
        TransportError::Reset(ErrorKind::BrokenPipe.into())
    }

    /// Replaces the description of a timeout: `what` describes the missing event, `after` is the timeout. Other errors stay.
    pub(crate) fn with_timeout_details(self, what: &'static str, after: Duration) -> TransportError {
        match self {
            TransportError::TimedOut { .. } => TransportError::TimedOut { what, after },
            other => other,
        }
    }

    pub(crate) fn is_timeout(&self) -> bool {
        matches!(self, TransportError::TimedOut { .. })
    }

    /// Whether the connection was reset: the peer's process was killed, or closed the socket with unread input.
    pub(crate) fn is_reset(&self) -> bool {
        matches!(self, TransportError::Reset(_))
    }
}

/// Why dialling an address failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DialError {
    /// The name has no address.
    #[error("address not available")]
    NoAddress,
    /// The deadline had passed before the attempt.
    #[error("timed out")]
    TimedOut,
    /// No process listens: the system connected the socket to itself.
    #[error("connection refused")]
    OwnSocket,
    /// The configuration of TLS cannot be used with this server.
    #[error("{0}")]
    Tls(String),
    /// Another error of the operating system.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl DialError {
    /// Whether the peer's system accepted the connection, and its listener was closed before its program accepted it.
    pub(crate) fn is_reset(&self) -> bool {
        matches!(self, DialError::Io(e) if e.kind() == ErrorKind::ConnectionReset)
    }
}

/// Why listening on an address failed.
#[derive(Debug, Error)]
pub(crate) enum ListenError {
    /// The host name does not resolve.
    #[error("{0}")]
    Host(io::Error),
    /// The system refused the address: it is in use, or not an address of this machine.
    #[error("{addr}: {error}")]
    Address { addr: Address, error: io::Error },
}

impl ListenError {
    /// Whether another socket uses the address.
    pub(crate) fn is_in_use(&self) -> bool {
        matches!(self, ListenError::Address { error, .. } if error.kind() == ErrorKind::AddrInUse)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_a_lost_peer_are_distinguished_from_errors_of_the_local_system() {
        use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, OutOfMemory, PermissionDenied, TimedOut};
        for lost_peer in [BrokenPipe, ConnectionAborted, ConnectionReset, TimedOut] {
            assert!(TransportError::system(lost_peer.into()).is_reset(), "{lost_peer}");
        }
        for local in [OutOfMemory, PermissionDenied] {
            assert!(!TransportError::system(local.into()).is_reset(), "{local}");
        }
    }
}

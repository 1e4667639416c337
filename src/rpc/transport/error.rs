//! Typed failures of connections.

use std::io::{self, ErrorKind};
use std::time::Duration;

use thiserror::Error;

use super::Address;

/// A connection that cannot go on, or has not gone on in time.
#[derive(Debug, Error)]
pub(crate) enum TransportError {
    /// The peer sends no more, in the middle of something.
    #[error("the peer went away in the middle of a message")]
    Closed,
    /// The peer, or a thread of this process, ended both directions: a process that was killed, or had not read everything. Or
    /// the peer's machine answers no longer (TCP keepalive).
    #[error("connection lost: {0}")]
    Reset(io::Error),
    /// No byte moved in time.
    #[error("stalled: {what} within {after:?}")]
    TimedOut { what: &'static str, after: Duration },
    /// The system refused.
    #[error("connection lost: {0}")]
    Io(io::Error),
}

impl TransportError {
    /// An error of the system's.
    pub(super) fn system(e: io::Error) -> TransportError {
        use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, TimedOut};
        match e.kind() {
            BrokenPipe | ConnectionAborted | ConnectionReset | TimedOut => TransportError::Reset(e),
            _ => TransportError::Io(e),
        }
    }

    /// The end of a connection whose sending half can send no more.
    pub(crate) fn cut() -> TransportError {
        TransportError::Reset(ErrorKind::BrokenPipe.into())
    }

    /// The same error; a timeout is reported as `what`, which was to come within `after`.
    pub(crate) fn naming(self, what: &'static str, after: Duration) -> TransportError {
        match self {
            TransportError::TimedOut { .. } => TransportError::TimedOut { what, after },
            other => other,
        }
    }

    pub(crate) fn is_timeout(&self) -> bool {
        matches!(self, TransportError::TimedOut { .. })
    }

    /// How a peer that is killed, or has not read everything, ends a connection.
    pub(crate) fn is_reset(&self) -> bool {
        matches!(self, TransportError::Reset(_))
    }
}

/// Why there is no connection to an address.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DialError {
    /// The name has no address.
    #[error("address not available")]
    NoAddress,
    /// The time for it had passed before the attempt.
    #[error("timed out")]
    TimedOut,
    /// Nobody listens: the system has connected the socket to itself.
    #[error("connection refused")]
    OwnSocket,
    /// The system refused.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A place where nothing can listen.
#[derive(Debug, Error)]
pub(crate) enum ListenError {
    /// The host has no address.
    #[error("{0}")]
    Host(io::Error),
    /// The system refused: taken, or not ours.
    #[error("{addr}: {source}")]
    Address { addr: Address, source: io::Error },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_is_gone_is_told_from_a_system_that_refuses() {
        use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, OutOfMemory, PermissionDenied, TimedOut};
        for gone in [BrokenPipe, ConnectionAborted, ConnectionReset, TimedOut] {
            assert!(TransportError::system(gone.into()).is_reset(), "{gone}");
        }
        for refused in [OutOfMemory, PermissionDenied] {
            assert!(!TransportError::system(refused.into()).is_reset(), "{refused}");
        }
    }
}

//! Errors of transfer tokens, and the limits of their number.

use thiserror::Error;

use crate::device::{DeviceError, SourceError};
use crate::rpc::server::host_memory::HostMemoryError;

/// Limit of the tokens of a session that no RECEIVE_FROM_PEER has named, and of the tokens of ended queues that it remembers.
pub(super) const MAX_UNUSED_TOKENS: usize = 1024;

/// Limit of the tokens of ended sessions that a server remembers.
pub(super) const MAX_REVOKED_TOKENS: usize = 4 * MAX_UNUSED_TOKENS;

/// Limit of the tokens that one ISSUE_TOKENS may request.
pub(super) const MAX_TOKENS_PER_REQUEST: u32 = 256;

/// A request that names or redeems transfer tokens and cannot be served.
#[derive(Debug, Error)]
pub(in crate::rpc::server) enum TokenError {
    #[error("expected a request for 1 to {MAX_TOKENS_PER_REQUEST} transfer tokens, got {0}")]
    RequestCount(u32),
    #[error(
        "the session would have {0} unused tokens, at most {MAX_UNUSED_TOKENS} are allowed: use some of them first"
    )]
    TooManyUnused(usize),
    #[error("cannot get random bytes for transfer tokens from the operating system: {0}")]
    RandomBytes(getrandom::Error),
    #[error("the transfer token was not issued to this session, or is used or expired")]
    NotOfSession,
    #[error("the transfer token was not issued by this server, or is used or expired")]
    Unknown,
    #[error("expected {expected} bytes from byte {next} of the transfer on, got {have} from byte {offset} on")]
    Piece { expected: u64, next: u64, have: u64, offset: u64 },
    #[error("cannot issue transfer tokens: {0}")]
    HostMemory(#[from] HostMemoryError),
}

impl TokenError {
    /// The error with which the queue fails that waits for the bytes.
    pub(super) fn to_device_error(&self) -> DeviceError {
        DeviceError::Source(SourceError::new(format_args!("another server sent invalid bytes: {self}")))
    }
}

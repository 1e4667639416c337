//! Errors of transfer tokens, and the limits of their number.

use thiserror::Error;

use crate::device::{DeviceError, SourceError, TRANSFER_CHUNK_BYTES};
use crate::rpc::server::host_memory::HostMemoryError;

/// Limit of unused tokens per session. It also limits the tokens of one SEND_TO_PEER or RECEIVE_FROM_PEER.
pub(super) const MAX_UNUSED_TOKENS: usize = 1024;

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
    #[error("{bytes} bytes need {need} transfer tokens, one for each 256 KiB, got {have}")]
    WrongCount { bytes: u64, need: u64, have: usize },
    #[error("expected at most {MAX_UNUSED_TOKENS} transfer tokens, got {0}")]
    TooManyInMessage(usize),
    #[error("transfer token {0} of the list was not issued to this session, or is used or expired")]
    NotOfSession(usize),
    #[error("the transfer token was not issued by this server, or is used or expired")]
    Unknown,
    #[error("the transfer token is for {expected} bytes, got {have}")]
    Length { expected: u64, have: usize },
    #[error("cannot issue transfer tokens: {0}")]
    HostMemory(#[from] HostMemoryError),
    #[error("cannot buffer bytes that arrived before RECEIVE_FROM_PEER: {0}")]
    Memory(DeviceError),
}

impl TokenError {
    /// The error with which the queue fails that waits for the bytes.
    pub(super) fn to_device_error(&self) -> DeviceError {
        match self {
            TokenError::Memory(e) => e.clone(),
            e => DeviceError::Source(SourceError::new(format_args!("another server sent invalid bytes: {e}"))),
        }
    }
}

/// Checks that `have` is the number of tokens for `bytes` bytes: one per [`TRANSFER_CHUNK_BYTES`], the last one for the rest.
pub(in crate::rpc::server) fn check_count(bytes: u64, have: usize) -> Result<(), TokenError> {
    if have > MAX_UNUSED_TOKENS {
        return Err(TokenError::TooManyInMessage(have));
    }
    let need = bytes.div_ceil(TRANSFER_CHUNK_BYTES);
    if need == have as u64 { Ok(()) } else { Err(TokenError::WrongCount { bytes, need, have }) }
}

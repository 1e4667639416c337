//! What is wrong with tickets, and how many there may be.

use thiserror::Error;

use crate::device::{DeviceError, PIECE, SourceError};

/// Unused tickets that a session may have, and so the most that one SEND can be about.
pub(super) const MAX_TICKETS: usize = 1024;

/// Tickets that one message may ask for.
pub(super) const MAX_ASKED: u32 = 256;

/// What is wrong with tickets.
#[derive(Debug, Error)]
pub(in crate::rpc::server) enum TokenError {
    #[error("expected to be asked for 1 to {MAX_ASKED} tickets, got {0}")]
    Asked(u32),
    #[error("the session would have {0} unused tickets; at most {MAX_TICKETS}: use those that it has")]
    TooMany(usize),
    #[error("the system gives no random bytes for tickets: {0}")]
    Random(getrandom::Error),
    #[error("{bytes} bytes take {need} tickets, one for each 256 KiB, got {have}")]
    Count { bytes: u64, need: u64, have: usize },
    #[error("expected at most {MAX_TICKETS} tickets, got {0}")]
    Many(usize),
    #[error("ticket {0} of the list was not issued to this session, or is used or expired")]
    Foreign(usize),
    #[error("the ticket was not issued here, or is used or expired")]
    Unknown,
    #[error("the ticket is for {expected} bytes, got {have}")]
    Length { expected: u64, have: usize },
    #[error("no memory to keep the bytes: {0}")]
    Memory(DeviceError),
}

impl TokenError {
    /// What it is to the queue that waits for the bytes.
    pub(super) fn failure(&self) -> DeviceError {
        match self {
            TokenError::Memory(e) => e.clone(),
            e => DeviceError::Source(SourceError::new(format_args!("another server put wrong bytes: {e}"))),
        }
    }
}

/// How many tickets `bytes` bytes take, if that is how many there are.
pub(in crate::rpc::server) fn count(bytes: u64, have: usize) -> Result<(), TokenError> {
    if have > MAX_TICKETS {
        return Err(TokenError::Many(have));
    }
    let need = bytes.div_ceil(PIECE);
    if need == have as u64 { Ok(()) } else { Err(TokenError::Count { bytes, need, have }) }
}

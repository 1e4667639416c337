//! Payload of a PEER_WRITE: borrowed from its message, or buffered until it can be written to the device.

use std::sync::Arc;

use super::error::TokenError;
use crate::device::{DeviceError, MemoryBudget, Reservation, TRANSFER_CHUNK_BYTES};
use crate::rpc::server::host_memory::{HostCharge, SessionMemory};

/// A payload in host memory that cannot be written to the device yet.
pub(super) struct BufferedBytes {
    pub(super) bytes: Vec<u8>,
    /// Charged to the session that issued the token.
    _reservations: (Reservation, HostCharge),
}

impl BufferedBytes {
    /// Copies `bytes` to host memory that is charged to `budget` and `memory`.
    ///
    /// # Errors
    /// [`TokenError::Memory`] if one of them is exhausted.
    pub(super) fn copy_from(
        bytes: &[u8],
        budget: &Arc<MemoryBudget>,
        memory: &Arc<SessionMemory>,
    ) -> Result<BufferedBytes, TokenError> {
        let reservation = budget.reserve(bytes.len() as u64).map_err(TokenError::Memory)?;
        let charge = memory.reserve(bytes.len() as u64).map_err(|e| TokenError::Memory(DeviceError::from(e)))?;
        Ok(BufferedBytes { bytes: bytes.to_vec(), _reservations: (reservation, charge) })
    }
}

/// The payload of a PEER_WRITE.
pub(super) enum PeerWriteData<'a> {
    Borrowed(&'a [u8]),
    Buffered(BufferedBytes),
}

impl PeerWriteData<'_> {
    pub(super) fn len(&self) -> usize {
        self.bytes().len()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            PeerWriteData::Borrowed(bytes) => bytes,
            PeerWriteData::Buffered(buffered) => &buffered.bytes,
        }
    }

    /// Copies a borrowed payload to host memory that is charged to `budget` and `memory`.
    pub(super) fn into_buffered(
        self,
        budget: &Arc<MemoryBudget>,
        memory: &Arc<SessionMemory>,
    ) -> Result<BufferedBytes, TokenError> {
        match self {
            PeerWriteData::Borrowed(bytes) => BufferedBytes::copy_from(bytes, budget, memory),
            PeerWriteData::Buffered(buffered) => Ok(buffered),
        }
    }
}

/// Checks the length of a payload that arrives before its RECEIVE_FROM_PEER: 1 to [`TRANSFER_CHUNK_BYTES`] bytes.
pub(super) fn check_length(data: &[u8]) -> Result<(), TokenError> {
    let have = data.len();
    if have == 0 || have as u64 > TRANSFER_CHUNK_BYTES {
        Err(TokenError::Length { expected: TRANSFER_CHUNK_BYTES, have })
    } else {
        Ok(())
    }
}

//! Exchange memory: the bytes of the ranks' parts.

use crate::device::{DeviceError, HostBuffer, MemoryBudget};
use crate::sync::{Arc, RwLockReadGuard};
use std::fmt;
use std::ops::Deref;

/// Unit of the memory of a buffer: a smaller one takes a page all the same.
const PAGE_BYTES: u64 = 4096;

/// The part of one rank in one round.
pub(super) struct ExchangeBuffer {
    memory: HostBuffer,
    bytes: usize,
}

impl ExchangeBuffer {
    /// A buffer for parts of up to `capacity` bytes, which are reserved in `budget` as whole pages.
    pub(super) fn new(capacity: u64, budget: &Arc<MemoryBudget>) -> Result<ExchangeBuffer, DeviceError> {
        let pages = capacity.checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX);
        Ok(ExchangeBuffer { memory: HostBuffer::zeroed(pages, budget)?, bytes: 0 })
    }

    /// The memory for a part of `bytes` bytes, which replaces the one before.
    pub(super) fn replace(&mut self, bytes: usize) -> Result<&mut [u8], DeviceError> {
        let too_large = DeviceError::Misuse("a part is larger than the exchange memory of its group");
        let memory = self.memory.get_mut(..bytes).ok_or(too_large)?;
        self.bytes = bytes;
        Ok(memory)
    }

    /// The part.
    pub(super) fn part(&self) -> &[u8] {
        self.memory.get(..self.bytes).unwrap_or_default()
    }
}

/// The part of a rank in a round: its bytes, contiguous.
pub struct PartBytes<'a>(pub(super) RwLockReadGuard<'a, ExchangeBuffer>);

impl Deref for PartBytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.part()
    }
}

impl fmt::Debug for PartBytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PartBytes({} bytes)", self.len())
    }
}

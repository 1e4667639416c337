//! Reused buffer for request bodies: a session allocates it once and reads every body into it.

use std::sync::Arc;

use crate::rpc::server::host_memory::{BASE_BODY_BYTES, HostCharge, HostMemoryError, SessionMemory};

/// Largest capacity that is retained, in bytes. The memory of a single large graph must not be held for the rest of the
/// session.
const MAX_RETAINED_BYTES: usize = 4 << 20;

/// The body of a request. The bytes beyond [`BASE_BODY_BYTES`] are charged to the session's host memory.
pub(in crate::rpc::server) struct BodyBuffer {
    bytes: Vec<u8>,
    charge: HostCharge,
}

impl BodyBuffer {
    pub(in crate::rpc::server) fn new(memory: &Arc<SessionMemory>) -> BodyBuffer {
        BodyBuffer { bytes: Vec::new(), charge: memory.empty() }
    }

    /// The allocated bytes.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// The first `len` bytes, which were read.
    pub(in crate::rpc::server) fn message(&self, len: usize) -> &[u8] {
        &self.bytes[..len]
    }

    /// As [`BodyBuffer::message`], to change them.
    pub(in crate::rpc::server) fn message_mut(&mut self, len: usize) -> &mut [u8] {
        &mut self.bytes[..len]
    }

    /// Replaces the body by another one.
    ///
    /// # Errors
    /// As [`SessionMemory::wait`].
    pub(in crate::rpc::server) fn replace(&mut self, body: &[u8]) -> Result<(), HostMemoryError> {
        self.reserve(body.len())?;
        self.bytes[..body.len()].copy_from_slice(body);
        Ok(())
    }

    /// Makes room for `len` bytes.
    ///
    /// # Errors
    /// As [`SessionMemory::wait`].
    pub(in crate::rpc::server) fn reserve(&mut self, len: usize) -> Result<(), HostMemoryError> {
        if self.bytes.len() < len { self.grow(len) } else { Ok(()) }
    }

    /// Allocates `room` bytes, after they are charged. Waits for host memory: no more of the message is read meanwhile.
    ///
    /// # Errors
    /// As [`SessionMemory::wait`].
    pub(super) fn grow(&mut self, room: usize) -> Result<(), HostMemoryError> {
        let charged = room.saturating_sub(BASE_BODY_BYTES) as u64;
        if let Some(more) = charged.checked_sub(self.charge.bytes()) {
            self.charge.wait_and_grow(more)?;
        }
        self.bytes.reserve_exact(room - self.bytes.len());
        self.bytes.resize(room, 0);
        Ok(())
    }

    /// Takes the first `len` bytes out, which the caller has charged elsewhere. The buffer is empty then.
    pub(in crate::rpc::server) fn take(&mut self, len: usize) -> Box<[u8]> {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.truncate(len);
        let bytes = bytes.into_boxed_slice();
        self.charge.shrink_to(0);
        bytes
    }

    /// Frees a buffer of more than [`BASE_BODY_BYTES`] if it is above [`MAX_RETAINED_BYTES`], or if host memory is short.
    pub(in crate::rpc::server) fn trim(&mut self) {
        let capacity = self.bytes.capacity();
        if capacity > MAX_RETAINED_BYTES || capacity > BASE_BODY_BYTES && !self.charge.session().is_plentiful() {
            self.bytes = Vec::new();
            self.charge.shrink_to(0);
        }
    }
}

//! Owned memory of the host: pageable, page-locked for a device, or a private mapping of a file.
#![allow(unsafe_code)] // one of the modules that `tests/layout` names

use super::{DeviceError, MemoryBudget, Reservation};
use crate::tensor::{PlainData, bytes_of_mut};
use crossbeam::utils::CachePadded;
use memmap2::MmapMut;
use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// Owned bytes in the host's memory, at an address that does not change. Made by [`HostBuffer::zeroed`], [`HostBuffer::from_vec`],
/// [`PinnedMemory::alloc_pinned`] and [`MappedFile::map_private`]; [`ImportHost::import`] turns it into a buffer of a device.
///
/// Queues keep no reference to a host buffer: when an upload returns, the bytes have been copied by the host or the device.
/// The buffer may then be changed or dropped at any time.
///
/// [`PinnedMemory::alloc_pinned`]: super::PinnedMemory::alloc_pinned
/// [`ImportHost::import`]: super::ImportHost::import
/// [`MappedFile::map_private`]: super::MappedFile::map_private
pub struct HostBuffer {
    start: NonNull<u8>,
    bytes: usize,
    /// The object that owns the bytes, a mapping or a driver's allocation. Only dropped, never accessed.
    _owner: Option<Box<dyn Any + Send + Sync>>,
    reservation: Option<Reservation>,
}

// SAFETY: like a `Box<[u8]>`, the buffer has exclusive access to its bytes (the contract of `from_raw`), and its owner is
// `Send`.
unsafe impl Send for HostBuffer {}
// SAFETY: a shared reference gives read access only.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// Allocates `bytes` zeroed bytes of pageable memory, reserved in `budget`. The system provides a page when it is first
    /// touched.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the budget or the system has fewer bytes available.
    pub fn zeroed(bytes: u64, budget: &Arc<MemoryBudget>) -> Result<HostBuffer, DeviceError> {
        let reservation = budget.reserve(bytes)?;
        let pages = usize::try_from(bytes).ok().and_then(|n| {
            // `mmap` rejects a length of 0.
            if n == 0 { Some(HostBuffer::empty()) } else { MmapMut::map_anon(n).ok().map(HostBuffer::from_mapping) }
        });
        Ok(HostBuffer {
            reservation: Some(reservation),
            ..pages.ok_or_else(|| HostBuffer::out_of_memory(bytes, budget))?
        })
    }

    /// The memory of a vector, without a copy. It counts against no budget, and is aligned for `T` only.
    pub fn from_vec<T: PlainData + Send + Sync>(mut values: Vec<T>) -> HostBuffer {
        let bytes = bytes_of_mut(&mut values);
        let (start, len) = (NonNull::from(&mut *bytes).cast(), bytes.len());
        // Moving the vector into the box leaves its elements on the heap where they are. The box is dropped at the end and not read
        // before, so `start` is the only way to the elements.
        HostBuffer { start, bytes: len, _owner: Some(Box::new(values)), reservation: None }
    }

    /// The error for `bytes` bytes that were reserved in `budget` but that the system or the driver failed to allocate.
    pub(crate) fn out_of_memory(bytes: u64, budget: &MemoryBudget) -> DeviceError {
        let available = budget.limit().saturating_sub(budget.used()).saturating_add(bytes);
        DeviceError::OutOfMemory { requested: bytes, available, limit: budget.limit() }
    }

    pub(super) fn empty() -> HostBuffer {
        HostBuffer { start: NonNull::<CachePadded<u8>>::dangling().cast(), bytes: 0, _owner: None, reservation: None }
    }

    /// A buffer of private pages: only this process writes them.
    pub(super) fn from_mapping(mut pages: MmapMut) -> HostBuffer {
        let (start, bytes) = (NonNull::from(&mut pages[..]).cast(), pages.len());
        HostBuffer { start, bytes, _owner: Some(Box::new(pages)), reservation: None }
    }

    /// For devices: memory that a driver allocated. Dropping `owner` frees it; `reservation` is its share of a memory budget.
    ///
    /// # Safety
    /// Until `owner` is dropped, the `bytes` bytes from `start` must be initialised, must not move, and must be readable and
    /// writable from any thread. All accesses must go through this buffer, or the device buffer that [`ImportHost::import`]
    /// makes of it.
    ///
    /// [`ImportHost::import`]: super::ImportHost::import
    pub unsafe fn from_raw(
        start: NonNull<u8>,
        bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
        reservation: Option<Reservation>,
    ) -> HostBuffer {
        HostBuffer { start, bytes, _owner: Some(owner), reservation }
    }

    /// For devices that import the memory and reserve it in another budget: takes the buffer's own reservation.
    pub fn take_reservation(&mut self) -> Option<Reservation> {
        self.reservation.take()
    }
}

impl Deref for HostBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start` and `bytes` describe initialised memory that lives as long as `_owner`, which `self` holds. While
        // `self` is borrowed shared, no safe code can write to it.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }
}

impl DerefMut for HostBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes this access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl AsRef<[u8]> for HostBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for HostBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBuffer({} bytes)", self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vector_becomes_a_buffer_without_a_copy() {
        let values = vec![1.0f32, 2.0];
        let address = values.as_ptr().addr();
        let mut buffer = HostBuffer::from_vec(values);
        assert_eq!((buffer.as_ptr().addr(), &buffer[..4]), (address, &1.0f32.to_le_bytes()[..]));
        buffer[4..].fill(0);
        assert_eq!(buffer[..], [0, 0, 128, 63, 0, 0, 0, 0]);
        assert!(HostBuffer::from_vec(Vec::<u8>::new()).is_empty());
    }
}

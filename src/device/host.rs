//! Memory of the host that a program owns: plain, pinned for a device, or private pages of a file.
#![allow(unsafe_code)] // one of the modules that `tests/layout` names

use super::{Account, Charge, DeviceError};
use crossbeam::utils::CachePadded;
use memmap2::MmapMut;
use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// Bytes of the host, owned: a slice of `u8` at an address that does not change. [`PinnedMemory::alloc_pinned`]
/// and [`MappedFile::private`] make them, and [`ImportHost::import`] makes a device's buffer of them.
///
/// A queue never keeps hold of the bytes it is given: an upload has copied them, or has waited for the device to do so,
/// when it returns. A buffer may be changed or dropped at any moment that the compiler allows.
///
/// [`PinnedMemory::alloc_pinned`]: super::PinnedMemory::alloc_pinned
/// [`ImportHost::import`]: super::ImportHost::import
/// [`MappedFile::private`]: super::MappedFile::private
pub struct HostBuffer {
    start: NonNull<u8>,
    bytes: usize,
    /// What the bytes belong to: dropped with the buffer, and nothing else ever looks at it.
    _owner: Option<Box<dyn Any + Send + Sync>>,
    charge: Option<Charge>,
}

// SAFETY: it is the only way to its bytes (see `HostBuffer::from_raw`), like a `Box<[u8]>`; its owner may be sent.
unsafe impl Send for HostBuffer {}
// SAFETY: shared, it can only be read.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// Zeroed plain memory, charged to `account`. Its pages are taken from the system when first touched.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the account or the system have less left.
    pub fn zeroed(bytes: u64, account: &Arc<Account>) -> Result<HostBuffer, DeviceError> {
        let charge = account.charge(bytes)?;
        let pages = usize::try_from(bytes).ok().and_then(|n| {
            // The system maps no empty ranges.
            if n == 0 { Some(HostBuffer::empty()) } else { MmapMut::map_anon(n).ok().map(HostBuffer::of_pages) }
        });
        Ok(HostBuffer { charge: Some(charge), ..pages.ok_or_else(|| HostBuffer::refused(bytes, account))? })
    }

    /// For bytes that `account` has just paid for, and the system or a driver does not give.
    pub(crate) fn refused(bytes: u64, account: &Account) -> DeviceError {
        let left = account.limit().saturating_sub(account.used()).saturating_add(bytes);
        DeviceError::OutOfMemory { asked: bytes, left, limit: account.limit() }
    }

    pub(super) fn empty() -> HostBuffer {
        HostBuffer { start: NonNull::<CachePadded<u8>>::dangling().cast(), bytes: 0, _owner: None, charge: None }
    }

    /// Pages that the process alone writes.
    pub(super) fn of_pages(mut pages: MmapMut) -> HostBuffer {
        let (start, bytes) = (NonNull::from(&mut pages[..]).cast(), pages.len());
        HostBuffer { start, bytes, _owner: Some(Box::new(pages)), charge: None }
    }

    /// For devices: memory that their driver gave, with what gives it back when dropped and what pays for it.
    ///
    /// # Safety
    /// Until `owner` is dropped, `bytes` bytes from `start` on are initialised, stay where they are and may be read and
    /// written from any thread, and nobody does so but through this buffer or what [`ImportHost::import`] makes of it.
    ///
    /// [`ImportHost::import`]: super::ImportHost::import
    pub unsafe fn from_raw(
        start: NonNull<u8>,
        bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
        charge: Option<Charge>,
    ) -> HostBuffer {
        HostBuffer { start, bytes, _owner: Some(owner), charge }
    }

    /// For devices that take the memory over and charge it themselves: what has paid for it so far.
    pub fn take_charge(&mut self) -> Option<Charge> {
        self.charge.take()
    }
}

impl Deref for HostBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are initialised and live as long as the owner does; while `self` is shared nobody writes them.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }
}

impl DerefMut for HostBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes this the only access.
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

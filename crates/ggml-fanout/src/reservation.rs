//! Ranges of addresses that hosts use for memory of devices. They are reserved, so that no two buffers and no memory of the
//! process have the same, and an access of the host faults.

use std::io;

/// A range of addresses without memory.
#[derive(Debug)]
pub(crate) struct AddressRange {
    start: usize,
    bytes: usize,
}

impl AddressRange {
    /// Reserves at least `bytes` addresses. The start is aligned to a page, as devices demand 4096 bytes at most.
    pub(crate) fn reserve(bytes: usize) -> io::Result<AddressRange> {
        let bytes = bytes.max(1);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the system chooses, without access.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            Err(io::Error::last_os_error())
        } else {
            Ok(AddressRange { start: start as usize, bytes })
        }
    }

    pub(crate) fn start(&self) -> usize {
        self.start
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `reserve`, and no memory is behind it.
        unsafe { libc::munmap(self.start as *mut libc::c_void, self.bytes) };
    }
}

//! Memory of the program that the driver does not know, as calls name it that copy.
#![allow(unsafe_code, reason = "one of the places the crate allows it in: pointers of the program")]

/// Memory of the program that the driver does not know: a pointer from a call that copies.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct HostMemory(u64);

impl HostMemory {
    /// Its address.
    pub fn address(self) -> u64 {
        self.0
    }

    /// Memory at an address that a program named.
    pub fn at(address: u64) -> Self {
        Self(address)
    }

    /// The memory this many bytes further on; `None` where the address overflows.
    pub fn offset(self, bytes: u64) -> Option<Self> {
        self.0.checked_add(bytes).map(Self)
    }

    /// Reads bytes at an offset.
    pub fn read(self, offset: u64, bytes: usize) -> Vec<u8> {
        let mut copied = Vec::<u8>::with_capacity(bytes);
        let from = std::ptr::with_exposed_provenance::<u8>((self.0 + offset) as usize);
        // SAFETY: the caller of the copying function promises that the source is as long as the copy it asked for, and that it stays
        // until the copy is done; offset and count lie within that. `copied` has room for them.
        unsafe {
            std::ptr::copy_nonoverlapping(from, copied.as_mut_ptr(), bytes);
            copied.set_len(bytes);
        }
        copied
    }

    /// Writes bytes at an offset.
    pub fn write(self, offset: u64, bytes: &[u8]) {
        let to = std::ptr::with_exposed_provenance_mut::<u8>((self.0 + offset) as usize);
        // SAFETY: the caller of the copying function promises that the destination is as long as the copy it asked for, and that
        // nothing else uses it until the copy is done; offset and count lie within that.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }
}

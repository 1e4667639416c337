//! Pointers to pageable host memory: memory of the program that is not registered with the driver, as one side of a copy.
#![allow(unsafe_code, reason = "reads and writes memory through pointers of the program")]

/// A pointer of the program to memory that is not registered with the driver.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct HostMemory(u64);

impl HostMemory {
    /// Its address.
    pub fn address(self) -> u64 {
        self.0
    }

    /// The memory at an address that the program passed.
    pub fn at(address: u64) -> Self {
        Self(address)
    }

    /// Reads the first bytes.
    pub fn read(self, bytes: usize) -> Vec<u8> {
        let mut copied = Vec::<u8>::with_capacity(bytes);
        let from = std::ptr::with_exposed_provenance::<u8>(self.0 as usize);
        // SAFETY: the caller of the copying API function promises that the source is as long as the requested copy and stays
        // valid until the copy is done; the count is within that. `copied` has room for the bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(from, copied.as_mut_ptr(), bytes);
            copied.set_len(bytes);
        }
        copied
    }

    /// Writes the first bytes.
    pub fn write(self, bytes: &[u8]) {
        let to = std::ptr::with_exposed_provenance_mut::<u8>(self.0 as usize);
        // SAFETY: the caller of the copying API function promises that the destination is as long as the requested copy, and
        // that nothing else accesses it until the copy is done; the count is within that.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }
}

//! Why memory could not be had, or given back.

/// What went wrong with a request for memory. The program's fault, except for [`Error::AddressSpace`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The device's memory does not suffice.
    #[error("out of memory on device {device}: {asked} bytes asked for, {used} of {limit} bytes in use")]
    OutOfMemory {
        /// Of which device.
        device: u32,
        /// Bytes asked for.
        asked: u64,
        /// Bytes in use.
        used: u64,
        /// Bytes that the device has.
        limit: u64,
    },
    /// The host gave no memory or addresses.
    #[error("the host gave no {what} of {bytes} bytes: {reason}")]
    AddressSpace {
        /// "memory" or "address range".
        what: &'static str,
        /// Bytes asked for.
        bytes: u64,
        /// The system's words.
        reason: String,
    },
    /// There is no such device.
    #[error("there is no device {device}: {count} exist")]
    Device {
        /// The number asked for.
        device: u32,
        /// How many there are.
        count: usize,
    },
    /// The address is not the start of a live allocation.
    #[error("no allocation starts at {address:#x}: {near}")]
    NotAllocated {
        /// The address.
        address: u64,
        /// What lies there, or lay there.
        near: String,
    },
    /// An argument that can never be right.
    #[error("{0}")]
    Invalid(String),
}

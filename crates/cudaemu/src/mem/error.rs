//! Errors of allocating and freeing memory.

/// A failed request for memory. The program is at fault, except for [`Error::AddressSpace`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The device has not enough free memory.
    #[error("out of memory on device {device}: {asked} bytes requested, {used} of {limit} bytes in use")]
    OutOfMemory {
        /// The device.
        device: u32,
        /// Requested bytes.
        asked: u64,
        /// Bytes in use.
        used: u64,
        /// Bytes of the device's memory.
        limit: u64,
    },
    /// The host system refused memory or addresses.
    #[error("the host gave no {what} of {bytes} bytes: {reason}")]
    AddressSpace {
        /// "memory" or "address range".
        what: &'static str,
        /// Requested bytes.
        bytes: u64,
        /// The system's error message.
        reason: String,
    },
    /// No device has this ordinal.
    #[error("there is no device {device}: {count} exist")]
    Device {
        /// The requested ordinal.
        device: u32,
        /// Number of devices.
        count: usize,
    },
    /// The address is not the start of a live allocation.
    #[error("no allocation starts at {address:#x}: {near}")]
    NotAllocated {
        /// The address.
        address: u64,
        /// The nearest allocation, live or freed.
        near: String,
    },
    /// An invalid argument.
    #[error("{0}")]
    Invalid(String),
}

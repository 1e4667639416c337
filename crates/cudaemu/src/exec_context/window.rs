//! Windows of shared, local and parameter memory in the generic address space. They lie above all host and device addresses and
//! are aligned so that the low 32 bits are the offset.

/// Shared memory of the block.
pub const SHARED: u64 = 0x0001_0000_0000_0000;
/// Local memory of the thread.
pub const LOCAL: u64 = 0x0002_0000_0000_0000;
/// The kernel's parameter block.
pub const PARAM: u64 = 0x0004_0000_0000_0000;
/// Bytes of each window.
pub const BYTES: u64 = 1 << 32;

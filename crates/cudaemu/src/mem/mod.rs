//! Memory of the emulated machine: allocations, device addresses and written bits. Open `space.rs` first.
//!
//! A device address is not a host address. All device addresses are in one inaccessible reservation ([`AddressSpace`]), so that
//! a host that dereferences one faults, as on real hardware; the bytes are elsewhere ([`PhysicalMemory`]). Allocations are
//! 512-byte aligned and no more, far apart, and addresses are not reused for long, so that a wrong address hits no allocation
//! instead of another one. A [`Bitmap`] records which bytes were ever written.
//!
//! A kernel launch, copy or memset works on a [`MemorySnapshot`]: the allocations that were live when it was taken.
//!
//! | module | content |
//! |---|---|
//! | `backing` | host memory that several threads may access at once; the reservation of addresses (unsafe) |
//! | `host_pointer` | pageable memory of the program, as one side of a copy (unsafe) |
//! | `bitmap` | one bit per byte |
//! | `physical` | bytes and their written bits |
//! | `allocation` | a range of device addresses that is backed by memory |
//! | `space` | allocating and freeing |
//! | `snapshot` | lookup of allocations, and copies between them |
//! | `footprint` | the distinct bytes that a kernel touches |

mod allocation;
mod backing;
mod bitmap;
mod error;
mod footprint;
mod host_pointer;
mod physical;
mod snapshot;
mod space;

pub use allocation::{Allocation, AllocationKind};
pub use bitmap::Bitmap;
pub use error::Error;
pub use footprint::{Footprint, MovedBytes};
pub use host_pointer::HostMemory;
pub use physical::PhysicalMemory;
pub use snapshot::MemorySnapshot;
pub use space::AddressSpace;

#[cfg(test)]
mod tests;

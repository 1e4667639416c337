//! Allocations and device addresses.
//!
//! A device address is no host address: all of them lie in one reservation that nothing can read ([`Space`]), so that a
//! host that dereferences one faults, as on real hardware, and the bytes lie elsewhere ([`Physical`]). Allocations are 512-byte
//! aligned and no more, far apart, and addresses are not used again for long, so that a wrong address meets nothing
//! rather than something. Which bytes were ever written is known for each ([`Bitmap`]).
//!
//! A kernel launch, copy or memset works on a [`View`]: the allocations that were live when it was made.
//!
//! | module | what it holds |
//! |---|---|
//! | `backing` | host memory that several threads may touch at once; the reservation (unsafe) |
//! | `host` | memory of the program, registered (unsafe) |
//! | `program` | memory of the program, not registered: one side of a copy (unsafe) |
//! | `bitmap` | one bit a byte |
//! | `physical` | bytes, and which of them were written |
//! | `allocation` | a range of device addresses with memory behind it |
//! | `space` | making and freeing them |
//! | `mapping` | address ranges and handles: the VMM calls |
//! | `view` | finding them, and copies between them |
//! | `footprint` | the distinct bytes that a kernel touches |

mod allocation;
mod backing;
mod bitmap;
mod error;
mod footprint;
mod host_pointer;
mod mapping;
mod physical;
mod registered_host;
mod snapshot;
mod space;

pub use allocation::{AccessRights, Allocation, AllocationKind};
pub use bitmap::Bitmap;
pub use error::Error;
pub use footprint::Footprint;
pub use host_pointer::HostMemory;
pub use mapping::GRANULARITY;
pub use physical::PhysicalMemory;
pub use snapshot::MemorySnapshot;
pub use space::AddressSpace;

#[cfg(test)]
mod tests;

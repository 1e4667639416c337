//! Stream operations: the units of work in a stream's queue.

use std::fmt;
use std::sync::Arc;

use crate::error::Error;
use crate::exec;
use crate::handle::EventId;
use crate::mem::HostMemory;

/// One operation. It holds everything that it needs, so that it executes without the driver's lock.
#[derive(Debug)]
pub enum StreamOp {
    /// A kernel launch.
    Launch(Box<KernelLaunch>),
    /// A copy.
    Memcpy(Box<Memcpy>),
    /// A memset.
    Memset(Memset),
    /// A host function of the program.
    Call(HostCall),
    /// Marks an event as reached.
    Record(EventId),
    /// No operation: only its dependencies matter.
    Wait,
    /// A stream-ordered free of the memory at this address.
    Free(u64),
    /// Writes a value of 4 bytes: address, value.
    WriteValue(u64, u32),
    /// Waits for a value of 4 bytes: address, value, condition.
    WaitValue(u64, u32, WaitCondition),
    /// A launch that fails with this error instead of running. The text describes the launch.
    Fault(Error, String),
    /// A launch that never ends. The text describes the launch.
    Hang(String),
}

/// A kernel launch ready to run.
#[derive(Clone, Debug)]
pub struct KernelLaunch {
    /// The executor's form of the launch.
    pub launch: exec::Launch,
    /// Maximum bytes of local memory per thread.
    pub local_bytes: u32,
}

/// A copy.
#[derive(Clone, Debug)]
pub struct Memcpy {
    /// Source.
    pub from: CopyEndpoint,
    /// Destination.
    pub to: CopyEndpoint,
    /// Number of bytes.
    pub bytes: u64,
    /// Whether the copy writes wrong bytes, as copies over a broken link do.
    pub corrupt: bool,
}

/// One side of a copy.
#[derive(Clone, Debug)]
pub enum CopyEndpoint {
    /// Memory in the address space: device, pinned or managed; the address of the first byte.
    Known(u64),
    /// Pageable host memory.
    Host(HostMemory),
    /// Staging copy of pageable memory, made at submission.
    Staged(Arc<[u8]>),
}

/// A memset.
#[derive(Clone, Debug)]
pub struct Memset {
    /// Address of the first byte.
    pub address: u64,
    /// The element, in the lowest `bytes` bytes.
    pub value: u32,
    /// Bytes of an element: 1 or 4.
    pub bytes: u8,
    /// Number of elements.
    pub count: u64,
}

/// A host function with its argument.
pub struct HostCall(pub Box<dyn FnOnce() + Send>);

impl StreamOp {
    /// Whether the operation waits for a value in memory.
    pub fn awaits_value(&self) -> bool {
        self.awaited_address().is_some()
    }

    /// Address of the value in memory that the operation waits for.
    pub fn awaited_address(&self) -> Option<u64> {
        match self {
            Self::WaitValue(address, ..) => Some(*address),
            _ => None,
        }
    }
}

impl Memcpy {
    /// Addresses of the first bytes of source and destination, if both are in the address space.
    pub fn addresses(&self) -> Option<(u64, u64)> {
        match (&self.from, &self.to) {
            (CopyEndpoint::Known(from), CopyEndpoint::Known(to)) => Some((*from, *to)),
            _ => None,
        }
    }
}

impl Memset {
    /// Bytes that the memset writes.
    pub fn total(&self) -> u64 {
        u64::from(self.bytes) * self.count
    }
}

impl fmt::Debug for HostCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Call")
    }
}

/// Comparison of `cuStreamWaitValue`, between the value found in memory and the given value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitCondition {
    /// Found minus given is not negative, in wrapping arithmetic.
    Geq,
    /// Found equals given.
    Eq,
    /// They have a set bit in common.
    And,
    /// A bit is set in neither.
    Nor,
}

impl WaitCondition {
    /// Whether the condition is met.
    pub fn holds(self, found: u32, value: u32) -> bool {
        match self {
            Self::Geq => found.wrapping_sub(value) as i32 >= 0,
            Self::Eq => found == value,
            Self::And => found & value != 0,
            Self::Nor => !(found | value) != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::WaitCondition::{And, Eq, Geq, Nor};

    #[test]
    fn wait_conditions_compare_in_wrapping_arithmetic() {
        for (condition, found, value, holds) in [
            (Geq, 5, 5, true),
            (Geq, 4, 5, false),
            (Geq, 1, u32::MAX - 1, true), // wrapped around
            (Eq, 7, 7, true),
            (Eq, 7, 8, false),
            (And, 6, 2, true),
            (And, 6, 1, false),
            (Nor, u32::MAX, 0, false),
            (Nor, u32::MAX - 1, 1, false),
            (Nor, u32::MAX - 1, 0, true),
        ] {
            assert_eq!(condition.holds(found, value), holds, "{condition:?} {found:#x} {value:#x}");
        }
    }
}

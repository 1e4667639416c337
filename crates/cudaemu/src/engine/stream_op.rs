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
    /// Writes a value: address, value, bytes (4 or 8).
    WriteValue(u64, u64, u32),
    /// Waits for a value: address, value, bytes (4 or 8), condition.
    WaitValue(u64, u64, u32, WaitCondition),
    /// Several operations that execute without others in between.
    Batch(Vec<StreamOp>),
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

/// A copy of `height` × `depth` rows of `width` bytes.
#[derive(Clone, Debug)]
pub struct Memcpy {
    /// Source.
    pub from: CopyEndpoint,
    /// Destination.
    pub to: CopyEndpoint,
    /// Bytes per row.
    pub width: u64,
    /// Rows per slice.
    pub height: u64,
    /// Number of slices.
    pub depth: u64,
    /// Whether the copy writes wrong bytes, as copies over a broken link do.
    pub corrupt: bool,
}

/// One side of a copy. Rows are `pitch` bytes apart, slices `slice` bytes.
#[derive(Clone, Debug)]
pub enum CopyEndpoint {
    /// Memory in the address space: device, pinned, registered or managed.
    Known {
        /// Address of the first byte.
        address: u64,
        /// Distance of rows in bytes.
        pitch: u64,
        /// Distance of slices in bytes.
        slice: u64,
    },
    /// Pageable host memory.
    Host {
        /// The first byte.
        memory: HostMemory,
        /// Distance of rows in bytes.
        pitch: u64,
        /// Distance of slices in bytes.
        slice: u64,
    },
    /// Staging copy of pageable memory, made at submission, row after row.
    Staged(Arc<[u8]>),
}

/// A memset of `height` rows of `width` elements.
#[derive(Clone, Debug)]
pub struct Memset {
    /// Address of the first byte.
    pub address: u64,
    /// Distance of rows in bytes.
    pub pitch: u64,
    /// The element, in the lowest `bytes` bytes.
    pub value: u32,
    /// Bytes of an element: 1, 2 or 4.
    pub bytes: u8,
    /// Elements per row.
    pub width: u64,
    /// Number of rows.
    pub height: u64,
}

/// A host function with its argument. Graphs clone it to call it again at each launch.
#[derive(Clone)]
pub struct HostCall {
    /// The call. Its argument is the error of a context that had a fault.
    pub run: Arc<dyn Fn(Option<Error>) + Send + Sync>,
    /// Whether it is called even if the context had a fault.
    pub run_after_error: bool,
    /// Addresses of function and argument, for `cuGraphHostNodeGetParams`.
    pub raw: [u64; 2],
}

impl StreamOp {
    /// Whether the operation waits for a value in memory.
    pub fn awaits_value(&self) -> bool {
        self.awaited_address().is_some()
    }

    /// Address of the first value in memory that the operation waits for.
    pub fn awaited_address(&self) -> Option<u64> {
        match self {
            Self::WaitValue(address, ..) => Some(*address),
            Self::Batch(ops) => ops.iter().find_map(Self::awaited_address),
            _ => None,
        }
    }
}

impl Memcpy {
    /// Addresses of the first bytes of source and destination, if both are in the address space.
    pub fn addresses(&self) -> Option<(u64, u64)> {
        match (&self.from, &self.to) {
            (CopyEndpoint::Known { address: from, .. }, CopyEndpoint::Known { address: to, .. }) => Some((*from, *to)),
            _ => None,
        }
    }

    /// Bytes that the copy moves.
    pub fn bytes(&self) -> u64 {
        self.width * self.height * self.depth
    }

    /// Whether `other` has the same kinds of memory on both sides.
    pub fn same_route(&self, other: &Self) -> bool {
        let known = |side: &CopyEndpoint| matches!(side, CopyEndpoint::Known { .. });
        known(&self.from) == known(&other.from) && known(&self.to) == known(&other.to)
    }
}

impl Memset {
    /// Bytes that the memset writes.
    pub fn total(&self) -> u64 {
        u64::from(self.bytes) * self.width * self.height
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
    pub fn holds(self, found: u64, value: u64, bytes: u32) -> bool {
        let mask = if bytes == 4 { u64::from(u32::MAX) } else { u64::MAX };
        match self {
            Self::Geq if bytes == 4 => (found as u32).wrapping_sub(value as u32) as i32 >= 0,
            Self::Geq => found.wrapping_sub(value) as i64 >= 0,
            Self::Eq => found & mask == value & mask,
            Self::And => found & value & mask != 0,
            Self::Nor => !(found | value) & mask != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::WaitCondition::{And, Eq, Geq, Nor};

    #[test]
    fn wait_conditions_compare_in_wrapping_arithmetic() {
        let low = u64::from(u32::MAX);
        for (condition, found, value, bytes, holds) in [
            (Geq, 5, 5, 4, true),
            (Geq, 4, 5, 4, false),
            (Geq, 1, low - 1, 4, true), // wrapped around
            (Geq, 1, low - 1, 8, false),
            (Geq, 0, u64::MAX, 8, true),
            (Eq, 7, 7, 4, true),
            (Eq, 1 << 32 | 7, 7, 4, true),
            (Eq, 1 << 32 | 7, 7, 8, false),
            (And, 6, 2, 4, true),
            (And, 6, 1, 4, false),
            (And, 1 << 32, 1 << 32, 4, false),
            (Nor, low, 0, 4, false),
            (Nor, low, 0, 8, true),
            (Nor, low - 1, 1, 4, false),
        ] {
            assert_eq!(condition.holds(found, value, bytes), holds, "{condition:?} {found:#x} {value:#x} {bytes}");
        }
    }
}

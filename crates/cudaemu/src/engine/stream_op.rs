//! What streams do.

use std::fmt;
use std::sync::Arc;

use crate::error::Error;
use crate::exec;
use crate::handle::EventId;
use crate::mem::HostMemory;

/// One piece of work. It holds all that it needs, so that it runs without the driver's lock.
#[derive(Debug)]
pub enum StreamOp {
    /// A kernel.
    Launch(Box<KernelLaunch>),
    /// A copy.
    Memcpy(Box<Memcpy>),
    /// A memset.
    Memset(Memset),
    /// A function of the program.
    Call(HostCall),
    /// An event is reached.
    Record(EventId),
    /// Nothing: what it waits for is in its item.
    Wait,
    /// Memory is given back, in the stream's order.
    Free(u64),
    /// A value is written: address, value, bytes (4 or 8).
    WriteValue(u64, u64, u32),
    /// A value is awaited: address, value, bytes (4 or 8), how it is compared.
    WaitValue(u64, u64, u32, WaitCondition),
    /// Several, with nothing in between.
    Batch(Vec<StreamOp>),
}

/// A kernel to run.
#[derive(Clone, Debug)]
pub struct KernelLaunch {
    /// What the executor needs.
    pub launch: exec::Launch,
    /// Local memory that a thread may use.
    pub local_bytes: u32,
}

/// A copy of `height` × `depth` rows of `width` bytes.
#[derive(Clone, Debug)]
pub struct Memcpy {
    /// From where.
    pub from: CopyEndpoint,
    /// To where.
    pub to: CopyEndpoint,
    /// Bytes of a row.
    pub width: u64,
    /// Rows of a slice.
    pub height: u64,
    /// Slices.
    pub depth: u64,
}

/// One side of a copy. Rows are `pitch` apart, slices `slice`.
#[derive(Clone, Debug)]
pub enum CopyEndpoint {
    /// Memory that the driver knows: of a device, pinned, registered or managed.
    Known {
        /// Address of the first byte.
        address: u64,
        /// Bytes from row to row.
        pitch: u64,
        /// Bytes from slice to slice.
        slice: u64,
    },
    /// Memory of the program that the driver does not know.
    Host {
        /// The first byte.
        memory: HostMemory,
        /// Bytes from row to row.
        pitch: u64,
        /// Bytes from slice to slice.
        slice: u64,
    },
    /// Bytes that were taken when the copy was submitted, row after row.
    Staged(Arc<[u8]>),
}

/// A memset of `height` rows of `width` elements.
#[derive(Clone, Debug)]
pub struct Memset {
    /// Address of the first byte.
    pub address: u64,
    /// Bytes from row to row.
    pub pitch: u64,
    /// The element, in the lowest `bytes` bytes.
    pub value: u32,
    /// Bytes of an element: 1, 2 or 4.
    pub bytes: u8,
    /// Elements of a row.
    pub width: u64,
    /// Rows.
    pub height: u64,
}

/// A function of the program, with its argument. A copy of it is the same call again, as graphs need it.
#[derive(Clone)]
pub struct HostCall {
    /// What is called.
    /// With the error that the context was lost to, if it is.
    pub run: Arc<dyn Fn(Option<Error>) + Send + Sync>,
    /// It is called for a lost context too.
    pub run_after_error: bool,
    /// Addresses of function and argument, for those who ask what a node of a graph does.
    pub raw: [u64; 2],
}

impl Memcpy {
    /// Bytes that it moves.
    pub fn bytes(&self) -> u64 {
        self.width * self.height * self.depth
    }

    /// Whether another copy has the same kinds of memory on both sides.
    pub fn same_route(&self, other: &Self) -> bool {
        let known = |side: &CopyEndpoint| matches!(side, CopyEndpoint::Known { .. });
        known(&self.from) == known(&other.from) && known(&self.to) == known(&other.to)
    }
}

impl Memset {
    /// Bytes that it writes.
    pub fn total(&self) -> u64 {
        u64::from(self.bytes) * self.width * self.height
    }
}

impl fmt::Debug for HostCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Call")
    }
}

/// How `cuStreamWaitValue` compares, with the value in memory first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitCondition {
    /// Not behind it, in wrapping arithmetic.
    Geq,
    /// Equal.
    Eq,
    /// A bit in common.
    And,
    /// A bit that neither has.
    Nor,
}

impl WaitCondition {
    /// Whether the wait is over.
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
    fn awaited_values() {
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

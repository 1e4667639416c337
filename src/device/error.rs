//! What a device refuses, and what can go wrong on one.

use crate::ops::{MAX_SRC, NodeView, OpCode};
use thiserror::Error;

/// Whether a device runs a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Support {
    /// It does.
    Yes,
    /// It does, and so well that weights which lie in the host's memory are worth bringing here for it: a product with many
    /// columns on a GPU.
    Offload,
    /// It does not; why.
    No(Unsupported),
}

impl Support {
    /// Whether the device runs the node.
    pub fn runs(&self) -> bool {
        !matches!(self, Support::No(_))
    }
}

/// A node beyond a device's ability.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{op} is not supported: {reason}")]
pub struct Unsupported {
    /// The op.
    pub op: OpCode,
    /// Types or parameters that the device lacks, as text.
    pub reason: String,
}

/// The error that a node's types are not among those its kernel takes.
pub(crate) fn unsupported_types(node: &NodeView<'_>) -> Unsupported {
    let mut reason = String::from("types");
    for src in (0..MAX_SRC).filter_map(|i| node.srcs.get(i)) {
        reason += &format!(" {}", src.dtype());
    }
    Unsupported { op: node.op.code(), reason: reason + &format!(" -> {}", node.dst.dtype()) }
}

/// What went wrong on a device, by who is at fault.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The account's or the device's memory is used up.
    #[error("out of memory: {asked} bytes asked, {left} left of {limit}")]
    OutOfMemory {
        /// Bytes asked for.
        asked: u64,
        /// Bytes left.
        left: u64,
        /// The limit.
        limit: u64,
    },
    /// A handle or region that does not fit: the caller's mistake.
    #[error("misuse: {0}")]
    Misuse(&'static str),
    /// The device does not run this node.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// A limit of a device that no retry changes: a server that takes no more queues.
    #[error("{device} {lacks}")]
    Lacks {
        /// The device's name.
        device: String,
        /// What it cannot do, and what to do instead.
        lacks: &'static str,
    },
    /// A tensor larger than any buffer of the device.
    #[error("tensor {tensor} takes {bytes} bytes, and the largest buffer of {device} has {limit}: split it")]
    TooLarge {
        /// Its place in the list, from 0.
        tensor: usize,
        /// The device's name.
        device: String,
        /// Bytes that it takes.
        bytes: u64,
        /// Bytes of the largest buffer.
        limit: u64,
    },
    /// Data that the op does not allow, found while running: a row index out of range.
    #[error("{op}: {reason}")]
    Data {
        /// The op.
        op: OpCode,
        /// What the data should have been.
        reason: String,
    },
    /// The wait's deadline passed; the work may still finish.
    #[error("the deadline passed while waiting for {0}")]
    Deadline(&'static str),
    /// The device's driver refused a call, or what ran on the device failed: its queues are of no use any more.
    #[error("{device}: {call} failed: {reason}")]
    Driver {
        /// The device's name.
        device: String,
        /// The call that reported it.
        call: &'static str,
        /// The driver's error, and what was launched before it.
        reason: String,
    },
    /// The queue was dropped or the device went away before the work was done.
    #[error("the device's queue ended before the work was done")]
    Ended,
    /// The connection to a remote device is lost: everything that waits for it, and whatever comes later, gets this.
    #[error("{endpoint}: connection lost: {reason}")]
    Lost {
        /// The server, as it was given: `host:port`.
        endpoint: String,
        /// What was seen, and where to look.
        reason: String,
    },
    /// What failed behind a server, in its own words.
    #[error("{device}: {reason}")]
    Remote {
        /// The device's name.
        device: String,
        /// What the server says.
        reason: String,
    },
    /// The bytes of an upload could not be produced: the fault of the upload's [`Source::Writer`](super::Source::Writer), not of the device. Does not
    /// stick to the queue.
    #[error("the source of an upload failed: {0}")]
    Source(#[from] SourceError),
    /// The host has no more of a resource that the work needs: threads. Neither the caller's mistake nor a bug; the same call may
    /// succeed later.
    #[error("the host is out of {resource}: {reason}")]
    Exhausted {
        /// What there is no more of, in the plural.
        resource: &'static str,
        /// What it was for, and the system's error.
        reason: String,
    },
    /// A bug of ours: please report it.
    #[error("bug in fanout: {0}")]
    Bug(String),
    /// A failure of one of several devices behind one [`Device`](super::Device).
    #[error("{device}: {source}")]
    On {
        /// Name of the device that failed.
        device: String,
        /// What failed there.
        source: Box<DeviceError>,
    },
}

impl DeviceError {
    /// This failure with the name of its device.
    pub(crate) fn on(self, device: &str) -> DeviceError {
        DeviceError::On { device: device.to_owned(), source: Box::new(self) }
    }

    /// The system refused to start a thread `to` do something.
    pub(crate) fn no_thread(to: &str, error: &std::io::Error) -> DeviceError {
        DeviceError::Exhausted { resource: "threads", reason: format!("cannot start one {to}: {error}") }
    }
}

/// Why the writer of an upload produced no bytes, as text.
///
/// The device only has to know that there are none. A caller that wants its own error back uses
/// `upload_from` of a [`dyn Queue`](super::Queue), which returns it with its type.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct SourceError(String);

impl SourceError {
    /// The reason, as people read it.
    pub fn new(reason: impl ToString) -> SourceError {
        SourceError(reason.to_string())
    }
}

impl From<std::io::Error> for SourceError {
    fn from(error: std::io::Error) -> SourceError {
        SourceError::new(error)
    }
}

/// Why an upload whose bytes a closure produces did not happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UploadError<E> {
    /// The closure's own error. The queue goes on; any bytes may be in the region.
    Source(E),
    /// The device's error.
    Device(DeviceError),
}

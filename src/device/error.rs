//! Whether a device supports a node ([`Support`]), and the errors of devices ([`DeviceError`]).

use crate::ops::{MAX_SRC, NodeView, OpCode};
use crate::size::Bytes;
use std::time::Duration;
use thiserror::Error;

/// Whether a device supports a node: the result of [`Device::support`](super::Device::support).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Support {
    /// The device runs the node.
    Yes,
    /// The device runs the node so much faster than the host that copying the node's weights from the host's memory pays off:
    /// a matrix product with many columns on a GPU. ggml's `offload_op`.
    Offload,
    /// The device does not run the node, with the reason.
    No(Unsupported),
}

impl Support {
    /// Whether the device runs the node: true for `Yes` and `Offload`.
    pub fn runs(&self) -> bool {
        !matches!(self, Support::No(_))
    }
}

/// A node that a device does not support.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{op} is not supported: {reason}")]
pub struct Unsupported {
    /// The op.
    pub op: OpCode,
    /// The types or parameters that the device has no kernel for, as text.
    pub reason: String,
}

/// The error for a node with types that its kernel does not take: lists the types of sources and destination.
pub(crate) fn unsupported_types(node: &NodeView<'_>) -> Unsupported {
    let mut reason = String::from("types");
    for src in (0..MAX_SRC).filter_map(|i| node.srcs.get(i)) {
        reason += &format!(" {}", src.dtype());
    }
    Unsupported { op: node.op.code(), reason: reason + &format!(" -> {}", node.dst.dtype()) }
}

/// An error of a device or of work on it. The variant states which side is at fault: the caller, the data, the machine, the
/// network or fanout. See the section "Failures" of the [module](super).
///
/// As for all errors of this crate, `Display` is the whole text, and [`source`](std::error::Error::source) never repeats a part of
/// it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// A memory budget or the device's memory is exhausted.
    #[error("out of memory: {} requested, {} of {} available", Bytes(*requested), Bytes(*available), Bytes(*limit))]
    OutOfMemory {
        /// Bytes requested.
        requested: u64,
        /// Bytes that were available.
        available: u64,
        /// The limit of the budget or the size of the device's memory, in bytes.
        limit: u64,
    },
    /// The caller's mistake: a handle of another device, a wrong length, bindings that do not fit. Does not stick to the queue.
    #[error("misuse: {0}")]
    Misuse(&'static str),
    /// The device does not support a node of the graph.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The device does not have a capability, or is at a limit that no retry changes: a server that accepts no more queues.
    #[error("{device} {limitation}")]
    CapabilityMissing {
        /// The device's name.
        device: String,
        /// The missing capability or the limit, and an alternative.
        limitation: &'static str,
    },
    /// A tensor larger than any buffer of the device.
    #[error(
        "tensor {tensor} needs {}, and {device} allocates buffers of at most {}: split the tensor",
        Bytes(*bytes),
        Bytes(*limit)
    )]
    TensorTooLarge {
        /// Index of the tensor in the caller's list, from 0.
        tensor: usize,
        /// The device's name.
        device: String,
        /// Bytes that the tensor needs.
        bytes: u64,
        /// Size of the largest buffer in bytes.
        limit: u64,
    },
    /// Invalid data, found while a kernel ran: a row index out of range.
    #[error("{op}: {reason}")]
    Data {
        /// The op.
        op: OpCode,
        /// The invalid value, and which values are valid.
        reason: String,
    },
    /// The deadline of a wait passed. The text names what was awaited. The work may still finish.
    #[error("the deadline passed while waiting for {0}")]
    Deadline(&'static str),
    /// A program used the device for longer than [`MemoryBudget::limit_runs`](super::MemoryBudget::limit_runs) allows.
    #[error("a graph used the device for longer than the limit of {limit:?} (of a server: max-run in --limits)")]
    RunTooLong {
        /// The limit.
        limit: Duration,
    },
    /// A call of the device's driver failed. If a submission returns this, the queue goes on, and the bytes that the submission would have
    /// written are unspecified.
    #[error("{device}: {call} failed: {reason}")]
    Driver {
        /// The device's name.
        device: String,
        /// The driver call that reported the error.
        call: &'static str,
        /// The driver's error.
        reason: String,
    },
    /// The device is unusable until the process that has opened it is started again. See
    /// [`Device::lost`](super::Device::lost).
    #[error("{device} is lost until its process is started again: {reason}")]
    Lost {
        /// The device's name.
        device: String,
        /// The driver's error and what ran then, or how long a kernel has not ended.
        reason: String,
    },
    /// The queue was dropped, or its thread ended, before the work was done.
    #[error("the device's queue was closed before the work was done")]
    Ended,
    /// The connection to a remote device is lost. All pending and all later work of its queues fails with this error.
    #[error("{endpoint}: connection lost: {reason}")]
    ConnectionLost {
        /// The server's address as the user wrote it: `host:port`.
        endpoint: String,
        /// The network error, and likely causes.
        reason: String,
    },
    /// A failure on a server that has no variant of its own.
    #[error("{device}: {reason}")]
    Remote {
        /// The device's name.
        device: String,
        /// The server's error text.
        reason: String,
    },
    /// The closure of an [`UploadSource::Writer`](super::UploadSource::Writer) failed to produce the bytes of an upload. Does
    /// not stick to the queue.
    #[error("the source of an upload failed: {0}")]
    Source(SourceError),
    /// The host is out of a resource other than memory, such as threads. The same call may succeed later.
    #[error("the host is out of {resource}: {reason}")]
    Exhausted {
        /// The exhausted resource, in the plural.
        resource: &'static str,
        /// Purpose of the resource, and the system's error.
        reason: String,
    },
    /// The queue of a rank of a [`CollectiveGroup`](super::CollectiveGroup) has failed. All collectives of the group fail from
    /// then on, on every rank.
    #[error("rank {rank} ({device}) has failed: {error}")]
    RankFailed {
        /// The rank.
        rank: usize,
        /// Name of the rank's device.
        device: String,
        /// Why its queue has failed.
        error: Box<DeviceError>,
    },
    /// A rank of a [`CollectiveGroup`](super::CollectiveGroup) has left the group: its queue was dropped, or has joined another
    /// group in its place. All collectives of the group fail from then on, on every rank.
    #[error("rank {rank} ({device}) has left the group")]
    RankLeft {
        /// The rank.
        rank: usize,
        /// Name of the rank's device.
        device: String,
    },
    /// The ranks of a [`CollectiveGroup`](super::CollectiveGroup) run collectives that do not belong together. All collectives
    /// of the group fail from then on, on every rank.
    #[error("the ranks of a group disagree: {0}")]
    RanksDisagree(String),
    /// A bug in fanout: please report it.
    #[error("bug in fanout: {0}")]
    Bug(String),
    /// A failure of one device of several that a wrapper such as [`Fallback`](crate::fallback::Fallback) combines.
    #[error("{}", error.text_on(device))]
    OnDevice {
        /// Name of the failed device.
        device: String,
        /// The error of that device.
        error: Box<DeviceError>,
    },
}

impl DeviceError {
    /// Adds the name of the failed device.
    pub(crate) fn on_device(self, device: &str) -> DeviceError {
        DeviceError::OnDevice { device: device.to_owned(), error: Box::new(self) }
    }

    /// The innermost error, without the wrappers [`DeviceError::OnDevice`] and [`DeviceError::RankFailed`], which name the device
    /// at fault.
    pub fn root(&self) -> &DeviceError {
        match self {
            DeviceError::OnDevice { error, .. } | DeviceError::RankFailed { error, .. } => error.root(),
            error => error,
        }
    }

    /// The server whose lost connection is the cause, `host:port` as the user wrote it; `None` for other causes. If one server
    /// reports that it has lost another, the cause is [`DeviceError::Remote`].
    pub fn lost_endpoint(&self) -> Option<&str> {
        match self.root() {
            DeviceError::ConnectionLost { endpoint, .. } => Some(endpoint),
            _ => None,
        }
    }

    /// The name of a device or of a server with which the text begins.
    fn names(&self) -> Option<&str> {
        match self {
            DeviceError::CapabilityMissing { device, .. }
            | DeviceError::Driver { device, .. }
            | DeviceError::Lost { device, .. }
            | DeviceError::Remote { device, .. } => Some(device),
            DeviceError::ConnectionLost { endpoint, .. } => Some(endpoint),
            DeviceError::OnDevice { device, error } => {
                error.names().filter(|name| is_part(name, device)).or(Some(device))
            }
            _ => None,
        }
    }

    /// The text of the error with the device's name before it, which is left out if the text begins with it, or with the
    /// endpoint that the name begins with.
    pub(crate) fn text_on(&self, device: &str) -> String {
        if self.names().is_some_and(|name| is_part(name, device)) {
            self.to_string()
        } else {
            format!("{device}: {self}")
        }
    }

    /// [`DeviceError::Exhausted`] for a thread that the system did not start; `to` completes "cannot start one …".
    pub(crate) fn thread_spawn_failed(to: &str, error: &std::io::Error) -> DeviceError {
        DeviceError::Exhausted { resource: "threads", reason: format!("cannot start one {to}: {error}") }
    }
}

/// Whether `name` is the device's name, or the endpoint with which it begins: `host:port` of `host:port/0`.
fn is_part(name: &str, device: &str) -> bool {
    device.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The error of an upload's writer closure, as text.
///
/// Devices pass it through without reading it. A caller that needs its own error type back uses `upload_from` of a
/// [`dyn Queue`](super::Queue).
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct SourceError(String);

impl SourceError {
    /// An error with this text.
    pub fn new(reason: impl ToString) -> SourceError {
        SourceError(reason.to_string())
    }
}

impl From<SourceError> for DeviceError {
    fn from(error: SourceError) -> DeviceError {
        DeviceError::Source(error)
    }
}

impl From<std::io::Error> for SourceError {
    fn from(error: std::io::Error) -> SourceError {
        SourceError::new(error)
    }
}

/// The error of `upload_from` of a [`dyn Queue`](super::Queue): from the closure or from the device.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum UploadError<E> {
    /// The closure's error. The queue stays usable; the content of the region is unspecified.
    #[error("the source of an upload failed: {0}")]
    Source(E),
    /// The device's error.
    #[error(transparent)]
    Device(DeviceError),
}

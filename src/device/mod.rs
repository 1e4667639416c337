//! The device contract: the traits, handles and errors through which fanout drives a CPU, a GPU or a remote device.
//!
//! Start with [`Device`] and [`Queue`] below. This module holds the contract and the types that all devices share; the devices
//! themselves are in `cpu`, `cuda` and `rpc::client`, except for [`noop`], which computes nothing.
//!
//! # Layers
//! - The **core**, [`Device`] and [`Queue`]: memory, programs and in-order work. A minimal backend implements these two traits
//!   and overrides none of their default methods.
//! - **Capabilities** ([`PeerCopies`], [`ImportHost`], [`PinnedMemory`], [`HostThreads`]; [`Prefault`], [`LoadByDigest`],
//!   [`Collectives`], [`QueueAborter`]): optional, reached through accessors of the core that return `None` by default. The
//!   accessor is the only place that states whether a device or queue has a capability.
//! - **Wrappers** ([`ForwardDevice`], [`ForwardQueue`]): a device that wraps a device overrides the methods that it changes and
//!   forwards all others, capabilities included.
//! - **Convenience methods** of `dyn Device` and `dyn Queue` (`copies_from`, `upload_from`, …): they use a capability
//!   if it is present and the core otherwise. Devices do not implement them.
//!
//! # Life cycle
//! A [`Device`] creates [`Buffer`]s and [`Queue`]s, and prepares a graph, with its tensors placed in slots, as a [`Program`]
//! ([`Device::prepare`]). A queue runs a program with one region bound to each slot. Buffers, programs and queues may outlive
//! every handle of their device: each keeps the parts of the device that it needs alive. A buffer's memory is freed when its
//! last handle is dropped; a queue holds handles of all memory that its submitted work accesses.
//!
//! Dropping a queue discards the work that has not started, and stops a running program: on a CPU at a worker's next claim of
//! rows or tiles, on a GPU at the next launch or segment of launches. The drop does not block. The queue's timeline fails with
//! [`DeviceError::Ended`] once none of its work runs any more, so every waiter for one of its points returns.
//!
//! # Ordering
//! Work on one queue takes effect in the order of submission. Work on two queues is ordered by [`TimelinePoint`]s alone: one
//! queue makes a point ([`Queue::mark`]), and the second queue waits for it ([`Queue::wait`]). Neither the order of the host's
//! calls nor accesses to the same memory order two queues. A copy between queues needs two points: the destination waits until
//! the source's data are written (`after` of [`Queue::copy_from`]), and the source waits for the copy before it overwrites
//! them.
//!
//! # Identity
//! A [`DeviceId`] identifies a device and the owner of a buffer. Names are for users and may repeat.
//!
//! # Validation
//! The traits are safe: a handle of another device, a region outside its buffer or a graph that the device does not support is
//! an `Err`, never undefined behaviour. The device validates handles and sizes when work is submitted, on the caller's thread,
//! and returns [`DeviceError::Misuse`], which does not stick to the queue. A [`Graph`] has passed
//! [`crate::graph::validate::check`]: devices rely on its shapes, strides and overlaps, and check only data (row indices) while
//! kernels run.
//!
//! # Failures
//! Submission is asynchronous. It blocks in three cases:
//! - while the queue's limit on pending work is reached;
//! - in an upload larger than 256 KiB, which may wait for all earlier work, and on a CPU device for turns;
//! - in [`Queue::run_inline`] of a small program on a CPU device, while others use the device: the caller's thread waits
//!   for a turn. That wait has no deadline and an abort does not end it, but at most one slice of 2 ms of each other tenant
//!   passes, and longer only while a piece of work runs that cannot be interrupted.
//!
//! A failure of submitted work sticks to the queue: the next submission or wait returns it, and no work submitted after that
//! runs (work submitted before may have run). The host waits for [`PendingRead`]s and [`TimelinePoint`]s with a deadline.
//!
//! A submission that returns [`DeviceError::OutOfMemory`], or [`DeviceError::Driver`] on a GPU, does not stick: the bytes that it
//! would have written are unspecified, and later work runs.
//!
//! Some failures of a GPU make the whole device unusable, and only a new process can use it again: [`Device::lost`].
//!
//! The variant of [`DeviceError`] states which side is at fault: the caller ([`DeviceError::Misuse`], [`DeviceError::Source`]),
//! the data ([`DeviceError::Data`]), the machine ([`DeviceError::OutOfMemory`], [`DeviceError::Exhausted`],
//! [`DeviceError::Driver`], [`DeviceError::Lost`]), the network ([`DeviceError::ConnectionLost`]), or fanout ([`DeviceError::Bug`]).

mod abort;
mod adaptive_spin;
mod budget;
mod capability;
mod collectives;
mod command_channel;
mod error;
mod fair_queue;
mod forward;
mod host;
mod info;
mod link_speed;
mod mapped;
mod memory;
mod memory_budget;
pub mod noop;
mod pending_read;
mod queue_threads;
mod ready_at;
mod repack;
mod tensors;
mod timeline;

pub use abort::QueueAborter;
pub(crate) use adaptive_spin::AdaptiveSpin;
pub(crate) use budget::BudgetRefusal;
pub use budget::{Budget, Reservation};
pub use capability::{
    Collectives, HostThreads, ImportHost, LoadByDigest, LoadOutcome, PeerCopies, PinnedMemory, Prefault, TensorDigest,
};
pub use collectives::{CollectiveGroup, CollectivePart, GroupMember, Membership, PartBytes, ServerMember};
#[cfg(feature = "server")]
pub(crate) use collectives::{
    RemoteRanks,
    remote::{GroupHandle, ReceiveError},
};
#[cfg(feature = "server")]
pub(crate) use command_channel::MAX_PENDING_BYTES;
pub(crate) use command_channel::{Command, CommandChannel, CommandOutcome, Executor};
pub(crate) use error::unsupported_types;
pub use error::{DeviceError, SourceError, Support, Unsupported, UploadError};
pub(crate) use fair_queue::DEFAULT_SHARE;
#[cfg(feature = "cuda")]
pub(crate) use fair_queue::{FairQueue, FlowKeys, RECENT, SLICE};
pub use forward::{ForwardDevice, ForwardQueue};
pub use host::HostBuffer;
pub use info::{
    Caps, DeviceActivity, DeviceId, DeviceInfo, DeviceKind, Domain, Feature, LinkStats, MemoryInfo, ModuleLoad,
};
pub use link_speed::LinkSpeed;
pub use mapped::{Advice, MappedFile, ReadOnlyMapping};
pub use memory::{Buffer, Program, Region};
pub use memory_budget::MemoryBudget;
pub(crate) use memory_budget::process_mappings;
#[cfg(feature = "client")]
pub(crate) use pending_read::ReadSource;
pub use pending_read::{PendingRead, PendingReadSender};
pub(crate) use queue_threads::{Lane, QueueThreads, Turn};
#[cfg(test)]
pub(crate) use repack::FIRST_REPACK_DELAY;
pub(crate) use repack::{MIN_PACKED_BYTES, RepackDelays, next_layout_version};
pub use tensors::{TensorMemory, TensorPlan};
pub(crate) use timeline::POLL_INTERVAL;
#[cfg(feature = "server")]
pub(crate) use timeline::SPIN_BEFORE_SLEEP;
pub use timeline::{CallbackRegistration, CompletionSource, Timeline, TimelinePoint};

use crate::graph::Graph;
use crate::ops::NodeView;
use crate::tensor::{PlainData, TensorDesc, bytes_of};
use std::fmt::{Debug, Display};
use std::sync::Arc;
use std::time::Duration;

/// The chunk of large transfers, 256 KiB. A queue accepts an upload of at most this size without waiting for its earlier work;
/// code that must not block splits larger uploads into such chunks. Also the payload of one transfer token between servers.
pub(crate) const TRANSFER_CHUNK_BYTES: u64 = 256 << 10;

/// How long fanout itself waits for a device before it fails the operation with [`DeviceError::Deadline`].
pub(crate) const DEVICE_TIMEOUT: Duration = Duration::from_secs(600);

/// Default of the time without any progress after which a GPU counts as hung.
pub(crate) const HANG_TIMEOUT: Duration = Duration::from_secs(60);

/// The bytes of an upload: a slice, or a closure that writes them into memory of the device.
pub enum UploadSource<'a> {
    /// A slice as long as the region. It is copied before the call returns.
    Borrowed(&'a [u8]),
    /// A closure that writes the bytes of the region, front to back, into the slices that it is called with. It runs before the
    /// call returns: once with all bytes of a small region; for a large region chunk by chunk, in place, after the queue has
    /// finished all earlier work. Its error does not stick to the queue; the content of the region is then unspecified.
    ///
    /// The closure must not use a device or wait for one: all queues of a server may be waiting for it, so that would deadlock.
    ///
    /// A caller that needs the closure's error with its type uses `upload_from` of `dyn Queue`.
    Writer(&'a mut dyn FnMut(&mut [u8]) -> Result<(), SourceError>),
}

impl<'a, T: PlainData> From<&'a [T]> for UploadSource<'a> {
    fn from(values: &'a [T]) -> UploadSource<'a> {
        UploadSource::Borrowed(bytes_of(values))
    }
}

impl UploadSource<'_> {
    /// For devices: fails unless a borrowed slice is as long as the region, which has `bytes` bytes.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`].
    pub fn check_size(&self, bytes: u64) -> Result<(), DeviceError> {
        match self {
            UploadSource::Borrowed(slice) if slice.len() as u64 != bytes => {
                Err(DeviceError::Misuse("an upload and its region differ in size"))
            }
            _ => Ok(()),
        }
    }

    /// For devices: the bytes for a region of `bytes` bytes.
    ///
    /// # Errors
    /// The error of the closure.
    pub fn into_bytes(self, bytes: u64) -> Result<Vec<u8>, DeviceError> {
        match self {
            UploadSource::Borrowed(slice) => Ok(slice.to_vec()),
            UploadSource::Writer(fill) => {
                let mut filled = vec![0; bytes as usize];
                fill(&mut filled)?;
                Ok(filled)
            }
        }
    }
}

/// For devices: fails unless the regions of a copy have the same size.
///
/// # Errors
/// [`DeviceError::Misuse`].
pub fn check_copy(src: &Region, dst: &Region) -> Result<(), DeviceError> {
    if src.bytes() == dst.bytes() { Ok(()) } else { Err(DeviceError::Misuse("a copy's regions differ in size")) }
}

/// Whether a queue has accepted a copy. See [`Queue::copy_from`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum CopyOutcome {
    /// The copy is submitted.
    Submitted,
    /// The device has no access to the source's memory. Nothing was submitted: the caller has to download and upload the bytes.
    Unreachable,
}

impl CopyOutcome {
    /// Whether the copy is submitted.
    pub fn is_submitted(self) -> bool {
        self == CopyOutcome::Submitted
    }
}

/// The core of a device: a processor with its memory. The [module](self) has the contract: life cycle, ordering, identity,
/// validation, failures.
pub trait Device: Send + Sync + Debug {
    /// Identity, name, limits and copy domain: facts that do not change while the device exists.
    fn info(&self) -> &DeviceInfo;

    /// Hardware features in use and current settings, for reports: instruction sets, driver version, number of threads. Each
    /// name occurs once.
    fn features(&self) -> Vec<Feature> {
        Vec::new()
    }

    /// Free and total memory at the moment of the call, in bytes.
    ///
    /// # Errors
    /// The driver's or the connection's error, if the query fails.
    fn memory(&self) -> Result<MemoryInfo, DeviceError>;

    /// Allocates a zeroed buffer of `bytes` bytes, reserved in `budget` until the buffer's last handle is dropped. Its
    /// [`Buffer::device`] is this device's [`DeviceInfo::id`].
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the budget or the device has fewer bytes available.
    fn alloc(&self, bytes: u64, budget: &Arc<MemoryBudget>) -> Result<Buffer, DeviceError>;

    /// Bytes to allocate for a tensor: at least its extent, and more if kernels need padding after it.
    fn alloc_size(&self, tensor: &TensorDesc) -> u64;

    /// Whether the device runs a node. [`Device::prepare`] makes the same decision.
    fn support(&self, node: NodeView<'_>) -> Support;

    /// Prepares a graph as a program that queues of this device may run any number of times.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for the first node that the device does not support.
    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError>;

    /// Opens an in-order queue. Its scratch memory is reserved in `budget`.
    ///
    /// # Errors
    /// The driver's or the connection's error; [`DeviceError::Exhausted`] when the host cannot start a thread for the queue.
    fn queue(&self, budget: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError>;

    /// Why the device is unusable for good, if it is. A GPU is lost until this process is started again
    /// ([`DeviceError::Lost`]): it fell off the bus, or had an uncorrectable memory error, an illegal access or a kernel that does
    /// not end. A device of a server is lost with its connection ([`DeviceError::ConnectionLost`]): to use the server again,
    /// connect again. All work of the queues of a lost device fails, and [`Device::alloc`], [`Device::queue`], [`Device::prepare`] and [`Device::memory`] return this error. Never blocks, so
    /// that a server may poll it.
    fn lost(&self) -> Option<DeviceError> {
        None
    }

    /// The server that the device belongs to, `host:port` as the user wrote it; `None` for a device of this machine.
    fn endpoint(&self) -> Option<&str> {
        None
    }

    /// The budget of a queue whose kernel made the device unusable by a fault. `None`: the device is not lost ([`Device::lost`]), or
    /// by another cause, or kernels of several tenants ran.
    fn lost_by(&self) -> Option<Arc<MemoryBudget>> {
        None
    }

    /// How much the device has to do. `None`: it does not know.
    fn activity(&self) -> Option<DeviceActivity> {
        None
    }

    /// Traffic counters of the connection, if the device is remote.
    fn link_stats(&self) -> Option<LinkStats> {
        None
    }

    /// Capability: peer copies, direct copies from devices of other domains. `copies_from` of `dyn Device` also covers devices
    /// without it.
    fn peer_copies(&self) -> Option<&dyn PeerCopies> {
        None
    }

    /// Capability: buffers over existing memory of the host. Without it, allocate a buffer and upload.
    fn import_host(&self) -> Option<&dyn ImportHost> {
        None
    }

    /// Capability: host memory that the device copies from faster (page-locked). Callers for which any host memory will do use
    /// `alloc_host` of `dyn Device`.
    fn pinned_memory(&self) -> Option<&dyn PinnedMemory> {
        None
    }

    /// Capability: the device computes on host threads, whose number can be set.
    fn host_threads(&self) -> Option<&dyn HostThreads> {
        None
    }
}

impl dyn Device + '_ {
    /// Whether the device can be used: it is not [lost](Device::lost), nor is the connection to its server. Neither blocks nor sends
    /// anything: a server that has just failed counts as connected until a reply or a heartbeat is overdue.
    pub fn is_connected(&self) -> bool {
        self.lost().is_none()
    }

    /// Whether queues of this device copy from `other`'s memory without the host: [`PeerCopies::copies_from`] decides; a device
    /// without that capability copies within its domain only. For the device of a server, this may block for a request.
    pub fn copies_from(&self, other: &DeviceInfo) -> bool {
        match self.peer_copies() {
            Some(peers) => peers.copies_from(other),
            None => self.info().domain == other.domain,
        }
    }

    /// Allocates zeroed memory of the host, reserved in `budget`: [pinned](PinnedMemory) if the device has that capability,
    /// else pageable.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the budget, the system or the driver has fewer bytes available.
    pub fn alloc_host(&self, bytes: u64, budget: &Arc<MemoryBudget>) -> Result<HostBuffer, DeviceError> {
        match self.pinned_memory() {
            Some(pinned) => pinned.alloc_pinned(bytes, budget),
            None => HostBuffer::zeroed(bytes, budget),
        }
    }
}

/// The core of a queue: in-order asynchronous work on one device. A device may run small work within the submitting call if no
/// earlier work is pending. The [module](self) has the contract: life cycle, ordering, validation, failures.
pub trait Queue: Send {
    /// Writes bytes to a region, in order with the queue's other work.
    ///
    /// `tensor` describes the region if it is exactly one whole tensor. It is a hint: the device may repack the tensor into an
    /// internal layout for its kernels. The repacking is not observable: later accesses to the same bytes, with any type and
    /// shape, see the bytes as they were uploaded.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] when the lengths differ or the region belongs to another device; [`DeviceError::Source`] when a
    /// writer fails; the queue's sticky failure.
    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: UploadSource<'_>) -> Result<(), DeviceError>;

    /// Reads a region, in order with the queue's other work.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] for a region of another device; the queue's sticky failure.
    fn download(&mut self, src: Region) -> Result<PendingRead, DeviceError>;

    /// Reads several regions, in order with the queue's other work. To the device of a server, they take one message together.
    ///
    /// # Errors
    /// As [`Queue::download`].
    fn download_all(&mut self, srcs: &[Region]) -> Result<Vec<PendingRead>, DeviceError> {
        srcs.iter().map(|src| self.download(src.clone())).collect()
    }

    /// Sets every byte of a region to `value`, in order with the queue's other work.
    ///
    /// # Errors
    /// As [`Queue::download`].
    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError>;

    /// Copies `src` to `dst`, two regions of equal size which may overlap, once `after` is reached. `dst` belongs to this
    /// device; `src` may belong to another device.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] when the sizes differ or `dst` belongs to another device; the queue's sticky failure.
    fn copy_from(
        &mut self,
        src: Region,
        dst: Region,
        after: Option<&TimelinePoint>,
    ) -> Result<CopyOutcome, DeviceError>;

    /// Runs a program. `bindings` has one region of this device for each slot of the program's graph, at least as large as
    /// [`Graph::slot_sizes`] lists.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] when the bindings do not fit the program; the queue's sticky failure.
    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError>;

    /// As [`Queue::run`], but may run the program on the calling thread for up to about `budget`; the rest then runs on a thread
    /// of the device. Saves two thread switches for a caller that would wait for the program anyway. The default submits all
    /// of it.
    ///
    /// # Errors
    /// As [`Queue::run`], and failures of the program while it runs on the calling thread.
    fn run_inline(&mut self, program: &Program, bindings: &Arc<[Region]>, budget: Duration) -> Result<(), DeviceError> {
        _ = budget;
        self.run(program, bindings)
    }

    /// A point that is reached when all work submitted so far is done. On a failed queue the point fails.
    fn mark(&mut self) -> TimelinePoint;

    /// Makes later work of this queue wait for a point of any queue, of this or another device.
    ///
    /// # Errors
    /// The queue's sticky failure.
    fn wait(&mut self, point: &TimelinePoint) -> Result<(), DeviceError>;

    /// Capability: prefault the memory of a region before an upload. An optimisation only.
    fn prefault(&mut self) -> Option<&mut dyn Prefault> {
        None
    }

    /// Capability: load a tensor from the device's own disk by its digest. Without it, upload.
    fn load_by_digest(&mut self) -> Option<&mut dyn LoadByDigest> {
        None
    }

    /// Capability: run collective nodes, as a rank of groups that the queue has joined. Without it, the device supports no such
    /// nodes; with it, [`Device::support`] has the answer.
    fn collectives(&mut self) -> Option<&mut dyn Collectives> {
        None
    }

    /// Capability: end the queue from another thread. Without it, only dropping the queue ends it.
    fn aborter(&mut self) -> Option<QueueAborter> {
        None
    }
}

impl dyn Queue + '_ {
    /// As [`Queue::upload`] with `fill` as [`UploadSource::Writer`], but returns an error of `fill` with its type. `fill` is
    /// not called again after an error.
    ///
    /// # Errors
    /// [`UploadError::Source`] with the error of `fill`, which does not stick to the queue; else as [`Queue::upload`].
    pub fn upload_from<E: Display>(
        &mut self,
        dst: Region,
        tensor: Option<&TensorDesc>,
        mut fill: impl FnMut(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), UploadError<E>> {
        let mut failed = None;
        let mut write = |chunk: &mut [u8]| match &failed {
            None => fill(chunk).map_err(|error| SourceError::new(failed.insert(error))),
            // A device may request the next chunk of an upload after a failed one.
            Some(error) => Err(SourceError::new(error)),
        };
        let done = self.upload(dst, tensor, UploadSource::Writer(&mut write));
        match failed {
            Some(error) => Err(UploadError::Source(error)),
            None => done.map_err(UploadError::Device),
        }
    }
}

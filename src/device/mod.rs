//! The contract between fanout and a device.
//!
//! # Layers
//! - The **core**, [`Device`] and [`Queue`]: memory, programs and in-order work. A new backend implements these two, and no
//!   method that has a default.
//! - **Capabilities** ([`PeerCopies`], [`ImportHost`], [`PinnedMemory`], [`HostThreads`]; [`Prefault`], [`LoadByDigest`],
//!   [`RunInline`]): traits of their own, reached through accessors of the core that return `None` by default. Whether a
//!   device has a capability is stated nowhere else.
//! - **Wrappers** ([`ForwardDevice`], [`ForwardQueue`]): a device around another one overrides what it changes and forwards the
//!   rest, capabilities included.
//! - **Conveniences**: methods of `dyn Device` and `dyn Queue` (`run_inline_or_submit`, `upload_from`, …), which use a
//!   capability or do without. No device implements them.
//!
//! # Life cycle
//! A [`Device`] hands out [`Buffer`]s and [`Queue`]s. A graph whose tensors are placed in slots becomes a [`Program`]
//! on the device ([`Device::prepare`]); a queue runs it on regions bound to the slots. Buffers, programs and queues may outlive
//! every handle of their device: each keeps alive what it needs. A buffer's memory is freed when its last handle is dropped,
//! and a queue holds handles of what its submitted work touches.
//!
//! Dropping a queue abandons what it has not started and stops a running program at its next node; the drop does not wait. The
//! queue's timeline fails with [`DeviceError::Ended`] once nothing of it runs any more, so that a waiter for one of its points
//! returns.
//!
//! # Ordering
//! Work on one queue takes effect in the order of submission. Work on two queues is ordered by [`Point`]s alone: one queue
//! [marks](Queue::mark), the other [waits](Queue::wait). Nothing else orders them, neither the order of the host's calls nor
//! shared memory. A copy between queues needs two points: the destination waits for the source's data
//! (`after` of [`Queue::copy_from`]), and the source waits for the copy before it overwrites them.
//!
//! # Identity
//! A device is known by its [`DeviceId`], and so is the owner of a buffer. Names are for people and may repeat.
//!
//! # Validation
//! Traits are safe: a handle of another device, a region outside its buffer, a graph beyond the device's ability is an
//! `Err`, never undefined behaviour. The device checks handles and sizes when work is submitted, on the caller's thread, and
//! returns [`DeviceError::Misuse`], which does not stick to the queue. A [`Graph`] has passed [`crate::graph::validate::check`];
//! devices trust its shapes and check data (row indices) while they run.
//!
//! # Failures
//! Submitting returns before large work is done; it waits only for room among what was submitted before, and a large
//! upload for all of that. A failure of submitted work sticks to the queue: the next submission or wait returns it, and nothing
//! that is submitted after that runs (a device may have gone on with what was submitted before). [`Ticket`]s and [`Point`]s
//! block, and the host waits for them with a deadline.
//!
//! [`DeviceError`] tells who is at fault: the caller ([`DeviceError::Misuse`], [`DeviceError::Source`]), the data
//! ([`DeviceError::Data`]), the machine ([`DeviceError::OutOfMemory`], [`DeviceError::Exhausted`], [`DeviceError::Driver`]), the
//! network ([`DeviceError::Lost`]), or fanout ([`DeviceError::Bug`]).

mod account;
mod capability;
mod error;
mod forward;
mod host;
mod info;
mod line;
mod mapped;
mod memory;
pub mod noop;
mod tensors;
mod timeline;

pub use account::{Account, Charge};
pub use capability::{
    HostThreads, ImportHost, LoadByDigest, LoadOutcome, PeerCopies, PinnedMemory, Prefault, RunInline, TensorDigest,
};
pub(crate) use error::unsupported_types;
pub use error::{DeviceError, SourceError, Support, Unsupported, UploadError};
pub use forward::{ForwardDevice, ForwardQueue};
pub use host::HostBuffer;
pub use info::{Caps, DeviceId, DeviceInfo, DeviceKind, Domain, Feature, LinkStats, MemoryInfo};
pub(crate) use line::{Line, Staged};
pub use mapped::{Advice, MappedFile};
pub use memory::{Buffer, Program, Region};
pub use tensors::{TensorMemory, TensorPlan};
pub use timeline::{Point, Progress, Ticket, TicketSender, Timeline};

use crate::graph::Graph;
use crate::ops::NodeView;
use crate::tensor::TensorDesc;
use std::fmt::{Debug, Display};
use std::sync::Arc;
use std::time::Duration;

/// A queue takes in an upload of this size without waiting for its earlier work: larger ones go in such pieces where nobody
/// should wait.
pub(crate) const PIECE: u64 = 256 << 10;

/// How long a device is waited for before it is taken for lost.
pub(crate) const PATIENCE: Duration = Duration::from_secs(600);

/// The bytes of an upload.
pub enum Source<'a> {
    /// Copied before the call returns.
    Borrowed(&'a [u8]),
    /// Called before the call returns: for a small destination once, otherwise piece by piece to fill it in place when
    /// the queue has finished all earlier work. An error does not stick to the queue and leaves any bytes in the region.
    /// It must not use a device or wait for one: all queues of a server may be waiting for it.
    ///
    /// A caller that needs the closure's own error uses `upload_from` of `dyn Queue`.
    Writer(&'a mut dyn FnMut(&mut [u8]) -> Result<(), SourceError>),
}

/// Whether a queue has taken a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum CopyOutcome {
    /// The copy is submitted.
    Submitted,
    /// The device does not reach the source's memory. Nothing was submitted: the bytes have to go through the host.
    Unreachable,
}

impl CopyOutcome {
    /// Whether the copy is submitted.
    pub fn is_submitted(self) -> bool {
        self == CopyOutcome::Submitted
    }
}

/// The core of a device: a processor with memory of its own. See the [module](self) for the rules.
pub trait Device: Send + Sync + Debug {
    /// Facts that do not change.
    fn info(&self) -> &DeviceInfo;

    /// What it uses of the hardware and how it is set, as of now; each name once.
    fn features(&self) -> Vec<Feature> {
        Vec::new()
    }

    /// Free and total memory now.
    ///
    /// # Errors
    /// When the device cannot say.
    fn memory(&self) -> Result<MemoryInfo, DeviceError>;

    /// A zeroed buffer of `bytes` bytes, charged to `account` until its last handle is gone. Its
    /// [`Buffer::device`] is the [`DeviceInfo::id`] of this device.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when account or device have less left.
    fn alloc(&self, bytes: u64, account: &Arc<Account>) -> Result<Buffer, DeviceError>;

    /// Bytes to reserve for a tensor: at least its extent, more where kernels need padding.
    fn alloc_size(&self, tensor: &TensorDesc) -> u64;

    /// Whether the device runs a node: the very decision that [`Device::prepare`] makes.
    fn support(&self, node: NodeView<'_>) -> Support;

    /// Makes a graph ready to run many times.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for the first node that the device does not run.
    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError>;

    /// A new in-order queue. `account` pays for its scratch memory.
    ///
    /// # Errors
    /// When the device cannot make one; [`DeviceError::Exhausted`] when the host has no thread for it.
    fn queue(&self, account: &Arc<Account>) -> Result<Box<dyn Queue>, DeviceError>;

    /// Traffic of the connection to it, if it is remote.
    fn link_stats(&self) -> Option<LinkStats> {
        None
    }

    /// Capability: direct copies from devices of other domains. Callers that only need the answer use `copies_from` of
    /// `dyn Device`.
    fn peer_copies(&self) -> Option<&dyn PeerCopies> {
        None
    }

    /// Capability: buffers over the host's memory. Without it: allocate a buffer and upload.
    fn import_host(&self) -> Option<&dyn ImportHost> {
        None
    }

    /// Capability: host memory that it copies from faster. Callers that take any host memory use `alloc_host` of
    /// `dyn Device`.
    fn pinned_memory(&self) -> Option<&dyn PinnedMemory> {
        None
    }

    /// Capability: a number of host threads that can be set.
    fn host_threads(&self) -> Option<&dyn HostThreads> {
        None
    }
}

impl dyn Device + '_ {
    /// Whether queues of this device copy from `other`'s memory by themselves: always within a domain, else if it has
    /// [`PeerCopies`] and those say so, which may ask a server.
    pub fn copies_from(&self, other: &DeviceInfo) -> bool {
        match self.peer_copies() {
            Some(peers) => peers.copies_from(other),
            None => self.info().domain == other.domain,
        }
    }

    /// Zeroed memory of the host, charged to `account`: [pinned](PinnedMemory) if the device has such memory, else plain.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the account, the system or the driver has less left.
    pub fn alloc_host(&self, bytes: u64, account: &Arc<Account>) -> Result<HostBuffer, DeviceError> {
        match self.pinned_memory() {
            Some(pinned) => pinned.alloc_pinned(bytes, account),
            None => HostBuffer::zeroed(bytes, account),
        }
    }
}

/// The core of a queue: in-order work on one device, asynchronous unless it is small and nothing is before it. See the
/// [module](self) for life cycle, ordering, validation and failures.
pub trait Queue: Send {
    /// Writes bytes to a region, in order with the queue's other work. `tensor` describes what the region is, where it
    /// is all of one tensor; the device may then hold it in a layout of its own, which nobody can tell. It promises
    /// nothing: other accesses to the same bytes, of other types and shapes, see what was uploaded.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] when the lengths differ; [`DeviceError::Source`] when a writer fails; the queue's
    /// sticky failure.
    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: Source<'_>) -> Result<(), DeviceError>;

    /// Reads a region, in order with the queue's other work.
    ///
    /// # Errors
    /// As [`Queue::upload`].
    fn download(&mut self, src: Region) -> Result<Ticket, DeviceError>;

    /// Reads several regions, in order with the queue's other work; behind a connection all of them cost one message.
    ///
    /// # Errors
    /// As [`Queue::upload`].
    fn download_all(&mut self, srcs: &[Region]) -> Result<Vec<Ticket>, DeviceError> {
        srcs.iter().map(|src| self.download(src.clone())).collect()
    }

    /// Sets every byte of a region.
    ///
    /// # Errors
    /// As [`Queue::upload`].
    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError>;

    /// Copies between two regions of equal size, once `after` is reached; `src` may belong to another device. The two
    /// may overlap.
    ///
    /// # Errors
    /// As [`Queue::upload`].
    fn copy_from(&mut self, src: Region, dst: Region, after: Option<&Point>) -> Result<CopyOutcome, DeviceError>;

    /// Runs a program with one region bound to each of its graph's slots.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] when bindings do not fit the program; the queue's sticky failure.
    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError>;

    /// The moment after all work submitted so far.
    fn mark(&mut self) -> Point;

    /// Makes later work of this queue wait for a point of any queue.
    ///
    /// # Errors
    /// The queue's sticky failure.
    fn wait(&mut self, point: &Point) -> Result<(), DeviceError>;

    /// Capability: memory taken from the system ahead of an upload. A hint: without it nothing is lost but time.
    fn prefault(&mut self) -> Option<&mut dyn Prefault> {
        None
    }

    /// Capability: bytes that the device finds on its own disk. Without it: upload.
    fn load_by_digest(&mut self) -> Option<&mut dyn LoadByDigest> {
        None
    }

    /// Capability: programs on the caller's thread. Callers that take either way use `run_inline_or_submit` of `dyn Queue`.
    fn run_inline(&mut self) -> Option<&mut dyn RunInline> {
        None
    }
}

impl dyn Queue + '_ {
    /// Runs a program [inline](RunInline) for up to about `budget` if the queue can, else submits it.
    ///
    /// # Errors
    /// As [`Queue::run`], and failures of the program within that time.
    pub fn run_inline_or_submit(
        &mut self,
        program: &Program,
        bindings: &Arc<[Region]>,
        budget: Duration,
    ) -> Result<(), DeviceError> {
        match self.run_inline() {
            Some(inline) => inline.run_inline(program, bindings, budget),
            None => self.run(program, bindings),
        }
    }

    /// As [`Queue::upload`] of what `fill` writes ([`Source::Writer`]); an error of `fill` comes back as it is, and `fill` is not
    /// called again after it.
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
        let mut write = |piece: &mut [u8]| match &failed {
            None => fill(piece).map_err(|error| SourceError::new(failed.insert(error))),
            // A device may ask for the next piece of an upload after a failure.
            Some(error) => Err(SourceError::new(error)),
        };
        let done = self.upload(dst, tensor, Source::Writer(&mut write));
        match failed {
            Some(error) => Err(UploadError::Source(error)),
            None => done.map_err(UploadError::Device),
        }
    }
}

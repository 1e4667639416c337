//! The contract between fanout and a device.
//!
//! # Life of a computation
//! A [`Device`] hands out [`Buffer`]s and [`Queue`]s. A graph whose tensors are placed in slots becomes a [`Program`]
//! on the device ([`Device::prepare`]); a queue runs it on regions bound to the slots. Work on one queue runs in the
//! order it was submitted; work on two queues is ordered by [`Point`]s alone.
//!
//! # Who checks what
//! Traits are safe: a handle of another device, a region outside its buffer, a graph beyond the device's ability is an
//! `Err`, never undefined behaviour. A [`Graph`] has passed [`crate::graph::validate::check`]; devices trust its
//! shapes and check what is data (row indices) while they run.
//!
//! # Failures
//! Submitting returns before large work is done; it waits only for room among what was submitted before, and a large
//! upload for all of that. A failure sticks to the queue and is returned to whoever submits or waits next; nothing that
//! is submitted after it was returned runs (a device may have gone on with what was submitted before). [`Ticket`]s and [`Point`]s block, and the host waits for them with a deadline.

mod account;
mod host;
mod line;
mod mapped;
mod memory;
pub mod noop;
mod tensors;
mod timeline;

pub use account::{Account, Charge};
pub use host::HostBuffer;
pub(crate) use line::{Line, Staged};
pub use mapped::{Advice, MappedFile};
pub use memory::{Buffer, Program, Region};
pub use tensors::{TensorMemory, TensorPlan};
pub use timeline::{Point, Progress, Ticket, TicketSender, Timeline};

use crate::graph::Graph;
use crate::ops::{MAX_SRC, NodeView, OpCode};
use crate::tensor::TensorDesc;
use std::fmt::{self, Debug};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// A queue takes in an upload of this size without waiting for its earlier work: larger ones go in such pieces where nobody
/// should wait.
pub(crate) const PIECE: u64 = 256 << 10;

/// How long a device is waited for before it is taken for lost.
pub(crate) const PATIENCE: Duration = Duration::from_secs(600);

/// What a device is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceKind {
    /// The host's processors.
    Cpu,
    /// A GPU.
    Gpu,
}

/// Facts about a device that do not change.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Addressable name: `CPU`, `CUDA0`.
    pub name: String,
    /// Model, threads at first, instruction sets: for people. [`Device::features`] has the threads of now.
    pub description: String,
    /// What it is.
    pub kind: DeviceKind,
    /// Every tensor's first byte lies at a multiple of this.
    pub alignment: u64,
    /// Largest buffer in bytes.
    pub max_buffer: u64,
    /// Devices of one domain copy from each other's memory by themselves ([`Queue::copy_from`]). Between two domains bytes go
    /// through the host, unless [`Device::copies_from`] says better.
    pub domain: String,
    /// What it can do beyond what every device does.
    pub caps: Caps,
}

/// What some devices can do. A device of an unknown kind promises nothing: [`Caps::default`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Caps {
    /// Work goes on while whoever submitted it does something else.
    pub asynchronous: bool,
    /// It has host memory that it reads and writes faster than other host memory, or without the processor's help.
    pub pinned: bool,
    /// Host memory can become a buffer of it as it is, without a copy: a mapped file.
    pub import_host: bool,
    /// [`Queue::wait`] returns at once for a point of its domain: what comes later waits, and the caller does not.
    pub events: bool,
    /// It may find tensors on a disk of its own, by their digests ([`Queue::recall`]).
    pub recalls: bool,
}

/// What the bytes of a tensor are, without the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Known<'a> {
    /// BLAKE3 of the bytes.
    pub digest: [u8; 32],
    /// The name that the tensor has in a model's file: where to look first.
    pub name: &'a str,
}

/// What has gone over the connection of a device that is behind one. Devices of one endpoint share it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Link {
    /// The server, as it was given: `host:port`.
    pub endpoint: String,
    /// Bytes from here to there.
    pub sent: u64,
    /// Bytes from there to here.
    pub received: u64,
    /// How often somebody here had to wait for the server.
    pub waits: u64,
}

/// Something that a device has or is set to, for people and for reports: an instruction set, a driver's version.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Feature {
    /// What it is; the same for all devices that have it.
    pub name: String,
    /// Which, or how much of it.
    pub value: String,
}

impl Feature {
    /// A feature with its value as text.
    pub fn new(name: impl Into<String>, value: impl ToString) -> Feature {
        Feature { name: name.into(), value: value.to_string() }
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.value)
    }
}

/// A device's memory in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryInfo {
    /// Not in use by anyone.
    pub free: u64,
    /// All there is.
    pub total: u64,
}

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
    /// Something beyond running graphs that this kind of device cannot do.
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
    /// Reading the bytes of an upload failed at their source.
    #[error("the source of an upload failed: {0}")]
    Source(String),
    /// A bug of ours: please report it.
    #[error("bug in fanout: {0}")]
    Bug(String),
    /// A failure of one of several devices that work together as one.
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
}

/// The bytes of an upload.
pub enum Source<'a> {
    /// Copied before the call returns.
    Borrowed(&'a [u8]),
    /// Called before the call returns: for a small destination once, otherwise piece by piece to fill it in place when
    /// the queue has finished all earlier work. An error does not stick to the queue and leaves any bytes in the region.
    /// It must not use a device or wait for one: all queues of a server may be waiting for it.
    Writer(&'a mut dyn FnMut(&mut [u8]) -> std::io::Result<()>),
}

/// A processor with memory of its own. See the [module](self) for the rules.
pub trait Device: Send + Sync + Debug {
    /// Facts that do not change.
    fn info(&self) -> &DeviceInfo;

    /// What it uses of the hardware and how it is set, as of now; each name once.
    fn features(&self) -> Vec<Feature> {
        Vec::new()
    }

    /// What has gone over the connection to it, if it is behind one.
    fn link(&self) -> Option<Link> {
        None
    }

    /// Whether queues of this device copy from `other`'s memory by themselves ([`Queue::copy_from`]). Those of one domain
    /// do; two servers may, where one may dial the other, which is asked for here, once.
    fn copies_from(&self, other: &DeviceInfo) -> bool {
        self.info().domain == other.domain
    }

    /// Free and total memory now.
    ///
    /// # Errors
    /// When the device cannot say.
    fn memory(&self) -> Result<MemoryInfo, DeviceError>;

    /// A zeroed buffer of `bytes` bytes, charged to `account` until its last handle is gone.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when account or device have less left.
    fn alloc(&self, bytes: u64, account: &Arc<Account>) -> Result<Buffer, DeviceError>;

    /// A buffer over memory of the host, without copying it: weights as they lie in a file
    /// ([`MappedFile::private`]). The device may write into it, and rearrange it as it may any buffer. The memory is
    /// charged to `account`, all of it, until the buffer's last handle is gone.
    ///
    /// It must begin at a multiple of 8 bytes, the widest element's size. Tensors may lie in it as they do in the file:
    /// where [`DeviceInfo::alignment`] is more than that file keeps (GGUF's default is 32), kernels give the same results,
    /// and may read a little slower.
    ///
    /// # Errors
    /// [`DeviceError::Lacks`] when the device cannot reach the host's memory: allocate a buffer and upload.
    /// [`DeviceError::Misuse`] when the memory begins elsewhere, [`DeviceError::OutOfMemory`] as [`Device::alloc`].
    fn import_host(&self, memory: HostBuffer, account: &Arc<Account>) -> Result<Buffer, DeviceError> {
        let (_, _) = (memory, account);
        let lacks = "makes no buffers over the host's memory: allocate one and upload to it";
        Err(DeviceError::Lacks { device: self.info().name.clone(), lacks })
    }

    /// Zeroed memory of the host that the device copies from fastest (pinned, for a GPU), charged to `account`. Where that
    /// makes no difference it is plain memory.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the account has less left; when the system or the driver gives none.
    fn alloc_pinned(&self, bytes: u64, account: &Arc<Account>) -> Result<HostBuffer, DeviceError> {
        HostBuffer::zeroed(bytes, account)
    }

    /// Changes how many threads the device computes with, from the next graph on: what runs goes on with those that it
    /// has. Programs stay good. More threads need more scratch memory, which each queue's account pays for.
    ///
    /// # Errors
    /// [`DeviceError::Lacks`] when the device has no threads of the host's, [`DeviceError::Misuse`] for none; when the
    /// system cannot start them. The number then stays what it was.
    fn set_threads(&self, threads: usize) -> Result<(), DeviceError> {
        let _ = threads;
        let lacks = "computes with no threads of the host's: their number cannot be set";
        Err(DeviceError::Lacks { device: self.info().name.clone(), lacks })
    }

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
    /// When the device cannot make one.
    fn queue(&self, account: &Arc<Account>) -> Result<Box<dyn Queue>, DeviceError>;
}

/// In-order work on one device, asynchronous unless it is small and nothing is before it. Dropping a queue abandons what it has
/// not started, and stops what runs at the next node; memory stays valid until then. Its timeline fails once nothing of it runs
/// any more: whoever still waits for one of its points would wait for ever otherwise.
pub trait Queue: Send {
    /// Writes bytes to a region, in order with the queue's other work. `tensor` describes what the region is, where it
    /// is all of one tensor; the device may then hold it in a layout of its own, which nobody can tell. It promises
    /// nothing: other accesses to the same bytes, of other types and shapes, see what was uploaded.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] when the lengths differ; [`DeviceError::Source`] when a writer fails; the queue's
    /// sticky failure.
    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: Source<'_>) -> Result<(), DeviceError>;

    /// Bytes of a region are likely to be uploaded soon, and whoever submits has a moment to spare: a device may take the
    /// region's memory from the system now. Changes no byte, submits nothing, waits for nothing.
    fn foresee(&mut self, region: &Region) {
        let _ = region;
    }

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

    /// Fills a region with bytes that the device may find itself, on a disk of its own, and has verified: as an upload of
    /// them. The ticket brings one byte: 1 where they were found, and otherwise 0, with anything in the region. Several may be
    /// under way at once.
    ///
    /// # Errors
    /// As [`Queue::upload`].
    fn recall(&mut self, dst: Region, tensor: Option<&TensorDesc>, known: Known<'_>) -> Result<Ticket, DeviceError> {
        let (_, _, _) = (dst, tensor, known);
        Ok(Ticket::ready(vec![0]))
    }

    /// Sets every byte of a region.
    ///
    /// # Errors
    /// As [`Queue::upload`].
    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError>;

    /// Copies between two regions of equal size, once `after` is reached; `src` may belong to another device. The two
    /// may overlap. Returns whether the device can do it; otherwise nothing was submitted.
    ///
    /// # Errors
    /// As [`Queue::upload`].
    fn copy_from(&mut self, src: Region, dst: Region, after: Option<&Point>) -> Result<bool, DeviceError>;

    /// Runs a program with one region bound to each of its graph's slots.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] when bindings do not fit the program; the queue's sticky failure.
    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError>;

    /// As [`Queue::run`], for a caller that has nothing better to do than to wait for the program: its own thread may do
    /// the work, for up to about `patience`, which spares handing the program over and its end back.
    ///
    /// # Errors
    /// As [`Queue::run`], and what fails within that time.
    fn run_here(&mut self, program: &Program, bindings: &Arc<[Region]>, patience: Duration) -> Result<(), DeviceError> {
        let _ = patience;
        self.run(program, bindings)
    }

    /// The moment after all work submitted so far.
    fn mark(&mut self) -> Point;

    /// Makes later work of this queue wait for a point of any queue.
    ///
    /// # Errors
    /// The queue's sticky failure.
    fn wait(&mut self, point: &Point) -> Result<(), DeviceError>;
}

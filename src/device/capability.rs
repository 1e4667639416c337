//! Capabilities: what some devices and queues do beyond the core.
//!
//! A device or queue has a capability if its accessor ([`Device::pinned_memory`], [`Queue::prefault`], …) returns the trait
//! object; the default is `None`. Asking takes no lock, allocates nothing and has no effect. The answer does not change
//! during the life of the device or queue, so a caller may ask once.
//!
//! [`Device::pinned_memory`]: super::Device::pinned_memory
//! [`Queue::prefault`]: super::Queue::prefault

use super::{Account, Buffer, DeviceError, DeviceInfo, HostBuffer, Program, Region, Ticket};
use crate::tensor::TensorDesc;
use std::sync::Arc;
use std::time::Duration;

/// Queues of the device copy from devices of other domains without going through the host. Reached by
/// [`Device::peer_copies`](super::Device::peer_copies).
pub trait PeerCopies {
    /// Whether queues of this device copy from the memory of `other`. True for a device of the own domain. Behind a
    /// connection this may ask the server, once for each pair: it may block until the server replies or the connection is lost.
    fn copies_from(&self, other: &DeviceInfo) -> bool;
}

/// The device makes buffers over memory of the host without copying it: weights as they lie in a file
/// ([`MappedFile::private`](super::MappedFile::private)). Reached by [`Device::import_host`](super::Device::import_host).
pub trait ImportHost {
    /// A buffer over `memory`. The device may write into it, and rearrange it as it may any buffer. The memory is charged to
    /// `account`, all of it, until the buffer's last handle is gone.
    ///
    /// It must begin at a multiple of 8 bytes, the widest element's size. Tensors may lie in it as they do in the file:
    /// where [`DeviceInfo::alignment`] is more than that file keeps (GGUF's default is 32), kernels give the same results,
    /// and may read a little slower.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] when the memory begins elsewhere, [`DeviceError::OutOfMemory`] as
    /// [`Device::alloc`](super::Device::alloc).
    fn import(&self, memory: HostBuffer, account: &Arc<Account>) -> Result<Buffer, DeviceError>;
}

/// The device copies faster from some memory of the host (page-locked, for a GPU). Reached by
/// [`Device::pinned_memory`](super::Device::pinned_memory).
pub trait PinnedMemory {
    /// Zeroed memory of that kind, charged to `account`.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the account, the system or the driver has less left.
    fn alloc_pinned(&self, bytes: u64, account: &Arc<Account>) -> Result<HostBuffer, DeviceError>;
}

/// The device computes on threads of the host. Reached by [`Device::host_threads`](super::Device::host_threads).
pub trait HostThreads {
    /// Changes how many threads the device computes with, from the next graph on: a running program keeps those that it
    /// has. Programs stay valid. More threads need more scratch memory, which each queue's account pays for.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] for 0; [`DeviceError::Exhausted`] when the system cannot start them. The number then stays
    /// what it was.
    fn set_threads(&self, threads: usize) -> Result<(), DeviceError>;
}

/// The queue can take a region's memory from the system ahead of its upload. Reached by
/// [`Queue::prefault`](super::Queue::prefault).
pub trait Prefault {
    /// A hint: bytes of a region will probably be uploaded soon, and the caller has a moment to spare. Changes no byte, submits
    /// nothing, waits for nothing, never fails.
    fn prefault(&mut self, region: &Region);
}

/// The queue's device may find bytes on a disk of its own. Reached by [`Queue::load_by_digest`](super::Queue::load_by_digest).
pub trait LoadByDigest {
    /// Fills a region with bytes that the device looks for on its disk and verifies against their digest: ordered as an
    /// upload of them. `tensor` is as in [`Queue::upload`](super::Queue::upload). Several may be under way at once.
    ///
    /// # Errors
    /// As [`Queue::upload`](super::Queue::upload), here or when the ticket is waited for.
    fn load_by_digest(
        &mut self,
        dst: Region,
        tensor: Option<&TensorDesc>,
        wanted: TensorDigest<'_>,
    ) -> Result<Ticket<LoadOutcome>, DeviceError>;
}

/// Identifies the bytes of a tensor without having them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TensorDigest<'a> {
    /// BLAKE3 of the bytes.
    pub digest: [u8; 32],
    /// The name that the tensor has in a model's file: a hint where to look first.
    pub name: &'a str,
}

/// What became of a [load by digest](LoadByDigest).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum LoadOutcome {
    /// The region holds the bytes.
    Found,
    /// The device does not have them: anything may be in the region, which must be uploaded.
    Missing,
}

/// The queue can run a program on the caller's thread. Reached by [`Queue::run_inline`](super::Queue::run_inline).
pub trait RunInline {
    /// As [`Queue::run`](super::Queue::run), for a caller that would only wait for the program: the caller's thread may do the
    /// work, for up to about `budget`, which saves the hand-over to the queue's thread and back.
    ///
    /// # Errors
    /// As [`Queue::run`](super::Queue::run), and failures of the program within that time.
    fn run_inline(&mut self, program: &Program, bindings: &Arc<[Region]>, budget: Duration) -> Result<(), DeviceError>;
}

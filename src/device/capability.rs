//! Capabilities: optional traits of devices and queues, beyond the core.
//!
//! A device or queue has a capability if its accessor ([`Device::pinned_memory`], [`Queue::prefault`], …) returns the trait
//! object; the default is `None`. An accessor takes no lock, allocates nothing and has no side effect. Its result does not
//! change during the life of the device or queue, so a caller may call it once and store the result.
//!
//! [`Device::pinned_memory`]: super::Device::pinned_memory
//! [`Queue::prefault`]: super::Queue::prefault

use super::{
    Buffer, DeviceError, DeviceInfo, HostBuffer, Membership, MemoryBudget, PendingRead, ReadOnlyMapping, Region,
};
use crate::tensor::{ByteRuns, TensorDesc};
use std::sync::Arc;

/// Peer copies: direct copies from the memory of devices of other domains, without a copy through the host. Accessor:
/// [`Device::peer_copies`](super::Device::peer_copies).
pub trait PeerCopies {
    /// Whether queues of this device copy from the memory of `other`. True for a device of the same domain. A remote device may
    /// send one request per pair of devices to its server, and blocks until the server replies or the connection is lost.
    fn copies_from(&self, other: &DeviceInfo) -> bool;
}

/// Buffers over existing memory of the host, such as the weights of a mapped file. Accessor:
/// [`Device::import_host`](super::Device::import_host).
///
/// A file's weights can be held in two ways:
///
/// | | [`ImportHost::import`] of [`MappedFile::map_private`] | [`ImportHost::import_read_only`] of [`MappedFile::map_read_only`] |
/// |---|---|---|
/// | matrix products | repack weights in place, at full speed | read the file's rows, slower |
/// | memory | private to the process, as much as the weights have | the page cache, shared between processes |
/// | models larger than memory | do not run | run at the speed of the disk |
/// | writes | allowed, the file does not change | refused |
///
/// [`MappedFile::map_private`]: super::MappedFile::map_private
/// [`MappedFile::map_read_only`]: super::MappedFile::map_read_only
pub trait ImportHost {
    /// Makes a buffer that uses `memory` itself as its storage. The import copies no bytes. All of the memory is reserved in
    /// `budget` until the buffer's last handle is dropped.
    ///
    /// The device may write to the memory, and may repack tensors in it in place, as in any of its buffers. In a private file
    /// mapping each page that is written becomes a private copy of the process (copy-on-write). Repacked weights of a mapped
    /// file therefore occupy anonymous memory that the system cannot drop; only pages that are never written stay shared with
    /// the page cache. The file itself does not change.
    ///
    /// `memory` must start at a multiple of 8 bytes, the size of the widest element. Tensors in it need not be aligned to
    /// [`DeviceInfo::alignment`] (GGUF's default is 32 bytes): kernels give the same results and may read slightly slower.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] when the memory starts at another address; [`DeviceError::OutOfMemory`] as
    /// [`Device::alloc`](super::Device::alloc).
    fn import(&self, memory: HostBuffer, budget: &Arc<MemoryBudget>) -> Result<Buffer, DeviceError>;

    /// Makes a read-only buffer that uses the pages of a mapped file as its storage. Nothing is read from the file before a
    /// program or a download accesses it.
    ///
    /// No memory budget is charged: the pages belong to the system's page cache, which drops them when it needs memory. A
    /// device that computes faster on repacked weights does not repack these.
    ///
    /// Downloads, copies from the buffer and programs that read it work as with any buffer. Everything that would write it
    /// fails with [`DeviceError::Misuse`] before anything is written, and the queue stays usable: uploads, fills, copies into
    /// it, loads by digest, and programs with a node whose destination lies in it.
    /// [`Prefault::prefault`] of it does nothing.
    ///
    /// `memory` must start at a multiple of 8 bytes, as for [`ImportHost::import`].
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] when the memory starts at another address.
    fn import_read_only(&self, memory: ReadOnlyMapping) -> Result<Buffer, DeviceError>;
}

/// Page-locked memory of the host, which a GPU copies from faster and asynchronously. Accessor:
/// [`Device::pinned_memory`](super::Device::pinned_memory).
pub trait PinnedMemory {
    /// Allocates `bytes` zeroed bytes of page-locked memory, reserved in `budget`.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the budget, the system or the driver has fewer bytes available.
    fn alloc_pinned(&self, bytes: u64, budget: &Arc<MemoryBudget>) -> Result<HostBuffer, DeviceError>;
}

/// The device computes on threads of the host, whose number can be set. Accessor:
/// [`Device::host_threads`](super::Device::host_threads).
pub trait HostThreads {
    /// Sets the number of threads for the programs that start after the call. A running program keeps its threads, and prepared
    /// programs stay valid. More threads need more scratch memory, which is reserved in the budget of each queue.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] for 0; [`DeviceError::Exhausted`] when the system cannot start the threads. The number is
    /// unchanged then.
    fn set_threads(&self, threads: usize) -> Result<(), DeviceError>;
}

/// Prefaulting: the queue makes the system provide the pages of a region before an upload writes them. Accessor:
/// [`Queue::prefault`](super::Queue::prefault).
pub trait Prefault {
    /// Hints that a region will probably be uploaded soon, and that the caller is idle. Touches the region's pages on the
    /// calling thread. Changes no byte, submits no work, does not wait for work and does not fail.
    fn prefault(&mut self, region: &Region);
}

/// Loading of tensors from the device's own disk, identified by digest instead of uploaded. Accessor:
/// [`Queue::load_by_digest`](super::Queue::load_by_digest).
pub trait LoadByDigest {
    /// Searches the device's disk for a tensor with this digest, verifies it, and writes the slice `runs` of it to a region
    /// ([`ByteRuns::whole`]: all of it). Ordered with the queue's other work as an upload is; `tensor` as in
    /// [`Queue::upload`](super::Queue::upload), the tensor that the slice is. Several loads may be pending at once.
    ///
    /// To verify a tensor the device reads and hashes all of it, also for a small slice.
    ///
    /// # Errors
    /// [`DeviceError::Misuse`] when the slice reaches past the tensor or differs from the region in length. Else as
    /// [`Queue::upload`](super::Queue::upload), from this call or from the pending read.
    fn load_by_digest(
        &mut self,
        dst: Region,
        tensor: Option<&TensorDesc>,
        wanted: TensorDigest<'_>,
        runs: ByteRuns,
    ) -> Result<PendingRead<LoadOutcome>, DeviceError>;
}

/// Identifies a whole tensor in a model file by the hash of its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TensorDigest<'a> {
    /// BLAKE3 hash of the bytes.
    pub digest: [u8; 32],
    /// Length in bytes.
    pub bytes: u64,
    /// The tensor's name in the model file, for the device's log.
    pub name: &'a str,
}

/// The result of a [load by digest](LoadByDigest).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum LoadOutcome {
    /// The tensor was found and verified, and the region holds the slice.
    Found,
    /// The device has no such tensor. The content of the region is unspecified: the caller has to upload.
    Missing,
}

/// Collective nodes ([`ops::collective`](crate::ops::collective)): the queue runs programs as a rank of groups. Accessor:
/// [`Queue::collectives`](super::Queue::collectives).
///
/// A program that reaches a collective before the other ranks waits for them, in order with the queue's other work. While it
/// waits it uses neither the device's turn nor a thread. So programs of all ranks may be submitted one after another from one
/// thread. But calls that wait for the queue's earlier work also wait for the other ranks: an upload larger than 256 KiB, the
/// deadline of a point, and any submission while the queue's limit on pending work is reached.
pub trait Collectives {
    /// Makes the queue a rank of a group: later programs of this queue use `member` for the collective nodes with the number
    /// `group`. The number has a meaning for this queue only. Joining a number again replaces the member, which then leaves its
    /// group. Dropping the queue leaves all groups; a failure of the queue fails them. On a remote device this only sends the
    /// request: what the server refuses (a device without collectives, no memory, a server that cannot be connected to) fails
    /// the queue later. Every rank must join; a [`Membership`] of servers that is dropped without joining leaves the other ranks
    /// waiting until the servers' timeout.
    ///
    /// A program with a collective node whose number the queue has not joined is [`DeviceError::Misuse`].
    ///
    /// # Errors
    /// The queue's sticky failure; [`DeviceError::Misuse`] for a [`Membership`] of another kind of device, or if the queue has
    /// joined 64 other numbers. The member then leaves its group.
    fn join(&mut self, group: u32, member: Membership) -> Result<(), DeviceError>;
}

//! The adaptor for wrappers: a device or queue around another one that changes a few methods and forwards the others.
//!
//! A wrapper implements [`ForwardDevice`] or [`ForwardQueue`], not [`Device`] or [`Queue`]: it names the wrapped one by
//! `inner` and overrides what it changes. Everything else, capabilities too, is forwarded, also what the contract gains
//! later: the two implementations at the end of this file must have every method of the contract, which a lint checks.
//!
//! # What a wrapper must do
//! - Keep [`DeviceInfo::id`] where it hands out the wrapped device's buffers.
//! - Override a capability's accessor together with the methods that it changes: a queue that counts programs overrides
//!   [`Queue::run`] and [`Queue::run_inline`], since the wrapped queue's [`RunInline`] passes it by.
//! - Return a capability only if the wrapped device or queue has it.

use super::{
    Account, Buffer, CopyOutcome, Device, DeviceError, DeviceInfo, Feature, HostThreads, ImportHost, LinkStats,
    LoadByDigest, MemoryInfo, PeerCopies, PinnedMemory, Point, Prefault, Program, Queue, Region, RunInline, Source,
    Support, Ticket, Timeline,
};
use crate::graph::Graph;
use crate::ops::NodeView;
use crate::tensor::TensorDesc;
use std::fmt::Debug;
use std::sync::Arc;

/// A device around another one. Methods are those of [`Device`] and forward by default.
#[allow(missing_docs)] // each is documented in `Device`
#[allow(clippy::missing_errors_doc)]
pub trait ForwardDevice: Send + Sync + Debug {
    /// The wrapped device.
    fn inner(&self) -> &dyn Device;

    fn info(&self) -> &DeviceInfo {
        self.inner().info()
    }

    fn features(&self) -> Vec<Feature> {
        self.inner().features()
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        self.inner().memory()
    }

    fn alloc(&self, bytes: u64, account: &Arc<Account>) -> Result<Buffer, DeviceError> {
        self.inner().alloc(bytes, account)
    }

    fn alloc_size(&self, tensor: &TensorDesc) -> u64 {
        self.inner().alloc_size(tensor)
    }

    fn support(&self, node: NodeView<'_>) -> Support {
        self.inner().support(node)
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        self.inner().prepare(graph)
    }

    fn queue(&self, account: &Arc<Account>) -> Result<Box<dyn Queue>, DeviceError> {
        self.inner().queue(account)
    }

    fn link_stats(&self) -> Option<LinkStats> {
        self.inner().link_stats()
    }

    fn peer_copies(&self) -> Option<&dyn PeerCopies> {
        self.inner().peer_copies()
    }

    fn import_host(&self) -> Option<&dyn ImportHost> {
        self.inner().import_host()
    }

    fn pinned_memory(&self) -> Option<&dyn PinnedMemory> {
        self.inner().pinned_memory()
    }

    fn host_threads(&self) -> Option<&dyn HostThreads> {
        self.inner().host_threads()
    }
}

/// A queue around another one. Methods are those of [`Queue`] and forward by default.
#[allow(missing_docs)] // each is documented in `Queue`
#[allow(clippy::missing_errors_doc)]
pub trait ForwardQueue: Send {
    /// The wrapped queue. A wrapper that lends its queue to a thread waits here until it has the queue back.
    ///
    /// # Errors
    /// When the wrapped queue cannot take work: what is forwarded returns this, a mark fails with it, and capabilities are
    /// absent.
    fn inner(&mut self) -> Result<&mut dyn Queue, DeviceError>;

    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: Source<'_>) -> Result<(), DeviceError> {
        self.inner()?.upload(dst, tensor, src)
    }

    fn download(&mut self, src: Region) -> Result<Ticket, DeviceError> {
        self.inner()?.download(src)
    }

    fn download_all(&mut self, srcs: &[Region]) -> Result<Vec<Ticket>, DeviceError> {
        self.inner()?.download_all(srcs)
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        self.inner()?.fill(dst, value)
    }

    fn copy_from(&mut self, src: Region, dst: Region, after: Option<&Point>) -> Result<CopyOutcome, DeviceError> {
        self.inner()?.copy_from(src, dst, after)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        self.inner()?.run(program, bindings)
    }

    fn mark(&mut self) -> Point {
        match self.inner() {
            Ok(inner) => inner.mark(),
            Err(error) => {
                let failed = Timeline::new();
                failed.fail(error);
                Point::new(&failed, 1)
            }
        }
    }

    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        self.inner()?.wait(point)
    }

    fn prefault(&mut self) -> Option<&mut dyn Prefault> {
        self.inner().ok()?.prefault()
    }

    fn load_by_digest(&mut self) -> Option<&mut dyn LoadByDigest> {
        self.inner().ok()?.load_by_digest()
    }

    fn run_inline(&mut self) -> Option<&mut dyn RunInline> {
        self.inner().ok()?.run_inline()
    }
}

// A method that is missing here would take the default of the contract instead of the wrapped device's: the bug that this
// file exists to prevent.
#[deny(clippy::missing_trait_methods)]
impl<T: ForwardDevice> Device for T {
    fn info(&self) -> &DeviceInfo {
        ForwardDevice::info(self)
    }

    fn features(&self) -> Vec<Feature> {
        ForwardDevice::features(self)
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        ForwardDevice::memory(self)
    }

    fn alloc(&self, bytes: u64, account: &Arc<Account>) -> Result<Buffer, DeviceError> {
        ForwardDevice::alloc(self, bytes, account)
    }

    fn alloc_size(&self, tensor: &TensorDesc) -> u64 {
        ForwardDevice::alloc_size(self, tensor)
    }

    fn support(&self, node: NodeView<'_>) -> Support {
        ForwardDevice::support(self, node)
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        ForwardDevice::prepare(self, graph)
    }

    fn queue(&self, account: &Arc<Account>) -> Result<Box<dyn Queue>, DeviceError> {
        ForwardDevice::queue(self, account)
    }

    fn link_stats(&self) -> Option<LinkStats> {
        ForwardDevice::link_stats(self)
    }

    fn peer_copies(&self) -> Option<&dyn PeerCopies> {
        ForwardDevice::peer_copies(self)
    }

    fn import_host(&self) -> Option<&dyn ImportHost> {
        ForwardDevice::import_host(self)
    }

    fn pinned_memory(&self) -> Option<&dyn PinnedMemory> {
        ForwardDevice::pinned_memory(self)
    }

    fn host_threads(&self) -> Option<&dyn HostThreads> {
        ForwardDevice::host_threads(self)
    }
}

#[deny(clippy::missing_trait_methods)]
impl<T: ForwardQueue> Queue for T {
    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: Source<'_>) -> Result<(), DeviceError> {
        ForwardQueue::upload(self, dst, tensor, src)
    }

    fn download(&mut self, src: Region) -> Result<Ticket, DeviceError> {
        ForwardQueue::download(self, src)
    }

    fn download_all(&mut self, srcs: &[Region]) -> Result<Vec<Ticket>, DeviceError> {
        ForwardQueue::download_all(self, srcs)
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        ForwardQueue::fill(self, dst, value)
    }

    fn copy_from(&mut self, src: Region, dst: Region, after: Option<&Point>) -> Result<CopyOutcome, DeviceError> {
        ForwardQueue::copy_from(self, src, dst, after)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        ForwardQueue::run(self, program, bindings)
    }

    fn mark(&mut self) -> Point {
        ForwardQueue::mark(self)
    }

    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        ForwardQueue::wait(self, point)
    }

    fn prefault(&mut self) -> Option<&mut dyn Prefault> {
        ForwardQueue::prefault(self)
    }

    fn load_by_digest(&mut self) -> Option<&mut dyn LoadByDigest> {
        ForwardQueue::load_by_digest(self)
    }

    fn run_inline(&mut self) -> Option<&mut dyn RunInline> {
        ForwardQueue::run_inline(self)
    }
}

//! Forwarding traits for wrappers: a device or queue that wraps another device or queue, changes a few methods and forwards all
//! others.
//!
//! A wrapper implements [`ForwardDevice`] or [`ForwardQueue`] instead of [`Device`] or [`Queue`]: its `inner` returns the
//! wrapped object, and it overrides the methods that it changes. All others are forwarded, capabilities included, and so are
//! methods that the contract gains later: the two blanket implementations at the end of this file must have every method of the
//! contract, which a lint checks.
//!
//! # Rules for wrappers
//! - A wrapper that returns buffers of the wrapped device must have the wrapped device's [`DeviceInfo::id`].
//! - Override a capability's accessor together with the methods that it changes. For example, a queue that counts programs must
//!   override both [`Queue::run`] and [`Queue::run_inline`], since the wrapped queue's `run_inline` does not call the wrapper.
//! - Return a capability only if the wrapped device or queue has it.

use super::{
    Buffer, Collectives, CopyOutcome, Device, DeviceActivity, DeviceError, DeviceInfo, Feature, HostThreads,
    ImportHost, LinkStats, LoadByDigest, MemoryBudget, MemoryInfo, PeerCopies, PendingRead, PinnedMemory, Prefault,
    Program, Queue, QueueAborter, Region, Support, Timeline, TimelinePoint, UploadSource,
};
use crate::graph::Graph;
use crate::ops::NodeView;
use crate::tensor::TensorDesc;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

/// A device that wraps a device. Has the methods of [`Device`], which forward to [`ForwardDevice::inner`] by default.
#[allow(missing_docs)] // documented in `Device`
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

    fn alloc(&self, bytes: u64, budget: &Arc<MemoryBudget>) -> Result<Buffer, DeviceError> {
        self.inner().alloc(bytes, budget)
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

    fn queue(&self, budget: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        self.inner().queue(budget)
    }

    fn lost(&self) -> Option<DeviceError> {
        self.inner().lost()
    }

    fn lost_by(&self) -> Option<Arc<MemoryBudget>> {
        self.inner().lost_by()
    }

    fn activity(&self) -> Option<DeviceActivity> {
        self.inner().activity()
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

/// A queue that wraps a queue. Has the methods of [`Queue`], which forward to [`ForwardQueue::inner`] by default.
#[allow(missing_docs)] // documented in `Queue`
#[allow(clippy::missing_errors_doc)]
pub trait ForwardQueue: Send {
    /// The wrapped queue. A wrapper that lends the queue to a thread blocks here until the thread returns it.
    ///
    /// # Errors
    /// When the wrapped queue is not available. Forwarded methods return this error, [`ForwardQueue::mark`] returns a point
    /// that fails with it, and capabilities are absent.
    fn inner(&mut self) -> Result<&mut dyn Queue, DeviceError>;

    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: UploadSource<'_>) -> Result<(), DeviceError> {
        self.inner()?.upload(dst, tensor, src)
    }

    fn download(&mut self, src: Region) -> Result<PendingRead, DeviceError> {
        self.inner()?.download(src)
    }

    fn download_all(&mut self, srcs: &[Region]) -> Result<Vec<PendingRead>, DeviceError> {
        self.inner()?.download_all(srcs)
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        self.inner()?.fill(dst, value)
    }

    fn copy_from(
        &mut self,
        src: Region,
        dst: Region,
        after: Option<&TimelinePoint>,
    ) -> Result<CopyOutcome, DeviceError> {
        self.inner()?.copy_from(src, dst, after)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        self.inner()?.run(program, bindings)
    }

    fn mark(&mut self) -> TimelinePoint {
        match self.inner() {
            Ok(inner) => inner.mark(),
            Err(error) => {
                let failed = Timeline::new();
                failed.fail(error);
                TimelinePoint::new(&failed, 1)
            }
        }
    }

    fn wait(&mut self, point: &TimelinePoint) -> Result<(), DeviceError> {
        self.inner()?.wait(point)
    }

    fn prefault(&mut self) -> Option<&mut dyn Prefault> {
        self.inner().ok()?.prefault()
    }

    fn load_by_digest(&mut self) -> Option<&mut dyn LoadByDigest> {
        self.inner().ok()?.load_by_digest()
    }

    fn run_inline(&mut self, program: &Program, bindings: &Arc<[Region]>, budget: Duration) -> Result<(), DeviceError> {
        self.inner()?.run_inline(program, bindings, budget)
    }

    fn collectives(&mut self) -> Option<&mut dyn Collectives> {
        self.inner().ok()?.collectives()
    }

    fn aborter(&mut self) -> Option<QueueAborter> {
        self.inner().ok()?.aborter()
    }
}

// A method that is missing here would run the contract's default instead of the wrapped device's method. That is the bug which
// this file exists to prevent.
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

    fn alloc(&self, bytes: u64, budget: &Arc<MemoryBudget>) -> Result<Buffer, DeviceError> {
        ForwardDevice::alloc(self, bytes, budget)
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

    fn queue(&self, budget: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        ForwardDevice::queue(self, budget)
    }

    fn lost(&self) -> Option<DeviceError> {
        ForwardDevice::lost(self)
    }

    fn lost_by(&self) -> Option<Arc<MemoryBudget>> {
        ForwardDevice::lost_by(self)
    }

    fn activity(&self) -> Option<DeviceActivity> {
        ForwardDevice::activity(self)
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
    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: UploadSource<'_>) -> Result<(), DeviceError> {
        ForwardQueue::upload(self, dst, tensor, src)
    }

    fn download(&mut self, src: Region) -> Result<PendingRead, DeviceError> {
        ForwardQueue::download(self, src)
    }

    fn download_all(&mut self, srcs: &[Region]) -> Result<Vec<PendingRead>, DeviceError> {
        ForwardQueue::download_all(self, srcs)
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        ForwardQueue::fill(self, dst, value)
    }

    fn copy_from(
        &mut self,
        src: Region,
        dst: Region,
        after: Option<&TimelinePoint>,
    ) -> Result<CopyOutcome, DeviceError> {
        ForwardQueue::copy_from(self, src, dst, after)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        ForwardQueue::run(self, program, bindings)
    }

    fn mark(&mut self) -> TimelinePoint {
        ForwardQueue::mark(self)
    }

    fn wait(&mut self, point: &TimelinePoint) -> Result<(), DeviceError> {
        ForwardQueue::wait(self, point)
    }

    fn prefault(&mut self) -> Option<&mut dyn Prefault> {
        ForwardQueue::prefault(self)
    }

    fn load_by_digest(&mut self) -> Option<&mut dyn LoadByDigest> {
        ForwardQueue::load_by_digest(self)
    }

    fn run_inline(&mut self, program: &Program, bindings: &Arc<[Region]>, budget: Duration) -> Result<(), DeviceError> {
        ForwardQueue::run_inline(self, program, bindings, budget)
    }

    fn collectives(&mut self) -> Option<&mut dyn Collectives> {
        ForwardQueue::collectives(self)
    }

    fn aborter(&mut self) -> Option<QueueAborter> {
        ForwardQueue::aborter(self)
    }
}

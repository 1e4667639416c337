//! A device that passes everything on to another one, with queues that a test replaces: to make some commands fail, to count
//! or to hold them.

use fanout::device::{
    Account, Buffer, Device, DeviceError, DeviceInfo, Feature, HostBuffer, Link, MemoryInfo, Program, Queue, Support,
};
use fanout::graph::Graph;
use fanout::ops::NodeView;
use fanout::tensor::TensorDesc;
use std::fmt;
use std::sync::Arc;

/// Replaces a queue of the inner device.
type WrapQueue = dyn Fn(Box<dyn Queue>) -> Result<Box<dyn Queue>, DeviceError> + Send + Sync;

/// A device that forwards to another one, but for its queues.
pub struct ForwardingDevice {
    inner: Arc<dyn Device>,
    wrap: Box<WrapQueue>,
}

impl ForwardingDevice {
    /// Forwards to `inner`; `wrap` replaces each queue that is opened, and its error is that of [`Device::queue`].
    pub fn with_queues(
        inner: Arc<dyn Device>,
        wrap: impl Fn(Box<dyn Queue>) -> Result<Box<dyn Queue>, DeviceError> + Send + Sync + 'static,
    ) -> Arc<dyn Device> {
        Arc::new(ForwardingDevice { inner, wrap: Box::new(wrap) })
    }
}

impl fmt::Debug for ForwardingDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ForwardingDevice({})", self.inner.info().name)
    }
}

impl Device for ForwardingDevice {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn features(&self) -> Vec<Feature> {
        self.inner.features()
    }

    fn link(&self) -> Option<Link> {
        self.inner.link()
    }

    fn copies_from(&self, other: &DeviceInfo) -> bool {
        self.inner.copies_from(other)
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        self.inner.memory()
    }

    fn alloc(&self, bytes: u64, account: &Arc<Account>) -> Result<Buffer, DeviceError> {
        self.inner.alloc(bytes, account)
    }

    fn import_host(&self, memory: HostBuffer, account: &Arc<Account>) -> Result<Buffer, DeviceError> {
        self.inner.import_host(memory, account)
    }

    fn alloc_pinned(&self, bytes: u64, account: &Arc<Account>) -> Result<HostBuffer, DeviceError> {
        self.inner.alloc_pinned(bytes, account)
    }

    fn set_threads(&self, threads: usize) -> Result<(), DeviceError> {
        self.inner.set_threads(threads)
    }

    fn alloc_size(&self, tensor: &TensorDesc) -> u64 {
        self.inner.alloc_size(tensor)
    }

    fn support(&self, node: NodeView<'_>) -> Support {
        self.inner.support(node)
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        self.inner.prepare(graph)
    }

    fn queue(&self, account: &Arc<Account>) -> Result<Box<dyn Queue>, DeviceError> {
        (self.wrap)(self.inner.queue(account)?)
    }
}

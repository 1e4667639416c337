//! A CPU whose queues are others.

use fanout::cpu::CpuDevice;
use fanout::device::{Account, Buffer, Device, DeviceError, DeviceInfo, MemoryInfo, Program, Queue, Support};
use fanout::graph::Graph;
use fanout::ops::NodeView;
use fanout::tensor::TensorDesc;
use std::fmt;
use std::sync::Arc;

/// What becomes of a queue.
type Change = dyn Fn(Box<dyn Queue>) -> Result<Box<dyn Queue>, DeviceError> + Send + Sync;

/// A CPU with queues that something is made of.
pub(crate) struct Wrapped {
    inner: Arc<CpuDevice>,
    change: Box<Change>,
}

impl Wrapped {
    pub(crate) fn device(
        inner: Arc<CpuDevice>,
        change: impl Fn(Box<dyn Queue>) -> Result<Box<dyn Queue>, DeviceError> + Send + Sync + 'static,
    ) -> Arc<dyn Device> {
        Arc::new(Wrapped { inner, change: Box::new(change) })
    }
}

impl fmt::Debug for Wrapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Wrapped({})", self.inner.info().name)
    }
}

impl Device for Wrapped {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        self.inner.memory()
    }

    fn alloc(&self, bytes: u64, account: &Arc<Account>) -> Result<Buffer, DeviceError> {
        self.inner.alloc(bytes, account)
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
        (self.change)(self.inner.queue(account)?)
    }
}

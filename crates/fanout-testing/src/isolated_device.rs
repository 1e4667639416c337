//! A CPU device with memory of a domain of its own: other devices cannot copy from it, so bytes go through the host.

use fanout::cpu::{CpuDevice, Path};
use fanout::device::{Account, Buffer, Device, DeviceError, DeviceInfo, Domain, MemoryInfo, Program, Queue, Support};
use fanout::graph::Graph;
use fanout::ops::{NodeView, OpCode};
use fanout::tensor::TensorDesc;
use std::sync::Arc;

/// A CPU device in a domain of its own, with facts that a test sets.
#[derive(Debug)]
pub struct IsolatedDevice {
    inner: Arc<CpuDevice>,
    info: DeviceInfo,
    /// Ops for which it answers [`Support::Offload`].
    offloads: &'static [OpCode],
}

impl IsolatedDevice {
    /// A device with one thread and `memory` bytes, whose domain is its name.
    ///
    /// # Panics
    /// When the CPU device cannot be made.
    pub fn new(name: &str, memory: u64) -> IsolatedDevice {
        let inner = CpuDevice::new(name, 1, Path::Exact, memory).unwrap();
        let mut info = inner.info().clone();
        info.domain = Domain::named(name);
        IsolatedDevice { inner, info, offloads: &[] }
    }

    /// Changes the facts that [`Device::info`] returns.
    pub fn with_info(mut self, change: impl FnOnce(&mut DeviceInfo)) -> IsolatedDevice {
        change(&mut self.info);
        self
    }

    /// Answers [`Support::Offload`] for these ops: weights in the host's memory are worth bringing here for them.
    pub fn with_offload(self, ops: &'static [OpCode]) -> IsolatedDevice {
        IsolatedDevice { offloads: ops, ..self }
    }

    /// The finished device as a trait object, as lists of devices hold it.
    pub fn shared(self) -> Arc<dyn Device> {
        Arc::new(self)
    }
}

impl Device for IsolatedDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
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
        match self.inner.support(node) {
            Support::Yes if self.offloads.contains(&node.op.code()) => Support::Offload,
            other => other,
        }
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        self.inner.prepare(graph)
    }

    fn queue(&self, account: &Arc<Account>) -> Result<Box<dyn Queue>, DeviceError> {
        self.inner.queue(account)
    }
}

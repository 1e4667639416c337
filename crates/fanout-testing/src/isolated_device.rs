//! A CPU device in a copy domain of its own: other devices cannot copy from its memory, so copies go through the host.

use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{
    Buffer, Device, DeviceError, DeviceInfo, Domain, MemoryBudget, MemoryInfo, Program, Queue, Support,
};
use fanout::graph::Graph;
use fanout::ops::{NodeView, OpCode};
use fanout::tensor::TensorDesc;
use std::sync::Arc;

/// A CPU device in a copy domain of its own, with a description that tests can change.
#[derive(Debug)]
pub struct IsolatedDevice {
    inner: Arc<CpuDevice>,
    info: DeviceInfo,
    /// Ops for which the device reports [`Support::Offload`].
    offloads: &'static [OpCode],
}

impl IsolatedDevice {
    /// A device with one thread and `memory` bytes, in the copy domain `name`.
    ///
    /// # Panics
    /// If the CPU device cannot start its threads.
    pub fn new(name: &str, memory: u64) -> IsolatedDevice {
        let inner = CpuDevice::new(name, 1, MathMode::Exact, memory).unwrap();
        let mut info = inner.info().clone();
        info.domain = Domain::named(name);
        IsolatedDevice { inner, info, offloads: &[] }
    }

    /// Changes the description that [`Device::info`] returns.
    pub fn with_info(mut self, change: impl FnOnce(&mut DeviceInfo)) -> IsolatedDevice {
        change(&mut self.info);
        self
    }

    /// Reports [`Support::Offload`] for these ops.
    pub fn with_offload(self, ops: &'static [OpCode]) -> IsolatedDevice {
        IsolatedDevice { offloads: ops, ..self }
    }

    /// The finished device as a shared trait object, the form that lists of devices take.
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

    fn lost(&self) -> Option<DeviceError> {
        self.inner.lost()
    }

    fn alloc(&self, bytes: u64, budget: &Arc<MemoryBudget>) -> Result<Buffer, DeviceError> {
        self.inner.alloc(bytes, budget)
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

    fn queue(&self, budget: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        self.inner.queue(budget)
    }
}

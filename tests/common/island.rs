//! A CPU device whose memory nobody else reaches, and that says of itself what a test wants.

use fanout::cpu::{CpuDevice, Path};
use fanout::device::{Account, Buffer, Device, DeviceError, DeviceInfo, MemoryInfo, Program, Queue, Support};
use fanout::graph::Graph;
use fanout::ops::{NodeView, OpCode};
use fanout::tensor::TensorDesc;
use std::sync::Arc;

#[derive(Debug)]
pub struct Island {
    inner: Arc<CpuDevice>,
    info: DeviceInfo,
    /// Ops that it wants even where their weights lie in the host's memory.
    wants: &'static [OpCode],
}

impl Island {
    pub fn new(name: &str, memory: u64) -> Island {
        let inner = CpuDevice::new(name, 1, Path::Exact, memory).unwrap();
        let info = inner.info().clone().with_domain(name.to_owned());
        Island { inner, info, wants: &[] }
    }

    /// With other facts.
    pub fn with(mut self, change: impl FnOnce(&mut DeviceInfo)) -> Island {
        change(&mut self.info);
        self
    }

    pub fn wants(self, wants: &'static [OpCode]) -> Island {
        Island { wants, ..self }
    }

    pub fn shared(self) -> Arc<dyn Device> {
        Arc::new(self)
    }
}

impl Device for Island {
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
            Support::Yes if self.wants.contains(&node.op.code()) => Support::Offload,
            says => says,
        }
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        self.inner.prepare(graph)
    }

    fn queue(&self, account: &Arc<Account>) -> Result<Box<dyn Queue>, DeviceError> {
        self.inner.queue(account)
    }
}

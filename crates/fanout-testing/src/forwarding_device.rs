//! A device that forwards to another device, except for what a test replaces: its description, the nodes that it prefers, and its
//! queues, which then fail, count or delay commands.

use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Device, DeviceError, DeviceInfo, Domain, ForwardDevice, MemoryBudget, Queue, Support};
use fanout::ops::{NodeView, OpCode};
use std::fmt;
use std::sync::Arc;

/// Replaces a queue of the inner device.
type WrapQueue = dyn Fn(Box<dyn Queue>) -> Result<Box<dyn Queue>, DeviceError> + Send + Sync;

/// A device that forwards to another device.
pub struct ForwardingDevice {
    inner: Arc<dyn Device>,
    info: DeviceInfo,
    /// Ops for which the device reports [`Support::Offload`].
    offloads: &'static [OpCode],
    wrap: Box<WrapQueue>,
}

impl ForwardingDevice {
    /// Forwards everything to `inner`.
    pub fn new(inner: Arc<dyn Device>) -> ForwardingDevice {
        ForwardingDevice { info: inner.info().clone(), inner, offloads: &[], wrap: Box::new(Ok) }
    }

    /// A CPU device with one thread and `memory` bytes, in the copy domain `name`: other devices cannot copy from its memory, so
    /// copies go through the host.
    ///
    /// # Panics
    /// If the CPU device cannot start its threads.
    pub fn isolated(name: &str, memory: u64) -> ForwardingDevice {
        let cpu = CpuDevice::new(name, 1, MathMode::Exact, memory).unwrap();
        ForwardingDevice::new(cpu).with_info(|info| info.domain = Domain::named(name))
    }

    /// Changes the description that [`Device::info`] returns.
    pub fn with_info(mut self, change: impl FnOnce(&mut DeviceInfo)) -> ForwardingDevice {
        change(&mut self.info);
        self
    }

    /// Reports [`Support::Offload`] for these ops.
    pub fn with_offload(self, ops: &'static [OpCode]) -> ForwardingDevice {
        ForwardingDevice { offloads: ops, ..self }
    }

    /// Replaces each opened queue by `wrap`, whose error is returned from [`Device::queue`].
    pub fn with_queues(
        self,
        wrap: impl Fn(Box<dyn Queue>) -> Result<Box<dyn Queue>, DeviceError> + Send + Sync + 'static,
    ) -> ForwardingDevice {
        ForwardingDevice { wrap: Box::new(wrap), ..self }
    }

    /// The finished device as a shared trait object, the form that lists of devices take.
    pub fn shared(self) -> Arc<dyn Device> {
        Arc::new(self)
    }
}

impl fmt::Debug for ForwardingDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ForwardingDevice({})", self.info.name)
    }
}

impl ForwardDevice for ForwardingDevice {
    fn inner(&self) -> &dyn Device {
        &*self.inner
    }

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn support(&self, node: NodeView<'_>) -> Support {
        match self.inner.support(node) {
            Support::Yes if self.offloads.contains(&node.op.code()) => Support::Offload,
            other => other,
        }
    }

    fn queue(&self, budget: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        (self.wrap)(self.inner.queue(budget)?)
    }
}

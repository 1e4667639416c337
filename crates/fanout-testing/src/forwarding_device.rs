//! A device that forwards to another device, with queues that a test replaces: to fail, count or delay commands.

use fanout::device::{Device, DeviceError, ForwardDevice, MemoryBudget, Queue};
use std::fmt;
use std::sync::Arc;

/// Replaces a queue of the inner device.
type WrapQueue = dyn Fn(Box<dyn Queue>) -> Result<Box<dyn Queue>, DeviceError> + Send + Sync;

/// A device that forwards to another device, except for its queues.
pub struct ForwardingDevice {
    inner: Arc<dyn Device>,
    wrap: Box<WrapQueue>,
}

impl ForwardingDevice {
    /// Forwards to `inner`. `wrap` replaces each opened queue; an error of `wrap` is returned from [`Device::queue`].
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

impl ForwardDevice for ForwardingDevice {
    fn inner(&self) -> &dyn Device {
        &*self.inner
    }

    fn queue(&self, budget: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        (self.wrap)(self.inner.queue(budget)?)
    }
}

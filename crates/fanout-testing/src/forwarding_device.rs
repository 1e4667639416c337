//! A device that passes everything on to another one, with queues that a test replaces: to make some commands fail, to count
//! or to hold them.

use fanout::device::{Account, Device, DeviceError, ForwardDevice, Queue};
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

impl ForwardDevice for ForwardingDevice {
    fn inner(&self) -> &dyn Device {
        &*self.inner
    }

    fn queue(&self, account: &Arc<Account>) -> Result<Box<dyn Queue>, DeviceError> {
        (self.wrap)(self.inner.queue(account)?)
    }
}

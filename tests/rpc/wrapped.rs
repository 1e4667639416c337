//! A CPU whose queues are others.

use fanout::cpu::CpuDevice;
use fanout::device::{Account, Device, DeviceError, ForwardDevice, Queue};
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

impl ForwardDevice for Wrapped {
    fn inner(&self) -> &dyn Device {
        &*self.inner
    }

    fn queue(&self, account: &Arc<Account>) -> Result<Box<dyn Queue>, DeviceError> {
        (self.change)(self.inner.queue(account)?)
    }
}

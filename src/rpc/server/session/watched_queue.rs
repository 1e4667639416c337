//! A device queue that ends when the session's client has gone.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::device::{Device, DeviceError, MemoryBudget, Queue};
use crate::rpc::server::hangup_watch::{CancellerGuard, SessionWatch};

/// A queue of a session. The hang-up watch aborts it when the client has gone, if the device can end a queue from another
/// thread ([`Queue::aborter`]).
pub(in crate::rpc::server) struct WatchedQueue {
    /// Dropped before the queue: the aborter is not called for a queue that is closed already.
    _canceller: Option<CancellerGuard>,
    queue: Box<dyn Queue>,
}

impl WatchedQueue {
    /// Opens a queue of `device`, whose memory is reserved in `budget`.
    ///
    /// # Errors
    /// As [`Device::queue`].
    pub(in crate::rpc::server) fn open(
        device: &dyn Device,
        budget: &Arc<MemoryBudget>,
        watch: &Arc<SessionWatch>,
    ) -> Result<WatchedQueue, DeviceError> {
        let mut queue = device.queue(budget)?;
        let canceller = queue.aborter().map(|aborter| watch.on_hangup(move || aborter.abort()));
        Ok(WatchedQueue { _canceller: canceller, queue })
    }
}

impl Deref for WatchedQueue {
    type Target = dyn Queue;

    fn deref(&self) -> &(dyn Queue + 'static) {
        &*self.queue
    }
}

impl DerefMut for WatchedQueue {
    fn deref_mut(&mut self) -> &mut (dyn Queue + 'static) {
        &mut *self.queue
    }
}

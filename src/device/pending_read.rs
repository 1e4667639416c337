//! Pending reads: the results of downloads.

use super::DeviceError;
use crate::sync::{self, Arc, Condvar, Instant, Mutex, Unpoisoned, lock};
use std::fmt;

/// The future of a value that a device delivers later: by default the bytes of a download.
pub struct PendingRead<T = Vec<u8>>(Pending<T>);

enum Pending<T> {
    /// The result is here.
    Ready(T),
    /// A [`PendingReadSender`] delivers the result.
    Sent(Arc<Slot<T>>),
    /// The waiter's thread fetches the result.
    Fetched(FetchResult<T>),
}

/// Where a sender puts the result.
#[derive(Debug)]
struct Slot<T> {
    result: Mutex<Option<Result<T, DeviceError>>>,
    delivered: Condvar,
}

/// Blocks for the result until a deadline.
type FetchResult<T> = Box<dyn FnOnce(Option<Instant>) -> Result<T, DeviceError> + Send>;

impl<T> fmt::Debug for PendingRead<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_ready() { "PendingRead(ready)" } else { "PendingRead(pending)" })
    }
}

/// The device's end of a [`PendingRead`]. Dropping it without [`PendingReadSender::send`] fails the read with
/// [`DeviceError::Ended`].
#[derive(Debug)]
pub struct PendingReadSender<T = Vec<u8>>(Option<Arc<Slot<T>>>); // none once it has sent

impl<T> PendingRead<T> {
    /// A pending read and the sender that completes it.
    pub fn new() -> (PendingReadSender<T>, PendingRead<T>) {
        let slot = Arc::new(Slot { result: Mutex::new(None), delivered: Condvar::new() });
        (PendingReadSender(Some(Arc::clone(&slot))), PendingRead(Pending::Sent(slot)))
    }

    /// A completed read.
    pub fn ready(result: T) -> PendingRead<T> {
        PendingRead(Pending::Ready(result))
    }

    /// For devices: a read that fetches its result on the waiter's thread, during the wait. `fetch` gets the deadline of the
    /// wait.
    pub fn on_demand(fetch: impl FnOnce(Option<Instant>) -> Result<T, DeviceError> + Send + 'static) -> PendingRead<T> {
        PendingRead(Pending::Fetched(Box::new(fetch)))
    }

    /// Whether [`PendingRead::wait`] would return at once. Does not poll the device, so a read that is fetched on the waiter's
    /// thread ([`PendingRead::on_demand`]) is never ready.
    pub fn is_ready(&self) -> bool {
        match &self.0 {
            Pending::Ready(_) => true,
            Pending::Sent(slot) => lock(&slot.result).is_some(),
            Pending::Fetched(_) => false,
        }
    }

    /// Blocks until the result is delivered, the queue fails, or the deadline passes (`None`: no deadline).
    ///
    /// # Errors
    /// The queue's failure; [`DeviceError::Ended`] when the queue was dropped; [`DeviceError::Deadline`] when the deadline
    /// passes first.
    pub fn wait(self, deadline: Option<Instant>) -> Result<T, DeviceError> {
        match self.0 {
            Pending::Ready(result) => Ok(result),
            Pending::Fetched(fetch) => fetch(deadline),
            Pending::Sent(slot) => slot.wait(deadline),
        }
    }
}

impl<T> Slot<T> {
    fn wait(&self, deadline: Option<Instant>) -> Result<T, DeviceError> {
        let mut slot = lock(&self.result);
        loop {
            if let Some(result) = slot.take() {
                return result;
            }
            slot = match deadline {
                None => self.delivered.wait(slot).unpoisoned(),
                Some(at) => {
                    let left = at.saturating_duration_since(sync::now());
                    if left.is_zero() {
                        return Err(DeviceError::Deadline("a download"));
                    }
                    self.delivered.wait_timeout(slot, left).unpoisoned().0
                }
            };
        }
    }

    /// Delivers the result.
    fn deliver(&self, result: Result<T, DeviceError>) {
        *lock(&self.result) = Some(result);
        self.delivered.notify_one();
    }
}

impl<T> PendingReadSender<T> {
    /// Completes the read.
    pub fn send(mut self, result: Result<T, DeviceError>) {
        if let Some(slot) = self.0.take() {
            slot.deliver(result);
        }
    }
}

impl<T> Drop for PendingReadSender<T> {
    fn drop(&mut self) {
        if let Some(slot) = self.0.take() {
            slot.deliver(Err(DeviceError::Ended));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn dropping_the_sender_fails_the_pending_read() {
        let (tx, read) = PendingRead::<Vec<u8>>::new();
        tx.send(Ok(vec![1]));
        assert!(read.is_ready() && PendingRead::ready(()).is_ready());
        let (tx, read) = PendingRead::<Vec<u8>>::new();
        assert!(!read.is_ready());
        drop(tx);
        assert_eq!(read.wait(Some(Instant::now() + Duration::from_secs(60))), Err(DeviceError::Ended));
    }
}

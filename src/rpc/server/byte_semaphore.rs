//! Byte semaphore: limits the host memory of data in flight, which no memory budget accounts for. A thread that would exceed
//! the limit blocks, which is backpressure on the client.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::device::DeviceError;

/// Counting semaphore over `limit` bytes.
pub(super) struct ByteSemaphore {
    limit: u64,
    used: Mutex<UsedBytes>,
    /// Notified when bytes are released, and when the semaphore is closed.
    released: Condvar,
}

#[derive(Default)]
struct UsedBytes {
    bytes: u64,
    closed: bool,
}

impl ByteSemaphore {
    pub(super) fn new(limit: u64) -> Arc<ByteSemaphore> {
        Arc::new(ByteSemaphore { limit, used: Mutex::default(), released: Condvar::new() })
    }

    /// Acquires `bytes`; blocks while they are not available. A request for more than the limit waits until the semaphore is
    /// unused, and then blocks all others: it must not wait for ever.
    ///
    /// # Errors
    /// [`DeviceError::Deadline`] if the bytes are not available by `until`; [`DeviceError::Ended`] after
    /// [`ByteSemaphore::close`].
    pub(super) fn acquire(self: &Arc<Self>, bytes: u64, until: Instant) -> Result<BytePermit, DeviceError> {
        let mut used = self.lock();
        while used.bytes > 0 && used.bytes.saturating_add(bytes) > self.limit {
            if used.closed {
                return Err(DeviceError::Ended);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(DeviceError::Deadline("host memory for data in flight"));
            }
            used = self.released.wait_timeout(used, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        used.bytes += bytes;
        Ok(BytePermit { semaphore: Arc::clone(self), bytes })
    }

    /// Ends the waits of all threads: the client for which they wait has gone.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.released.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, UsedBytes> {
        // Ignores poisoning: each change is a single assignment.
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Acquired bytes of a [`ByteSemaphore`]. Released when dropped.
pub(super) struct BytePermit {
    semaphore: Arc<ByteSemaphore>,
    bytes: u64,
}

impl Drop for BytePermit {
    fn drop(&mut self) {
        self.semaphore.lock().bytes -= self.bytes;
        self.semaphore.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acquire_blocks_until_the_deadline() {
        let semaphore = ByteSemaphore::new(10);
        let (now, full) = (Instant::now(), Err(DeviceError::Deadline("host memory for data in flight")));
        let acquire = |bytes| semaphore.acquire(bytes, now).map(|permit| permit.bytes);
        let (first, second) = (semaphore.acquire(4, now).unwrap(), semaphore.acquire(6, now).unwrap());
        assert_eq!(acquire(1), full);
        drop(first);
        assert_eq!((acquire(4), acquire(5)), (Ok(4), full.clone()));
        assert_eq!(acquire(u64::MAX), full);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| semaphore.acquire(10, now + std::time::Duration::from_secs(60)).map(drop));
            drop(second);
            assert_eq!(waiter.join().unwrap(), Ok(()));
            let all = semaphore.acquire(10, now).unwrap();
            let waiter = scope.spawn(|| semaphore.acquire(1, now + std::time::Duration::from_secs(60)).map(drop));
            semaphore.close();
            assert_eq!(waiter.join().unwrap(), Err(DeviceError::Ended));
            drop(all);
        });
        // More than the limit is granted while nothing else is acquired.
        assert_eq!((acquire(u64::MAX), acquire(10)), (Ok(u64::MAX), Ok(10)));
    }
}

//! Byte semaphore: limits the host memory of a session's data in flight, and charges it to the session's host memory. A thread
//! that would exceed a limit blocks, which is backpressure on the client.

use crate::poison::Unpoisoned;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

use super::host_memory::{HostCharge, SessionMemory};
use crate::device::DeviceError;

/// Counting semaphore over `limit` bytes.
pub(super) struct ByteSemaphore {
    limit: u64,
    memory: Arc<SessionMemory>,
    /// Bytes that are not charged if nothing else is acquired: the session's base has paid for them.
    prepaid: u64,
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
    /// Acquired bytes are charged to `memory`, except for up to `prepaid` bytes while nothing else is acquired.
    pub(super) fn new(limit: u64, memory: &Arc<SessionMemory>, prepaid: u64) -> Arc<ByteSemaphore> {
        Arc::new(ByteSemaphore {
            limit,
            memory: Arc::clone(memory),
            prepaid,
            used: Mutex::default(),
            released: Condvar::new(),
        })
    }

    /// Acquires `bytes`; blocks while they are not available. A request for more than the limit waits until the semaphore is
    /// unused, and then blocks all others: it must not wait for ever.
    ///
    /// # Errors
    /// [`DeviceError::Deadline`] if the bytes are not available by `until`; [`DeviceError::Ended`] after
    /// [`ByteSemaphore::close`]; [`DeviceError::Exhausted`] if the host memory is not available in time.
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
            used = self.released.wait_timeout(used, left).unpoisoned().0;
        }
        let prepaid = used.bytes == 0 && bytes <= self.prepaid;
        used.bytes += bytes;
        drop(used);
        let mut permit = BytePermit { semaphore: Arc::clone(self), bytes, charge: self.memory.empty() };
        if !prepaid {
            permit.charge.wait_and_grow(bytes)?;
        }
        Ok(permit)
    }

    /// Ends the waits of all threads: the client for which they wait has gone.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.released.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, UsedBytes> {
        // Ignores poisoning: each change is a single assignment.
        self.used.lock().unpoisoned()
    }
}

/// Acquired bytes of a [`ByteSemaphore`]. Released when dropped.
pub(super) struct BytePermit {
    semaphore: Arc<ByteSemaphore>,
    bytes: u64,
    charge: HostCharge,
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
    use crate::rpc::server::host_memory::{BASE_BYTES, HostMemory, HostMemoryInfo};
    use std::time::Duration;

    #[test]
    fn acquire_blocks_until_the_deadline() {
        let memory = HostMemory::new(u64::MAX, 0, Duration::ZERO).admit().unwrap();
        let semaphore = ByteSemaphore::new(10, &memory, 0);
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
        assert_eq!((acquire(1 << 40), acquire(10)), (Ok(1 << 40), Ok(10)));
    }

    #[test]
    fn acquired_bytes_are_charged_except_for_the_prepaid_ones() {
        let server = HostMemory::new(BASE_BYTES + (1 << 20), 0, Duration::ZERO);
        let memory = server.admit().unwrap();
        let semaphore = ByteSemaphore::new(1 << 30, &memory, 100);
        let until = Instant::now();
        let prepaid = semaphore.acquire(100, until).unwrap();
        assert_eq!(memory.held(), 0);
        let second = semaphore.acquire(100, until).unwrap();
        assert_eq!(memory.held(), 100);
        let refused = semaphore.acquire(1 << 20, until).err().unwrap().to_string();
        assert!(refused.contains("--max-host-memory"), "{refused}");
        drop((prepaid, second));
        assert_eq!((memory.held(), semaphore.lock().bytes), (0, 0));
        drop((memory, semaphore));
        assert!(matches!(server.info(), HostMemoryInfo { used: 0, .. }));
    }
}

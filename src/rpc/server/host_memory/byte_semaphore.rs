//! Byte semaphore: limits the host memory of a session's data in flight, and charges it to the session's host memory. A thread
//! that would exceed a limit blocks, which is backpressure on the client.

use crate::poison::Unpoisoned;
use std::sync::Arc;
use std::time::Instant;

use super::session::{HostCharge, SessionMemory};
use crate::device::{Budget, DeviceError, Reservation};

/// Counting semaphore over bytes.
pub(in crate::rpc::server) struct ByteSemaphore {
    memory: Arc<SessionMemory>,
    budget: Arc<Budget>,
    /// Bytes that are not charged if nothing else is acquired: the session's base has paid for them.
    prepaid: u64,
}

impl ByteSemaphore {
    /// Over `limit` bytes. Acquired bytes are charged to `memory`, except for up to `prepaid` bytes while nothing else is acquired.
    pub(in crate::rpc::server) fn new(limit: u64, memory: &Arc<SessionMemory>, prepaid: u64) -> ByteSemaphore {
        ByteSemaphore { memory: Arc::clone(memory), budget: Budget::new(limit), prepaid }
    }

    /// Acquires `bytes`; blocks while they are not available. A request for more than the limit waits until the semaphore is
    /// unused, and then takes the whole limit: it must not wait for ever.
    ///
    /// # Errors
    /// [`DeviceError::Deadline`] if the bytes are not available by `until`; [`DeviceError::Ended`] after
    /// [`SessionMemory::close`]; [`DeviceError::Exhausted`] if the host memory is not available in time.
    pub(in crate::rpc::server) fn acquire(&self, bytes: u64, until: Instant) -> Result<BytePermit, DeviceError> {
        let amount = bytes.min(self.budget.limit());
        let part = match self.budget.reserve(amount) {
            Ok(part) => part,
            Err(_) => self.wait(amount, until)?,
        };
        let is_prepaid = bytes <= self.prepaid && self.budget.used() == amount;
        let mut permit = BytePermit { part, charge: self.memory.empty() };
        if !is_prepaid {
            permit.charge.wait_and_grow(bytes)?;
        }
        Ok(permit)
    }

    fn wait(&self, amount: u64, until: Instant) -> Result<Reservation, DeviceError> {
        let server = &*self.memory.server;
        let mut state = server.lock();
        loop {
            if let Ok(part) = self.budget.reserve(amount) {
                return Ok(part);
            }
            if self.memory.is_closed(&state) {
                return Err(DeviceError::Ended);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(DeviceError::Deadline("host memory for data in flight"));
            }
            state.waiting += 1;
            state = server.released.wait_timeout(state, left).unpoisoned().0;
            state.waiting -= 1;
        }
    }
}

/// Acquired bytes of a [`ByteSemaphore`]; released when dropped.
pub(in crate::rpc::server) struct BytePermit {
    part: Reservation,
    charge: HostCharge,
}

impl Drop for BytePermit {
    fn drop(&mut self) {
        self.part.shrink_to(0);
        let server = &self.charge.session().server;
        server.notify(&server.lock());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::server::host_memory::{BASE_BYTES, HostMemory};
    use std::time::Duration;

    #[test]
    fn acquire_blocks_until_the_deadline() {
        let memory = HostMemory::new(Budget::new(u64::MAX), 0, Duration::ZERO).admit().unwrap();
        let semaphore = ByteSemaphore::new(10, &memory, 0);
        let (now, full) = (Instant::now(), Err(DeviceError::Deadline("host memory for data in flight")));
        let acquire = |bytes| semaphore.acquire(bytes, now).map(drop);
        let (first, second) = (semaphore.acquire(4, now).unwrap(), semaphore.acquire(6, now).unwrap());
        assert_eq!(acquire(1), full);
        drop(first);
        assert_eq!((acquire(4), acquire(5)), (Ok(()), full.clone()));
        assert_eq!(acquire(u64::MAX), full);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| semaphore.acquire(10, now + std::time::Duration::from_secs(60)).map(drop));
            drop(second);
            assert_eq!(waiter.join().unwrap(), Ok(()));
            let all = semaphore.acquire(10, now).unwrap();
            let waiter = scope.spawn(|| semaphore.acquire(1, now + std::time::Duration::from_secs(60)).map(drop));
            memory.close();
            assert_eq!(waiter.join().unwrap(), Err(DeviceError::Ended));
            drop(all);
        });
        // More than the limit is granted while nothing else is acquired.
        assert_eq!((acquire(1 << 40), acquire(10)), (Ok(()), Ok(())));
    }

    #[test]
    fn acquired_bytes_are_charged_except_for_the_prepaid_ones() {
        let server = HostMemory::new(Budget::new(BASE_BYTES + (1 << 20)), 0, Duration::ZERO);
        let memory = server.admit().unwrap();
        let semaphore = ByteSemaphore::new(1 << 30, &memory, 100);
        let until = Instant::now();
        let prepaid = semaphore.acquire(100, until).unwrap();
        assert_eq!(memory.held(), 0);
        let second = semaphore.acquire(100, until).unwrap();
        assert_eq!(memory.held(), 100);
        let refused = semaphore.acquire(1 << 20, until).err().unwrap().to_string();
        assert!(refused.contains("max-host-memory"), "{refused}");
        drop((prepaid, second));
        assert_eq!((memory.held(), semaphore.budget.used()), (0, 0));
        drop((memory, semaphore));
        assert_eq!(server.status().used, 0);
    }
}

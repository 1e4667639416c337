//! Memory of the host for bytes that a session has on their way, which no account pays for.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::device::DeviceError;

/// How many bytes a session may have on their way.
pub(super) struct Allowance {
    limit: u64,
    used: Mutex<u64>,
    freed: Condvar,
}

impl Allowance {
    pub(super) fn new(limit: u64) -> Arc<Allowance> {
        Arc::new(Allowance { limit, used: Mutex::new(0), freed: Condvar::new() })
    }

    /// Room for so many bytes, once there is some. What is more than all of it has it to itself.
    pub(super) fn take(self: &Arc<Self>, bytes: u64, until: Instant) -> Result<Room, DeviceError> {
        let mut used = self.used();
        while *used > 0 && used.saturating_add(bytes) > self.limit {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(DeviceError::Deadline("room for a download"));
            }
            used = self.freed.wait_timeout(used, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        *used += bytes;
        Ok(Room { of: Arc::clone(self), bytes })
    }

    fn used(&self) -> MutexGuard<'_, u64> {
        // A number is whole at every moment.
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of an [`Allowance`], given back when dropped.
pub(super) struct Room {
    of: Arc<Allowance>,
    bytes: u64,
}

impl Drop for Room {
    fn drop(&mut self) {
        *self.of.used() -= self.bytes;
        self.of.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_waited_for_until_the_deadline() {
        let allowance = Allowance::new(10);
        let (now, full) = (Instant::now(), Err(DeviceError::Deadline("room for a download")));
        let take = |bytes| allowance.take(bytes, now).map(|room| room.bytes);
        let (first, second) = (allowance.take(4, now).unwrap(), allowance.take(6, now).unwrap());
        assert_eq!(take(1), full);
        drop(first);
        assert_eq!((take(4), take(5)), (Ok(4), full.clone()));
        assert_eq!(take(u64::MAX), full);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| allowance.take(10, now + std::time::Duration::from_secs(60)).map(drop));
            drop(second);
            assert_eq!(waiter.join().unwrap(), Ok(()));
        });
        // More than all of it, alone.
        assert_eq!((take(u64::MAX), take(10)), (Ok(u64::MAX), Ok(10)));
    }
}

//! Locks after a panic. A thread that panics while it holds a lock poisons it, and every later use returns an error. No state
//! under the crate's locks is left half changed by a panic, so all users go on with it.

use std::sync::{LockResult, Mutex, MutexGuard, PoisonError};

/// Locks a mutex, also a poisoned one.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unpoisoned()
}

pub(crate) trait Unpoisoned {
    type Guard;

    /// The guard, also of a poisoned lock.
    fn unpoisoned(self) -> Self::Guard;
}

impl<G> Unpoisoned for LockResult<G> {
    type Guard = G;

    fn unpoisoned(self) -> G {
        self.unwrap_or_else(PoisonError::into_inner)
    }
}

//! The boundary to the host: no panic crosses it, and every failure is logged once.

use crate::host::{LogLevel, log};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{LockResult, Mutex, MutexGuard, PoisonError};

/// Runs a callback's body. A panic, which is a fault of the plug-in, gives `failed`.
pub(crate) fn guarded<T>(failed: T, body: impl FnOnce() -> T) -> T {
    // After a panic the state may be half changed only where a lock was held: see `lock`.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        log(LogLevel::Error, "a callback panicked, which is a bug; its result counts as failed");
        failed
    })
}

/// Locks a mutex, also after a panic of another thread that held it.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    let locked: LockResult<_> = mutex.lock();
    locked.unwrap_or_else(PoisonError::into_inner)
}

/// Logs failures of a device, each text once in a row.
#[derive(Debug, Default)]
pub(crate) struct Failures(Mutex<String>);

impl Failures {
    pub(crate) fn log(&self, text: String) {
        let mut last = lock(&self.0);
        if *last != text {
            log(LogLevel::Error, &text);
            *last = text;
        }
    }

    /// After a success the same failure is news again.
    pub(crate) fn clear(&self) {
        lock(&self.0).clear();
    }
}

//! The boundary to the host: no panic crosses it, and every failure is logged once.

use crate::host::{LogLevel, log};
use std::collections::HashSet;
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

/// Logs failures of a device, each text once until work succeeds again.
#[derive(Debug, Default)]
pub(crate) struct Failures(Mutex<HashSet<String>>);

/// Limit of the texts that are remembered.
const MAX_TEXTS: usize = 64;

impl Failures {
    pub(crate) fn log(&self, text: String) {
        let mut logged = lock(&self.0);
        if logged.len() < MAX_TEXTS && !logged.contains(&text) {
            log(LogLevel::Error, &text);
            logged.insert(text);
        }
    }

    /// After a success the same failure is news again.
    pub(crate) fn clear(&self) {
        lock(&self.0).clear();
    }
}

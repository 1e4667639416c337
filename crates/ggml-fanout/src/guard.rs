//! The boundary to the host: no panic crosses it, and every failure is logged once.

use crate::host_log::{self, Callback, LogLevel, log};
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LockResult, Mutex, MutexGuard, PoisonError};

/// Whether a callback has panicked. What it should have done is missing, so no graph runs from then on.
static PANICKED: AtomicBool = AtomicBool::new(false);

/// Whether a callback has panicked.
pub(crate) fn has_panicked() -> bool {
    PANICKED.load(Ordering::Relaxed)
}

/// Whether this process was forked from the one that loaded the plug-in. It has none of the threads, and shares the connections.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Whether this process was forked from the one that loaded the plug-in: then nothing may be locked, sent, waited for or closed.
pub(crate) fn is_forked() -> bool {
    let forked = FORKED.load(Ordering::Relaxed);
    if forked {
        host_log::log_once(
            "this process was forked from one with devices, and cannot use them: start it by exec (Python: spawn)",
        );
    }
    forked
}

/// Notices forks from now on.
pub(crate) fn watch_forks() {
    extern "C" fn forked() {
        FORKED.store(true, Ordering::Relaxed);
    }
    // SAFETY: the handler only stores a number. The library stays loaded.
    _ = unsafe { libc::pthread_atfork(None, None, Some(forked)) };
}

/// Runs a callback's body on a thread of the host. A panic, which is a fault of the plug-in, gives `failed`, and so does a fork.
pub(crate) fn guarded<T>(failed: T, body: impl FnOnce() -> T) -> T {
    if is_forked() {
        return failed;
    }
    let _callback = Callback::begin();
    caught(failed, body)
}

/// Runs the body of a thread of the plug-in. A panic gives `failed`.
pub(crate) fn caught<T>(failed: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        PANICKED.store(true, Ordering::Relaxed);
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
pub(crate) struct FailureLog(Mutex<HashSet<String>>);

/// Limit of the texts that are remembered.
const MAX_TEXTS: usize = 64;

impl FailureLog {
    pub(crate) fn log(&self, text: String) {
        let mut logged = lock(&self.0);
        let is_new = logged.len() < MAX_TEXTS && logged.insert(text.clone());
        // The host's log may wait for a lock of the host.
        drop(logged);
        if is_new {
            log(LogLevel::Error, &text);
        }
    }

    /// After a success the same failure is news again.
    pub(crate) fn clear(&self) {
        lock(&self.0).clear();
    }
}

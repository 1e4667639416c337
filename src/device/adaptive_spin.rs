//! Spin-then-park: waits for events that often happen within microseconds.

use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{self, Instant, thread};
use std::time::Duration;

/// Decides by the duration of the last wait whether the next one spins before it parks. The wake-up of a parked thread takes 45
/// us, and more if its core sleeps, too. Many round trips are shorter.
#[derive(Debug)]
pub(crate) struct AdaptiveSpin {
    /// After a wait of at least this many microseconds the next one parks at once.
    limit: u64,
    /// Duration of the last wait in microseconds.
    last: AtomicU64,
}

impl AdaptiveSpin {
    /// Creates a waiter that spins for at most `limit`. The first wait spins.
    pub(crate) fn new(limit: Duration) -> AdaptiveSpin {
        AdaptiveSpin { limit: limit.as_micros() as u64, last: AtomicU64::new(0) }
    }

    /// Spins until `ready` or the limit if the last wait was short, and then calls `park`, which may sleep.
    pub(crate) fn wait<T>(&self, ready: impl Fn() -> bool, park: impl FnOnce() -> T) -> T {
        let since = self.spin(ready);
        let result = park();
        self.record(since);
        result
    }

    /// Begins a wait: spins until `ready` or the limit, and yields the core between two polls. Returns the start time of the
    /// wait, for [`AdaptiveSpin::record`].
    pub(crate) fn spin(&self, ready: impl Fn() -> bool) -> Instant {
        let since = sync::now();
        if self.last.load(Ordering::Relaxed) < self.limit {
            while !ready() && micros(since) < self.limit {
                thread::yield_now();
            }
        }
        since
    }

    /// Ends a wait that began at `since`.
    pub(crate) fn record(&self, since: Instant) {
        self.record_duration(elapsed(since));
    }

    /// Ends a wait that took `duration`.
    pub(crate) fn record_duration(&self, duration: Duration) {
        self.last.store(duration.as_micros() as u64, Ordering::Relaxed);
    }
}

fn micros(since: Instant) -> u64 {
    elapsed(since).as_micros() as u64
}

fn elapsed(since: Instant) -> Duration {
    sync::now().saturating_duration_since(since)
}

//! Spin-then-park waiting for events that are often only microseconds away.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Decides from the last wait whether the next one begins with a spin. A parked thread is woken 45 us late and more where its
/// core sleeps too, which is longer than many round trips take.
#[derive(Debug)]
pub(super) struct AdaptiveSpin {
    /// A wait that took at least this many microseconds is followed by one that parks at once.
    limit: u64,
    /// Microseconds of the last wait.
    last: AtomicU64,
}

impl AdaptiveSpin {
    /// Spins for at most `limit`. The first wait spins.
    pub(super) fn new(limit: Duration) -> AdaptiveSpin {
        AdaptiveSpin { limit: limit.as_micros() as u64, last: AtomicU64::new(0) }
    }

    /// Spins until `ready`, if the last wait was short, and then calls `park`, which may sleep.
    pub(super) fn wait<T>(&self, ready: impl Fn() -> bool, park: impl FnOnce() -> T) -> T {
        let since = self.spin(ready);
        let got = park();
        self.record(since);
        got
    }

    /// Begins a wait: spins until `ready` or the limit, and yields the core between two looks. Returns when the wait began, for
    /// [`AdaptiveSpin::record`].
    pub(super) fn spin(&self, ready: impl Fn() -> bool) -> Instant {
        let since = Instant::now();
        if self.last.load(Ordering::Relaxed) < self.limit {
            while !ready() && micros(since) < self.limit {
                std::thread::yield_now();
            }
        }
        since
    }

    /// Ends a wait that began at `since`.
    pub(super) fn record(&self, since: Instant) {
        self.last.store(micros(since), Ordering::Relaxed);
    }
}

fn micros(since: Instant) -> u64 {
    since.elapsed().as_micros() as u64
}

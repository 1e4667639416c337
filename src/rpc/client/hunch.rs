//! Short waits without sleep.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Waits that take longer are worth a sleep: that they end some 50 us later is little to them.
const SHORT: Duration = Duration::from_millis(1);

/// How long waits take of late, from which one guesses how long the next one takes: where that is short, whoever waits looks
/// again and again, because a thread that sleeps is woken late.
#[derive(Debug, Default)]
pub(super) struct Hunch {
    /// Microseconds of the last wait.
    last: AtomicU64,
}

impl Hunch {
    /// Waits until it `came`, as `wait` does, which may sleep.
    pub(super) fn follow<T>(&self, came: impl Fn() -> bool, wait: impl FnOnce() -> T) -> T {
        let since = Instant::now();
        if Duration::from_micros(self.last.load(Ordering::Relaxed)) < SHORT {
            while !came() && since.elapsed() < SHORT {
                std::thread::yield_now();
            }
        }
        let got = wait();
        self.last.store(since.elapsed().as_micros() as u64, Ordering::Relaxed);
        got
    }
}

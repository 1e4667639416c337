//! Short waits without sleep.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long waits of one kind take of late, from which one guesses how long the next one takes: where that is short, whoever
/// waits looks again and again, because a thread that sleeps is woken late: 45 us and more where the core sleeps too.
#[derive(Debug)]
pub(super) struct Hunch {
    /// Waits that take longer are worth a sleep, in microseconds.
    short: u64,
    /// Microseconds of the last wait.
    last: AtomicU64,
}

impl Hunch {
    /// At first, a wait is taken to be shorter than `short`.
    pub(super) fn new(short: Duration) -> Hunch {
        Hunch { short: short.as_micros() as u64, last: AtomicU64::new(0) }
    }

    /// Waits until it `came`, as `wait` does, which may sleep.
    pub(super) fn follow<T>(&self, came: impl Fn() -> bool, wait: impl FnOnce() -> T) -> T {
        let since = self.look(came);
        let got = wait();
        self.learn(since);
        got
    }

    /// Begins a wait: looks for what is to come, if not for long, and lets others run between two looks. When it began.
    pub(super) fn look(&self, came: impl Fn() -> bool) -> Instant {
        let since = Instant::now();
        if self.last.load(Ordering::Relaxed) < self.short {
            while !came() && micros(since) < self.short {
                std::thread::yield_now();
            }
        }
        since
    }

    /// Ends a wait.
    pub(super) fn learn(&self, since: Instant) {
        self.last.store(micros(since), Ordering::Relaxed);
    }
}

fn micros(since: Instant) -> u64 {
    since.elapsed().as_micros() as u64
}

//! The heartbeat of a worker: shows the supervisor that the process still runs.
//!
//! A worker that is stopped (SIGSTOP, a debugger, a frozen cgroup of its own) does not die, so no signal tells the supervisor, and
//! clients that connect would wait for ever. A thread of the worker therefore sends a byte every [`BEAT_INTERVAL`]. The supervisor
//! looks for one in each [`CHECK_INTERVAL`] of its own, and replaces a worker that has been silent in [`MAX_MISSED`] of them in a row:
//! 5 to 8 s after it has stopped.
//!
//! The supervisor counts its own intervals, not the time since the last byte. If it was stopped itself, with the worker (Ctrl-Z in
//! a terminal, a frozen container), the pause is one missed interval, however long it was.

use std::time::{Duration, Instant};

/// Time between two bytes of a worker.
pub(crate) const BEAT_INTERVAL: Duration = Duration::from_secs(1);

/// Time between two checks of the supervisor. Twice that between two bytes, so that a late one is no missed interval.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Missed intervals in a row after which a worker counts as stopped.
const MAX_MISSED: u32 = 3;

/// What the supervisor knows of the heartbeat of a worker.
pub(crate) struct Heartbeat {
    next_check: Instant,
    /// Whether a byte has arrived since the last check.
    has_beaten: bool,
    /// Intervals in a row without a byte.
    missed: u32,
}

impl Heartbeat {
    /// The heartbeat of a worker that is alive at `now`.
    pub(crate) fn start(now: Instant) -> Heartbeat {
        Heartbeat { next_check: now + CHECK_INTERVAL, has_beaten: false, missed: 0 }
    }

    /// A byte has arrived.
    pub(crate) fn beat(&mut self) {
        self.has_beaten = true;
    }

    /// When [`Heartbeat::has_stopped`] is to be called next.
    pub(crate) fn next_check(&self) -> Instant {
        self.next_check
    }

    /// Ends the interval if its time has come. Returns whether the worker counts as stopped.
    pub(crate) fn has_stopped(&mut self, now: Instant) -> bool {
        if now < self.next_check {
            return false;
        }
        self.next_check = now + CHECK_INTERVAL;
        self.missed = if std::mem::take(&mut self.has_beaten) { 0 } else { self.missed + 1 };
        self.missed >= MAX_MISSED
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(100);

    /// Runs a supervisor that looks every [`STEP`] while `runs` says that it runs, with a worker that beats while `beats` does.
    /// Both get the time since the start. Returns when the worker counted as stopped, within a minute.
    fn stopped_after(beats: impl Fn(Duration) -> bool, runs: impl Fn(Duration) -> bool) -> Option<Duration> {
        let start = Instant::now();
        let mut heartbeat = Heartbeat::start(start);
        let mut last_beat = Duration::ZERO;
        (0..600).map(|step| step * STEP).find(|&at| {
            if beats(at) && at - last_beat >= BEAT_INTERVAL {
                last_beat = at;
                heartbeat.beat();
            }
            runs(at) && heartbeat.has_stopped(start + at)
        })
    }

    #[test]
    fn a_worker_counts_as_stopped_after_silence_of_the_supervisors_own_time() {
        let secs = Duration::from_secs;
        let always = |_: Duration| true;
        assert_eq!(stopped_after(always, always), None);
        // From ready on it never beats.
        assert_eq!(stopped_after(|_| false, always), Some(secs(6)));
        for stop in 0..100 {
            let stop = secs(10) + stop * STEP;
            let noticed = stopped_after(|at| at < stop, always).expect("noticed") - stop;
            assert!(secs(5) <= noticed && noticed <= secs(8), "{stop:?}: {noticed:?}");
            // Both are stopped for half a minute, and go on.
            let goes_on = |at| at < stop || at > stop + secs(30);
            assert_eq!(stopped_after(goes_on, goes_on), None, "{stop:?}");
            // The worker alone, for a time that the heartbeat tolerates.
            assert_eq!(stopped_after(|at| at < stop || at > stop + secs(4), always), None, "{stop:?}");
        }
    }
}

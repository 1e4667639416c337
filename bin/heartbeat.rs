//! The heartbeat of a worker, by which its supervisor notices that the process no longer runs.
//!
//! A stopped worker (SIGSTOP, a debugger, a frozen cgroup of its own) does not die: the supervisor gets no signal, and clients that
//! connect would wait for ever. Therefore a thread of the worker sends a byte every [`BEAT_INTERVAL`]. The supervisor checks every
//! [`CHECK_INTERVAL`] whether a byte has arrived, and replaces the worker after [`MAX_MISSED`] intervals without a byte: 5 to 8 s
//! after the worker has stopped.
//!
//! The supervisor counts its own intervals, not the time since the last byte. If the supervisor was stopped together with the worker
//! (Ctrl-Z in a terminal, a frozen container), the pause counts as one missed interval, however long it was.

use std::time::{Duration, Instant};

/// Time between two bytes of a worker.
pub(crate) const BEAT_INTERVAL: Duration = Duration::from_secs(1);

/// Time between two checks of the supervisor. Twice [`BEAT_INTERVAL`], so that one late byte does not miss an interval.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Missed intervals in a row after which a worker counts as stopped.
const MAX_MISSED: u32 = 3;

/// The supervisor's record of the heartbeat of a worker.
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

    /// The time at which to call [`Heartbeat::has_stopped`] next.
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

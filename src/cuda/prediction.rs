//! Predicts when the work of a queue ends, from how long the last work of its kind took, so that a waiting thread sleeps until shortly
//! before and then polls without a pause.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Limit of the kinds whose times are remembered, and of the work that is pending. Beyond it, nothing is predicted.
const MAX_KINDS: usize = 16;
const MAX_PENDING: usize = 64;

/// If the last poll before the end was longer ago, the time of the end is not known.
const ACCURACY: Duration = Duration::from_micros(200);

/// Work between two events. Its kind is the number of kernels: that of a token differs from that of a prompt.
#[derive(Clone, Copy)]
struct PendingWork {
    seq: u64,
    kernels: u64,
    submitted: Instant,
}

/// The pending work of a queue and the times of its last work.
pub(super) struct WorkTimes {
    pending: VecDeque<PendingWork>,
    times: Vec<(u64, Duration)>,
    /// When the last work was found done.
    last_end: Instant,
    /// When the first pending work was last found not done.
    last_poll: Option<Instant>,
}

impl WorkTimes {
    pub(super) fn new(now: Instant) -> WorkTimes {
        WorkTimes { pending: VecDeque::new(), times: Vec::new(), last_end: now, last_poll: None }
    }

    /// Work that ends with event `seq` is submitted.
    pub(super) fn submitted(&mut self, seq: u64, kernels: u64, now: Instant) {
        if self.pending.len() < MAX_PENDING {
            self.pending.push_back(PendingWork { seq, kernels, submitted: now });
        }
    }

    /// The first pending event was polled and is not reached.
    pub(super) fn not_reached(&mut self, now: Instant) {
        self.last_poll = Some(now);
    }

    /// The events up to `seq` are reached.
    pub(super) fn reached(&mut self, seq: u64, now: Instant) {
        let done = self.pending.partition_point(|work| work.seq <= seq);
        // Several at once: their times are not known.
        if done == 1
            && let Some(work) = self.pending.front()
        {
            let took = now.saturating_duration_since(work.submitted.max(self.last_end));
            let is_accurate = self.last_poll.is_some_and(|poll| now.saturating_duration_since(poll) <= ACCURACY);
            self.learn(work.kernels, took, is_accurate);
        }
        self.pending.drain(..done);
        (self.last_end, self.last_poll) = (now, None);
    }

    fn learn(&mut self, kernels: u64, took: Duration, is_accurate: bool) {
        let known = self.times.iter().position(|(kind, _)| *kind == kernels).map(|at| self.times.remove(at).1);
        let time = match known {
            _ if is_accurate => took,
            // It has ended earlier, so the next waiter begins to poll earlier.
            Some(known) => known.min(took) * 7 / 8,
            None => return,
        };
        if self.times.len() >= MAX_KINDS {
            self.times.remove(0);
        }
        self.times.push((kernels, time));
    }

    /// When event `seq` is expected to be reached, if the times of all work before it are known.
    pub(super) fn expected_end(&self, seq: u64) -> Option<Instant> {
        let mut end = self.last_end;
        let before = self.pending.partition_point(|work| work.seq < seq);
        for work in self.pending.iter().take(before + 1) {
            let (_, time) = self.times.iter().find(|(kind, _)| *kind == work.kernels)?;
            end = end.max(work.submitted) + *time;
        }
        (before < self.pending.len()).then_some(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_that_of_the_last_work_of_its_kind() {
        let start = Instant::now();
        let at = |micros: u64| start + Duration::from_micros(micros);
        let mut times = WorkTimes::new(start);
        times.submitted(1, 10, at(0));
        assert_eq!(times.expected_end(1), None, "nothing is known");
        times.not_reached(at(4950));
        times.reached(1, at(5000));
        // A token, and another after it.
        times.submitted(2, 10, at(6000));
        times.submitted(3, 10, at(6100));
        assert_eq!(
            [1, 2, 3, 4].map(|seq| times.expected_end(seq)),
            [Some(at(11_000)), Some(at(11_000)), Some(at(16_000)), None]
        );
        // Both are found done at once: nothing is learned.
        times.reached(3, at(20_000));
        times.submitted(4, 10, at(21_000));
        assert_eq!(times.expected_end(4), Some(at(26_000)));
        // Found done after a sleep that was too long: the next one is shorter.
        times.not_reached(at(22_000));
        times.reached(4, at(25_800));
        times.submitted(5, 10, at(26_000));
        assert_eq!(times.expected_end(5), Some(at(26_000 + 4200)));
        // Another kind is not known.
        times.submitted(6, 11, at(26_100));
        assert_eq!(times.expected_end(6), None);
    }

    #[test]
    fn memory_is_bounded() {
        let start = Instant::now();
        let mut times = WorkTimes::new(start);
        for seq in 1..1000 {
            times.submitted(seq, seq, start);
        }
        assert_eq!(times.pending.len(), MAX_PENDING);
        for seq in 1..1000 {
            times.not_reached(start);
            times.reached(seq, start);
        }
        assert_eq!((times.pending.len(), times.times.len()), (0, MAX_KINDS));
    }
}

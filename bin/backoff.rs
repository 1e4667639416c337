//! Pauses before a worker is replaced (exponential backoff).

use std::time::Duration;

/// A worker that has served for this long was healthy.
const HEALTHY: Duration = Duration::from_secs(10);

/// Pause before the third of the workers that die young; the second one starts at once.
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// Longest pause: clients wait in the sockets' queues meanwhile.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// Counts the workers in a row that died young.
#[derive(Default)]
pub(crate) struct Backoff {
    early_deaths: u32,
}

impl Backoff {
    /// The pause before the next worker, after one has served for `served`. A worker that was never ready has served for zero
    /// and counts as one that died young.
    pub(crate) fn after_death(&mut self, served: Duration) -> Duration {
        if served >= HEALTHY {
            self.early_deaths = 0;
            return Duration::ZERO;
        }
        let pause = match self.early_deaths {
            0 => Duration::ZERO,
            deaths => FIRST_PAUSE.saturating_mul(1_u32.checked_shl(deaths - 1).unwrap_or(u32::MAX)).min(MAX_PAUSE),
        };
        self.early_deaths = self.early_deaths.saturating_add(1);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_limit_and_start_again_after_a_healthy_worker() {
        let (young, healthy) = (HEALTHY - Duration::from_millis(1), HEALTHY);
        let mut backoff = Backoff::default();
        for round in 0..2 {
            for want in [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0] {
                assert_eq!(backoff.after_death(young), Duration::from_secs_f64(want), "round {round}");
            }
            assert_eq!(backoff.after_death(healthy), Duration::ZERO);
        }
        let mut backoff = Backoff { early_deaths: u32::MAX };
        assert_eq!(backoff.after_death(Duration::ZERO), MAX_PAUSE);
    }
}

//! Eviction: ends sessions with unfinished messages when another session has waited for host memory for a while.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::session::SessionAccount;
use super::{HostMemory, HostMemoryState};

/// Part of its longest wait after which a thread ends unfinished messages of others: a message that is just arriving in a short
/// time is not ended for a wait that it would have satisfied.
pub(super) const EVICT_AFTER: u32 = 8;

/// Shortest time between two such evictions of one thread: the sessions need a moment to end.
const MIN_EVICT_INTERVAL: Duration = Duration::from_millis(10);

impl HostMemory {
    /// Ends sessions with unfinished messages, of the largest holders first, for a session that waits: tenants that hold more
    /// than `of_tenant`, and sessions of its own tenant that hold more than `own`, until they will release as much as is
    /// `missing`.
    pub(super) fn evict(
        &self,
        state: &HostMemoryState,
        for_session: &SessionAccount,
        own: u64,
        of_tenant: u64,
        missing: [u64; 2],
    ) {
        for (is_own_tenant, mut missing) in [false, true].into_iter().zip(missing) {
            let of_kind = state.sessions.iter().filter(|session| session.has_tenant_of(for_session) == is_own_tenant);
            // Ended before, but not yet released.
            let (ending, others): (Vec<_>, Vec<_>) = of_kind.partition(|session| session.is_evicted());
            missing = ending.iter().fold(missing, |missing, session| missing.saturating_sub(session.charged()));
            let is_victim = |session: &&Arc<SessionAccount>| {
                let holds_more = if is_own_tenant { session.charged() > own } else { session.of_tenant() > of_tenant };
                holds_more && session.charged() > 0 && session.has_unfinished_message()
            };
            let mut victims: Vec<_> = others.into_iter().filter(is_victim).collect();
            // Ending sessions that do not suffice would help nobody.
            if victims.iter().map(|victim| victim.charged()).sum::<u64>() < missing {
                continue;
            }
            victims.sort_by_key(|session| Reverse((session.of_tenant(), session.charged())));
            for victim in victims {
                if missing == 0 {
                    break;
                }
                missing = missing.saturating_sub(victim.charged());
                victim.evict();
                // It may wait for memory itself.
                self.released.notify_all();
            }
        }
    }
}

/// A wait of one thread for host memory.
pub(super) struct MemoryWait {
    until: Instant,
    evict_at: Instant,
    evict_interval: Duration,
}

/// What a thread that waits does next.
pub(super) enum NextWait {
    /// Wait for a release for so long.
    Release(Duration),
    /// End unfinished messages of others.
    Evict,
    Over,
}

impl MemoryWait {
    pub(super) fn new(server: &HostMemory) -> MemoryWait {
        let now = Instant::now();
        let evict_interval = server.evict_after;
        MemoryWait { until: now + server.max_wait, evict_at: now + evict_interval, evict_interval }
    }

    pub(super) fn next(&mut self) -> NextWait {
        let now = Instant::now();
        if now >= self.until {
            return NextWait::Over;
        }
        if now >= self.evict_at {
            self.evict_at = now + self.evict_interval.max(MIN_EVICT_INTERVAL);
            return NextWait::Evict;
        }
        NextWait::Release(self.until.min(self.evict_at) - now)
    }
}

//! Faults of kernels, by client: the supervisor counts them, because each one ends the worker.
//!
//! A kernel whose arguments a client has chosen may still fault, by a bug of fanout. All clients then lose the device, and a client
//! that repeats the request takes it from them for good. So a client with two faults, each within [`WINDOW`] of the one before, is
//! refused for [`REFUSAL`], and again after each further fault. Clients of one address without keys count as one.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use fanout::rpc::server::RefusedClient;

/// Faults of a client with which it is refused. One may have been chance.
const MAX_FAULTS: u32 = 2;

/// For how long after a client's last fault its faults count. Longer than [`REFUSAL`], so that a client that goes on after it is
/// refused again at its next fault.
const WINDOW: Duration = Duration::from_secs(7200);

/// For how long a client is refused after its last fault.
const REFUSAL: Duration = Duration::from_secs(3600);

/// Limit of the clients that are remembered. At the limit, the one with the oldest fault is forgotten.
const MAX_CLIENTS: usize = 64;

/// The faults of one client.
struct Faults {
    client: String,
    count: u32,
    last: Instant,
}

/// The clients whose kernels have faulted within [`WINDOW`].
#[derive(Default)]
pub(crate) struct FaultCounts {
    /// The oldest first.
    clients: VecDeque<Faults>,
}

impl FaultCounts {
    /// Counts a fault of a client. Returns for how long the client is refused, if it is.
    pub(crate) fn record(&mut self, client: String, now: Instant) -> Option<Duration> {
        self.clients.retain(|faults| now.duration_since(faults.last) < WINDOW);
        let known = self.clients.iter().position(|faults| faults.client == client);
        let before = known.and_then(|at| self.clients.remove(at)).map_or(0, |faults| faults.count);
        if self.clients.len() >= MAX_CLIENTS {
            self.clients.pop_front();
        }
        let count = before.saturating_add(1);
        self.clients.push_back(Faults { client, count, last: now });
        (count >= MAX_FAULTS).then_some(REFUSAL)
    }

    /// The clients that are refused, for the next worker.
    pub(crate) fn refused(&self, now: Instant) -> Vec<RefusedClient> {
        let refused = self.clients.iter().filter(|faults| faults.count >= MAX_FAULTS).map(|faults| RefusedClient {
            identity: faults.client.clone(),
            remaining: REFUSAL.saturating_sub(now.duration_since(faults.last)),
        });
        refused.filter(|client| !client.remaining.is_zero()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_of_two_faults_is_refused_for_a_time() {
        let (mut faults, start) = (FaultCounts::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(faults.record("a".to_owned(), at(0)), None);
        assert_eq!(faults.record("b".to_owned(), at(10)), None);
        assert_eq!(faults.refused(at(10)), []);
        assert_eq!(faults.record("a".to_owned(), at(20)), Some(REFUSAL));
        let refused = |seconds| RefusedClient { identity: "a".to_owned(), remaining: Duration::from_secs(seconds) };
        assert_eq!(faults.refused(at(30)), [refused(3590)]);
        assert_eq!(faults.refused(at(20) + REFUSAL), []);
        assert_eq!(faults.record("a".to_owned(), at(30) + REFUSAL), Some(REFUSAL), "again, after its refusal");
        assert_eq!(faults.record("b".to_owned(), at(10) + WINDOW), None, "its first fault counts no more");
    }

    #[test]
    fn the_table_is_bounded() {
        let (mut faults, start) = (FaultCounts::default(), Instant::now());
        for client in (0..2 * MAX_CLIENTS).flat_map(|client| [client; 2]) {
            faults.record(client.to_string(), start);
        }
        let refused = faults.refused(start);
        assert_eq!(refused.len(), MAX_CLIENTS);
        assert_eq!(refused[0].identity, MAX_CLIENTS.to_string());
    }
}

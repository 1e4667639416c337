//! Clients that are refused for a time, because their kernels have made devices unusable.
//!
//! Such a fault ends the process, so the server does not count them: it names the client ([`ServerHandle::faulting_client`]), and
//! the supervisor of `rpc-server` counts the faults and gives the next process a list.
//!
//! [`ServerHandle::faulting_client`]: super::ServerHandle::faulting_client

use crate::poison::lock;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A client that a server refuses ([`ServerHandle::refuse`](super::ServerHandle::refuse)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedClient {
    /// Which client, as in [`ServerHandle::faulting_client`](super::ServerHandle::faulting_client).
    pub identity: String,
    /// For how long from now on.
    pub remaining: Duration,
}

/// The clients that are refused, and until when.
#[derive(Debug, Default)]
pub(super) struct RefusedClients {
    until: Mutex<HashMap<String, Instant>>,
}

impl RefusedClients {
    /// Refuses these clients from now on, and no others.
    pub(super) fn set(&self, clients: &[RefusedClient]) {
        let now = Instant::now();
        let until = |client: &RefusedClient| Some((client.identity.clone(), now.checked_add(client.remaining)?));
        *lock(&self.until) = clients.iter().filter_map(until).collect();
    }

    /// For how long from `now` on the client with the identity is refused; `None`: it is not. `identity` is called only if there
    /// are refused clients.
    pub(super) fn remaining(&self, identity: impl FnOnce() -> String, now: Instant) -> Option<Duration> {
        let mut until = lock(&self.until);
        until.retain(|_, until| *until > now);
        if until.is_empty() {
            return None;
        }
        Some(until.get(&identity())?.duration_since(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_refused_until_their_time_is_over() {
        let refused = RefusedClients::default();
        let now = Instant::now();
        assert_eq!(refused.remaining(|| unreachable!("no client is refused"), now), None);
        let remaining = Duration::from_secs(60);
        refused.set(&[RefusedClient { identity: "a".to_owned(), remaining }]);
        assert_eq!(refused.remaining(|| "b".to_owned(), now), None);
        assert!(refused.remaining(|| "a".to_owned(), now).is_some_and(|left| left >= remaining));
        let later = Instant::now() + remaining;
        assert_eq!(refused.remaining(|| unreachable!("no client is refused any more"), later), None);
    }
}

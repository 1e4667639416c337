//! The connections for HTTP, which have places of their own: sessions of ggml's protocol can neither use them up nor be kept out by
//! them.

use crate::poison::Unpoisoned;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::rpc::server::tenants::Tenant;
use crate::rpc::transport::{Aborter, PeerAddr};

/// Connections at a time: each has a thread.
const MAX_CONNECTIONS: usize = 64;

/// Connections of one address (IPv6: of one network of 64 bits), except loopback.
const MAX_PER_ADDRESS: usize = 16;

/// Time between two requests of all connections together, once [`BURST`] are used up: a reply with the state costs about a tenth of a
/// millisecond, so that no client of HTTP can take a processor from the sessions. A page and a scraper ask once a second.
const SPACING: Duration = Duration::from_micros(2500);

/// Requests that may begin at once after a pause.
const BURST: u32 = 100;

/// The names under which clients reach the server, beside `localhost` and addresses. A browser that a foreign page has sent here by
/// a name of its own (DNS rebinding) gives that name, and gets nothing.
#[derive(Clone, Debug, Default)]
pub(in crate::rpc::server) struct HostNames(Vec<String>);

impl HostNames {
    pub(in crate::rpc::server) fn new(names: impl IntoIterator<Item = String>) -> HostNames {
        HostNames(names.into_iter().map(|name| name.to_ascii_lowercase()).collect())
    }

    pub(super) fn is_known(&self, host: &str) -> bool {
        let name = match host.strip_prefix('[') {
            Some(rest) => return rest.split_once(']').is_some_and(|(ip, _)| ip.parse::<Ipv6Addr>().is_ok()),
            None => host.split_once(':').map_or(host, |(name, _)| name),
        };
        let is_address = name.parse::<IpAddr>().is_ok();
        is_address || name.eq_ignore_ascii_case("localhost") || self.0.contains(&name.to_ascii_lowercase())
    }
}

/// The places.
pub(in crate::rpc::server) struct HttpPool {
    host_names: HostNames,
    state: Arc<Mutex<PoolState>>,
}

#[derive(Default)]
struct PoolState {
    /// By number, in the order of their beginnings.
    connections: HashMap<u64, HttpConnection>,
    next_key: u64,
    /// When all requests so far are done, if each took [`SPACING`].
    paced_until: Option<Instant>,
}

/// A connection. It is closed for a new one while its request has not arrived, and while its response is not read.
struct HttpConnection {
    address: Option<Tenant>,
    aborter: Aborter,
    is_serving: bool,
}

/// Keeps the place of a connection.
pub(super) struct HttpPermit {
    state: Arc<Mutex<PoolState>>,
    key: u64,
}

impl HttpPool {
    pub(in crate::rpc::server) fn new(host_names: HostNames) -> HttpPool {
        HttpPool { host_names, state: Arc::default() }
    }

    pub(super) fn host_names(&self) -> &HostNames {
        &self.host_names
    }

    /// Closes all connections.
    pub(in crate::rpc::server) fn abort_connections(&self) {
        lock(&self.state).connections.values().for_each(|connection| connection.aborter.abort());
    }

    /// A place for the client at `peer`. If all are taken, the oldest connection that serves no request is closed; `None`: all
    /// serve one. A second client of the same address gives way to no other address.
    pub(super) fn admit(&self, peer: PeerAddr, aborter: Aborter) -> Option<HttpPermit> {
        // Loopback has no limit of its own.
        let address = Tenant::of(peer, false);
        let mut state = lock(&self.state);
        let of_address =
            state.connections.values().filter(|connection| address.is_some() && connection.address == address).count();
        let is_full = state.connections.len() >= MAX_CONNECTIONS;
        if is_full || of_address >= MAX_PER_ADDRESS {
            let may_close = |connection: &HttpConnection| {
                !connection.is_serving && (of_address < MAX_PER_ADDRESS || connection.address == address)
            };
            let waiting = state.connections.iter().filter(|(_, connection)| may_close(connection));
            let key = waiting.map(|(&key, _)| key).min()?;
            if let Some(connection) = state.connections.remove(&key) {
                connection.aborter.abort();
            }
        }
        let key = state.next_key;
        state.next_key += 1;
        state.connections.insert(key, HttpConnection { address, aborter, is_serving: false });
        Some(HttpPermit { state: Arc::clone(&self.state), key })
    }
}

/// A token bucket of [`BURST`] tokens that gets one each [`SPACING`]: how long a request has to wait that arrives now.
fn reserve_turn(paced_until: &mut Option<Instant>, now: Instant) -> Duration {
    let end = paced_until.unwrap_or(now).max(now) + SPACING;
    *paced_until = Some(end);
    (end - now).saturating_sub(BURST * SPACING)
}

impl HttpPermit {
    /// Begins the request, which lasts until the guard is dropped, and returns how long it has to wait for its turn. No other connection
    /// takes the place meanwhile, so at most [`MAX_CONNECTIONS`] requests wait. `None`: another one has taken it already.
    pub(super) fn begin_request(&self) -> Option<(RequestGuard<'_>, Duration)> {
        let (mut state, now) = (lock(&self.state), Instant::now());
        let connection = state.connections.get_mut(&self.key)?;
        connection.is_serving = true;
        let wait = reserve_turn(&mut state.paced_until, now);
        drop(state);
        Some((RequestGuard(self), wait))
    }
}

pub(super) struct RequestGuard<'a>(&'a HttpPermit);

impl Drop for RequestGuard<'_> {
    fn drop(&mut self) {
        if let Some(connection) = lock(&self.0.state).connections.get_mut(&self.0.key) {
            connection.is_serving = false;
        }
    }
}

impl Drop for HttpPermit {
    fn drop(&mut self) {
        lock(&self.state).connections.remove(&self.key);
    }
}

fn lock(state: &Mutex<PoolState>) -> MutexGuard<'_, PoolState> {
    // Ignores poisoning: each change is a single call.
    state.lock().unpoisoned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::transport::memory::{self, LinkConditions};

    fn peer(ip: &str) -> PeerAddr {
        PeerAddr::Ip((ip.parse::<IpAddr>().unwrap(), 40_000).into())
    }

    fn connect(pool: &HttpPool, ip: &str) -> (Option<HttpPermit>, Aborter) {
        let (_client, server) = memory::pair(LinkConditions { seed: 0, cut_after: None });
        let aborter = server.aborter();
        (pool.admit(peer(ip), aborter.clone()), aborter)
    }

    #[test]
    fn the_oldest_connection_without_a_request_is_closed() {
        let pool = HttpPool::new(HostNames::default());
        let all: Vec<_> = (0..MAX_CONNECTIONS).map(|_| connect(&pool, "127.0.0.1")).collect();
        assert!(all.iter().all(|(permit, _)| permit.is_some()));
        let serving = all[0].0.as_ref().unwrap().begin_request().unwrap();
        let (new, _) = connect(&pool, "10.0.0.5");
        assert!(new.is_some());
        let count = || lock(&pool.state).connections.len();
        assert_eq!(count(), MAX_CONNECTIONS);
        let kept = |at: usize| lock(&pool.state).connections.contains_key(&all[at].0.as_ref().unwrap().key);
        assert!(kept(0) && !kept(1) && kept(2), "the first one serves a request");
        let turns = || lock(&pool.state).paced_until;
        let before = turns();
        assert!(all[1].0.as_ref().unwrap().begin_request().is_none(), "its place is taken");
        assert_eq!(turns(), before, "a request without a place delays no others");
        drop(serving);
        drop(new);
        drop(all);
        assert_eq!(count(), 0);
    }

    #[test]
    fn requests_beyond_a_burst_are_spaced() {
        let (now, mut until) = (Instant::now(), None);
        assert!((0..BURST).all(|_| reserve_turn(&mut until, now).is_zero()));
        assert_eq!([(); 3].map(|()| reserve_turn(&mut until, now)), [1, 2, 3].map(|n| n * SPACING));
        // One that waited for the third turn is on time then.
        assert_eq!(reserve_turn(&mut until, now + 3 * SPACING), SPACING);
        let later = now + 2 * BURST * SPACING;
        assert!((0..BURST).all(|_| reserve_turn(&mut until, later).is_zero()));
        assert_eq!(reserve_turn(&mut until, later), SPACING);
    }

    #[test]
    fn an_address_takes_no_places_of_others() {
        let pool = HttpPool::new(HostNames::default());
        let other = connect(&pool, "10.0.0.7");
        let all: Vec<_> = (0..2 * MAX_PER_ADDRESS).map(|_| connect(&pool, "10.0.0.5")).collect();
        assert!(all.iter().all(|(permit, _)| permit.is_some()));
        assert_eq!(lock(&pool.state).connections.len(), MAX_PER_ADDRESS + 1);
        assert!(lock(&pool.state).connections.contains_key(&other.0.as_ref().unwrap().key));
        // While all of them serve requests, there is no place for another one.
        let serving: Vec<_> = all.iter().filter_map(|(permit, _)| permit.as_ref()?.begin_request()).collect();
        assert!(connect(&pool, "10.0.0.5").0.is_none());
        assert!(connect(&pool, "10.0.0.6").0.is_some());
        drop(serving);
    }
}

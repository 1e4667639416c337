//! Version probe: the [`Evidence`] of every client address or key, in a bounded LRU table that forgets after a day.

use crate::poison::Unpoisoned;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::evidence::{Consequence, Evidence};
use super::{ServedVersion, VersionPolicy};
use crate::rpc::transport::{KeyName, PeerAddr};

/// Limit of the remembered clients. The least recently used one is evicted, and starts with the first version again: one without
/// a proven version, else one without an open session, else any.
const MAX_CLIENTS: usize = 4096;

/// How long a client is remembered after the last event that set or confirmed its version.
const LIFETIME: Duration = Duration::from_secs(24 * 3600);

/// A group of clients that have one version: the clients of a key, or else of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ProbedClient {
    Address(IpAddr),
    Key(KeyName),
}

impl ProbedClient {
    /// The clients at an address. An IPv4-mapped IPv6 address counts as its IPv4 address.
    fn at(address: IpAddr) -> ProbedClient {
        ProbedClient::Address(address.to_canonical())
    }

    /// `None` for a client without an IP address.
    pub(super) fn of(peer: PeerAddr) -> Option<ProbedClient> {
        match peer {
            PeerAddr::Key(_, name) => Some(ProbedClient::Key(name)),
            _ => peer.ip().map(ProbedClient::at),
        }
    }
}

/// The versions to answer, by client address or key. All listeners that try several versions share it and its list, because a
/// client may use several of them. All functions take the time as an argument, so that tests need no clock.
#[derive(Debug)]
pub(in crate::rpc::server) struct VersionProbe {
    /// The versions in the order in which they are tried.
    list: Box<[ServedVersion]>,
    state: Mutex<ProbeState>,
}

#[derive(Debug, Default)]
struct ProbeState {
    clients: HashMap<ProbedClient, ClientEntry>,
    /// Number of uses of all entries: the logical clock of [`ClientEntry::last_use`].
    uses: u64,
}

#[derive(Debug)]
struct ClientEntry {
    evidence: Evidence,
    /// Versions whose failure has been reported since a command proved another version.
    reported: Vec<ServedVersion>,
    /// Whether a failed start that changed nothing has been reported since then.
    reported_kept: bool,
    /// Whether it has been reported that two versions share the address.
    reported_two: bool,
    expires: Instant,
    last_use: u64,
    /// Generation: a session of an evicted entry must not end one of its successor.
    generation: u64,
}

/// A hang-up, for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HangUpReport {
    pub(super) consequence: Consequence,
    /// Whether the same has not been reported before.
    pub(super) is_news: bool,
    /// The version that a command had proved before.
    pub(super) proven: Option<ServedVersion>,
    /// Whether each version of the list has failed, and none is proven.
    pub(super) all_failed: bool,
}

/// An open connection that has sent a command, until [`VersionProbe::session_ended`].
#[derive(Debug)]
pub(super) struct ProvenSession {
    client: ProbedClient,
    /// The generation of the entry that counts the session.
    generation: u64,
}

impl VersionProbe {
    /// The probe of a server that tries the versions of `order`, in this order, with clients whose HELLO does not tell.
    pub(in crate::rpc::server) fn of_order(order: &[ServedVersion]) -> VersionProbe {
        let list = VersionPolicy::new(None, order).iter().flat_map(VersionPolicy::tried).collect();
        VersionProbe { list, state: Mutex::default() }
    }

    /// The versions in the order in which they are tried.
    pub(super) fn list(&self) -> &[ServedVersion] {
        &self.list
    }

    /// The version to answer to a client; `None`: the list is empty.
    pub(super) fn answer(&self, client: ProbedClient, now: Instant) -> Option<ServedVersion> {
        let known = self.lock().entry(client, now).map(|entry| entry.evidence.answer());
        known.or_else(|| self.list.first().copied())
    }

    /// A connection of a client that was answered `answered` has ended without a command.
    pub(super) fn hung_up(&self, client: ProbedClient, answered: ServedVersion, now: Instant) -> HangUpReport {
        let mut state = self.lock();
        let first = self.list.first().copied().unwrap_or(answered);
        // An unknown client is answered the first version, so that any other answer is outdated, and takes no memory.
        if state.entry(client, now).is_none() && answered != first {
            return HangUpReport {
                consequence: Consequence::Outdated,
                is_news: false,
                proven: None,
                all_failed: false,
            };
        }
        let entry = state.entry_or_insert(client, first, now);
        let proven = entry.evidence.proven();
        let consequence = entry.evidence.hung_up(answered, &self.list, now);
        let is_news = match consequence {
            Consequence::Outdated | Consequence::Idle | Consequence::SameStart => false,
            // Beside a session, it may be the first idle hang-up after the end of another one, which is not yet noticed.
            Consequence::Kept(_) => !entry.evidence.has_session() && !std::mem::replace(&mut entry.reported_kept, true),
            Consequence::TwoVersions => !std::mem::replace(&mut entry.reported_two, true),
            Consequence::Changed(_) => {
                entry.expires = now + LIFETIME;
                entry.report(answered)
            }
        };
        let all_failed = proven.is_none() && self.list.iter().all(|version| entry.reported.contains(version));
        HangUpReport { consequence, is_news, proven, all_failed }
    }

    /// A client that showed `answered` by its HELLO has closed its connection without a command. Returns whether that is the
    /// first time since a command proved another version. The versions to answer stay as they are.
    pub(super) fn is_first_hang_up(&self, client: ProbedClient, answered: ServedVersion, now: Instant) -> bool {
        let first = self.list.first().copied().unwrap_or(answered);
        self.lock().entry_or_insert(client, first, now).report(answered)
    }

    /// A connection of a client that was answered `answered` has sent its first command. That proves the version, whatever
    /// other connections from the address have done meanwhile.
    pub(super) fn session_began(&self, client: ProbedClient, answered: ServedVersion, now: Instant) -> ProvenSession {
        let mut state = self.lock();
        let entry = state.entry_or_insert(client, answered, now);
        if entry.evidence.session_began(answered) {
            entry.reported.clear();
            entry.reported_kept = false;
        }
        entry.expires = now + LIFETIME;
        ProvenSession { client, generation: entry.generation }
    }

    /// The connection of a session has ended.
    pub(super) fn session_ended(&self, session: ProvenSession, now: Instant) {
        let mut state = self.lock();
        let entry = state.entry(session.client, now);
        if let Some(entry) = entry.filter(|entry| entry.generation == session.generation) {
            entry.evidence.session_ended(now);
            entry.expires = now + LIFETIME;
        }
    }

    fn lock(&self) -> MutexGuard<'_, ProbeState> {
        // Ignores poisoning: the worst that a half-updated entry can cause is one more failed attempt of a client.
        self.state.lock().unpoisoned()
    }
}

impl ClientEntry {
    /// Returns whether the failure of this version is reported for the first time since a command proved another version.
    fn report(&mut self, version: ServedVersion) -> bool {
        let is_news = !self.reported.contains(&version);
        if is_news {
            self.reported.push(version);
        }
        is_news
    }
}

impl ProbeState {
    /// The entry of a client, unless it has expired. It does not expire while a session is open.
    fn entry(&mut self, client: ProbedClient, now: Instant) -> Option<&mut ClientEntry> {
        let is_over = |entry: &ClientEntry| entry.expires <= now && !entry.evidence.has_session();
        if self.clients.get(&client).is_some_and(is_over) {
            self.clients.remove(&client);
        }
        let entry = self.clients.get_mut(&client)?;
        self.uses += 1;
        entry.last_use = self.uses;
        Some(entry)
    }

    /// The entry of a client; a new one if there is none. An IPv4 client has the same entry on an IPv6 listener.
    fn entry_or_insert(&mut self, client: ProbedClient, first: ServedVersion, now: Instant) -> &mut ClientEntry {
        if self.entry(client, now).is_none() && self.clients.len() >= MAX_CLIENTS {
            // A scan of all entries: rare, and short beside the start of the connection's thread.
            let order = |(_, entry): &(&ProbedClient, &ClientEntry)| {
                (entry.evidence.has_session(), entry.evidence.proven().is_some(), entry.last_use)
            };
            let oldest = self.clients.iter().min_by_key(order).map(|(&client, _)| client);
            oldest.and_then(|client| self.clients.remove(&client));
        }
        self.uses += 1;
        let uses = self.uses;
        let entry = self.clients.entry(client).or_insert_with(|| ClientEntry {
            evidence: Evidence::new(first),
            reported: Vec::new(),
            reported_kept: false,
            reported_two: false,
            expires: now + LIFETIME,
            last_use: uses,
            generation: uses,
        });
        entry.last_use = uses;
        entry
    }
}

#[cfg(test)]
mod tests {
    use super::super::evidence::{IDLE_GAP, START_SPACING};
    use super::ServedVersion::{V3, V7_0, V8_0};
    use super::*;

    const LIST: [ServedVersion; 2] = [V8_0, V7_0];
    const DAY: Duration = Duration::from_secs(24 * 3600);
    const SECOND: Duration = Duration::from_secs(1);

    fn address(number: u32) -> ProbedClient {
        ProbedClient::at(IpAddr::from((10 << 24 | number).to_be_bytes()))
    }

    fn changes(probe: &VersionProbe, client: ProbedClient, answered: ServedVersion, now: Instant) -> bool {
        matches!(probe.hung_up(client, answered, now).consequence, Consequence::Changed(_))
    }

    #[test]
    fn addresses_are_independent_and_an_ipv4_client_is_the_same_on_an_ipv6_listener() {
        let (probe, now) = (VersionProbe::of_order(&LIST), Instant::now());
        assert!(changes(&probe, ProbedClient::at("10.0.0.5".parse().unwrap()), V8_0, now));
        for (addr, want) in
            [("10.0.0.5", V7_0), ("::ffff:10.0.0.5", V7_0), ("10.0.0.6", V8_0), ("::1", V8_0), ("fd00::5", V8_0)]
        {
            assert_eq!(probe.answer(ProbedClient::at(addr.parse().unwrap()), now), Some(want), "{addr}");
        }
    }

    #[test]
    fn an_address_is_remembered_for_a_day_after_its_last_change_or_session() {
        let (probe, client, start) = (VersionProbe::of_order(&LIST), address(1), Instant::now());
        assert!(changes(&probe, client, V8_0, start));
        assert_eq!(probe.answer(client, start + DAY - SECOND), Some(V7_0));
        assert_eq!(probe.answer(client, start + DAY), Some(V8_0), "forgotten");
        let now = start + DAY;
        assert!(changes(&probe, client, V8_0, now));
        let session = probe.session_began(client, V7_0, now + DAY - SECOND);
        let later = now + 5 * DAY;
        assert_eq!(probe.answer(client, later), Some(V7_0), "its session is open");
        probe.session_ended(session, later);
        assert_eq!(probe.answer(client, later + DAY - SECOND), Some(V7_0));
        assert_eq!(probe.answer(client, later + DAY), Some(V8_0));
        assert_eq!(probe.hung_up(client, V7_0, later + DAY).consequence, Consequence::Outdated);
        assert!(probe.lock().clients.is_empty(), "an outdated answer takes no memory");
    }

    /// Which events are news, so that they are logged at the default level.
    #[test]
    fn news_of_an_address() {
        let (probe, client, start) = (VersionProbe::of_order(&LIST), address(1), Instant::now());
        let mut now = start;
        let mut end = |answered, wait| {
            now += wait;
            let got = probe.hung_up(client, answered, now);
            (got.consequence, got.is_news, got.all_failed)
        };
        let none = Duration::ZERO;
        assert_eq!(end(V8_0, none), (Consequence::Changed(V7_0), true, false));
        assert_eq!(end(V7_0, none), (Consequence::Changed(V8_0), true, true));
        assert_eq!(end(V8_0, none), (Consequence::Changed(V7_0), false, true));
        let session = probe.session_began(client, V7_0, start);
        // A working client: no news.
        assert_eq!(end(V7_0, none), (Consequence::Kept(1), false, false));
        probe.session_ended(session, start);
        assert_eq!(end(V7_0, none), (Consequence::Idle, false, false));
        assert_eq!(end(V8_0, none), (Consequence::Outdated, false, false));
        assert_eq!(end(V7_0, IDLE_GAP), (Consequence::Kept(1), true, false));
        assert_eq!(end(V7_0, none), (Consequence::SameStart, false, false));
        assert_eq!(end(V7_0, START_SPACING), (Consequence::Kept(2), false, false));
        assert_eq!(end(V7_0, START_SPACING), (Consequence::Changed(V8_0), true, false));
        assert_eq!(end(V8_0, START_SPACING), (Consequence::Changed(V7_0), true, false));
        assert_eq!(end(V7_0, START_SPACING), (Consequence::TwoVersions, true, false));
        assert!(probe.is_first_hang_up(client, V3, start) && !probe.is_first_hang_up(client, V3, start));
        // A health check for a day, and a session now and then: the same lines do not come again.
        for number in 0..10_000 {
            let answered = probe.answer(client, now).unwrap();
            now += Duration::from_secs(9);
            assert!(!probe.hung_up(client, answered, now).is_news, "{number}");
            if number % 7 == 0 {
                probe.session_ended(probe.session_began(client, V7_0, now), now);
            }
        }
    }

    #[test]
    fn the_least_recently_used_client_without_a_proven_version_is_evicted() {
        let (probe, now) = (VersionProbe::of_order(&LIST), Instant::now());
        let remembered = |number| probe.lock().clients.contains_key(&address(number));
        for number in 0..MAX_CLIENTS as u32 {
            let session = probe.session_began(address(number), V7_0, now);
            if number != 1 {
                probe.session_ended(session, now);
            }
        }
        // Unknown addresses take no memory until they matter.
        assert_eq!(probe.answer(address(1 << 20), now), Some(V8_0));
        assert!(remembered(0) && !remembered(1 << 20));
        assert_eq!(probe.answer(address(0), now), Some(V7_0));
        for number in 0..3 {
            assert!(changes(&probe, address(1 << 20 | number), V8_0, now));
        }
        assert!(remembered(0), "it was used after the others");
        assert!(remembered(1), "its session is open");
        assert!(!remembered(2) && remembered(3), "then those whose version is unproven");
        assert_eq!(probe.lock().clients.len(), MAX_CLIENTS);
    }

    /// A session of an evicted entry must not end one that a later entry counts.
    #[test]
    fn a_session_of_an_evicted_entry_has_no_effect() {
        let (probe, now) = (VersionProbe::of_order(&LIST), Instant::now());
        let sessions: Vec<_> =
            (0..MAX_CLIENTS as u32).map(|number| probe.session_began(address(number), V8_0, now)).collect();
        assert!(changes(&probe, address(1 << 20), V8_0, now), "all have sessions: the oldest entry is evicted");
        let again = probe.session_began(address(0), V8_0, now);
        sessions.into_iter().for_each(|session| probe.session_ended(session, now));
        assert!(probe.lock().clients[&address(0)].evidence.has_session());
        probe.session_ended(again, now);
        assert!(!probe.lock().clients[&address(0)].evidence.has_session());
    }
}

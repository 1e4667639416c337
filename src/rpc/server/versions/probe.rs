//! Version probe: finds out, per client address or key, which version of the protocol the clients there have.
//!
//! A client of another version than the answered one closes the connection right after the reply. The next connection from its
//! address then gets the next version of the list. A command shows that the version works, and pins it to the address.
//!
//! A pinned version changes only after [`ENDS_TO_UNPIN`] ends without a command in a row: a port scanner or a health check on a
//! machine with working clients must not make the next of these clients fail. After an update of llama.cpp, two attempts fail
//! before the third one works.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::ServedVersion;
use crate::rpc::transport::{KeyName, PeerAddr};

/// Limit of the remembered addresses. The least recently used one is evicted, and starts with the first version again.
const MAX_ADDRESSES: usize = 4096;

/// How long an address is remembered after the last event that set or confirmed its version.
const LIFETIME: Duration = Duration::from_secs(24 * 3600);

/// Ends without a command in a row that change a pinned version.
const ENDS_TO_UNPIN: u32 = 2;

/// Whose clients have one version: those of a key, or else of an address.
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

/// The versions to answer, by client address or key. Shared by all listeners, because a client may use several of them. All functions
/// take the time as an argument, so that tests need no clock.
#[derive(Debug, Default)]
pub(in crate::rpc::server) struct VersionProbe(Mutex<ProbeState>);

#[derive(Debug, Default)]
struct ProbeState {
    addresses: HashMap<ProbedClient, AddressEntry>,
    /// Number of uses of all entries: the logical clock of [`AddressEntry::last_use`].
    uses: u64,
}

/// What is known about the clients of an address.
#[derive(Debug)]
struct AddressEntry {
    /// The version that the next connection gets.
    current: ServedVersion,
    /// Whether a client has sent a command after the reply with `current`.
    pinned: bool,
    /// Ends without a command since the last command; counted while `pinned`.
    ends: u32,
    /// Versions whose failure has been reported since the last command.
    reported: Vec<ServedVersion>,
    /// Whether an end that did not change the pinned version has been reported.
    reported_kept: bool,
    expires: Instant,
    last_use: u64,
}

/// The consequence of a connection that ended after the reply without a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HangUp {
    /// The version that comes after the answered one in the list.
    pub(super) other: ServedVersion,
    /// Whether the next connection from the address gets `other`.
    pub(super) changed: bool,
    /// Whether the same has not been reported before.
    pub(super) is_news: bool,
    /// Whether each version of the list has failed since the last command.
    pub(super) all_failed: bool,
}

impl VersionProbe {
    /// The version to answer to a client at `addr`. `list` is the order in which versions are tried; it must not be empty.
    pub(super) fn answer(&self, addr: ProbedClient, list: &[ServedVersion], now: Instant) -> ServedVersion {
        self.lock().entry(addr, now).map(|entry| entry.current).filter(|v| list.contains(v)).unwrap_or(list[0])
    }

    /// A client that was answered `answered` has closed its connection without a command. `None` if the address has another
    /// version by now: several connections of one process end at the same time, and count once.
    pub(super) fn ended_without_command(
        &self,
        addr: ProbedClient,
        list: &[ServedVersion],
        answered: ServedVersion,
        now: Instant,
    ) -> Option<HangUp> {
        let mut state = self.lock();
        let at = list.iter().position(|&version| version == answered)?;
        let other = list[(at + 1) % list.len()];
        let current = state.entry(addr, now).map(|entry| entry.current).filter(|v| list.contains(v));
        if current.unwrap_or(list[0]) != answered {
            return None;
        }
        let entry = state.entry_or_insert(addr, answered, now);
        if entry.pinned && entry.ends + 1 < ENDS_TO_UNPIN {
            entry.ends += 1;
            let is_news = !std::mem::replace(&mut entry.reported_kept, true);
            return Some(HangUp { other, changed: false, is_news, all_failed: false });
        }
        let is_news = !entry.reported.contains(&answered);
        if is_news {
            entry.reported.push(answered);
        }
        (entry.current, entry.pinned, entry.ends) = (other, false, 0);
        entry.expires = now + LIFETIME;
        let all_failed = list.iter().all(|version| entry.reported.contains(version));
        Some(HangUp { other, changed: true, is_news, all_failed })
    }

    /// A client that showed `answered` by its HELLO has closed its connection without a command. Returns whether that is the
    /// first time since the last command from the address. The versions to answer stay as they are.
    pub(super) fn is_first_hang_up(&self, addr: ProbedClient, answered: ServedVersion, now: Instant) -> bool {
        let mut state = self.lock();
        // A new entry has a version outside of every list, so that the first one of the list is answered.
        let entry = state.entry_or_insert(addr, answered, now);
        let is_news = !entry.reported.contains(&answered);
        if is_news {
            entry.reported.push(answered);
        }
        is_news
    }

    /// A client that was answered `answered` has sent a command. That pins the version, whatever other connections from the
    /// address have done meanwhile.
    pub(super) fn pinned_by_command(&self, addr: ProbedClient, answered: ServedVersion, now: Instant) {
        let mut state = self.lock();
        let entry = state.entry_or_insert(addr, answered, now);
        if !entry.pinned || entry.current != answered {
            (entry.current, entry.pinned, entry.reported_kept) = (answered, true, false);
        }
        entry.ends = 0;
        entry.reported.clear();
        entry.expires = now + LIFETIME;
    }

    fn lock(&self) -> MutexGuard<'_, ProbeState> {
        // Ignores poisoning: the worst that a half-updated entry can cause is one more failed attempt of a client.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ProbeState {
    /// The entry of an address, unless it has expired.
    fn entry(&mut self, addr: ProbedClient, now: Instant) -> Option<&mut AddressEntry> {
        if self.addresses.get(&addr).is_some_and(|entry| entry.expires <= now) {
            self.addresses.remove(&addr);
        }
        let entry = self.addresses.get_mut(&addr)?;
        self.uses += 1;
        entry.last_use = self.uses;
        Some(entry)
    }

    /// The entry of an address; a new one if there is none. An IPv4 client has the same entry on an IPv6 listener.
    fn entry_or_insert(&mut self, addr: ProbedClient, current: ServedVersion, now: Instant) -> &mut AddressEntry {
        if self.entry(addr, now).is_none() && self.addresses.len() >= MAX_ADDRESSES {
            // A scan of all entries: rare, and short beside the start of the connection's thread.
            let oldest = self.addresses.iter().min_by_key(|(_, entry)| entry.last_use).map(|(&addr, _)| addr);
            oldest.and_then(|addr| self.addresses.remove(&addr));
        }
        self.uses += 1;
        let entry = self.addresses.entry(addr).or_insert(AddressEntry {
            current,
            pinned: false,
            ends: 0,
            reported: Vec::new(),
            reported_kept: false,
            expires: now + LIFETIME,
            last_use: 0,
        });
        entry.last_use = self.uses;
        entry
    }
}

#[cfg(test)]
mod tests {
    use super::ServedVersion::{V7_0, V8_0};
    use super::*;

    const LIST: [ServedVersion; 2] = [V8_0, V7_0];

    fn address(number: u32) -> ProbedClient {
        ProbedClient::at(IpAddr::from((10 << 24 | number).to_be_bytes()))
    }

    /// What happens at an address, with the expected result.
    #[derive(Clone, Copy, Debug)]
    enum Event {
        /// A connection is answered this version.
        Answered(ServedVersion),
        /// A connection that was answered this version ends without a command: the next one gets another version.
        Changes(ServedVersion),
        /// The same, when this change has been reported before.
        ChangesAgain(ServedVersion),
        /// A connection ends without a command, and the version stays, because it is pinned.
        Stays(ServedVersion),
        StaysAgain(ServedVersion),
        /// A connection ends without a command that was answered a version that is no longer current.
        Ignored(ServedVersion),
        /// A connection that was answered this version sends a command.
        Command(ServedVersion),
        /// So many seconds pass.
        Pass(u64),
    }
    use Event::*;

    const DAY: u64 = 24 * 3600;

    fn run(name: &str, list: &[ServedVersion], events: &[Event]) {
        let (probe, addr, mut now) = (VersionProbe::default(), address(1), Instant::now());
        for (number, event) in events.iter().enumerate() {
            let at = format!("{name}, event {number}: {event:?}");
            let ends = |answered, want: Option<(bool, bool)>| {
                let got = probe.ended_without_command(addr, list, answered, now);
                assert_eq!(got.map(|hang_up| (hang_up.changed, hang_up.is_news)), want, "{at}");
                if let Some(hang_up) = got {
                    let next = if hang_up.changed { hang_up.other } else { answered };
                    assert!(hang_up.other != answered && probe.answer(addr, list, now) == next, "{at}: {hang_up:?}");
                }
            };
            match *event {
                Answered(version) => assert_eq!(probe.answer(addr, list, now), version, "{at}"),
                Changes(answered) => ends(answered, Some((true, true))),
                ChangesAgain(answered) => ends(answered, Some((true, false))),
                Stays(answered) => ends(answered, Some((false, true))),
                StaysAgain(answered) => ends(answered, Some((false, false))),
                Ignored(answered) => ends(answered, None),
                Command(answered) => probe.pinned_by_command(addr, answered, now),
                Pass(seconds) => now += Duration::from_secs(seconds),
            }
        }
    }

    #[test]
    fn sequences_of_events_lead_to_the_version_that_works() {
        let cases: [(&str, &[Event]); 13] = [
            ("the first version works", &[Answered(V8_0), Command(V8_0), Answered(V8_0)]),
            (
                "the second version works",
                &[Answered(V8_0), Changes(V8_0), Answered(V7_0), Command(V7_0), Answered(V7_0)],
            ),
            (
                "no version works",
                &[Changes(V8_0), Changes(V7_0), ChangesAgain(V8_0), ChangesAgain(V7_0), Answered(V8_0)],
            ),
            ("connections of one process", &[Changes(V8_0), Ignored(V8_0), Ignored(V8_0), Answered(V7_0)]),
            ("a late command of the earlier version", &[Changes(V8_0), Command(V8_0), Answered(V8_0), Ignored(V7_0)]),
            ("one health check", &[Command(V8_0), Stays(V8_0), Answered(V8_0)]),
            (
                "health checks between commands",
                &[Command(V8_0), Stays(V8_0), Command(V8_0), StaysAgain(V8_0), Command(V8_0), Answered(V8_0)],
            ),
            (
                "an updated client",
                &[
                    Changes(V8_0),
                    Command(V7_0),
                    Stays(V7_0),
                    Changes(V7_0),
                    Answered(V8_0),
                    Command(V8_0),
                    Stays(V8_0),
                    Answered(V8_0),
                ],
            ),
            (
                "after an unpin each end counts",
                &[Command(V8_0), Stays(V8_0), Changes(V8_0), Changes(V7_0), ChangesAgain(V8_0), Answered(V7_0)],
            ),
            (
                "a change after a command is news",
                &[Changes(V8_0), Command(V7_0), Stays(V7_0), Changes(V7_0), Changes(V8_0)],
            ),
            ("the memory of a change", &[Changes(V8_0), Pass(DAY - 1), Answered(V7_0), Pass(1), Answered(V8_0)]),
            (
                "a command refreshes the memory",
                &[Changes(V8_0), Pass(DAY - 1), Command(V7_0), Pass(DAY - 1), Answered(V7_0), Pass(1), Answered(V8_0)],
            ),
            (
                "the end of a connection that is older than the memory",
                &[Changes(V8_0), Command(V7_0), Pass(DAY), Ignored(V7_0), Changes(V8_0), Answered(V7_0)],
            ),
        ];
        for (name, events) in cases {
            run(name, &LIST, events);
        }
        run(
            "the other order",
            &[V7_0, V8_0],
            &[Answered(V7_0), Changes(V7_0), Answered(V8_0), Changes(V8_0), Answered(V7_0)],
        );
    }

    #[test]
    fn addresses_are_independent_and_an_ipv4_client_is_the_same_on_an_ipv6_listener() {
        let (probe, now) = (VersionProbe::default(), Instant::now());
        let client = ProbedClient::at("10.0.0.5".parse().unwrap());
        assert!(probe.ended_without_command(client, &LIST, V8_0, now).is_some_and(|hang_up| hang_up.changed));
        for (addr, want) in
            [("10.0.0.5", V7_0), ("::ffff:10.0.0.5", V7_0), ("10.0.0.6", V8_0), ("::1", V8_0), ("fd00::5", V8_0)]
        {
            assert_eq!(probe.answer(ProbedClient::at(addr.parse().unwrap()), &LIST, now), want, "{addr}");
        }
    }

    /// Listeners with other lists share the entries. A version that a list lacks does not affect its listener.
    #[test]
    fn a_version_outside_of_the_list_is_never_answered() {
        let (probe, addr, now) = (VersionProbe::default(), address(1), Instant::now());
        probe.pinned_by_command(addr, V8_0, now);
        assert_eq!(probe.answer(addr, &[V7_0], now), V7_0);
        assert_eq!(probe.ended_without_command(addr, &[V7_0], V8_0, now), None);
        assert_eq!(probe.answer(addr, &LIST, now), V8_0);
    }

    #[test]
    fn the_least_recently_used_address_is_evicted() {
        let (probe, now) = (VersionProbe::default(), Instant::now());
        let remembered = |number| {
            let state = probe.lock();
            state.addresses.contains_key(&address(number))
        };
        for number in 0..MAX_ADDRESSES as u32 {
            probe.pinned_by_command(address(number), V7_0, now);
        }
        // Unknown addresses take no memory until they matter.
        assert_eq!(probe.answer(address(1 << 20), &LIST, now), V8_0);
        assert!(remembered(0) && !remembered(1 << 20));
        assert_eq!(probe.answer(address(0), &LIST, now), V7_0);
        for number in 0..3 {
            assert!(probe.ended_without_command(address(1 << 20 | number), &LIST, V8_0, now).is_some());
        }
        assert!(remembered(0), "it was used after the others");
        assert!(!remembered(1) && !remembered(2) && !remembered(3) && remembered(4));
        assert_eq!(probe.lock().addresses.len(), MAX_ADDRESSES);
    }
}

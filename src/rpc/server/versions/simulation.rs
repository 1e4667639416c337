//! Seeded simulation of the clients of one address. Clients of llama.cpp 7.0 and 8.0.1, with one to 16 devices, start, abort, are
//! killed and start again, one after the other or together. Health checks run in between. Port scanners are not simulated: they
//! send no HELLO and never reach the probe (`tests/rpc` has them).
//!
//! A client opens the connections that llama.cpp opens, one after the other:
//! - short connections for its queries, with a command each;
//! - with `-fit` (on by default) connections of contexts that only measure memory, after which four per device hang up;
//! - the connection of the run, which stays open.
//!
//! If HELLO is answered with another version, the client aborts; the server sees that as a hang-up too.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use fastrand::Rng;

use super::ServedVersion::{self, V7_0, V8_0};
use super::VersionProbe;
use super::evidence::{Consequence, FAILED_STARTS, IDLE_GAP, MAX_IDLE, START_SPACING};
use super::probe::{ProbedClient, ProvenSession};
use crate::rpc::transport::PeerAddr;

/// Simulated histories per test.
const HISTORIES: u64 = 20_000;

/// Starts of processes in a history.
const STARTS: usize = 5;

/// Maximum number of lines about hang-ups that an address may log while its proven version stays: a failed start that changed nothing,
/// two versions, and each version of the list.
const LINES: usize = 4;

/// A step of a client: it waits so many milliseconds, then acts.
type ClientStep = (u64, Action);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    /// Opens a connection and hangs up.
    HangUp,
    /// Opens a connection, sends a command, and closes it.
    Query,
    /// Opens the connection that stays open.
    Open,
    /// Closes the connection that stays open.
    Close,
}

/// The connections of one start of llama.cpp.
fn start_of_llama(rng: &mut Rng) -> Vec<ClientStep> {
    let devices = rng.usize(1..=4);
    start_with_devices(rng, devices)
}

fn start_with_devices(rng: &mut Rng, devices: usize) -> Vec<ClientStep> {
    let fit = rng.bool();
    // TCP, TLS and HELLO take a round trip each.
    let connect = 3 * rng.u64(0..600);
    let mut steps = vec![(0, Action::Query)];
    for _ in 0..if fit { rng.usize(1..=3) } else { 0 } {
        // Loading the vocabulary of a large model takes seconds.
        steps.push((connect + rng.u64(0..5000), Action::Query));
        steps.extend([(connect + rng.u64(0..3000), Action::Open), (rng.u64(0..500), Action::Close)]);
        steps.extend(std::iter::repeat_n((connect, Action::HangUp), 4 * devices));
    }
    steps.push((connect, Action::Query));
    steps.extend([(connect + rng.u64(0..3000), Action::Open), (rng.u64(0..20_000), Action::Close)]);
    if rng.u8(0..4) == 0 {
        steps.truncate(rng.usize(1..=steps.len())); // The process is killed.
    }
    steps
}

/// One process, or a health check.
struct Process {
    /// The only version that the client accepts; `None`: a health check, which accepts each version.
    version: Option<ServedVersion>,
    steps: std::vec::IntoIter<ClientStep>,
    session: Option<ProvenSession>,
}

struct World<'a> {
    probe: &'a VersionProbe,
    client: ProbedClient,
    processes: Vec<Process>,
    /// The time of the next step of each process, with the number of the process.
    due: BinaryHeap<Reverse<(Instant, usize)>>,
    /// The version of the last command, until another one is answered.
    proven: Option<ServedVersion>,
    /// Hang-ups since the last command.
    hang_ups: u32,
    /// Numbers of the processes that have aborted, in order.
    aborts: Vec<usize>,
    /// Reports that two versions share the address.
    two_versions: usize,
    /// Lines of the log since a command proved another version.
    lines: usize,
}

impl<'a> World<'a> {
    fn new(probe: &'a VersionProbe) -> World<'a> {
        World {
            probe,
            client: ProbedClient::of(PeerAddr::Ip(([10, 0, 0, 1], 1).into())).unwrap(),
            processes: Vec::new(),
            due: BinaryHeap::new(),
            proven: None,
            hang_ups: 0,
            aborts: Vec::new(),
            two_versions: 0,
            lines: 0,
        }
    }

    fn add(&mut self, version: Option<ServedVersion>, at: Instant, steps: Vec<ClientStep>) -> usize {
        let number = self.processes.len();
        let due = steps.first().map(|(wait, _)| at + Duration::from_millis(*wait));
        self.processes.push(Process { version, steps: steps.into_iter(), session: None });
        self.due.extend(due.map(|due| Reverse((due, number))));
        number
    }

    /// Runs all steps that are due until `until`, or all. Returns the time of the last one.
    fn run(&mut self, until: Option<Instant>, mut now: Instant) -> Instant {
        while let Some(&Reverse((at, number))) = self.due.peek()
            && until.is_none_or(|until| at <= until)
        {
            self.due.pop();
            now = at;
            let Some((_, action)) = self.processes[number].steps.next() else { continue };
            self.act(number, action, now);
            match self.processes[number].steps.as_slice().first() {
                Some((wait, _)) => self.due.push(Reverse((now + Duration::from_millis(*wait), number))),
                None => self.close(number, now),
            }
        }
        now
    }

    fn close(&mut self, number: usize, now: Instant) {
        if let Some(session) = self.processes[number].session.take() {
            self.probe.session_ended(session, now);
        }
    }

    fn has_session(&self) -> bool {
        self.processes.iter().any(|process| process.session.is_some())
    }

    fn act(&mut self, number: usize, action: Action, now: Instant) {
        if action == Action::Close {
            return self.close(number, now);
        }
        let answered = self.probe.answer(self.client, now).unwrap();
        if self.proven.is_some_and(|proven| proven != answered) {
            assert!(!self.has_session(), "a version changes while a session uses it");
            assert!(self.hang_ups >= FAILED_STARTS, "{} hang-ups before a change", self.hang_ups);
            self.proven = None;
        }
        let wrong = self.processes[number].version.is_some_and(|version| version != answered);
        if !wrong && action != Action::HangUp {
            let session = self.probe.session_began(self.client, answered, now);
            self.processes[number].session = Some(session);
            if self.proven != Some(answered) {
                self.lines = 0;
            }
            (self.proven, self.hang_ups) = (Some(answered), 0);
            if action == Action::Query {
                self.close(number, now);
            }
            return;
        }
        if wrong {
            self.aborts.push(number);
            self.processes[number].steps = Vec::new().into_iter();
        }
        self.hang_ups += 1;
        let report = self.probe.hung_up(self.client, answered, now);
        self.lines += usize::from(report.is_news);
        assert!(self.lines <= LINES, "{} lines", self.lines);
        self.two_versions += usize::from(report.is_news && report.consequence == Consequence::TwoVersions);
    }

    /// Aborts of processes from this number on.
    fn aborts_since(&self, number: usize) -> usize {
        self.aborts.iter().filter(|of| **of >= number).count()
    }

    /// A client that works, before the history.
    fn prove(&mut self, version: ServedVersion, now: Instant) -> Instant {
        let proof = self.probe.session_began(self.client, version, now);
        self.probe.session_ended(proof, now);
        (self.proven, self.hang_ups) = (Some(version), 0);
        now + IDLE_GAP
    }
}

/// Runs `history` with the seeds of all histories.
fn histories(name: &str, history: impl Fn(&mut World<'_>, &mut Rng, Instant)) {
    let start = Instant::now();
    for seed in 0..HISTORIES {
        let probe = VersionProbe::of_order(&ServedVersion::DEFAULT_ORDER);
        let (mut world, mut rng) = (World::new(&probe), Rng::with_seed(seed));
        // A failed assertion names the seed.
        let run = std::panic::AssertUnwindSafe(|| history(&mut world, &mut rng, start));
        assert!(std::panic::catch_unwind(run).is_ok(), "{name}, seed {seed}");
    }
}

fn either(rng: &mut Rng) -> (ServedVersion, ServedVersion) {
    if rng.bool() { (V8_0, V7_0) } else { (V7_0, V8_0) }
}

/// Time between two starts of different versions.
fn pause(rng: &mut Rng) -> Duration {
    IDLE_GAP + Duration::from_millis(rng.u64(0..60_000))
}

/// Clients of one version, several at a time. A client of 8.0.1 never aborts; of the clients of 7.0 only the two that start before the
/// first abort may.
#[test]
fn clients_of_one_version() {
    histories("one version", |world, rng, start| {
        let (version, mut now) = (either(rng).0, start);
        for _ in 0..STARTS {
            world.add(Some(version), now, start_of_llama(rng));
            world.add(Some(version), now + Duration::from_millis(rng.u64(0..5000)), start_of_llama(rng));
            now = if rng.bool() { world.run(None, now) } else { world.run(Some(now), now) + pause(rng) };
        }
        world.run(None, now);
        let bound = if version == V8_0 { 0 } else { 2 };
        assert!(world.aborts.len() <= bound, "{:?}", world.aborts);
        assert_eq!(world.two_versions, 0);
    });
}

/// The same, one at a time: one abort of 7.0 at most.
#[test]
fn one_client_at_a_time() {
    histories("one client", |world, rng, mut now| {
        let version = either(rng).0;
        for _ in 0..STARTS {
            let devices = rng.usize(1..=16);
            world.add(Some(version), now, start_with_devices(rng, devices));
            now = world.run(None, now) + Duration::from_millis(rng.u64(0..10_000));
        }
        assert!(world.aborts.len() <= usize::from(version == V7_0), "{:?}", world.aborts);
    });
}

/// Clients of both versions in turn, each started again until it works, alone or two together: [`FAILED_STARTS`] starts abort at
/// most after each change of the version.
#[test]
fn both_versions_in_turn() {
    histories("in turn", |world, rng, mut now| {
        for _ in 0..STARTS {
            let version = either(rng).0;
            let together = rng.u64(0..2 * START_SPACING.as_millis() as u64);
            for attempt in 0.. {
                let number = world.add(Some(version), now, start_of_llama(rng));
                if together < START_SPACING.as_millis() as u64 {
                    world.add(Some(version), now + Duration::from_millis(together), start_of_llama(rng));
                }
                now = world.run(None, now) + pause(rng);
                if world.aborts_since(number) == 0 {
                    break;
                }
                assert!(attempt < FAILED_STARTS, "{version}: {attempt} aborts before this one");
            }
        }
    });
}

/// A process that is started again right after its abort, by a supervisor: it works after [`FAILED_STARTS`] seconds, or after
/// [`MAX_IDLE`] starts more, if it follows a session of the other version directly.
#[test]
fn loops_of_starts() {
    histories("loops", |world, rng, start| {
        let (proven, version) = either(rng);
        let after_session = world.prove(proven, start);
        let delay = rng.u64(50..2900);
        let mut now = if rng.bool() { start + Duration::from_millis(delay) } else { after_session };
        let idle = if now < after_session { MAX_IDLE } else { 0 };
        let per_start = (START_SPACING.as_millis() as u64).div_ceil(delay) as u32;
        let bound = idle + 1 + (FAILED_STARTS - 1) * per_start;
        while world.has_session() || world.proven == Some(proven) || world.aborts.is_empty() {
            world.add(Some(version), now, vec![(0, Action::Query)]);
            now = world.run(None, now) + Duration::from_millis(delay);
            assert!(world.aborts.len() <= bound as usize, "{} aborts, {bound} allowed", world.aborts.len());
        }
    });
}

/// Runs of both versions in turn, none of which is started again, as by two timers: an abort each time, and the log says once
/// that two versions share the address.
#[test]
fn timers_of_both_versions() {
    histories("timers", |world, rng, mut now| {
        let (proven, other) = either(rng);
        now = world.prove(proven, now);
        for _ in 0..2 * STARTS {
            world.add(Some(proven), now, vec![(0, Action::Query)]);
            now = world.run(None, now) + pause(rng);
            world.add(Some(other), now, vec![(0, Action::Query)]);
            now = world.run(None, now) + pause(rng);
        }
        assert_eq!((world.aborts.len(), world.two_versions), (2 * STARTS, 1));
    });
}

/// A client of one version works while clients of the other one start. It keeps working, its own starts do not abort, and the log
/// says once that two versions share the address.
#[test]
fn both_versions_at_once() {
    histories("at once", |world, rng, mut now| {
        let (version, other) = either(rng);
        now = world.prove(version, now);
        world.add(Some(version), now, vec![(0, Action::Open), (1 << 30, Action::Close)]);
        now = world.run(Some(now), now) + pause(rng);
        let first = world.processes.len();
        for _ in 0..STARTS {
            world.add(Some(other), now, start_of_llama(rng));
            now += pause(rng);
            world.run(Some(now), now);
        }
        assert_eq!((world.aborts_since(first), world.two_versions), (STARTS, 1), "no start of the other version works");
        let own = world.add(Some(version), now, start_of_llama(rng));
        world.run(Some(now + Duration::from_secs(60)), now);
        assert_eq!(world.aborts_since(own), 0);
    });
}

/// A health check sends HELLO alone. A version that a command has proved changes only after [`FAILED_STARTS`] checks in a row
/// ([`World::act`]). That costs a client one abort at most, after which it works. No check runs between an abort and the next
/// start.
#[test]
fn health_checks_beside_clients() {
    let aborts = Cell::new(0);
    histories("health checks", |world, rng, mut now| {
        let version = either(rng).0;
        now = world.prove(version, now);
        for _ in 0..STARTS {
            let checks = vec![(rng.u64(0..10_000), Action::HangUp); rng.usize(0..2 * FAILED_STARTS as usize)];
            world.add(None, now, checks);
            now = world.run(None, now) + pause(rng);
            for attempt in 0..2 {
                let number = world.add(Some(version), now, start_of_llama(rng));
                now = world.run(None, now) + pause(rng);
                let aborted = world.aborts_since(number);
                aborts.set(aborts.get() + aborted);
                if aborted == 0 {
                    break;
                }
                assert_eq!(attempt, 0);
            }
        }
    });
    assert!(aborts.get() > 0, "no history has reached a trial");
}

/// Any number of health checks beside an open session changes nothing, and neither do fewer than [`FAILED_STARTS`] after it.
#[test]
fn health_checks_beside_a_session() {
    histories("health checks and a session", |world, rng, mut now| {
        let version = either(rng).0;
        now = world.prove(version, now);
        world.add(Some(version), now, vec![(0, Action::Open), (200_000, Action::Close)]);
        world.add(None, now, vec![(rng.u64(0..4000), Action::HangUp); rng.usize(0..50)]);
        now = world.run(None, now) + pause(rng);
        world.add(None, now, vec![(rng.u64(0..4000), Action::HangUp); rng.usize(0..FAILED_STARTS as usize)]);
        now = world.run(None, now) + pause(rng);
        world.add(Some(version), now, start_of_llama(rng));
        world.run(None, now);
        assert!(world.aborts.is_empty(), "{:?}", world.aborts);
    });
}

/// Clients of both versions and health checks in any order, from an unproven address on: a version changes only after
/// [`FAILED_STARTS`] hang-ups in a row and while no session uses it ([`World::act`]), and few lines are logged.
#[test]
fn everything_at_once() {
    let (aborts, starts) = (Cell::new(0), Cell::new(0));
    histories("everything", |world, rng, mut now| {
        for _ in 0..2 * STARTS {
            match rng.u8(0..3) {
                0 => world.add(Some(V8_0), now, start_of_llama(rng)),
                1 => world.add(Some(V7_0), now, start_of_llama(rng)),
                _ => world.add(None, now, vec![(rng.u64(0..5000), Action::HangUp); rng.usize(0..8)]),
            };
            now += Duration::from_millis(rng.u64(0..20_000));
            world.run(Some(now), now);
        }
        world.run(None, now);
        starts.set(starts.get() + world.processes.len());
        aborts.set(aborts.get() + world.aborts.len());
    });
    assert!(aborts.get() > 0 && aborts.get() < starts.get());
}

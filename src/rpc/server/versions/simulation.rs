//! Seeded simulation of the clients of one address: llama.cpp's of 7.0 and of 8.0.1 with one to four devices, which start,
//! abort, are killed and start again, in turn or at once, between port scanners and health checks.
//!
//! A client opens the connections that llama.cpp opens, one after the other: short ones for its queries, with a command each;
//! with `-fit` (on by default) contexts that only measure memory, which end with four connections per device that have no
//! command; then the long one; after it, if the server got no weights, such connections again. A HELLO that is answered with
//! another version aborts the process, which ends that connection without a command.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use fastrand::Rng;

use super::ServedVersion::{self, V7_0, V8_0};
use super::evidence::{FAILED_STARTS, HangUp, START_LENGTH, START_SPACING};
use super::probe::{ProbedClient, ProvenSession};
use super::{VersionPolicy, VersionProbe};
use crate::rpc::transport::PeerAddr;

const HISTORIES: u64 = 100_000;

/// Starts of processes in a history.
const STARTS: usize = 5;

const SPACING_MS: u64 = START_SPACING.as_millis() as u64;

/// A step of a process: it waits so many milliseconds, then acts.
type Step = (u64, Action);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    /// Opens a connection and closes it without a command.
    Idle,
    /// Opens a connection, sends a command, and closes it.
    Query,
    /// Opens the connection that stays open.
    Open,
    /// Closes it.
    Close,
}

/// The connections of one start of llama.cpp.
fn start_of_llama(rng: &mut Rng) -> Vec<Step> {
    let (devices, fit, round_trip) = (rng.usize(1..=4), rng.bool(), rng.u64(0..200));
    let events = || std::iter::repeat_n((2 * round_trip, Action::Idle), 4 * devices);
    let mut steps = vec![(0, Action::Query)];
    for _ in 0..if fit { rng.usize(1..=3) } else { 0 } {
        // Loading the vocabulary of a large model takes seconds.
        steps.push((rng.u64(0..5000), Action::Query));
        steps.extend([(rng.u64(0..3000), Action::Open), (rng.u64(0..500), Action::Close)]);
        steps.extend(events());
    }
    steps.push((rng.u64(0..3000), Action::Query));
    if rng.bool() {
        steps.extend([(rng.u64(0..3000), Action::Open), (rng.u64(0..20_000), Action::Close)]);
    } else {
        steps.push((rng.u64(0..20_000), Action::Idle)); // The server got no weights.
        steps.extend(events());
    }
    if rng.u8(0..4) == 0 {
        steps.truncate(rng.usize(1..=steps.len())); // The process is killed.
    }
    steps
}

/// One process, or a health check.
struct Process {
    /// Its only version; `None`: a health check, which accepts each.
    version: Option<ServedVersion>,
    steps: std::vec::IntoIter<Step>,
    session: Option<ProvenSession>,
}

/// What has happened at the address, as far as the bounds need it.
#[derive(Default)]
struct Trace {
    /// Versions and numbers of the processes that have aborted, in order.
    aborts: Vec<(ServedVersion, usize)>,
    /// Reports that two versions use the address at once.
    two_versions: usize,
    /// Ends without a command since the last event that forgets them.
    ends: Vec<Instant>,
}

impl Trace {
    /// Number of failed starts among the ends, by their definition: the reference for the state machine.
    fn failed_starts(&self) -> u32 {
        let bursts = self.ends.chunk_by(|&before, &end| end - before < START_SPACING);
        let starts = bursts.map(|burst| {
            let mut began = burst[0];
            let lengths = burst.iter().filter(|&&end| {
                let is_length = end - began >= START_LENGTH;
                began = if is_length { end } else { began };
                is_length
            });
            lengths.count() + usize::from(burst.len() == 1)
        });
        starts.sum::<usize>() as u32
    }
}

struct World<'a> {
    probe: &'a VersionProbe,
    client: ProbedClient,
    processes: Vec<Process>,
    /// Time of the next step of each process, and its number.
    due: BinaryHeap<Reverse<(Instant, usize)>>,
    /// The version that the last command has proved, until another one is answered.
    proven: Option<ServedVersion>,
    trace: Trace,
}

impl<'a> World<'a> {
    fn new(probe: &'a VersionProbe) -> World<'a> {
        let client = ProbedClient::of(PeerAddr::Ip(([10, 0, 0, 1], 1).into())).unwrap();
        World { probe, client, processes: Vec::new(), due: BinaryHeap::new(), proven: None, trace: Trace::default() }
    }

    fn add(&mut self, version: Option<ServedVersion>, at: Instant, steps: Vec<Step>) -> usize {
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
        let Some(session) = self.processes[number].session.take() else { return };
        self.probe.session_ended(&session, now);
        if !self.has_session() {
            self.trace.ends.clear();
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
            let failed = self.trace.failed_starts();
            assert!(!self.has_session() && failed >= FAILED_STARTS, "{failed} failed starts before a change");
            (self.proven, self.trace.ends) = (None, Vec::new());
        }
        let wrong = self.processes[number].version.is_some_and(|version| version != answered);
        if !wrong && action != Action::Idle {
            (self.proven, self.trace.ends) = (Some(answered), Vec::new());
            self.processes[number].session = Some(self.probe.session_began(self.client, answered, now));
            if action == Action::Query {
                self.close(number, now);
            }
            return;
        }
        if let (true, Some(version)) = (wrong, self.processes[number].version) {
            self.trace.aborts.push((version, number));
            self.processes[number].steps = Vec::new().into_iter();
        }
        self.end(answered, now);
    }

    /// A connection ends without a command.
    fn end(&mut self, answered: ServedVersion, now: Instant) {
        let reported = self.probe.ended_without_command(self.client, answered, now);
        if reported.hang_up != HangUp::Outdated {
            self.trace.ends.push(now);
        }
        match reported.hang_up {
            HangUp::TwoVersions => {
                assert!(self.has_session() && self.trace.failed_starts() >= FAILED_STARTS);
                self.trace.two_versions += usize::from(reported.is_news);
            }
            HangUp::Changes(_) if reported.was_proven => {
                assert!(!self.has_session(), "a version changes while a session uses it");
                assert!(self.trace.failed_starts() >= FAILED_STARTS, "failed starts before a change");
            }
            HangUp::Changes(_) => self.trace.ends.clear(),
            _ => {}
        }
    }

    /// Aborts of processes from this number on.
    fn aborts_since(&self, number: usize) -> usize {
        self.trace.aborts.iter().filter(|(_, of)| *of >= number).count()
    }
}

/// Runs `history` with the seeds of all histories.
fn histories(name: &str, history: impl Fn(&mut World<'_>, &mut Rng, Instant)) {
    let start = Instant::now();
    for seed in 0..HISTORIES / 5 {
        let probe = VersionProbe::of_order(&ServedVersion::DEFAULT_ORDER);
        let (mut world, mut rng) = (World::new(&probe), Rng::with_seed(seed));
        // A failed assertion names the seed.
        let run = std::panic::AssertUnwindSafe(|| history(&mut world, &mut rng, start));
        assert!(std::panic::catch_unwind(run).is_ok(), "{name}, seed {seed}");
    }
}

fn pause(rng: &mut Rng) -> Duration {
    Duration::from_millis(SPACING_MS + rng.u64(0..60_000))
}

/// Clients of one version, several at a time. A client of 8.0.1 never aborts; of those of 7.0 only starts before the first
/// abort.
#[test]
fn clients_of_one_version() {
    histories("one version", |world, rng, start| {
        let (version, mut now) = (if rng.bool() { V8_0 } else { V7_0 }, start);
        for number in 0..STARTS {
            world.add(Some(version), now, start_of_llama(rng));
            world.add(Some(version), now + Duration::from_millis(rng.u64(0..5000)), start_of_llama(rng));
            now = if rng.bool() { world.run(None, now) } else { world.run(Some(now), now) + pause(rng) };
            if version == V7_0 && number == 0 {
                assert!(world.trace.aborts.len() <= 2);
            }
        }
        world.run(None, now);
        let bound = if version == V8_0 { 0 } else { 2 };
        assert!(world.trace.aborts.len() <= bound, "{:?}", world.trace.aborts);
        assert_eq!(world.trace.two_versions, 0);
    });
}

/// The same, one at a time: one abort of 7.0 at most.
#[test]
fn one_client_at_a_time() {
    histories("one client", |world, rng, mut now| {
        let version = if rng.bool() { V8_0 } else { V7_0 };
        for _ in 0..STARTS {
            world.add(Some(version), now, start_of_llama(rng));
            now = world.run(None, now) + Duration::from_millis(rng.u64(0..10_000));
        }
        assert!(world.trace.aborts.len() <= usize::from(version == V7_0), "{:?}", world.trace.aborts);
    });
}

/// Clients of both versions in turn, each started again until it works: [`FAILED_STARTS`] aborts at most after each change of the
/// version.
#[test]
fn both_versions_in_turn() {
    histories("in turn", |world, rng, mut now| {
        for _ in 0..STARTS {
            let version = if rng.bool() { V8_0 } else { V7_0 };
            for attempt in 0.. {
                let number = world.add(Some(version), now, start_of_llama(rng));
                now = world.run(None, now) + pause(rng);
                if world.aborts_since(number) == 0 {
                    break;
                }
                assert!(attempt < FAILED_STARTS, "{version}: {attempt} aborts before this one");
            }
        }
    });
}

/// A client of one version works while clients of the other one start. It keeps working, its own starts do not abort, and the log
/// says once that two versions use the address.
#[test]
fn both_versions_at_once() {
    histories("at once", |world, rng, start| {
        let (version, other) = if rng.bool() { (V8_0, V7_0) } else { (V7_0, V8_0) };
        // Proves the version, which may need an abort.
        let mut now = start;
        while world.processes.last().is_none_or(|process| process.session.is_none()) {
            world.add(Some(version), now, vec![(0, Action::Query), (10, Action::Open), (1 << 30, Action::Close)]);
            now = world.run(Some(now + Duration::from_millis(20)), now) + pause(rng);
        }
        let first = world.processes.len();
        for _ in 0..STARTS {
            world.add(Some(other), now, start_of_llama(rng));
            now += pause(rng);
            world.run(Some(now), now);
        }
        assert_eq!(world.aborts_since(first), STARTS, "no start of the other version works");
        assert_eq!(world.trace.two_versions, 1);
        let own = world.add(Some(version), now, start_of_llama(rng));
        world.run(Some(now + Duration::from_secs(60)), now);
        assert_eq!(world.aborts_since(own), 0);
    });
}

/// A health check sends HELLO alone. Fewer than [`FAILED_STARTS`] checks in a row, or any number while a session is open, never
/// change a version that a command has proved; more of them cost a client one abort at most, after which it works.
#[test]
fn health_checks_beside_clients() {
    histories("health checks", |world, rng, mut now| {
        let version = if rng.bool() { V8_0 } else { V7_0 };
        let proof = world.probe.session_began(world.client, version, now);
        world.probe.session_ended(&proof, now);
        for _ in 0..STARTS {
            let checks = rng.usize(0..2 * FAILED_STARTS as usize);
            let period = SPACING_MS + rng.u64(0..10_000);
            world.add(None, now, vec![(period, Action::Idle); checks]);
            now = world.run(None, now);
            // No check runs between an abort and the next start.
            for attempt in 0..2 {
                let number = world.add(Some(version), now, start_of_llama(rng));
                now = world.run(None, now) + pause(rng);
                if world.aborts_since(number) == 0 {
                    break;
                }
                assert!(checks >= FAILED_STARTS as usize && attempt == 0, "{checks} checks, attempt {attempt}");
            }
        }
    });
}

/// A connection that sends no HELLO, as a port scanner's, never reaches the probe: only a reply to HELLO is an answer.
#[test]
fn the_simulated_server_tries_both_versions() {
    let policy = VersionPolicy::new(None, &ServedVersion::DEFAULT_ORDER).unwrap();
    assert!(policy.tries_several());
    assert_eq!(VersionProbe::of_order(policy.versions()).list(), [V8_0, V7_0]);
}

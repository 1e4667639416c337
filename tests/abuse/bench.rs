//! Abuse suite: the effects of one client on the others. Each attack is a row of [`ATTACKS`]: for some seconds, valid messages
//! make a server hold as many resources as its limits allow. Meanwhile ordinary clients come and go. The server, a process of
//! the optimised program, must stay within its configured threads and mappings, serve the ordinary clients in time, and be as
//! before once the attacker has left.
//!
//! The suite measures times, so it is a step of its own: `cargo bench -p fanout --bench abuse -- --seconds 60`.
//! `--binary FILE` attacks another build of the server, and names of attacks select these. With `--fairness`, it measures
//! instead how the server shares its device ([`fairness`]).
//!
//! Not here: random messages (`crates/hostile-client`), hostile graphs (`tests/hostile`). Start with [`ATTACKS`].
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)] // a failed unwrap fails the suite

mod attacks;
mod fairness;
mod ordinary_clients;
mod server_process;
mod session;

use attacks::{ATTACKS, Attack};
use fairness::{LOAD_CLIENTS, SHARES};
use ordinary_clients::{HeldBuffer, Latencies};
use server_process::{HOST_MEMORY, ServerProcess, Usage};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Memory of the attacked device in bytes.
pub(crate) const MEMORY: u64 = 1 << 30;

/// Connections that ordinary clients may have at a time.
const ORDINARY_CONNECTIONS: usize = 16;

/// Length of an attack if `--seconds` is not given.
const DEFAULT_LENGTH: Duration = Duration::from_secs(5);

/// Threads above the configured ones that the server may have, and mappings above those at its start.
const SPARE_THREADS: usize = 8;
const MAX_MAPPINGS_ADDED: usize = 4096;

/// Resident memory above that at the start and `max-host-memory` that the server may have, in bytes: stacks of threads, and
/// what the allocator keeps. Device memory that an attack writes is added.
const SPARE_MEMORY: u64 = 64 << 20;

/// Pause between two readings of the server's threads and mappings.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(10);

/// Maximum time until the server is as before the attack, or tokens take about as long as before a load.
const MAX_RECOVERY: Duration = Duration::from_secs(10);

/// Threads that ordinary clients share.
const CLIENT_THREADS: usize = 2;

struct Arguments {
    /// Whether to measure shares of the device, instead of attacks.
    fairness: bool,
    /// With `fairness`: whether the measured model is small.
    small: bool,
    /// With `fairness`: whether the bounds are checked.
    check: bool,
    /// Length of an attack, or of a measurement.
    length: Option<Duration>,
    binary: PathBuf,
    /// Attacks or loads to run; all if it is empty.
    names: Vec<String>,
}

impl Arguments {
    fn chooses(&self, name: &str) -> bool {
        self.names.is_empty() || self.names.iter().any(|chosen| chosen == name)
    }
}

/// The arguments of the command line. Cargo passes `--bench` as well.
fn arguments() -> Arguments {
    let mut parsed = Arguments {
        fairness: false,
        small: false,
        check: false,
        length: None,
        binary: env!("CARGO_BIN_EXE_rpc-server").into(),
        names: Vec::new(),
    };
    let mut words = std::env::args().skip(1).filter(|word| word != "--bench");
    while let Some(word) = words.next() {
        match word.as_str() {
            "--seconds" => {
                let seconds = words.next().and_then(|value| value.parse().ok()).map(Duration::try_from_secs_f64);
                let length = seconds.and_then(|length| length.ok());
                parsed.length = Some(length.unwrap_or_else(|| panic!("--seconds needs a number")));
            }
            "--fairness" => parsed.fairness = true,
            "--small" => parsed.small = true,
            "--check" => parsed.check = true,
            "--binary" => parsed.binary = words.next().unwrap_or_else(|| panic!("--binary needs a file")).into(),
            name if !parsed.fairness && ATTACKS.iter().any(|attack| attack.name == name) => parsed.names.push(word),
            SHARES if parsed.fairness => parsed.names.push(word),
            name if parsed.fairness && LOAD_CLIENTS.iter().any(|other| other.name == name) => parsed.names.push(word),
            other => panic!(
                "expected --seconds N, --binary FILE or the name of an attack, or --fairness, then --small, --check or the \
                 name of a load or {SHARES:?}, got {other:?}"
            ),
        }
    }
    parsed
}

/// What was measured during an attack and after it.
struct Report {
    rounds: u64,
    latencies: Latencies,
    graphs: Option<Latencies>,
    before: Usage,
    peak: Usage,
    recovery: Duration,
    failures: Vec<String>,
}

/// Runs an attack on a server of its own.
fn run(attack: &Attack, arguments: &Arguments) -> Report {
    let mut server = ServerProcess::start(&arguments.binary, MEMORY, attack.connections + ORDINARY_CONNECTIONS, &[]);
    let (process, address) = (server.process, server.address.clone());
    let mut failures = Vec::new();
    // Also the warm-up: what the server creates for its first session stays.
    let mut held = HeldBuffer::new(&address).unwrap();
    let before = server.usage().unwrap();
    let stop = AtomicBool::new(false);
    let (peak, latencies, graphs, rounds) = std::thread::scope(|scope| {
        let sampler = scope.spawn(|| {
            let mut peak = before;
            while !stop.load(Ordering::Relaxed) {
                if let Ok(now) = Usage::of(process) {
                    peak = peak.max(now);
                }
                std::thread::sleep(SAMPLE_INTERVAL);
            }
            peak
        });
        let clients: Vec<_> = (0..CLIENT_THREADS)
            .map(|_| scope.spawn(|| ordinary_clients::serve_until(&stop, &address, attack.queues_left)))
            .collect();
        let graphs =
            (attack.device_memory > 0).then(|| scope.spawn(|| ordinary_clients::compute_until(&stop, &address)));
        let until = Instant::now() + arguments.length.unwrap_or(DEFAULT_LENGTH);
        let rounds = (attack.run)(&address, until);
        // An attack that the server ended early: the ordinary clients still get their time.
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
        stop.store(true, Ordering::Relaxed);
        let latencies: Latencies = clients.into_iter().map(|client| client.join().unwrap()).sum();
        (sampler.join().unwrap(), latencies, graphs.map(|graphs| graphs.join().unwrap()), rounds)
    });
    let left = Instant::now();
    let rounds = rounds.unwrap_or_else(|e| {
        failures.push(format!("the attacker lost its connection: {e}"));
        0
    });
    // Until the server is as before, or never will be.
    while let Some(difference) = difference(&mut server, before, &held) {
        if left.elapsed() > MAX_RECOVERY || server.exit_status().is_some() {
            failures.push(difference);
            break;
        }
        std::thread::sleep(SAMPLE_INTERVAL);
    }
    let recovery = left.elapsed();
    if !held.is_intact() {
        failures.push("the buffer of an idle client has changed, or is lost".to_owned());
    }
    let threads = server.configured_threads + attack.transfer_threads + SPARE_THREADS;
    if peak.threads > threads {
        failures.push(format!("{} threads, {threads} allowed", peak.threads));
    }
    if peak.mappings > before.mappings + MAX_MAPPINGS_ADDED {
        let added = peak.mappings - before.mappings;
        failures.push(format!("{added} mappings more than before, {MAX_MAPPINGS_ADDED} allowed"));
    }
    let memory = before.peak_resident + HOST_MEMORY + attack.device_memory + SPARE_MEMORY;
    if peak.peak_resident > memory {
        failures.push(format!("{} MiB of resident memory, {} MiB allowed", peak.peak_resident >> 20, memory >> 20));
    }
    failures.extend(latencies.check(attack.timed));
    failures.extend(graphs.iter().flat_map(Latencies::check_graphs));
    Report { rounds, latencies, graphs, before, peak, recovery, failures }
}

/// In what the server differs from `before`, when only the idle client was connected.
fn difference(server: &mut ServerProcess, before: Usage, held: &HeldBuffer) -> Option<String> {
    let exit_status = server.exit_status();
    let now = match (server.usage(), exit_status) {
        (Ok(now), None) => now,
        (_, status) => return Some(format!("the server has ended: {status:?}")),
    };
    if now.threads > before.threads {
        return Some(format!("{} threads after the attack, {} before", now.threads, before.threads));
    }
    (!held.rest_is_free(&server.address)).then(|| "a client cannot allocate all of the free memory".to_owned())
}

fn main() {
    let arguments = arguments();
    if arguments.fairness {
        let failed = fairness::run(&arguments).unwrap_or_else(|e| {
            println!("FAILED: a measured client was not served: {e}");
            true
        });
        std::process::exit(failed.into());
    }
    let mut failed = false;
    for attack in ATTACKS.iter().filter(|attack| arguments.chooses(attack.name)) {
        let Report { rounds, latencies, graphs, before, peak, recovery, failures } = run(attack, &arguments);
        println!(
            "{}: {rounds} rounds; sessions: {latencies}; threads {} to {}, mappings {} to {}, {} to {} MiB resident; as before after \
             {recovery:.1?}",
            attack.name,
            before.threads,
            peak.threads,
            before.mappings,
            peak.mappings,
            before.peak_resident >> 20,
            peak.peak_resident >> 20
        );
        if let Some(graphs) = graphs {
            println!("  graphs of a client: {graphs}");
        }
        for failure in &failures {
            println!("  FAILED: {failure}");
        }
        failed |= !failures.is_empty();
    }
    if failed {
        std::process::exit(1);
    }
}

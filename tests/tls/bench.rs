//! What TLS costs, and what clients without an allowed key can do: `cargo bench -p fanout --bench tls`, with `-- --check` for the
//! bounds. Names of [`PARTS`] select these; `--seconds N` is the length of an attack; `--small` is for CI, where times mean
//! nothing; `--binary FILE` measures another build of the server.
//!
//! The decode of a model over TLS is measured by `scripts/bench/tls.py`.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)] // a failed unwrap fails the suite

mod attacks;
mod rustls_ends;
mod server;

use fanout::rpc::client::Endpoint;
use server::{Server, Session};
use std::hint::black_box;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Least rate of an upload over TLS, relative to the rate at which one thread encrypts and decrypts in memory.
const LEAST_RATE: f64 = 0.6;

/// Most memory of an idle session over TLS above that of a plain one, in bytes.
const MAX_IDLE_MEMORY: i64 = 64 << 10;

pub(crate) struct Arguments {
    pub(crate) check: bool,
    pub(crate) small: bool,
    pub(crate) length: Duration,
    pub(crate) binary: PathBuf,
    parts: Vec<String>,
}

/// Returns what is wrong.
type Part = fn(&Arguments) -> Vec<String>;

const PARTS: [(&str, Part); 4] =
    [("rates", rates), ("idle", idle), ("handshakes", attacks::handshakes), ("hostile", attacks::hostile)];

/// The arguments of the command line. Cargo passes `--bench` as well.
fn arguments() -> Arguments {
    let mut parsed = Arguments {
        check: false,
        small: false,
        length: Duration::from_secs(5),
        binary: env!("CARGO_BIN_EXE_rpc-server").into(),
        parts: Vec::new(),
    };
    let mut words = std::env::args().skip(1).filter(|word| word != "--bench");
    while let Some(word) = words.next() {
        match word.as_str() {
            "--check" => parsed.check = true,
            "--small" => (parsed.small, parsed.length) = (true, Duration::from_secs(1)),
            "--seconds" => {
                let seconds = words.next().and_then(|seconds| seconds.parse().ok()).expect("--seconds needs a number");
                parsed.length = Duration::from_secs(seconds);
            }
            "--binary" => parsed.binary = words.next().expect("--binary needs a file").into(),
            name if PARTS.iter().any(|(part, _)| *part == name) => parsed.parts.push(word),
            other => {
                panic!("expected --check, --small, --seconds N, --binary FILE or the name of a part, got {other:?}")
            }
        }
    }
    parsed
}

fn main() {
    let arguments = arguments();
    let is_chosen = |name: &&str| arguments.parts.is_empty() || arguments.parts.iter().any(|part| part == name);
    let mut failed = false;
    for (name, part) in PARTS.iter().filter(|(name, _)| is_chosen(name)) {
        for failure in part(&arguments) {
            println!("FAILED: {name}: {failure}");
            failed = true;
        }
    }
    std::process::exit(i32::from(failed));
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Rates of transfers, in rounds in which each end takes its turn.
fn rates(arguments: &Arguments) -> Vec<String> {
    let (bytes, rounds) = if arguments.small { (8 << 20, 1) } else { (256 << 20, 7) };
    let server = Server::start(&arguments.binary, &[]);
    let mut sessions = [server.connect_plain(), server.connect_tls()].map(|end| Session::new(end, bytes as u64));
    let data: Vec<u8> = (0..bytes).map(|i: usize| ((i * 31) >> 8) as u8).collect();
    // Memory that was never used costs page faults.
    sessions.iter_mut().for_each(|session| session.upload(&data));
    let rate = |work: &mut dyn FnMut()| {
        let began = Instant::now();
        work();
        bytes as f64 / began.elapsed().as_secs_f64()
    };
    let mut measured = [const { Vec::new() }; 5];
    for _ in 0..rounds {
        let [plain, tls] = &mut sessions;
        let round = [
            rustls_ends::rate_in_memory(bytes),
            rate(&mut || plain.upload(&data)),
            rate(&mut || tls.upload(&data)),
            rate(&mut || drop(black_box(plain.download()))),
            rate(&mut || drop(black_box(tls.download()))),
        ];
        measured.iter_mut().zip(round).for_each(|(values, value)| values.push(value));
    }
    for session in &mut sessions {
        assert!(session.download() == data);
    }
    let [memory, up, up_tls, down, down_tls] = measured.map(median);
    let gb = |rate: f64| rate / 1e9;
    println!("rates in GB/s, {rounds} rounds of {} MiB, medians", bytes >> 20);
    println!("  rustls in memory, one thread: encrypt, then decrypt  {:6.2}", gb(memory));
    println!(
        "  upload    plain {:6.2}  TLS {:6.2} ({:.2} of plain, {:.2} of memory)",
        gb(up),
        gb(up_tls),
        up_tls / up,
        up_tls / memory
    );
    println!("  download  plain {:6.2}  TLS {:6.2} ({:.2} of plain)", gb(down), gb(down_tls), down_tls / down);
    let is_slow = arguments.check && up_tls < LEAST_RATE * memory;
    is_slow
        .then(|| format!("uploads over TLS have {:.2} of the rate in memory, bound {LEAST_RATE}", up_tls / memory))
        .into_iter()
        .collect()
}

/// Memory of sessions that have done something and wait.
fn idle(arguments: &Arguments) -> Vec<String> {
    const SESSIONS: usize = 200;
    let per_session = |connect: fn(&Server) -> Endpoint| {
        let server = Server::start(&arguments.binary, &[]);
        let open = |count| {
            let sessions = (0..count).map(|_| {
                let mut session = Session::new(connect(&server), 1 << 20);
                session.upload(&vec![1; 1 << 20]);
                session
            });
            sessions.collect::<Vec<_>>()
        };
        // What the first sessions leave behind is not theirs: the buffers of the others are freed before the second reading.
        let first = open(8);
        let before = server.status("VmRSS");
        let sessions = open(SESSIONS);
        let added = (server.status("VmRSS") as i64 - before as i64) << 10;
        drop((first, sessions));
        added / SESSIONS as i64 - (1 << 20)
    };
    let (plain, tls) = (per_session(Server::connect_plain), per_session(Server::connect_tls));
    println!(
        "memory of an idle session at the server, of {SESSIONS}: plain {} KiB, TLS {} KiB more",
        plain >> 10,
        (tls - plain) >> 10
    );
    let is_large = tls - plain > MAX_IDLE_MEMORY;
    is_large.then(|| format!("{} KiB more, bound {}", (tls - plain) >> 10, MAX_IDLE_MEMORY >> 10)).into_iter().collect()
}

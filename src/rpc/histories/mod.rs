//! Seeded histories: a client and two servers in one process run operations of the whole client API over in-memory transports
//! that a seed delays, cuts, half-closes and stalls at any byte. A model beside them says what each result may be.
//!
//! ```text
//! operations   the operations, and their choice by a seed
//! world        the servers, the objects of the client, and the order of their accesses
//! run          runs each operation, on the client and on the model
//! model        which bytes a read may return, and with which errors a queue may fail
//! shrink       removes operations from a history that fails
//! ```
//!
//! What the model demands:
//! - A read returns the bytes of the model, or an error that a fault so far allows. Where a write has failed, each byte may be
//!   old or new.
//! - A connection is lost only after a fault of this connection, or the end of its server. A queue fails only if its work
//!   depends on a connection that may be lost, on a queue that was dropped, or on a broken link between servers.
//! - When all clients have gone, each server has returned all memory, threads and tokens.
//! - Nothing hangs: a watchdog ends the process and prints the history.
//!
//! Queues run at the same time. Accesses of several queues to one buffer are ordered by points, as a scheduler orders them,
//! so that the model is exact. No result depends on a time: stalls that end by a timeout occur only in histories in which every
//! connection may be lost at any time.
//!
//! The threads are real, and their order is the system's. A seed determines the operations, and the splits and faults of
//! connections; it therefore replays a failure likely, and not certainly. `FANOUT_HISTORIES` is the number of histories, and
//! `FANOUT_HISTORIES_SEED` the first seed. `FANOUT_HISTORIES_KEEP` lists the operations to keep, as a failure prints them.

mod model;
mod operations;
mod run;
mod servers;
mod shrink;
mod world;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::poison::lock;
use operations::History;

/// Histories of an ordinary run of the tests.
const HISTORIES: u64 = 500;

/// Histories at a time: more than processors, because some wait for timeouts.
const WORKERS: u64 = 6;

/// Time after which a history hangs: far more than any takes.
const WATCHDOG: Duration = Duration::from_secs(120);

/// The histories that run, with their starts.
static RUNNING: Mutex<Option<HashMap<u64, (Instant, History)>>> = Mutex::new(None);

/// Runs a history under the watchdog.
fn run_watched(worker: u64, history: &History) -> Result<(), String> {
    lock(&RUNNING).get_or_insert_default().insert(worker, (Instant::now(), history.clone()));
    let done = catch_unwind(AssertUnwindSafe(|| run::run(history)));
    lock(&RUNNING).get_or_insert_default().remove(&worker);
    done.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("panic: {}", text.unwrap_or_default()))
    })
}

/// Ends the process if a history hangs. Returns when `ended` is set.
fn watch(ended: &AtomicBool) {
    while !ended.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(10));
        let running = lock(&RUNNING);
        let hanging = running.iter().flatten().find(|(_, (since, _))| since.elapsed() > WATCHDOG);
        if let Some((_, (_, history))) = hanging {
            // Past the capture of the test's output, which an abort would lose.
            use std::io::Write;
            let _ = writeln!(std::io::stderr(), "hangs for {WATCHDOG:?}: {history}{}", replay(history));
            std::process::abort();
        }
    }
}

/// The command that runs a history again.
fn replay(history: &History) -> String {
    let keep: Vec<_> = history.operations.iter().map(|(number, _)| number.to_string()).collect();
    format!(
        "FANOUT_HISTORIES=1 FANOUT_HISTORIES_SEED={} FANOUT_HISTORIES_KEEP={} cargo test --lib -- rpc::histories::seeded",
        history.seed,
        keep.join(",")
    )
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

#[test]
fn seeded_histories_keep_to_the_model() {
    let number = |name: &str, default| variable(name).map_or(default, |text| text.parse().unwrap());
    let (count, first) = (number("FANOUT_HISTORIES", HISTORIES), number("FANOUT_HISTORIES_SEED", 0));
    let keep = variable("FANOUT_HISTORIES_KEEP");
    let keep: Option<Vec<usize>> = keep.map(|list| list.split(',').map(|number| number.parse().unwrap()).collect());
    let (next, ended) = (AtomicU64::new(0), AtomicBool::new(false));
    let failed: Mutex<Option<(u64, History, String)>> = Mutex::new(None);
    let work = |worker| {
        while lock(&failed).is_none() {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= count {
                return;
            }
            let mut history = History::of_seed(first + at);
            if let Some(keep) = &keep {
                history.operations.retain(|(number, _)| keep.contains(number));
            }
            if let Err(failure) = run_watched(worker, &history) {
                lock(&failed).get_or_insert((at, history, failure));
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| watch(&ended));
        std::thread::scope(|workers| {
            (0..WORKERS.min(count)).for_each(|worker| _ = workers.spawn(move || work(worker)))
        });
        if let Some((at, history, failure)) = lock(&failed).take() {
            println!("{failure}\nafter {at} others, {history}{}\nshrinking it", replay(&history));
            let (shortest, failure) = shrink::shrink(&history, failure, |history| run_watched(0, history));
            ended.store(true, Ordering::Relaxed);
            panic!("{failure}\nafter {at} others, {shortest}{}", replay(&shortest));
        }
        ended.store(true, Ordering::Relaxed);
    });
}

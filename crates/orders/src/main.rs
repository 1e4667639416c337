//! Runs the concurrent core of fanout in many orders of its threads.
//!
//! The files of the core (the `#[path]` modules of device.rs and of rpc/) are the library's, compiled with another module
//! `crate::sync`: its locks and threads are those of shuttle, which runs one thread at a time and chooses the next one at each
//! operation on a lock, an atomic or a thread, at random or by PCT (probabilistic concurrency testing), from a seed. So a lost
//! wake-up is found as a deadlock in some of some thousand orders, and found again with the same seed. A *harness* sets up a
//! structure, uses it from two or more threads, and asserts its invariants.
//!
//!     cargo run -p fanout-orders -- [FILTER] [--orders N] [--seed S]
//!     cargo run -p fanout-orders -- FILTER --replay FILE
//!
//! Not covered: memory orders (each access of an atomic is sequentially consistent here), and switches of threads within `Arc` and
//! `Weak`.

// Not as a test, as `cargo clippy --all-targets` also compiles it: the unit tests of the library's files need the locks of std.
#![cfg_attr(test, allow(unused))]
#[cfg(not(test))]
mod device;
#[cfg(not(test))]
mod harnesses;
#[cfg(not(test))]
mod ops;
#[cfg(not(test))]
#[rustfmt::skip] // formatted where the file is
#[path = "../../../src/printable.rs"]
#[allow(dead_code, reason = "groups use one function")]
mod printable;
#[cfg(not(test))]
mod rpc;
#[cfg(not(test))]
mod sync;
#[cfg(not(test))]
mod tensor;

use clap::Parser;

/// Runs harnesses in many orders of their threads. The first order that fails ends the program, and its schedule is printed.
#[derive(Parser)]
struct Options {
    /// Only harnesses whose names contain this text.
    #[arg(default_value = "")]
    filter: String,
    /// Orders of each harness: half of them random, half of them by PCT.
    #[arg(long, default_value_t = 1000)]
    orders: usize,
    /// Seed of the orders.
    #[arg(long, default_value_t = 11)]
    seed: u64,
    /// Runs the one harness that the filter chooses in the order that failed: a file with the output of the failed run.
    #[arg(long, value_name = "FILE")]
    replay: Option<std::path::PathBuf>,
}

/// The core logs an error only for a bug, such as a panic that it has caught.
struct NoErrors;

impl log::Log for NoErrors {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        // The scheduler logs the panic of a harness as an error.
        metadata.level() == log::Level::Error && !metadata.target().starts_with("shuttle")
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            panic!("the core logs: {}", record.args());
        }
    }

    fn flush(&self) {}
}

#[cfg(not(test))]
fn main() {
    let options = Options::parse();
    log::set_logger(&NoErrors).expect("no logger yet");
    log::set_max_level(log::LevelFilter::Error);
    let chosen: Vec<_> = harnesses::ALL.iter().filter(|(name, _)| name.contains(&options.filter)).collect();
    assert!(!chosen.is_empty(), "no harness has {:?} in its name", options.filter);
    if let Some(file) = options.replay {
        let output = std::fs::read_to_string(file).expect("a file with the output of a failed run");
        let (_, rest) = output.split_once("failing schedule:\n\"").expect("the output has a schedule");
        let schedule = rest.split('"').next().unwrap_or_default();
        let [(name, harness)] = chosen[..] else { panic!("{} harnesses are chosen, not one", chosen.len()) };
        sync::orders::replay(*harness, schedule);
        return println!("{name}: passed in this order");
    }
    for &&(name, harness) in &chosen {
        let began = std::time::Instant::now();
        println!("{name}: {} orders, seed {}", options.orders, options.seed);
        sync::orders::check(harness, options.orders, options.seed);
        println!("{name}: passed in {:.1} s", began.elapsed().as_secs_f64());
    }
    println!("{} harnesses passed", chosen.len());
}

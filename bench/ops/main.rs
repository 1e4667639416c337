//! Benchmark of the CPU device: times every op on the shapes of a real model and compares the times with this machine's
//! roofline.
//!
//! `cargo bench -p fanout-bench --bench ops -- --filter "MUL_MAT Q4_0"`; `--help` lists the options. As a test
//! (`cargo test -p fanout-bench --bench ops`) it runs each case once at a small size.

mod peaks;
mod report;
mod roofs;
mod run;

use clap::Parser;
use fanout_bench::cases::{self, Sizes};
use report::{Rate, Row};
use roofs::Machine;
use run::{Bench, Storage};
use std::error::Error;
use std::io::Write;
use std::path::PathBuf;
use std::rc::Rc;

/// Times the ops of the CPU device on the shapes of an 8B model. Each row shows the time of one node (median, 10th and 90th
/// percentile), operations per second (a multiply-add counts as two), bytes per second (each byte read or written once), and
/// the roof that bounds the case, with the share of it that was reached.
#[derive(Parser)]
#[command(name = "ops")]
struct Args {
    /// Only run cases that contain this text in `op type shape`.
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,

    /// Threads of the device and of the roofs [default: all cores].
    #[arg(long, value_name = "N")]
    threads: Option<usize>,

    /// Seconds per case.
    #[arg(long, value_name = "S", default_value_t = 0.5)]
    seconds: f64,

    /// Time each product twice, in alternating slices: with repacked weights, and with weights held as rows in a read-only mapping
    /// of a temporary file.
    #[arg(long)]
    rows: bool,

    /// Write all measurements to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Only measure the roofs, without any case; takes about a second.
    #[arg(long, conflicts_with = "filter")]
    roofs: bool,

    /// Smoke test: small sizes and a single run per case, without meaningful times.
    #[arg(long)]
    smoke: bool,

    /// Passed by `cargo bench`, but not by `cargo test`.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let smoke = args.smoke || !args.bench;
    let threads = match args.threads {
        Some(n) => n.max(1),
        None => std::thread::available_parallelism()?.get(),
    };
    let sizes = if smoke { Sizes::SMOKE } else { Sizes::MODEL };
    let (seconds, samples) = if smoke { (0.0, 1) } else { (args.seconds, 9) };
    // Create the file before measuring, so that an unwritable path fails at once and not after the run.
    let json = args.json.map(std::fs::File::create).transpose()?;
    let mut bench = Bench::new(threads)?;
    let device = bench.description();
    println!("fanout {}, {device}", fanout::VERSION);
    let mut machine = Machine::new(threads, sizes.cold, smoke)?;
    let mut roofs = Vec::new();
    for roof in machine.all() {
        roofs.push(Rate { roof, name: machine.name(roof), rate: machine.median(roof, samples) });
    }
    println!("{}", roofs.iter().map(Rate::line).collect::<Vec<_>>().join("\n"));
    let mut cases = cases::all(&sizes);
    if args.roofs {
        cases.clear();
    } else {
        cases.retain(|case| case.name().contains(&args.filter));
        if cases.is_empty() {
            return Err(format!("no case contains `{}`", args.filter).into());
        }
        println!("\n{}", report::header());
    }
    let mut rows = Vec::new();
    for case in cases {
        let bounds = report::bounds(&case, &machine);
        let mut rates = vec![Vec::new(); bounds.len()];
        let pause = || bounds.iter().zip(&mut rates).for_each(|(&roof, rates)| rates.push(machine.sample(roof)));
        let both = args.rows && case.op.starts_with("MUL_MAT");
        let storages = if both { &[Storage::Packed, Storage::Rows][..] } else { &[Storage::Packed] };
        let all_times = bench.time(&case, storages, seconds, pause).map_err(|e| format!("{}: {e}", case.name()))?;
        let median = |mut rates: Vec<f64>| {
            rates.sort_by(f64::total_cmp);
            rates[rates.len() / 2]
        };
        let rates = bounds.iter().zip(rates);
        let rates = rates.map(|(&roof, rates)| Rate { roof, name: machine.name(roof), rate: median(rates) });
        let (rates, case) = (rates.collect::<Vec<_>>(), Rc::new(case));
        let packed = all_times.first().map(|times| times.quantile(0.5));
        for (&storage, times) in storages.iter().zip(all_times) {
            let row = Row::new(Rc::clone(&case), storage, times, &rates);
            let share = packed.filter(|_| storage == Storage::Rows).map(|packed| packed / row.median() * 100.0);
            println!("{}{}", row.line(), share.map_or(String::new(), |share| format!(", {share:.0}% of packed")));
            rows.push(row);
        }
    }
    if let Some(mut file) = json {
        file.write_all(report::json(&device, &roofs, &rows).as_bytes())?;
    }
    Ok(())
}

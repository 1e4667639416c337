//! What a graph costs besides its arithmetic on the CPU device: the time per node, a barrier, and waking up workers.
//!
//! `cargo bench -p fanout-bench --bench small_graphs`; `-- --check` fails if 100 dependent ADDs of 64 f32 take longer than
//! [`MAX_ADDS_MICROS`]. As a test (`cargo test -p fanout-bench --bench small_graphs`) it runs each graph once.

use clap::Parser;
use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Device, MemoryBudget, Region};
use fanout::graph::{BuildError, Builder};
use fanout::ops::binary::Binary;
use fanout::ops::mul_mat::MulMat;
use fanout::tensor::DType::{F32, Q4_0};
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Memory of a device in bytes.
const MEMORY: u64 = 64 << 20;

/// Dependent ADDs of 64 elements.
const ADDS: usize = 100;

/// Longest time of these in µs.
const MAX_ADDS_MICROS: f64 = 60.0;

/// Products in a graph that is large enough to be shared by the workers.
const PRODUCTS: usize = 300;

/// Pause after which the workers of the pool have parked.
const PAUSE: Duration = Duration::from_millis(2);

/// Medians of which the least counts: other programs on the machine only make times longer.
const MEDIANS: usize = 5;

/// Measures the CPU device on small graphs. The time of the ADDs is the least of five medians; the others are differences of the
/// shortest runs, because on a busy machine the medians of two graphs differ by more than a barrier.
#[derive(Parser)]
#[command(name = "small_graphs")]
struct Args {
    /// Fail if the graph of ADDs takes longer than 60 µs.
    #[arg(long)]
    check: bool,

    /// Passed by `cargo bench`, but not by `cargo test`.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let runs = if args.bench { 200 } else { 1 };
    let micros = measure(2, adds, runs, Duration::ZERO)?.median;
    println!("{ADDS} dependent ADDs of 64 f32: {micros:.1} µs");
    let shortest = |threads, pause| {
        let runs = if pause > Duration::ZERO { runs.div_ceil(5) } else { runs };
        measure(threads, products, runs, pause).map(|times| times.shortest)
    };
    let (alone, together) = (shortest(1, Duration::ZERO)?, shortest(2, Duration::ZERO)?);
    let barrier = (together - alone) / PRODUCTS as f64;
    println!("{PRODUCTS} products of one unit each: {alone:.0} µs alone, {together:.0} µs with two threads");
    println!("a barrier of two threads: {barrier:.2} µs");
    let (alone_later, together_later) = (shortest(1, PAUSE)?, shortest(2, PAUSE)?);
    println!("after a pause of {PAUSE:?}: {alone_later:.0} µs alone, {together_later:.0} µs with two threads");
    println!("waking a parked worker: {:.0} µs", together_later - together - (alone_later - alone));
    if args.check && micros > MAX_ADDS_MICROS {
        return Err(format!("the ADDs took {micros:.1} µs, {MAX_ADDS_MICROS:.0} at most").into());
    }
    Ok(())
}

/// A chain of ADDs. Each costs too little to be shared, so the leader runs all of them without a barrier.
fn adds(b: &mut Builder) -> Result<(), BuildError> {
    let (mut sum, term) = (b.leaf(F32, [64, 1, 1, 1])?, b.leaf(F32, [64, 1, 1, 1])?);
    for _ in 0..ADDS {
        sum = b.node(Binary::Add, &[Some(sum), Some(term)])?;
    }
    Ok(())
}

/// Products that cost enough to be shared, but whose rows are one unit: a second worker only adds a barrier to each.
fn products(b: &mut Builder) -> Result<(), BuildError> {
    let weights = b.leaf(Q4_0, [2048, 32, 1, 1])?;
    let column = b.leaf(F32, [2048, 1, 1, 1])?;
    for _ in 0..PRODUCTS {
        b.node(MulMat::PLAIN, &[Some(weights), Some(column)])?;
    }
    Ok(())
}

/// Times of runs, in µs.
struct Times {
    /// The least of [`MEDIANS`] medians.
    median: f64,
    shortest: f64,
}

/// Measures [`MEDIANS`] times `runs` runs on a device of `threads` threads, with a pause before each run.
fn measure(
    threads: usize,
    build: fn(&mut Builder) -> Result<(), BuildError>,
    runs: usize,
    pause: Duration,
) -> Result<Times, Box<dyn Error>> {
    let device = CpuDevice::new("CPU", threads, MathMode::Fast, MEMORY)?;
    let budget = MemoryBudget::new(MEMORY);
    let mut b = Builder::new();
    build(&mut b)?;
    let graph = Arc::new(b.build());
    let memory = device.alloc(graph.slot_sizes()[0] as u64, &budget)?;
    let bindings: Arc<[Region]> = Arc::from([memory.whole()]);
    let mut queue = device.queue(&budget)?;
    queue.fill(memory.whole(), 0)?;
    let program = device.prepare(graph)?;
    let mut best = Times { median: f64::INFINITY, shortest: f64::INFINITY };
    for _ in 0..MEDIANS {
        let mut times = Vec::with_capacity(runs);
        for _ in 0..runs {
            if pause > Duration::ZERO {
                std::thread::sleep(pause);
            }
            let start = Instant::now();
            queue.run(&program, &bindings)?;
            queue.mark().wait(None)?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        times.sort_by(f64::total_cmp);
        best.median = best.median.min(times[times.len() / 2]);
        best.shortest = best.shortest.min(times[0]);
    }
    Ok(best)
}

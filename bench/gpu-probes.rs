//! Probes of a GPU: measurements that answer what the emulator cannot show. docs/cuda.md lists the questions.

use clap::Parser;
use fanout::cuda::{self, CudaDevice, Gpu};
use fanout::device::{Buffer, CopyOutcome, Device, DeviceError, MemoryBudget, Program, Queue, Region, UploadSource};
use fanout::graph::{BuildError, Builder, Graph};
use fanout::ops::mul_mat::MulMat;
use fanout::ops::unary::Unary;
use fanout::tensor::DType::{F16, F32};
use fanout_bench::cases::{self, Sizes, fill};
use fanout_bench::timing::{TIMEOUT, finish, quantile, sample};
use serde_json::{Value, json};
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Measures what the CUDA emulator cannot show. Prints a line of JSON for each probe.
#[derive(Parser)]
#[command(name = "gpu-probes", version = fanout::VERSION, max_term_width = 100)]
struct Args {
    /// The GPU, by the number of the CUDA driver.
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    device: usize,

    /// Only these probes, separated by commas: modules, repeats, graphs, ahead, turns, interference, allocations,
    /// transfers, peers.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    probes: Vec<String>,

    /// Smoke test: small sizes; always on with an emulated GPU.
    #[arg(long)]
    smoke: bool,
}

type Outcome<T> = Result<T, Box<dyn Error>>;

type Probe = (&'static str, fn(&Lab) -> Outcome<Value>);

const PROBES: [Probe; 9] = [
    ("modules", modules), // the first, because later ones load modules
    ("repeats", repeats),
    ("graphs", graphs),
    ("ahead", ahead),
    ("turns", turns),
    ("interference", interference),
    ("allocations", allocations),
    ("transfers", transfers),
    ("peers", peers),
];

fn main() -> ExitCode {
    match probe(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("gpu-probes: {e}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the probes; true if none failed.
fn probe(args: &Args) -> Outcome<bool> {
    if let Some(unknown) = args.probes.iter().find(|name| PROBES.iter().all(|(probe, _)| probe != name)) {
        return Err(format!("there is no probe {unknown}").into());
    }
    let gpus = cuda::detect()?;
    let gpu = gpus.iter().find(|gpu| gpu.ordinal == args.device);
    let gpu = gpu.ok_or_else(|| format!("no GPU {}: {} GPUs were detected", args.device, gpus.len()))?;
    let begin = Instant::now();
    let device = open(gpu)?;
    let lab =
        Lab { opened: begin.elapsed(), device, smoke: args.smoke || cuda::emulated_counts().is_some(), gpus: &gpus };
    let mut all_succeeded = true;
    for (name, run) in PROBES.iter().filter(|(name, _)| args.probes.is_empty() || args.probes.iter().any(|p| p == name))
    {
        let begin = Instant::now();
        let line = match run(&lab) {
            Ok(answer) => json!({"probe": name, "answer": answer, "seconds": begin.elapsed().as_secs_f64()}),
            Err(e) => {
                all_succeeded = false;
                json!({"probe": name, "error": e.to_string(), "seconds": begin.elapsed().as_secs_f64()})
            }
        };
        println!("{line}");
    }
    Ok(all_succeeded)
}

fn open(gpu: &Gpu) -> Result<Arc<CudaDevice>, DeviceError> {
    CudaDevice::new(&format!("CUDA{}", gpu.ordinal), gpu, gpu.memory)
}

/// The GPU under test.
struct Lab<'a> {
    gpus: &'a [Gpu],
    device: Arc<CudaDevice>,
    /// Time to open the device.
    opened: Duration,
    smoke: bool,
}

impl Lab<'_> {
    /// A number of iterations or bytes, smaller for smoke tests.
    fn size(&self, full: usize, smoke: usize) -> usize {
        if self.smoke { smoke } else { full }
    }

    fn seconds(&self, full: f64) -> Duration {
        Duration::from_secs_f64(if self.smoke { 0.05 } else { full })
    }
}

/// A session of its own on the GPU, with a program and its memory.
struct Session {
    queue: Box<dyn Queue>,
    program: Program,
    bindings: Arc<[Region]>,
    _memory: Buffer,
}

impl Session {
    fn new(device: &CudaDevice, graph: &Arc<Graph>) -> Result<Session, DeviceError> {
        // Sessions take turns by their budgets.
        let budget = MemoryBudget::for_client(u64::MAX);
        let memory = device.alloc(graph.slot_sizes()[0] as u64, &budget)?;
        let (queue, program) = (device.queue(&budget)?, device.prepare(Arc::clone(graph))?);
        Ok(Session { queue, program, bindings: Arc::from([memory.whole()]), _memory: memory })
    }

    fn submit(&mut self) -> Result<(), DeviceError> {
        self.queue.run(&self.program, &self.bindings)
    }

    fn run(&mut self) -> Result<(), DeviceError> {
        self.submit()?;
        finish(&self.queue.mark())
    }
}

/// A graph of `launches` nodes that scale `n` floats in place.
fn chain(n: usize, launches: usize) -> Result<Arc<Graph>, BuildError> {
    let mut b = Builder::new();
    let x = b.leaf(F32, [n, 1, 1, 1])?;
    let Some(desc) = b.tensor(x).map(|tensor| tensor.desc) else { return Ok(Arc::new(b.build())) };
    let mut last = x;
    for _ in 0..launches {
        let onto = b.view(x, desc, 0)?;
        last = b.node_into(Unary::Scale { scale: 1.0, bias: 1.0 }, &[Some(last)], onto)?;
    }
    Ok(Arc::new(b.build()))
}

/// Products of a prompt of 512 tokens with `nodes` weight matrices of 4096 × 4096.
fn prompt(lab: &Lab, nodes: usize) -> Result<Arc<Graph>, BuildError> {
    let (width, tokens) = (lab.size(4096, 64), lab.size(512, 32));
    let mut b = Builder::new();
    let weights = b.leaf(F16, [width, width, 1, 1])?;
    let mut x = b.leaf(F32, [width, tokens, 1, 1])?;
    for _ in 0..nodes {
        x = b.node(MulMat::PLAIN, &[Some(weights), Some(x)])?;
    }
    Ok(Arc::new(b.build()))
}

/// The graphs of the smallest cases that the GPU has kernels for, by name.
fn small_cases(lab: &Lab) -> Outcome<Vec<(cases::Case, Arc<Graph>)>> {
    let mut found = Vec::new();
    for case in cases::all(&Sizes::SMOKE) {
        let graph = Arc::new(case.single()?.b.build());
        let mut nodes = graph.nodes().iter().filter_map(|node| graph.node_view(node));
        if nodes.all(|node| lab.device.support(node).runs()) {
            found.push((case, Arc::clone(&graph)));
        }
    }
    Ok(found)
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// How long the driver compiles the PTX, and how much memory the modules take: the first and the second run of each case. With
/// an empty CUDA_CACHE_PATH the driver compiles; with the same folder again it reads its cache.
fn modules(lab: &Lab) -> Outcome<Value> {
    let free = lab.device.memory()?.free;
    let (mut first, mut second) = (Vec::new(), Duration::ZERO);
    for (case, graph) in small_cases(lab)? {
        let begin = Instant::now();
        Session::new(&lab.device, &graph)?.run()?;
        first.push((begin.elapsed(), case.name()));
        let begin = Instant::now();
        Session::new(&lab.device, &graph)?.run()?;
        second += begin.elapsed();
    }
    let all: Duration = first.iter().map(|(time, _)| *time).sum();
    first.sort_by_key(|(time, _)| std::cmp::Reverse(*time));
    let longest: Vec<_> =
        first.iter().take(5).map(|(time, name)| json!({"ms": milliseconds(*time), "case": name})).collect();
    Ok(json!({
        "open_ms": milliseconds(lab.opened), "cases": first.len(), "first_runs_ms": milliseconds(all),
        "second_runs_ms": milliseconds(second), "longest": longest,
        "memory_bytes": free.saturating_sub(lab.device.memory()?.free),
    }))
}

/// Whether repeated runs give equal bytes. A missing fence or a race in global memory shows as a difference.
fn repeats(lab: &Lab) -> Outcome<Value> {
    let budget = MemoryBudget::new(u64::MAX);
    let (runs, mut checked, mut differing) = (lab.size(200, 2), 0, Vec::new());
    for (case, graph) in small_cases(lab)? {
        let memory = lab.device.alloc(graph.slot_sizes()[0] as u64, &budget)?;
        let (mut queue, program) = (lab.device.queue(&budget)?, lab.device.prepare(Arc::clone(&graph))?);
        let (bindings, contents) = (Arc::from([memory.whole()]), case.single()?.contents);
        let mut first = None;
        for _ in 0..runs {
            // Ops in place change their inputs.
            fill(&mut *queue, &bindings, &graph, &contents)?;
            queue.run(&program, &bindings)?;
            let bytes = queue.download(memory.whole())?.wait(Some(Instant::now() + TIMEOUT))?;
            if *first.get_or_insert_with(|| bytes.clone()) != bytes {
                differing.push(case.name());
                break;
            }
        }
        checked += 1;
    }
    if !differing.is_empty() {
        return Err(
            format!("{} of {checked} cases differ between runs: {}", differing.len(), differing.join("; ")).into()
        );
    }
    Ok(json!({"cases": checked, "runs": runs}))
}

/// Memory of a program that is replayed, for each of its launches.
fn graphs(lab: &Lab) -> Outcome<Value> {
    let launches = lab.size(5000, 100);
    let graph = chain(1024, launches)?;
    Session::new(&lab.device, &chain(1024, 1)?)?.run()?; // loads the module
    let free = lab.device.memory()?.free;
    let mut session = Session::new(&lab.device, &graph)?;
    let mut times = Vec::new();
    for _ in 0..5 {
        let begin = Instant::now();
        session.run()?;
        times.push(milliseconds(begin.elapsed()));
    }
    let bytes = free.saturating_sub(lab.device.memory()?.free);
    Ok(json!({"launches": launches, "bytes_per_launch": bytes as f64 / launches as f64, "runs_ms": times}))
}

/// How many launches the driver accepts ahead of the GPU, from the time of the submission relative to the end of the work; and
/// how long an aborted queue still runs.
fn ahead(lab: &Lab) -> Outcome<Value> {
    let launches = lab.size(10_000, 200);
    let graph = chain(lab.size(1 << 22, 1 << 10), launches)?;
    let mut session = Session::new(&lab.device, &graph)?;
    let begin = Instant::now();
    session.submit()?;
    let submitted = begin.elapsed();
    finish(&session.queue.mark())?;
    let done = begin.elapsed();
    // A fresh session, because the next runs of a program are replays.
    let mut session = Session::new(&lab.device, &graph)?;
    let Some(aborter) = session.queue.aborter() else { return Err("the queue cannot be aborted".into()) };
    let until_failed = std::thread::scope(|scope| {
        let run = scope.spawn(move || {
            let _ended = session.submit();
            let _failed = finish(&session.queue.mark());
            Instant::now()
        });
        std::thread::sleep(done / 4);
        let aborted = Instant::now();
        aborter.abort();
        run.join().map(|failed| failed.saturating_duration_since(aborted))
    });
    let until_failed = until_failed.map_err(|_| "the submitting thread panicked")?;
    let share = 1.0 - submitted.as_secs_f64() / done.as_secs_f64();
    Ok(json!({
        "launches": launches, "submitted_ms": milliseconds(submitted), "done_ms": milliseconds(done),
        "launches_ahead": (share * launches as f64).round(), "failed_ms_after_abort": milliseconds(until_failed),
    }))
}

/// Times in milliseconds of runs of a session until `until` says so, sorted.
fn decode(session: &mut Session, until: impl Fn() -> bool) -> Result<Vec<f64>, DeviceError> {
    let mut times = Vec::new();
    while !until() {
        let begin = Instant::now();
        session.run()?;
        times.push(milliseconds(begin.elapsed()));
    }
    times.sort_by(f64::total_cmp);
    Ok(times)
}

fn percentiles(sorted: &[f64]) -> Value {
    json!({"p50_ms": quantile(sorted, 0.5), "p99_ms": quantile(sorted, 0.99)})
}

/// A token of a small model: 300 launches.
fn token(lab: &Lab) -> Result<Arc<Graph>, BuildError> {
    chain(4096, lab.size(300, 10))
}

fn after(time: Duration) -> impl Fn() -> bool + Copy {
    let until = Instant::now() + time;
    move || Instant::now() > until
}

/// Tokens per second of a session alone, and of two sessions at the same time.
fn turns(lab: &Lab) -> Outcome<Value> {
    let (graph, time) = (token(lab)?, lab.seconds(2.0));
    let mut sessions = [Session::new(&lab.device, &graph)?, Session::new(&lab.device, &graph)?];
    for session in &mut sessions {
        (0..3).try_for_each(|_| session.run())?;
    }
    // A session counts as alone after 50 ms without work of another one.
    std::thread::sleep(Duration::from_millis(100));
    let [one, _] = &mut sessions;
    let alone = decode(one, after(time))?.len() as f64 / time.as_secs_f64();
    let until = after(time);
    let both = std::thread::scope(|scope| {
        let threads: Vec<_> = sessions.iter_mut().map(|s| scope.spawn(move || decode(s, until))).collect();
        threads.into_iter().map(|thread| thread.join()).collect::<Vec<_>>()
    });
    let mut rates = Vec::new();
    for times in both {
        rates.push(times.map_err(|_| "a session panicked")??.len() as f64 / time.as_secs_f64());
    }
    let (least, most) =
        (rates.iter().copied().fold(f64::INFINITY, f64::min), rates.iter().copied().fold(0.0, f64::max));
    Ok(json!({
        "alone_per_s": alone, "together_per_s": rates, "together_of_alone": rates.iter().sum::<f64>() / alone,
        "least_of_most": least / most,
    }))
}

/// Time of a token alone, and beside a session that evaluates prompts without a break.
fn interference(lab: &Lab) -> Outcome<Value> {
    let time = lab.seconds(2.0);
    let mut session = Session::new(&lab.device, &token(lab)?)?;
    let mut heavy = Session::new(&lab.device, &prompt(lab, lab.size(32, 2))?)?;
    (0..3).try_for_each(|_| session.run())?;
    (0..3).try_for_each(|_| heavy.run())?;
    let alone = decode(&mut session, after(time))?;
    let prompt = decode(&mut heavy, after(time))?;
    let stop = AtomicBool::new(false);
    let beside = std::thread::scope(|scope| {
        let prompts = scope.spawn(|| decode(&mut heavy, || stop.load(Ordering::Relaxed)));
        let beside = decode(&mut session, after(time));
        stop.store(true, Ordering::Relaxed);
        prompts.join().map(|prompts| (beside, prompts))
    });
    let (beside, prompts) = beside.map_err(|_| "a session panicked")?;
    Ok(json!({
        "token_alone": percentiles(&alone), "prompt_alone": percentiles(&prompt),
        "token_beside_prompts": percentiles(&beside?), "prompt_beside_tokens": percentiles(&prompts?),
    }))
}

/// Time of a token alone, and beside a session that allocates and frees device memory and pinned memory without a break.
fn allocations(lab: &Lab) -> Outcome<Value> {
    let (time, bytes) = (lab.seconds(2.0), lab.size(64 << 20, 1 << 20) as u64);
    let mut session = Session::new(&lab.device, &token(lab)?)?;
    (0..3).try_for_each(|_| session.run())?;
    let alone = decode(&mut session, after(time))?;
    let until = after(time);
    let both = std::thread::scope(|scope| {
        let allocating = scope.spawn(|| {
            let (budget, mut rounds) = (MemoryBudget::for_client(u64::MAX), 0);
            while !until() {
                let _memory = lab.device.alloc(bytes, &budget)?;
                let _pinned = (&*lab.device as &dyn Device).alloc_host(bytes, &budget)?;
                rounds += 1;
            }
            Ok::<u64, DeviceError>(rounds)
        });
        let beside = decode(&mut session, until);
        allocating.join().map(|rounds| (beside, rounds))
    });
    let (beside, rounds) = both.map_err(|_| "a session panicked")?;
    Ok(json!({
        "token_alone": percentiles(&alone), "token_beside_allocations": percentiles(&beside?),
        "allocations_per_s": rounds? as f64 / time.as_secs_f64(),
    }))
}

/// Rates of uploads and downloads, from pageable and from pinned memory, and the time to allocate pinned memory. With
/// confidential computing, the driver encrypts each transfer, and pinned memory is not faster.
fn transfers(lab: &Lab) -> Outcome<Value> {
    let bytes = lab.size(256 << 20, 4 << 20);
    let budget = MemoryBudget::new(u64::MAX);
    let (buffer, mut queue) = (lab.device.alloc(bytes as u64, &budget)?, lab.device.queue(&budget)?);
    let begin = Instant::now();
    let pinned = (&*lab.device as &dyn Device).alloc_host(bytes as u64, &budget)?;
    let allocated = begin.elapsed();
    let pageable = vec![1u8; bytes];
    let time = lab.seconds(0.5);
    let rate = |times: &[f64]| bytes as f64 / 1e9 / quantile(times, 0.5);
    let mut upload = |from: &[u8]| {
        let times = sample(time, || {
            queue.upload(buffer.whole(), None, UploadSource::Borrowed(from))?;
            finish(&queue.mark())
        });
        times.map(|times| rate(&times))
    };
    let (from_pageable, from_pinned) = (upload(&pageable)?, upload(&pinned)?);
    let download = sample(time, || queue.download(buffer.whole())?.wait(Some(Instant::now() + TIMEOUT)).map(drop))?;
    Ok(json!({
        "upload_pageable_gb_per_s": from_pageable, "upload_pinned_gb_per_s": from_pinned,
        "download_gb_per_s": rate(&download), "bytes": bytes, "alloc_pinned_ms": milliseconds(allocated),
    }))
}

/// Copies a pattern between each two GPUs, compares what arrives, and measures the rate.
fn peers(lab: &Lab) -> Outcome<Value> {
    let (bytes, budget) = (lab.size(64 << 20, 1 << 20), MemoryBudget::new(u64::MAX));
    let devices = lab.gpus.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let pattern: Vec<u8> = (0..bytes).map(|i| (i ^ i >> 8 ^ i >> 16) as u8).collect();
    let (mut pairs, mut wrong) = (Vec::new(), Vec::new());
    for (i, from) in devices.iter().enumerate() {
        for (j, to) in devices.iter().enumerate().filter(|&(j, _)| j != i) {
            let (source, target) = (from.alloc(bytes as u64, &budget)?, to.alloc(bytes as u64, &budget)?);
            let mut sender = from.queue(&budget)?;
            sender.upload(source.whole(), None, UploadSource::Borrowed(&pattern))?;
            let sent = sender.mark();
            let mut queue = to.queue(&budget)?;
            let mut outcome = CopyOutcome::Submitted;
            let times = sample(lab.seconds(0.2), || {
                outcome = queue.copy_from(source.whole(), target.whole(), Some(&sent))?;
                finish(&queue.mark())
            })?;
            if outcome == CopyOutcome::Unreachable {
                pairs.push(json!({"from": i, "to": j, "reachable": false}));
                continue;
            }
            let arrived = queue.download(target.whole())?.wait(Some(Instant::now() + TIMEOUT))?;
            if arrived != pattern {
                wrong.push(format!("{i} to {j}"));
            }
            let gb_per_s = bytes as f64 / 1e9 / quantile(&times, 0.5);
            pairs.push(
                json!({"from": i, "to": j, "reachable": true, "right": arrived == pattern, "gb_per_s": gb_per_s}),
            );
        }
    }
    if !wrong.is_empty() {
        return Err(format!("copies between GPUs arrive wrong: {}", wrong.join(", ")).into());
    }
    Ok(json!({"pairs": pairs}))
}

//! Benchmark of the CUDA device: checks every kernel against the CPU device on the shapes of a real model, then times it and
//! compares the time with the GPU's roofline.

use clap::Parser;
use fanout::cpu::{CpuDevice, MathMode};
use fanout::cuda::{self, CudaDevice, Gpu, gpu_rates};
use fanout::device::{Device, MemoryBudget, Queue, Region};
use fanout::graph::{Graph, TensorId};
use fanout::tensor::DType;
use fanout::tensor::quant::dequantiser;
use fanout_bench::cases::{self, Case, Draft, Kind, Sizes, fill};
use fanout_bench::timing::{TIMEOUT, finish, quantile, sample};
use serde_json::{Value, json};
use std::error::Error;
use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

mod token;

/// Checks the kernels of a GPU against the CPU, then times them on the shapes of an 8B model. Each row shows the error relative
/// to the CPU (NMSE), the time of one node (median, 10th and 90th percentile), operations and bytes per second, and the share
/// of the roof that bounds the case: the measured copy bandwidth, or the arithmetic of the multiprocessors at peak frequency.
/// On an emulated GPU, rows show the kernels' instruction and byte counts instead of times.
#[derive(Parser)]
#[command(name = "kernel-bench", version = fanout::VERSION, max_term_width = 100)]
struct Args {
    /// The GPU, by the number of the CUDA driver.
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    device: usize,

    /// Only run cases that contain this text in `op type shape`.
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,

    /// Seconds of timing per case.
    #[arg(long, value_name = "S", default_value_t = 0.2)]
    seconds: f64,

    /// Smoke test: small sizes; always on with an emulated GPU.
    #[arg(long)]
    smoke: bool,

    /// Time all layers of models instead of single kernels: steps of decoding and prompts, with programmatic launch and without it.
    #[arg(long)]
    models: bool,

    /// Write the results to this file, each as a line of JSON once it is known.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Write the table to this file as Markdown.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
}

/// Size in bytes of the copy that measures the bandwidth.
const COPY_BYTES: u64 = 1 << 30;

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    match bench(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("kernel-bench: {e}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the benchmark; true if all results were correct.
fn bench(args: &Args) -> Outcome<bool> {
    let gpus = cuda::detect()?;
    let gpu = gpus.iter().find(|gpu| gpu.ordinal == args.device);
    let gpu = gpu.ok_or_else(|| format!("no GPU {}: {} GPUs were detected", args.device, gpus.len()))?;
    let emulated = cuda::emulated_counts().is_some();
    let smoke = args.smoke || emulated;
    let bench = Bench::new(gpu)?;
    println!("fanout {}, {gpu}", fanout::VERSION);
    let roofs = if emulated { None } else { Some(Roofs::measure(&bench, gpu)?) };
    if let Some(roofs) = &roofs {
        println!("{}", roofs.line());
    }
    let mut json = args.json.as_ref().map(File::create).transpose()?;
    let mut report = |row: &Value| -> Outcome<()> {
        Ok(json.as_mut().map_or(Ok(()), |file| file.write_all(format!("{row}\n").as_bytes()))?)
    };
    report(&json!({"version": fanout::VERSION, "gpu": gpu.to_string(), "roofs": roofs.as_ref().map(Roofs::json)}))?;
    if args.models {
        return token::run(&bench, gpu, roofs.as_ref().filter(|_| !smoke), &args.filter, args.seconds, &mut report);
    }
    let sizes = if smoke { Sizes::SMOKE } else { Sizes::MODEL };
    let mut rows = Vec::new();
    println!("\n{}", if emulated { Row::counts_header() } else { Row::header() });
    for case in cases::all(&sizes).into_iter().filter(|case| case.name().contains(&args.filter)) {
        if !bench.supports(&case)? {
            continue; // the CPU runs these ops and types
        }
        let row = bench.row(case, roofs.as_ref(), args.seconds)?;
        println!("{}", row.line());
        report(&row.json())?;
        rows.push(row);
    }
    if rows.is_empty() {
        return Err(format!("no case contains `{}`", args.filter).into());
    }
    let wrong: Vec<_> = rows.iter().filter(|row| !row.is_correct()).map(|row| row.case.name()).collect();
    if let Some(path) = &args.markdown {
        let head = if emulated { Row::counts_header() } else { Row::header() };
        let lines: Vec<_> = rows.iter().map(Row::line).collect();
        let roofs = roofs.as_ref().map_or(String::new(), Roofs::line);
        std::fs::write(path, format!("{gpu}\n\n{roofs}\n\n```text\n{head}\n{}\n```\n", lines.join("\n")))?;
    }
    if !wrong.is_empty() {
        eprintln!("kernel-bench: wrong results: {}", wrong.join("; "));
    }
    Ok(wrong.is_empty())
}

/// The GPU, and the CPU device as the reference.
struct Bench {
    gpu: Arc<CudaDevice>,
    cpu: Arc<CpuDevice>,
    budget: Arc<MemoryBudget>,
}

/// The GPU's roofline: upper limits of bytes and operations per second.
struct Roofs {
    /// Bytes read plus written per second by a device-to-device copy.
    copy: f64,
    /// Limits of the multiprocessors at peak frequency; None for an architecture without a row in the table of rates.
    arithmetic: Option<ArithmeticRoofs>,
}

/// Multiplications and additions per second.
struct ArithmeticRoofs {
    /// f32 without tensor cores.
    f32: f64,
    /// Tensor cores: f16 with f32 sums.
    f16: f64,
    /// Tensor cores: tf32 with f32 sums, if the GPU has them.
    tf32: Option<f64>,
    /// Tensor cores: int8 with 32-bit sums.
    int8: f64,
}

impl Roofs {
    fn measure(bench: &Bench, gpu: &Gpu) -> Outcome<Roofs> {
        let bytes = COPY_BYTES.min(gpu.memory / 8);
        let (from, to) = (bench.gpu.alloc(bytes, &bench.budget)?, bench.gpu.alloc(bytes, &bench.budget)?);
        let mut queue = bench.gpu.queue(&bench.budget)?;
        let times = sample(Duration::from_millis(500), || {
            let _submitted = queue.copy_from(from.whole(), to.whole(), None)?;
            finish(&queue.mark())
        })?;
        Ok(Roofs { copy: 2.0 * bytes as f64 / times[times.len() / 2], arithmetic: Roofs::arithmetic(gpu) })
    }

    fn arithmetic(gpu: &Gpu) -> Option<ArithmeticRoofs> {
        let rates = gpu_rates(gpu.capability, &gpu.name)?;
        // A multiply-add is two operations.
        let per_second =
            |rate: u32| 2.0 * f64::from(rate) * f64::from(gpu.multiprocessors) * f64::from(gpu.clock_khz) * 1e3;
        Some(ArithmeticRoofs {
            f32: per_second(rates.f32),
            f16: per_second(rates.f16),
            tf32: rates.tf32.map(per_second),
            int8: per_second(rates.int8),
        })
    }

    fn line(&self) -> String {
        let giga = |rate: f64| format!("{:.0}", rate / 1e9);
        let copy = format!("copy {} GB/s (measured)", giga(self.copy));
        let Some(ArithmeticRoofs { f32, f16, tf32, int8 }) = self.arithmetic else {
            return format!("{copy}; arithmetic unknown: src/cuda/gpu_rates.rs has no row for this capability");
        };
        let tf32 = tf32.map_or("none".to_owned(), giga);
        format!(
            "{copy}; f32 {}, tensor cores f16 {}, tf32 {tf32}, int8 {} Gop/s (multiprocessors at peak frequency)",
            giga(f32),
            giga(f16),
            giga(int8)
        )
    }

    fn json(&self) -> Value {
        let arithmetic = self.arithmetic.as_ref();
        json!({
            "copy_bytes_per_s": self.copy,
            "f32_ops_per_s": arithmetic.map(|roofs| roofs.f32),
            "f16_ops_per_s": arithmetic.map(|roofs| roofs.f16),
            "tf32_ops_per_s": arithmetic.and_then(|roofs| roofs.tf32),
            "int8_ops_per_s": arithmetic.map(|roofs| roofs.int8),
        })
    }

    /// The minimum time of a case in seconds, and the roof that bounds it. The arithmetic roof is that of the instructions of
    /// the kernels: tf32, or f32 on a GPU without it.
    fn floor(&self, case: &Case) -> (f64, &'static str) {
        let bytes = (case.read + case.written) as f64 / self.copy;
        let Some(arithmetic) = &self.arithmetic else { return (bytes, "copy") };
        let (rate, roof) = arithmetic.tf32.map_or((arithmetic.f32, "f32"), |rate| (rate, "tf32"));
        let ops = case.ops as f64 / rate;
        if ops > bytes { (ops, roof) } else { (bytes, "copy") }
    }
}

/// A graph with its memory on a device and its leaves filled.
struct Loaded {
    graph: Arc<Graph>,
    region: Region,
    queue: Box<dyn Queue>,
}

impl Bench {
    fn new(gpu: &Gpu) -> Outcome<Bench> {
        let (threads, memory) = (std::thread::available_parallelism()?.get(), 16 << 30);
        let device = CudaDevice::new(&format!("CUDA{}", gpu.ordinal), gpu, gpu.memory)?;
        Ok(Bench {
            gpu: device,
            cpu: CpuDevice::new("CPU", threads, MathMode::Exact, memory)?,
            budget: MemoryBudget::new(u64::MAX),
        })
    }

    /// Whether the GPU has kernels for a case.
    fn supports(&self, case: &Case) -> Outcome<bool> {
        let graph = case.single()?.b.build();
        let mut nodes = graph.nodes().iter().filter_map(|node| graph.node_view(node));
        Ok(nodes.all(|node| self.gpu.support(node).runs()))
    }

    fn load(&self, device: &dyn Device, draft: Draft) -> Outcome<Loaded> {
        let graph = Arc::new(draft.b.build());
        let region = device.alloc(graph.slot_sizes()[0] as u64, &self.budget)?.whole();
        let mut queue = device.queue(&self.budget)?;
        fill(&mut *queue, std::slice::from_ref(&region), &graph, &draft.contents)?;
        Ok(Loaded { graph, region, queue })
    }

    /// The results of all nodes of a case, for one set of data.
    fn results(&self, device: &dyn Device, case: &Case) -> Outcome<Vec<f32>> {
        let Loaded { graph, region, mut queue } = self.load(device, case.single()?)?;
        let program = device.prepare(Arc::clone(&graph))?;
        queue.run(&program, &Arc::from([region.clone()]))?;
        let mut all = Vec::new();
        for node in graph.nodes() {
            all.extend(values(&graph, node.dst, &mut *queue, &region)?);
        }
        Ok(all)
    }

    fn row(&self, case: Case, roofs: Option<&Roofs>, seconds: f64) -> Outcome<Row> {
        let name = case.name();
        let with_name = |e: Box<dyn Error>| -> Box<dyn Error> { format!("{name}: {e}").into() };
        let want = self.results(&*self.cpu, &case).map_err(with_name)?;
        let before = counts();
        let got = self.results(&*self.gpu, &case).map_err(with_name)?;
        let counted = counts().minus(&before);
        let error = nmse(&got, &want);
        let times = match roofs {
            None => Vec::new(),
            Some(_) => self.times(&case, seconds).map_err(with_name)?,
        };
        let floor = roofs.map(|roofs| roofs.floor(&case));
        Ok(Row { case, error, times, floor, counted })
    }

    /// Sorted times of one node, in seconds.
    fn times(&self, case: &Case, seconds: f64) -> Outcome<Vec<f64>> {
        let Loaded { graph, region, mut queue } = self.load(&*self.gpu, case.draft()?)?;
        let program = self.gpu.prepare(Arc::clone(&graph))?;
        let bindings: Arc<[Region]> = Arc::from([region]);
        let times = sample(Duration::from_secs_f64(seconds), || {
            queue.run(&program, &bindings)?;
            finish(&queue.mark())
        })?;
        Ok(times.into_iter().map(|time| time / graph.nodes().len() as f64).collect())
    }
}

/// Downloads the values of a contiguous tensor as f32.
fn values(graph: &Graph, id: TensorId, queue: &mut dyn Queue, region: &Region) -> Outcome<Vec<f32>> {
    let tensor = graph.tensor(id).ok_or("the tensor is not in the graph")?;
    let (desc, place) = (tensor.desc, tensor.place.ok_or("the tensor has no memory")?);
    let bytes = queue
        .download(region.subregion(place.offset as u64, desc.extent() as u64)?)?
        .wait(Some(Instant::now() + TIMEOUT))?;
    let mut values = vec![0.0; desc.elements()];
    if desc.dtype() == DType::I32 {
        values.iter_mut().zip(bytes.as_chunks::<4>().0).for_each(|(v, b)| *v = i32::from_le_bytes(*b) as f32);
    } else {
        dequantiser(desc.dtype()).ok_or("the type does not convert to f32")?(&bytes, &mut values);
    }
    Ok(values)
}

/// Normalised mean square error. Equal bits count as equal, so matching infinities do not give NaN.
fn nmse(got: &[f32], want: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let pairs = || got.iter().zip(want).filter(|(g, w)| g.to_bits() != w.to_bits());
    let error: f64 = pairs().map(|(&g, &w)| square(f64::from(g) - f64::from(w))).sum();
    let power: f64 = want.iter().filter(|w| w.is_finite()).map(|&w| square(f64::from(w))).sum();
    if error == 0.0 { 0.0 } else { error / power.max(1e-30) }
}

/// Counters of the emulated GPU: lane instructions, bytes accessed, bytes in the touched sectors, and distinct bytes (the
/// minimum traffic).
#[derive(Clone, Copy, Default)]
struct Counts([u64; 4]);

impl Counts {
    fn minus(self, before: &Counts) -> Counts {
        Counts(std::array::from_fn(|i| self.0[i] - before.0[i]))
    }
}

/// The counters summed over all kernels so far. All are 0 on a real GPU, and if CUDAEMU_COUNTS is not set.
fn counts() -> Counts {
    let json: Value = cuda::emulated_counts().and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
    let mut sum = Counts::default();
    for kernel in json["kernels"].as_object().into_iter().flat_map(|kernels| kernels.values()) {
        let number = |value: &Value| value.as_u64().unwrap_or(0);
        let both = |field: &str| number(&kernel["global_read"][field]) + number(&kernel["global_written"][field]);
        let distinct = number(&kernel["global_read_distinct_bytes"]) + number(&kernel["global_written_distinct_bytes"]);
        let counts = [number(&kernel["lane_instructions"]), both("bytes"), 32 * both("sectors"), distinct];
        sum.0.iter_mut().zip(counts).for_each(|(sum, n)| *sum += n);
    }
    sum
}

/// The results of a case.
struct Row {
    case: Case,
    /// NMSE relative to the CPU device in exact mode.
    error: f64,
    /// Sorted times in seconds; empty on an emulated GPU.
    times: Vec<f64>,
    floor: Option<(f64, &'static str)>,
    counted: Counts,
}

impl Row {
    fn is_correct(&self) -> bool {
        // Tensor cores round activations, and also block-quantised weights with more bits than the tensor core type.
        let bound = if self.case.ops > 0 && self.case.kind != Kind::F32 { 1e-4 } else { 1e-6 };
        self.error <= bound
    }

    fn quantile(&self, share: f64) -> f64 {
        quantile(&self.times, share)
    }

    fn header() -> String {
        format!(
            "{:14} {:8} {:40} {:>8} {:>10} {:>21} {:>9} {:>7} share of its roof",
            "op", "type", "shape", "NMSE", "median us", "[p10-p90]", "Gop/s", "GB/s"
        )
    }

    fn counts_header() -> String {
        format!(
            "{:14} {:8} {:40} {:>8} {:>12} {:>12} {:>12} {:>12}",
            "op", "type", "shape", "NMSE", "lane insts", "bytes", "in sectors", "least bytes"
        )
    }

    fn line(&self) -> String {
        let Row { case, error, floor, counted, .. } = self;
        let head = format!("{:14} {:8} {:40} {error:>8.1e}", case.op, case.dtype, case.shape);
        let wrong = if self.is_correct() { "" } else { "  WRONG" };
        let Some((floor, roof)) = floor else {
            let [lanes, bytes, sectors, least] = counted.0;
            return format!("{head} {lanes:>12} {bytes:>12} {sectors:>12} {least:>12}{wrong}");
        };
        let median = self.quantile(0.5);
        let spread = format!("[{:.1}-{:.1}]", self.quantile(0.1) * 1e6, self.quantile(0.9) * 1e6);
        let rate = |units: usize| units as f64 / median / 1e9;
        let (ops, bytes, share) = (rate(case.ops), rate(case.read + case.written), floor / median * 100.0);
        format!("{head} {:>10.1} {spread:>21} {ops:>9.1} {bytes:>7.1} {share:3.0}% of {roof}{wrong}", median * 1e6)
    }

    fn json(&self) -> Value {
        let Row { case, error, floor, counted, .. } = self;
        let [lanes, bytes, sectors, least] = counted.0;
        let counts = json!({"lane_instructions": lanes, "bytes": bytes, "sector_bytes": sectors, "least_bytes": least});
        let us = |share| self.quantile(share) * 1e6;
        let times = json!({"p10_us": us(0.1), "median_us": us(0.5), "p90_us": us(0.9), "samples": self.times.len()});
        json!({
            "op": case.op, "type": case.dtype, "shape": case.shape, "nmse": error, "right": self.is_correct(),
            "ops": case.ops, "read": case.read, "written": case.written,
            "times": floor.map(|_| times), "counts": (lanes > 0).then_some(counts),
            "floor_us": floor.map(|(time, _)| time * 1e6), "roof": floor.map(|(_, roof)| roof),
        })
    }
}

//! Runs the canonical cases of the static roofline on the emulated GPU and prints, for each case, the counts of the kernels that
//! it launched, as JSON. scripts/roofline.py joins them with the machine code of the same kernels.

use clap::Parser;
use fanout::cuda::{self, CudaDevice, CudaOptions};
use fanout::device::{Device, MemoryBudget};
use fanout_bench::cases::{self, Case, fill};
use serde_json::{Map, Value, json};
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Limit of an emulated kernel and of a run: on a busy machine they take minutes.
const TIMEOUT: Duration = Duration::from_secs(3600);

/// Counts the kernels of the static roofline's canonical cases on an emulated GPU, and prints them as JSON. Run it through
/// `scripts/roofline.sh --write`, which sets the emulator's options.
#[derive(Parser)]
#[command(name = "roofline-counts", version = fanout::VERSION, max_term_width = 100)]
struct Args {
    /// Only cases that contain one of these texts in `op type shape`; all if none is given.
    filters: Vec<String>,
}

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    match count(&Args::parse()) {
        Ok(all) => {
            println!("{all:#}");
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("roofline-counts: {e}");
            ExitCode::FAILURE
        }
    }
}

fn count(args: &Args) -> Outcome<Value> {
    let gpus = cuda::detect()?;
    let gpu = gpus.first().ok_or("no GPU was detected")?;
    kernels()?; // fails if the driver is not the emulator
    // scripts/roofline.py joins the counts with the machine code of the committed PTX, so the device must run that text unchanged.
    let options = CudaOptions { programmatic_launch: false, device_timeout: TIMEOUT, ..CudaOptions::default() };
    let device = CudaDevice::with_options("CUDA0", gpu, |_| gpu.memory, options)?;
    let mut all = Map::new();
    for case in cases::canonical() {
        let name = case.name().trim().to_owned();
        if !args.filters.is_empty() && !args.filters.iter().any(|filter| case.name().contains(filter)) {
            continue;
        }
        let counted = run(&device, &case).map_err(|e| format!("{name}: {e}"))?;
        let bytes = case.read + case.written;
        all.insert(name, json!({"ops": case.ops, "min_bytes": bytes, "kernels": counted}));
    }
    if all.is_empty() {
        return Err(format!("no case contains `{}`", args.filters.join("` or `")).into());
    }
    Ok(Value::Object(all))
}

fn deadline() -> Option<Instant> {
    Some(Instant::now() + TIMEOUT)
}

/// The counts of the kernels that a case launches.
fn run(device: &Arc<CudaDevice>, case: &Case) -> Outcome<Value> {
    let draft = case.single()?;
    let graph = Arc::new(draft.b.build());
    let budget = MemoryBudget::new(u64::MAX);
    let region = device.alloc(graph.slot_sizes()[0] as u64, &budget)?.whole();
    let mut queue = device.queue(&budget)?;
    fill(&mut *queue, std::slice::from_ref(&region), &graph, &draft.contents)?;
    let mut nodes = graph.nodes().iter().filter_map(|node| graph.node_view(node));
    if !nodes.all(|node| device.support(node).runs()) {
        return Err("a node has no CUDA kernel".into());
    }
    let program = device.prepare(Arc::clone(&graph))?;
    queue.mark().wait(deadline())?;
    let bindings: Arc<[_]> = Arc::from([region]);
    // The first run repacks the weights; only later runs are those of a decoder.
    queue.run(&program, &bindings)?;
    queue.mark().wait(deadline())?;
    let before = kernels()?;
    queue.run(&program, &bindings)?;
    queue.mark().wait(deadline())?;
    Ok(kernels()?
        .iter()
        .filter_map(|(name, after)| Some((name.clone(), difference(after, before.get(name))?)))
        .collect())
}

/// The emulator's counts of each kernel since the start.
fn kernels() -> Outcome<Map<String, Value>> {
    let text = cuda::emulated_counts().ok_or("the driver is not the emulator: run scripts/roofline.sh --write")?;
    match serde_json::from_str::<Value>(&text)?["kernels"].take() {
        Value::Object(kernels) => Ok(kernels),
        _ => Err("the emulator's counts have no kernels".into()),
    }
}

/// Counts after a run minus those before; None if the kernel did not run. Numbers are subtracted at all depths, zeros left out.
fn difference(after: &Value, before: Option<&Value>) -> Option<Value> {
    match after {
        Value::Object(fields) => {
            let differences: Map<String, Value> = fields
                .iter()
                .filter_map(|(name, after)| Some((name.clone(), difference(after, before.and_then(|b| b.get(name)))?)))
                .collect();
            (!differences.is_empty()).then_some(Value::Object(differences))
        }
        _ => {
            let number = after.as_u64()? - before.and_then(Value::as_u64).unwrap_or(0);
            (number > 0).then(|| number.into())
        }
    }
}

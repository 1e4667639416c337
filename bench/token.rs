//! `kernel-bench --models`: times of all layers of a model, as replayed CUDA graphs, with programmatic launch and without it. Both
//! must give the same bytes.

use super::{Bench, Loaded, Outcome, Roofs};
use fanout::cuda::{CudaDevice, CudaOptions, Gpu};
use fanout::device::{Device, DeviceError, Region};
use fanout_bench::cases::{Case, LAYERS, Sizes, models};
use fanout_bench::timing::{TIMEOUT, finish, quantile, sample};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Layers of a smoke test.
const SMOKE_LAYERS: usize = 2;

/// Times all models; `report` gets a row at once. True if all results were the same with programmatic launch and without it.
pub(super) fn run(
    bench: &Bench,
    gpu: &Gpu,
    roofs: Option<&Roofs>,
    filter: &str,
    seconds: f64,
    report: &mut dyn FnMut(&Value) -> Outcome<()>,
) -> Outcome<bool> {
    let (sizes, layers) = if roofs.is_some() { (Sizes::MODEL, LAYERS) } else { (Sizes::SMOKE, SMOKE_LAYERS) };
    let plain = CudaOptions { programmatic_launch: false, ..CudaOptions::default() };
    let plain = CudaDevice::with_options(&format!("CUDA{}", gpu.ordinal), gpu, |_| gpu.memory, plain)?;
    let devices: [&dyn Device; 2] = [&*bench.gpu, &*plain];
    let mut same = true;
    for (case, tokens) in models(&sizes, layers).iter().filter(|(case, _)| case.name().contains(filter)) {
        let mut runs = Vec::new();
        for device in devices {
            match measure(bench, device, case, roofs.map(|_| seconds)) {
                Ok(run) => runs.push(run),
                Err(e) if is_out_of_memory(&*e) => break,
                Err(e) => return Err(format!("{}: {e}", case.name()).into()),
            }
        }
        let [with, without] = &*runs else {
            println!("{} left out: the GPU has too little memory", case.name());
            continue;
        };
        let is_same = with.results == without.results;
        same &= is_same;
        let floor = roofs.map(|roofs| layers as f64 * roofs.floor(case).0 * 1e6);
        let median = |run: &Run| quantile(&run.times, 0.5);
        println!(
            "{:8} {tokens:>4} tokens, {layers} layers, {}: {:.0} us, {:.0} us without programmatic launch, {:.0} tok/s, floor {:.0} us{}",
            case.dtype,
            case.shape,
            median(with) * 1e6,
            median(without) * 1e6,
            *tokens as f64 / median(with),
            floor.unwrap_or(0.0),
            if is_same { "" } else { "  DIFFERENT BYTES" }
        );
        report(&json!({
            "model": case.dtype, "shape": case.shape, "tokens": tokens, "layers": layers, "same_bytes": is_same,
            "programmatic_us": median(with) * 1e6, "plain_us": median(without) * 1e6, "floor_us": floor,
            "tokens_per_s": *tokens as f64 / median(with), "samples": with.times.len(),
        }))?;
    }
    Ok(same)
}

struct Run {
    /// Sorted times in seconds; empty if nothing is timed.
    times: Vec<f64>,
    /// The bytes of each layer's result.
    results: Vec<Vec<u8>>,
}

fn measure(bench: &Bench, device: &dyn Device, case: &Case, seconds: Option<f64>) -> Outcome<Run> {
    let Loaded { graph, region, mut queue } = bench.load(device, case.draft()?)?;
    let program = device.prepare(Arc::clone(&graph))?;
    let bindings: Arc<[Region]> = Arc::from([region.clone()]);
    let mut run = || {
        queue.run(&program, &bindings)?;
        finish(&queue.mark())
    };
    // The first run launches kernel by kernel, the second builds the graph, the third replays it.
    (0..3).try_for_each(|_| run())?;
    let times = seconds.map_or(Ok(Vec::new()), |seconds| sample(Duration::from_secs_f64(seconds), run))?;
    let per_layer = graph.nodes().len() / case.sets();
    let results = graph.nodes().chunks(per_layer).filter_map(|layer| {
        let tensor = graph.tensor(layer.last()?.dst)?;
        Some((tensor.place?.offset as u64, tensor.desc.extent() as u64))
    });
    let results = results
        .map(|(offset, bytes)| queue.download(region.subregion(offset, bytes)?)?.wait(Some(Instant::now() + TIMEOUT)));
    Ok(Run { times, results: results.collect::<Result<_, DeviceError>>()? })
}

fn is_out_of_memory(error: &(dyn std::error::Error + 'static)) -> bool {
    matches!(error.downcast_ref(), Some(DeviceError::OutOfMemory { .. }))
}

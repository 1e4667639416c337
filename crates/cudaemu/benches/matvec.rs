//! Benchmark of the emulator's speed: lane instructions per second of mat-vec kernels over q4_0 weights, 4096 × 4096, with all
//! checks on. `cargo bench -p cudaemu --bench matvec`; with `--test` (which `cargo test` passes) a small matrix, once.

use std::sync::Arc;
use std::time::Instant;

use cudaemu::bytecode::DecodedModule;
use cudaemu::decode::decode;
use cudaemu::exec::{self, ExecutorConfig, Launch};
use cudaemu::mem::AddressSpace;
use cudaemu::ptx;

type Failure = Box<dyn std::error::Error>;

/// Bytes of a block of 32 weights: a half-precision scale, and sixteen bytes of two weights each.
const BLOCK: usize = 18;

fn main() -> Result<(), Failure> {
    let quick = std::env::args().any(|arg| arg == "--test");
    let (size, rounds) = if quick { (256, 1) } else { (4096, 5) };
    let text = include_str!("../kernels/ptx/matvec_q4_0.sm_80.ptx");
    let code = Arc::new(decode(&ptx::parse(text)?, text)?);

    println!("{:<20} {:>7} {:>16} {:>12} {:>10}", "kernel", "threads", "lane instr.", "median s", "G/s/thread");
    for kernel in ["matvec_q4_0_f32", "matvec_q4_0_q8"] {
        for threads in [1, 2] {
            let (instructions, seconds) = measure(&code, kernel, size, threads, rounds)?;
            let rate = instructions as f64 / seconds / 1e9 / threads as f64;
            println!("{kernel:<20} {threads:>7} {instructions:>16} {seconds:>12.4} {rate:>10.3}");
        }
    }
    Ok(())
}

/// Lane instructions of one launch, and the median of its durations.
fn measure(
    code: &Arc<DecodedModule>,
    kernel: &str,
    size: usize,
    threads: usize,
    rounds: usize,
) -> Result<(u64, f64), Failure> {
    let function = code.functions.iter().position(|f| &*f.name == kernel).ok_or("no such kernel")?;
    let space = AddressSpace::new(&[1 << 30])?;
    let mut random = fastrand::Rng::with_seed(1);
    let weights: Vec<u8> = (0..size * size / 32)
        .flat_map(|_| {
            let mut block = [0; BLOCK];
            random.fill(&mut block);
            block[..2].copy_from_slice(&0x2c00_u16.to_le_bytes());
            block
        })
        .collect();
    // As f32, or as q8 blocks: two halves followed by 32 one-byte values.
    let vector: Vec<u8> = if kernel.ends_with("f32") {
        (0..size).flat_map(|_| (random.f32() - 0.5).to_le_bytes()).collect()
    } else {
        (0..size / 32).flat_map(|_| (0..36).map(|i| if i < 4 { 0x20 } else { i }).collect::<Vec<u8>>()).collect()
    };
    let upload = |bytes: &[u8]| -> Result<u64, Failure> {
        let memory = space.alloc(0, bytes.len() as u64, "bench")?;
        space.snapshot().write(memory.base(), bytes).map_err(|kind| kind.to_string())?;
        Ok(memory.base())
    };
    let (a, x) = (upload(&weights)?, upload(&vector)?);
    let y = space.alloc(0, size as u64 * 4, "bench")?.base();
    let mut params: Vec<u8> = [a, x, y].iter().flat_map(|address| address.to_le_bytes()).collect();
    params.extend((size as u32).to_le_bytes());
    let launch = Launch {
        code: code.clone(),
        function,
        grid: [size as u32 / 4, 1, 1],
        block: [128, 1, 1],
        dynamic_shared: 0,
        params: params.into(),
        globals: vec![0; code.globals.len()].into(),
        device: 0,
        peers: 1,
        id: 1,
    };
    let machine = ExecutorConfig {
        sms: 108,
        threads,
        max_instructions: u64::MAX,
        report_only: false,
        local_bytes: 1024,
        counting: true,
        footprint: false,
    };
    let mut times = Vec::new();
    let mut instructions = 0;
    for _ in 0..rounds {
        let start = Instant::now();
        let outcome = exec::run_grid(&launch, &space.snapshot(), &machine);
        times.push(start.elapsed().as_secs_f64());
        outcome.result.map_err(|report| report.to_string())?;
        instructions = outcome.profile.total_lanes();
    }
    times.sort_by(f64::total_cmp);
    Ok((instructions, times[times.len() / 2]))
}

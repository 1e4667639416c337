//! Times a case on the CPU device, using only the public API.

use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Buffer, Device, DeviceError, MemoryBudget, Queue, Region};
use fanout_bench::cases::{Case, fill};
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Memory limit of the device in bytes.
const MEMORY: u64 = 8 << 30;

/// Number of time slices of a case. The roofs are sampled between slices.
const SLICES: usize = 5;

/// Maximum number of samples per slice; more samples do not change the percentiles.
const MAX_SAMPLES: usize = 5000;

/// The device, and one buffer that all cases reuse: page faults of fresh memory would cost more than the timed work.
pub struct Bench {
    device: Arc<CpuDevice>,
    budget: Arc<MemoryBudget>,
    queue: Box<dyn Queue>,
    memory: Buffer,
}

/// Times of one node, in seconds.
pub struct Times {
    sorted: Vec<f64>,
}

impl Times {
    /// The quantile of the samples, `share` from 0 to 1, in seconds.
    pub fn quantile(&self, share: f64) -> f64 {
        self.sorted[((self.sorted.len() - 1) as f64 * share).round() as usize]
    }

    pub fn samples(&self) -> usize {
        self.sorted.len()
    }
}

impl Bench {
    pub fn new(threads: usize) -> Result<Bench, Box<dyn Error>> {
        let device = CpuDevice::new("CPU", threads, MathMode::Fast, MEMORY)?;
        let budget = MemoryBudget::new(MEMORY);
        let (queue, memory) = (device.queue(&budget)?, device.alloc(0, &budget)?);
        Ok(Bench { device, budget, queue, memory })
    }

    /// The device's own description, and what its calibration chose.
    pub fn description(&self) -> String {
        let chosen = self.device.features().into_iter().filter(|f| ["prefetch", "huge_pages"].contains(&&*f.name));
        let chosen: Vec<String> = chosen.map(|f| format!(", {} {}", f.name, f.value)).collect();
        self.device.info().description.clone() + &chosen.concat()
    }

    /// Runs a case for `seconds`, at least once per slice. Calls `pause` before each time slice and after the last one.
    pub fn time(&mut self, case: &Case, seconds: f64, mut pause: impl FnMut()) -> Result<Times, Box<dyn Error>> {
        let draft = case.draft()?;
        let contents = draft.contents;
        let graph = Arc::new(draft.b.build()?);
        let memory = self.grow(graph.slot_sizes()[0] as u64)?;
        // Overwriting the buffer invalidates what the device has cached about the tensors of the previous case, such as
        // repacked weights.
        self.queue.fill(memory.clone(), 0)?;
        fill(&mut *self.queue, &memory, &graph, &contents)?;
        let program = self.device.prepare(Arc::clone(&graph))?;
        let bindings: Arc<[Region]> = Arc::from([memory]);
        let mut run = || -> Result<f64, DeviceError> {
            let start = Instant::now();
            self.queue.run(&program, &bindings)?;
            self.queue.mark().wait(None)?;
            Ok(start.elapsed().as_secs_f64())
        };
        // Warm-up: the first runs may repack uploaded weights, and start with cold caches.
        for _ in 0..2 {
            run()?;
        }
        let mut sorted = Vec::new();
        let slice = Duration::from_secs_f64(seconds / SLICES as f64);
        for _ in 0..SLICES {
            pause();
            run()?;
            let (start, limit) = (Instant::now(), sorted.len() + MAX_SAMPLES);
            while sorted.len() < limit {
                sorted.push(run()? / graph.nodes().len() as f64);
                if start.elapsed() >= slice {
                    break;
                }
            }
        }
        pause();
        sorted.sort_by(f64::total_cmp);
        Ok(Times { sorted })
    }

    /// The first `bytes` of the buffer, which is reallocated if it is too small. The old buffer is released first.
    fn grow(&mut self, bytes: u64) -> Result<Region, DeviceError> {
        if self.memory.bytes() < bytes {
            self.memory = self.device.alloc(0, &self.budget)?;
            self.memory = self.device.alloc(bytes, &self.budget)?;
        }
        self.memory.region(0, bytes)
    }
}

//! Timing a case on a device, through the public interface alone.

use fanout::cpu::{CpuDevice, Path};
use fanout::device::{Account, Buffer, Device, DeviceError, Queue, Region};
use fanout_bench::cases::{Case, fill};
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the device may use.
const MEMORY: u64 = 8 << 30;

/// Slices of a case's time.
const SLICES: usize = 5;

/// Most samples of a slice: more say nothing new.
const MOST_SAMPLES: usize = 5000;

/// A device and its memory, which all cases use in turn: fresh pages cost more than what is timed.
pub struct Bench {
    device: Arc<CpuDevice>,
    account: Arc<Account>,
    queue: Box<dyn Queue>,
    memory: Buffer,
}

/// Times of one node, in seconds.
pub struct Times {
    sorted: Vec<f64>,
}

impl Times {
    /// The value below which this share of the samples lies.
    pub fn quantile(&self, share: f64) -> f64 {
        self.sorted[((self.sorted.len() - 1) as f64 * share).round() as usize]
    }

    pub fn samples(&self) -> usize {
        self.sorted.len()
    }
}

impl Bench {
    pub fn new(threads: usize) -> Result<Bench, Box<dyn Error>> {
        let device = CpuDevice::new("CPU", threads, Path::Fast, MEMORY)?;
        let account = Account::new(MEMORY);
        let (queue, memory) = (device.queue(&account)?, device.alloc(0, &account)?);
        Ok(Bench { device, account, queue, memory })
    }

    /// The device's own description.
    pub fn description(&self) -> &str {
        &self.device.info().description
    }

    /// Runs a case for `seconds` and at least a few times, in slices with `pause` called before each and after the last.
    pub fn time(&mut self, case: &Case, seconds: f64, mut pause: impl FnMut()) -> Result<Times, Box<dyn Error>> {
        let draft = case.draft()?;
        let contents = draft.contents;
        let graph = Arc::new(draft.b.build()?);
        let memory = self.room(graph.slot_sizes()[0] as u64)?;
        // What the device remembers of an earlier case's tensors ends with their bytes.
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
        // The first runs meet memory as it was uploaded, and caches that hold something else.
        for _ in 0..2 {
            run()?;
        }
        let mut sorted = Vec::new();
        let slice = Duration::from_secs_f64(seconds / SLICES as f64);
        for _ in 0..SLICES {
            pause();
            run()?;
            let (start, most) = (Instant::now(), sorted.len() + MOST_SAMPLES);
            while sorted.len() < most {
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

    /// The first `bytes` of the memory, which grows where it has to.
    fn room(&mut self, bytes: u64) -> Result<Region, DeviceError> {
        if self.memory.bytes() < bytes {
            self.memory = self.device.alloc(0, &self.account)?;
            self.memory = self.device.alloc(bytes, &self.account)?;
        }
        self.memory.region(0, bytes)
    }
}

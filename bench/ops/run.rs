//! Times a case on the CPU device, using only the public API.

use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Buffer, Device, DeviceError, ImportHost, MappedFile, MemoryBudget, Program, Queue, Region};
use fanout::graph::Graph;
use fanout_bench::cases::{Case, fill};
use std::error::Error;
use std::fs::{self, File};
use std::io::Write;
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

/// How the weights of products are held.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    /// In the device's memory, which repacks them.
    Packed,
    /// As rows, in a read-only mapping of a temporary file.
    Rows,
}

/// A graph that is ready to run, with its memory.
struct Loaded {
    program: Program,
    bindings: Arc<[Region]>,
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
        let chosen =
            self.device.features().into_iter().filter(|f| ["prefetch", "huge_pages", "bf16_dots"].contains(&&*f.name));
        let chosen: Vec<String> = chosen.map(|f| format!(", {} {}", f.name, f.value)).collect();
        self.device.info().description.clone() + &chosen.concat()
    }

    /// Runs a case for `seconds` with each of the `storages`, in turns, at least once per slice. Calls `pause` before each round
    /// of slices and after the last one.
    pub fn time(
        &mut self,
        case: &Case,
        storages: &[Storage],
        seconds: f64,
        mut pause: impl FnMut(),
    ) -> Result<Vec<Times>, Box<dyn Error>> {
        let loaded = storages.iter().map(|&storage| self.load(case, storage)).collect::<Result<Vec<_>, _>>()?;
        let mut run = |loaded: &Loaded| -> Result<f64, DeviceError> {
            let start = Instant::now();
            self.queue.run(&loaded.program, &loaded.bindings)?;
            self.queue.mark().wait(None)?;
            Ok(start.elapsed().as_secs_f64())
        };
        // Warm-up: the first runs may repack uploaded weights, and start with cold caches.
        for loaded in loaded.iter().chain(&loaded) {
            run(loaded)?;
        }
        let mut samples = vec![Vec::new(); loaded.len()];
        let slice = Duration::from_secs_f64(seconds / SLICES as f64);
        for _ in 0..SLICES {
            pause();
            for (loaded, samples) in loaded.iter().zip(&mut samples) {
                run(loaded)?;
                let (start, limit) = (Instant::now(), samples.len() + MAX_SAMPLES);
                while samples.len() < limit {
                    samples.push(run(loaded)? / loaded.program.graph().nodes().len() as f64);
                    if start.elapsed() >= slice {
                        break;
                    }
                }
            }
        }
        pause();
        let times = |mut sorted: Vec<f64>| {
            sorted.sort_by(f64::total_cmp);
            Times { sorted }
        };
        Ok(samples.into_iter().map(times).collect())
    }

    /// Compiles a case and fills its memory.
    fn load(&mut self, case: &Case, storage: Storage) -> Result<Loaded, Box<dyn Error>> {
        let draft = match storage {
            Storage::Packed => case.draft()?,
            Storage::Rows => case.draft_with_separate_slots()?,
        };
        let contents = draft.contents;
        let graph = Arc::new(draft.b.build());
        let ends = graph.slot_sizes().iter().scan(0, |end, size| {
            *end = (*end + *size as u64).next_multiple_of(64);
            Some(*end)
        });
        let ends: Vec<u64> = ends.collect();
        let bytes = ends.last().copied().unwrap_or(0);
        let memory = match storage {
            Storage::Packed => self.grow(bytes)?,
            Storage::Rows => self.device.alloc(bytes, &self.budget)?.whole(),
        };
        // Overwriting the buffer invalidates what the device has cached about the tensors of the previous case, such as
        // repacked weights.
        self.queue.fill(memory.clone(), 0)?;
        let starts = [0].iter().chain(&ends);
        let slots = starts.zip(graph.slot_sizes()).map(|(&start, &size)| memory.subregion(start, size as u64));
        let mut slots = slots.collect::<Result<Vec<_>, _>>()?;
        fill(&mut *self.queue, &slots, &graph, &contents)?;
        if storage == Storage::Rows {
            self.move_weights_to_file(&graph, &mut slots)?;
        }
        Ok(Loaded { program: self.device.prepare(graph)?, bindings: slots.into() })
    }

    /// Writes the first source of each node to a temporary file, and binds its slot to a read-only mapping of the file.
    fn move_weights_to_file(&mut self, graph: &Graph, slots: &mut [Region]) -> Result<(), Box<dyn Error>> {
        let path = std::env::temp_dir().join(format!("fanout-bench-{}", std::process::id()));
        let (mut file, mut moved, mut end) = (File::create_new(&path)?, Vec::new(), 0);
        for node in graph.nodes() {
            let weight = node.srcs[0].and_then(|id| graph.tensor(id));
            let slot = weight.and_then(|weight| weight.place).ok_or("a product without weights")?.slot as usize;
            let bytes = self.queue.download(slots[slot].clone())?.wait(None)?;
            file.write_all(&bytes)?;
            moved.push((slot, end));
            end += bytes.len() as u64;
        }
        let mapped = MappedFile::open(&path)?;
        // The mapping keeps the content.
        fs::remove_file(&path)?;
        let buffer = self.device.import_read_only(mapped.map_read_only(0..end)?)?;
        for (slot, start) in moved {
            slots[slot] = buffer.region(start, slots[slot].bytes())?;
        }
        Ok(())
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

//! Loading of weights into the memory of devices, with one thread per device.

use super::{MappedWeights, Weight, Weights, WeightsError};
use crate::device::{Device, DeviceError, MemoryBudget, Queue, Region, SourceError, TensorMemory, UploadSource};
use crate::tensor::{ByteRuns, TensorDesc};
use std::collections::HashMap;
use std::sync::Arc;
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

/// Bytes copied between two reports of progress.
const COPY_CHUNK_BYTES: usize = 8 << 20;

/// A weight, or a part of one, to load into memory of a device.
#[derive(Clone, Debug)]
pub struct LoadJob<'a> {
    /// The weight.
    pub weight: &'a Weight<'a>,
    /// The bytes of the weight that the part consists of, in this order.
    pub runs: ByteRuns,
    /// Type and shape of the part, which is contiguous.
    pub desc: TensorDesc,
    /// Memory for the part, as large as it.
    pub region: Region,
}

impl<'a> LoadJob<'a> {
    /// Loads all of a weight.
    pub fn whole(weight: &'a Weight<'a>, region: Region) -> LoadJob<'a> {
        LoadJob { weight, runs: ByteRuns::whole(weight.bytes.len() as u64), desc: weight.desc, region }
    }
}

/// How weights are loaded.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct LoadOptions<'a> {
    /// Deadline for the uploads that are still in flight after the last one was submitted, and for each reply of a load by digest:
    /// 10 minutes by default.
    pub timeout: Duration,
    /// For [`Weights::load`]: whether devices that can use the host's memory read the weights from the mapped file, if it can be read
    /// in place ([`Weights::map`]), instead of from memory of their own. The weights may then be larger than the memory, but products
    /// are slower. False by default.
    pub mapped: bool,
    /// Called with the progress, from several threads.
    pub progress: Option<&'a (dyn Fn(LoadProgress) + Sync)>,
}

impl Default for LoadOptions<'_> {
    fn default() -> Self {
        LoadOptions { timeout: Duration::from_secs(600), mapped: false, progress: None }
    }
}

impl<'a> LoadOptions<'a> {
    /// The same with another value of `timeout`.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> LoadOptions<'a> {
        LoadOptions { timeout, ..self }
    }

    /// The same with another value of `mapped`.
    #[must_use]
    pub fn with_mapped(self, mapped: bool) -> LoadOptions<'a> {
        LoadOptions { mapped, ..self }
    }

    /// The same with a function that is called with the progress.
    #[must_use]
    pub fn with_progress(self, progress: &'a (dyn Fn(LoadProgress) + Sync)) -> LoadOptions<'a> {
        LoadOptions { progress: Some(progress), ..self }
    }

    pub(super) fn report(&self, progress: LoadProgress) {
        if let Some(report) = self.progress {
            report(progress);
        }
    }
}

/// Progress of a load since the last report.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum LoadProgress {
    /// Bytes of a weight that were hashed, so that the device can search its disk for the weight.
    Hashed {
        /// The number of the device in the list.
        device: usize,
        /// The number of bytes, of the whole weight even if only a part is loaded.
        bytes: u64,
    },
    /// Bytes that were submitted, or that the device has found on its disk.
    Loaded {
        /// The number of the device in the list.
        device: usize,
        /// The number of bytes.
        bytes: u64,
    },
}

/// Bytes and time of loading a device's weights.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoadStats {
    /// Bytes of weights.
    pub bytes: u64,
    /// The part of `bytes` that the server loaded from its own disk.
    pub from_server_disk: u64,
    /// Time from the start of the load to its end.
    pub time: Duration,
}

impl LoadStats {
    /// The part of `bytes` that was uploaded.
    pub fn sent(&self) -> u64 {
        self.bytes.saturating_sub(self.from_server_disk)
    }

    /// Rate in MB/s (10^6 bytes); `None` if there is nothing to measure.
    pub fn rate(&self) -> Option<f64> {
        let seconds = self.time.as_secs_f64();
        (self.bytes > 0 && seconds > 0.0).then(|| self.bytes as f64 / seconds / 1e6)
    }
}

/// A weight in the memory of a device.
#[derive(Clone, Debug)]
pub struct LoadedWeight {
    /// The number of the device in the list.
    pub device: usize,
    /// Type and shape.
    pub desc: TensorDesc,
    /// Its memory, or the pages of the mapped file.
    pub region: Region,
}

impl Weights<'_> {
    /// Allocates weights on devices and loads them, with one thread per device. `place` returns the number of the device in `devices`
    /// for a weight's name, or `None` for a weight that is not used. The memory is reserved in `budget`, and freed when the last region
    /// of a buffer is dropped; weights of a device share buffers. Returns the weights by name.
    ///
    /// # Errors
    /// [`WeightsError::UnknownDevice`]; the first failure of a device ([`WeightsError::Device`]), after which all memory is free
    /// again; as [`Weights::map`].
    pub fn load(
        &self,
        devices: &[Arc<dyn Device>],
        mut place: impl FnMut(&str) -> Option<usize>,
        budget: &Arc<MemoryBudget>,
        options: &LoadOptions<'_>,
    ) -> Result<HashMap<String, LoadedWeight>, WeightsError> {
        let mut placed = vec![Vec::new(); devices.len()];
        for weight in self.iter() {
            let Some(device) = place(weight.name()) else { continue };
            let unknown =
                || WeightsError::UnknownDevice { weight: weight.name.clone(), device, devices: devices.len() };
            placed.get_mut(device).ok_or_else(unknown)?.push(weight);
        }
        let mut loaded = HashMap::new();
        let mut jobs = Vec::new();
        for (number, (device, placed)) in devices.iter().zip(placed).enumerate() {
            let pages = if options.mapped && !placed.is_empty() { self.map(&**device)? } else { None };
            let add = |loaded: &mut HashMap<_, _>, weight: &Weight<'_>, region| {
                loaded.insert(weight.name.clone(), LoadedWeight { device: number, desc: weight.desc, region });
            };
            let mut to_load = Vec::new();
            for weight in placed {
                let whole = ByteRuns::whole(weight.bytes.len() as u64);
                match pages.as_ref().and_then(|pages: &MappedWeights| pages.region(weight, whole)) {
                    Some(region) => add(&mut loaded, weight, region),
                    None => to_load.push(weight),
                }
            }
            let memory = TensorMemory::new(&**device, to_load.iter().map(|weight| weight.desc), budget);
            let memory = memory.map_err(|error| WeightsError::on(&**device, error))?;
            let of_device = to_load.into_iter().zip(memory.regions());
            jobs.push(
                of_device
                    .map(|(weight, region)| {
                        add(&mut loaded, weight, region.clone());
                        LoadJob::whole(weight, region.clone())
                    })
                    .collect::<Vec<_>>(),
            );
        }
        load(devices, &jobs, budget, options).into_iter().collect::<Result<Vec<_>, _>>()?;
        Ok(loaded)
    }
}

/// Loads weights onto devices, with one thread per device; `jobs` has the jobs of the device with the same number. Weights that a
/// device finds on its own disk by their digests ([`LoadByDigest`](crate::device::LoadByDigest)) are not sent. The queues of the
/// devices are opened for the load only; `budget` is charged for their scratch memory.
///
/// Returns one result per device: the content of the regions of a failed one is unspecified, the others are loaded.
///
/// # Errors
/// [`WeightsError::Device`] with any error of the device; [`DeviceError::Deadline`] after [`LoadOptions::timeout`].
pub fn load(
    devices: &[Arc<dyn Device>],
    jobs: &[Vec<LoadJob<'_>>],
    budget: &Arc<MemoryBudget>,
    options: &LoadOptions<'_>,
) -> Vec<Result<LoadStats, WeightsError>> {
    let open = |(number, device): (usize, &Arc<dyn Device>)| {
        // A device that has nothing to load needs no queue.
        let jobs = jobs.get(number).map(Vec::as_slice).filter(|jobs| !jobs.is_empty())?;
        Some(device.queue(budget).map(|queue| (jobs, queue)))
    };
    let mut opened: Vec<_> = devices.iter().enumerate().map(open).collect();
    let queues = opened.iter_mut().flatten().flatten().map(|(_, queue)| queue);
    let by_digest = queues.filter_map(|queue| queue.load_by_digest()).count();
    thread::scope(|scope| {
        let start = |(number, opened): (usize, Option<Result<_, DeviceError>>)| {
            let Some(opened) = opened else { return Ok(None) };
            let (jobs, queue) = opened?;
            let device = DeviceLoad { device: &*devices[number], number, jobs, options, by_digest };
            let thread = Builder::new().name("load".to_owned()).spawn_scoped(scope, move || device.run(queue));
            thread.map(Some).map_err(|error| DeviceError::thread_spawn_failed("to load weights", &error))
        };
        let threads: Vec<_> = opened.into_iter().enumerate().map(start).collect();
        let join = |thread: Result<Option<thread::ScopedJoinHandle<'_, _>>, DeviceError>| match thread? {
            None => Ok(LoadStats::default()),
            Some(thread) => thread
                .join()
                .unwrap_or_else(|_| Err(DeviceError::Bug("a thread that loads weights panicked".to_owned()))),
        };
        let failed = |(device, stats): (&Arc<dyn Device>, Result<_, _>)| {
            stats.map_err(|error| WeightsError::on(&**device, error))
        };
        devices.iter().zip(threads.into_iter().map(join)).map(failed).collect()
    })
}

/// The load of one device.
struct DeviceLoad<'a> {
    device: &'a dyn Device,
    number: usize,
    jobs: &'a [LoadJob<'a>],
    options: &'a LoadOptions<'a>,
    /// Number of devices that load by digest at the same time.
    by_digest: usize,
}

impl DeviceLoad<'_> {
    fn run(&self, mut queue: Box<dyn Queue>) -> Result<LoadStats, DeviceError> {
        let start = Instant::now();
        let found = self.load_by_digest(&mut *queue)?;
        let is_found = |number: usize| found.get(number).copied().unwrap_or(false);
        let mut stats = LoadStats::default();
        for (number, job) in self.jobs.iter().enumerate() {
            stats.bytes += job.region.bytes();
            if is_found(number) {
                stats.from_server_disk += job.region.bytes();
            } else {
                self.upload(&mut *queue, job)?;
            }
        }
        queue.mark().wait(Instant::now().checked_add(self.options.timeout))?;
        Ok(LoadStats { time: start.elapsed(), ..stats })
    }

    /// By job: whether the device has found it on its disk. Empty for a device that does not load by digest.
    #[cfg(feature = "client")]
    fn load_by_digest(&self, queue: &mut dyn Queue) -> Result<Vec<bool>, DeviceError> {
        let Some(device) = queue.load_by_digest() else { return Ok(Vec::new()) };
        let threads = super::by_digest::hash_threads(self.by_digest);
        super::by_digest::load_by_digest(device, self.number, self.jobs, threads, self.options)
    }

    /// No device of this machine loads by digest.
    #[cfg(not(feature = "client"))]
    fn load_by_digest(&self, _: &mut dyn Queue) -> Result<Vec<bool>, DeviceError> {
        Ok(Vec::new())
    }

    fn upload(&self, queue: &mut dyn Queue, job: &LoadJob<'_>) -> Result<(), DeviceError> {
        let report = |bytes| self.options.report(LoadProgress::Loaded { device: self.number, bytes });
        let (region, desc, runs) = (job.region.clone(), Some(&job.desc), job.runs);
        // Zero copy: a connection sends directly from the mapped file, so this thread does not copy the bytes first.
        if self.device.link_stats().is_some()
            && runs.count() == 1
            && let Some(bytes) = job.weight.bytes.get(runs.offset() as usize..runs.end() as usize)
        {
            queue.upload(region, desc, UploadSource::Borrowed(bytes))?;
            report(runs.bytes());
            return Ok(());
        }
        let too_short = |_| DeviceError::Misuse("the part of a weight ends after the weight");
        let mut reader = runs.reader(job.weight.bytes).map_err(too_short)?;
        // Copies from the mapped file into the device's memory or staging buffer, without a buffer in between.
        let mut write = |to: &mut [u8]| {
            for chunk in to.chunks_mut(COPY_CHUNK_BYTES) {
                reader.read(chunk).map_err(SourceError::new)?;
                report(chunk.len() as u64);
            }
            Ok(())
        };
        queue.upload(region, desc, UploadSource::Writer(&mut write))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap fails the test
mod tests {
    use super::super::ModelFile;
    use super::*;
    use crate::cpu::{CpuDevice, MathMode};
    use crate::gguf::Writer;
    use crate::tensor::DType;

    /// Three weights of which a function places two, in memory of the devices and in the pages of the file.
    #[test]
    fn weights_are_loaded_where_they_are_placed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let file = ["a", "b", "c"].iter().fold(Writer::new(), |file, name| file.tensor(name, &[16, 2], DType::F32));
        let mut bytes = file.to_bytes().unwrap();
        let tensors = crate::gguf::Gguf::parse(&bytes).unwrap().tensors;
        for tensor in &tensors {
            bytes[tensor.bytes.clone()].fill(tensor.name.as_bytes()[0]);
        }
        std::fs::write(&path, bytes).unwrap();
        let device = |name| CpuDevice::new(name, 1, MathMode::Exact, 1 << 20).unwrap() as Arc<dyn Device>;
        let devices = ["CPU0", "CPU1"].map(device);
        let file = ModelFile::open(&path).unwrap();
        let weights = file.weights().unwrap();
        let place = |name: &str| [("a", 1), ("c", 0)].into_iter().find(|(placed, _)| *placed == name).map(|(_, at)| at);
        let seen = std::sync::Mutex::new([0, 0]);
        let report = |event| {
            if let LoadProgress::Loaded { device, bytes } = event {
                seen.lock().unwrap()[device] += bytes;
            }
        };
        // Without a byte of memory, weights can only be mapped.
        for (mapped, limit) in [(false, 1 << 20), (true, 0)] {
            let options = LoadOptions::default().with_mapped(mapped).with_progress(&report);
            let loaded = weights.load(&devices, place, &MemoryBudget::new(limit), &options).unwrap();
            assert_eq!(loaded.len(), 2);
            for (name, on) in [("a", 1), ("c", 0)] {
                let LoadedWeight { device, desc, region } = &loaded[name];
                assert_eq!((*device, desc.ne()), (on, [16, 2, 1, 1]));
                let mut queue = devices[on].queue(&MemoryBudget::new(1 << 20)).unwrap();
                let there = queue.download(region.clone()).unwrap().wait(None).unwrap();
                assert_eq!(there, vec![name.as_bytes()[0]; 128], "{name}, mapped: {mapped}");
            }
            assert_eq!(*seen.lock().unwrap(), [128; 2]);
        }
        let load = |place: &dyn Fn(&str) -> Option<usize>, limit| {
            weights.load(&devices, place, &MemoryBudget::new(limit), &LoadOptions::default()).unwrap_err().to_string()
        };
        assert_eq!(load(&|_| Some(2), 9), "\"a\" is placed on device 2, but there are 2 devices, numbered from 0");
        assert!(load(&|_| Some(1), 9).starts_with("CPU1: out of memory: "), "{}", load(&|_| Some(1), 9));
    }

    #[test]
    fn rates_are_in_millions_of_bytes() {
        let loaded = LoadStats { bytes: 3_000_000, from_server_disk: 0, time: Duration::from_millis(500) };
        assert_eq!(loaded.rate(), Some(6.0));
        assert_eq!(LoadStats::default().rate(), None);
    }
}

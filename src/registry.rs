//! Which devices this machine has, by name, and how to open them.

use std::num::NonZero;
use std::sync::Arc;

use thiserror::Error;

use crate::cpu::{CpuDevice, Path, available_memory, instruction_set};
use crate::cuda::{self, CudaDevice, Gpu, NoCuda};
use crate::device::{Device, DeviceError};
use crate::fallback::Fallback;

/// The memory of the CPU where the system does not say what it has.
const UNKNOWN_MEMORY: u64 = 8 << 30;

/// What a GPU keeps for what is not in buffers: at most so much of what is free once its context stands. That is kernels
/// as they are loaded (tens of MiB for a model), the graphs that the driver holds for repeated programs, and what it
/// rounds each buffer up by (to 2 MiB: a client has some tens).
const GPU_MARGIN: u64 = 512 << 20;

/// The devices of this machine.
#[derive(Clone, Debug)]
pub struct Registry {
    /// GPUs in the driver's order, then the CPU.
    entries: Vec<Entry>,
    /// Why there is no GPU.
    no_gpu: Option<NoCuda>,
}

/// A device of this machine.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its name: `CUDA0`, `CPU`.
    pub name: String,
    /// For people.
    pub description: String,
    /// Why it cannot be opened, where that is known.
    pub unusable: Option<String>,
    gpu: Option<Gpu>,
}

/// How to open devices.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Threads of each CPU device; `None`: the machine's, shared evenly among them.
    pub threads: Option<usize>,
    /// Bytes of memory of each device, in the list's order; one for all of them; or none: what a device has left, but for a
    /// margin, shared evenly among those that are the same device.
    pub memory: Vec<u64>,
}

/// A list of devices that cannot be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// A name or number of no device.
    #[error("no device {name:?}; there are: {known}")]
    Unknown {
        /// What was asked for.
        name: String,
        /// Names of what there is.
        known: String,
    },
    /// The name or number of a GPU, where there is none at all.
    #[error("no device {name:?}: {why}; there are: {known}")]
    NoGpu {
        /// What was asked for.
        name: String,
        /// What is missing, and what to do.
        why: NoCuda,
        /// Names of what there is.
        known: String,
    },
    /// A GPU that there are no kernels for.
    #[error("{name} cannot be used: {reason}; there are: {known}")]
    Unusable {
        /// The device.
        name: String,
        /// What it lacks.
        reason: String,
        /// Names of what can be used.
        known: String,
    },
    /// Neither one size of memory nor one for each device.
    #[error("{sizes} sizes of memory for {devices} devices: give one for each of them, or a single one for all")]
    Sizes {
        /// How many were given.
        sizes: usize,
        /// How many devices.
        devices: usize,
    },
    /// The CPU device cannot start.
    #[error("{name}: {source}")]
    Open {
        /// The device.
        name: String,
        /// The system's word.
        source: std::io::Error,
    },
    /// A GPU cannot be opened.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl Registry {
    /// Looks what this machine has.
    pub fn detect() -> Registry {
        Registry::of(cuda::detect())
    }

    fn of(gpus: Result<Vec<Gpu>, NoCuda>) -> Registry {
        let (gpus, no_gpu) = gpus.map_or_else(|none| (Vec::new(), Some(none)), |gpus| (gpus, None));
        let gpu = |gpu: Gpu| Entry {
            name: format!("CUDA{}", gpu.ordinal),
            description: gpu.to_string(),
            unusable: gpu.usable().err(),
            gpu: Some(gpu),
        };
        let cores = cores();
        let memory =
            available_memory().map_or("unknown memory".to_owned(), |bytes| format!("{} MiB free", bytes >> 20));
        let description = format!("this machine's processors: {cores} threads, {}, {memory}", instruction_set());
        let cpu = Entry { name: "CPU".to_owned(), description, unusable: None, gpu: None };
        Registry { entries: gpus.into_iter().map(gpu).chain([cpu]).collect(), no_gpu }
    }

    /// The devices: GPUs by their numbers, then the CPU.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Why there is no GPU among them.
    pub fn no_gpu(&self) -> Option<&NoCuda> {
        self.no_gpu.as_ref()
    }

    /// The list to open where nobody has chosen: all GPUs that can be used, or the CPU if there is none; and for each GPU
    /// that is left out, or all of them, why.
    pub fn default_list(&self) -> (String, Vec<String>) {
        let gpus = || self.entries.iter().filter(|entry| entry.gpu.is_some());
        let usable: Vec<_> = gpus().filter(|entry| entry.unusable.is_none()).map(|entry| &*entry.name).collect();
        let left_out = |entry: &Entry| entry.unusable.as_ref().map(|why| format!("{} is left out: {why}", entry.name));
        let mut notes: Vec<_> = gpus().filter_map(left_out).collect();
        if !usable.is_empty() {
            return (usable.join(","), notes);
        }
        notes.extend(self.no_gpu.iter().map(ToString::to_string));
        ("CPU".to_owned(), vec![format!("no GPU, the CPU is used: {}", notes.join("; "))])
    }

    /// Opens a list of devices separated by commas: GPUs by name or number, the CPU by name: `0,1`, `CUDA0,CUDA1,CPU`.
    /// Each mention is a device of its own; those of one name get numbers: `CPU,CPU` are `CPU0` and `CPU1`, `0,0` are
    /// `CUDA0.0` and `CUDA0.1`.
    ///
    /// What a GPU does not run, the first CPU device of the list runs for it, or one that the list does not show.
    ///
    /// # Errors
    /// [`RegistryError`] for a name that is not there, or a device that does not start.
    pub fn open(&self, list: &str, options: &Options) -> Result<Vec<Arc<dyn Device>>, RegistryError> {
        let asked: Vec<&Entry> = list.split(',').map(|name| self.find(name.trim())).collect::<Result<_, _>>()?;
        if options.memory.len() > 1 && options.memory.len() != asked.len() {
            return Err(RegistryError::Sizes { sizes: options.memory.len(), devices: asked.len() });
        }
        let places: Vec<Place<'_>> = (0..asked.len())
            .map(|at| Place::new(&asked, at, options.memory.get(at).or(options.memory.last())))
            .collect();
        let cpus = places.iter().filter(|place| place.entry.gpu.is_none()).count().max(1);
        let threads = options.threads.unwrap_or_else(|| (cores() / cpus).max(1));
        // The CPUs first: the GPUs need one behind them.
        let mut cpus = Vec::new();
        for place in places.iter().filter(|place| place.entry.gpu.is_none()) {
            cpus.push(cpu(&place.name, threads, place.memory.unwrap_or_else(|| cpu_memory(place.share)))?);
        }
        let second = match cpus.first() {
            Some(first) => Arc::clone(first),
            // Without work it costs a few sleeping threads.
            None => cpu("CPU", threads, cpu_memory(1))?,
        };
        let mut cpus = cpus.into_iter();
        let mut devices = Vec::with_capacity(places.len());
        for place in &places {
            match &place.entry.gpu {
                None => devices.extend(cpus.next()),
                Some(gpu) => {
                    let gpu = CudaDevice::with_free(&place.name, gpu, |free| {
                        place.memory.unwrap_or_else(|| gpu_memory(free, place.share))
                    })?;
                    devices.push(Fallback::new(gpu, Arc::clone(&second)));
                }
            }
        }
        Ok(devices)
    }

    fn find(&self, name: &str) -> Result<&Entry, RegistryError> {
        let is = |entry: &&Entry| {
            let number = entry.gpu.as_ref().is_some_and(|gpu| gpu.ordinal.to_string() == name);
            number || entry.name.eq_ignore_ascii_case(name)
        };
        let known = || {
            let usable = self.entries.iter().filter(|entry| entry.unusable.is_none());
            usable.map(|entry| &*entry.name).collect::<Vec<_>>().join(", ")
        };
        match (self.entries.iter().find(is), &self.no_gpu) {
            (Some(Entry { name, unusable: Some(reason), .. }), _) => {
                Err(RegistryError::Unusable { name: name.clone(), reason: reason.clone(), known: known() })
            }
            (Some(entry), _) => Ok(entry),
            (None, Some(why)) if means_gpu(name) => {
                Err(RegistryError::NoGpu { name: name.to_owned(), why: why.clone(), known: known() })
            }
            (None, _) => Err(RegistryError::Unknown { name: name.to_owned(), known: known() }),
        }
    }
}

/// A device to be opened.
struct Place<'a> {
    entry: &'a Entry,
    /// Its own, whoever else is the same device.
    name: String,
    /// How many of the list are the same device.
    share: u64,
    memory: Option<u64>,
}

impl<'a> Place<'a> {
    fn new(asked: &[&'a Entry], at: usize, memory: Option<&u64>) -> Place<'a> {
        let entry = asked[at];
        let same = |among: &[&Entry]| among.iter().filter(|other| other.name == entry.name).count();
        let (share, number) = (same(asked), same(&asked[..at]));
        let name = match (share, &entry.gpu) {
            (1, _) => entry.name.clone(),
            (_, None) => format!("{}{number}", entry.name),
            (_, Some(_)) => format!("{}.{number}", entry.name),
        };
        Place { entry, name, share: share as u64, memory: memory.copied() }
    }
}

/// Whether a name is that of a GPU on some machine: a number, with or without `CUDA`.
fn means_gpu(name: &str) -> bool {
    let number = name.get(..4).filter(|start| start.eq_ignore_ascii_case("CUDA")).map_or(name, |_| &name[4..]);
    !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit())
}

fn cpu(name: &str, threads: usize, memory: u64) -> Result<Arc<dyn Device>, RegistryError> {
    match CpuDevice::new(name, threads, Path::Fast, memory) {
        Ok(device) => Ok(device),
        Err(source) => Err(RegistryError::Open { name: name.to_owned(), source }),
    }
}

/// The memory of each of `share` CPU devices.
fn cpu_memory(share: u64) -> u64 {
    let free = available_memory().unwrap_or(UNKNOWN_MEMORY);
    (free - free / 16) / share
}

/// The memory of each of `share` devices on a GPU that has so much free.
fn gpu_memory(free: u64, share: u64) -> u64 {
    (free - (free / 16).min(GPU_MARGIN)) / share
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

#[cfg(test)]
mod tests;

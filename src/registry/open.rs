//! Devices of a list, opened: names of their own, shares of memory, and a CPU behind those that need one.

use super::{Entry, Origin, RegistryError};
use crate::cpu::{CpuDevice, Path, available_memory};
use crate::device::{Device, DeviceKind};
use crate::fallback::Fallback;
#[cfg(feature = "client")]
use crate::rpc::client;
use crate::setters::setters;
use std::num::NonZero;
use std::sync::Arc;

/// The memory of the CPU where the system does not say what it has.
const UNKNOWN_MEMORY: u64 = 8 << 30;

/// What a GPU keeps for what is not in buffers: at most so much of what is free once its context stands. That is kernels
/// as they are loaded (tens of MiB for a model), the graphs that the driver holds for repeated programs, and what it
/// rounds each buffer up by (to 2 MiB: a client has some tens).
const GPU_MARGIN: u64 = 512 << 20;

/// How to open devices.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Threads of each CPU device; `None`: the machine's, shared evenly among them.
    pub threads: Option<usize>,
    /// Bytes of memory of each device, in the list's order; one for all of them; or none: what a device has left, but for a
    /// margin, shared evenly among those that are the same device.
    pub memory: Vec<u64>,
    /// Whether a CPU stands behind each device that is none, and runs what that one does not ([`Fallback`]). Without, such a
    /// device refuses those nodes: for a scheduler, which has a better place for them.
    pub fallback: bool,
    /// How servers are spoken to.
    #[cfg(feature = "client")]
    pub rpc: client::Options,
}

setters!(Options {
    with_threads threads: Option<usize>,
    with_memory memory: Vec<u64>,
    with_fallback fallback: bool,
    #[cfg(feature = "client")]
    with_rpc rpc: client::Options,
});

impl Default for Options {
    fn default() -> Options {
        Options {
            threads: None,
            memory: Vec::new(),
            fallback: true,
            #[cfg(feature = "client")]
            rpc: client::Options::default(),
        }
    }
}

/// Opens devices that can be used, each mention a device of its own.
pub(super) fn open(asked: &[&Entry], options: &Options) -> Result<Vec<Arc<dyn Device>>, RegistryError> {
    if options.memory.len() > 1 && options.memory.len() != asked.len() {
        return Err(RegistryError::Sizes { sizes: options.memory.len(), devices: asked.len() });
    }
    let places: Vec<Place<'_>> = (0..asked.len())
        .map(|at| Place::new(asked, at, options.memory.get(at).or(options.memory.last())))
        .collect::<Result<_, _>>()?;
    let is_cpu = |place: &&Place<'_>| matches!(place.entry.origin, Origin::Cpu);
    let threads = options.threads.unwrap_or_else(|| (cores() / places.iter().filter(is_cpu).count().max(1)).max(1));
    // The CPUs first: one of them may stand behind others.
    let mut cpus = Vec::new();
    for place in places.iter().filter(is_cpu) {
        cpus.push(cpu(&place.name, threads, place.memory.unwrap_or_else(|| cpu_memory(place.share)))?);
    }
    let second = match cpus.first() {
        _ if !options.fallback || !places.iter().any(Place::lacks) => None,
        Some(first) => Some(Arc::clone(first)),
        // Without work it costs a few sleeping threads.
        None => Some(cpu("CPU", threads, cpu_memory(1))?),
    };
    let mut cpus = cpus.into_iter();
    let mut devices = Vec::with_capacity(places.len());
    for place in &places {
        let device = match &place.entry.origin {
            Origin::Cpu => {
                devices.extend(cpus.next());
                continue;
            }
            Origin::Registered(device) | Origin::Remote(device) => Arc::clone(device),
            Origin::Gpu(gpu) => {
                gpu.open(&place.name, &|free| place.memory.unwrap_or_else(|| gpu_memory(free, place.share)))?
            }
        };
        devices.push(match &second {
            Some(second) if place.lacks() => Fallback::new(device, Arc::clone(second)),
            _ => device,
        });
    }
    Ok(devices)
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
    /// Whether there may be nodes that it does not run, and a CPU does.
    fn lacks(&self) -> bool {
        self.entry.kind != DeviceKind::Cpu && !matches!(self.entry.origin, Origin::Remote(_))
    }

    fn new(asked: &[&'a Entry], at: usize, memory: Option<&u64>) -> Result<Place<'a>, RegistryError> {
        let entry = asked[at];
        let same = |among: &[&Entry]| among.iter().filter(|other| other.name == entry.name).count();
        let (share, number) = (same(asked), same(&asked[..at]));
        let name = match (share, &entry.origin) {
            (1, _) => entry.name.clone(),
            (_, Origin::Cpu) => format!("{}{number}", entry.name),
            (_, Origin::Gpu(_)) => format!("{}.{number}", entry.name),
            (_, Origin::Registered(_) | Origin::Remote(_)) => {
                return Err(RegistryError::Twice { name: entry.name.clone() });
            }
        };
        Ok(Place { entry, name, share: share as u64, memory: memory.copied() })
    }
}

fn cpu(name: &str, threads: usize, memory: u64) -> Result<Arc<dyn Device>, RegistryError> {
    match CpuDevice::new(name, threads, Path::Fast, memory) {
        Ok(device) => Ok(device),
        Err(source) => Err(RegistryError::Open { name: name.to_owned(), source }),
    }
}

/// What the system has free.
pub(super) fn cpu_free() -> u64 {
    available_memory().unwrap_or(UNKNOWN_MEMORY)
}

/// The memory of each of `share` CPU devices.
fn cpu_memory(share: u64) -> u64 {
    let free = cpu_free();
    (free - free / 16) / share
}

/// The memory of each of `share` devices on a GPU that has so much free.
fn gpu_memory(free: u64, share: u64) -> u64 {
    (free - (free / 16).min(GPU_MARGIN)) / share
}

pub(super) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

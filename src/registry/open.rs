//! Devices of a list, opened: names of their own, shares of memory, and a CPU behind those that need one.

use super::backend::cpu::Cpu;
use super::backend::{Open, Request};
use super::{Entry, Origin, RegistryError};
use crate::device::{Device, DeviceKind};
use crate::fallback::Fallback;
#[cfg(feature = "client")]
use crate::rpc::client;
use crate::setters::setters;
use std::num::NonZero;
use std::sync::Arc;

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
    let is_cpu =
        |place: &&Place<'_>| place.entry.kind == DeviceKind::Cpu && matches!(place.entry.origin, Origin::Local { .. });
    let threads = options.threads.unwrap_or_else(|| (cores() / places.iter().filter(is_cpu).count().max(1)).max(1));
    // The CPUs first: one of them may stand behind others.
    let mut cpus = Vec::new();
    for place in places.iter().filter(is_cpu) {
        cpus.push(place.open(threads)?);
    }
    let second = match cpus.first() {
        _ if !options.fallback || !places.iter().any(Place::lacks) => None,
        Some(first) => Some(Arc::clone(first)),
        // Without work it costs a few sleeping threads.
        None => Some(Cpu.open(&Request { name: "CPU", threads, memory: None, share: 1 })?),
    };
    let mut cpus = cpus.into_iter();
    let mut devices = Vec::with_capacity(places.len());
    for place in &places {
        if is_cpu(&place) {
            devices.extend(cpus.next());
            continue;
        }
        let device = place.open(threads)?;
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

    fn open(&self, threads: usize) -> Result<Arc<dyn Device>, RegistryError> {
        match &self.entry.origin {
            Origin::Registered(device) | Origin::Remote(device) => Ok(Arc::clone(device)),
            Origin::Local { opener, .. } => {
                opener.open(&Request { name: &self.name, threads, memory: self.memory, share: self.share })
            }
        }
    }

    fn new(asked: &[&'a Entry], at: usize, memory: Option<&u64>) -> Result<Place<'a>, RegistryError> {
        let entry = asked[at];
        let same = |among: &[&Entry]| among.iter().filter(|other| other.is_same(entry)).count();
        let (share, number) = (same(asked), same(&asked[..at]));
        let name = match (share, &entry.origin) {
            (1, _) => entry.name.clone(),
            // CPU0, but CUDA0.0: a number behind a number.
            (_, Origin::Local { .. }) if entry.name.ends_with(|c: char| c.is_ascii_digit()) => {
                format!("{}.{number}", entry.name)
            }
            (_, Origin::Local { .. }) => format!("{}{number}", entry.name),
            (_, Origin::Registered(_) | Origin::Remote(_)) => {
                return Err(RegistryError::Twice { name: entry.name.clone() });
            }
        };
        Ok(Place { entry, name, share: share as u64, memory: memory.copied() })
    }
}

pub(super) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

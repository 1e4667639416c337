//! Opening a list of devices: unique names, shares of memory, and a CPU device as the fallback of each GPU.

use super::backend::cpu::Cpu;
use super::backend::{DeviceOpener, OpenRequest};
use super::{DeviceEntry, DeviceOrigin, RegistryError};
use crate::device::{Device, DeviceKind, HANG_TIMEOUT, MemoryBudget};
use crate::fallback::Fallback;
#[cfg(feature = "client")]
use crate::rpc::client;
use crate::setters::setters;
use std::num::NonZero;
use std::sync::Arc;
use std::time::Duration;

/// Options for opening devices.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Threads of each CPU device; `None` divides the machine's hardware threads evenly among them.
    pub threads: Option<usize>,
    /// Memory limit of each device in bytes: one value per device in the order of the list, or one for all, or empty. Empty
    /// uses the free memory minus a margin, divided evenly among the occurrences of the same device.
    pub memory: Vec<u64>,
    /// Host memory in bytes that the process needs beside its devices: the default limit of CPU devices leaves at least so much
    /// of the free memory.
    pub host_memory: u64,
    /// Whether a CPU device runs the nodes that a local GPU does not support ([`Fallback`]). Without it the GPU reports such
    /// nodes as unsupported. Set this to false for a scheduler, which places them on a better device.
    pub fallback: bool,
    /// Time without any progress after which a GPU of this machine counts as hung: 60 s.
    pub device_timeout: Duration,
    /// Whether a GPU waits for each kernel launch, so that an error names the kernel at fault. Slow.
    pub launch_check: bool,
    /// Whether a GPU compiles the kernels that clients are likely to need in the background, from its first allocation on.
    pub precompile: bool,
    /// Whether a GPU launches kernels of a CUDA graph while the ones before still run, where it can. Results are the same without it.
    pub programmatic_launch: bool,
    /// Options for connections to servers.
    #[cfg(feature = "client")]
    pub rpc: client::Options,
}

setters!(Options {
    with_threads threads: Option<usize>,
    with_memory memory: Vec<u64>,
    with_host_memory host_memory: u64,
    with_fallback fallback: bool,
    with_device_timeout device_timeout: Duration,
    with_launch_check launch_check: bool,
    with_precompile precompile: bool,
    with_programmatic_launch programmatic_launch: bool,
    #[cfg(feature = "client")]
    with_rpc rpc: client::Options,
});

impl Default for Options {
    fn default() -> Options {
        Options {
            threads: None,
            memory: Vec::new(),
            host_memory: 0,
            fallback: true,
            device_timeout: HANG_TIMEOUT,
            launch_check: false,
            precompile: false,
            programmatic_launch: true,
            #[cfg(feature = "client")]
            rpc: client::Options::default(),
        }
    }
}

/// Opens the devices of a list, one for each entry, also where several entries are the same device. Every entry must be usable.
///
/// # Errors
/// [`RegistryError::MemorySizeCount`] and [`RegistryError::BeyondMachine`] for sizes of memory that do not fit the list or the
/// machine, [`RegistryError::ListedTwice`] for a registered or remote device that the list has twice, or the error of the first
/// device that does not start.
pub(super) fn open_list(entries: &[&DeviceEntry], options: &Options) -> Result<Vec<Arc<dyn Device>>, RegistryError> {
    if options.memory.len() > 1 && options.memory.len() != entries.len() {
        return Err(RegistryError::MemorySizeCount { sizes: options.memory.len(), devices: entries.len() });
    }
    let is_cpu =
        |entry: &DeviceEntry| entry.kind == DeviceKind::Cpu && matches!(entry.origin, DeviceOrigin::Local { .. });
    // A server has a fallback of its own.
    let may_need_fallback = |entry: &DeviceEntry| {
        options.fallback && entry.kind != DeviceKind::Cpu && !matches!(entry.origin, DeviceOrigin::Remote(_))
    };
    let cpus = entries.iter().filter(|entry| is_cpu(entry)).count();
    let threads = options.threads.unwrap_or_else(|| (hardware_threads() / cpus.max(1)).max(1));
    let alone = OpenRequest {
        name: "CPU".to_owned(),
        threads,
        memory: None,
        share: 1,
        shared_limit: None,
        options,
        cpu_memory: MemoryBudget::new(u64::MAX),
    };
    let mut requests = Vec::with_capacity(entries.len());
    for at in 0..entries.len() {
        requests.push((entries[at], request_of(entries, at, &alone)?));
    }
    // The CPU devices first: the first of them is the secondary device of each fallback.
    let cpus = requests.iter().filter(|(entry, _)| is_cpu(entry)).map(|(entry, request)| open(entry, request));
    let cpus = cpus.collect::<Result<Vec<_>, _>>()?;
    let secondary = match cpus.first() {
        _ if !entries.iter().any(|entry| may_need_fallback(entry)) => None,
        Some(first) => Some(Arc::clone(first)),
        // While the fallback has no nodes for it, this device costs a few sleeping threads.
        None => Some(Cpu.open(&alone)?),
    };
    let mut cpus = cpus.into_iter();
    let mut devices = Vec::with_capacity(requests.len());
    for (entry, request) in &requests {
        if is_cpu(entry) {
            devices.extend(cpus.next());
            continue;
        }
        let opened = open(entry, request)?;
        devices.push(match &secondary {
            Some(secondary) if may_need_fallback(entry) => Fallback::new(opened, Arc::clone(secondary)),
            _ => opened,
        });
    }
    Ok(devices)
}

/// The request for one entry of the list, with its part of the options; the rest is that of `alone`. Refuses memory limits that the
/// device can never reach. Memory that is in use now does not count: it may be free later.
fn request_of<'a>(
    entries: &[&DeviceEntry],
    at: usize,
    alone: &OpenRequest<'a>,
) -> Result<OpenRequest<'a>, RegistryError> {
    let (entry, memory) = (entries[at], &alone.options.memory);
    let same = |among: &[&DeviceEntry]| among.iter().filter(|other| other.is_same_device(entry)).count();
    let (share, number) = (same(entries), same(&entries[..at]));
    let name = match (share, &entry.origin) {
        (1, _) => entry.name.clone(),
        // CPU0, but CUDA0.0: `CUDA00` would read as another ordinal.
        (_, DeviceOrigin::Local { .. }) if entry.name.ends_with(|c: char| c.is_ascii_digit()) => {
            format!("{}.{number}", entry.name)
        }
        (_, DeviceOrigin::Local { .. }) => format!("{}{number}", entry.name),
        (_, DeviceOrigin::Registered(_) | DeviceOrigin::Remote(_)) => {
            return Err(RegistryError::ListedTwice { name: entry.name.clone() });
        }
    };
    // One size counts for every entry.
    let limit = |at: usize| memory.get(at).or(memory.last()).copied();
    let same_at = (0..entries.len()).filter(|&other| entries[other].is_same_device(entry));
    let (share, shared_limit) = (share as u64, same_at.filter_map(limit).reduce(u64::saturating_add));
    if let DeviceOrigin::Local { opener, .. } = &entry.origin
        && let (Some(requested), Some(total)) = (shared_limit, opener.total())
        && requested > total
    {
        return Err(RegistryError::BeyondMachine { name: entry.name.clone(), devices: share, requested, total });
    }
    let cpu_memory = Arc::clone(&alone.cpu_memory);
    Ok(OpenRequest { name, memory: limit(at), share, shared_limit, cpu_memory, ..*alone })
}

fn open(entry: &DeviceEntry, request: &OpenRequest<'_>) -> Result<Arc<dyn Device>, RegistryError> {
    match &entry.origin {
        DeviceOrigin::Registered(device) | DeviceOrigin::Remote(device) => Ok(Arc::clone(device)),
        DeviceOrigin::Local { opener, .. } => opener.open(request),
    }
}

/// Number of hardware threads that this process may use.
pub(super) fn hardware_threads() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

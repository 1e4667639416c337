//! Backends: the kinds of local devices. Each implements [`Backend`] and is listed in [`backends`].

pub(super) mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
mod cuda_disabled;

#[cfg(not(feature = "cuda"))]
use self::cuda_disabled as cuda;
use super::{DeviceEntry, DeviceOrigin, Options, RegistryError};
use crate::device::{Device, DeviceError, DeviceKind, MemoryBudget, ModuleLoad};
use std::fmt::Debug;
use std::sync::Arc;

/// The backends of this build, in the order in which their devices are listed. The CPU is last, because it is the default only
/// if no other device is usable.
pub(super) fn backends() -> Vec<Box<dyn Backend>> {
    vec![Box::new(cuda::Cuda::detect()), Box::new(cpu::Cpu)]
}

/// A kind of local device: enumerates its devices.
pub(super) trait Backend {
    /// The prefix of its devices' names (`CUDA`, `CPU`). Registered devices may not have this name, with or without a number.
    fn name_prefix(&self) -> &'static str;

    /// The devices of the machine, including unusable ones. Opens none of them.
    fn enumerate(&self) -> Vec<FoundDevice>;

    /// The reason why the machine has no device of this backend: the missing component and how to install it. `None` if it has
    /// devices, usable or not.
    fn missing_reason(&self) -> Option<String> {
        None
    }
}

/// A device that a backend has enumerated.
pub(super) struct FoundDevice {
    /// Name in lists: the prefix, and a number if the machine may have several such devices.
    pub(super) name: String,
    /// Text for users.
    pub(super) description: String,
    pub(super) kind: DeviceKind,
    /// The number by which a list may also name the device. The registry drops the numbers of all backends but the first in
    /// [`backends`] with numbered devices.
    pub(super) number: Option<usize>,
    /// The reason why the device cannot be opened, if it is unusable.
    pub(super) unusable: Option<String>,
    pub(super) opener: Arc<dyn DeviceOpener>,
}

/// Opens a device of this machine. May be called several times: each call returns a separate device with a share of the memory.
pub(super) trait DeviceOpener: Debug + Send + Sync {
    /// Free memory in bytes at the moment of the call.
    ///
    /// # Errors
    /// The driver's error, if the query fails.
    fn free_memory(&self) -> Result<u64, DeviceError>;

    /// Bytes of memory that the device has in all, used or free; `None` where the system does not report it.
    fn total(&self) -> Option<u64>;

    /// Opens the device as `name`, loads all its kernels and returns the time of each module. Empty for devices without modules.
    ///
    /// # Errors
    /// The driver's error.
    fn load_modules(&self, _name: &str) -> Result<Vec<ModuleLoad>, DeviceError> {
        Ok(Vec::new())
    }

    /// Opens the device.
    ///
    /// # Errors
    /// [`RegistryError`] when the device fails to start.
    fn open(&self, request: &OpenRequest<'_>) -> Result<Arc<dyn Device>, RegistryError>;
}

/// Parameters for opening a device.
pub(super) struct OpenRequest<'a> {
    /// Name of the opened device, distinct from all others of the list.
    pub(super) name: &'a str,
    /// Number of threads, for devices that compute on host threads.
    pub(super) threads: usize,
    /// Memory limit in bytes; `None` is the free memory minus a margin, divided by `share`.
    pub(super) memory: Option<u64>,
    /// The number of occurrences of the same device in the list.
    pub(super) share: u64,
    /// Sum of `memory` over the entries of the list that are the same device; `None` if `memory` is `None`.
    pub(super) shared_limit: Option<u64>,
    /// Options of all devices of the list.
    pub(super) options: &'a Options,
    /// Counts the memory of all CPU devices of the list.
    pub(super) cpu_memory: &'a Arc<MemoryBudget>,
}

impl From<FoundDevice> for DeviceEntry {
    fn from(found: FoundDevice) -> DeviceEntry {
        let FoundDevice { name, description, kind, number, unusable, opener } = found;
        DeviceEntry { name, description, kind, unusable, origin: DeviceOrigin::Local { number, opener } }
    }
}

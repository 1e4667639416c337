//! Backends: the kinds of local devices. Each is a function `detect`, which [`backends`] calls.

pub(super) mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use super::{DeviceEntry, Options, RegistryError};
use crate::device::{Device, DeviceError, MemoryBudget, ModuleLoad};
use std::fmt::Debug;
use std::sync::Arc;

/// A kind of local device, and the devices of the machine.
pub(super) struct Backend {
    /// The prefix of its devices' names (`CUDA`, `CPU`). Registered devices may not have this name, with or without a number.
    pub(super) name_prefix: &'static str,
    /// The devices, including unusable ones, none of them open; or the reason why there are none: the missing component and how to
    /// install it. The registry drops the numbers of all backends but the first with numbered devices.
    pub(super) devices: Result<Vec<DeviceEntry>, String>,
}

/// The backends of this build, in the order in which their devices are listed. The CPU is last, because it is the default only
/// if no other device is usable.
pub(super) fn backends() -> Vec<Backend> {
    #[cfg(feature = "cuda")]
    let cuda = cuda::detect();
    #[cfg(not(feature = "cuda"))]
    let cuda = Backend {
        name_prefix: "CUDA",
        devices: Err(
            "this program is built without CUDA, as every static build is: use the build for glibc, or build it with \
                      the feature `cuda`"
                .to_owned(),
        ),
    };
    vec![cuda, cpu::detect()]
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
    pub(super) name: String,
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
    pub(super) cpu_memory: Arc<MemoryBudget>,
}

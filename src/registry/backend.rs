//! The kinds of devices that this machine may have, one row each in [`backends`].

pub(super) mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
mod no_cuda;

#[cfg(not(feature = "cuda"))]
use self::no_cuda as cuda;
use super::{Entry, Origin, RegistryError};
use crate::device::{Device, DeviceError, DeviceKind};
use std::fmt::Debug;
use std::sync::Arc;

/// The backends of this build, in the order in which their devices are listed. The CPU is last: it is what remains where no
/// other device can be used.
pub(super) fn backends() -> Vec<Box<dyn Backend>> {
    vec![Box::new(cuda::Cuda::detect()), Box::new(cpu::Cpu)]
}

/// A kind of device that this machine may have.
pub(super) trait Backend {
    /// What the names of its devices begin with (`CUDA`, `CPU`). No registered device may have such a name, alone or with a
    /// number behind it.
    fn stem(&self) -> &'static str;

    /// The devices that the machine has, those that cannot be used too. Opens none.
    fn enumerate(&self) -> Vec<Found>;

    /// Why the machine has no device of this backend, where a user expects some: what is missing, and what to do. `None` if it has
    /// devices, also such that cannot be used.
    fn missing(&self) -> Option<String> {
        None
    }
}

/// A device that a backend has found.
pub(super) struct Found {
    /// Its name in lists: the stem, and a number where the machine may have several.
    pub(super) name: String,
    /// For people.
    pub(super) description: String,
    pub(super) kind: DeviceKind,
    /// The number by which a list may also name it. The registry keeps the numbers of the first backend in [`backends`] that has
    /// some, and drops those of others.
    pub(super) number: Option<usize>,
    /// Why it cannot be opened.
    pub(super) unusable: Option<String>,
    pub(super) opener: Arc<dyn Open>,
}

/// Opens a device of this machine, any number of times: each is a device of its own, with a share of the memory.
pub(super) trait Open: Debug + Send + Sync {
    /// Bytes of memory that are free now.
    ///
    /// # Errors
    /// When the device cannot say.
    fn free(&self) -> Result<u64, DeviceError>;

    /// Opens it.
    ///
    /// # Errors
    /// When it does not start.
    fn open(&self, request: &Request<'_>) -> Result<Arc<dyn Device>, RegistryError>;
}

/// How a device is to be opened.
pub(super) struct Request<'a> {
    /// Its name, distinct from those of the others in the list.
    pub(super) name: &'a str,
    /// Threads, for devices that compute on the host's.
    pub(super) threads: usize,
    /// Bytes of memory; `None`: what is free, but for a margin, divided by `share`.
    pub(super) memory: Option<u64>,
    /// How often the list has the same device.
    pub(super) share: u64,
}

impl From<Found> for Entry {
    fn from(found: Found) -> Entry {
        let Found { name, description, kind, number, unusable, opener } = found;
        Entry { name, description, kind, unusable, origin: Origin::Local { number, opener } }
    }
}

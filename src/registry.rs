//! The device registry: enumerates, names and opens this machine's devices, registered devices and devices of servers.
//!
//! Start with [`Registry`]. Opening a list of devices is in `registry/open.rs`, connecting to servers in `registry/remote.rs`,
//! and the kinds of local devices in `registry/backend/`.
//!
//! ```
//! use fanout::registry::{Options, Registry};
//!
//! let registry = Registry::detect();
//! for entry in registry.entries() {
//!     println!("{}: {}", entry.name, entry.description);
//! }
//! let best = registry.best().open(&Options::default().with_threads(Some(1)))?;
//! for feature in best.features() {
//!     println!("{feature}");
//! }
//! # Ok::<(), fanout::registry::RegistryError>(())
//! ```

mod backend;
mod error;
mod open;
#[cfg(feature = "client")]
mod remote;

pub use crate::size::{Bytes, ParseSizeError, parse_bytes, parse_nonzero_bytes};
pub use error::RegistryError;
pub use open::Options;

use crate::device::{Device, DeviceError, DeviceInfo, DeviceKind, ModuleLoad};
use backend::{Backend, DeviceOpener, backends};
use open::open_list;
use std::borrow::Cow;
use std::fmt::Debug;
use std::sync::Arc;

/// The devices of this machine, and devices that the program registered.
#[derive(Clone, Debug)]
pub struct Registry {
    /// The devices of each backend, in the order of the backends, the CPU last; then the registered devices.
    entries: Vec<DeviceEntry>,
    /// Index of the CPU in `entries`.
    cpu: usize,
    /// The name prefix of each backend: `CUDA`, `CPU`.
    name_prefixes: Vec<&'static str>,
    /// Each backend without devices: its name prefix and the reason.
    missing_backends: Vec<(&'static str, String)>,
    /// If no backend found a GPU: the reasons of all backends, joined.
    no_gpu_reason: Option<String>,
}

/// A device of a registry. Not opened yet, unless it was registered or is a server's.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeviceEntry {
    /// Name: `CUDA0`, `CPU`.
    pub name: String,
    /// Text for users: model, memory, instruction sets.
    pub description: String,
    /// CPU or GPU.
    pub kind: DeviceKind,
    /// The reason why the device cannot be opened, if that is known without opening it.
    pub unusable: Option<String>,
    origin: DeviceOrigin,
}

/// The origin of a device, which decides how it is opened.
#[derive(Clone, Debug)]
enum DeviceOrigin {
    /// A device of this machine, opened by its backend.
    Local {
        /// The number by which a list may also name the device.
        number: Option<usize>,
        opener: Arc<dyn DeviceOpener>,
    },
    /// An open device that the program registered.
    Registered(Arc<dyn Device>),
    /// An open device of a server. Needs no local fallback: the server runs unsupported nodes on its own CPU.
    Remote(Arc<dyn Device>),
}

impl Registry {
    /// Enumerates the devices of this machine. Opens none of them.
    pub fn detect() -> Registry {
        Registry::of(backends())
    }

    fn of(backends: Vec<Backend>) -> Registry {
        let name_prefixes = backends.iter().map(|backend| backend.name_prefix).collect();
        let (mut entries, mut missing_backends): (Vec<DeviceEntry>, _) = (Vec::new(), Vec::new());
        for Backend { name_prefix, devices } in backends {
            // A number in a list must name one device, so only the first backend with numbered devices keeps its numbers.
            let keeps_numbers = entries.iter().all(|entry| entry.number().is_none());
            match devices {
                Ok(devices) => entries.extend(devices.into_iter().map(|mut entry| {
                    if let DeviceOrigin::Local { number, .. } = &mut entry.origin {
                        number.take_if(|_| !keeps_numbers);
                    }
                    entry
                })),
                Err(reason) => missing_backends.push((name_prefix, reason)),
            }
        }
        let has_gpu = entries.iter().any(|entry| entry.kind == DeviceKind::Gpu);
        let no_gpu_reason = (!has_gpu && !missing_backends.is_empty())
            .then(|| missing_reasons(&missing_backends).collect::<Vec<_>>().join("; "));
        // Always found, because every build has the CPU's backend.
        let cpu = entries.iter().position(|entry| entry.kind == DeviceKind::Cpu).unwrap_or_default();
        Registry { entries, cpu, name_prefixes, missing_backends, no_gpu_reason }
    }

    /// Adds an open device of any origin. From then on it can be listed, found and opened by its name like a device of this
    /// machine. It is used as it is: [`Options::memory`] and [`Options::threads`] do not apply to it.
    ///
    /// # Errors
    /// [`RegistryError::NameTaken`] when another device has the name; [`RegistryError::InvalidName`] when the name cannot occur
    /// in a list, or has the form of the names of this machine's devices (`CPU0`, `CUDA0.1`).
    pub fn register(&mut self, device: Arc<dyn Device>) -> Result<(), RegistryError> {
        let info = device.info();
        let name = info.name.clone();
        if self.entries.iter().any(|entry| entry.name.eq_ignore_ascii_case(&name)) {
            return Err(RegistryError::NameTaken { name });
        }
        if let Some(reason) = invalid_name_reason(&name, &self.name_prefixes) {
            return Err(RegistryError::InvalidName { name, reason });
        }
        self.entries.push(DeviceEntry::of_open(&device, DeviceOrigin::Registered));
        Ok(())
    }

    /// All devices: the GPUs of each backend by number, then the CPU, then the registered devices.
    pub fn entries(&self) -> &[DeviceEntry] {
        &self.entries
    }

    /// The device with this name (case-insensitive), or the GPU with this number. Includes unusable devices.
    pub fn by_name(&self, name: &str) -> Option<&DeviceEntry> {
        self.entries.iter().find(|entry| entry.matches_name(name))
    }

    /// The devices of this kind, in the order of [`Registry::entries`].
    pub fn by_kind(&self, kind: DeviceKind) -> impl Iterator<Item = &DeviceEntry> {
        self.entries.iter().filter(move |entry| entry.kind == kind)
    }

    /// The usable GPU with the most free memory, or the CPU if there is no usable GPU. With several GPUs this queries the free
    /// memory of each, which initialises their drivers' contexts and may take a second.
    pub fn best(&self) -> &DeviceEntry {
        let gpus: Vec<_> = self.by_kind(DeviceKind::Gpu).filter(|entry| entry.unusable.is_none()).collect();
        if let [only] = gpus[..] {
            return only;
        }
        let free_memory = gpus.into_iter().filter_map(|gpu| match gpu.free_memory() {
            Ok(free) => Some((free, gpu)),
            Err(e) => {
                log::warn!("{} is left out: {e}", gpu.name);
                None
            }
        });
        // `rev`, because `max_by_key` returns the last of several maxima and the first is wanted.
        free_memory.rev().max_by_key(|(free, _)| *free).map_or(&self.entries[self.cpu], |(_, gpu)| gpu)
    }

    /// The reason why this machine has no GPU: for each backend, the missing component and how to install it. `None` if any
    /// backend has a GPU.
    pub fn no_gpu_reason(&self) -> Option<&str> {
        self.no_gpu_reason.as_deref()
    }

    /// The default list of devices if the user specified none: all usable GPUs, or the CPU if there are none. Also returns
    /// notes for the log: one per unusable GPU, or, if the CPU is used, one with all reasons.
    pub fn default_list(&self) -> (String, Vec<String>) {
        let gpus = || self.by_kind(DeviceKind::Gpu);
        let usable: Vec<_> = gpus().filter(|entry| entry.unusable.is_none()).map(|entry| &*entry.name).collect();
        let left_out =
            |entry: &DeviceEntry| entry.unusable.as_ref().map(|why| format!("{} is left out: {why}", entry.name));
        let mut notes: Vec<_> = gpus().filter_map(left_out).collect();
        if !usable.is_empty() {
            return (usable.join(","), notes);
        }
        notes.extend(missing_reasons(&self.missing_backends).map(str::to_owned));
        (self.entries[self.cpu].name.clone(), vec![format!("no GPU, the CPU is used: {}", notes.join("; "))])
    }

    /// Opens a comma-separated list of devices, given by name or, for GPUs, by number: `0,1`, `CUDA0,CUDA1,CPU`. Each
    /// occurrence of a device of this machine is opened as a separate device; devices with the same name get numbers: `CPU,CPU`
    /// opens `CPU0` and `CPU1`, and `0,0` opens `CUDA0.0` and `CUDA0.1`.
    ///
    /// A name with a colon refers to a server: `10.0.0.5:50052` or `[fd00::5]:50052` to all its devices, `10.0.0.5:50052/0` to
    /// its first device, and `10.0.0.5:50052/CUDA0` to its device of that name. The devices of a server share a connection;
    /// [`Options::memory`] and [`Options::threads`] do not apply to them. All servers are connected concurrently. Such names
    /// need the feature `client`.
    ///
    /// With [`Options::fallback`], nodes that a local GPU does not support run on the first local CPU device of the list, or on
    /// a CPU device that is opened in addition and not returned.
    ///
    /// # Errors
    /// [`RegistryError`] for an unknown name, an unusable device, or a device that fails to open.
    pub fn open(&self, list: &str, options: &Options) -> Result<Vec<Arc<dyn Device>>, RegistryError> {
        let names = || list.split(',').map(str::trim);
        let is_remote = |name: &&str| cfg!(feature = "client") && self.by_name(name).is_none() && name.contains(':');
        // Reports errors in the list before it connects to servers, which may take long.
        names().filter(|name| !is_remote(name)).try_for_each(|name| self.find(name).map(drop))?;
        if !options.memory.is_empty() && names().all(|name| is_remote(&name)) {
            return Err(RegistryError::MemoryOfServers);
        }
        #[cfg(feature = "client")]
        let endpoints = remote::connect_all(names().filter(is_remote), &options.rpc)?;
        let mut listed: Vec<Cow<'_, DeviceEntry>> = Vec::new();
        for name in names() {
            #[cfg(feature = "client")]
            if is_remote(&name) {
                listed.extend(remote::devices(name, &endpoints)?.into_iter().map(Cow::Owned));
                continue;
            }
            listed.push(Cow::Borrowed(self.find(name)?));
        }
        open_list(&listed.iter().map(|entry| &**entry).collect::<Vec<_>>(), options)
    }

    fn find(&self, name: &str) -> Result<&DeviceEntry, RegistryError> {
        let available = || {
            let usable = self.entries.iter().filter(|entry| entry.unusable.is_none());
            usable.map(|entry| &*entry.name).collect::<Vec<_>>().join(", ")
        };
        match (self.by_name(name), self.missing_reason(name)) {
            (Some(entry), _) => entry.check_usable(available).map(|()| entry),
            (None, Some(why)) => {
                Err(RegistryError::NoGpu { name: name.to_owned(), reason: why.to_owned(), available: available() })
            }
            (None, None) => Err(RegistryError::UnknownDevice { name: name.to_owned(), available: available() }),
        }
    }

    /// The reason why a device is missing that other machines may have. For a backend's prefix with a number: that backend's
    /// reason; for a number alone: [`Registry::no_gpu_reason`].
    fn missing_reason(&self, name: &str) -> Option<&str> {
        let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
        if stem.len() == name.len() {
            return None;
        }
        if stem.is_empty() {
            return self.no_gpu_reason();
        }
        let of_stem = self.missing_backends.iter().find(|(own, _)| own.eq_ignore_ascii_case(stem));
        of_stem.map(|(_, why)| &**why)
    }
}

impl DeviceEntry {
    fn of_open(device: &Arc<dyn Device>, origin: fn(Arc<dyn Device>) -> DeviceOrigin) -> DeviceEntry {
        let DeviceInfo { name, description, kind, .. } = device.info().clone();
        DeviceEntry { name, description, kind, unusable: None, origin: origin(Arc::clone(device)) }
    }

    /// Opens this device, as [`Registry::open`] does for a list of its name alone.
    ///
    /// # Errors
    /// [`RegistryError`] when the device is unusable or fails to open.
    pub fn open(&self, options: &Options) -> Result<Arc<dyn Device>, RegistryError> {
        self.check_usable(String::new)?;
        let none = || DeviceError::Bug("a list of one device opened none".to_owned());
        open_list(&[self], options)?.pop().ok_or_else(none).map_err(RegistryError::Device)
    }

    fn check_usable(&self, available: impl FnOnce() -> String) -> Result<(), RegistryError> {
        let unusable = |reason: &String| RegistryError::Unusable {
            name: self.name.clone(),
            reason: reason.clone(),
            available: available(),
        };
        self.unusable.as_ref().map_or(Ok(()), |reason| Err(unusable(reason)))
    }

    fn matches_name(&self, name: &str) -> bool {
        self.number().is_some_and(|number| number.to_string() == name) || self.name.eq_ignore_ascii_case(name)
    }

    /// The number by which a list may also name it.
    fn number(&self) -> Option<usize> {
        if let DeviceOrigin::Local { number, .. } = self.origin { number } else { None }
    }

    /// Whether both entries are the same device, whether a list named it by name or by number.
    fn is_same_device(&self, other: &DeviceEntry) -> bool {
        match (&self.origin, &other.origin) {
            (DeviceOrigin::Local { opener: one, .. }, DeviceOrigin::Local { opener: other, .. }) => {
                Arc::ptr_eq(one, other)
            }
            (
                DeviceOrigin::Registered(one) | DeviceOrigin::Remote(one),
                DeviceOrigin::Registered(other) | DeviceOrigin::Remote(other),
            ) => one.info().id == other.info().id,
            _ => false,
        }
    }

    /// Free memory in bytes at the moment of the call. For a GPU this creates the driver's context if there is none yet.
    ///
    /// # Errors
    /// The driver's or the connection's error, if the query fails.
    pub fn free_memory(&self) -> Result<u64, DeviceError> {
        match &self.origin {
            DeviceOrigin::Local { opener, .. } => opener.free_memory(),
            DeviceOrigin::Registered(device) | DeviceOrigin::Remote(device) => {
                device.memory().map(|memory| memory.free)
            }
        }
    }

    /// Opens a GPU of this machine, loads all its kernels, and returns the time of each module: of compiling it, or of reading
    /// it from the driver's cache. Empty for other devices.
    ///
    /// # Errors
    /// The driver's error.
    pub fn load_modules(&self) -> Result<Vec<ModuleLoad>, DeviceError> {
        match &self.origin {
            DeviceOrigin::Local { opener, .. } => opener.load_modules(&self.name),
            DeviceOrigin::Registered(_) | DeviceOrigin::Remote(_) => Ok(Vec::new()),
        }
    }
}

/// The reason of each backend without devices.
fn missing_reasons<'a>(missing: &'a [(&'static str, String)]) -> impl Iterator<Item = &'a str> {
    missing.iter().map(|(_, why)| &**why)
}

/// The reason why a registered device cannot have this name; `None` for a valid name.
fn invalid_name_reason(name: &str, name_prefixes: &[&str]) -> Option<&'static str> {
    let stem = name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.');
    if name.is_empty() || name.trim() != name {
        Some("a name has at least one character, and no space around it")
    } else if name.contains(',') {
        Some("a comma separates names in a list")
    } else if stem.is_empty() || name_prefixes.iter().any(|own| stem.eq_ignore_ascii_case(own)) {
        Some("the name is reserved for this machine's processors and GPUs")
    } else {
        None
    }
}

#[cfg(test)]
mod tests;

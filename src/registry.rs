//! Which devices there are, by name, and how to open them: this machine's, and those that were registered.
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
mod size;

pub use error::RegistryError;
pub use open::Options;
pub use size::{BadSize, parse_bytes};

use crate::device::{Device, DeviceError, DeviceKind};
use backend::{Backend, Open, backends};
use open::open;
use std::borrow::Cow;
use std::fmt::Debug;
use std::sync::Arc;

/// The devices of this machine, and others that were registered.
#[derive(Clone, Debug)]
pub struct Registry {
    /// The devices of each backend in its order, the CPU last; then what was registered.
    entries: Vec<Entry>,
    /// Index of the CPU in `entries`.
    cpu: usize,
    /// What the names of this machine's own devices begin with.
    stems: Vec<&'static str>,
    /// The stem of each backend without devices, and why it has none.
    missing: Vec<(&'static str, String)>,
    /// Why this machine has no GPU: the reasons in `missing`, where no backend found a GPU.
    no_gpu: Option<String>,
}

/// A device that can be opened.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Entry {
    /// Its name: `CUDA0`, `CPU`.
    pub name: String,
    /// For people.
    pub description: String,
    /// What it is.
    pub kind: DeviceKind,
    /// Why it cannot be opened, where that is known.
    pub unusable: Option<String>,
    origin: Origin,
}

/// How a device is opened.
#[derive(Clone, Debug)]
enum Origin {
    /// By its backend.
    Local {
        /// The number by which a list may also name it.
        number: Option<usize>,
        opener: Arc<dyn Open>,
    },
    /// It is open.
    Registered(Arc<dyn Device>),
    /// It is open, behind a server, which has a CPU for what the device does not run.
    Remote(Arc<dyn Device>),
}

impl Registry {
    /// Looks what this machine has.
    pub fn detect() -> Registry {
        Registry::of(backends())
    }

    fn of(backends: Vec<Box<dyn Backend>>) -> Registry {
        let stems = backends.iter().map(|backend| backend.stem()).collect();
        let mut entries: Vec<Entry> = Vec::new();
        for backend in &backends {
            let mut found = backend.enumerate();
            // A number in a list names one device: those of the first backend with numbers count.
            if entries.iter().any(|entry| entry.number().is_some()) {
                found.iter_mut().for_each(|found| found.number = None);
            }
            entries.extend(found.into_iter().map(Entry::from));
        }
        let missing: Vec<_> =
            backends.iter().filter_map(|backend| Some((backend.stem(), backend.missing()?))).collect();
        let has_gpu = entries.iter().any(|entry| entry.kind == DeviceKind::Gpu);
        let no_gpu = (!has_gpu && !missing.is_empty()).then(|| reasons(&missing).collect::<Vec<_>>().join("; "));
        // There is always one: every build has the CPU's backend.
        let cpu = entries.iter().position(|entry| entry.kind == DeviceKind::Cpu).unwrap_or_default();
        Registry { entries, cpu, stems, missing, no_gpu }
    }

    /// Adds a device of any origin: from now on it is found and opened under its name like those of this machine. It is
    /// used as it was made: sizes of memory and numbers of threads do not apply to it.
    ///
    /// # Errors
    /// [`RegistryError::Taken`] when there is one of its name; [`RegistryError::Name`] when a list could not name it, or
    /// its name is of those that lists give to the machine's own devices (`CPU0`, `CUDA0.1`).
    pub fn register(&mut self, device: Arc<dyn Device>) -> Result<(), RegistryError> {
        let info = device.info();
        let name = info.name.clone();
        if self.entries.iter().any(|entry| entry.name.eq_ignore_ascii_case(&name)) {
            return Err(RegistryError::Taken { name });
        }
        if let Some(reason) = misnamed(&name, &self.stems) {
            return Err(RegistryError::Name { name, reason });
        }
        let (description, kind) = (info.description.clone(), info.kind);
        self.entries.push(Entry { name, description, kind, unusable: None, origin: Origin::Registered(device) });
        Ok(())
    }

    /// The devices: the GPUs of each backend by their numbers, then the CPU, then what was registered.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The device of a name, or the GPU of a number; also one that cannot be used. Upper and lower case are the same.
    pub fn by_name(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.is(name))
    }

    /// The devices of a kind, in the order of [`Registry::entries`].
    pub fn by_kind(&self, kind: DeviceKind) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(move |entry| entry.kind == kind)
    }

    /// The GPU that has most memory free, of those that can be used; the CPU where there is none. Of several GPUs each is
    /// asked, which may take a moment.
    pub fn best(&self) -> &Entry {
        let gpus: Vec<_> = self.by_kind(DeviceKind::Gpu).filter(|entry| entry.unusable.is_none()).collect();
        if let [only] = gpus[..] {
            return only;
        }
        let asked = gpus.into_iter().filter_map(|gpu| match gpu.free() {
            Ok(free) => Some((free, gpu)),
            Err(e) => {
                log::warn!("{} is left out: {e}", gpu.name);
                None
            }
        });
        // The first one of equals.
        asked.rev().max_by_key(|(free, _)| *free).map_or(&self.entries[self.cpu], |(_, gpu)| gpu)
    }

    /// Why there is no GPU among those of this machine: what each backend lacks, and what to do. `None` where there is one, also
    /// if other backends have none.
    pub fn no_gpu(&self) -> Option<&str> {
        self.no_gpu.as_deref()
    }

    /// The list to open where the user has chosen none: all GPUs that can be used, or the CPU if there is none. With it, a note for
    /// each GPU that is left out; where the CPU is used, one note with every reason.
    pub fn default_list(&self) -> (String, Vec<String>) {
        let gpus = || self.by_kind(DeviceKind::Gpu);
        let usable: Vec<_> = gpus().filter(|entry| entry.unusable.is_none()).map(|entry| &*entry.name).collect();
        let left_out = |entry: &Entry| entry.unusable.as_ref().map(|why| format!("{} is left out: {why}", entry.name));
        let mut notes: Vec<_> = gpus().filter_map(left_out).collect();
        if !usable.is_empty() {
            return (usable.join(","), notes);
        }
        notes.extend(reasons(&self.missing).map(str::to_owned));
        (self.entries[self.cpu].name.clone(), vec![format!("no GPU, the CPU is used: {}", notes.join("; "))])
    }

    /// Opens a list of devices separated by commas: by name, GPUs also by number: `0,1`, `CUDA0,CUDA1,CPU`. Each mention
    /// of a device of this machine is a device of its own; those of one name get numbers: `CPU,CPU` are `CPU0` and
    /// `CPU1`, `0,0` are `CUDA0.0` and `CUDA0.1`.
    ///
    /// A name with a colon is a server's: `10.0.0.5:50052` or `[fd00::5]:50052` are all its devices, `10.0.0.5:50052/0` is the
    /// first, and so is `10.0.0.5:50052/CUDA0` if that is its name. The devices of a server share a connection; sizes of
    /// memory and numbers of threads do not apply to them. All servers are connected to at the same time. Such names need the
    /// feature `client`.
    ///
    /// With [`Options::fallback`], what a device that is no CPU does not run, the first of this machine's CPU devices in
    /// the list runs for it, or one that the list does not show.
    ///
    /// # Errors
    /// [`RegistryError`] for a name that is not there, or a device that does not start.
    pub fn open(&self, list: &str, options: &Options) -> Result<Vec<Arc<dyn Device>>, RegistryError> {
        let names = || list.split(',').map(str::trim);
        let far = |name: &&str| cfg!(feature = "client") && self.by_name(name).is_none() && name.contains(':');
        // What is wrong with the list is told before any server is waited for.
        names().filter(|name| !far(name)).try_for_each(|name| self.find(name).map(drop))?;
        #[cfg(feature = "client")]
        let endpoints = remote::connect(names().filter(far), &options.rpc)?;
        let mut asked: Vec<Cow<'_, Entry>> = Vec::new();
        for name in names() {
            #[cfg(feature = "client")]
            if far(&name) {
                asked.extend(remote::devices(name, &endpoints)?.into_iter().map(Cow::Owned));
                continue;
            }
            asked.push(Cow::Borrowed(self.find(name)?));
        }
        open(&asked.iter().map(|entry| &**entry).collect::<Vec<_>>(), options)
    }

    fn find(&self, name: &str) -> Result<&Entry, RegistryError> {
        let known = || {
            let usable = self.entries.iter().filter(|entry| entry.unusable.is_none());
            usable.map(|entry| &*entry.name).collect::<Vec<_>>().join(", ")
        };
        match (self.by_name(name), self.why_missing(name)) {
            (Some(entry), _) => entry.usable(known).map(|()| entry),
            (None, Some(why)) => {
                Err(RegistryError::NoGpu { name: name.to_owned(), why: why.to_owned(), known: known() })
            }
            (None, None) => Err(RegistryError::Unknown { name: name.to_owned(), known: known() }),
        }
    }

    /// Why there is no device of a name that other machines may have: for a stem with a number, the reason of that backend; for
    /// a number alone, that of all GPUs.
    fn why_missing(&self, name: &str) -> Option<&str> {
        let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
        if stem.len() == name.len() {
            return None;
        }
        if stem.is_empty() {
            return self.no_gpu();
        }
        let of_stem = self.missing.iter().find(|(own, _)| own.eq_ignore_ascii_case(stem));
        of_stem.map(|(_, why)| &**why)
    }
}

impl Entry {
    /// Opens this one, as a list with its name alone would.
    ///
    /// # Errors
    /// [`RegistryError`] when it cannot be used or does not start.
    pub fn open(&self, options: &Options) -> Result<Arc<dyn Device>, RegistryError> {
        self.usable(String::new)?;
        let none = || DeviceError::Bug("a list of one device opened none".to_owned());
        open(&[self], options)?.pop().ok_or_else(none).map_err(RegistryError::Device)
    }

    fn usable(&self, known: impl FnOnce() -> String) -> Result<(), RegistryError> {
        let no = |reason: &String| RegistryError::Unusable {
            name: self.name.clone(),
            reason: reason.clone(),
            known: known(),
        };
        self.unusable.as_ref().map_or(Ok(()), |reason| Err(no(reason)))
    }

    fn is(&self, name: &str) -> bool {
        self.number().is_some_and(|number| number.to_string() == name) || self.name.eq_ignore_ascii_case(name)
    }

    /// The number by which a list may also name it.
    fn number(&self) -> Option<usize> {
        if let Origin::Local { number, .. } = self.origin { number } else { None }
    }

    /// Whether both are the same device, however a list has named it.
    fn is_same(&self, other: &Entry) -> bool {
        match (&self.origin, &other.origin) {
            (Origin::Local { opener: one, .. }, Origin::Local { opener: other, .. }) => Arc::ptr_eq(one, other),
            (Origin::Registered(one) | Origin::Remote(one), Origin::Registered(other) | Origin::Remote(other)) => {
                one.info().id == other.info().id
            }
            _ => false,
        }
    }

    /// Bytes of memory that it has free now. A GPU's are known once its context stands, which this waits for.
    ///
    /// # Errors
    /// When the device cannot say.
    pub fn free(&self) -> Result<u64, DeviceError> {
        match &self.origin {
            Origin::Local { opener, .. } => opener.free(),
            Origin::Registered(device) | Origin::Remote(device) => device.memory().map(|memory| memory.free),
        }
    }
}

/// Why each backend has no devices.
fn reasons<'a>(missing: &'a [(&'static str, String)]) -> impl Iterator<Item = &'a str> {
    missing.iter().map(|(_, why)| &**why)
}

/// Why a registered device cannot have a name.
fn misnamed(name: &str, stems: &[&str]) -> Option<&'static str> {
    let stem = name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.');
    if name.is_empty() || name.trim() != name {
        Some("a name has at least one character, and no space around it")
    } else if name.contains(',') {
        Some("a comma separates names in a list")
    } else if stem.is_empty() || stems.iter().any(|own| stem.eq_ignore_ascii_case(own)) {
        Some("such names are those of this machine's processors and GPUs")
    } else {
        None
    }
}

#[cfg(test)]
mod tests;

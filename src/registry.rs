//! Which devices this machine has, by name, and how to open them.

use std::num::NonZero;
use std::sync::Arc;

use thiserror::Error;

use crate::cpu::{CpuDevice, Path, available_memory, instruction_set};
use crate::device::Device;

/// The memory of the CPU where the system does not say what it has.
const UNKNOWN_MEMORY: u64 = 8 << 30;

/// The devices of this machine.
#[derive(Clone, Debug)]
pub struct Registry {
    entries: Vec<Entry>,
}

/// A device that can be opened.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its name: `CPU`.
    pub name: String,
    /// For people.
    pub description: String,
}

/// How to open devices.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Threads of each CPU device; `None`: the machine's, shared evenly among them.
    pub threads: Option<usize>,
    /// Bytes of memory of each CPU device; `None`: what the machine has left but for a sixteenth, shared evenly.
    pub memory: Option<u64>,
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
        /// Numbers and names of what there is.
        known: String,
    },
    /// The device cannot start.
    #[error("{name}: {source}")]
    Open {
        /// The device.
        name: String,
        /// The system's word.
        source: std::io::Error,
    },
}

impl Registry {
    /// Looks what this machine has.
    pub fn detect() -> Registry {
        let cores = cores();
        let memory =
            available_memory().map_or("unknown memory".to_owned(), |bytes| format!("{} MiB free", bytes >> 20));
        let description = format!("this machine's processors: {cores} threads, {}, {memory}", instruction_set());
        Registry { entries: vec![Entry { name: "CPU".to_owned(), description }] }
    }

    /// The devices, in order of their numbers.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Opens a list of devices, each given by name or number and separated by commas: `CPU`, `0`, `CPU,CPU`. Each
    /// mention is a device of its own; several of one name get a number behind it.
    ///
    /// # Errors
    /// [`RegistryError`] for a name that is not there, or a device that does not start.
    pub fn open(&self, list: &str, options: &Options) -> Result<Vec<Arc<dyn Device>>, RegistryError> {
        let asked: Vec<&Entry> = list.split(',').map(|name| self.find(name.trim())).collect::<Result<_, _>>()?;
        let share = asked.len();
        let threads = options.threads.unwrap_or_else(|| (cores() / share).max(1));
        let memory = options.memory.unwrap_or_else(|| {
            let free = available_memory().unwrap_or(UNKNOWN_MEMORY);
            (free - free / 16) / share as u64
        });
        let open = |(number, entry): (usize, &&Entry)| {
            let name = if share == 1 { entry.name.clone() } else { format!("{}{number}", entry.name) };
            match CpuDevice::new(&name, threads, Path::Fast, memory) {
                Ok(device) => Ok(device as Arc<dyn Device>),
                Err(source) => Err(RegistryError::Open { name, source }),
            }
        };
        asked.iter().enumerate().map(open).collect()
    }

    fn find(&self, name: &str) -> Result<&Entry, RegistryError> {
        let by_name = self.entries.iter().find(|entry| entry.name.eq_ignore_ascii_case(name));
        let by_number = || name.parse().ok().and_then(|number: usize| self.entries.get(number));
        by_name.or_else(by_number).ok_or_else(|| RegistryError::Unknown {
            name: name.to_owned(),
            known: self
                .entries
                .iter()
                .enumerate()
                .map(|(i, e)| format!("{i} {}", e.name))
                .collect::<Vec<_>>()
                .join(", "),
        })
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &str) -> Result<Vec<String>, String> {
        let options = Options { threads: Some(1), memory: Some(1 << 20) };
        let opened = Registry::detect().open(list, &options).map_err(|e| e.to_string())?;
        Ok(opened.iter().map(|device| device.info().name.clone()).collect())
    }

    #[test]
    fn devices_are_opened_by_name_or_number() {
        for list in ["CPU", "cpu", " 0 "] {
            assert_eq!(names(list), Ok(vec!["CPU".to_owned()]), "{list:?}");
        }
        assert_eq!(names("CPU,0"), Ok(vec!["CPU0".to_owned(), "CPU1".to_owned()]));
    }

    #[test]
    fn a_bad_name_lists_what_there_is() {
        for (list, name) in [("CUDA0", "CUDA0"), ("CPU,1", "1"), ("", ""), ("CPU,", ""), ("-1", "-1")] {
            assert_eq!(names(list), Err(format!("no device {name:?}; there are: 0 CPU")), "{list:?}");
        }
    }

    #[test]
    fn memory_is_shared_unless_it_is_given() {
        let open = |list, memory| {
            let devices = Registry::detect().open(list, &Options { threads: Some(1), memory }).unwrap();
            devices[0].memory().unwrap().total
        };
        assert_eq!(open("CPU,CPU", Some(5 << 20)), 5 << 20);
        assert!(open("CPU,CPU,CPU,CPU", None) < open("CPU", None) / 2);
    }
}

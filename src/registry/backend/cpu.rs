//! The CPU backend: this machine's processors as one device.

use super::super::open::hardware_threads;
use super::super::{DeviceEntry, DeviceOrigin, RegistryError};
use super::{Backend, DeviceOpener, OpenRequest};
use crate::cpu::{CpuDevice, MathMode, SiblingMemory, available_memory, instruction_set, total_memory};
use crate::device::{Device, DeviceError, DeviceKind};
use std::sync::Arc;

/// Assumed free memory, in bytes, if the system does not report it.
const DEFAULT_MEMORY_BYTES: u64 = 8 << 30;

/// The processors, as one device.
pub(in super::super) fn detect() -> Backend {
    let memory = available_memory().map_or("unknown memory".to_owned(), |bytes| format!("{} MiB free", bytes >> 20));
    let description =
        format!("this machine's processors: {} threads, {}, {memory}", hardware_threads(), instruction_set());
    let device = DeviceEntry {
        name: "CPU".to_owned(),
        description,
        kind: DeviceKind::Cpu,
        unusable: None,
        origin: DeviceOrigin::Local { number: None, opener: Arc::new(Cpu) },
    };
    Backend { name_prefix: "CPU", devices: Ok(vec![device]) }
}

#[derive(Debug)]
pub(in super::super) struct Cpu;

impl DeviceOpener for Cpu {
    fn free_memory(&self) -> Result<u64, DeviceError> {
        Ok(free())
    }

    fn total(&self) -> Option<u64> {
        total_memory()
    }

    fn open(&self, request: &OpenRequest<'_>) -> Result<Arc<dyn Device>, RegistryError> {
        let memory =
            request.memory.unwrap_or_else(|| default_memory(free(), request.options.host_memory) / request.share);
        let limit = request.shared_limit.unwrap_or(memory.saturating_mul(request.share));
        let siblings = SiblingMemory { used: Arc::clone(&request.cpu_memory), limit };
        match CpuDevice::with_siblings(&request.name, request.threads, MathMode::Fast, memory, siblings) {
            Ok(device) => Ok(device),
            Err(error) => Err(RegistryError::CpuStart { name: request.name.clone(), error }),
        }
    }
}

/// Default limit of the CPU devices together: the free memory less a sixteenth, or less what the process needs beside them.
fn default_memory(free: u64, host_memory: u64) -> u64 {
    free.saturating_sub(host_memory.max(free / 16))
}

/// Free memory of the system in bytes.
fn free() -> u64 {
    available_memory().unwrap_or(DEFAULT_MEMORY_BYTES)
}

#[cfg(test)]
mod tests {
    use super::default_memory;

    #[test]
    fn default_memory_leaves_a_sixteenth_or_the_host_memory() {
        for (free, host_memory, want) in
            [(1600, 0, 1500), (1600, 100, 1500), (1600, 400, 1200), (1600, 2000, 0), (0, 0, 0)]
        {
            assert_eq!(default_memory(free, host_memory), want, "{free}, {host_memory}");
        }
    }
}

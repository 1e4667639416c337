//! The processors of this machine as a backend.

use super::super::RegistryError;
use super::super::open::cores;
use super::{Backend, Found, Open, Request};
use crate::cpu::{CpuDevice, Path, available_memory, instruction_set};
use crate::device::{Device, DeviceError, DeviceKind};
use std::sync::Arc;

/// The memory of the CPU where the system does not say what it has.
const UNKNOWN_MEMORY: u64 = 8 << 30;

#[derive(Debug)]
pub(in super::super) struct Cpu;

impl Backend for Cpu {
    fn stem(&self) -> &'static str {
        "CPU"
    }

    fn enumerate(&self) -> Vec<Found> {
        let memory =
            available_memory().map_or("unknown memory".to_owned(), |bytes| format!("{} MiB free", bytes >> 20));
        vec![Found {
            name: self.stem().to_owned(),
            description: format!("this machine's processors: {} threads, {}, {memory}", cores(), instruction_set()),
            kind: DeviceKind::Cpu,
            number: None,
            unusable: None,
            opener: Arc::new(Cpu),
        }]
    }
}

impl Open for Cpu {
    fn free(&self) -> Result<u64, DeviceError> {
        Ok(free())
    }

    fn open(&self, request: &Request<'_>) -> Result<Arc<dyn Device>, RegistryError> {
        let memory = request.memory.unwrap_or_else(|| (free() - free() / 16) / request.share);
        match CpuDevice::new(request.name, request.threads, Path::Fast, memory) {
            Ok(device) => Ok(device),
            Err(source) => Err(RegistryError::Open { name: request.name.to_owned(), source }),
        }
    }
}

/// What the system has free.
fn free() -> u64 {
    available_memory().unwrap_or(UNKNOWN_MEMORY)
}

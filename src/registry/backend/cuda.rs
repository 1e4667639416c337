//! The CUDA backend: the GPUs of the CUDA driver.

use super::super::{DeviceEntry, DeviceOrigin, Options, RegistryError};
use super::{Backend, DeviceOpener, OpenRequest};
use crate::cuda::{self, CudaDevice, CudaOptions, Gpu};
use crate::device::{Device, DeviceError, DeviceKind, ModuleLoad};
use std::sync::Arc;

/// GPU memory in bytes that is left for uses other than buffers, out of the free memory after the context was created; less on
/// small GPUs, see `open`. It holds what loaded kernels take beyond their estimate, the driver's CUDA graphs of repeated programs,
/// and the rounding of each buffer to 2 MiB (a client has some tens of buffers).
const GPU_MARGIN_BYTES: u64 = 512 << 20;

/// Loads the CUDA driver, if it is installed, and lists its GPUs, including those for which this crate has no kernels.
pub(super) fn detect() -> Backend {
    let entry = |gpu: Gpu| DeviceEntry {
        name: format!("CUDA{}", gpu.ordinal),
        description: gpu.to_string(),
        kind: DeviceKind::Gpu,
        unusable: gpu.check_supported().err(),
        origin: DeviceOrigin::Local { number: Some(gpu.ordinal), opener: Arc::new(gpu) },
    };
    let gpus = cuda::detect().map_err(|missing| missing.to_string());
    Backend { name_prefix: "CUDA", devices: gpus.map(|gpus| gpus.into_iter().map(entry).collect()) }
}

impl DeviceOpener for Gpu {
    /// Creates the GPU's context if there is none yet: the driver reports free memory only with a context.
    fn free_memory(&self) -> Result<u64, DeviceError> {
        CudaDevice::free(self)
    }

    fn total(&self) -> Option<u64> {
        Some(self.memory)
    }

    fn load_modules(&self, name: &str) -> Result<Vec<ModuleLoad>, DeviceError> {
        CudaDevice::new(name, self, u64::MAX)?.load_modules()
    }

    fn open(&self, request: &OpenRequest<'_>) -> Result<Arc<dyn Device>, RegistryError> {
        let share = |free: u64| (free - (free / 16).min(GPU_MARGIN_BYTES)) / request.share;
        let memory = |free| request.memory.unwrap_or_else(|| share(free));
        let Options { device_timeout, launch_check, precompile, programmatic_launch, .. } = *request.options;
        let options = CudaOptions { device_timeout, launch_check, precompile, programmatic_launch };
        Ok(CudaDevice::with_options(&request.name, self, memory, options)?)
    }
}

//! The CUDA backend: the GPUs of the CUDA driver.

use super::super::{Options, RegistryError};
use super::{Backend, DeviceOpener, FoundDevice, OpenRequest};
use crate::cuda::{self, CudaDevice, CudaOptions, CudaUnavailable, Gpu};
use crate::device::{Device, DeviceError, DeviceKind, ModuleLoad};
use std::sync::Arc;

/// GPU memory in bytes that is left for uses other than buffers, out of the free memory after the context was created; less on
/// small GPUs, see `open`. It holds what loaded kernels take beyond their estimate, the driver's CUDA graphs of repeated programs,
/// and the rounding of each buffer to 2 MiB (a client has some tens of buffers).
const GPU_MARGIN_BYTES: u64 = 512 << 20;

/// The GPUs that the driver lists, including those for which this crate has no kernels; or the reason why there are none.
pub(super) struct Cuda(Result<Vec<Gpu>, CudaUnavailable>);

impl Cuda {
    /// Loads the CUDA driver, if it is installed, and lists its GPUs.
    pub(super) fn detect() -> Cuda {
        Cuda(cuda::detect())
    }
}

impl Backend for Cuda {
    fn name_prefix(&self) -> &'static str {
        "CUDA"
    }

    fn enumerate(&self) -> Vec<FoundDevice> {
        let found = |gpu: &Gpu| FoundDevice {
            name: format!("{}{}", self.name_prefix(), gpu.ordinal),
            description: gpu.to_string(),
            kind: DeviceKind::Gpu,
            number: Some(gpu.ordinal),
            unusable: gpu.check_supported().err(),
            opener: Arc::new(gpu.clone()),
        };
        self.0.iter().flatten().map(found).collect()
    }

    fn missing_reason(&self) -> Option<String> {
        self.0.as_ref().err().map(CudaUnavailable::to_string)
    }
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
        Ok(CudaDevice::with_options(request.name, self, memory, options)?)
    }
}

//! The GPUs of the CUDA driver as a backend.

use super::super::RegistryError;
use super::{Backend, Found, Open, Request};
use crate::cuda::{self, CudaDevice, Gpu, NoCuda};
use crate::device::{Device, DeviceError, DeviceKind};
use std::sync::Arc;

/// What a GPU keeps for what is not in buffers: at most so much of what is free once its context stands. That is kernels
/// as they are loaded (tens of MiB for a model), the graphs that the driver holds for repeated programs, and what it
/// rounds each buffer up by (to 2 MiB: a client has some tens).
const GPU_MARGIN: u64 = 512 << 20;

/// The GPUs that the driver lists, those that this crate has no kernels for included; or why there are none.
pub(super) struct Cuda(Result<Vec<Gpu>, NoCuda>);

impl Cuda {
    /// Loads the driver, if there is one, and lists its GPUs.
    pub(super) fn detect() -> Cuda {
        Cuda(cuda::detect())
    }
}

impl Backend for Cuda {
    fn stem(&self) -> &'static str {
        "CUDA"
    }

    fn enumerate(&self) -> Vec<Found> {
        let found = |gpu: &Gpu| Found {
            name: format!("{}{}", self.stem(), gpu.ordinal),
            description: gpu.to_string(),
            kind: DeviceKind::Gpu,
            number: Some(gpu.ordinal),
            unusable: gpu.usable().err(),
            opener: Arc::new(gpu.clone()),
        };
        self.0.iter().flatten().map(found).collect()
    }

    fn missing(&self) -> Option<String> {
        self.0.as_ref().err().map(NoCuda::to_string)
    }
}

impl Open for Gpu {
    /// Known once the GPU's context stands, which this waits for.
    fn free(&self) -> Result<u64, DeviceError> {
        CudaDevice::free(self)
    }

    fn open(&self, request: &Request<'_>) -> Result<Arc<dyn Device>, RegistryError> {
        let share = |free: u64| (free - (free / 16).min(GPU_MARGIN)) / request.share;
        Ok(CudaDevice::with_free(request.name, self, |free| request.memory.unwrap_or_else(|| share(free)))?)
    }
}

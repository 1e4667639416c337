//! CUDA's devices, as the registry lists and opens them.

use super::{Detected, Entry, Origin};
use crate::cuda::{self, CudaDevice};
use crate::device::{Device, DeviceError, DeviceKind};
use std::sync::Arc;

/// The GPUs that the driver shows, those included that this crate has no kernels for.
pub(super) fn detect() -> Detected {
    cuda::detect().map(entries).map_err(|none| none.to_string())
}

fn entries(gpus: Vec<cuda::Gpu>) -> Vec<Entry> {
    let entry = |gpu: cuda::Gpu| Entry {
        name: format!("CUDA{}", gpu.ordinal),
        description: gpu.to_string(),
        kind: DeviceKind::Gpu,
        unusable: gpu.usable().err(),
        origin: Origin::Gpu(Arc::new(gpu)),
    };
    gpus.into_iter().map(entry).collect()
}

impl super::Gpu for cuda::Gpu {
    fn number(&self) -> usize {
        self.ordinal
    }

    fn free(&self) -> Result<u64, DeviceError> {
        CudaDevice::free(self)
    }

    fn open(&self, name: &str, memory: &dyn Fn(u64) -> u64) -> Result<Arc<dyn Device>, DeviceError> {
        Ok(CudaDevice::with_free(name, self, memory)?)
    }
}

//! Detection of the CUDA driver and its GPUs. [`detect`] loads the driver library before anything else calls it.
#![allow(unsafe_code)]

use super::driver_api::{self, DriverError};
use crate::device::DeviceError;
use cudarc::driver::sys;
use std::ffi::CStr;
use std::fmt;
use thiserror::Error;

/// Oldest supported driver, in the notation of cuDriverGetVersion: CUDA 12.0, NVIDIA driver 525. It has every function that
/// this crate relies on, with the signatures of cudarc's bindings.
const OLDEST_DRIVER: i32 = 12000;

/// Lowest compute capability with kernels, times ten: 7.5.
const LEAST_CAPABILITY: u32 = 75;

/// Bandwidth in bytes per second and frequency in Hz of a GPU that reports none, such as a virtual one: the rates of the slowest
/// GPUs with kernels.
const LEAST_BANDWIDTH: u64 = 128_000_000_000;
const LEAST_CLOCK_HZ: u64 = 1_000_000_000;

/// First driver whose graphs have edges with data: CUDA 12.3.
const EDGE_DATA_DRIVER: u32 = 12030;

/// Fixed properties of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Index among the GPUs that the driver reports (CUDA_VISIBLE_DEVICES applies).
    pub ordinal: usize,
    /// Name of the model.
    pub name: String,
    /// PCI address: domain:bus:device.function.
    pub pci: String,
    /// Compute capability times ten: 80 is 8.0.
    pub capability: u32,
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of GPU memory.
    pub memory: u64,
    /// Peak frequency of the multiprocessors, in kHz.
    pub clock_khz: u32,
    /// Bytes of shared memory that a block can have if its kernel opts in; 0 if the driver does not report them.
    pub(super) shared_per_block: u32,
    /// CUDA version of the driver in the notation of cuDriverGetVersion: 12040 is 12.4.
    pub driver: u32,
    /// Peak frequency of the memory in kHz; 0 if the driver does not report it. It transfers twice per cycle.
    pub(super) memory_clock_khz: u32,
    /// Width of the memory bus in bits; 0 if the driver does not report it.
    pub(super) memory_bus_bits: u32,
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = (self.capability / 10, self.capability % 10);
        let (name, pci, sms, mib) = (&self.name, &self.pci, self.multiprocessors, self.memory >> 20);
        write!(f, "{name}, {mib} MiB, PCI {pci}, capability {major}.{minor}, {sms} multiprocessors")
    }
}

/// Why no GPU can be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CudaUnavailable {
    /// The driver library cannot be loaded.
    #[error(
        "no CUDA driver was found (libcuda.so.1 cannot be loaded): install NVIDIA's driver, or in a container start it with \
         access to the GPUs (docker run --gpus all)"
    )]
    NoDriver,
    /// The driver failed to initialise; the text is the driver's error.
    #[error("the CUDA driver failed to initialise: {0}; check that nvidia-smi works")]
    InitFailed(String),
    /// The driver is older than CUDA 12.0; the number is its version.
    #[error("the CUDA driver is too old: it supports CUDA {}.{}, but 12.0 (driver 525) or later is required: update the driver", .0 / 1000, .0 % 1000 / 10)]
    DriverTooOld(i32),
    /// The driver reports no device.
    #[error("the CUDA driver reports no device; check nvidia-smi and CUDA_VISIBLE_DEVICES")]
    NoDevice,
}

/// Lists the GPUs that the driver reports, in its order, without those whose properties it does not report.
///
/// # Errors
/// [`CudaUnavailable`] names what is missing and how to fix it.
pub fn detect() -> Result<Vec<Gpu>, CudaUnavailable> {
    if !driver_api::load() {
        return Err(CudaUnavailable::NoDriver);
    }
    let failed = |e: DriverError| match e {
        DriverError::NO_DEVICE => CudaUnavailable::NoDevice,
        e => CudaUnavailable::InitFailed(e.to_string()),
    };
    let (mut version, mut count) = (0, 0);
    // SAFETY: every release of the driver has these functions. The second one writes one int.
    unsafe { driver_api::cuInit(0).and_then(|()| driver_api::cuDriverGetVersion(&raw mut version)) }.map_err(failed)?;
    if version < OLDEST_DRIVER {
        return Err(CudaUnavailable::DriverTooOld(version));
    }
    // SAFETY: the function writes one int.
    unsafe { driver_api::cuDeviceGetCount(&raw mut count) }.map_err(failed)?;
    let (mut gpus, mut first_failure) = (Vec::new(), None);
    for ordinal in 0..usize::try_from(count).unwrap_or(0) {
        match query_gpu(ordinal, version) {
            Ok(gpu) => gpus.push(gpu),
            Err(e) => {
                log::warn!("GPU {ordinal} is left out, because its properties cannot be queried: {e}");
                first_failure = first_failure.or(Some(e));
            }
        }
    }
    match first_failure {
        Some(e) if gpus.is_empty() => Err(failed(e)),
        _ if gpus.is_empty() => Err(CudaUnavailable::NoDevice),
        _ => Ok(gpus),
    }
}

/// Fails without the properties that decide whether and how the GPU can be used: its capability and memory. The driver may not
/// report others, such as a virtual GPU's clock.
fn query_gpu(ordinal: usize, driver: i32) -> Result<Gpu, DriverError> {
    use sys::CUdevice_attribute as A;
    let device = driver_api::device(ordinal)?;
    let number = |a| driver_api::device_attribute(device, a).map(|v| u32::try_from(v).unwrap_or(0));
    let number_or_0 = |a| number(a).unwrap_or(0);
    let pci =
        [A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID];
    let pci = match pci.map(number) {
        [Ok(domain), Ok(bus), Ok(slot)] => format!("{domain:04x}:{bus:02x}:{slot:02x}.0"),
        _ => "unknown".to_owned(),
    };
    let mut memory = 0;
    // SAFETY: the function writes one number.
    unsafe { driver_api::cuDeviceTotalMem_v2(&raw mut memory, device) }?;
    let mut name = [0u8; 128];
    // SAFETY: the function writes at most as many bytes as the second argument permits, with a zero byte at the end.
    let named = unsafe { driver_api::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device) };
    let name = named.ok().and_then(|()| CStr::from_bytes_until_nul(&name).ok());
    Ok(Gpu {
        ordinal,
        name: name.map_or_else(|| format!("GPU {ordinal}"), |name| name.to_string_lossy().into_owned()),
        pci,
        capability: number(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? * 10
            + number(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        multiprocessors: number_or_0(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).max(1),
        memory: memory as u64,
        clock_khz: number_or_0(A::CU_DEVICE_ATTRIBUTE_CLOCK_RATE),
        shared_per_block: number_or_0(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        driver: u32::try_from(driver).unwrap_or(0),
        memory_clock_khz: number_or_0(A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE),
        memory_bus_bits: number_or_0(A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH),
    })
}

impl Gpu {
    /// A GPU with the figures of an H100 and another compute capability, for tests of launches.
    #[cfg(test)]
    pub(super) fn with_capability(capability: u32) -> Gpu {
        Gpu {
            ordinal: 0,
            name: "H100".to_owned(),
            pci: String::new(),
            capability,
            multiprocessors: 132,
            memory: 80 << 30,
            clock_khz: 1_980_000,
            shared_per_block: 227 << 10,
            driver: 12_000,
            memory_clock_khz: 2_619_000,
            memory_bus_bits: 5120,
        }
    }

    /// Peak bandwidth of the memory in bytes per second.
    pub(super) fn bandwidth(&self) -> u64 {
        match u64::from(self.memory_clock_khz) * 1000 * 2 * u64::from(self.memory_bus_bits) / 8 {
            0 => LEAST_BANDWIDTH,
            reported => reported,
        }
    }

    /// Peak frequency of the multiprocessors in Hz.
    pub(super) fn clock_hz(&self) -> u64 {
        if self.clock_khz == 0 { LEAST_CLOCK_HZ } else { u64::from(self.clock_khz) * 1000 }
    }

    /// Checks that the crate has kernels for this GPU.
    ///
    /// # Errors
    /// A text that names the missing capability.
    pub fn check_supported(&self) -> Result<(), String> {
        if self.capability >= LEAST_CAPABILITY {
            return Ok(());
        }
        Err(format!(
            "{} has compute capability {}.{}, but 7.5 or later is required",
            self.name,
            self.capability / 10,
            self.capability % 10
        ))
    }
}

/// Whether the driver can add edges with data to a graph.
pub(super) fn has_edge_data(gpu: &Gpu) -> bool {
    gpu.driver >= EDGE_DATA_DRIVER && driver_api::has_edge_data()
}

/// Work counters of all kernels so far, as JSON. `None` unless the driver is the emulator (crates/cudaemu).
pub fn emulated_counts() -> Option<String> {
    type Counts = unsafe extern "C" fn(*mut u8, usize) -> usize;
    if !driver_api::load() {
        return None;
    }
    // SAFETY: the library is loaded. Only the emulator exports a function of this name. It writes at most as many bytes as the
    // second argument permits, and returns the number of bytes that it needs.
    unsafe {
        let counts = sys::culib().get::<Counts>(b"cudaemu_counts_json\0").ok()?;
        let mut text = Vec::new();
        // The text may grow between two calls, because other threads keep launching kernels: repeat until it fits.
        loop {
            let needed = counts(text.as_mut_ptr(), text.len());
            if needed <= text.len() {
                text.truncate(needed.saturating_sub(1));
                return String::from_utf8(text).ok();
            }
            text.resize(needed + 1024, 0);
        }
    }
}

/// The error of a failed driver call on `device`.
pub(super) fn driver_error(device: &str, call: &'static str, e: DriverError) -> DeviceError {
    DeviceError::Driver { device: device.to_owned(), call, reason: e.to_string() }
}

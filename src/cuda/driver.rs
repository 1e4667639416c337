//! Finding the CUDA driver and its devices. cudarc panics where the library or one of its functions is missing: nothing of
//! it is called before [`detect`] has seen that they are there.
#![allow(unsafe_code)]

use crate::device::DeviceError;
use cudarc::driver::{DriverError, result, sys};
use std::fmt;
use thiserror::Error;

/// The oldest driver that is used, as cuDriverGetVersion counts: CUDA 12.0, NVIDIA's driver 525. It has every function that is
/// called here, with the signatures of cudarc's bindings.
const OLDEST_DRIVER: i32 = 12000;

/// The least compute capability that there are kernels for.
const LEAST_CAPABILITY: u32 = 75;

/// Facts about a GPU that do not change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its number among those the driver shows (CUDA_VISIBLE_DEVICES applies).
    pub ordinal: usize,
    /// Model.
    pub name: String,
    /// PCI address: domain:bus:device.function.
    pub pci: String,
    /// Compute capability, major and minor digit: 80, 90.
    pub capability: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of its memory.
    pub memory: u64,
    /// Peak frequency of the multiprocessors, in kHz.
    pub clock_khz: u32,
    /// CUDA version of the driver, as cuDriverGetVersion counts: 12040 is 12.4.
    pub driver: u32,
    /// Whether a stream can wait for a word of memory.
    pub(super) waits_for_memory: bool,
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = (self.capability / 10, self.capability % 10);
        let (name, pci, sms, mib) = (&self.name, &self.pci, self.multiprocessors, self.memory >> 20);
        write!(f, "{name}, {mib} MiB, PCI {pci}, capability {major}.{minor}, {sms} multiprocessors")
    }
}

/// Why there is no GPU to use.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NoCuda {
    /// No library of that name.
    #[error(
        "no CUDA driver was found (libcuda.so.1 cannot be loaded): install NVIDIA's driver, or in a container start it with \
         access to the GPUs (docker run --gpus all)"
    )]
    NoDriver,
    /// The driver does not start.
    #[error("the CUDA driver does not start: {0}; see whether nvidia-smi works")]
    Start(String),
    /// A driver from before the oldest that is used.
    #[error("the CUDA driver is too old: it is of CUDA {}.{}, and 12.0 (driver 525) or later is needed", .0 / 1000, .0 % 1000 / 10)]
    Old(i32),
    /// A driver that shows no device.
    #[error("the CUDA driver shows no device; see nvidia-smi and CUDA_VISIBLE_DEVICES")]
    NoDevice,
}

/// The GPUs that the driver shows, in its order.
///
/// # Errors
/// [`NoCuda`] says what is missing and what to do.
pub fn detect() -> Result<Vec<Gpu>, NoCuda> {
    // SAFETY: it only tries to load the library; what NVIDIA's does when it is loaded is not in our hands.
    if !unsafe { sys::is_culib_present() } {
        return Err(NoCuda::NoDriver);
    }
    let start = |e: DriverError| match e.0 {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => NoCuda::NoDevice,
        _ => NoCuda::Start(describe(e)),
    };
    // These two every release of it has.
    result::init().map_err(start)?;
    let mut version = 0;
    // SAFETY: the library is there, and the function writes one int.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().map_err(start)?;
    if version < OLDEST_DRIVER {
        return Err(NoCuda::Old(version));
    }
    let count = result::device::get_count().map_err(start)?;
    let gpus = (0..count).map(|ordinal| facts(ordinal, version)).collect::<Result<Vec<_>, _>>().map_err(start)?;
    if gpus.is_empty() { Err(NoCuda::NoDevice) } else { Ok(gpus) }
}

fn facts(ordinal: i32, driver: i32) -> Result<Gpu, DriverError> {
    use sys::CUdevice_attribute as A;
    let device = result::device::get(ordinal)?;
    // SAFETY: the device is one that the driver gave.
    let attribute = |a| unsafe { result::device::get_attribute(device, a) };
    let number = |a| attribute(a).map(|v| u32::try_from(v).unwrap_or(0));
    let pci =
        [A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID];
    let [domain, bus, slot] = [number(pci[0])?, number(pci[1])?, number(pci[2])?];
    Ok(Gpu {
        ordinal: usize::try_from(ordinal).unwrap_or(0),
        name: result::device::get_name(device)?,
        pci: format!("{domain:04x}:{bus:02x}:{slot:02x}.0"),
        capability: number(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? * 10
            + number(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        multiprocessors: number(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        // SAFETY: as above.
        memory: unsafe { result::device::total_mem(device)? } as u64,
        clock_khz: number(A::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?,
        driver: u32::try_from(driver).unwrap_or(0),
        // Of the API of 12.0, which has no attribute for words of 32 bits. That of the older API says whether the kernel module
        // was loaded with NVreg_EnableStreamMemOPs=1, which the newer one does not need.
        waits_for_memory: number(A::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS).is_ok_and(|v| v != 0),
    })
}

impl Gpu {
    /// Whether there are kernels for it; why not.
    ///
    /// # Errors
    /// What is missing, as text.
    pub fn usable(&self) -> Result<(), String> {
        if self.capability >= LEAST_CAPABILITY {
            return Ok(());
        }
        Err(format!(
            "{} has compute capability {}.{}, and 7.5 or later is needed",
            self.name,
            self.capability / 10,
            self.capability % 10
        ))
    }
}

/// What the kernels did so far, as JSON, where the driver is the emulated one (crates/cudaemu), which counts.
pub fn emulated_counts() -> Option<String> {
    type Counts = unsafe extern "C" fn(*mut u8, usize) -> usize;
    // SAFETY: as in `detect`.
    if !unsafe { sys::is_culib_present() } {
        return None;
    }
    // SAFETY: the library is there. A function of this name is the emulator's, which writes as many bytes of text as there is
    // room for, and returns how many it needs.
    unsafe {
        let counts = sys::culib().get::<Counts>(b"cudaemu_counts_json\0").ok()?;
        let mut text = Vec::new();
        // The text may grow between two calls: other threads go on.
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

/// A driver's error by its name and text.
pub(super) fn describe(e: DriverError) -> String {
    let text = |r: Result<&std::ffi::CStr, DriverError>| {
        r.map_or_else(|_| "?".to_owned(), |t| t.to_string_lossy().into_owned())
    };
    format!("{} ({})", text(e.error_name()), text(e.error_string()))
}

/// The error of a driver call on `device`.
pub(super) fn failed(device: &str, call: &'static str, e: DriverError) -> DeviceError {
    DeviceError::Driver { device: device.to_owned(), call, reason: describe(e) }
}

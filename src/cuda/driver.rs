//! Detection of the CUDA driver and its GPUs.
//!
//! cudarc panics if the driver library or one of its functions is missing. Therefore no function of cudarc is called before
//! [`detect`] has checked that the library is present and new enough.
#![allow(unsafe_code)]

use crate::device::DeviceError;
use cudarc::driver::{DriverError, result, sys};
use std::fmt;
use thiserror::Error;

/// Oldest supported driver, in the notation of cuDriverGetVersion: CUDA 12.0, NVIDIA driver 525. It has every function that
/// this crate calls, with the signatures of cudarc's bindings.
const OLDEST_DRIVER: i32 = 12000;

/// Lowest compute capability with kernels, times ten: 7.5.
const LEAST_CAPABILITY: u32 = 75;

/// Bandwidth in bytes per second and frequency in Hz of a GPU that reports none, such as a virtual one: the rates of the slowest
/// GPUs with kernels.
const LEAST_BANDWIDTH: u64 = 128_000_000_000;
const LEAST_CLOCK_HZ: u64 = 1_000_000_000;

/// First driver whose graphs have edges with data: CUDA 12.3.
const EDGE_DATA_DRIVER: u32 = 12030;

/// `CUgraphEdgeData`, which says what of a node an edge of a graph waits for.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct EdgeData {
    from_port: u8,
    to_port: u8,
    kind: u8,
    reserved: [u8; 5],
}

impl EdgeData {
    /// Between two kernels: the second one may be launched once all blocks of the first one have executed
    /// `griddepcontrol.launch_dependents` or ended (CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC), and waits for its end by itself
    /// (CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC).
    pub(super) const PROGRAMMATIC: EdgeData = EdgeData { from_port: 1, to_port: 0, kind: 1, reserved: [0; 5] };
}

/// `cuGraphAddDependencies_v2`: graph, first nodes, second nodes, data, number of edges.
pub(super) type AddDependencies = unsafe extern "C" fn(
    sys::CUgraph,
    *const sys::CUgraphNode,
    *const sys::CUgraphNode,
    *const EdgeData,
    usize,
) -> sys::CUresult;

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

/// Lists the GPUs that the driver reports, in its order.
///
/// # Errors
/// [`CudaUnavailable`] names what is missing and how to fix it.
pub fn detect() -> Result<Vec<Gpu>, CudaUnavailable> {
    // SAFETY: the call only loads the library; the initialisers of NVIDIA's library are trusted.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaUnavailable::NoDriver);
    }
    let start = |e: DriverError| match e.0 {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => CudaUnavailable::NoDevice,
        _ => CudaUnavailable::InitFailed(describe(e)),
    };
    // Every release of the driver has cuInit and cuDriverGetVersion.
    result::init().map_err(start)?;
    let mut version = 0;
    // SAFETY: the library is loaded, and the function writes one int.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().map_err(start)?;
    if version < OLDEST_DRIVER {
        return Err(CudaUnavailable::DriverTooOld(version));
    }
    let count = result::device::get_count().map_err(start)?;
    let gpus = (0..count).map(|ordinal| query_gpu(ordinal, version)).collect::<Result<Vec<_>, _>>().map_err(start)?;
    if gpus.is_empty() { Err(CudaUnavailable::NoDevice) } else { Ok(gpus) }
}

fn query_gpu(ordinal: i32, driver: i32) -> Result<Gpu, DriverError> {
    use sys::CUdevice_attribute as A;
    let device = result::device::get(ordinal)?;
    // SAFETY: `device` was returned by the driver.
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
        memory_clock_khz: number(A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE).unwrap_or(0),
        memory_bus_bits: number(A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH).unwrap_or(0),
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

/// The driver's function that adds edges with data to a graph; `None` if the driver has none.
///
/// It is found by name, because the bindings of CUDA 12.0, the oldest supported driver, do not have it. CUDA 13 has no
/// `cuGraphAddDependencies` without edge data, and its header gives this function that name; the library's symbol is still `_v2`.
pub(super) fn edge_data_function(gpu: &Gpu) -> Option<AddDependencies> {
    if gpu.driver < EDGE_DATA_DRIVER {
        return None;
    }
    // SAFETY: `detect` has loaded the library before it made a `Gpu` with a driver. The symbol has had this signature since it exists.
    unsafe { sys::culib().get::<AddDependencies>(b"cuGraphAddDependencies_v2\0").ok().map(|found| *found) }
}

/// Work counters of all kernels so far, as JSON. `None` unless the driver is the emulator (crates/cudaemu).
pub fn emulated_counts() -> Option<String> {
    type Counts = unsafe extern "C" fn(*mut u8, usize) -> usize;
    // SAFETY: as in `detect`.
    if !unsafe { sys::is_culib_present() } {
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

/// Whether this error of a driver call means that the context is unusable from now on, for all that use it, and that the
/// driver's documentation asks for the process to be started again. Calls report such an error later than it happens.
pub(super) fn poisons(error: sys::CUresult) -> bool {
    use sys::CUresult as R;
    let is_beyond_kernels = matches!(
        error,
        R::CUDA_ERROR_ECC_UNCORRECTABLE
            | R::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | R::CUDA_ERROR_EXTERNAL_DEVICE
            | R::CUDA_ERROR_MPS_CONNECTION_FAILED
            | R::CUDA_ERROR_MPS_RPC_FAILURE
            | R::CUDA_ERROR_MPS_SERVER_NOT_READY
            | R::CUDA_ERROR_MPS_MAX_CLIENTS_REACHED
            | R::CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED
            | R::CUDA_ERROR_MPS_CLIENT_TERMINATED
            | R::CUDA_ERROR_DEVICE_UNAVAILABLE
            | R::CUDA_ERROR_CONTEXT_IS_DESTROYED
            // What the driver reports for a GPU that fell off the bus (Xid 79).
            | R::CUDA_ERROR_UNKNOWN
    );
    is_kernel_fault(error) || is_beyond_kernels
}

/// Whether this error, which [`poisons`] the context, is the fault of a kernel, not of the hardware, the driver or MPS.
pub(super) fn is_kernel_fault(error: sys::CUresult) -> bool {
    use sys::CUresult as R;
    matches!(
        error,
        R::CUDA_ERROR_ILLEGAL_ADDRESS
            | R::CUDA_ERROR_LAUNCH_FAILED
            | R::CUDA_ERROR_LAUNCH_TIMEOUT
            | R::CUDA_ERROR_HARDWARE_STACK_ERROR
            | R::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | R::CUDA_ERROR_MISALIGNED_ADDRESS
            | R::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | R::CUDA_ERROR_INVALID_PC
            | R::CUDA_ERROR_ASSERT
    )
}

/// Name and text of a driver error.
pub(super) fn describe(e: DriverError) -> String {
    let text = |r: Result<&std::ffi::CStr, DriverError>| {
        r.map_or_else(|_| "?".to_owned(), |t| t.to_string_lossy().into_owned())
    };
    format!("{} ({})", text(e.error_name()), text(e.error_string()))
}

/// The error of a failed driver call on `device`.
pub(super) fn driver_error(device: &str, call: &'static str, e: DriverError) -> DeviceError {
    DeviceError::Driver { device: device.to_owned(), call, reason: describe(e) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_a_call_do_not_poison_the_context_and_errors_of_a_kernel_or_the_hardware_do() {
        use sys::CUresult as R;
        for (error, want) in [
            (R::CUDA_ERROR_INVALID_VALUE, false),
            (R::CUDA_ERROR_OUT_OF_MEMORY, false),
            (R::CUDA_ERROR_INVALID_PTX, false),
            (R::CUDA_ERROR_NOT_READY, false),
            (R::CUDA_ERROR_NOT_FOUND, false),
            (R::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, false),
            (R::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, false),
            (R::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, false),
            (R::CUDA_ERROR_ILLEGAL_ADDRESS, true),
            (R::CUDA_ERROR_LAUNCH_FAILED, true),
            (R::CUDA_ERROR_LAUNCH_TIMEOUT, true),
            (R::CUDA_ERROR_ECC_UNCORRECTABLE, true),
            (R::CUDA_ERROR_MPS_RPC_FAILURE, true),
            (R::CUDA_ERROR_UNKNOWN, true),
        ] {
            assert_eq!(poisons(error), want, "{error:?}");
        }
    }
}

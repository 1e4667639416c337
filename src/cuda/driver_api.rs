//! The functions of the CUDA driver that this crate calls, in one table: every call of the driver is made through it.
//!
//! cudarc finds and loads the library, and declares the types and signatures. Its functions return `CUresult`, an enum of the codes
//! that were known when it was generated, and a newer driver returns others: an enum with such a value is undefined behaviour. So
//! here each function returns its code as a number.
#![allow(unsafe_code)]
#![allow(non_snake_case)] // the names are the driver's

use cudarc::driver::sys;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::fmt;
use std::sync::OnceLock;

/// An error of a driver call: the code, as a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct DriverError(u32);

impl DriverError {
    pub(super) const OUT_OF_MEMORY: DriverError = DriverError::of(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    pub(super) const NO_DEVICE: DriverError = DriverError::of(sys::CUresult::CUDA_ERROR_NO_DEVICE);
    /// Also for a function that this driver does not have.
    pub(super) const NOT_FOUND: DriverError = DriverError::of(sys::CUresult::CUDA_ERROR_NOT_FOUND);
    pub(super) const NOT_READY: DriverError = DriverError::of(sys::CUresult::CUDA_ERROR_NOT_READY);
    pub(super) const PEER_ACCESS_ALREADY_ENABLED: DriverError =
        DriverError::of(sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);

    /// Codes of `cuda.h` that cudarc's bindings of CUDA 12.0 do not have.
    const CONTAINED: u32 = 226;
    const TENSOR_MEMORY_LEAK: u32 = 721;

    /// A code that cudarc knows.
    const fn of(known: sys::CUresult) -> DriverError {
        DriverError(known as u32)
    }

    /// Whether this error means that the context is unusable from now on, for all that use it, and that the driver's documentation
    /// asks for the process to be started again. Calls report such an error later than it happens.
    pub(super) fn poisons(self) -> bool {
        use sys::CUresult as R;
        const BEYOND_KERNELS: [sys::CUresult; 12] = [
            R::CUDA_ERROR_ECC_UNCORRECTABLE,
            R::CUDA_ERROR_NVLINK_UNCORRECTABLE,
            R::CUDA_ERROR_EXTERNAL_DEVICE,
            R::CUDA_ERROR_MPS_CONNECTION_FAILED,
            R::CUDA_ERROR_MPS_RPC_FAILURE,
            R::CUDA_ERROR_MPS_SERVER_NOT_READY,
            R::CUDA_ERROR_MPS_MAX_CLIENTS_REACHED,
            R::CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED,
            R::CUDA_ERROR_MPS_CLIENT_TERMINATED,
            R::CUDA_ERROR_DEVICE_UNAVAILABLE,
            R::CUDA_ERROR_CONTEXT_IS_DESTROYED,
            // What the driver reports for a GPU that fell off the bus (Xid 79).
            R::CUDA_ERROR_UNKNOWN,
        ];
        // A contained error is an access of a peer's memory over NVLink that failed, or an error of the hardware.
        self.is_kernel_fault()
            || self.0 == DriverError::CONTAINED
            || BEYOND_KERNELS.map(DriverError::of).contains(&self)
    }

    /// Whether this error, which [`poisons`](DriverError::poisons) the context, is the fault of a kernel, not of the hardware, the
    /// driver or MPS.
    pub(super) fn is_kernel_fault(self) -> bool {
        use sys::CUresult as R;
        const OF_KERNELS: [sys::CUresult; 9] = [
            R::CUDA_ERROR_ILLEGAL_ADDRESS,
            R::CUDA_ERROR_LAUNCH_FAILED,
            R::CUDA_ERROR_LAUNCH_TIMEOUT,
            R::CUDA_ERROR_HARDWARE_STACK_ERROR,
            R::CUDA_ERROR_ILLEGAL_INSTRUCTION,
            R::CUDA_ERROR_MISALIGNED_ADDRESS,
            R::CUDA_ERROR_INVALID_ADDRESS_SPACE,
            R::CUDA_ERROR_INVALID_PC,
            R::CUDA_ERROR_ASSERT,
        ];
        self.0 == DriverError::TENSOR_MEMORY_LEAK || OF_KERNELS.map(DriverError::of).contains(&self)
    }
}

impl fmt::Display for DriverError {
    /// Name and text of the error, or its number if the driver does not know it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |look_up: unsafe fn(u32, *mut *const c_char) -> Result<(), DriverError>| {
            let mut text = std::ptr::null();
            // SAFETY: the function writes one pointer: null, or a zero-terminated text that the library keeps.
            unsafe {
                look_up(self.0, &raw mut text).ok()?;
                (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
            }
        };
        match (text(cuGetErrorName), text(cuGetErrorString)) {
            (Some(name), Some(text)) => write!(f, "{name} ({text})"),
            _ => write!(f, "error {}, which the driver does not name", self.0),
        }
    }
}

/// What a function of the driver returns: 0, or the code of an error. Any number is a value of this type.
#[repr(transparent)]
struct CallStatus(u32);

impl CallStatus {
    fn result(self) -> Result<(), DriverError> {
        if self.0 == 0 { Ok(()) } else { Err(DriverError(self.0)) }
    }
}

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

/// Defines the table, and a function for each row that calls the driver's function of this name.
macro_rules! define_functions {
    ($($name:ident($($arg:ident: $ty:ty),*);)*) => {
        /// The driver's functions; `None` for one that the driver does not have.
        struct Functions {
            $($name: Option<unsafe extern "C" fn($($ty),*) -> CallStatus>,)*
        }

        impl Functions {
            /// # Safety
            /// The library can be loaded.
            unsafe fn load() -> Functions {
                // SAFETY: the signatures are those of cudarc's bindings, as `driver_functions` checks, or of `cuda.h`. A symbol keeps
                // its signature in all drivers: a function whose signature changes gets a new symbol. The library is never unloaded.
                unsafe {
                    let library = sys::culib();
                    Functions {
                        $($name: library.get(concat!(stringify!($name), "\0").as_bytes()).ok().map(|found| *found),)*
                    }
                }
            }
        }

        $(
            /// The driver's function of this name.
            ///
            /// # Safety
            /// As the driver's documentation of the function requires: handles are alive, pointers valid for the call.
            pub(super) unsafe fn $name($($arg: $ty),*) -> Result<(), DriverError> {
                let function = FUNCTIONS.get().and_then(|functions| functions.$name).ok_or(DriverError::NOT_FOUND)?;
                // SAFETY: the caller's promise.
                unsafe { function($($arg),*) }.result()
            }
        )*
    };
}

/// The rows of `declared_by_cudarc` have the signatures of cudarc's bindings, apart from the result; the compiler checks this.
macro_rules! driver_functions {
    (
        declared_by_cudarc { $($name:ident($($arg:ident: $ty:ty),* $(,)?);)* }
        declared_here { $($own:ident($($own_arg:ident: $own_ty:ty),* $(,)?);)* }
    ) => {
        $(const _: unsafe fn($($ty),*) -> sys::CUresult = sys::$name;)*
        define_functions! { $($name($($arg: $ty),*);)* $($own($($own_arg: $own_ty),*);)* }
    };
}

driver_functions! {
    declared_by_cudarc {
        cuInit(flags: c_uint);
        cuDriverGetVersion(version: *mut c_int);
        cuDeviceGetCount(count: *mut c_int);
        cuDeviceGet(device: *mut sys::CUdevice, ordinal: c_int);
        cuDeviceGetName(name: *mut c_char, room: c_int, device: sys::CUdevice);
        cuDeviceTotalMem_v2(bytes: *mut usize, device: sys::CUdevice);
        cuDeviceGetAttribute(value: *mut c_int, attribute: sys::CUdevice_attribute, device: sys::CUdevice);
        cuDeviceCanAccessPeer(can: *mut c_int, device: sys::CUdevice, peer: sys::CUdevice);
        cuDevicePrimaryCtxRetain(context: *mut sys::CUcontext, device: sys::CUdevice);
        cuDevicePrimaryCtxRelease_v2(device: sys::CUdevice);
        cuCtxSetCurrent(context: sys::CUcontext);
        cuCtxEnablePeerAccess(peer: sys::CUcontext, flags: c_uint);
        cuStreamCreate(stream: *mut sys::CUstream, flags: c_uint);
        cuStreamDestroy_v2(stream: sys::CUstream);
        cuStreamQuery(stream: sys::CUstream);
        cuStreamWaitEvent(stream: sys::CUstream, event: sys::CUevent, flags: c_uint);
        cuEventCreate(event: *mut sys::CUevent, flags: c_uint);
        cuEventDestroy_v2(event: sys::CUevent);
        cuEventQuery(event: sys::CUevent);
        cuEventRecord(event: sys::CUevent, stream: sys::CUstream);
        cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
        cuMemAlloc_v2(address: *mut sys::CUdeviceptr, bytes: usize);
        cuMemFree_v2(address: sys::CUdeviceptr);
        cuMemPoolCreate(pool: *mut sys::CUmemoryPool, properties: *const sys::CUmemPoolProps);
        cuMemPoolDestroy(pool: sys::CUmemoryPool);
        cuMemPoolSetAttribute(pool: sys::CUmemoryPool, attribute: sys::CUmemPool_attribute, value: *mut c_void);
        cuMemPoolGetAttribute(pool: sys::CUmemoryPool, attribute: sys::CUmemPool_attribute, value: *mut c_void);
        cuMemPoolSetAccess(pool: sys::CUmemoryPool, access: *const sys::CUmemAccessDesc, count: usize);
        cuMemPoolTrimTo(pool: sys::CUmemoryPool, keep: usize);
        cuMemAllocFromPoolAsync(
            address: *mut sys::CUdeviceptr, bytes: usize, pool: sys::CUmemoryPool, stream: sys::CUstream,
        );
        cuMemFreeAsync(address: sys::CUdeviceptr, stream: sys::CUstream);
        cuMemHostAlloc(host: *mut *mut c_void, bytes: usize, flags: c_uint);
        cuMemFreeHost(host: *mut c_void);
        cuMemHostGetDevicePointer_v2(address: *mut sys::CUdeviceptr, host: *mut c_void, flags: c_uint);
        cuMemsetD8Async(to: sys::CUdeviceptr, value: u8, bytes: usize, stream: sys::CUstream);
        cuMemcpyHtoDAsync_v2(to: sys::CUdeviceptr, from: *const c_void, bytes: usize, stream: sys::CUstream);
        cuMemcpyDtoHAsync_v2(to: *mut c_void, from: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream);
        cuMemcpyDtoDAsync_v2(to: sys::CUdeviceptr, from: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream);
        cuMemcpyPeerAsync(
            to: sys::CUdeviceptr, to_context: sys::CUcontext, from: sys::CUdeviceptr, from_context: sys::CUcontext,
            bytes: usize, stream: sys::CUstream,
        );
        cuModuleLoadDataEx(
            module: *mut sys::CUmodule, image: *const c_void, count: c_uint, options: *mut sys::CUjit_option,
            values: *mut *mut c_void,
        );
        cuModuleUnload(module: sys::CUmodule);
        cuModuleGetFunction(function: *mut sys::CUfunction, module: sys::CUmodule, name: *const c_char);
        cuFuncSetAttribute(function: sys::CUfunction, attribute: sys::CUfunction_attribute, value: c_int);
        cuLaunchKernel(
            function: sys::CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
            block_z: c_uint, shared: c_uint, stream: sys::CUstream, arguments: *mut *mut c_void, extra: *mut *mut c_void,
        );
        cuGraphCreate(graph: *mut sys::CUgraph, flags: c_uint);
        cuGraphDestroy(graph: sys::CUgraph);
        cuGraphAddKernelNode_v2(
            node: *mut sys::CUgraphNode, graph: sys::CUgraph, after: *const sys::CUgraphNode, count: usize,
            parameters: *const sys::CUDA_KERNEL_NODE_PARAMS,
        );
        cuGraphInstantiateWithFlags(exec: *mut sys::CUgraphExec, graph: sys::CUgraph, flags: c_ulonglong);
        cuGraphExecKernelNodeSetParams_v2(
            exec: sys::CUgraphExec, node: sys::CUgraphNode, parameters: *const sys::CUDA_KERNEL_NODE_PARAMS,
        );
        cuGraphLaunch(exec: sys::CUgraphExec, stream: sys::CUstream);
        cuGraphExecDestroy(exec: sys::CUgraphExec);
    }
    // Not in the bindings of CUDA 12.0, the oldest supported driver, or with a code as a parameter. CUDA 13 has no
    // `cuGraphAddDependencies` without edge data, and its header gives `_v2` that name; the library's symbol is still `_v2`.
    declared_here {
        cuGetErrorName(code: u32, text: *mut *const c_char);
        cuGetErrorString(code: u32, text: *mut *const c_char);
        cuFuncLoad(function: sys::CUfunction);
        cuGraphAddDependencies_v2(
            graph: sys::CUgraph, from: *const sys::CUgraphNode, to: *const sys::CUgraphNode, data: *const EdgeData,
            count: usize,
        );
    }
}

/// The functions of the loaded library.
static FUNCTIONS: OnceLock<Functions> = OnceLock::new();

/// Loads the driver library, once. Returns false if there is none. Until it is loaded, every call fails with
/// [`DriverError::NOT_FOUND`].
pub(super) fn load() -> bool {
    // SAFETY: the call only loads the library; the initialisers of NVIDIA's library are trusted. cudarc panics if a library that is
    // missing is used, so this is checked first.
    let is_present = FUNCTIONS.get().is_some() || unsafe { sys::is_culib_present() };
    if is_present {
        // SAFETY: as checked.
        FUNCTIONS.get_or_init(|| unsafe { Functions::load() });
    }
    is_present
}

/// Whether edges of graphs can have data.
pub(super) fn has_edge_data() -> bool {
    FUNCTIONS.get().is_some_and(|functions| functions.cuGraphAddDependencies_v2.is_some())
}

/// The GPU `ordinal`, as the driver names it.
pub(super) fn device(ordinal: usize) -> Result<sys::CUdevice, DriverError> {
    let ordinal = c_int::try_from(ordinal).unwrap_or(-1);
    let mut device = 0;
    // SAFETY: the function writes one handle.
    unsafe { cuDeviceGet(&raw mut device, ordinal) }.map(|()| device)
}

/// An attribute of a GPU.
pub(super) fn device_attribute(
    device: sys::CUdevice,
    attribute: sys::CUdevice_attribute,
) -> Result<c_int, DriverError> {
    let mut value = 0;
    // SAFETY: the function writes one int. It refuses a number that is no device.
    unsafe { cuDeviceGetAttribute(&raw mut value, attribute, device) }.map(|()| value)
}

/// Free and total bytes of the GPU whose context is current.
pub(super) fn memory_info() -> Result<(u64, u64), DriverError> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the function writes two numbers, and fails without a current context.
    unsafe { cuMemGetInfo_v2(&raw mut free, &raw mut total) }.map(|()| (free as u64, total as u64))
}

/// Repeats a call that changes nothing, if it fails and the context is not lost: the failure says nothing about the work of the GPU,
/// and without the result, a queue could only fail for good.
pub(super) fn retry_once<T>(call: impl Fn() -> Result<T, DriverError>) -> Result<T, DriverError> {
    call().or_else(|e| if e.poisons() { Err(e) } else { call() })
}

/// The primary context of a GPU, retained until this is dropped.
#[derive(Debug)]
pub(super) struct RetainedContext {
    raw: sys::CUcontext,
    device: sys::CUdevice,
}

// SAFETY: the driver allows the use of a context from any thread; it locks internally.
unsafe impl Send for RetainedContext {}
// SAFETY: as above.
unsafe impl Sync for RetainedContext {}

impl RetainedContext {
    pub(super) fn new(ordinal: usize) -> Result<RetainedContext, DriverError> {
        let (device, mut raw) = (device(ordinal)?, std::ptr::null_mut());
        // SAFETY: the function writes one handle.
        unsafe { cuDevicePrimaryCtxRetain(&raw mut raw, device) }.map(|()| RetainedContext { raw, device })
    }

    pub(super) fn raw(&self) -> sys::CUcontext {
        self.raw
    }

    /// Makes the context current on the calling thread.
    pub(super) fn bind(&self) -> Result<(), DriverError> {
        // SAFETY: the context is retained.
        retry_once(|| unsafe { cuCtxSetCurrent(self.raw) })
    }
}

impl Drop for RetainedContext {
    fn drop(&mut self) {
        // SAFETY: the context was retained once for this value. Threads on which it stays current make another one current before
        // they call the driver.
        let _ = unsafe { cuDevicePrimaryCtxRelease_v2(self.device) };
    }
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
            assert_eq!(DriverError::of(error).poisons(), want, "{error:?}");
        }
        // Codes that the bindings do not have.
        for (code, want) in
            [(36, false), (225, false), (226, true), (721, true), (913, false), (917, false), (12345, false)]
        {
            assert_eq!(DriverError(code).poisons(), want, "{code}");
        }
    }
}

//! Error codes of the driver API, with their names and descriptions.

/// Result of an API call.
pub type Result<T> = std::result::Result<T, Error>;

macro_rules! errors {
    ($($name:ident = $code:literal, $c:literal, $text:literal;)*) => {
        /// `CUresult` without the success code. The variants are the driver's codes under shorter names.
        #[allow(missing_docs, reason = "the names are the driver's own")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Error { $($name = $code),* }

        /// Zero-terminated names and descriptions for `cuGetErrorName` and `cuGetErrorString`.
        const TEXTS: &[(u32, &str, &str)] = &[
            (0, "CUDA_SUCCESS\0", "no error\0"),
            $(($code, concat!("CUDA_ERROR_", $c, "\0"), concat!($text, "\0"))),*
        ];
    };
}

errors! {
    InvalidValue = 1, "INVALID_VALUE", "invalid argument";
    OutOfMemory = 2, "OUT_OF_MEMORY", "out of memory";
    NotInitialized = 3, "NOT_INITIALIZED", "initialization error";
    Deinitialized = 4, "DEINITIALIZED", "driver shutting down";
    ProfilerDisabled = 5, "PROFILER_DISABLED", "profiler disabled while using external profiling tool";
    ProfilerNotInitialized = 6, "PROFILER_NOT_INITIALIZED", "profiler not initialized: call cudaProfilerInitialize()";
    ProfilerAlreadyStarted = 7, "PROFILER_ALREADY_STARTED", "profiler already started";
    ProfilerAlreadyStopped = 8, "PROFILER_ALREADY_STOPPED", "profiler already stopped";
    StubLibrary = 34, "STUB_LIBRARY", "CUDA driver is a stub library";
    CallRequiresNewerDriver = 36, "CALL_REQUIRES_NEWER_DRIVER", "API call requires a newer CUDA driver";
    DeviceUnavailable = 46, "DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable";
    MulticastResourceFull = 47, "MULTICAST_RESOURCE_FULL", "multicast resources exhausted";
    NoDevice = 100, "NO_DEVICE", "no CUDA-capable device is detected";
    InvalidDevice = 101, "INVALID_DEVICE", "invalid device ordinal";
    DeviceNotLicensed = 102, "DEVICE_NOT_LICENSED", "device doesn't have valid Grid license";
    InvalidImage = 200, "INVALID_IMAGE", "device kernel image is invalid";
    InvalidContext = 201, "INVALID_CONTEXT", "invalid device context";
    ContextAlreadyCurrent = 202, "CONTEXT_ALREADY_CURRENT", "context already current";
    MapFailed = 205, "MAP_FAILED", "mapping of buffer object failed";
    UnmapFailed = 206, "UNMAP_FAILED", "unmapping of buffer object failed";
    ArrayIsMapped = 207, "ARRAY_IS_MAPPED", "array is mapped";
    AlreadyMapped = 208, "ALREADY_MAPPED", "resource already mapped";
    NoBinaryForGpu = 209, "NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device";
    AlreadyAcquired = 210, "ALREADY_ACQUIRED", "resource already acquired";
    NotMapped = 211, "NOT_MAPPED", "resource not mapped";
    NotMappedAsArray = 212, "NOT_MAPPED_AS_ARRAY", "resource not mapped as array";
    NotMappedAsPointer = 213, "NOT_MAPPED_AS_POINTER", "resource not mapped as pointer";
    EccUncorrectable = 214, "ECC_UNCORRECTABLE", "uncorrectable ECC error encountered";
    UnsupportedLimit = 215, "UNSUPPORTED_LIMIT", "limit is not supported on this architecture";
    ContextAlreadyInUse = 216, "CONTEXT_ALREADY_IN_USE", "exclusive-thread device already in use by a different thread";
    PeerAccessUnsupported = 217, "PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices";
    InvalidPtx = 218, "INVALID_PTX", "a PTX JIT compilation failed";
    InvalidGraphicsContext = 219, "INVALID_GRAPHICS_CONTEXT", "invalid OpenGL or DirectX context";
    NvlinkUncorrectable = 220, "NVLINK_UNCORRECTABLE", "uncorrectable NVLink error detected during the execution";
    JitCompilerNotFound = 221, "JIT_COMPILER_NOT_FOUND", "PTX JIT compiler library not found";
    UnsupportedPtxVersion = 222, "UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain.";
    JitCompilationDisabled = 223, "JIT_COMPILATION_DISABLED", "PTX JIT compilation was disabled";
    UnsupportedExecAffinity = 224, "UNSUPPORTED_EXEC_AFFINITY", "the provided execution affinity is not supported";
    UnsupportedDevsideSync = 225, "UNSUPPORTED_DEVSIDE_SYNC", "the operation is not supported on this device side";
    Contained = 226, "CONTAINED", "invalid access blocked, contained to this process";
    InsufficientLoaderVersion = 227, "INSUFFICIENT_LOADER_VERSION", "loader version too old";
    InvalidSource = 300, "INVALID_SOURCE", "device kernel image is invalid";
    FileNotFound = 301, "FILE_NOT_FOUND", "file not found";
    SymbolNotFound = 302, "SHARED_OBJECT_SYMBOL_NOT_FOUND", "shared object symbol not found";
    SharedObjectInitFailed = 303, "SHARED_OBJECT_INIT_FAILED", "shared object initialization failed";
    OperatingSystem = 304, "OPERATING_SYSTEM", "OS call failed or operation not supported on this OS";
    InvalidHandle = 400, "INVALID_HANDLE", "invalid resource handle";
    IllegalState = 401, "ILLEGAL_STATE", "the operation cannot be performed in the present state";
    LossyQuery = 402, "LOSSY_QUERY", "attempted introspection would be semantically lossy";
    NotFound = 500, "NOT_FOUND", "named symbol not found";
    NotReady = 600, "NOT_READY", "device not ready";
    IllegalAddress = 700, "ILLEGAL_ADDRESS", "an illegal memory access was encountered";
    LaunchOutOfResources = 701, "LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch";
    LaunchTimeout = 702, "LAUNCH_TIMEOUT", "the launch timed out and was terminated";
    LaunchIncompatibleTexturing = 703, "LAUNCH_INCOMPATIBLE_TEXTURING", "launch uses incompatible texturing mode";
    PeerAccessAlreadyEnabled = 704, "PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled";
    PeerAccessNotEnabled = 705, "PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled";
    PrimaryContextActive = 708, "PRIMARY_CONTEXT_ACTIVE", "cannot set while device is active in this process";
    ContextIsDestroyed = 709, "CONTEXT_IS_DESTROYED", "context is destroyed";
    Assert = 710, "ASSERT", "device-side assert triggered";
    TooManyPeers = 711, "TOO_MANY_PEERS", "peer mapping resources exhausted";
    HostMemoryAlreadyRegistered = 712, "HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped";
    HostMemoryNotRegistered = 713, "HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region";
    HardwareStackError = 714, "HARDWARE_STACK_ERROR", "hardware stack error";
    IllegalInstruction = 715, "ILLEGAL_INSTRUCTION", "an illegal instruction was encountered";
    MisalignedAddress = 716, "MISALIGNED_ADDRESS", "misaligned address";
    InvalidAddressSpace = 717, "INVALID_ADDRESS_SPACE", "operation not supported on global/shared address space";
    InvalidPc = 718, "INVALID_PC", "invalid program counter";
    LaunchFailed = 719, "LAUNCH_FAILED", "unspecified launch failure";
    CooperativeLaunchTooLarge = 720, "COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in cooperative launch";
    TensorMemoryLeak = 721, "TENSOR_MEMORY_LEAK", "tensor memory was not freed at the end of a kernel";
    NotPermitted = 800, "NOT_PERMITTED", "operation not permitted";
    NotSupported = 801, "NOT_SUPPORTED", "operation not supported";
    SystemNotReady = 802, "SYSTEM_NOT_READY", "system not yet initialized";
    SystemDriverMismatch = 803, "SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination";
    CompatNotSupportedOnDevice = 804, "COMPAT_NOT_SUPPORTED_ON_DEVICE", "forward compatibility was attempted on non supported HW";
    MpsConnectionFailed = 805, "MPS_CONNECTION_FAILED", "MPS client failed to connect to the MPS control daemon or the MPS server";
    MpsRpcFailure = 806, "MPS_RPC_FAILURE", "the remote procedural call between the MPS server and the MPS client failed";
    MpsServerNotReady = 807, "MPS_SERVER_NOT_READY", "MPS server is not ready to accept new MPS client requests";
    MpsMaxClientsReached = 808, "MPS_MAX_CLIENTS_REACHED", "all hardware resources required to create MPS client have been exhausted";
    MpsMaxConnectionsReached = 809, "MPS_MAX_CONNECTIONS_REACHED", "all hardware resources required to support device connections have been exhausted";
    MpsClientTerminated = 810, "MPS_CLIENT_TERMINATED", "the MPS client has been terminated by the server";
    CdpNotSupported = 811, "CDP_NOT_SUPPORTED", "CUDA dynamic parallelism is not supported on this device";
    CdpVersionMismatch = 812, "CDP_VERSION_MISMATCH", "dynamic parallelism version mismatch";
    StreamCaptureUnsupported = 900, "STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing";
    StreamCaptureInvalidated = 901, "STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture";
    StreamCaptureMerge = 902, "STREAM_CAPTURE_MERGE", "operation would result in a merge of separate capture sequences";
    StreamCaptureUnmatched = 903, "STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began";
    StreamCaptureUnjoined = 904, "STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work";
    StreamCaptureIsolation = 905, "STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream";
    StreamCaptureImplicit = 906, "STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing blocking stream";
    CapturedEvent = 907, "CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream";
    StreamCaptureWrongThread = 908, "STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a thread-local capture sequence from another thread";
    Timeout = 909, "TIMEOUT", "wait operation timed out";
    GraphExecUpdateFailure = 910, "GRAPH_EXEC_UPDATE_FAILURE", "the graph update was not performed because it included changes which violated constraints specific to instantiated graph update";
    ExternalDevice = 911, "EXTERNAL_DEVICE", "an async error has occurred in external entity outside of CUDA";
    InvalidClusterSize = 912, "INVALID_CLUSTER_SIZE", "cluster misconfiguration";
    FunctionNotLoaded = 913, "FUNCTION_NOT_LOADED", "function handle is not loaded";
    InvalidResourceType = 914, "INVALID_RESOURCE_TYPE", "invalid resource type";
    InvalidResourceConfiguration = 915, "INVALID_RESOURCE_CONFIGURATION", "invalid resource configuration";
    KeyRotation = 916, "KEY_ROTATION", "key rotation in progress";
    StreamDetached = 917, "STREAM_DETACHED", "stream is detached";
    Unknown = 999, "UNKNOWN", "unknown error";
}

impl Error {
    /// The value in the C API.
    pub fn code(self) -> u32 {
        self as u32
    }

    /// Zero-terminated name and description of a code; `None` for an unknown number.
    pub fn texts(code: u32) -> Option<(&'static str, &'static str)> {
        let at = TEXTS.binary_search_by_key(&code, |&(code, ..)| code).ok()?;
        Some((TEXTS[at].1, TEXTS[at].2))
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (name, text) = Self::texts(self.code()).unwrap_or(("?\0", "?\0"));
        write!(f, "{}: {}", name.trim_end_matches('\0'), text.trim_end_matches('\0'))
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_sorted_and_terminated() {
        assert!(TEXTS.windows(2).all(|pair| pair[0].0 < pair[1].0));
        assert!(TEXTS.iter().all(|(_, name, text)| name.ends_with('\0') && text.ends_with('\0')));
        assert_eq!(
            Error::texts(700),
            Some(("CUDA_ERROR_ILLEGAL_ADDRESS\0", "an illegal memory access was encountered\0"))
        );
        assert_eq!(Error::texts(5000), None);
    }
}

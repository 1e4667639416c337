//! Stubs: functions of the driver API that are only exported so that programs can link. Each returns CUDA_ERROR_NOT_SUPPORTED.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use crate::console::log_stderr;
use crate::error::Error;

/// Logs the function's name, once per process.
fn missing(name: &'static str) -> u32 {
    static SAID: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    if SAID.lock().unwrap_or_else(PoisonError::into_inner).insert(name) {
        log_stderr(format_args!("{name} is not emulated: it answers CUDA_ERROR_NOT_SUPPORTED"));
    }
    Error::NotSupported.code()
}

macro_rules! not_emulated {
    ($($name:ident)*) => {
        $(
            // SAFETY: the symbol name is one of the CUDA driver's. A process that loads this library loads no other that
            // defines it. The function reads none of its arguments, and in the C calling convention the caller cleans them up.
            #[unsafe(no_mangle)]
            extern "C" fn $name() -> u32 {
                missing(stringify!($name))
            }
        )*

        /// Name and address of each stub.
        pub(super) fn entries() -> Vec<(&'static str, *const std::ffi::c_void)> {
            vec![$((stringify!($name), $name as *const std::ffi::c_void)),*]
        }
    };
}

not_emulated! {
    cuArray3DCreate_v2
    cuArray3DGetDescriptor_v2
    cuArrayCreate_v2
    cuArrayDestroy
    cuArrayGetDescriptor_v2
    cuArrayGetMemoryRequirements
    cuArrayGetPlane
    cuArrayGetSparseProperties
    cuCoredumpDeregisterCompleteCallback
    cuCoredumpDeregisterStartCallback
    cuCoredumpGetAttribute
    cuCoredumpGetAttributeGlobal
    cuCoredumpRegisterCompleteCallback
    cuCoredumpRegisterStartCallback
    cuCoredumpSetAttribute
    cuCoredumpSetAttributeGlobal
    cuCtxFromGreenCtx
    cuCtxGetDevResource
    cuCtxRecordEvent
    cuCtxWaitEvent
    cuDestroyExternalMemory
    cuDestroyExternalSemaphore
    cuDevResourceGenerateDesc
    cuDevSmResourceSplit
    cuDevSmResourceSplitByCount
    cuDeviceGetCliqueCount
    cuDeviceGetCliqueInfo
    cuDeviceGetDevResource
    cuDeviceGetFabricClusterUuid
    cuDeviceGetHostAtomicCapabilities
    cuDeviceGetLuid
    cuDeviceGetP2PAtomicCapabilities
    cuDeviceGetTexture1DLinearMaxWidth
    cuDeviceRegisterAsyncNotification
    cuDeviceUnregisterAsyncNotification
    cuExternalMemoryGetMappedBuffer
    cuExternalMemoryGetMappedMipmappedArray
    cuFlushGPUDirectRDMAWrites
    cuFuncSetBlockShape
    cuFuncSetSharedSize
    cuGraphAddBatchMemOpNode
    cuGraphAddExternalSemaphoresSignalNode
    cuGraphAddExternalSemaphoresWaitNode
    cuGraphAddNode_v3
    cuGraphBatchMemOpNodeGetParams
    cuGraphBatchMemOpNodeSetParams
    cuGraphConditionalHandleCreate
    cuGraphExecBatchMemOpNodeSetParams
    cuGraphExecExternalSemaphoresSignalNodeSetParams
    cuGraphExecExternalSemaphoresWaitNodeSetParams
    cuGraphExternalSemaphoresSignalNodeGetParams
    cuGraphExternalSemaphoresSignalNodeSetParams
    cuGraphExternalSemaphoresWaitNodeGetParams
    cuGraphExternalSemaphoresWaitNodeSetParams
    cuGraphNodeGetLocalId
    cuGraphNodeGetParams
    cuGraphNodeGetToolsId
    cuGraphNodeSetParams_v2
    cuGraphicsMapResources
    cuGraphicsResourceGetMappedMipmappedArray
    cuGraphicsResourceGetMappedPointer_v2
    cuGraphicsResourceSetMapFlags_v2
    cuGraphicsSubResourceGetMappedArray
    cuGraphicsUnmapResources
    cuGraphicsUnregisterResource
    cuGreenCtxCreate
    cuGreenCtxDestroy
    cuGreenCtxGetDevResource
    cuGreenCtxGetId
    cuGreenCtxRecordEvent
    cuGreenCtxStreamCreate
    cuGreenCtxWaitEvent
    cuImportExternalMemory
    cuImportExternalSemaphore
    cuIpcCloseMemHandle
    cuIpcGetEventHandle
    cuIpcGetMemHandle
    cuIpcOpenEventHandle
    cuIpcOpenMemHandle_v2
    cuLaunch
    cuLaunchCooperativeKernelMultiDevice
    cuLaunchGrid
    cuLaunchGridAsync
    cuLibraryGetUnifiedFunction
    cuLinkAddData_v2
    cuLinkAddFile_v2
    cuLinkComplete
    cuLinkCreate_v2
    cuLinkDestroy
    cuLogicalEndpointAddDevice
    cuLogicalEndpointBindAddr
    cuLogicalEndpointBindMem
    cuLogicalEndpointCreate
    cuLogicalEndpointDestroy
    cuLogicalEndpointExport
    cuLogicalEndpointGetLimits
    cuLogicalEndpointIdRelease
    cuLogicalEndpointIdReserve
    cuLogicalEndpointImport
    cuLogicalEndpointQuery
    cuLogicalEndpointUnbind
    cuLogsCurrent
    cuLogsDumpToFile
    cuLogsDumpToMemory
    cuLogsRegisterCallback
    cuLogsUnregisterCallback
    cuMemBatchDecompressAsync
    cuMemDiscardAndPrefetchBatchAsync
    cuMemDiscardBatchAsync
    cuMemExportToShareableHandle
    cuMemGetAccess
    cuMemGetHandleForAddressRange
    cuMemGetLocationInfo
    cuMemImportFromShareableHandle
    cuMemMapArrayAsync
    cuMemPoolExportPointer
    cuMemPoolExportToShareableHandle
    cuMemPoolImportFromShareableHandle
    cuMemPoolImportPointer
    cuMemPrefetchBatchAsync
    cuMemRangeGetAttributes
    cuMemcpy3DBatchAsync
    cuMemcpy3DBatchAsync_v2
    cuMemcpy3DWithAttributesAsync
    cuMemcpyAtoA_v2
    cuMemcpyAtoD_v2
    cuMemcpyAtoHAsync_v2
    cuMemcpyAtoH_v2
    cuMemcpyBatchAsync
    cuMemcpyBatchAsync_v2
    cuMemcpyDtoA_v2
    cuMemcpyHtoAAsync_v2
    cuMemcpyHtoA_v2
    cuMemcpyWithAttributesAsync
    cuMipmappedArrayCreate
    cuMipmappedArrayDestroy
    cuMipmappedArrayGetLevel
    cuMipmappedArrayGetMemoryRequirements
    cuMipmappedArrayGetSparseProperties
    cuModuleGetSurfRef
    cuModuleGetTexRef
    cuMulticastAddDevice
    cuMulticastBindAddr
    cuMulticastBindAddr_v2
    cuMulticastBindMem
    cuMulticastBindMem_v2
    cuMulticastCreate
    cuMulticastGetGranularity
    cuMulticastUnbind
    cuOccupancyMaxActiveClusters
    cuOccupancyMaxPotentialClusterSize
    cuParamSetSize
    cuParamSetTexRef
    cuParamSetf
    cuParamSeti
    cuParamSetv
    cuSignalExternalSemaphoresAsync
    cuStreamBeginCaptureToCig
    cuStreamBeginRecaptureToGraph
    cuStreamEndCaptureToCig
    cuStreamGetDevResource
    cuStreamGetGreenCtx
    cuSurfObjectCreate
    cuSurfObjectDestroy
    cuSurfObjectGetResourceDesc
    cuSurfRefGetArray
    cuSurfRefSetArray
    cuTensorMapEncodeIm2col
    cuTensorMapEncodeIm2colWide
    cuTensorMapEncodeTiled
    cuTensorMapReplaceAddress
    cuTexObjectCreate
    cuTexObjectDestroy
    cuTexObjectGetResourceDesc
    cuTexObjectGetResourceViewDesc
    cuTexObjectGetTextureDesc
    cuTexRefCreate
    cuTexRefDestroy
    cuTexRefGetAddressMode
    cuTexRefGetAddress_v2
    cuTexRefGetArray
    cuTexRefGetBorderColor
    cuTexRefGetFilterMode
    cuTexRefGetFlags
    cuTexRefGetFormat
    cuTexRefGetMaxAnisotropy
    cuTexRefGetMipmapFilterMode
    cuTexRefGetMipmapLevelBias
    cuTexRefGetMipmapLevelClamp
    cuTexRefGetMipmappedArray
    cuTexRefSetAddress2D_v3
    cuTexRefSetAddressMode
    cuTexRefSetAddress_v2
    cuTexRefSetArray
    cuTexRefSetBorderColor
    cuTexRefSetFilterMode
    cuTexRefSetFlags
    cuTexRefSetFormat
    cuTexRefSetMaxAnisotropy
    cuTexRefSetMipmapFilterMode
    cuTexRefSetMipmapLevelBias
    cuTexRefSetMipmapLevelClamp
    cuTexRefSetMipmappedArray
    cuWaitExternalSemaphoresAsync
}

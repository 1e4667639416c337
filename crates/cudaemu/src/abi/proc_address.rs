//! `cuGetProcAddress`: finds the exported functions by name and version.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::OnceLock;

use super::ffi_guard::{Opaque, Out, Text, api};
use super::{
    capture, context, device, extension, graph, launch, library, memcpy, memory, module, physical, pool, stream, stubs,
};
use crate::error::{Error, Result};

api! {
    fn cuGetProcAddress(name: Text, function: Out<*const c_void>, version: c_int, flags: u64) {
        let (found, _) = resolve(name, version, flags)?;
        function.write_with(|| found.ok_or(Error::NotFound))
    }

    fn cuGetProcAddress_v2(name: Text, function: Out<*const c_void>, version: c_int, flags: u64, status: Out<c_uint>) {
        function.check_not_null()?;
        let (found, known) = resolve(name, version, flags)?;
        // 0: found; 1: no function has that name; 2: only a later version has it.
        status.set(match (found, known) {
            (Some(_), _) => 0,
            (None, false) => 1,
            (None, true) => 2,
        });
        function.set(found.unwrap_or(std::ptr::null()));
        match found {
            Some(_) => Ok(()),
            // A caller that passes a status pointer reads the result there; the call itself succeeds.
            None if status.is_given() => Ok(()),
            None => Err(Error::NotFound),
        }
    }

    fn cuGetExportTable(_table: Out<*const c_void>, _id: Opaque) {
        Err(Error::NotSupported)
    }
}

/// Functions whose suffixed form (`_v2`, …) came with a certain version: for each name (version, exported name). All others got
/// their highest suffix before the oldest version that the emulator reports.
const VERSIONS: &[(&str, &[(i32, &str)])] = &[
    ("cuCtxCreate", &[(3020, "cuCtxCreate_v2"), (11040, "cuCtxCreate_v3"), (12050, "cuCtxCreate_v4")]),
    ("cuCtxGetDevice", &[(2000, "cuCtxGetDevice"), (13000, "cuCtxGetDevice_v2")]),
    ("cuCtxSynchronize", &[(2000, "cuCtxSynchronize"), (13000, "cuCtxSynchronize_v2")]),
    ("cuDeviceGetUuid", &[(9020, "cuDeviceGetUuid"), (11040, "cuDeviceGetUuid_v2")]),
    ("cuEventElapsedTime", &[(2000, "cuEventElapsedTime"), (12080, "cuEventElapsedTime_v2")]),
    ("cuGetProcAddress", &[(11030, "cuGetProcAddress"), (12000, "cuGetProcAddress_v2")]),
    ("cuGraphAddDependencies", &[(10000, "cuGraphAddDependencies"), (12030, "cuGraphAddDependencies_v2")]),
    ("cuGraphAddKernelNode", &[(10000, "cuGraphAddKernelNode"), (12000, "cuGraphAddKernelNode_v2")]),
    ("cuGraphAddNode", &[(12020, "cuGraphAddNode"), (12030, "cuGraphAddNode_v2")]),
    ("cuGraphExecUpdate", &[(10020, "cuGraphExecUpdate"), (12000, "cuGraphExecUpdate_v2")]),
    ("cuGraphGetEdges", &[(10000, "cuGraphGetEdges"), (12030, "cuGraphGetEdges_v2")]),
    ("cuGraphInstantiate", &[(11000, "cuGraphInstantiate_v2"), (12000, "cuGraphInstantiateWithFlags")]),
    ("cuGraphKernelNodeGetParams", &[(10000, "cuGraphKernelNodeGetParams"), (12000, "cuGraphKernelNodeGetParams_v2")]),
    ("cuGraphKernelNodeSetParams", &[(10000, "cuGraphKernelNodeSetParams"), (12000, "cuGraphKernelNodeSetParams_v2")]),
    ("cuGraphNodeGetDependencies", &[(10000, "cuGraphNodeGetDependencies"), (12030, "cuGraphNodeGetDependencies_v2")]),
    (
        "cuGraphExecKernelNodeSetParams",
        &[(10010, "cuGraphExecKernelNodeSetParams"), (12000, "cuGraphExecKernelNodeSetParams_v2")],
    ),
    ("cuLaunchHostFunc", &[(10000, "cuLaunchHostFunc"), (13020, "cuLaunchHostFunc_v2")]),
    ("cuMemAdvise", &[(8000, "cuMemAdvise"), (12020, "cuMemAdvise_v2")]),
    ("cuMemPrefetchAsync", &[(8000, "cuMemPrefetchAsync"), (12020, "cuMemPrefetchAsync_v2")]),
    ("cuStreamBatchMemOp", &[(8000, "cuStreamBatchMemOp"), (11070, "cuStreamBatchMemOp_v2")]),
    (
        "cuStreamGetCaptureInfo",
        &[
            (10010, "cuStreamGetCaptureInfo"),
            (11030, "cuStreamGetCaptureInfo_v2"),
            (12030, "cuStreamGetCaptureInfo_v3"),
        ],
    ),
    ("cuStreamGetCtx", &[(9020, "cuStreamGetCtx"), (12050, "cuStreamGetCtx_v2")]),
    ("cuStreamWaitValue32", &[(8000, "cuStreamWaitValue32"), (11070, "cuStreamWaitValue32_v2")]),
    ("cuStreamWaitValue64", &[(9000, "cuStreamWaitValue64"), (11070, "cuStreamWaitValue64_v2")]),
    ("cuStreamWriteValue32", &[(8000, "cuStreamWriteValue32"), (11070, "cuStreamWriteValue32_v2")]),
    ("cuStreamWriteValue64", &[(9000, "cuStreamWriteValue64"), (11070, "cuStreamWriteValue64_v2")]),
];

/// Addresses of all exported functions by name.
fn all_entries() -> &'static BTreeMap<&'static str, usize> {
    static ALL: OnceLock<BTreeMap<&'static str, usize>> = OnceLock::new();
    ALL.get_or_init(|| {
        let files = [
            capture::entries(),
            context::entries(),
            memcpy::entries(),
            device::entries(),
            extension::entries(),
            graph::all_entries(),
            launch::entries(),
            library::entries(),
            memory::entries(),
            stubs::entries(),
            module::entries(),
            physical::entries(),
            pool::entries(),
            stream::entries(),
            entries(),
        ];
        files.into_iter().flatten().map(|(name, function)| (name, function.expose_provenance())).collect()
    })
}

/// Finds the function of that name for a program of that version (12040 for 12.4), and whether any version has the name. The
/// flags choose per-thread default streams; they are ignored because each function exists in one form only.
fn resolve(name: Text, version: c_int, _flags: u64) -> Result<(Option<*const c_void>, bool)> {
    let name = name.read()?;
    let all = all_entries();
    let address = |name: &str| all.get(name).map(|&address| std::ptr::with_exposed_provenance(address));
    if let Some((_, forms)) = VERSIONS.iter().find(|(base, _)| *base == name) {
        let newest = forms.iter().rev().find(|(since, _)| *since <= version);
        return Ok((newest.and_then(|(_, form)| address(form)), true));
    }
    let forms = [format!("{name}_v3"), format!("{name}_v2"), name];
    let found = forms.iter().find_map(|form| address(form));
    Ok((found, found.is_some()))
}

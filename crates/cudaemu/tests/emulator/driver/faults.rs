//! Kernel faults become errors of the driver: sticky in their context, and without effect on other contexts.

use super::support::{PrimaryContext, get, get_function, handle, launch, load_kernels, ok};
use cudarc::driver::sys::{self, CUresult};

/// Runs a kernel that faults; returns the error code and the reports. `params` makes its parameters from the address of 256
/// bytes.
fn run_faulty_kernel(settings: &str, kernel: &str, params: impl Fn(u64) -> Vec<u64>) -> (CUresult, Vec<String>) {
    let emulator = cudaemu::test::start(settings).unwrap();
    let primary = PrimaryContext::new(0);
    // SAFETY: out parameters point to variables of their types; kernels get the parameters that they declare.
    unsafe {
        let a = get(|a| sys::cuMemAlloc_v2(a, 256));
        let function = get_function(load_kernels(), kernel);
        ok(launch(function, 1, std::ptr::null_mut(), &params(a)));
        let error = sys::cuCtxSynchronize();
        // All later calls in the context return the same error.
        let mut b = 0;
        assert_eq!(sys::cuMemAlloc_v2(&mut b, 16), error);
        assert_eq!(sys::cuMemFree_v2(a), error);
        assert_eq!(sys::cuMemsetD8_v2(a, 0, 1), error);
        assert_eq!(launch(function, 1, std::ptr::null_mut(), &params(a)), error);
        assert_eq!(sys::cuStreamSynchronize(std::ptr::null_mut()), error);
        let mut stream = std::ptr::null_mut();
        assert_eq!(sys::cuStreamCreate(&mut stream, 0), error);
        drop(primary);
        // A new context works.
        let primary = PrimaryContext::new(0);
        let b = get(|b| sys::cuMemAlloc_v2(b, 16));
        ok(sys::cuMemFree_v2(b));
        drop(primary);
        (error, emulator.reports())
    }
}

#[test]
fn each_fault_has_its_code_and_is_reported_with_its_place() {
    use CUresult::*;
    for (settings, kernel, offset, code, text) in [
        ("", "overrun", 256, CUDA_ERROR_ILLEGAL_ADDRESS, "in kernel overrun, block (0,0,0), thread (0,0,0)"),
        ("", "overrun", 1 << 40, CUDA_ERROR_ILLEGAL_ADDRESS, "write of 4 bytes"),
        ("", "overrun", 2, CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned access"),
        ("", "trap", 0, CUDA_ERROR_LAUNCH_FAILED, "in kernel trap"),
        ("CUDAEMU_MAX_INSTRUCTIONS=10K", "spin", 0, CUDA_ERROR_LAUNCH_TIMEOUT, "CUDAEMU_MAX_INSTRUCTIONS"),
        ("", "copy", 0, CUDA_ERROR_LAUNCH_FAILED, "read of uninitialised memory"),
    ] {
        let (error, reports) =
            run_faulty_kernel(settings, kernel, |a| if kernel == "copy" { vec![a, a + 16] } else { vec![a, offset] });
        assert_eq!(error, code, "{kernel} {offset}");
        assert_eq!(reports.len(), 1, "{reports:?}");
        assert!(reports[0].contains(text), "{reports:?}");
    }
}

#[test]
fn report_mode_does_not_stop_the_program() {
    let emulator = cudaemu::test::start("CUDAEMU_CHECK=report").unwrap();
    let primary = PrimaryContext::new(0);
    // SAFETY: out parameters point to variables of their types; the kernel gets the parameters that it declares.
    unsafe {
        let a = get(|a| sys::cuMemAlloc_v2(a, 256));
        ok(launch(get_function(load_kernels(), "copy"), 1, std::ptr::null_mut(), &[a, a + 16]));
        ok(sys::cuCtxSynchronize());
        ok(sys::cuMemFree_v2(a));
    }
    let reports = emulator.reports();
    assert!(reports.len() == 1 && reports[0].contains("read of uninitialised memory"), "{reports:?}");
    drop(primary);
}

#[test]
fn a_fault_leaves_other_contexts_usable() {
    let _emulator = cudaemu::test::start("CUDAEMU_DEVICES=2").unwrap();
    let good = PrimaryContext::new(1);
    // SAFETY: out parameters point to variables of their types; kernels get the parameters that they declare.
    unsafe {
        let kept = get(|a| sys::cuMemAlloc_v2(a, 16));
        ok(sys::cuMemsetD8_v2(kept, 5, 16));
        let bad = PrimaryContext::new(0);
        let event = handle(|e| sys::cuEventCreate(e, 0));
        ok(launch(get_function(load_kernels(), "trap"), 1, std::ptr::null_mut(), &[]));
        // The kernel may or may not have run, and so failed, by now.
        let recorded = sys::cuEventRecord(event, std::ptr::null_mut());
        assert!([CUresult::CUDA_SUCCESS, CUresult::CUDA_ERROR_LAUNCH_FAILED].contains(&recorded));
        assert_eq!(sys::cuEventSynchronize(event), CUresult::CUDA_ERROR_LAUNCH_FAILED);
        assert_eq!(sys::cuEventQuery(event), CUresult::CUDA_ERROR_LAUNCH_FAILED);
        ok(sys::cuCtxSetCurrent(good.context));
        let mut data = [0u8; 16];
        ok(sys::cuMemcpyDtoH_v2(data.as_mut_ptr().cast(), kept, 16));
        assert_eq!(data, [5; 16]);
        ok(sys::cuMemFree_v2(kept));
        drop(bad);
    }
}

#[test]
fn a_kernel_after_a_stream_ordered_free_faults() {
    let emulator = cudaemu::test::start("").unwrap();
    let _primary = PrimaryContext::new(0);
    // SAFETY: out parameters point to variables of their types; the kernel gets the parameters that it declares.
    unsafe {
        let null = std::ptr::null_mut();
        let overrun = get_function(load_kernels(), "overrun");
        let a = get(|a| sys::cuMemAllocAsync(a, 256, null));
        ok(launch(overrun, 1, null, &[a, 0]));
        ok(sys::cuMemFreeAsync(a, null));
        ok(launch(overrun, 1, null, &[a, 0]));
        assert_eq!(sys::cuCtxSynchronize(), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    }
    assert!(emulator.reports()[0].contains("use after free"), "{:?}", emulator.reports());
}

#[test]
fn after_a_fault_host_functions_are_skipped() {
    use std::sync::atomic::{AtomicU32, Ordering};
    extern "C" fn host(seen: *mut std::ffi::c_void) {
        // SAFETY: the test passes this value, which outlives the driver.
        unsafe { &*seen.cast::<AtomicU32>() }.store(1, Ordering::SeqCst);
    }
    let _emulator = cudaemu::test::start("").unwrap();
    let _primary = PrimaryContext::new(0);
    let called = AtomicU32::new(0);
    // SAFETY: out parameters point to variables of their types; what the functions get outlives their calls.
    unsafe {
        let module = load_kernels();
        let trap = get_function(module, "trap");
        // A wait for a value blocks the stream until everything is submitted.
        let gate = get(|a| sys::cuMemAlloc_v2(a, 4));
        ok(sys::cuMemsetD32_v2(gate, 0, 1));
        ok(sys::cuCtxSynchronize());
        let stream = handle(|s| sys::cuStreamCreate(s, 1));
        ok(sys::cuStreamWaitValue32_v2(stream, gate, 1, 1));
        ok(launch(trap, 1, stream, &[]));
        ok(sys::cuLaunchHostFunc(stream, Some(host), std::ptr::from_ref(&called).cast_mut().cast()));
        let other = handle(|s| sys::cuStreamCreate(s, 1));
        ok(sys::cuStreamWriteValue32_v2(other, gate, 1, 0));
        assert_eq!(sys::cuCtxSynchronize(), CUresult::CUDA_ERROR_LAUNCH_FAILED);
    }
    assert_eq!(called.into_inner(), 0);
}

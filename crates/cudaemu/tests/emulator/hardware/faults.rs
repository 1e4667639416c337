//! Injected faults, and devices that a fault makes unusable.

use super::{read_word, scale, stream};
use crate::driver::support::{PrimaryContext, add_node, get, get_function, handle, launch, load_kernels, ok};
use cudarc::driver::sys::{self, CUresult};

const NULL: sys::CUstream = std::ptr::null_mut();

/// Asserts that every call which needs a context of device 0 returns this error. The primary context is current.
fn assert_unusable(error: CUresult, function: sys::CUfunction, stream: sys::CUstream, event: sys::CUevent) {
    let (mut address, mut other, mut context) = (0, std::ptr::null_mut(), std::ptr::null_mut());
    let (mut free, mut total) = (0, 0);
    // SAFETY: out parameters point to variables of their types; the kernel never runs.
    unsafe {
        for (call, result) in [
            ("alloc", sys::cuMemAlloc_v2(&mut address, 16)),
            ("alloc async", sys::cuMemAllocAsync(&mut address, 16, stream)),
            ("memory", sys::cuMemGetInfo_v2(&mut free, &mut total)),
            ("launch", launch(function, 1, stream, &[0, 0, 0])),
            ("stream", sys::cuStreamCreate(&mut other, 0)),
            ("stream synchronize", sys::cuStreamSynchronize(stream)),
            ("stream query", sys::cuStreamQuery(stream)),
            ("event query", sys::cuEventQuery(event)),
            ("event synchronize", sys::cuEventSynchronize(event)),
            ("record", sys::cuEventRecord(event, stream)),
            ("synchronize", sys::cuCtxSynchronize()),
            ("retain", sys::cuDevicePrimaryCtxRetain(&mut context, 0)),
            ("create", sys::cuCtxCreate_v3(&mut context, std::ptr::null_mut(), 0, 0, 0)),
            ("destroy event", sys::cuEventDestroy_v2(event)),
            ("destroy stream", sys::cuStreamDestroy_v2(stream)),
            ("reset", sys::cuDevicePrimaryCtxReset_v2(0)),
            ("retain after the reset", sys::cuDevicePrimaryCtxRetain(&mut context, 0)),
            ("create after the reset", sys::cuCtxCreate_v3(&mut context, std::ptr::null_mut(), 0, 0, 0)),
        ] {
            assert_eq!(result, error, "{call}");
        }
    }
}

/// Asserts that kernels and copies of the current context work.
fn assert_usable() {
    // SAFETY: out parameters point to variables of their types; the kernel gets the parameters that it declares.
    unsafe {
        let a = get(|a| sys::cuMemAlloc_v2(a, 4));
        ok(sys::cuMemsetD32_v2(a, 7, 1));
        ok(launch(scale(), 1, NULL, &[a, 3, 1]));
        assert_eq!(read_word(a), 21);
        ok(sys::cuMemFree_v2(a));
    }
}

#[test]
fn an_injected_fault_makes_its_device_unusable_and_no_other() {
    use CUresult::*;
    for (kind, error) in [
        ("", CUDA_ERROR_ILLEGAL_ADDRESS),
        (":address", CUDA_ERROR_ILLEGAL_ADDRESS),
        (":ecc", CUDA_ERROR_ECC_UNCORRECTABLE),
        (":launch", CUDA_ERROR_LAUNCH_FAILED),
        (":lost", CUDA_ERROR_UNKNOWN),
    ] {
        let emulator = cudaemu::test::start(&format!("CUDAEMU_DEVICES=2\nCUDAEMU_FAULT_AT=2{kind}")).unwrap();
        let other = PrimaryContext::new(1);
        let failing = PrimaryContext::new(0);
        // SAFETY: out parameters point to variables of their types; kernels get the parameters that they declare.
        unsafe {
            let function = scale();
            let stream = stream();
            let event = handle(|e| sys::cuEventCreate(e, 0));
            let a = get(|a| sys::cuMemAlloc_v2(a, 4));
            ok(sys::cuMemsetD32_v2(a, 5, 1));
            ok(launch(function, 1, NULL, &[a, 3, 1]));
            assert_eq!(read_word(a), 15, "the first launch runs");
            ok(launch(function, 1, stream, &[a, 3, 1]));
            assert_eq!(sys::cuStreamSynchronize(stream), error, "{kind}");
            assert_unusable(error, function, stream, event);
            assert_eq!(sys::cuCtxSetCurrent(other.context), CUDA_SUCCESS);
            assert_usable();
        }
        drop((failing, other));
        let reports = emulator.reports();
        assert!(reports[0].starts_with("injected fault: launch 2 of device 0 (kernel scale) ends with"), "{reports:?}");
        assert!(emulator.wait_contexts_released(std::time::Duration::from_secs(20)));
    }
    let _emulator = cudaemu::test::start("").unwrap();
    let _primary = PrimaryContext::new(0);
    assert_usable();
}

#[test]
fn with_poison_a_kernels_own_fault_makes_its_device_unusable() {
    for (settings, usable) in [("", true), ("CUDAEMU_POISON=off", true), ("CUDAEMU_POISON=on", false)] {
        let _emulator = cudaemu::test::start(settings).unwrap();
        let primary = PrimaryContext::new(0);
        // SAFETY: out parameters point to variables of their types; kernels get the parameters that they declare.
        unsafe {
            let second = handle(|c| sys::cuCtxCreate_v3(c, std::ptr::null_mut(), 0, 0, 0));
            ok(sys::cuCtxSetCurrent(primary.context));
            let (stream, event) = (stream(), handle(|e| sys::cuEventCreate(e, 0)));
            let module = load_kernels();
            let [overrun, scale] = ["overrun", "scale"].map(|name| get_function(module, name));
            let a = get(|a| sys::cuMemAlloc_v2(a, 4));
            ok(launch(overrun, 1, NULL, &[a, 4]));
            assert_eq!(sys::cuCtxSynchronize(), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
            if !usable {
                assert_unusable(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, scale, stream, event);
                ok(sys::cuCtxSetCurrent(second));
                assert_eq!(sys::cuCtxSynchronize(), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, "the device's other context");
                continue;
            }
            ok(sys::cuCtxSetCurrent(second));
            assert_usable();
            ok(sys::cuDevicePrimaryCtxReset_v2(0));
            let primary = PrimaryContext::new(0);
            assert_usable();
            drop(primary);
        }
    }
}

#[test]
fn launches_are_counted_per_device_and_graphs_count_each_kernel() {
    let settings = "CUDAEMU_DEVICES=2\nCUDA_VISIBLE_DEVICES=1,0\nCUDAEMU_FAULT_AT=4:launch@1,100@0";
    let _emulator = cudaemu::test::start(settings).unwrap();
    // Device 1 before CUDA_VISIBLE_DEVICES selects.
    let primary = PrimaryContext::new(0);
    // SAFETY: out parameters point to variables of their types; kernels get the parameters that they declare.
    unsafe {
        let (function, stream) = (scale(), stream());
        let a = get(|a| sys::cuMemAlloc_v2(a, 4));
        ok(sys::cuMemsetD32_v2(a, 1, 1));
        ok(sys::cuCtxSynchronize());
        let graph = handle(|g| sys::cuGraphCreate(g, 0));
        let first = add_node(graph, function, 1, &[a, 2, 1], &[]);
        add_node(graph, function, 1, &[a, 2, 1], &[first]);
        let exec = handle(|e| sys::cuGraphInstantiateWithFlags(e, graph, 0));
        ok(sys::cuGraphLaunch(exec, stream));
        ok(sys::cuStreamSynchronize(stream));
        assert_eq!(read_word(a), 4);
        let second = PrimaryContext::new(1);
        for _ in 0..5 {
            assert_usable();
        }
        drop(second);
        ok(sys::cuCtxSetCurrent(primary.context));
        ok(sys::cuGraphLaunch(exec, stream));
        assert_eq!(sys::cuStreamSynchronize(stream), CUresult::CUDA_ERROR_LAUNCH_FAILED);
    }
}

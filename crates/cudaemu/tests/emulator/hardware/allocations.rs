//! Allocations that synchronise, and modules that take time to compile, in simulated time.

use super::{scale, stream};
use crate::driver::support::{KERNELS, PrimaryContext, get, handle, launch, load_kernels, ok};
use cudarc::driver::sys;

/// A call between two launches, with memory that it may free: device memory, pinned memory, memory of a pool.
type Call = fn([u64; 3], sys::CUstream);

/// Simulated microseconds of a launch, a call, and a launch; and the synchronising allocations of the call.
fn time_of(settings: &str, call: Call) -> (f64, u64) {
    let emulator = cudaemu::test::start(&format!("CUDAEMU_KERNEL_US=100\n{settings}")).unwrap();
    let _primary = PrimaryContext::new(0);
    // SAFETY: out parameters point to variables of their types; kernels get the parameters that they declare.
    unsafe {
        let (function, stream) = (scale(), stream());
        let data = get(|a| sys::cuMemAlloc_v2(a, 4));
        ok(sys::cuMemsetD32_v2(data, 1, 1));
        let memory = [
            get(|a| sys::cuMemAlloc_v2(a, 4)),
            handle(|p| sys::cuMemHostAlloc(p, 4, 0)) as u64,
            get(|a| sys::cuMemAllocAsync(a, 4, stream)),
        ];
        ok(sys::cuCtxSynchronize());
        let before = emulator.alloc_syncs();
        emulator.restart_simulated_time();
        ok(launch(function, 1, stream, &[data, 1, 1]));
        call(memory, stream);
        ok(launch(function, 1, stream, &[data, 1, 1]));
        (emulator.simulated_time().makespan_us, emulator.alloc_syncs() - before)
    }
}

#[test]
fn allocations_wait_for_the_contexts_work_and_hold_the_lock() {
    // SAFETY: out parameters point to variables of their types; each call frees memory of its kind.
    let calls: [(&str, u64, Call); 7] = unsafe {
        [
            ("cuMemAlloc", 1, |_, _| {
                get(|a| sys::cuMemAlloc_v2(a, 4));
            }),
            ("cuMemFree", 1, |[device, ..], _| ok(sys::cuMemFree_v2(device))),
            ("cuMemHostAlloc", 1, |_, _| {
                handle(|p| sys::cuMemHostAlloc(p, 4, 0));
            }),
            ("cuMemFreeHost", 1, |[_, pinned, _], _| ok(sys::cuMemFreeHost(pinned as *mut _))),
            ("cuMemAllocAsync", 0, |_, stream| {
                get(|a| sys::cuMemAllocAsync(a, 4, stream));
            }),
            ("cuMemFreeAsync", 0, |[.., pool], stream| ok(sys::cuMemFreeAsync(pool, stream))),
            ("cuMemAllocFromPoolAsync", 0, |_, stream| {
                let mut properties: sys::CUmemPoolProps = std::mem::zeroed();
                properties.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
                properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
                let pool = handle(|p| sys::cuMemPoolCreate(p, &properties));
                get(|a| sys::cuMemAllocFromPoolAsync(a, 4, pool, stream));
            }),
        ]
    };
    for (name, count, call) in calls {
        assert_eq!(time_of("CUDAEMU_ALLOC_SYNC_US=10", call), (200.0 + 10.0 * count as f64, count), "{name}");
        assert_eq!(time_of("", call), (200.0, count), "{name} without the setting");
    }
}

#[test]
fn a_thread_that_submits_work_waits_for_the_drivers_lock() {
    for (settings, expected) in [("CUDAEMU_ALLOC_SYNC_US=50", 150.0), ("", 100.0)] {
        let emulator = cudaemu::test::start(&format!("CUDAEMU_KERNEL_US=100\n{settings}")).unwrap();
        let primary = PrimaryContext::new(0);
        // SAFETY: out parameters point to variables of their types; the kernel gets the parameters that it declares.
        unsafe {
            let (function, stream) = (scale(), stream());
            let data = get(|a| sys::cuMemAlloc_v2(a, 4));
            ok(sys::cuMemsetD32_v2(data, 1, 1));
            ok(sys::cuCtxSynchronize());
            emulator.restart_simulated_time();
            let context = primary.context as usize;
            let allocates = std::thread::spawn(move || {
                ok(sys::cuCtxSetCurrent(context as sys::CUcontext));
                get(|a| sys::cuMemAlloc_v2(a, 4));
            });
            allocates.join().unwrap();
            ok(launch(function, 1, stream, &[data, 1, 1]));
            assert_eq!(emulator.simulated_time().makespan_us, expected, "{settings}");
        }
    }
}

#[test]
fn modules_take_time_to_compile_and_threads_compile_concurrently() {
    let emulator = cudaemu::test::start("CUDAEMU_KERNEL_US=100\nCUDAEMU_COMPILE_MS=2").unwrap();
    let primary = PrimaryContext::new(0);
    // SAFETY: out parameters point to variables of their types; the kernel gets the parameters that it declares.
    unsafe {
        let (function, stream) = (scale(), stream());
        assert_eq!(emulator.compilations(), 1);
        let data = get(|a| sys::cuMemAlloc_v2(a, 4));
        ok(sys::cuMemsetD32_v2(data, 1, 1));
        ok(sys::cuCtxSynchronize());
        emulator.restart_simulated_time();
        load_kernels();
        let text = std::ffi::CString::new(KERNELS).unwrap();
        let (none, nothing) = (std::ptr::null_mut(), std::ptr::null_mut());
        handle(|m| sys::cuModuleLoadDataEx(m, text.as_ptr().cast(), 0, none, nothing));
        ok(launch(function, 1, stream, &[data, 1, 1]));
        assert_eq!((emulator.simulated_time().makespan_us, emulator.compilations()), (4100.0, 3));
        emulator.restart_simulated_time();
        let context = primary.context as usize;
        let (function, stream) = (function as usize, stream as usize);
        let compiles = [0; 2].map(|_| {
            std::thread::spawn(move || {
                ok(sys::cuCtxSetCurrent(context as sys::CUcontext));
                load_kernels();
                ok(launch(function as sys::CUfunction, 1, stream as sys::CUstream, &[data, 1, 1]));
            })
        });
        compiles.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!((emulator.simulated_time().makespan_us, emulator.compilations()), (2200.0, 5));
    }
}

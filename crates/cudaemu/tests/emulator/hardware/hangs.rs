//! Launches that never end.

use super::{read_word, scale, stream};
use crate::driver::support::{PrimaryContext, get, handle, launch, ok};
use cudarc::driver::sys::{self, CUresult};

/// Waits until the program has made this many calls of a driver function. Returns at once in a test that works; otherwise the
/// test runner's limit ends it.
fn wait_called(emulator: &cudaemu::test::Session, function: &str, calls: u64) {
    while emulator.calls(function) < calls {
        std::thread::yield_now();
    }
}

/// Ends hung launches before the contexts are released, which would block: in a test that fails too.
struct EndHungLaunches<'a>(&'a cudaemu::test::Session);

impl Drop for EndHungLaunches<'_> {
    fn drop(&mut self) {
        self.0.end_hung_launches();
    }
}

/// Calls `wait` on a thread with this context current.
fn waiting_thread(
    context: sys::CUcontext,
    wait: impl FnOnce() -> CUresult + Send + 'static,
) -> std::thread::JoinHandle<CUresult> {
    let context = context as usize;
    std::thread::spawn(move || {
        // SAFETY: the context is alive.
        ok(unsafe { sys::cuCtxSetCurrent(context as sys::CUcontext) });
        wait()
    })
}

#[test]
fn a_hung_launch_blocks_its_stream_and_nothing_else() {
    for settings in ["", "CUDAEMU_KERNEL_US=10", "CUDAEMU_KERNEL_GBPS=100", "CUDAEMU_SEED=5"] {
        let settings = format!("CUDAEMU_DEVICES=2\nCUDAEMU_HANG_AT=2\n{settings}");
        let emulator = cudaemu::test::start(&settings).unwrap();
        let other = PrimaryContext::new(1);
        let primary = PrimaryContext::new(0);
        let _end = EndHungLaunches(&emulator);
        // SAFETY: out parameters point to variables of their types; kernels get the parameters that they declare.
        unsafe {
            let (function, hung, free) = (scale(), stream(), stream());
            let event = handle(|e| sys::cuEventCreate(e, 2));
            let a = get(|a| sys::cuMemAlloc_v2(a, 8));
            ok(sys::cuMemsetD32_v2(a, 5, 2));
            ok(sys::cuCtxSynchronize());
            ok(launch(function, 1, hung, &[a, 3, 1]));
            ok(launch(function, 1, hung, &[a, 3, 1]));
            ok(sys::cuEventRecord(event, hung));
            let address = event as usize;
            let waits = waiting_thread(primary.context, move || sys::cuEventSynchronize(address as sys::CUevent));
            wait_called(&emulator, "cuEventSynchronize", 1);
            // The other thread may be executing the first launch.
            while emulator.hung_launches() == 0 {
                assert_eq!(sys::cuEventQuery(event), CUresult::CUDA_ERROR_NOT_READY);
            }
            for _ in 0..100 {
                assert_eq!(sys::cuEventQuery(event), CUresult::CUDA_ERROR_NOT_READY);
                assert_eq!(sys::cuStreamQuery(hung), CUresult::CUDA_ERROR_NOT_READY);
            }
            // Another stream of the device.
            ok(launch(function, 1, free, &[a + 4, 2, 1]));
            ok(sys::cuStreamSynchronize(free));
            // Another device.
            ok(sys::cuCtxSetCurrent(other.context));
            let b = get(|b| sys::cuMemAlloc_v2(b, 4));
            ok(sys::cuMemsetD32_v2(b, 5, 1));
            ok(launch(scale(), 1, std::ptr::null_mut(), &[b, 2, 1]));
            assert_eq!(read_word(b), 10);
            ok(sys::cuCtxSynchronize());
            emulator.simulated_time();
            assert!(!waits.is_finished());
            assert_eq!(emulator.hung_launches(), 1);
            emulator.end_hung_launches();
            assert_eq!(waits.join().unwrap(), CUresult::CUDA_ERROR_LAUNCH_TIMEOUT);
            assert_eq!(emulator.hung_launches(), 0);
        }
        let reports = emulator.reports();
        assert_eq!(reports, ["launch 2 of device 0 (kernel scale) has hung until it was ended"]);
    }
}

#[test]
fn calls_that_synchronise_the_context_block_until_the_session_ends() {
    let emulator = cudaemu::test::start("CUDAEMU_HANG_AT=1").unwrap();
    let primary = PrimaryContext::new(0);
    let context = primary.context;
    // The context ends with the session; its release would block before, and afterwards be one of the next session's context.
    std::mem::forget(primary);
    // SAFETY: out parameters point to variables of their types; the kernel gets the parameters that it declares.
    unsafe {
        let a = get(|a| sys::cuMemAlloc_v2(a, 4));
        let hung = stream() as usize;
        ok(sys::cuMemsetD32_v2(a, 5, 1));
        ok(launch(scale(), 1, hung as sys::CUstream, &[a, 3, 1]));
        let threads = [
            waiting_thread(context, || sys::cuCtxSynchronize()),
            waiting_thread(context, move || sys::cuStreamSynchronize(hung as sys::CUstream)),
            waiting_thread(context, move || sys::cuMemFree_v2(a)),
        ];
        for call in ["cuCtxSynchronize", "cuStreamSynchronize", "cuMemFree_v2"] {
            wait_called(&emulator, call, 1);
        }
        while emulator.hung_launches() == 0 {
            assert_eq!(sys::cuStreamQuery(hung as sys::CUstream), CUresult::CUDA_ERROR_NOT_READY);
        }
        for _ in 0..100 {
            assert_eq!(sys::cuStreamQuery(hung as sys::CUstream), CUresult::CUDA_ERROR_NOT_READY);
        }
        assert!(threads.iter().all(|thread| !thread.is_finished()));
        drop(emulator);
        let ends = threads.map(|thread| thread.join().unwrap());
        assert_eq!(ends[..2], [CUresult::CUDA_ERROR_LAUNCH_TIMEOUT; 2]);
    }
}

#[test]
fn a_fault_of_the_device_ends_its_hung_launches() {
    let emulator = cudaemu::test::start("CUDAEMU_HANG_AT=1\nCUDAEMU_FAULT_AT=2:ecc").unwrap();
    let _primary = PrimaryContext::new(0);
    let _end = EndHungLaunches(&emulator);
    // SAFETY: out parameters point to variables of their types; the kernel gets the parameters that it declares.
    unsafe {
        let (function, first, second) = (scale(), stream(), stream());
        let a = get(|a| sys::cuMemAlloc_v2(a, 4));
        ok(launch(function, 1, first, &[a, 3, 1]));
        while emulator.hung_launches() == 0 {
            assert_eq!(sys::cuStreamQuery(first), CUresult::CUDA_ERROR_NOT_READY);
        }
        ok(launch(function, 1, second, &[a, 3, 1]));
        assert_eq!(sys::cuCtxSynchronize(), CUresult::CUDA_ERROR_ECC_UNCORRECTABLE);
        assert_eq!(emulator.hung_launches(), 0);
    }
}

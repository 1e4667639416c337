//! Stream order: every order that CUDA allows occurs, and no other.

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use super::support::{PrimaryContext, get, get_function, handle, launch, load_kernels, ok};
use cudarc::driver::sys::{self, CUresult};

const NULL: sys::CUstream = std::ptr::null_mut();
const NON_BLOCKING: u32 = 1;

fn read_word(address: u64) -> u32 {
    let mut word = 0u32;
    // SAFETY: the variable has the size of the copy.
    ok(unsafe { sys::cuMemcpyDtoH_v2(std::ptr::from_mut(&mut word).cast(), address, 4) });
    word
}

/// The value that the second stream copies while kernels of the first stream multiply it by 2 and by 3: 1, 2 or 6. The seed
/// chooses the order. `flags` are those of the streams; 2 stands for the legacy default stream. `how` may order the streams
/// before the copy.
fn copied_value(seed: u32, flags: [u32; 2], how: impl Fn(sys::CUstream, sys::CUstream)) -> u32 {
    let _emulator = cudaemu::test::start(&format!("CUDAEMU_SEED={seed}")).unwrap();
    let _primary = PrimaryContext::new(0);
    // SAFETY: out parameters point to variables of their types; kernels get the parameters that they declare.
    unsafe {
        let module = load_kernels();
        let (scale, copy) = (get_function(module, "scale"), get_function(module, "copy"));
        let [first, second] = flags.map(|flags| match flags {
            2 => NULL,
            flags => handle(|s| sys::cuStreamCreate(s, flags)),
        });
        let a = get(|a| sys::cuMemAlloc_v2(a, 8));
        ok(sys::cuMemsetD32_v2(a, 1, 2));
        ok(sys::cuCtxSynchronize());
        for factor in [2, 3] {
            ok(launch(scale, 1, first, &[a, factor, 1]));
        }
        how(first, second);
        ok(launch(copy, 1, second, &[a + 4, a]));
        ok(sys::cuStreamSynchronize(second));
        ok(sys::cuCtxSynchronize());
        let seen = read_word(a + 4);
        ok(sys::cuMemFree_v2(a));
        ok(sys::cuModuleUnload(module));
        for stream in [first, second].into_iter().filter(|stream| !stream.is_null()) {
            ok(sys::cuStreamDestroy_v2(stream));
        }
        seen
    }
}

#[test]
fn a_missing_dependency_shows_and_an_event_orders_streams() {
    let (mut racy, mut ordered) = (BTreeSet::new(), BTreeSet::new());
    for seed in 0..40 {
        racy.insert(copied_value(seed, [NON_BLOCKING; 2], |_, _| {}));
        ordered.insert(copied_value(seed, [NON_BLOCKING; 2], |first, second| {
            // SAFETY: out parameters point to variables of their types.
            unsafe {
                let event = handle(|e| sys::cuEventCreate(e, 2));
                ok(sys::cuEventRecord(event, first));
                ok(sys::cuStreamWaitEvent(second, event, 0));
                // Destroying the event keeps the wait.
                ok(sys::cuEventDestroy_v2(event));
            }
        }));
    }
    assert_eq!(racy, BTreeSet::from([1, 2, 6]));
    assert_eq!(ordered, BTreeSet::from([6]));
}

#[test]
fn the_default_stream_orders_blocking_streams() {
    // 2 stands for the legacy default stream.
    for (flags, all) in [
        ([0, 0], vec![1, 2, 6]),
        ([0, 2], vec![6]),
        ([2, 0], vec![6]),
        ([2, 2], vec![6]),
        ([2, NON_BLOCKING], vec![1, 2, 6]),
        ([NON_BLOCKING, 2], vec![1, 2, 6]),
    ] {
        let found: BTreeSet<u32> = (0..40).map(|seed| copied_value(seed, flags, |_, _| {})).collect();
        assert_eq!(found, BTreeSet::from_iter(all), "{flags:?}");
    }
    let between: BTreeSet<u32> = (0..20)
        .map(|seed| {
            // SAFETY: the test created the stream.
            copied_value(seed, [0, NON_BLOCKING], |first, _| unsafe {
                ok(sys::cuStreamSynchronize(first));
            })
        })
        .collect();
    assert_eq!(between, BTreeSet::from([6]));
}

#[test]
fn pinned_memory_may_be_read_before_or_after_a_later_write() {
    let found: BTreeSet<u32> = (0..40)
        .map(|seed| {
            let _emulator = cudaemu::test::start(&format!("CUDAEMU_SEED={seed}")).unwrap();
            let _primary = PrimaryContext::new(0);
            // SAFETY: the pinned word is written while a copy may read it, which is tested; no other code reads it.
            unsafe {
                let pinned: *mut c_void = handle(|p| sys::cuMemHostAlloc(p, 4, 0));
                let a = get(|a| sys::cuMemAlloc_v2(a, 4));
                let stream = handle(|s| sys::cuStreamCreate(s, NON_BLOCKING));
                pinned.cast::<u32>().write_volatile(1);
                ok(sys::cuMemcpyHtoDAsync_v2(a, pinned, 4, stream));
                pinned.cast::<u32>().write_volatile(2);
                ok(sys::cuStreamSynchronize(stream));
                let found = read_word(a);
                ok(sys::cuMemFree_v2(a));
                ok(sys::cuMemFreeHost(pinned));
                ok(sys::cuStreamDestroy_v2(stream));
                found
            }
        })
        .collect();
    assert_eq!(found, BTreeSet::from([1, 2]));
}

#[test]
fn events_have_times_and_states() {
    let _emulator = cudaemu::test::start("").unwrap();
    let _primary = PrimaryContext::new(0);
    // SAFETY: out parameters point to variables of their types.
    unsafe {
        let [start, end, untimed] = [0, 0, 2].map(|flags| handle(|e| sys::cuEventCreate(e, flags)));
        let stream = handle(|s| sys::cuStreamCreate(s, NON_BLOCKING));
        ok(sys::cuEventQuery(start));
        ok(sys::cuEventSynchronize(start));
        let mut time = 0.0;
        assert_eq!(sys::cuEventElapsedTime(&mut time, start, end), CUresult::CUDA_ERROR_INVALID_HANDLE);
        for event in [start, end, untimed] {
            ok(sys::cuEventRecord(event, stream));
        }
        let mut asked = 0;
        while sys::cuEventQuery(untimed) == CUresult::CUDA_ERROR_NOT_READY {
            asked += 1;
            assert!(asked < 100);
        }
        ok(sys::cuEventElapsedTime(&mut time, start, end));
        assert!(time >= 0.0);
        assert_eq!(sys::cuEventElapsedTime(&mut time, start, untimed), CUresult::CUDA_ERROR_INVALID_HANDLE);
        ok(sys::cuStreamQuery(stream));
    }
}

static CALLS: AtomicU32 = AtomicU32::new(0);

extern "C" fn count(step: *mut c_void) {
    // A host callback must not call the driver.
    // SAFETY: it takes no arguments.
    let answer = unsafe { sys::cuCtxSynchronize() };
    assert_eq!(answer, CUresult::CUDA_ERROR_NOT_PERMITTED);
    CALLS.fetch_add(step as u32, Ordering::Relaxed);
}

extern "C" fn wait(receiver: *mut c_void) {
    // SAFETY: the test passes a boxed receiver.
    let receiver = unsafe { Box::from_raw(receiver.cast::<Receiver<()>>()) };
    assert_eq!(receiver.recv(), Ok(()));
}

#[test]
fn host_functions_run_in_stream_order_and_may_wait_for_the_program() {
    let _emulator = cudaemu::test::start("").unwrap();
    let _primary = PrimaryContext::new(0);
    // SAFETY: the callbacks receive pointers of the types that they expect.
    unsafe {
        let stream = handle(|s| sys::cuStreamCreate(s, NON_BLOCKING));
        let (go, receiver): (Sender<()>, _) = channel();
        let receiver = Box::into_raw(Box::new(receiver));
        ok(sys::cuLaunchHostFunc(stream, Some(wait), receiver.cast()));
        ok(sys::cuLaunchHostFunc(stream, Some(count), 10 as *mut c_void));
        assert_eq!(sys::cuStreamQuery(stream), CUresult::CUDA_ERROR_NOT_READY);
        assert_eq!(CALLS.load(Ordering::Relaxed), 0);
        go.send(()).unwrap();
        ok(sys::cuStreamSynchronize(stream));
        assert_eq!(CALLS.load(Ordering::Relaxed), 10);
    }
}

#[test]
fn a_stream_waits_for_a_value_in_memory() {
    let _emulator = cudaemu::test::start("").unwrap();
    let _primary = PrimaryContext::new(0);
    // SAFETY: out parameters point to variables of their types; the kernel gets the parameters that it declares.
    unsafe {
        let [first, second] = [0; 2].map(|_| handle(|s| sys::cuStreamCreate(s, NON_BLOCKING)));
        let a = get(|a| sys::cuMemAlloc_v2(a, 16));
        ok(sys::cuMemsetD32_v2(a, 0, 4));
        ok(sys::cuCtxSynchronize());
        let copy = get_function(load_kernels(), "copy");
        ok(sys::cuStreamWaitValue32_v2(second, a, 5, 0));
        ok(launch(copy, 1, second, &[a + 8, a + 4]));
        for _ in 0..10 {
            assert_eq!(sys::cuStreamQuery(second), CUresult::CUDA_ERROR_NOT_READY);
        }
        ok(sys::cuMemsetD32Async(a + 4, 77, 1, first));
        ok(sys::cuStreamWriteValue32_v2(first, a, 6, 0));
        ok(sys::cuStreamSynchronize(second));
        assert_eq!(read_word(a + 8), 77);
        assert_eq!(sys::cuStreamWaitValue32_v2(second, a + 2, 5, 0), CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(sys::cuStreamWriteValue32_v2(second, a + 16, 5, 0), CUresult::CUDA_ERROR_INVALID_VALUE);
    }
}

#[test]
fn threads_share_a_context() {
    let emulator = cudaemu::test::start("CUDAEMU_SEED=3").unwrap();
    let primary = PrimaryContext::new(0);
    let (context, scale) = (primary.context as usize, get_function(load_kernels(), "scale") as usize);
    let threads: Vec<_> = (0..4u32)
        .map(|thread| {
            std::thread::spawn(move || {
                // SAFETY: handles are numbers that may be used from any thread; the kernel gets the parameters that it
                // declares.
                unsafe {
                    ok(sys::cuCtxSetCurrent(context as sys::CUcontext));
                    // The thread's default stream.
                    let stream = 2 as sys::CUstream;
                    let a = get(|a| sys::cuMemAlloc_v2(a, 4));
                    ok(sys::cuMemsetD32Async(a, thread, 1, stream));
                    for _ in 0..10 {
                        ok(launch(scale as sys::CUfunction, 1, stream, &[a, 2, 1]));
                    }
                    ok(sys::cuStreamSynchronize(stream));
                    assert_eq!(read_word(a), thread << 10);
                    ok(sys::cuMemFree_v2(a));
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    drop(primary);
    assert_eq!(emulator.reports().len(), 1); // the leak of the module, which was not unloaded
}

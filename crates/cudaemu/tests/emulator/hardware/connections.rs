//! Streams that share hardware connections.

use super::{read_word, scale, stream};
use crate::driver::support::{PrimaryContext, get, handle, launch, ok};
use cudarc::driver::sys::{self, CUresult};

/// Streams of the current context: the first of them to use it, so that their connections are 0, 1, ….
fn streams<const N: usize>() -> [sys::CUstream; N] {
    [0; N].map(|_| stream())
}

/// A word of pinned memory that is 0.
fn pinned_word() -> *mut u32 {
    // SAFETY: the out parameter points to a variable of its type; the memory is new.
    unsafe {
        let word: *mut u32 = handle(|p| sys::cuMemHostAlloc(p, 4, 0)).cast();
        word.write_volatile(0);
        word
    }
}

#[test]
fn a_wait_before_its_signal_blocks_a_stream_of_the_same_connection_and_is_reported() {
    for (settings, which, ends) in [
        ("", 8, CUresult::CUDA_SUCCESS),
        ("CUDAEMU_CONNECTIONS=9", 8, CUresult::CUDA_SUCCESS),
        ("CUDAEMU_CONNECTIONS=8", 7, CUresult::CUDA_SUCCESS),
        ("CUDAEMU_CONNECTIONS=8", 8, CUresult::CUDA_ERROR_LAUNCH_TIMEOUT),
        ("CUDAEMU_CONNECTIONS=8\nCUDAEMU_KERNEL_US=1", 8, CUresult::CUDA_ERROR_LAUNCH_TIMEOUT),
    ] {
        for poll in [false, true] {
            let emulator = cudaemu::test::start(&format!("CUDAEMU_DEADLOCK_MS=5\n{settings}")).unwrap();
            let _primary = PrimaryContext::new(0);
            // SAFETY: out parameters point to variables of their types; the word is only read by the waiting stream.
            unsafe {
                let streams = streams::<9>();
                let word = pinned_word();
                let a = get(|a| sys::cuMemAlloc_v2(a, 4));
                ok(sys::cuStreamWaitValue32_v2(streams[0], word as u64, 1, 1));
                ok(sys::cuMemsetD32Async(a, 5, 1, streams[which]));
                let end = match poll {
                    false => sys::cuStreamSynchronize(streams[which]),
                    true => std::iter::repeat_with(|| sys::cuStreamQuery(streams[which]))
                        .find(|&result| result != CUresult::CUDA_ERROR_NOT_READY)
                        .unwrap(),
                };
                assert_eq!(end, ends, "{settings} {which} {poll}");
                if end == CUresult::CUDA_SUCCESS {
                    word.write_volatile(1);
                    ok(sys::cuStreamSynchronize(streams[0]));
                    assert_eq!(emulator.reports(), Vec::<String>::new());
                } else {
                    let reports = emulator.reports();
                    let [first, last] = [0, which].map(|stream| format!("stream {:#x}", streams[stream] as usize));
                    let expected =
                        format!("deadlock: {last} of device 0 cannot start behind {first} on hardware connection 0");
                    assert!(reports.len() == 1 && reports[0].starts_with(&expected), "{reports:?}");
                    assert!(reports[0].contains(&format!("a value at {:#x}", word as usize)), "{reports:?}");
                    assert_eq!(sys::cuCtxSynchronize(), CUresult::CUDA_ERROR_LAUNCH_TIMEOUT);
                }
            }
        }
    }
}

#[test]
fn another_thread_may_write_the_value_meanwhile() {
    let emulator = cudaemu::test::start("CUDAEMU_CONNECTIONS=1\nCUDAEMU_DEADLOCK_MS=600000").unwrap();
    let _primary = PrimaryContext::new(0);
    // SAFETY: out parameters point to variables of their types; the word is read by the waiting stream while it is written,
    // which is tested.
    unsafe {
        let [first, second] = streams();
        let word = pinned_word() as usize;
        let a = get(|a| sys::cuMemAlloc_v2(a, 4));
        ok(sys::cuStreamWaitValue32_v2(first, word as u64, 1, 1));
        ok(sys::cuMemsetD32Async(a, 5, 1, second));
        for _ in 0..20 {
            assert_eq!(sys::cuStreamQuery(second), CUresult::CUDA_ERROR_NOT_READY);
        }
        let writes = std::thread::spawn(move || (word as *mut u32).write_volatile(1));
        ok(sys::cuStreamSynchronize(second));
        writes.join().unwrap();
        assert_eq!(read_word(a), 5);
    }
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

#[test]
fn work_that_events_order_runs_on_any_number_of_connections() {
    for connections in 1..4 {
        for seed in 0..10 {
            let settings = format!("CUDAEMU_CONNECTIONS={connections}\nCUDAEMU_DEADLOCK_MS=1\nCUDAEMU_SEED={seed}");
            let emulator = cudaemu::test::start(&settings).unwrap();
            let _primary = PrimaryContext::new(0);
            // SAFETY: out parameters point to variables of their types; kernels get the parameters that they declare.
            unsafe {
                let (streams, function) = (streams::<5>(), scale());
                let event = handle(|e| sys::cuEventCreate(e, 2));
                let a = get(|a| sys::cuMemAlloc_v2(a, 4));
                ok(sys::cuMemsetD32_v2(a, 1, 1));
                ok(sys::cuCtxSynchronize());
                for turn in 0..10 {
                    ok(launch(function, 1, streams[turn % 5], &[a, 2, 1]));
                    ok(sys::cuEventRecord(event, streams[turn % 5]));
                    ok(sys::cuStreamWaitEvent(streams[(turn + 1) % 5], event, 0));
                }
                ok(sys::cuCtxSynchronize());
                assert_eq!(read_word(a), 1 << 10, "{connections} connections, seed {seed}");
            }
            assert!(!emulator.reports().iter().any(|report| report.contains("deadlock")), "{:?}", emulator.reports());
        }
    }
}

#[test]
fn a_deadlock_is_reported_to_a_program_that_waits_outside_of_the_driver() {
    use std::sync::mpsc::{Receiver, Sender, channel};
    extern "C" fn notify(sender: *mut std::ffi::c_void) {
        // SAFETY: the test passes this value, which outlives the driver.
        let _ = unsafe { &*sender.cast::<Sender<()>>() }.send(());
    }
    let (sender, receiver): (Sender<()>, Receiver<()>) = channel();
    let emulator = cudaemu::test::start("CUDAEMU_CONNECTIONS=1\nCUDAEMU_DEADLOCK_MS=5").unwrap();
    let _primary = PrimaryContext::new(0);
    // SAFETY: out parameters point to variables of their types; the function gets what it expects.
    unsafe {
        let [first, second] = streams();
        ok(sys::cuStreamWaitValue32_v2(first, pinned_word() as u64, 1, 1));
        ok(sys::cuLaunchHostFunc(second, Some(notify), std::ptr::from_ref(&sender).cast_mut().cast()));
        while emulator.reports().is_empty() {
            // Reading the reports counts as a call, after which the driver does nothing for a while.
            assert!(receiver.recv_timeout(std::time::Duration::from_millis(20)).is_err());
        }
        assert_eq!(sys::cuCtxSynchronize(), CUresult::CUDA_ERROR_LAUNCH_TIMEOUT);
    }
    assert!(receiver.try_recv().is_err(), "host functions are skipped after a fault");
}

//! Execution order: streams run in any order that CUDA allows, and queued operations run even if the program never waits for
//! them.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use super::support::{GraphExec, Kernels, add, address, context, emulator, graph, ok, read};
use cudarc::driver::sys;

/// Test timeout: only a failure waits this long.
const TIMEOUT: Duration = Duration::from_secs(30);

/// One stream computes and another stream adds up the results; the second one waits for an event of the first only if `waits`.
fn run_program(seed: u64, waits: bool) -> Vec<f32> {
    let emulator = emulator(&format!("CUDAEMU_SEED={seed}"));
    let result = {
        let context = context(0);
        let (compute, copy) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let kernels = Kernels::load(&context);
        let mut data = compute.clone_htod(&[0.0f32; 40]).unwrap();
        let mut out = copy.clone_htod(&[0.0f32; 40]).unwrap();
        context.synchronize().unwrap();
        for _ in 0..4 {
            add(&compute, &kernels, &mut data, 1.0);
            let done = compute.record_event(None).unwrap();
            if waits {
                copy.wait(&done).unwrap();
            }
            add(&copy, &kernels, &mut out, 0.5);
            kernels.sum(&copy, &mut out, &data);
            let copied = copy.record_event(None).unwrap();
            compute.wait(&copied).unwrap();
        }
        read(&copy, &out)
    };
    assert_eq!(emulator.reports(), Vec::<String>::new());
    result
}

#[test]
fn correct_programs_do_not_depend_on_the_seed_and_racy_ones_are_caught() {
    let right = [12.0; 40];
    let mut caught = 0;
    for seed in 0..100 {
        assert_eq!(run_program(seed, true), right, "seed {seed}");
        caught += u32::from(run_program(seed, false) != right);
    }
    assert!(caught >= 10, "the missing wait showed under {caught} seeds of 100");
}

extern "C" fn notify(sender: *mut c_void) {
    // SAFETY: the tests pass the address of a sender that outlives the callback.
    unsafe { &*sender.cast::<Sender<()>>() }.send(()).unwrap();
}

#[test]
fn queued_work_runs_without_synchronisation() {
    for seed in 0..4 {
        let emulator = emulator(&format!("CUDAEMU_SEED={seed}"));
        {
            let context = context(0);
            let stream = context.new_stream().unwrap();
            let kernels = Kernels::load(&context);
            let mut data = stream.clone_htod(&[1.0f32; 32]).unwrap();
            let (sender, notified) = channel::<()>();
            let mut pinned: *mut c_void = null_mut();
            for round in 0..3 {
                add(&stream, &kernels, &mut data, 1.0);
                // SAFETY: the sender lives until it has sent; 128 bytes of pinned memory are freed at the end.
                unsafe {
                    ok(sys::cuLaunchHostFunc(
                        stream.cu_stream(),
                        Some(notify),
                        std::ptr::from_ref(&sender).cast_mut().cast(),
                    ));
                    notified.recv_timeout(TIMEOUT).unwrap();
                    ok(sys::cuMemHostAlloc(&mut pinned, 128, 0));
                    pinned.cast::<f32>().write_volatile(0.0);
                    ok(sys::cuMemcpyDtoHAsync_v2(pinned, address(&data, &stream), 128, stream.cu_stream()));
                    let deadline = Instant::now() + TIMEOUT;
                    while pinned.cast::<f32>().read_volatile() == 0.0 {
                        assert!(Instant::now() < deadline, "the copy never ran");
                        std::thread::yield_now();
                    }
                    assert_eq!(pinned.cast::<f32>().read_volatile(), 2.0 + round as f32);
                    stream.synchronize().unwrap();
                    ok(sys::cuMemFreeHost(pinned));
                }
            }
        }
        assert_eq!(emulator.reports(), Vec::<String>::new());
    }
}

#[test]
fn polling_an_event_completes_it() {
    let emulator = emulator("CUDAEMU_SEED=3");
    {
        let context = context(0);
        let stream = context.new_stream().unwrap();
        let kernels = Kernels::load(&context);
        let mut data = stream.clone_htod(&[1.0f32; 32]).unwrap();
        for _ in 0..50 {
            add(&stream, &kernels, &mut data, 1.0);
        }
        let done = stream.record_event(None).unwrap();
        let asked = (0..1000).take_while(|_| !done.is_complete()).count();
        assert!(asked <= 53, "each query executes an operation, so 53 queries suffice, but there were {asked}");
        // SAFETY: a live stream.
        ok(unsafe { sys::cuStreamQuery(stream.cu_stream()) });
    }
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

#[test]
fn events_order_graphs_of_two_streams() {
    for seed in 0..20 {
        let emulator = emulator(&format!("CUDAEMU_SEED={seed}"));
        {
            let context = context(0);
            let (first, second) = (context.new_stream().unwrap(), context.new_stream().unwrap());
            let kernels = Kernels::load(&context);
            let data = first.clone_htod(&[1.0f32; 32]).unwrap();
            let out = first.clone_htod(&[0.0f32; 32]).unwrap();
            first.synchronize().unwrap();
            let [data_at, out_at] = [&data, &out].map(|buffer| address(buffer, &first));
            let [writes, reads] = [0; 2].map(|_| graph());
            kernels.add_node(writes, (data_at, 1.0, 32), &[]);
            kernels.sum_node(reads, (out_at, data_at, 32), &[]);
            let (writer, reader) = (GraphExec::new(writes), GraphExec::new(reads));
            let run = || {
                writer.launch(&first);
                second.wait(&first.record_event(None).unwrap()).unwrap();
                reader.launch(&second);
                first.wait(&second.record_event(None).unwrap()).unwrap();
            };
            run();
            assert_eq!(read(&second, &out), [2.0; 32], "seed {seed}");
            // Both graphs may be destroyed while their launches are queued.
            run();
            drop((writer, reader));
            assert_eq!(read(&second, &out), [5.0; 32], "seed {seed}");
        }
        assert_eq!(emulator.reports(), Vec::<String>::new());
    }
}
